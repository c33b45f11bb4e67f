"""A peer that says what no peer should: it gets its refusal, everybody else notices nothing, memory stays bounded.

Whatever it says, the mover lives on and what it holds stays held: its death would be everybody's loss.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

import hurray_client as ht
from hurray_wire.checksum import XXH3_64
from hurray_wire.descriptor import build_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.errors import ERROR_DOMAIN, HurrayError, LimitExceeded, ProtocolViolation
from hurray_wire.limits import PAGE_BYTES, Limits
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.status import STATUS_TRAILER, from_trailers
from hurray_wire.transport.base import chunk_tag
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import RunningDaemon, eventually, running_daemon
from support.raw import WAIT_S, Prepared, RawClient, Stream, messages, snapshot

pytestmark = pytest.mark.ucx

METHODS = "/hurray_wire.v1.TransferService/"


@pytest.fixture(autouse=True)
def bystander(daemon: RunningDaemon) -> Iterator[None]:
    """Somebody else's snapshot, and the mover that holds it: both as before after each test."""
    mover = daemon.mover_pid
    with RawClient(daemon.address) as other:
        other.transfer("bystander", snapshot(), overwrite=True)
        held = other.stub.Stat(pb.StatRequest(key="bystander"), timeout=5).snapshot.generation
        yield
        assert other.stub.Stat(pb.StatRequest(key="bystander"), timeout=5).snapshot.generation == held
        other.transfer(f"after/{uuid.uuid4()}", snapshot())
    assert daemon.mover_pid == mover
    eventually(lambda: settled(daemon), 10, "nothing is left of it")


def settled(daemon: RunningDaemon) -> bool:
    arena = daemon.node_state().arena
    return arena.receiving_bytes == arena.quarantined_bytes == 0


def packed(message: Any) -> AnyMessage:
    result = AnyMessage()
    result.Pack(message)
    return result


def info(**fields: Any) -> AnyMessage:
    return packed(error_details_pb2.ErrorInfo(**{"domain": ERROR_DOMAIN, "reason": "INVALID_REQUEST"} | fields))


STATUSES = {
    "details that cannot be parsed": status_pb2.Status(
        code=3, details=[AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff\xff")]
    ),
    "a delay that no duration holds": status_pb2.Status(
        code=14,
        details=[
            info(reason="PEER_UNAVAILABLE"),
            packed(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2**63 - 1, nanos=2**31 - 1))),
        ],
    ),
    "a message of megabytes": status_pb2.Status(
        code=3, message="x" * (7 << 20), details=[info(metadata={"field": "f"})]
    ),
    "details of megabytes": status_pb2.Status(code=3, details=[info(metadata={"field": "x" * (7 << 20)})]),
    "very many details": status_pb2.Status(code=3, details=[info(metadata={f"{n}": "x" * 90 for n in range(5000)})]),
    "no such code": status_pb2.Status(code=-5),
    "nothing": status_pb2.Status(),
}


@pytest.mark.parametrize("kind", STATUSES)
def test_a_source_stops_for_any_reason_it_likes(peer: RawClient, kind: str) -> None:
    prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
    put = peer.put(prepared, prepared.offer(f"stop/{uuid.uuid4()}", peer.incarnation), ready_tensors=4)
    put.accepted.result(WAIT_S)
    sent = prepared.plan.ready_chunk_count(4)
    machine = peer.plane._transfers[put.number].machine
    # A count that is not true yet would have the node wait for the rest, and cut the connection some seconds later.
    eventually(lambda: machine.sent_chunk_count == sent, WAIT_S, "what is ready is on its way")
    stop = pb.Stop(error=STATUSES[kind], sent_chunk_count=sent)
    put.stream.send(pb.PutRequest(source=pb.SourceMessage(stop=stop)))
    assert isinstance(put.over.result(WAIT_S), HurrayError)
    assert put.stream.answered, "the reason comes back as an error of ours, cut to size"
    put.ended.result(WAIT_S)
    reconnect(peer)


@pytest.mark.parametrize("kind", STATUSES)
def test_a_target_stops_for_any_reason_it_likes(peer: RawClient, kind: str) -> None:
    stream = Stream(peer.stub.Get)
    opening = pb.GetOpen(
        key="bystander", request_id=str(uuid.uuid4()), incarnation=peer.incarnation, transports=["ucx"]
    )
    stream.send(pb.GetRequest(open=opening))
    assert stream.read().source.HasField("offer")
    stream.send(pb.GetRequest(target=pb.TargetMessage(stop=pb.Stop(error=STATUSES[kind]))))
    assert all(message.source.HasField("stop") for message in messages(stream))
    assert isinstance(stream.error, HurrayError)
    assert stream.answered


def reconnect(peer: RawClient) -> None:
    """A new session where the node has cut the old one."""
    assert peer.session is not None
    if not peer.session.call.is_active():
        peer.connect()


