"""The modules time, threading, select, os, uuid and random as programs see them while a world runs: the kernel's."""

from __future__ import annotations

import os
import select
import threading
import uuid
from typing import Any

from simulation import kernel
from simulation.kernel import Kernel


class Time:
    """The module time."""

    def __init__(self, system: Kernel) -> None:
        self._kernel = system

    def monotonic(self) -> float:
        return self._kernel.now_s

    def time(self) -> float:
        return self._kernel.now_s + self._kernel.wall_offset_s


class Threading:
    """The module threading, as far as it is used."""

    def __init__(self, system: Kernel) -> None:
        self._kernel = system

    def Thread(self, **options: Any) -> Any:
        return kernel.Thread(self._kernel, **options)

    def Lock(self) -> Any:
        return kernel.Lock(self._kernel)

    RLock = Lock

    def Condition(self) -> Any:
        return kernel.Condition(self._kernel)

    def Event(self) -> Any:
        return kernel.Event(self._kernel)

    TIMEOUT_MAX = threading.TIMEOUT_MAX


class Os:
    """The module os: its event descriptors simulated, all else real. `preempts`: a write may let others run first."""

    def __init__(self, system: Kernel, *, preempts: bool) -> None:
        self._kernel = system
        self._preempts = preempts

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def eventfd(self, _initial: int, _flags: int = 0) -> int:
        return self._kernel.add_descriptor(kernel.Eventfd(self._kernel))

    def eventfd_write(self, descriptor: int, value: int) -> None:
        eventfd = self._kernel.descriptor(descriptor)
        assert isinstance(eventfd, kernel.Eventfd)
        eventfd.count += value
        eventfd.pollers.wake()
        if self._preempts:
            self._kernel.pause()

    def eventfd_read(self, descriptor: int) -> int:
        eventfd = self._kernel.descriptor(descriptor)
        assert isinstance(eventfd, kernel.Eventfd)
        if eventfd.count == 0:
            raise BlockingIOError
        count, eventfd.count = eventfd.count, 0
        return count

    def close(self, descriptor: int) -> None:
        self._kernel.close_descriptor(descriptor)


class Select:
    """The module select."""

    EPOLLIN = select.EPOLLIN
    POLLIN = select.POLLIN
    POLLOUT = select.POLLOUT

    def __init__(self, system: Kernel) -> None:
        self._kernel = system

    def epoll(self) -> Any:
        return kernel.Poll(self._kernel, 1.0)

    def poll(self) -> Any:
        return kernel.Poll(self._kernel, 1e-3)


class Uuid:
    """The module uuid, its random ids of the seed."""

    def __init__(self, system: Kernel) -> None:
        self._kernel = system

    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)

    def uuid4(self) -> uuid.UUID:
        return self._kernel.uuid4()


class OrderedSet(dict[Any, None]):
    """set, in order of insertion: that of objects goes by their addresses, which no seed decides."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class Random:
    """The module random."""

    def __init__(self, system: Kernel) -> None:
        self._kernel = system

    def uniform(self, low: float, high: float) -> float:
        return self._kernel.random.uniform(low, high)
