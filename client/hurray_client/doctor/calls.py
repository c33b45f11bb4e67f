"""Short questions to addresses."""

from __future__ import annotations

import socket
from typing import Final

from hurray_client.client import Client, connect
from hurray_client.config import load_config
from hurray_client.info import NodeInfo
from hurray_wire.credentials import Credentials

DIAL_S: Final = 3.0
"""Longest time for a connection, and for an answer."""


def calling(target: str, tls: Credentials | None, kind: str | None = None) -> Client:
    """A client that does not try again. `kind`: connected by this transport alone."""
    config = load_config().model_copy(update={"retry_s": 0.0})
    return connect(target, config=config, tls=tls, transports=None if kind is None else [kind])


def ask(target: str, tls: Credentials | None) -> NodeInfo:
    """What a node says of itself. Raises HurrayError."""
    with calling(target, tls) as client:
        return client.node(timeout_s=DIAL_S)


def connects(place: tuple[str, int]) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection(_reachable(place), timeout=DIAL_S):
            return True
    except OSError:
        return False


def dialled(place: tuple[str, int]) -> str:
    """An address that is listened at, as one to call from this host."""
    host, port = _reachable(place)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Host and port of an address that hurrayd has checked."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _reachable(place: tuple[str, int]) -> tuple[str, int]:
    host, port = place
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port  # noqa: S104 -- compared, not bound
