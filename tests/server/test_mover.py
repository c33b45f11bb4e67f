"""What a mover says, and in which order, whatever its data plane's thread does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from hurray_server import mover as module
from hurray_server.mover import Mover
from hurray_server.mover_config import MoverConfig, TransportsConfig
from hurray_wire.errors import HurrayError, PeerUnavailable
from hurray_wire.limits import Limits
from hurray_wire.peers import Connected
from hurray_wire.transport.shm import ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx_config import UcxConfig
from hurray_wire.v1 import mover_pb2 as mpb

BLOCKED_S = 0.2
"""After this long a thread that has not ended is taken to wait."""


class LosingPlane:
    """A data plane that connects, and loses the connection, before the order to connect has returned."""

    def __init__(self, _transports: Any, *, on_peer_lost: Any, **_: Any) -> None:
        self._on_peer_lost = on_peer_lost
        self.thread = threading.Thread(target=self._lose)

    def _lose(self) -> None:
        error: HurrayError = PeerUnavailable("gone")
        self._on_peer_lost(5, error)

    def open_peer(self, _peer: int, _parameters: Sequence[Any]) -> Future[Connected]:
        opened: Future[Connected] = Future()
        opened.set_result(Connected(("tcp",), {}))
        self.thread.start()
        self.thread.join(BLOCKED_S)
        return opened


def test_a_connection_is_reported_before_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DataPlane", LosingPlane)
    reports: list[mpb.MoverReport] = []
    transports = TransportsConfig(("tcp",), ShmConfig(), SocketConfig(), UcxConfig())
    mover = Mover(MoverConfig(1 << 20, False, transports, Limits(), "info", "json"), reports.append)
    mover.carry_out(mpb.MoverCommand(open_peer=mpb.OpenPeer(peer=5)))
    plane: Any = mover._plane
    plane.thread.join()
    assert [report.WhichOneof("report") for report in reports] == ["peer_opened", "peer_lost"]
