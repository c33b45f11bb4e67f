"""The mover's memory: grains in one range of addresses, given out in extents of whole pages.

Every extent belongs to one transfer and is in one state; free + held + receiving + quarantined = total at all times.

    receiving     a transfer runs that may write to it
    quarantined   that transfer failed, and its peer may still write to it
    held          a committed snapshot's; read-only from here on

An extent that is freed while readers have it stays held until the last of them is done.

A large extent has grains of its own, so that they can be shown to readers (`show`); small ones share grains. A grain
that was shown is known to that tenant for good, whatever became of the reader: until it is replaced by fresh memory it
takes that tenant's bytes only. A tenant is a number, which means nothing here.

Thread-safe.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hurray_server.grains import Grains, grain_bytes_for
from hurray_server.host_memory import available_memory
from hurray_wire.errors import ArenaFull, DataPlaneUnavailable
from hurray_wire.image import align
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.memory import HOST, Place

Bytes = npt.NDArray[np.uint8]

RETRY_AFTER_S: Final = 1.0
"""When a source that found the arena full may ask again, where nobody knows better."""

_WASTE_MAX: Final = 1 / 2
"""A snapshot that would leave more than this part of its own size unused has no grains of its own."""


class ExtentState(Enum):
    """See the module."""

    RECEIVING = "receiving"
    QUARANTINED = "quarantined"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the bytes are."""

    total_bytes: int
    free_bytes: int
    held_bytes: int
    receiving_bytes: int
    quarantined_bytes: int


@dataclass(frozen=True, slots=True)
class Showable:
    """What a reader may map: `nbytes` from the beginning of the first grain on. The descriptors are the arena's."""

    grains: tuple[int, ...]
    grain_bytes: int
    nbytes: int


@dataclass(slots=True)
class _Extent:
    offset: int
    nbytes: int
    used_bytes: int
    """How much of it was asked for."""
    tenant: int
    own_grains: bool
    is_shown: bool = False
    state: ExtentState = ExtentState.RECEIVING
    reader_count: int = 0
    doomed: bool = False


