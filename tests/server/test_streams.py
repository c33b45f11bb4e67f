"""Streams that are kept from one transfer to the next: what each transfer comes to is told, and concerns no other."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from hurray_server.principal import Principal
from hurray_server.shares import Share
from hurray_server.streams import FIRST_MESSAGE_S, Direction, TransferStream
from hurray_server.tally import Tally
from hurray_wire.errors import (
    DeadlineExceeded,
    HurrayError,
    KeyNotFound,
    NodeDraining,
    ProtocolViolation,
    Unauthenticated,
)
from hurray_wire.status import from_status, to_status
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import RunningDaemon, eventually, running_daemon
from support.raw import WAIT_S, Prepared, RawClient, Stream, snapshot

pytest.importorskip("ucxx")


def opening(client: RawClient, *, kept: bool = True, **fields: Any) -> pb.GetRequest:
    open_ = pb.GetOpen(
        **{"key": "never", "request_id": str(uuid.uuid4()), "incarnation": client.incarnation, "transports": ["ucx"]}
        | fields
    )
    return pb.GetRequest(open=open_, budget=Duration(seconds=int(WAIT_S)) if kept else None)


def refused(stream: Stream, request: pb.GetRequest) -> HurrayError:
    """What the outcome of this transfer says went wrong; the stream goes on."""
    stream.send(request)
    response = stream.read()
    assert response is not None, stream.error
    assert not response.HasField("source")
    return from_status(response.outcome.error)


def test_each_transfer_of_a_stream_has_its_outcome(daemon: RunningDaemon, peer: RawClient) -> None:
    stream = Stream(peer.stub.Get)
    for _ in range(3):
        assert isinstance(refused(stream, opening(peer)), KeyNotFound)
    stream.finish()
    assert stream.read() is None
    assert stream.error is None


def test_a_transfer_without_a_budget_is_the_last_of_its_stream(daemon: RunningDaemon, peer: RawClient) -> None:
    stream = Stream(peer.stub.Get)
    assert isinstance(refused(stream, opening(peer)), KeyNotFound)
    stream.send(opening(peer, kept=False))
    assert stream.read() is None
    assert isinstance(stream.error, KeyNotFound)


def test_what_crosses_with_an_outcome_is_not_heard_by_the_next_transfer(daemon: RunningDaemon, peer: RawClient) -> None:
    stream = Stream(peer.stub.Get)
    stop = pb.Stop(error=to_status(ProtocolViolation("too late for the transfer that this is about")))
    for _ in range(3):
        assert isinstance(refused(stream, opening(peer)), KeyNotFound)
        stream.send(pb.GetRequest(target=pb.TargetMessage(stop=stop)))
    assert isinstance(refused(stream, opening(peer)), KeyNotFound)
    stream.finish()
    assert stream.read() is None


@pytest.mark.parametrize("seconds", [-1, 1 << 40])
def test_a_budget_out_of_range_is_refused_by_name(daemon: RunningDaemon, peer: RawClient, seconds: int) -> None:
    stream = Stream(peer.stub.Get)
    request = opening(peer)
    request.budget.seconds = seconds
    assert refused(stream, request).field == "budget"
    assert isinstance(refused(stream, opening(peer)), KeyNotFound)
    stream.finish()
    assert stream.read() is None


def test_a_wait_longer_than_the_budget_ends_as_late_not_as_unknown(daemon: RunningDaemon, peer: RawClient) -> None:
    stream = Stream(peer.stub.Get)
    request = opening(peer, wait=Duration(seconds=60))
    request.budget.CopyFrom(Duration(nanos=50_000_000))
    error = refused(stream, request)
    assert isinstance(error, DeadlineExceeded)
    assert error.stage == "wait"
    short = opening(peer, wait=Duration(nanos=50_000_000))
    assert isinstance(refused(stream, short), KeyNotFound)
    stream.finish()
    assert stream.read() is None


def test_a_stream_whose_certificate_has_expired_ends_with_its_caller() -> None:
    """It is told so, and then heard as before: not only once it has been idle for long."""

    class Callers:
        count = 0

        def principal(self, _: object) -> Principal:
            self.count += 1
            if self.count > 2:
                raise Unauthenticated("the certificate of this connection has expired", field="certificate")
            return Principal("t", admin=False, address="", identity=None, grants=None)

    class Context:
        def __init__(self) -> None:
            request = pb.GetRequest(budget=Duration(seconds=5))
            self.said, self.heard = [request, request, grpc.aio.EOF], list[HurrayError]()  # type: ignore[attr-defined]

        def peer(self) -> str:
            return ""

        async def read(self) -> Any:
            return self.said.pop(0)

        async def write(self, response: pb.GetResponse) -> None:
            self.heard.append(from_status(response.outcome.error))

    async def begin(*_: object) -> pb.Receipt:
        raise KeyNotFound("no snapshot has this key")

    async def serve(context: Context) -> None:
        servicer = SimpleNamespace(
            callers=Callers(),
            calls=Share("calls", "max_calls", 9, divided=False, retry_after_s=1.0),
            tally=Tally(),
            audit=SimpleNamespace(record=lambda *_: None),
        )
        node = SimpleNamespace(
            draining=False,
            on_drain=lambda _: lambda: None,
            config=SimpleNamespace(transfers=SimpleNamespace(max_budget_s=9.0)),
        )
        direction = Direction(
            action="get",
            begin=begin,
            is_first=lambda _: True,
            to_input=lambda _: mpb.TransferInput(),
            respond=lambda message, outcome: pb.GetResponse(source=message, outcome=outcome),
        )
        async with asyncio.timeout(FIRST_MESSAGE_S / 3):
            await TransferStream(servicer, node, context, direction).serve()  # type: ignore[arg-type]

    context = Context()
    asyncio.run(serve(context))
    assert [type(error) for error in context.heard] == [KeyNotFound, Unauthenticated]


def test_a_node_that_drains_says_so_on_streams_that_wait_for_another_transfer() -> None:
    with running_daemon("drain_s = 600.0") as daemon, RawClient(daemon.address) as client:
        stream = Stream(client.stub.Get)
        assert isinstance(refused(stream, opening(client)), KeyNotFound)
        prepared = Prepared.of(snapshot(layers=4, pages=64), chunk_bytes=8192)
        put = client.put(prepared, prepared.offer("held", client.incarnation), ready_tensors=1)
        put.accepted.result(WAIT_S)
        daemon.terminate()
        eventually(lambda: daemon.logged("draining"), 5, "the drain begins")
        assert stream.read() is None
        assert isinstance(stream.error, NodeDraining)
        client.plane.announce(put.number, len(prepared.plan.descriptors))
        assert put.over.result(WAIT_S) is None
        assert daemon.wait() == 0
