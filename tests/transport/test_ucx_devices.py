"""Which devices UCX knows, as the process first found them."""

from __future__ import annotations

import socket

import pytest

from hurray_wire.transport import ucx_devices
from hurray_wire.transport.ucx_config import UcxConfig
from hurray_wire.transport.ucx_devices import may_start, remember, why_unusable


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Those of this host, by number, in a process that has not connected yet."""
    there = {"lo": 1, "eth0": 7}

    def number(name: str) -> int:
        if name not in there:
            raise OSError("No such device")
        return there[name]

    monkeypatch.setattr(ucx_devices, "_known", {})
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(index, name) for name, index in there.items()])
    monkeypatch.setattr(socket, "if_nametoindex", number)
    return there


def test_a_device_that_was_replaced_after_the_first_connection_is_unusable(devices: dict[str, int]) -> None:
    devices["eth0"] = 8
    assert why_unusable(["eth0"]) is None, "UCX has not looked yet"
    remember()
    assert why_unusable(["lo", "eth0", "mlx5_0:1"]) is None
    devices["eth1"] = devices.pop("eth0")
    assert why_unusable(["eth1"]) is None, "a name is nothing to UCX"
    assert "is gone" in (why_unusable(["eth0"]) or "")
    devices["eth0"] = 9
    remember()
    assert "was replaced" in (why_unusable(["lo", "eth0"]) or "")
    assert why_unusable(["lo", "never0"]) is None


def test_another_process_would_start_where_the_device_is_there_and_trusted() -> None:
    assert may_start(UcxConfig())
    assert not may_start(UcxConfig(net_devices=("none0",), trusted=("none0",)))
    assert not may_start(UcxConfig(net_devices=("lo", "none0")))
