"""This process's data plane: one thread, and the transports that were wanted, for all clients that share it."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from hurray_client.config import ClientConfig, load_config
from hurray_wire import cuda
from hurray_wire.credentials import Credentials
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import HurrayError, Misuse
from hurray_wire.pool import MemoryPool
from hurray_wire.transport.base import Transport, TransportParameters
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.transport.tls import SocketConfig, TcpTransport, TlsTransport
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import with_cuda

if TYPE_CHECKING:
    from hurray_client.node import Node


def _make_tls(credentials: Credentials | None) -> TlsTransport:
    if credentials is None:
        raise Misuse("the transport tls needs certificates", field="tls", offered="none", required="PEM files")
    return TlsTransport(SocketConfig(), credentials)


class LocalDataPlane:
    """A data plane that starts with the first transfer that needs it, each transport with the first that uses it.

    Every client has one of its own unless `connect(data_plane=)` gives it one to share, whose owner closes it after
    the clients. Clients that share one share the connection to each node, too, and must reach it by one name: a node
    keeps one connection per data plane.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        """`config`: as the environment has it unless given."""
        config = config if config is not None else load_config()
        shm, ucx = ShmConfig(path=config.shm.path), config.ucx
        self._makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(shm),
            "tcp": lambda: TcpTransport(SocketConfig()),
            "tls": lambda: _make_tls(config.tls),
            # A process that has pages on a GPU by then will want to send them.
            "ucx": lambda: UcxTransport(with_cuda(ucx) if cuda.in_use() else ucx),
        }
        self._cpus = config.cpus
        self.memory: Final = MemoryPool()
        """What gets receive into."""
        self._lock = threading.Lock()
        self._running: DataPlane | None = None
        self._retired: list[DataPlane] = []
        self._nodes: dict[str, tuple[Node, int]] = {}
        self._watchers: dict[int, Callable[[HurrayError], None]] = {}
        self._closed = False
        self._pid = os.getpid()

    def start(self, kinds: Sequence[str]) -> tuple[DataPlane, tuple[TransportParameters, ...]]:
        """The data plane, running, and how it is reached by these kinds of transport. One that has ended of itself, or
        has lost a connection, is replaced for whoever connects from now on, under a new incarnation; sessions that are
        open keep the old one until they end.

        Raises Misuse after `close`, DataPlaneUnavailable where a transport does not start.
        """
        with self._lock:
            if self._closed:
                raise Misuse("the data plane is closed")
            if self._running is None or not self._running.running or self._running.worn:
                running = DataPlane(self._makers, on_peer_lost=self._lost, cpus=self._cpus)
                running.start(())
                if self._running is None:
                    atexit.register(self.close)
                else:
                    self._running.retire()
                    self._retired = [plane for plane in self._retired if plane.running] + [self._running]
                self._running = running
            return self._running, self._running.start_transports(kinds)

    def attach(self, target: str, make: Callable[[], Node]) -> Node:
        """The connection to a node, made if nobody has one. Each `attach` takes one `detach`."""
        with self._lock:
            if self._closed:
                raise Misuse("the data plane is closed")
            node, users = self._nodes.get(target) or (make(), 0)
            self._nodes[target] = node, users + 1
            return node

    def detach(self, target: str) -> None:
        """Close the connection to a node if nobody else has it."""
        with self._lock:
            node, users = self._nodes.pop(target)
            if users > 1:
                self._nodes[target] = node, users - 1
                return
        node.close()

    def watch(self, peer: int, lost: Callable[[HurrayError], None]) -> None:
        """`lost` is called, in the data-plane thread, when the connection to this peer is lost."""
        self._watchers[peer] = lost

    def unwatch(self, peer: int, lost: Callable[[HurrayError], None]) -> None:
        """`lost` is called no more."""
        if self._watchers.get(peer) == lost:  # a bound method is a new object each time
            del self._watchers[peer]

    def close(self) -> None:
        """Fail what still runs, close every connection, end the thread. Safe to call twice."""
        with self._lock:
            self._closed = True
            planes = [*self._retired, *([self._running] if self._running is not None else [])]
            self._running, self._retired = None, []
        if planes and self._pid == os.getpid():  # in a forked child there is no thread to end
            for plane in planes:
                plane.stop()
            atexit.unregister(self.close)
        self.memory.close()

    def _lost(self, peer: int, error: HurrayError) -> None:
        watcher = self._watchers.get(peer)
        if watcher is not None:
            watcher(error)