# --- bytes that are no messages -------------------------------------------------------------------------------------


def raw_error(call: Callable[[], Any]) -> HurrayError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    assert STATUS_TRAILER in dict(error.trailing_metadata()), "the node itself said so"
    return from_trailers(error.code().name, error.details(), error.trailing_metadata())


@pytest.mark.parametrize("method", ["GetNode", "Stat", "List", "Delete", "Renew", "Drain"])
def test_a_call_that_cannot_be_parsed_is_refused_by_name(peer: RawClient, method: str) -> None:
    assert isinstance(
        raw_error(lambda: peer.channel.unary_unary(METHODS + method)(b"\xff" * 100, timeout=5)), ProtocolViolation
    )


@pytest.mark.parametrize("method", ["Put", "Get", "Session"])
def test_a_stream_that_cannot_be_parsed_is_refused_by_name(peer: RawClient, method: str) -> None:
    call = peer.channel.stream_stream(METHODS + method)
    assert isinstance(raw_error(lambda: list(call(iter([b"\xff" * 100]), timeout=5))), ProtocolViolation)


def test_a_later_message_that_cannot_be_parsed_ends_the_transfer_by_name(peer: RawClient) -> None:
    outbound: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    offer = Prepared.of(snapshot()).offer(f"bytes/{uuid.uuid4()}", peer.incarnation)
    outbound.put(pb.PutRequest(source=pb.SourceMessage(offer=offer)).SerializeToString())
    stream = peer.channel.stream_stream(METHODS + "Put")(iter(outbound.get, None), timeout=10)
    assert pb.PutResponse.FromString(next(stream)).target.HasField("accept")
    outbound.put(b"\xff" * 50)
    assert isinstance(raw_error(lambda: list(stream)), ProtocolViolation)
    outbound.put(None)
    eventually(lambda: peer.session is not None and not peer.session.call.is_active(), 10, "not drained: cut off")
    peer.connect()


# --- large numbers ----------------------------------------------------------------------------------------------------


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def nested(data: bytes) -> bytes:
    """As the field 1 of a message, twice: PutRequest.source.offer."""
    for _ in range(2):
        data = b"\x0a" + varint(len(data)) + data
    return data


