"""How UCX runs on a node: what an operator may choose, checked, and as UCX wants to hear it.

Needs no UCX: hosts without it read their configuration, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hurray_wire.errors import DataPlaneUnavailable, Misuse
from hurray_wire.transport import _sockets, networks

PORTS_FIELD: Final = "ucx.last_port"
"""The field of the error that no port of the range is free."""

_DEVICE_NAME = re.compile(r"[A-Za-z0-9_.\-]+(:[0-9]+)?")
_TLS_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class UcxConfig:
    """How UCX runs on this node. Raises Misuse, naming the field, for a value that cannot work.

    UCX itself only logs a bad value of a TCP setting and goes on, so every value is checked here.
    """

    net_devices: tuple[str, ...] = ("lo",)
    """Devices that carry data, as UCX names them (`eth0`, `mlx5_0:1`). UCX trusts whoever reaches them."""

    trusted: tuple[str, ...] = ()
    """Networks ("10.0.0.0/24") and devices that nobody reaches who may not read and write this process. UCX starts on
    these and on loopback alone."""

    tls: tuple[str, ...] = ("tcp",)
    """UCX transports to use where present, for example ("tcp", "rc", "cuda")."""

    first_port: int = 7420
    last_port: int = 7439
    """Range of TCP ports to listen at, both ends included; each worker takes one."""

    tcp_tx_seg_size_bytes: int = 1 << 20
    tcp_rx_seg_size_bytes: int = 1 << 20
    """Equal on all nodes: a longer segment than the receiver's overflows it. The receiver's is never the shorter."""

    rndv_thresh_bytes: int = 8192
    """A message of this length or more waits at the sender for its receive."""

    keepalive_interval_s: float = 1.0
    user_timeout_s: float = 5.0
    """How long sent data may stay unacknowledged on a TCP connection before it counts as lost."""

    def __post_init__(self) -> None:
        for name, pattern in (("net_devices", _DEVICE_NAME), ("tls", _TLS_NAME)):
            values = getattr(self, name)
            _require(bool(values), name, values, "at least one")
            for value in values:
                _require(bool(pattern.fullmatch(value)), name, value, f"names that match {pattern.pattern}")
        for value in self.trusted:
            known = networks.is_network(value) or bool(_DEVICE_NAME.fullmatch(value))
            _require(known, "trusted", value, 'networks, as in "10.0.0.0/24", and names of devices')
        _require(1024 <= self.first_port <= 65535, "first_port", self.first_port, "1024 to 65535")
        _require(self.first_port <= self.last_port <= 65535, "last_port", self.last_port, "first_port to 65535")
        for name, least, most in (
            ("tcp_tx_seg_size_bytes", 4 << 10, 64 << 20),
            ("tcp_rx_seg_size_bytes", self.tcp_tx_seg_size_bytes, 64 << 20),
            ("rndv_thresh_bytes", 1, 1 << 30),
            ("keepalive_interval_s", 0.1, 3600),
            ("user_timeout_s", 0.1, 3600),
        ):
            value = getattr(self, name)
            _require(least <= value <= most, name, value, f"{least} to {most}")

    def check_trusted(self) -> None:
        """Raise Misuse for a device that strangers may reach, as it is now."""
        networks.check_trusted(self.net_devices, self.trusted, "ucx.trusted")


def _require(holds: bool, name: str, offered: object, required: str) -> None:
    if not holds:
        raise Misuse(
            f"ucx {name} is {offered!r}; it must be {required}",
            field=f"ucx.{name}",
            offered=offered,
            required=required,
        )


def with_cuda(config: UcxConfig) -> UcxConfig:
    """The same, for memory of GPUs, too."""
    carries = any(name.startswith("cuda") for name in config.tls)
    return config if carries else replace(config, tls=(*config.tls, "cuda"))


def at_one_port(config: UcxConfig) -> UcxConfig:
    """The same, at one port of its range that is free now. Another process may take it meanwhile. Raises
    DataPlaneUnavailable where none is."""
    for port in _sockets.free_ports(config.first_port, config.last_port):
        return replace(config, first_port=port, last_port=port)
    raise no_free_port(config)


def no_free_port(config: UcxConfig) -> DataPlaneUnavailable:
    """The error that every port of the range is taken."""
    ports = f"{config.first_port}-{config.last_port}"
    return DataPlaneUnavailable(
        f"UCX does not start on {','.join(config.net_devices)}, ports {ports}: every port is taken; a process that "
        "uses UCX takes one",
        stage="start",
        field=PORTS_FIELD,
        offered=ports,
        required="a range with a free port",
    )


def context_options(config: UcxConfig) -> dict[str, str]:
    """What the context is given. Raises Misuse for a device that this host does not have."""
    for device in config.net_devices:
        name = device.partition(":")[0]
        present = any(Path("/sys/class", kind, name).exists() for kind in ("net", "infiniband"))
        _require(present, "net_devices", device, "a network device of this host")
    options = {
        "TLS": ",".join(config.tls),
        "NET_DEVICES": ",".join(config.net_devices),
        "TCP_TX_SEG_SIZE": str(config.tcp_tx_seg_size_bytes),
        "TCP_RX_SEG_SIZE": str(config.tcp_rx_seg_size_bytes),
        "TCP_CONN_NB": "y",  # else a connect may block the thread for 70 s
        # One socket event a time: UCX reads them in batches, and one whose handling ends a connection frees the
        # endpoint that a later one of the same batch points to. Seen as a crash when a peer came back from a stop.
        "TCP_MAX_POLL": "1",
        "TCP_SYN_CNT": "2",
        "RNDV_THRESH": str(config.rndv_thresh_bytes),
        "KEEPALIVE_INTERVAL": f"{config.keepalive_interval_s}s",
        "MAX_RNDV_RAILS": "1",
    }
    if any(Path("/sys/class/net", device, "bridge").exists() for device in config.net_devices):
        options["TCP_BRIDGE_ENABLE"] = "y"
    if any(name.startswith("cuda") for name in config.tls):
        options["RNDV_FRAG_MEM_TYPES"] = "cuda"
    return options
