"""A ring: memory of one sender towards one peer, lent out range by range until the peer has taken what is there.

Ranges are lent one behind the other and come back in any order. Little of it is lent at a time; how much is used before
it begins anew is its *reach*.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hurray_wire import memfd
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.transport.base import Buffer

_SAMPLE_MIN_BYTES: Final = 1 << 20
_SAMPLE_COUNT: Final = 4
_TRIAL_EVERY_BYTES: Final = 1 << 30
_GAIN: Final = 0.95


class Reach:
    """How much of a ring is used before it begins anew: little, which stays in the processor's cache, or all, by whose
    end the peer's core has lost what it read at the beginning.

    Little is faster where the two cores share a cache. Where they do not, writing what the other has just read is
    several times slower than writing memory. Where they run is not ours to say and may change, so what staging costs
    is compared from time to time; a gibibyte apart, a trial costs next to nothing even where it is slow.
    """

    def __init__(self, short_bytes: int, long_bytes: int) -> None:
        self.nbytes = short_bytes
        self._other_bytes = long_bytes
        self._short_bytes = short_bytes
        self._costs: deque[float] = deque(maxlen=_SAMPLE_COUNT)
        self._known_cost: float | None = None
        """The other's, while this one is on trial."""
        self._used_bytes = 0
        self._next_trial_bytes = 0

    def note(self, nbytes: int, seconds: float) -> None:
        """Staging a message of `nbytes` took so long."""
        if nbytes < _SAMPLE_MIN_BYTES:
            return
        self._used_bytes += nbytes
        if self._known_cost is not None and self._used_bytes <= self._short_bytes:
            return  # the first time around tells nothing of the next
        self._costs.append(seconds / nbytes)
        if len(self._costs) < _SAMPLE_COUNT:
            return
        if self._known_cost is None:
            if self._used_bytes >= self._next_trial_bytes:
                self._turn(min(self._costs))
            return
        self._next_trial_bytes = _TRIAL_EVERY_BYTES
        if min(self._costs) > self._known_cost * _GAIN:
            self._turn(None)
        else:
            self._known_cost, self._used_bytes = None, 0

    def _turn(self, known_cost: float | None) -> None:
        self.nbytes, self._other_bytes = self._other_bytes, self.nbytes
        self._known_cost = known_cost
        self._used_bytes = 0
        self._costs.clear()


class Ranges:
    """Which ranges of `nbytes` are free, of which no more than `lent_max_bytes` are lent at a time, and none from
    `reach_bytes` on. All ranges begin at multiples of 4096 and take whole pages."""

    def __init__(self, nbytes: int, lent_max_bytes: int) -> None:
        assert nbytes % PAGE_BYTES == 0
        self.reach_bytes = nbytes
        self._free = [(0, nbytes)]
        self._lent: dict[int, int] = {}
        self._lendable_bytes = lent_max_bytes
        self._next = 0

    def take(self, nbytes: int) -> int | None:
        """Offset of the next free range of at least `nbytes`, lent from now on; None if there is none."""
        needed = round_up(nbytes)
        if needed > self._lendable_bytes:
            return None
        for start, end in self._candidates():
            if end - start >= needed:
                return self._lend(start, needed)
        return None

    def take_piece(self, nbytes: int) -> tuple[int, int] | None:
        """(offset, size) of the next free range that takes all of `nbytes` or, failing that, of the longest; lent
        from now on. None: nothing is free."""
        needed, candidates = min(round_up(nbytes), self._lendable_bytes), self._candidates()
        if not needed or not candidates:
            return None
        start, end = max(candidates, key=lambda found: min(found[1] - found[0], needed))
        size = min(end - start, needed)
        return self._lend(start, size), min(nbytes, size)

    def give_back(self, offset: int) -> None:
        """The lent range that begins here is free again."""
        nbytes = self._lent.pop(offset)
        self._lendable_bytes += nbytes
        end = offset + nbytes
        at = 0
        while at < len(self._free) and self._free[at][0] < offset:
            at += 1
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == offset:
            at -= 1
            offset = self._free.pop(at)[0]
        self._free.insert(at, (offset, end))

    def _candidates(self) -> list[tuple[int, int]]:
        """Free (start, end) in the order in which they are to be lent: from the end of the last one on, then around."""
        free = [(start, min(end, self.reach_bytes)) for start, end in self._free if start < self.reach_bytes]
        ahead = [(max(start, self._next), end) for start, end in free if end > self._next]
        return ahead + [(start, end) for start, end in free if start < self._next]

    def _lend(self, start: int, nbytes: int) -> int:
        at = next(at for at, (_, end) in enumerate(self._free) if start < end)
        rest = [(self._free[at][0], start), (start + nbytes, self._free[at][1])]
        self._free[at : at + 1] = [(start, end) for start, end in rest if start < end]
        self._lent[start] = nbytes
        self._lendable_bytes -= nbytes
        self._next = start + nbytes
        return start


class Ring:
    """Memory and its ranges. `descriptor` is handed to the peer, then closed."""

    def __init__(self, nbytes: int, lent_max_bytes: int) -> None:
        self.descriptor, self.memory = memfd.create("hurray-ring", nbytes)
        self.ranges = Ranges(nbytes, lent_max_bytes)
        self._reach = Reach(lent_max_bytes, nbytes)
        self.ranges.reach_bytes = self._reach.nbytes
        self._address = self.memory.ctypes.data

    def note_staged(self, nbytes: int, seconds: float) -> None:
        """A message, or a piece of one, was written here in so much time."""
        self._reach.note(nbytes, seconds)
        self.ranges.reach_bytes = self._reach.nbytes

    def offset_of(self, buffer: Buffer) -> int | None:
        """Where in the ring a buffer begins; None if it is elsewhere."""
        offset: int = buffer.__array_interface__["data"][0] - self._address
        return offset if 0 <= offset < self.memory.nbytes else None


def round_up(nbytes: int) -> int:
    """`nbytes` in whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