@pytest.mark.parametrize("kind", ["token counts", "tensors"])
def test_an_offer_of_very_many_is_refused_soon_and_takes_bounded_memory(
    daemon: RunningDaemon, peer: RawClient, kind: str
) -> None:
    offer = Prepared.of(snapshot()).offer("many", peer.incarnation)
    room = Limits().max_message_bytes - 4096
    data = offer.SerializeToString()
    data += b"\x32\x00" * (room // 2) if kind == "tensors" else b"\x3a" + varint(room) + bytes(room)
    call, pid = peer.channel.stream_stream(METHODS + "Put"), daemon.pid
    began_s = time.monotonic()
    for _ in range(4):
        error = raw_error(lambda: list(call(iter([nested(data)]), timeout=10)))
        assert isinstance(error, LimitExceeded)
    assert time.monotonic() - began_s < 8
    assert resident_kib(pid) < 1 << 20


def test_an_offer_of_a_huge_pool_in_tiny_chunks_costs_nothing() -> None:
    arena_bytes = 1 << 30
    with running_daemon(arena_bytes=arena_bytes) as node, RawClient(node.address) as client:
        pages = (arena_bytes >> 12) - 10
        descriptor = build_descriptor(
            element_type=BY_NAME["float16"],
            total_tokens=4,
            num_heads=16,
            head_dim=32,
            page_size=4,
            num_pages=pages,
            num_seqs=1,
            kv_role=2,
            layer_index=0,
            total_logical_pages=1,
            block_table_index_type=1,
            alignment=PAGE_BYTES,
        )
        prepared = Prepared.of(snapshot())
        client.transfer("first", snapshot())
        assert node.mover_pid is not None
        before = resident_kib(node.pid), resident_kib(node.mover_pid)
        offer = prepared.offer(
            "huge",
            client.incarnation,
            tensors=[pb.TensorOffer(descriptor=descriptor.encode())],
            token_counts=[4],
            chunk_bytes=4096,
        )
        began_s = time.monotonic()
        for _ in range(3):
            stream = Stream(client.stub.Put)
            stream.send(pb.PutRequest(source=pb.SourceMessage(offer=offer)))
            told = stream.read()
            stream.cut()
            assert told is None or told.target.HasField("accept")
            offer.request_id = str(uuid.uuid4())
        assert time.monotonic() - began_s < 10
        after = resident_kib(node.pid), resident_kib(node.mover_pid)
        assert after[0] - before[0] < 20 << 10


def test_a_receipt_that_is_kept_is_no_more_than_a_receipt() -> None:
    """They are kept for ten minutes and longer, up to 100,000 of them: whatever comes with one adds up."""
    with running_daemon() as node, RawClient(node.address) as client:
        prepared = Prepared.of(snapshot(layers=200))

        def put(count: int) -> None:
            for _ in range(count):
                offer = prepared.offer("same", client.incarnation, overwrite=True)
                assert client.put(prepared, offer).over.result(WAIT_S) is None

        put(15)
        before = resident_kib(node.pid)
        put(60)
        assert resident_kib(node.pid) - before < 60 * 25


def test_calls_are_bounded_in_number() -> None:
    with running_daemon("[limits]\nmax_calls = 20") as node, RawClient(node.address) as client:
        streams = []
        for _ in range(30):
            stream = Stream(client.stub.Get)
            opening = pb.GetOpen(
                key="never",
                request_id=str(uuid.uuid4()),
                incarnation=client.incarnation,
                transports=["ucx"],
                wait=Duration(seconds=500),
            )
            stream.send(pb.GetRequest(open=opening))
            streams.append(stream)
        eventually(lambda: sum(not stream.call.is_active() for stream in streams) >= 11, 10, "the rest is refused")
        for stream in streams:
            if stream.call.is_active():
                stream.cut()
            else:
                assert stream.read() is None
                assert isinstance(stream.error, LimitExceeded)
        eventually(lambda: node.logged("session opened"), 5)
        client.transfer("after", snapshot())


# --- bytes that are none of the agreed ones -------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [pb.CHECKSUM_NONE, pb.CHECKSUM_XXH3_64])
def test_a_chunk_shorter_than_agreed_never_shows_what_the_memory_held_before(
    daemon: RunningDaemon, peer: RawClient, checksum: int
) -> None:
    """A source that sends one byte of each chunk must not be given the rest by a later get."""
    secret = np.full((500, 4, 2, 8), 1234, np.float16)

    def fused(pool: np.ndarray) -> ht.KVSnapshot:
        return ht.KVSnapshot.from_paged({(0, "fused"): pool}, block_tables=[list(range(500))], token_counts=[2000])

    peer.transfer("secret", fused(secret))
    peer.stub.Delete(pb.DeleteRequest(key="secret"), timeout=5)

    prepared = Prepared.of(fused(np.zeros_like(secret)))
    source = SnapshotSource(prepared.prepared, prepared.plan)
    stream = Stream(peer.stub.Put)
    offer = prepared.offer(f"loot/{uuid.uuid4()}", peer.incarnation, checksum=checksum)
    stream.send(pb.PutRequest(source=pb.SourceMessage(offer=offer)))
    accept = stream.read().target.accept

    def send_little() -> None:
        endpoint, checksums = peer.plane._peers.entries[peer.peer].endpoints["ucx"], []
        for chunk in prepared.plan.chunks:
            data = np.array(source.stage(chunk, lambda: np.zeros(1 << 20, np.uint8)))
            checksums.append(XXH3_64(data))
            if chunk.index >= prepared.plan.index_chunk_count:
                data = data[:1].copy()
            endpoint.send(chunk_tag(accept.transfer, chunk.index), data, lambda _: None)
        if checksum == pb.CHECKSUM_XXH3_64:
            told = pb.ChunkChecksums(first_chunk=0, values=checksums)
            stream.send(pb.PutRequest(source=pb.SourceMessage(checksums=told)))

    peer.plane._submit(send_little)
    for message in messages(stream):
        assert message.target.HasField("stop")
        stop = pb.Stop(error=message.target.stop.error, sent_chunk_count=len(prepared.plan.chunks))
        stream.send(pb.PutRequest(source=pb.SourceMessage(stop=stop)))
    assert isinstance(stream.error, ProtocolViolation)
    assert "shorter" in stream.error.message
    reconnect(peer)


@pytest.mark.parametrize("fields", [{"extra": 1}, {"extra": 0, "checksum": pb.CHECKSUM_NONE}])
def test_checksums_with_an_offer_that_cannot_be_its_own_are_refused_before_anything_is_accepted(
    peer: RawClient, fields: dict[str, Any]
) -> None:
    extra = fields.pop("extra")
    prepared = Prepared.of(snapshot())
    offer = prepared.offer(f"loot/{uuid.uuid4()}", peer.incarnation, **fields)
    offer.checksums.extend([7] * (len(prepared.plan.chunks) + extra))
    stream = Stream(peer.stub.Put)
    stream.send(pb.PutRequest(source=pb.SourceMessage(offer=offer)))

    told = [message.target.WhichOneof("message") for message in messages(stream)]

    assert told == ["stop"]
    assert isinstance(stream.error, ProtocolViolation)
    assert stream.error.field == "first_chunk"
    arena = peer.stub.GetNode(pb.GetNodeRequest(), timeout=5).arena
    assert arena.receiving_bytes == arena.quarantined_bytes == 0
    peer.transfer(f"after/{uuid.uuid4()}", snapshot())
