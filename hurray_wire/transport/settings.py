"""What two sides of one transport must agree on before they connect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from hurray_wire.errors import CapabilityMismatch
from hurray_wire.transport.base import TransportParameters

KINDS: Final = ("shm", "ucx", "tls", "tcp")
"""The transports that nodes and clients can be told to use."""

SHOWING: Final = ("shm",)
"""Those of them that can show memory as a view."""

ABSENT = "absent"
"""Stands for a setting that one side did not state."""


def check_settings(own: TransportParameters, peer: TransportParameters) -> None:
    """Raise CapabilityMismatch unless kind and every setting are equal, naming the first difference in name order.

    A setting that only one side states is a difference: it comes from a version that the other does not know.
    """
    if peer.kind != own.kind:
        raise _mismatch("transport", peer.kind, own.kind)
    for name in sorted(own.settings.keys() | peer.settings.keys()):
        offered, required = peer.settings.get(name, ABSENT), own.settings.get(name, ABSENT)
        if offered != required:
            raise _mismatch(f"{own.kind}.{name}", offered, required)


def _mismatch(field: str, offered: str, required: str) -> CapabilityMismatch:
    return CapabilityMismatch(
        f"the peer's {field} is {offered!r}, this side's is {required!r}; they must be equal",
        field=field,
        offered=offered,
        required=required,
    )


def check_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """A list of transports, checked. Raises ValueError for none, for one that is unknown, and for one named twice."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no transport; there are {', '.join(KINDS)}")
    if not kinds or len(set(kinds)) != len(kinds):
        raise ValueError("names at least one transport, each once")
    return tuple(kinds)


def split_names(settings: object, *lists: str) -> object:
    """Settings as an environment gives them: where one of `lists` is text, "a,b" or JSON, it becomes a list."""
    if not isinstance(settings, dict):
        return settings
    return {name: split_list(value) if name in lists else value for name, value in settings.items()}


def split_list(value: object) -> object:
    """A list as an environment gives it: text becomes a list, anything else stays."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",")]
