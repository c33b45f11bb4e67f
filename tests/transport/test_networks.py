"""Which networks UCX may start on."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from hurray_wire.errors import Misuse
from hurray_wire.transport import networks
from hurray_wire.transport.networks import addresses_of, check_trusted
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import UcxConfig

DEVICES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.3", "fe80::1"],
    "eth1": ["10.0.0.4", "192.168.1.1"],
    "eth2": ["fd00::2", "fe80::2"],
    "eth3": ["fe80::3"],
    "mlx5_0:1": [],
}


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        networks, "addresses_of", lambda device: [ipaddress.ip_address(text) for text in DEVICES.get(device, [])]
    )


@pytest.mark.parametrize(
    ("devices", "trusted"),
    [
        (["lo"], []),
        (["eth0"], ["10.0.0.0/24"]),
        (["eth0"], ["10.0.0.3"]),
        (["eth0"], ["eth0"]),
        (["eth1"], ["10.0.0.0/24", "192.168.0.0/16"]),
        (["eth2"], ["fd00::/8"]),
        (["eth3"], ["fe80::/10"]),
        (["mlx5_0:1", "lo"], ["mlx5_0:1"]),
    ],
)
def test_a_device_on_trustednetworks_is_taken(devices: list[str], trusted: list[str]) -> None:
    check_trusted(devices, trusted, "ucx.trusted")


@pytest.mark.parametrize(
    ("devices", "trusted"),
    [
        (["eth0"], []),
        (["eth0"], ["10.0.1.0/24", "eth1"]),
        (["eth1"], ["10.0.0.0/24"]),
        (["lo", "eth1"], ["192.168.0.0/16"]),
        (["eth2"], ["0.0.0.0/0"]),
        (["eth3"], []),
        (["mlx5_0:1"], ["10.0.0.0/8"]),
        (["nosuch0"], []),
    ],
)
def test_ucx_starts_only_where_the_network_is_trusted(devices: list[str], trusted: list[str]) -> None:
    with pytest.raises(Misuse) as caught:
        check_trusted(devices, trusted, "ucx.trusted")
    assert caught.value.field == "ucx.trusted"
    assert devices[-1] in caught.value.message
    with pytest.raises(Misuse):
        UcxTransport(UcxConfig(net_devices=tuple(devices), trusted=tuple(trusted)))


def test_the_addresses_of_a_device_are_those_it_has() -> None:
    assert {str(address) for address in addresses_of("lo")} >= {"127.0.0.1"}
    assert addresses_of("nosuch0") == []
    for _, name in socket.if_nameindex():
        assert all(address.version in (4, 6) for address in addresses_of(name))
