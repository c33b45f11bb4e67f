"""A hurrayd of the benchmark's own, held by a worker: it ends with that, however the benchmark ends."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Final

from hurray_client.bench.processes import BenchError, children, usage
from hurray_client.bench.workloads import MIB

TRANSPORTS: Final = ("shm", "tcp", "ucx")

_START_S: Final = 60.0
_STOP_S: Final = 5.0
_PREFAULT_POLL_S: Final = 0.2
_STILL_MOST: Final = 10


def shm_path(folder: str) -> str:
    """Where nodes and engines of a run find each other."""
    return f"{folder}/shm.sock"


class Node:
    """See worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: str, arena_bytes: int) -> dict[str, Any]:
        """Start hurrayd on free ports, its log in `folder`, and wait until it is ready and its arena in memory.

        Its address, and the pids of control process and mover. Raises BenchError with the log.
        """
        config, log = Path(folder, "hurrayd.toml"), Path(folder, "hurrayd.log")
        config.write_text(
            f'node = "bench"\ntransports = {json.dumps(TRANSPORTS)}\n'
            f'[shm]\npath = {json.dumps(shm_path(folder))}\n[tcp]\nlisten = "127.0.0.1:0"\n'
        )
        command = [_hurrayd(), "--config", str(config), "--listen", "127.0.0.1:0", "--arena", str(arena_bytes)]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=sink)  # noqa: S603 -- our own
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _START_S)
        ready = self._process.stdout.readline().decode() if readable else ""
        found = re.match(r"hurrayd ready: address=(\S+)", ready)
        if found is None:
            raise BenchError(f"hurrayd did not start: {ready}\n{log.read_text()}")
        pids = [self._process.pid, *children(self._process.pid)]
        _await_prefault(pids, arena_bytes)
        return {"address": found[1], "pids": pids}

    def close(self) -> None:
        """Stop it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _await_prefault(pids: list[int], arena_bytes: int) -> None:
    """Until the arena is in memory and no more comes, or nothing has come for a while."""
    until, seen, still = time.monotonic() + _START_S, 0, 0
    while time.monotonic() < until:
        now = usage(pids).rss_bytes
        still = still + 1 if now < seen + MIB else 0
        if still >= _STILL_MOST or (still and now >= arena_bytes):
            return
        seen = now
        time.sleep(_PREFAULT_POLL_S)


def _hurrayd() -> str:
    beside = Path(sys.executable).with_name("hurrayd")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("hurrayd")
    if found is None:
        raise BenchError("there is no command hurrayd in this environment")
    return found
