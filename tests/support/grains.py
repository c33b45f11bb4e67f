"""Memory to show, made of grains, and what tests want to know of it."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hurray_wire import memfd
from hurray_wire.view import Shown

_numbers = itertools.count()


class Owner:
    """Owns grains that hold `data`, and watches the pin of what it shows."""

    def __init__(self, data: npt.NDArray[np.uint8], grain_bytes: int) -> None:
        self.name = f"shown-by-a-test-{next(_numbers)}"
        self.grains: list[int] = []
        self.memory: list[npt.NDArray[np.uint8]] = []
        for start in range(0, data.nbytes, grain_bytes):
            grain, memory = memfd.create(self.name, grain_bytes)
            memory[: data.nbytes - start] = data[start : start + grain_bytes]
            self.grains.append(grain)
            self.memory.append(memory)
        self.watched, self.given = socket.socketpair()
        self.watched.setblocking(False)
        self.shown = Shown(tuple(self.grains), grain_bytes, data.nbytes, self.given)

    @property
    def pinned(self) -> bool:
        """Whether the other end of the pin is open somewhere."""
        try:
            return self.watched.recv(1) != b""
        except BlockingIOError:
            return True

    @property
    def views(self) -> list[str]:
        """Where this process has it mapped to read."""
        return views_of(self.name)

    def close(self) -> None:
        for grain in self.grains:
            os.close(grain)
        self.memory.clear()  # each keeps a descriptor of its own
        self.watched.close()
        self.given.close()


@contextmanager
def owner_of(data: npt.NDArray[np.uint8], grain_bytes: int) -> Iterator[Owner]:
    owner = Owner(data, grain_bytes)
    try:
        yield owner
    finally:
        owner.close()


def views_of(name: str, pid: int | str = "self") -> list[str]:
    """Mappings of memfds of this name that a process can only read, as /proc has them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if f"/memfd:{name} " in line and " r--s " in line]


def mapped_of(pid: int | None) -> list[str]:
    """Grains of another process, by the numbers of their files, that this one has mapped: one for each mapping."""

    def grains(process: int | str | None) -> list[str]:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
        return [line.split()[4] for line in lines if "/memfd:hurray-grain " in line]

    theirs = set(grains(pid))
    return [number for number in grains("self") if number in theirs]
