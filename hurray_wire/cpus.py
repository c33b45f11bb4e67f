"""CPUs that a thread is kept to, as a list that people write: "0-3,8"."""

from __future__ import annotations

import os

from hurray_wire.errors import DataPlaneUnavailable


def read_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list like "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit() and (last.isascii() and last.isdigit() if dash else True)):
            raise ValueError(f"{text!r} is no list of CPUs like 0-3,8")
        low, high = int(first), int(last if dash else first)
        if not low <= high < _MOST:
            raise ValueError(f"{text!r} is no list of CPUs: {part.strip()} is not a range below {_MOST}")
        found.update(range(low, high + 1))
    return frozenset(found)


def keep_to(cpus: frozenset[int]) -> None:
    """Keep the calling thread to these. Raises DataPlaneUnavailable where it may not run on each of them."""
    allowed = os.sched_getaffinity(0)
    if not cpus <= allowed:
        raise DataPlaneUnavailable(
            "the data-plane thread may not run on these CPUs",
            stage="start",
            field="cpus",
            offered=_show(cpus),
            required=f"some of {_show(allowed)}",
        )
    os.sched_setaffinity(0, cpus)


_MOST = 1 << 16


def _show(cpus: set[int] | frozenset[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
