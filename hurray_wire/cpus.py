"""CPUs that a thread is kept to, as a list that people write: "0-3,8"."""

from __future__ import annotations

import os
import re
from typing import Final

from hurray_wire.errors import DataPlaneUnavailable

_RANGE: Final = re.compile(r" *([0-9]{1,5})(?:-([0-9]{1,5}))? *")


def read_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list like "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        matched = _RANGE.fullmatch(part)
        cpus = range(int(matched[1]), int(matched[2] or matched[1]) + 1) if matched else ()
        if not cpus:
            raise ValueError(f"{text!r} is no list of CPUs like 0-3,8")
        found.update(cpus)
    return frozenset(found)


def check_cpus(text: str) -> str:
    """The list, if it is one. Raises ValueError."""
    read_cpus(text)
    return text


def keep_to(text: str) -> None:
    """Keep the calling thread to the CPUs of a list. Raises DataPlaneUnavailable where it may not run on each."""
    cpus, allowed = read_cpus(text), os.sched_getaffinity(0)
    if not cpus <= allowed:
        raise DataPlaneUnavailable(
            "the data-plane thread may not run on these CPUs",
            stage="start",
            field="cpus",
            offered=text,
            required=f"some of {','.join(map(str, sorted(allowed)))}",
        )
    os.sched_setaffinity(0, cpus)
