"""The mover's ends of the pins that readers hold: each is watched until the other end is closed everywhere."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable


class Pins:
    """See the module. Has a thread of its own, which ends with the process."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._held: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        threading.Thread(target=self._run, name="hurray-pins", daemon=True).start()

    def __len__(self) -> int:
        return len(self._held)

    def give(self, on_gone: Callable[[], None]) -> socket.socket:
        """The end for a reader. `on_gone` is called, in the thread of the pins, when no process has it open any more.

        Raises OSError where no descriptor is left.
        """
        ours, theirs = socket.socketpair()
        ours.shutdown(socket.SHUT_RD)  # nobody waits for what a reader might write
        try:
            self._poll.register(ours, 0)  # of its end one is told without asking
        except OSError:
            ours.close()
            theirs.close()
            raise
        self._held[ours.fileno()] = ours, on_gone
        return theirs

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                ours, on_gone = self._held.pop(descriptor)
                self._poll.unregister(ours)
                ours.close()
                on_gone()
