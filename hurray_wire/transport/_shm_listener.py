"""A listening Unix socket at a path, which replaces what a killed process left there and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hurray_wire.errors import DataPlaneUnavailable

_BACKLOG: Final = 1024

_LOCK_WAIT_S: Final = 1.0
"""Far longer than anyone who means well holds it."""

_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Listens at `path` until closed. Raises DataPlaneUnavailable where it cannot, or where someone else does."""

    def __init__(self, path: str, mode: int, group: str | None) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            with _directory_locked(path):
                _remove_stale(path)
                self._socket.bind(path)
                _permit(path, mode, group)  # nobody connects before listen
                self._socket.listen(_BACKLOG)
                self._bound = _identity(path)
        except (OSError, LookupError) as error:  # LookupError: there is no such group
            self._socket.close()
            raise DataPlaneUnavailable(f"cannot listen at {path}: {error}", stage="start") from error
        except BaseException:
            self._socket.close()
            raise
        self._spare = os.dup(self._socket.fileno())

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection, if there is one; one for which this process has no descriptor left is turned away."""
        try:
            return self._socket.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._turn_away()
            return None

    def close(self) -> None:
        """Stop, and remove the path if it is still this socket's."""
        with suppress(OSError), _directory_locked(self._path):
            if _identity(self._path) == self._bound:
                os.unlink(self._path)
        self._socket.close()
        os.close(self._spare)

    def _turn_away(self) -> None:
        """Left waiting, a connection would keep the socket readable, and its owner awake."""
        os.close(self._spare)
        with suppress(OSError):
            self._socket.accept()[0].close()
        self._spare = os.dup(self._socket.fileno())


@contextmanager
def _directory_locked(path: str) -> Iterator[None]:
    """Keeps two processes from replacing each other's socket at once. Leaves no name behind."""
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(directory)


def _permit(path: str, mode: int, group: str | None) -> None:
    try:
        if group is not None:
            shutil.chown(path, group=int(group) if group.isdecimal() else group)
        os.chmod(path, mode)
    except BaseException:
        os.unlink(path)
        raise


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise DataPlaneUnavailable(f"{path} is there and is not a socket", stage="start")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise DataPlaneUnavailable(f"{path} is in use: {error}", stage="start") from error
    raise DataPlaneUnavailable(f"another process listens at {path}", stage="start")
