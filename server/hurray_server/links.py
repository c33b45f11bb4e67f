"""How fast the network devices of the data plane are, as the kernel says."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from hurray_server.mover_config import TransportsConfig
from hurray_wire.transport.networks import devices_of

_BITS_PER_BYTE: Final = 8
_MEGABIT: Final = 1_000_000
_GIGABIT: Final = 1_000_000_000


def link_speeds(config: TransportsConfig) -> dict[str, int]:
    """Bytes a second by device; those that do not say, loopback among them, are left out."""
    devices: set[str] = set()
    if "ucx" in config.kinds:
        devices.update(config.ucx.net_devices)
    for kind, sockets in (("tcp", config.tcp), ("tls", config.tls)):
        if kind in config.kinds and sockets is not None and sockets.listen_host is not None:
            devices.update(devices_of(sockets.listen_host))
    speeds = {device: _speed(device) for device in sorted(devices)}
    return {device: speed for device, speed in speeds.items() if speed}


def _speed(device: str) -> int:
    name, _, port = device.partition(":")
    with suppress(OSError, ValueError):
        megabits = int(Path("/sys/class/net", name, "speed").read_text(encoding="ascii"))
        return max(0, megabits) * _MEGABIT // _BITS_PER_BYTE
    with suppress(OSError, ValueError, IndexError):
        rate = Path("/sys/class/infiniband", name, "ports", port or "1", "rate").read_text(encoding="ascii")
        return int(float(rate.split()[0]) * _GIGABIT) // _BITS_PER_BYTE
    return 0
