"""A peer and the transports to it: those that start, those that reach it, and what the loss of one means."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dataplane.pair import WAIT_S
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import CapabilityMismatch, DataPlaneUnavailable, PeerUnavailable
from hurray_wire.transport.base import Transport, TransportParameters
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.transport.tls import SocketConfig, TcpTransport


class Planes:
    """A node's data plane, which listens, and a client's, which dials."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.path = str(folder / "node")
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stack = stack
        self.node = self.plane(
            shm=lambda: ShmTransport(ShmConfig(path=self.path, listens=True)),
            tcp=lambda: TcpTransport(SocketConfig(listen_host="127.0.0.1")),
        )

    def client(self, path: str | None = None) -> DataPlane:
        return self.plane(
            shm=lambda: ShmTransport(ShmConfig(path=path or self.path)), tcp=lambda: TcpTransport(SocketConfig())
        )

    def plane(self, **transports: Callable[[], Transport]) -> DataPlane:
        plane = DataPlane(transports, on_peer_lost=lambda _peer, error: self.lost.put(str(error)))
        plane.start()
        self._stack.callback(plane.stop)
        return plane

    def connect(self, client: DataPlane, proof_s: float = WAIT_S, **changes: Any) -> Any:
        opened = self.node.open_peer(client.incarnation, client.parameters).result(WAIT_S)
        assert opened.kinds == ("shm", "tcp")
        return client.open_peer(self.node.incarnation, self.node.parameters, proof_s=proof_s).result(WAIT_S)


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[Planes]:
    with ExitStack() as stack:
        yield Planes(stack, tmp_path)


def test_both_reach_it(planes: Planes) -> None:
    connected = planes.connect(planes.client())
    assert (connected.kinds, connected.left_out) == (("shm", "tcp"), {})


def test_a_path_to_nowhere_leaves_shm_out_alone(planes: Planes, tmp_path: Path) -> None:
    client = planes.client(str(tmp_path / "none"))
    connected = planes.connect(client)
    assert connected.kinds == ("tcp",)
    assert isinstance(connected.left_out["shm"], PeerUnavailable)
    assert (client.peer_count, client.worn, planes.lost.empty()) == (1, False, True)


def test_one_that_does_not_answer_is_waited_for_no_longer_than_said(planes: Planes, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        client = planes.client(str(tmp_path / "silent"))
        connected = planes.connect(client, proof_s=0.05)
        assert connected.kinds == ("tcp",)
        assert "in time" in str(connected.left_out["shm"])
        only = [item for item in planes.node.parameters if item.kind == "shm"]
        with pytest.raises(PeerUnavailable, match="in time"):
            client.open_peer(planes.node.incarnation, only, proof_s=0.05).result(WAIT_S)
        assert client.peer_count == 0


def test_the_only_one_that_does_not_reach_it_is_named(planes: Planes, tmp_path: Path) -> None:
    client = planes.client(str(tmp_path / "none"))
    only = [item for item in planes.node.parameters if item.kind == "shm"]
    with pytest.raises(CapabilityMismatch, match=str(tmp_path / "none")):
        client.open_peer(planes.node.incarnation, only, proof_s=WAIT_S).result(WAIT_S)
    assert (client.peer_count, planes.lost.empty()) == (0, True)


def test_settings_of_an_optional_one_that_differ_leave_it_out_alone(planes: Planes) -> None:
    client = planes.client()
    changed = [
        TransportParameters(item.kind, item.address, {**item.settings, "boot_id": "x"}) if item.kind == "shm" else item
        for item in client.parameters
    ]
    connected = planes.node.open_peer(client.incarnation, changed).result(WAIT_S)
    assert (connected.kinds, connected.left_out["shm"].field) == (("tcp",), "shm.boot_id")
    with pytest.raises(CapabilityMismatch, match="boot_id"):
        planes.node.open_peer(client.incarnation, changed[:1]).result(WAIT_S)
    wrong = [TransportParameters("tcp", client.parameters[1].address, {"frames": "0"})]
    with pytest.raises(CapabilityMismatch, match="tcp"):
        planes.node.open_peer(client.incarnation, [client.parameters[0], *wrong]).result(WAIT_S)


def test_one_that_has_reached_it_is_lost_with_all_others(planes: Planes) -> None:
    client = planes.client()
    planes.connect(client)
    client._submit(lambda: client._peers.transports["shm"].close() or client._peers.transports.pop("shm"))  # type: ignore[func-returns-value]
    assert "PEER_UNAVAILABLE" in planes.lost.get(timeout=WAIT_S)
    assert (planes.node.peer_count, planes.node.worn) == (0, True)


def test_the_end_of_one_that_was_asked_to_close_is_no_loss(planes: Planes) -> None:
    client = planes.client()
    planes.connect(client)
    client.leave_peer(planes.node.incarnation)
    client.start_transports(())  # in order: it has left by now
    planes.node.close_peer(client.incarnation).result(WAIT_S)
    client.close_peer(planes.node.incarnation).result(WAIT_S)
    assert (client.peer_count, planes.lost.empty()) == (0, True)


def test_transports_start_when_they_are_wanted_and_once(planes: Planes) -> None:
    made: list[str] = []

    def make_tcp() -> TcpTransport:
        made.append("tcp")
        return TcpTransport(SocketConfig())

    def fail() -> Transport:
        raise OSError("no such thing")

    plane = DataPlane({"shm": fail, "tcp": make_tcp})
    plane.start(())
    assert plane.parameters == ()
    with pytest.raises(DataPlaneUnavailable, match="no such thing") as caught:
        plane.start_transports(["shm"])
    assert caught.value.details["transport"] == "shm"
    first = plane.start_transports(["tcp"])
    assert plane.start_transports(["tcp"]) == first == plane.parameters
    assert made == ["tcp"]
    plane.stop()
    with pytest.raises(DataPlaneUnavailable):
        plane.start_transports(["tcp"])


def test_no_address_is_shown(planes: Planes) -> None:
    for item in planes.node.parameters:
        assert repr(item.address)[2:-1] not in repr(item)


def test_one_that_connects_no_more_is_left_out_and_alone_says_so(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = planes.client()
    monkeypatch.setattr(TcpTransport, "why_unusable", lambda _: "worn out")
    assert client.unusable == {"tcp": "worn out"}
    opened = planes.node.open_peer(client.incarnation, client.parameters).result(WAIT_S)
    assert opened.kinds == ("shm",)
    assert isinstance(opened.left_out["tcp"], DataPlaneUnavailable)
    only = [item for item in client.parameters if item.kind == "tcp"]
    with pytest.raises(DataPlaneUnavailable, match="worn out"):
        planes.node.open_peer(client.incarnation, only).result(WAIT_S)
    monkeypatch.setattr(ShmTransport, "why_unusable", lambda _: "worn out, too")
    with pytest.raises(DataPlaneUnavailable, match="worn out"):
        planes.node.open_peer(client.incarnation, client.parameters).result(WAIT_S)
