"""Network devices as UCX knows them: by number, and once and for all of its process.

UCX (1.19 to 1.21, and its sources up to 1.23) reads the routes of the host when a process first connects, and looks up
in them by the number of a device. One that was taken away and comes back, as by `docker network disconnect` and
`connect`, has another number: over it UCX finds "no route", from every context of that process. Another process does
not have that trouble, and nothing else helps.

Needs no UCX. Devices of RDMA are not looked at: they are no network devices.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from hurray_wire.errors import Misuse
from hurray_wire.transport.ucx_config import UcxConfig, context_options

_known: Final[dict[int, str]] = {}
"""Numbers and names of the devices there were when this process first connected: one for all, as UCX's own are."""


def remember() -> None:
    """UCX is about to connect: the first time, it takes the devices there are for all there will be."""
    if not _known:
        _known.update(socket.if_nameindex())


def why_unusable(devices: Sequence[str]) -> str | None:
    """Why UCX connects over these no more, for people; None: as far as they go, it does. Any thread may ask."""
    for device in filter(_is_net_device, devices if _known else ()):
        number = _number(device)
        if number is None and device in _known.values():
            return f"its device {device} is gone"
        if number is not None and number not in _known:
            return f"its device {device} was replaced by another, which UCX finds no route over before a new process"
    return None


def may_start(config: UcxConfig) -> bool:
    """Whether UCX would start in another process, as far as its devices go."""
    try:
        config.check_trusted()
        context_options(config)
    except Misuse:
        return False
    return all(map(_has_carrier, filter(_is_net_device, config.net_devices)))


def _is_net_device(device: str) -> bool:
    return ":" not in device and not Path("/sys/class/infiniband", device).exists()


def _number(device: str) -> int | None:
    with suppress(OSError):
        return socket.if_nametoindex(device)
    return None


def _has_carrier(device: str) -> bool:
    with suppress(OSError):  # one that is down cannot be asked
        return Path("/sys/class/net", device, "carrier").read_text(encoding="ascii").strip() == "1"
    return False
