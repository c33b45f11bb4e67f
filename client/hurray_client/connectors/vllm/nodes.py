"""The nodes that the configuration lists, and the clients by which they are called."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from hurray_client.client import Client, connect
from hurray_client.config import load_config
from hurray_client.plane import LocalDataPlane
from hurray_wire.errors import InvalidRequest


class Nodes:
    """Clients by the name of their node, each made when it is first needed. Thread-safe."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        self._plane: LocalDataPlane | None = None
        self._clients: dict[str, Client] = {}

    def client(self, name: str) -> Client:
        """The client of a node. Raises InvalidRequest for one that the configuration does not list."""
        address = self._addresses.get(name)
        if address is None:
            raise InvalidRequest(
                "no node of that name is configured",
                field="node",
                offered=name[:64],
                required=" or ".join(self._addresses),
            )
        with self._lock:
            if name not in self._clients:
                config = load_config()
                if self._plane is None:
                    self._plane = LocalDataPlane(config)
                self._clients[name] = connect(address, config=config, data_plane=self._plane)
            return self._clients[name]

    def close(self) -> None:
        """Cancel what runs, close what is open."""
        with self._lock:
            clients, plane = list(self._clients.values()), self._plane
            self._clients, self._plane = {}, None
        for client in clients:
            client.close()
        if plane is not None:
            plane.close()
