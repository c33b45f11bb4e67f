"""A view: memory of another process, mapped here to be read, which stays as it is for as long as a pin is open.

The memory is made of *grains*: memfds of one size, the first bytes of which lie one behind the other. They are handed
over by their descriptors; whoever has one can map it again, whatever became of the pin, so what has been shown to one
party is never used for another's bytes. The pin is one end of a socket pair whose other end the owner watches.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from socket import socket
from typing import Final

import numpy as np
import numpy.typing as npt

from hurray_wire import memfd
from hurray_wire.errors import ProtocolViolation
from hurray_wire.limits import PAGE_BYTES

Bytes = npt.NDArray[np.uint8]

MAX_GRAINS: Final = 1 << 14
"""A view of more is refused: each grain is a mapping of its own, of which a process has some 65,000."""

VIEW_CHECKSUM: Final = 0
"""Stands for that of a view, of which no byte crosses."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What an owner shows: `nbytes` from the beginning of the first grain on.

    The grains stay the owner's, and must be there until the view is sent. The pin's end is given away, and closed here.
    """

    grains: tuple[int, ...]
    grain_bytes: int
    nbytes: int
    pin: socket


@dataclass(slots=True, eq=False)
class View:
    """Where a reader wants it. `memory` is read-only uint8 [nbytes] once it is there: while an array over it lives it
    stays mapped, and pinned."""

    nbytes: int
    memory: Bytes | None = None


class Mapping:
    """A view under way: grains come in order, each is checked and mapped. The descriptors stay the caller's."""

    def __init__(self, nbytes: int, grain_bytes: int) -> None:
        """Raises ProtocolViolation for grains that cannot be, OSError where there are no addresses left."""
        if grain_bytes <= 0 or grain_bytes % PAGE_BYTES or grain_bytes * MAX_GRAINS < nbytes:
            raise ProtocolViolation(
                "a view in grains of this size",
                field="shm.grain_bytes",
                offered=grain_bytes,
                required=f"a multiple of {PAGE_BYTES}, at most {MAX_GRAINS} of them",
            )
        self.grain_bytes = grain_bytes
        self.mapped_bytes = 0
        self._range, self._memory = memfd.take_addresses(nbytes, writable=False)
        self._address = self._memory.ctypes.data

    @property
    def left_bytes(self) -> int:
        """What is not mapped yet."""
        return self._memory.nbytes - self.mapped_bytes

    def add(self, grains: Sequence[int]) -> None:
        """The next grains. Raises ProtocolViolation for memory that is not safe to map, OSError."""
        for grain in grains:
            nbytes = min(self.grain_bytes, self.left_bytes)
            memfd.map_received_at(self._address + self.mapped_bytes, grain, nbytes)
            self.mapped_bytes += nbytes

    def finish(self, pin: int) -> Bytes:
        """The whole of it, which holds the pin from here on. Raises ProtocolViolation for a pin that is no socket."""
        assert self.left_bytes == 0, self.left_bytes
        if not stat.S_ISSOCK(os.fstat(pin).st_mode):
            raise ProtocolViolation("a view whose pin is no socket", field="shm.pin")
        # With the range and not with any snapshot: arrays that were taken out of one may outlive it.
        weakref.finalize(self._range, os.close, os.dup(pin)).atexit = False
        return self._memory
