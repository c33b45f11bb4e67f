"""A ring: memory of one sender towards one peer, lent out range by range until the peer has taken what is there.

Not a ring in the strict sense. Ranges come back in any order, and the lowest free one is lent first (the highest, for
pieces of messages that are not staged): so the same few megabytes are used again and again, stay in the processor's
cache, and what is free stays in one piece.
"""

from __future__ import annotations

from hurray_wire import memfd
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.transport.base import Buffer


class Ranges:
    """Which ranges of `nbytes` are free. All ranges begin at multiples of 4096 and take whole pages."""

    def __init__(self, nbytes: int) -> None:
        assert nbytes % PAGE_BYTES == 0
        self._free = [(0, nbytes)]
        self._lent: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Offset of the lowest free range of at least `nbytes`, lent from now on; None if there is none."""
        needed = round_up(nbytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= needed:
                self._free[index : index + 1] = [(start + needed, end)] if start + needed < end else []
                self._lent[start] = needed
                return start
        return None

    def take_piece(self, nbytes: int) -> tuple[int, int] | None:
        """(offset, size) of the highest free range that takes all of `nbytes` or, failing that, of the longest; lent
        from now on. None: nothing is free."""
        if not self._free:
            return None
        needed = round_up(nbytes)
        lengths = [end - start for start, end in self._free]
        index = max(range(len(lengths)), key=lambda at: (min(lengths[at], needed), at))
        start, end = self._free[index]
        taken = max(start, end - needed)
        self._free[index : index + 1] = [(start, taken)] if start < taken else []
        self._lent[taken] = end - taken
        return taken, min(nbytes, end - taken)

    def give_back(self, offset: int) -> None:
        """The lent range that begins here is free again."""
        end = offset + self._lent.pop(offset)
        at = 0
        while at < len(self._free) and self._free[at][0] < offset:
            at += 1
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == offset:
            at -= 1
            offset = self._free.pop(at)[0]
        self._free.insert(at, (offset, end))


class Ring:
    """Memory and its ranges. `descriptor` is handed to the peer, then closed."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor, self.memory = memfd.create("hurray-ring", nbytes)
        self.ranges = Ranges(nbytes)
        self._address = self.memory.ctypes.data

    def offset_of(self, buffer: Buffer) -> int | None:
        """Where in the ring a buffer begins; None if it is elsewhere."""
        offset: int = buffer.__array_interface__["data"][0] - self._address
        return offset if 0 <= offset < self.memory.nbytes else None


def round_up(nbytes: int) -> int:
    """`nbytes` in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
