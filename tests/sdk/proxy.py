"""A TCP forwarder that can swallow what a node answers, and cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards to `target` ("host:port"). While `mute` is set, nothing comes back from there."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.mute = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def cut(self) -> None:
        """Close all connections; new ones are taken."""
        while self._open:
            part = self._open.pop()
            with suppress(OSError):
                part.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for source, target, back in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(target=self._forward, args=(source, target, back), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with suppress(OSError), source:
            while data := source.recv(65536):
                if not (back and self.mute.is_set()):
                    target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
