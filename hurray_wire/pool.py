"""Memory that is used again: the first touch of fresh memory costs more than any copy into it.

A block is lent as an array, and comes back when the last array over it is gone, views of it included: whoever holds one
keeps the block. Its bytes stay this process's, but the system may take them away as soon as it comes back, should
memory become short.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .memfd import HUGE_PAGE_BYTES
from .memory import aligned_empty, map_huge

Bytes = npt.NDArray[np.uint8]

KEEP_BYTES: Final = 1 << 30
"""Memory that a pool keeps while nobody has it. More is given back to the system at once."""

_WASTE_MAX: Final = 2
"""A block is lent for what needs at least its size over this."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    mapping: mmap.mmap
    memory: Bytes

    def let_go(self) -> None:
        """The system may have the pages, as long as nothing is written to them."""
        if hasattr(mmap, "MADV_FREE"):
            with suppress(OSError):
                self.mapping.madvise(mmap.MADV_FREE)


class _Lease:
    """What the arrays over a lent block stand on."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class MemoryPool:
    """See the module. Thread-safe; a block may come back in any thread, wherever its last array goes."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._idle: list[_Block] = []
        self._returned: deque[_Block] = deque()

    @property
    def idle_bytes(self) -> int:
        """What nobody has now."""
        return sum(block.memory.nbytes for block in [*self._idle])

    def take(self, nbytes: int) -> Bytes:
        """uint8 [nbytes] at an address that is a multiple of 4096, holding whatever this process left there.

        Raises OSError where the system has no memory.
        """
        if nbytes < HUGE_PAGE_BYTES:
            return aligned_empty(nbytes)
        with self._lock:
            self._sort_in()
            fitting = [block for block in self._idle if nbytes <= block.memory.nbytes <= _WASTE_MAX * nbytes]
            # The least of them, and of equals the one that came back last.
            found = min(reversed(fitting), key=lambda block: block.memory.nbytes, default=None)
            if found is not None:
                self._idle.remove(found)
        self._settle()
        block = found or _Block(*map_huge(nbytes))
        lease = _Lease(block.memory.__array_interface__)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return np.asarray(lease)[:nbytes]

    def close(self) -> None:
        """Keep nothing, neither what is here nor what still comes back. Arrays stay what they are."""
        self._keep_bytes = 0
        with self._lock:
            self._sort_in()
        self._settle()

    def _give_back(self, block: _Block) -> None:
        block.let_go()
        self._returned.append(block)
        self._settle()

    def _settle(self) -> None:
        """Sort in what came back, unless somebody does: a block may come back in the midst of anything, even of this,
        so nobody waits for the lock here, and whoever lets go of it looks again."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        excess = sum(block.memory.nbytes for block in self._idle) - self._keep_bytes
        while excess > 0:
            excess -= self._idle.pop(0).memory.nbytes