class Arena:
    """See the module. `owner` is the number of the transfer that an extent was reserved for."""

    def __init__(
        self,
        total_bytes: int,
        *,
        place: Place = HOST,
        grain_bytes: int | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called at every change but `reserve` and `hold`, of which the caller knows. Raises
        DataPlaneUnavailable where the place does not have that much memory."""
        self.total_bytes: Final = align(total_bytes)
        self._on_change = on_change
        self._grains = _grains(self.total_bytes, grain_bytes) if place is HOST else _OnePiece(self.total_bytes, place)
        self.grain_bytes: Final = self._grains.grain_bytes
        self._memory: Bytes = self._grains.memory
        self._lock = threading.Lock()
        self._extents: dict[int, _Extent] = {}
        self._free: list[tuple[int, int]] = [(0, self.total_bytes)]
        self._bytes = dict.fromkeys(ExtentState, 0)
        self._shown: dict[int, set[int]] = {}
        """Numbers of the grains that were shown to a tenant."""
        self._in_use: Counter[int] = Counter()
        """Bytes of each grain that are in extents."""
        self._written: dict[int, int] = {}
        """Where in each grain the bytes end that may be anything but zero."""

    @property
    def shows(self) -> bool:
        """Whether this system lets memory be shown at all."""
        return bool(self._grains.descriptors)

    def prefault(self) -> bool:
        """Touch all of it, contents unchanged. False where the kernel does not (Linux before 5.14, memory is short)."""
        return self._grains.populate()

    def reserve(self, owner: int, nbytes: int, tenant: int = 0) -> Bytes:
        """The first free extent that is large enough and that nobody else has seen, receiving. Raises ArenaFull."""
        assert owner not in self._extents, owner
        size = max(PAGE_BYTES, align(nbytes))
        with self._lock:
            placed = self._place(size, tenant)
            if placed is None:
                raise self._full(size)
            offset, taken = placed
            extent = _Extent(offset, taken, nbytes, tenant, own_grains=self._is_own(offset, taken))
            strange = self._shown_to_others(tenant).intersection(self._grains_of(extent))
            self._take(extent)
            self._extents[owner] = extent
        try:
            for grain in strange:
                self._replace(grain)
        except OSError as error:
            self.free(owner)
            raise ArenaFull(
                f"no fresh memory for the snapshot: {error.strerror}", retry_after_s=RETRY_AFTER_S, offered=size
            ) from None
        return self._memory[offset : offset + nbytes]

    def _replace(self, grain: int) -> None:
        """Of an extent that is only about to be used: its memory may take its time, outside the lock."""
        self._grains.replace(grain)
        with self._lock:
            for seen in self._shown.values():
                seen.discard(grain)

    def can_show(self, owner: int) -> bool:
        """Whether an extent has grains of its own."""
        with self._lock:
            extent = self._extents.get(owner)
            return extent is not None and extent.own_grains

    def show(self, owner: int) -> Showable | None:
        """The grains of a pinned snapshot, known to its tenant from now on; None if they are not its own."""
        with self._lock:
            extent = self._extents[owner]
            assert extent.reader_count > 0, extent
            if not extent.own_grains:
                return None
            grains = self._grains_of(extent)
            if not extent.is_shown:
                extent.is_shown = True
                self._clear_tail(extent)
                self._shown.setdefault(extent.tenant, set()).update(grains)
            descriptors = tuple(self._grains.descriptors[grain] for grain in grains)
            return Showable(descriptors, self.grain_bytes, align(extent.used_bytes))

    def quarantine(self, owner: int) -> None:
        """The transfer failed; its peer may still write. Nothing happens for one that has no extent."""
        with self._lock:
            extent = self._extents.get(owner)
            if extent is None:
                return
            self._move(extent, ExtentState.QUARANTINED)
        self._on_change()

    def hold(self, owner: int) -> None:
        """The transfer is committed: its extent is a snapshot's."""
        with self._lock:
            extent = self._extents[owner]
            assert extent.state is ExtentState.RECEIVING, extent
            self._move(extent, ExtentState.HELD)

    def free(self, owner: int) -> None:
        """Give the extent back, as soon as it has no reader. Nothing happens for one that does not exist."""
        with self._lock:
            extent = self._extents.get(owner)
            if extent is None:
                return
            extent.doomed = True
            self._settle(owner, extent)
        self._on_change()

    def pin(self, owner: int) -> Bytes | None:
        """The bytes of a held snapshot, until `unpin`. None where it does not exist."""
        with self._lock:
            extent = self._extents.get(owner)
            if extent is None or extent.state is not ExtentState.HELD or extent.doomed:
                return None
            extent.reader_count += 1
            return self._memory[extent.offset : extent.offset + extent.nbytes]

    def unpin(self, owner: int) -> None:
        """A reader is done."""
        with self._lock:
            extent = self._extents[owner]
            assert extent.reader_count > 0, extent
            extent.reader_count -= 1
            self._settle(owner, extent)
        self._on_change()

    def usage(self) -> Usage:
        """Where the bytes are now."""
        with self._lock:
            return Usage(
                total_bytes=self.total_bytes,
                free_bytes=sum(nbytes for _, nbytes in self._free),
                held_bytes=self._bytes[ExtentState.HELD],
                receiving_bytes=self._bytes[ExtentState.RECEIVING],
                quarantined_bytes=self._bytes[ExtentState.QUARANTINED],
            )

    def _full(self, size: int) -> ArenaFull:
        free = sum(nbytes for _, nbytes in self._free)
        return ArenaFull(
            "no free memory for the snapshot",
            retry_after_s=RETRY_AFTER_S if size <= self.total_bytes else None,
            offered=size,
            free=free,
            largest=max((nbytes for _, nbytes in self._free), default=0),
            total=self.total_bytes,
        )

    def _move(self, extent: _Extent, state: ExtentState) -> None:
        self._bytes[extent.state] -= extent.nbytes
        self._bytes[state] += extent.nbytes
        extent.state = state

    def _settle(self, owner: int, extent: _Extent) -> None:
        """Free it if nobody wants it, joined with its free neighbours."""
        if not extent.doomed or extent.reader_count:
            return
        del self._extents[owner]
        self._bytes[extent.state] -= extent.nbytes
        self._count_in_use(extent.offset, -extent.nbytes)
        offset, nbytes = extent.offset, extent.nbytes
        position = bisect_left(self._free, (offset, 0))
        if position < len(self._free) and self._free[position][0] == offset + nbytes:
            nbytes += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == offset:
            position -= 1
            before, size = self._free.pop(position)
            offset, nbytes = before, size + nbytes
        self._free.insert(position, (offset, nbytes))

    # --- places ---------------------------------------------------------------------------------------------------

    def _place(self, size: int, tenant: int) -> tuple[int, int] | None:
        """Offset and size of the extent for `size` bytes: in grains of its own where that is worth it, from the end;
        else from the beginning. Without replacing a grain where that can be."""
        grain = self.grain_bytes
        whole = -(-size // grain) * grain
        if self.shows and whole - size <= size * _WASTE_MAX:
            for replacing in (False, True):
                for start, end in reversed(list(self._runs(tenant, replacing=replacing))):
                    offset = (end - whole) // grain * grain
                    if offset >= start:
                        return offset, whole
        for replacing in (False, True):
            for start, end in self._runs(tenant, replacing=replacing):
                if end - start >= size:
                    return start, size
        return None

    def _runs(self, tenant: int, *, replacing: bool) -> Iterator[tuple[int, int]]:
        """Free ranges that this tenant's bytes may go to, in order. `replacing`: grains that others have seen count,
        too, where nothing else is in them."""
        shown = self._shown_to_others(tenant)
        barred = sorted(grain for grain in shown if self._in_use[grain] or not replacing)
        for offset, nbytes in self._free:
            start, end = offset, offset + nbytes
            for grain in barred[bisect_left(barred, start // self.grain_bytes) :]:
                if grain * self.grain_bytes >= end:
                    break
                if grain * self.grain_bytes > start:
                    yield start, grain * self.grain_bytes
                start = (grain + 1) * self.grain_bytes
            if start < end:
                yield start, end

    def _shown_to_others(self, tenant: int) -> set[int]:
        return set().union(*(seen for to, seen in self._shown.items() if to != tenant))

    def _is_own(self, offset: int, nbytes: int) -> bool:
        """Whether an extent is made of whole grains."""
        whole = offset % self.grain_bytes == nbytes % self.grain_bytes == 0
        return whole and self.shows

    def _grains_of(self, extent: _Extent) -> range:
        return range(extent.offset // self.grain_bytes, -(-(extent.offset + extent.nbytes) // self.grain_bytes))

    def _take(self, extent: _Extent) -> None:
        """Out of the free ranges."""
        end = extent.offset + extent.nbytes
        position = bisect_left(self._free, (extent.offset + 1, 0)) - 1
        start, nbytes = self._free.pop(position)
        left = [(start, extent.offset - start), (end, start + nbytes - end)]
        self._free[position:position] = [piece for piece in left if piece[1]]
        self._bytes[ExtentState.RECEIVING] += extent.nbytes
        self._count_in_use(extent.offset, extent.nbytes)
        written = extent.offset + extent.used_bytes
        for grain in self._grains_of(extent):
            end = min(written - grain * self.grain_bytes, self.grain_bytes)
            self._written[grain] = max(self._written.get(grain, 0), end)

    def _clear_tail(self, extent: _Extent) -> None:
        """Of an extent of whole grains: what others have left behind it in the last one."""
        *_, last = self._grains_of(extent)
        start = last * self.grain_bytes
        used = extent.offset + extent.used_bytes - start
        self._memory[start + used : start + max(used, self._written[last])] = 0
        self._written[last] = used

    def _count_in_use(self, offset: int, nbytes: int) -> None:
        sign, end = (1 if nbytes > 0 else -1), offset + abs(nbytes)
        while offset < end:
            step = min(end, (offset // self.grain_bytes + 1) * self.grain_bytes) - offset
            self._in_use[offset // self.grain_bytes] += sign * step
            offset += step


class _OnePiece:
    """Memory of a place that nobody can be shown, as grains: one for all of it."""

    def __init__(self, total_bytes: int, place: Place) -> None:
        self.descriptors: list[int] = []
        self.grain_bytes = total_bytes
        try:
            self.memory = place.take(total_bytes)
        except MemoryError as error:
            raise DataPlaneUnavailable(
                f"no memory for the arena: {error}", stage="start", field="arena.bytes", offered=total_bytes
            ) from None

    def populate(self) -> bool:
        """It is there."""
        return True

    def replace(self, number: int) -> None:
        """Nobody has seen anything of it."""
        raise AssertionError(f"grain {number} was never shown")


def _grains(total_bytes: int, grain_bytes: int | None) -> Grains:
    """The host's memory for an arena. Raises DataPlaneUnavailable."""
    available = available_memory()
    if available is not None and total_bytes > available.nbytes:
        raise DataPlaneUnavailable(
            f"the arena is larger than the memory that is available, by {available.limited_by}",
            stage="start",
            field="arena.bytes",
            offered=total_bytes,
            required=f"<= {available.nbytes}",
        )
    try:
        grains = Grains(total_bytes, grain_bytes or grain_bytes_for(total_bytes))
    except OSError as error:
        raise DataPlaneUnavailable(
            f"no memory for the arena: {error.strerror}", stage="start", field="arena.bytes", offered=total_bytes
        ) from None
    if _commits_strictly() and not grains.populate():
        # Touched later, memory that the host has promised to others would be a SIGBUS.
        raise DataPlaneUnavailable(
            "the host does not commit so much memory", stage="start", field="arena.bytes", offered=total_bytes
        )
    return grains


class TransferMemory:
    """The arena as one receiving transfer of a tenant sees it (`hurray_wire.target_payloads.ImageMemory`)."""

    def __init__(self, arena: Arena, transfer: int, tenant: int = 0) -> None:
        self._arena = arena
        self._transfer = transfer
        self._tenant = tenant

    def reserve(self, nbytes: int) -> Bytes:
        """See ImageMemory."""
        return self._arena.reserve(self._transfer, nbytes, self._tenant)

    def settling(self) -> None:
        """See ImageMemory."""
        self._arena.quarantine(self._transfer)

    def release(self, *, keep: bool) -> None:
        """Nothing is left to do for a snapshot that is kept: it is held from the moment of its commit, and may even
        have been deleted since."""
        if not keep:
            self._arena.free(self._transfer)


def _commits_strictly() -> bool:
    """Whether the host lets nobody have memory that it may not be able to give (vm.overcommit_memory = 2)."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False
