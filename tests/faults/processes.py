"""What a process holds, as the kernel counts it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """File descriptors and threads of a process."""

    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        return cls(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


def resident_bytes(pid: int) -> int:
    """Anonymous memory: what it shares with others, an arena for one, is not counted."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def shared_memory_names() -> set[str]:
    return set(os.listdir("/dev/shm"))
