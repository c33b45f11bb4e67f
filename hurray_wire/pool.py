"""Memory that is used again: the first touch of fresh memory costs more than any copy into it.

A block is lent as an array, and comes back when the last array over it is gone, views of it included: whoever holds one
keeps the block. Its bytes stay this process's, but the system may take them away as soon as it comes back, should
memory become short.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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


class Block(ABC):
    """Memory that a pool lends as a whole."""

    nbytes: int

    @abstractmethod
    def lend(self, give_back: Callable[[], None]) -> Any:
        """uint8 [nbytes] over it; `give_back` is called when the last array over that is gone."""

    def let_go(self) -> None:  # noqa: B027 -- for memory that can be taken back
        """Nobody needs what is in it."""


class _HostBlock(Block):
    def __init__(self, nbytes: int) -> None:
        self._mapping, self._memory = map_huge(nbytes)
        self.nbytes = nbytes

    def lend(self, give_back: Callable[[], None]) -> Bytes:
        """See Block."""
        lease = _Lease(self._memory.__array_interface__)
        weakref.finalize(lease, give_back).atexit = False
        return np.asarray(lease)

    def let_go(self) -> None:
        """The system may have the pages, as long as nothing is written to them."""
        if hasattr(mmap, "MADV_FREE"):
            with suppress(OSError):
                self._mapping.madvise(mmap.MADV_FREE)


class _Lease:
    """What the arrays over a lent block stand on."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class MemoryPool:
    """See the module. Thread-safe; a block may come back in any thread, wherever its last array goes."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, *, block: Callable[[int], Block] = _HostBlock) -> None:
        """`block` makes one of so many bytes. Raises OSError or MemoryError where the system has none."""
        self._keep_bytes = keep_bytes
        self._make = block
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        self._returned: deque[Block] = deque()

    @property
    def idle_bytes(self) -> int:
        """What nobody has now."""
        return sum(block.nbytes for block in [*self._idle])

    def take(self, nbytes: int) -> Any:
        """uint8 [nbytes] at an address that is a multiple of 4096, holding whatever this process left there.

        Raises OSError or MemoryError where the system has no memory.
        """
        if nbytes < HUGE_PAGE_BYTES and self._make is _HostBlock:
            return aligned_empty(nbytes)
        with self._lock:
            self._sort_in()
            fitting = [block for block in self._idle if nbytes <= block.nbytes <= _WASTE_MAX * nbytes]
            # The least of them, and of equals the one that came back last.
            found = min(reversed(fitting), key=lambda block: block.nbytes, default=None)
            if found is not None:
                self._idle.remove(found)
        self._settle()
        block = found or self._make(nbytes)
        return block.lend(partial(self._give_back, block))[:nbytes]

    def close(self) -> None:
        """Keep nothing, neither what is here nor what still comes back. Arrays stay what they are."""
        self._keep_bytes = 0
        with self._lock:
            self._sort_in()
        self._settle()

    def _give_back(self, block: Block) -> None:
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
        excess = sum(block.nbytes for block in self._idle) - self._keep_bytes
        while excess > 0:
            excess -= self._idle.pop(0).nbytes
