"""The mover's memory: one block, given out in extents of whole pages.

Every extent belongs to one transfer and is in one state; free + held + receiving + quarantined = total at all times.

    receiving     a transfer runs that may write to it
    quarantined   that transfer failed, and its peer may still write to it
    held          a committed snapshot's; read-only from here on

An extent that is freed while readers have it stays held until the last of them is done. Thread-safe.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hurray_wire.errors import ArenaFull, DataPlaneUnavailable
from hurray_wire.image import align
from hurray_wire.limits import PAGE_BYTES

Bytes = npt.NDArray[np.uint8]

RETRY_AFTER_S: Final = 1.0
"""When a source that found the arena full may ask again, where nobody knows better."""

_PREFAULT_STEP_BYTES: Final = 32 << 20
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: touch pages for writing without changing what is in them."""


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


@dataclass(slots=True)
class _Extent:
    offset: int
    nbytes: int
    state: ExtentState = ExtentState.RECEIVING
    reader_count: int = 0
    doomed: bool = False


class Arena:
    """See the module. `owner` is the number of the transfer that an extent was reserved for."""

    def __init__(self, total_bytes: int, *, on_change: Callable[[], None] = lambda: None) -> None:
        """Raises DataPlaneUnavailable where the host does not have that much memory."""
        self.total_bytes: Final = align(total_bytes)
        self._on_change = on_change
        available = _available_bytes()
        if available is not None and self.total_bytes > available:
            raise DataPlaneUnavailable(
                "the arena is larger than the memory that is available",
                stage="start",
                field="arena.bytes",
                offered=self.total_bytes,
                required=f"<= {available}",
            )
        try:
            self._map = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DataPlaneUnavailable(
                f"no memory for the arena: {error.strerror}",
                stage="start",
                field="arena.bytes",
                offered=self.total_bytes,
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._lock = threading.Lock()
        self._extents: dict[int, _Extent] = {}
        self._free: list[tuple[int, int]] = [(0, self.total_bytes)]
        self._bytes = dict.fromkeys(ExtentState, 0)

    def prefault(self) -> bool:
        """Touch all of it, contents unchanged. False where the kernel does not (Linux before 5.14, memory is short)."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = self._memory.ctypes.data
        for offset in range(0, self.total_bytes, _PREFAULT_STEP_BYTES):
            size = min(_PREFAULT_STEP_BYTES, self.total_bytes - offset)
            # Through ctypes, which releases the GIL meanwhile; mmap.madvise does not.
            if libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return False
        return True

    def reserve(self, owner: int, nbytes: int) -> Bytes:
        """The first free extent that is large enough, receiving. Raises ArenaFull."""
        assert owner not in self._extents, owner
        size = max(PAGE_BYTES, align(nbytes))
        with self._lock:
            position = next((number for number, (_, free) in enumerate(self._free) if free >= size), None)
            if position is None:
                raise self._full(size)
            offset, free = self._free[position]
            if free == size:
                del self._free[position]
            else:
                self._free[position] = (offset + size, free - size)
            self._extents[owner] = _Extent(offset, size)
            self._bytes[ExtentState.RECEIVING] += size
        self._on_change()
        return self._memory[offset : offset + nbytes]

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
        self._on_change()

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
        offset, nbytes = extent.offset, extent.nbytes
        position = bisect_left(self._free, (offset, 0))
        if position < len(self._free) and self._free[position][0] == offset + nbytes:
            nbytes += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == offset:
            position -= 1
            before, size = self._free.pop(position)
            offset, nbytes = before, size + nbytes
        self._free.insert(position, (offset, nbytes))


class TransferMemory:
    """The arena as one receiving transfer sees it (`hurray_wire.payload.ImageMemory`)."""

    def __init__(self, arena: Arena, transfer: int) -> None:
        self._arena = arena
        self._transfer = transfer

    def reserve(self, nbytes: int) -> Bytes:
        """See ImageMemory."""
        return self._arena.reserve(self._transfer, nbytes)

    def settling(self) -> None:
        """See ImageMemory."""
        self._arena.quarantine(self._transfer)

    def release(self, *, keep: bool) -> None:
        """Nothing is left to do for a snapshot that is kept: it is held from the moment of its commit, and may even
        have been deleted since."""
        if not keep:
            self._arena.free(self._transfer)


def _available_bytes() -> int | None:
    """Memory that can be taken without swapping, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None
