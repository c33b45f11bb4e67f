"""Who has a snapshot mapped: of each view that was given out, the pin that keeps the snapshot's memory.

A transfer and the reader that it gave a view to hold one pin together, until the last of them is done: a reader mostly
is later, but may be sooner.
"""

from __future__ import annotations

from hurray_server.store import Pin, Store


class Readers:
    """See the module. By the number of the transfer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pins: dict[int, Pin] = {}
        self._transferring: set[int] = set()
        self._reading: set[int] = set()

    def __len__(self) -> int:
        """Views that are out."""
        return len(self._reading)

    def begin(self, transfer: int, pin: Pin) -> None:
        """A transfer begins that gives a view out."""
        self._pins[transfer] = pin
        self._transferring.add(transfer)
        self._reading.add(transfer)

    def transferred(self, transfer: int) -> None:
        """The transfer is over, well or not: who has been given a view may have it all the same."""
        self._transferring.discard(transfer)
        self._release(transfer)

    def gone(self, transfer: int) -> None:
        """The reader has let go. Nothing happens for one that is not known."""
        self._reading.discard(transfer)
        self._release(transfer)

    def lose_all(self) -> None:
        """The mover is down, and watches nobody any more."""
        for transfer in list(self._reading):
            self.gone(transfer)

    def _release(self, transfer: int) -> None:
        if transfer in self._pins and transfer not in self._transferring and transfer not in self._reading:
            self._store.unpin(self._pins.pop(transfer))
