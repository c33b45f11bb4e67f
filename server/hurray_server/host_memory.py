"""How much memory this process can still take: what the host has, and what its control groups allow it.

In a container the group's limit is what counts. Whoever goes beyond it is killed, at some later touch of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_GROUPS: Final = "sys/fs/cgroup"
_V2: Final = ("memory.max", "memory.current", "inactive_file")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can be taken without swapping, and who says so: "the host" or a control group's file."""

    nbytes: int
    limited_by: str


def available_memory(root: Path = Path("/")) -> Available | None:
    """The least of what the host has and what each control group above this process allows; None where nothing tells.

    `root`: where /proc and /sys are, for tests.
    """
    found = [*_host(root), *_groups(root)]
    return min(found, key=lambda available: available.nbytes, default=None)


def _host(root: Path) -> Iterator[Available]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) << 10, "the host")


def _groups(root: Path) -> Iterator[Available]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for mount in (_GROUPS, f"{_GROUPS}/unified"):
                yield from _group_and_above(root / mount, path, *_V2)
        elif "memory" in controllers.split(","):
            yield from _group_and_above(root / f"{_GROUPS}/memory", path, *_V1)


def _group_and_above(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[Available]:
    inside = PurePosixPath(path.lstrip("/"))
    for group in (inside, *inside.parents):
        folder = mount / group
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            # The page cache counts as used, and what of it is inactive is given up first.
            stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
            cache = int(stat.get(cache_name, 0))
            yield Available(max(0, limit - usage + cache), f"the control group's {folder / limit_name}")


def _number(path: Path) -> int | None:
    """None for a file that is not there, and for "max"."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
