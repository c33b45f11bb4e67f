"""The arena's memory: one range of addresses, made of grains.

A grain is a memfd of its own that is mapped here for good, so that it can be shown to a reader alone: whoever has a
descriptor of it has all of it. What was shown is never taken back; a grain that must serve somebody else is *replaced*
by fresh memory in the same place.
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from typing import Final

import numpy as np
import numpy.typing as npt

from hurray_wire import memfd

Bytes = npt.NDArray[np.uint8]

GRAIN_MIN_BYTES: Final = memfd.HUGE_PAGE_BYTES
GRAIN_USUAL_BYTES: Final = 64 << 20
"""As large as grains get without need. Each that a reader maps costs it some 10 us; what is smaller than one is copied.
"""

_USUAL_COUNT: Final = 64
_MAX_COUNT: Final = 4096
_DESCRIPTORS: Final = 1 << 16

_POPULATE_STEP_BYTES: Final = 32 << 20


def grain_bytes_for(total_bytes: int) -> int:
    """The size of grains for an arena of this size, a power of two: 64 of them or more, of 64 MiB where those are not
    too many, for each takes a descriptor."""
    size = GRAIN_MIN_BYTES
    while size < GRAIN_USUAL_BYTES and size * _USUAL_COUNT < total_bytes:
        size *= 2
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = _MAX_COUNT if hard == resource.RLIM_INFINITY else min(_MAX_COUNT, hard // 4)
    while size * count < total_bytes:
        size *= 2
    return size


def raise_descriptor_limit() -> None:
    """Let this process have more descriptors than the usual 1,024: those of grains come to what its peers take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Grains:
    """See the module. Where the system has no memfds that can be sealed, one piece of anonymous memory instead, which
    cannot be shown. Not thread-safe, except that `populate` may run beside the use of the memory."""

    def __init__(self, total_bytes: int, grain_bytes: int) -> None:
        """Raises OSError where there is no address space, or no descriptor is left."""
        assert grain_bytes % mmap.PAGESIZE == 0
        self.grain_bytes: Final = grain_bytes
        _, self.memory = memfd.take_addresses(total_bytes, writable=True)
        self._address = self.memory.ctypes.data
        self.descriptors: list[int] = []
        """One per grain; none where nothing can be shown."""
        weakref.finalize(self, _close_all, self.descriptors).atexit = False
        if _can_seal():
            for number in range(-(-total_bytes // grain_bytes)):
                self.descriptors.append(self._create(number))
        self._advise_huge(0, total_bytes)

    def replace(self, number: int) -> None:
        """Fresh memory, present, in the place of a grain that nobody uses. Raises OSError: the old one is there."""
        fresh = self._create(number)
        os.close(self.descriptors[number])
        self.descriptors[number] = fresh
        start, nbytes = self._span(number)
        self._advise_huge(start, nbytes)
        self._populate(start, nbytes)

    def populate(self) -> bool:
        """Touch all of it, contents unchanged. False where the kernel does not (Linux before 5.14, memory is short)."""
        steps = range(0, self.memory.nbytes, _POPULATE_STEP_BYTES)
        return all(self._populate(start, min(_POPULATE_STEP_BYTES, self.memory.nbytes - start)) for start in steps)

    def _populate(self, start: int, nbytes: int) -> bool:
        return memfd.populate(self._address + start, nbytes)

    def _advise_huge(self, start: int, nbytes: int) -> None:
        memfd.advise(self._address + start, nbytes, mmap.MADV_HUGEPAGE)

    def _span(self, number: int) -> tuple[int, int]:
        start = number * self.grain_bytes
        return start, min(self.grain_bytes, self.memory.nbytes - start)

    def _create(self, number: int) -> int:
        start, nbytes = self._span(number)
        return memfd.create_at(self._address + start, "hurray-grain", nbytes)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _can_seal() -> bool:
    """Whether memory of this system can be shown without being given away."""
    try:
        descriptor, _ = memfd.create("hurray-probe", mmap.PAGESIZE)
    except OSError:
        return False
    os.close(descriptor)
    return True
