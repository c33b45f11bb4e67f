"""What two sides of one transport must agree on before they connect."""

from __future__ import annotations

import json

from hurray_wire.errors import CapabilityMismatch
from hurray_wire.transport.base import TransportParameters

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


def split_names(settings: object, *lists: str) -> object:
    """Settings as an environment gives them: where one of `lists` is text, "a,b" or JSON, it becomes a list."""
    if not isinstance(settings, dict):
        return settings
    return {name: _names(value) if name in lists else value for name, value in settings.items()}


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",")]
