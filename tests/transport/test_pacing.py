"""Congestion control of connections over loopback, and of others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hurray_wire.transport._pacing import unpace


class Recorder(socket.socket):
    """A socket that remembers which options were set."""

    options: list[Any]

    def setsockopt(self, *arguments: Any) -> None:
        self.options.append(arguments)
        super().setsockopt(*arguments)


def bound(family: socket.AddressFamily, host: str) -> Recorder:
    connection = Recorder(family, socket.SOCK_STREAM)
    connection.options = []
    connection.bind((host, 0))
    return connection


def control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(
    ("family", "host"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.3.2.1"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.1"),
    ],
)
def test_loopback_is_not_paced(family: socket.AddressFamily, host: str) -> None:
    with bound(family, host) as listener, socket.socket(family) as dialer:
        unpace(listener)
        assert control(listener) == b"reno"
        listener.listen()
        dialer.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert control(accepted) == b"reno"


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")])
def test_any_other_address_keeps_what_the_host_has(family: socket.AddressFamily, host: str) -> None:
    with bound(family, host) as connection:
        unpace(connection)
        assert connection.options == []


def test_a_control_that_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.transport._pacing._UNPACED", b"nosuch")
    with bound(socket.AF_INET, "127.0.0.1") as connection:
        before = control(connection)
        unpace(connection)
        assert control(connection) == before
