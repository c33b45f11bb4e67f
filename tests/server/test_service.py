"""The service as a peer meets it: what it takes, what it refuses, and by which name."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import hurray_client as ht
from hurray_server.audit import Audit
from hurray_server.daemon import SERVICE_NAME
from hurray_server.identity import LocalCallers
from hurray_server.service import Service, _write
from hurray_server.shares import Share
from hurray_server.tally import Tally
from hurray_wire.descriptor import build_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.errors import (
    ArenaFull,
    CapabilityMismatch,
    GeometryMismatch,
    HurrayError,
    InternalError,
    InvalidContents,
    InvalidDescriptor,
    InvalidRequest,
    KeyBusy,
    KeyDeleted,
    KeyExists,
    KeyExpired,
    KeyNotFound,
    KeyOverwritten,
    LimitExceeded,
    PeerUnavailable,
    ProtocolViolation,
    RequestIdReused,
)
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.status import from_trailers
from hurray_wire.transport.base import TransportParameters
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import RunningDaemon, eventually, running_daemon
from support.raw import WAIT_S, Prepared, RawClient, Stream, messages, refusal, snapshot

pytestmark = pytest.mark.ucx


def fresh_key() -> str:
    return f"test/{uuid.uuid4()}"


def put_error(peer: RawClient, offer: pb.Offer, *, by_mover: bool = False) -> HurrayError:
    """How a put with this offer is refused, before anything is accepted. The mover's refusal is told as a Stop, too."""
    stream = Stream(peer.stub.Put)
    stream.send(pb.PutRequest(source=pb.SourceMessage(offer=offer)))
    told = [message.target.WhichOneof("message") for message in messages(stream)]
    assert told == (["stop"] if by_mover else [])
    assert stream.error is not None
    return stream.error


def get_error(peer: RawClient, **fields: Any) -> HurrayError:
    stream = Stream(peer.stub.Get)
    opening = {
        "request_id": str(uuid.uuid4()),
        "incarnation": peer.incarnation,
        "transports": ["ucx"],
        "key": "nowhere",
    }
    stream.send(pb.GetRequest(open=pb.GetOpen(**opening | fields)))
    assert list(messages(stream)) == []
    assert stream.error is not None
    return stream.error


# --- the node -------------------------------------------------------------------------------------------------------


def test_a_node_says_what_it_is_and_can_do(daemon: RunningDaemon) -> None:
    state = daemon.node_state()
    assert state.ready
    assert (state.protocol_version, state.node) == (1, "test")
    assert f"{state.incarnation:016x}" in daemon.ready
    assert [transport.kind for transport in state.transports] == ["shm", "tcp", "ucx"]
    assert not any(transport.address for transport in state.transports)
    assert "tcp_tx_seg_size" in state.transports[2].settings
    assert state.arena.total_bytes == state.limits.max_snapshot_bytes == 64 << 20
    assert "UCX 1." in state.ucx
    assert "libucp" in state.ucx


def test_health_and_reflection_answer(daemon: RunningDaemon, peer: RawClient) -> None:
    health = health_pb2_grpc.HealthStub(peer.channel)
    for service in ("", SERVICE_NAME):
        response = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    listed = next(reflection.ServerReflectionInfo(iter([request]), timeout=5))
    assert SERVICE_NAME in {service.name for service in listed.list_services_response.service}


def test_a_fault_of_the_node_is_told_by_its_log_id_only() -> None:
    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def abort(self, code: grpc.StatusCode, message: str, trailers: Any) -> None:
            self.error = from_trailers(code.name, message, trailers)
            raise grpc.aio.AbortError

    calls = Share("calls", "max_calls", 9, divided=False, retry_after_s=1.0)
    node = SimpleNamespace(tally=Tally(), calls=calls)
    context, service = Context(), Service(node, LocalCallers(), Audit(None), lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(service.GetNode(pb.GetNodeRequest(), context))  # type: ignore[arg-type]
    assert isinstance(context.error, InternalError)
    assert "log_id" in context.error.details
    assert "attribute" not in str(context.error)


# --- sessions -------------------------------------------------------------------------------------------------------


def session_error(peer: RawClient, first: pb.SessionRequest) -> HurrayError:
    stream = Stream(peer.stub.Session)
    stream.send(first)
    assert list(messages(stream)) == []
    assert stream.error is not None
    return stream.error


def test_a_session_is_refused_by_name(peer: RawClient) -> None:
    error = session_error(peer, peer.hello(protocol_version=99, incarnation=5))
    assert isinstance(error, CapabilityMismatch)
    assert (error.field, error.details["offered"], error.details["required"]) == ("protocol_version", "99", "1")
    error = session_error(peer, peer.hello(incarnation=5, transports=[pb.Transport(kind="carrier pigeon")]))
    assert isinstance(error, CapabilityMismatch)
    (own,) = peer.plane.parameters
    other = dict(own.settings) | {"tcp_rx_seg_size": "4096"}
    error = session_error(
        peer, peer.hello(incarnation=5, transports=[pb.Transport(kind="ucx", address=own.address, settings=other)])
    )
    assert isinstance(error, CapabilityMismatch)
    assert error.field == "ucx.tcp_rx_seg_size"
    assert isinstance(session_error(peer, peer.hello(incarnation=0)), InvalidRequest)
    assert isinstance(session_error(peer, pb.SessionRequest(bye=pb.Bye())), ProtocolViolation)
    oversized = TransportParameters("ucx", bytes(20000), {})
    error = session_error(
        peer, peer.hello(incarnation=5, transports=[pb.Transport(kind="ucx", address=oversized.address)])
    )
    assert isinstance(error, LimitExceeded)


def test_a_session_ends_in_order_and_a_newer_one_ends_the_older(daemon: RunningDaemon) -> None:
    with RawClient(daemon.address) as client:
        first = client.session
        assert first is not None
        client.connect()
        assert first.read() is None
        assert isinstance(first.error, PeerUnavailable)
        client.transfer(fresh_key(), snapshot())
        assert client.session is not None
        client.session.send(pb.SessionRequest(bye=pb.Bye()))
        answer = client.session.read()
        assert answer.HasField("bye")
        assert client.session.read() is None
        assert client.session.error is None
        prepared = Prepared.of(snapshot())
        assert isinstance(put_error(client, prepared.offer(fresh_key(), client.incarnation)), PeerUnavailable)


# --- put: what is refused ------------------------------------------------------------------------------------------


def test_offers_are_refused_before_anything_moves(daemon: RunningDaemon, peer: RawClient) -> None:
    prepared = Prepared.of(snapshot())
    good = prepared.offer(fresh_key(), peer.incarnation)

    def changed(**fields: Any) -> pb.Offer:
        return prepared.offer(**{"key": fresh_key(), "incarnation": peer.incarnation} | fields)

    truncated = [pb.TensorOffer(descriptor=good.tensors[0].descriptor[:-1])]
    other = Prepared.of(snapshot(pages=3)).offer("k", 0).tensors
    cases: list[tuple[pb.Offer, type[HurrayError]]] = [
        (changed(request_id="42"), InvalidRequest),
        (changed(key=""), InvalidRequest),
        (changed(key="a\nb"), InvalidRequest),
        (changed(key="x" * 513), InvalidRequest),
        (changed(lease=Duration(seconds=0)), InvalidRequest),
        (changed(lease=Duration(seconds=-1)), InvalidRequest),
        (changed(incarnation=7), PeerUnavailable),
        (changed(transports=["tls"]), CapabilityMismatch),
        (changed(checksum=9), CapabilityMismatch),
        (changed(chunk_bytes=5000), InvalidRequest),
        (changed(tensors=[]), InvalidRequest),
        (changed(tensors=truncated), InvalidDescriptor),
        (changed(tensors=[good.tensors[0], other[1]]), GeometryMismatch),
        (changed(token_counts=[6, 4]), InvalidContents),
        (changed(token_counts=[1]), InvalidContents),
        (changed(annotations={"n" * 300: "v"}), LimitExceeded),
    ]
    for offer, reason in cases:
        error = put_error(peer, offer)
        assert type(error) is reason, (offer, error)
    assert daemon.node_state().arena.receiving_bytes == 0
    peer.transfer(fresh_key(), snapshot())


def test_streams_that_begin_with_something_else_are_refused(peer: RawClient) -> None:
    for method, message in (
        (peer.stub.Put, pb.PutRequest()),
        (peer.stub.Put, pb.PutRequest(source=pb.SourceMessage(stop=pb.Stop()))),
        (peer.stub.Get, pb.GetRequest(target=pb.TargetMessage())),
    ):
        stream = Stream(method)
        stream.send(message)
        assert stream.read() is None
        assert isinstance(stream.error, ProtocolViolation)
    stream = Stream(peer.stub.Put)
    stream.finish()
    assert stream.read() is None
    assert isinstance(stream.error, ProtocolViolation)


def resident_peak_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


def test_a_declared_buffer_of_2_to_62_bytes_costs_no_memory(daemon: RunningDaemon, peer: RawClient) -> None:
    descriptor = build_descriptor(
        element_type=BY_NAME["float16"],
        total_tokens=4,
        num_heads=2,
        head_dim=8,
        page_size=4,
        num_pages=1 << 55,
        num_seqs=1,
        kv_role=2,
        layer_index=0,
        total_logical_pages=1,
        block_table_index_type=1,
        alignment=PAGE_BYTES,
    )
    assert descriptor.buffers[0].byte_size == 1 << 62
    offer = Prepared.of(snapshot()).offer(
        fresh_key(),
        peer.incarnation,
        tensors=[pb.TensorOffer(descriptor=descriptor.encode())],
        token_counts=[4],
    )
    mover = daemon.mover_pid
    assert mover is not None
    put_error(peer, offer)  # the first refusal of all imports things
    before = resident_peak_kib(daemon.pid), resident_peak_kib(mover)
    for _ in range(5):
        error = put_error(peer, offer)
        assert isinstance(error, LimitExceeded)
        assert error.field == "max_snapshot_bytes"
    after = resident_peak_kib(daemon.pid), resident_peak_kib(mover)
    assert max(new - old for new, old in zip(after, before, strict=True)) < 2048


def test_a_full_arena_refuses_and_says_when_to_come_back(daemon: RunningDaemon, peer: RawClient) -> None:
    free = daemon.node_state().arena.free_bytes
    pages = (free // 2 + (2 << 20)) // 128
    big = KV(pages)
    key = fresh_key()
    peer.transfer(key, big)
    error = put_error(peer, Prepared.of(big).offer(fresh_key(), peer.incarnation), by_mover=True)
    assert isinstance(error, ArenaFull)
    assert error.retry_after_s is not None
    peer.stub.Delete(pb.DeleteRequest(key=key), timeout=5)
    peer.transfer(key, big)  # at once: what was freed counts as free
    peer.stub.Delete(pb.DeleteRequest(key=key), timeout=5)


def KV(pages: int) -> ht.KVSnapshot:
    pool = np.ones((pages, 4, 2, 8), np.float16)
    return ht.KVSnapshot.from_paged({(0, "fused"): pool}, block_tables=[list(range(pages))], token_counts=[4 * pages])


# --- put: one outcome -----------------------------------------------------------------------------------------------


def test_a_receipt_says_what_was_committed(daemon: RunningDaemon, peer: RawClient) -> None:
    key = fresh_key()
    receipt = peer.transfer(key, snapshot(), lease=Duration(seconds=7), annotations={"model": "m"})
    stat = peer.stub.Stat(pb.StatRequest(key=key), timeout=5)
    assert receipt.key == stat.snapshot.key == key
    assert receipt.generation == stat.snapshot.generation > 0
    assert receipt.transport == "ucx"
    assert receipt.node == "test"
    assert receipt.volatile_memory
    assert (receipt.tensor_count, receipt.logical_page_count, receipt.distinct_page_count) == (4, 3, 2)
    assert (receipt.dead_slot_count, receipt.dirty_dead_slot_count) == (2 * 4, 0)
    assert receipt.verified_chunk_count > 0
    lease = receipt.expire_time.ToMicroseconds() - stat.snapshot.create_time.ToMicroseconds()
    assert abs(lease - 7e6) < 1e5
    assert dict(stat.snapshot.annotations) == {"model": "m"}
    assert (stat.snapshot.num_seqs, stat.snapshot.total_tokens) == (2, 9)
    assert list(stat.token_counts) == [6, 3]
    assert len(stat.tensors) == 4


def test_a_retry_returns_the_first_receipt_and_another_body_is_refused(peer: RawClient) -> None:
    prepared, key, request_id = Prepared.of(snapshot()), fresh_key(), str(uuid.uuid4())
    offer = prepared.offer(key, peer.incarnation, request_id=request_id)
    first = peer.put(prepared, offer)
    assert first.over.result(WAIT_S) is None
    again = peer.put(prepared, offer)
    assert again.over.result(WAIT_S) is None
    assert again.receipts == first.receipts
    assert not again.accepted.done()
    error = put_error(peer, prepared.offer(fresh_key(), peer.incarnation, request_id=request_id))
    assert isinstance(error, RequestIdReused)


def test_a_retry_of_a_put_that_runs_waits_for_its_outcome(peer: RawClient) -> None:
    prepared, key = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192), fresh_key()
    offer = prepared.offer(key, peer.incarnation)
    first = peer.put(prepared, offer, ready_tensors=1)
    first.accepted.result(WAIT_S)
    retry = peer.put(prepared, offer)
    other = put_error(peer, prepared.offer(key, peer.incarnation))
    assert isinstance(other, KeyBusy)
    assert not retry.over.done()
    peer.plane.announce(first.number, len(prepared.plan.descriptors))
    assert first.over.result(WAIT_S) is None
    assert retry.over.result(WAIT_S) is None
    assert retry.receipts == first.receipts
    assert len(first.receipts) == 1


def test_retries_that_wait_are_counted_as_transfers() -> None:
    """Each holds its offer, which may be as long as a message."""
    with running_daemon("[limits]\nmax_transfers = 3") as daemon, RawClient(daemon.address) as peer:
        prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
        offer = prepared.offer("k", peer.incarnation)
        first = peer.put(prepared, offer, ready_tensors=1)
        first.accepted.result(WAIT_S)
        retries = [peer.put(prepared, offer) for _ in range(6)]
        eventually(lambda: sum(retry.over.done() for retry in retries) == 4, 10, "the others are refused")
        for retry in retries:
            if retry.over.done():
                error = retry.over.result()
                assert isinstance(error, LimitExceeded)
                assert error.field == "max_transfers"
        peer.plane.announce(first.number, len(prepared.plan.descriptors))
        assert first.over.result(WAIT_S) is None
        waited = [retry for retry in retries if retry.over.result(WAIT_S) is None]
        assert [retry.receipts for retry in waited] == [first.receipts] * 2


def test_a_retry_of_a_put_that_fails_meanwhile_runs_anew(daemon: RunningDaemon, peer: RawClient) -> None:
    prepared, key = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192), fresh_key()
    offer = prepared.offer(key, peer.incarnation)
    first = peer.put(prepared, offer, ready_tensors=1)
    first.accepted.result(WAIT_S)
    retry = peer.put(prepared, offer)
    first.stream.cut()
    assert first.ended.result(WAIT_S).error is not None
    # The data-plane connection is cut with the stream it belonged to: the retry meets that, or a new one.
    error = retry.over.result(WAIT_S)
    assert error is None or error.code == "UNAVAILABLE"
    eventually(lambda: daemon.node_state().arena.receiving_bytes == 0, 5, "the first attempt is settled")
    peer.connect()
    last = peer.put(prepared, offer)
    assert last.over.result(WAIT_S) is None
    assert len(last.receipts) == 1


def test_overwriting_is_asked_for_and_leaves_a_trace(peer: RawClient) -> None:
    key = fresh_key()
    first = peer.transfer(key, snapshot())
    assert isinstance(put_error(peer, Prepared.of(snapshot()).offer(key, peer.incarnation)), KeyExists)
    second = peer.transfer(key, snapshot(seed=1), overwrite=True)
    assert second.generation > first.generation
    error = refusal(lambda: peer.stub.Stat(pb.StatRequest(key=key, generation=first.generation), timeout=5))
    assert isinstance(error, KeyOverwritten)


def test_a_lying_checksum_is_data_loss_and_leaves_no_trace(daemon: RunningDaemon, peer: RawClient) -> None:
    held = daemon.node_state().arena
    prepared, key = Prepared.of(snapshot()), fresh_key()

    def lie(_: object, message: pb.SourceMessage) -> bool:
        message.checksums.values[-1] ^= 1
        return True

    put = peer.put(prepared, prepared.offer(key, peer.incarnation), on_checksums=lie)
    error = put.over.result(WAIT_S)
    assert error is not None
    assert (error.code, error.reason) == ("DATA_LOSS", "CHECKSUM_MISMATCH")
    assert put.receipts == []
    assert isinstance(refusal(lambda: peer.stub.Stat(pb.StatRequest(key=key), timeout=5)), KeyNotFound)
    assert daemon.node_state().arena == held
    peer.transfer(key, snapshot())


# --- keys and leases -----------------------------------------------------------------------------------------------


def test_a_lease_that_ends_frees_the_memory_unasked(daemon: RunningDaemon, peer: RawClient) -> None:
    held, key = daemon.node_state().arena.held_bytes, fresh_key()
    peer.transfer(key, snapshot(), lease=Duration(nanos=200_000_000))
    assert daemon.node_state().arena.held_bytes > held
    eventually(lambda: daemon.node_state().arena.held_bytes == held, 5, "freed after the lease")
    for attempt in (pb.StatRequest(key=key),):
        assert isinstance(refusal(lambda attempt=attempt: peer.stub.Stat(attempt, timeout=5)), KeyExpired)


def test_renewing_keeps_and_deleting_ends(peer: RawClient) -> None:
    key = fresh_key()
    receipt = peer.transfer(key, snapshot(), lease=Duration(seconds=5))
    renewed = peer.stub.Renew(pb.RenewRequest(key=key, lease=Duration(seconds=500)), timeout=5)
    assert renewed.expire_time.seconds > receipt.expire_time.seconds + 400
    longest = peer.stub.Renew(pb.RenewRequest(key=key, lease=Duration(seconds=10**6)), timeout=5)
    assert longest.expire_time.seconds < receipt.expire_time.seconds + 3700
    assert peer.stub.Delete(pb.DeleteRequest(key=key), timeout=5).generation == receipt.generation
    for call in (
        lambda: peer.stub.Renew(pb.RenewRequest(key=key), timeout=5),
        lambda: peer.stub.Delete(pb.DeleteRequest(key=key), timeout=5),
    ):
        assert isinstance(refusal(call), KeyDeleted)
    assert isinstance(get_error(peer, key=key), KeyDeleted)


def test_a_page_of_a_listing_is_no_longer_than_a_message() -> None:
    notes = {f"{number:02}": "x" * 250 for number in range(64)}
    with running_daemon("[limits]\nmax_message_bytes = 65536") as node, RawClient(node.address) as client:
        keys = [f"{number}" for number in range(9)]
        for key in keys:
            client.transfer(key, snapshot(), annotations=notes)
        found, token, pages = [], "", 0
        while True:
            response = client.stub.List(pb.ListRequest(page_size=1000, page_token=token), timeout=5)
            assert response.snapshots
            assert response.ByteSize() < 65536
            found += [item.key for item in response.snapshots]
            token, pages = response.next_page_token, pages + 1
            if not token:
                break
        assert found == keys
        assert pages > 2


def test_listing_goes_page_by_page(peer: RawClient) -> None:
    prefix = fresh_key()
    for number in range(5):
        peer.transfer(f"{prefix}/{number}", snapshot())
    keys, token, pages = [], "", 0
    while True:
        page = peer.stub.List(pb.ListRequest(prefix=f"{prefix}/", page_size=2, page_token=token), timeout=5)
        keys += [info.key for info in page.snapshots]
        pages, token = pages + 1, page.next_page_token
        if not token:
            break
    assert keys == [f"{prefix}/{number}" for number in range(5)]
    assert pages == 3
    error = refusal(lambda: peer.stub.List(pb.ListRequest(page_token="!"), timeout=5))
    assert isinstance(error, InvalidRequest)


# --- get ------------------------------------------------------------------------------------------------------------


def test_a_get_of_nothing_waits_no_longer_than_asked(peer: RawClient) -> None:
    error = get_error(peer, key=fresh_key())
    assert isinstance(error, KeyNotFound)
    error = get_error(peer, key=fresh_key(), wait=Duration(nanos=50_000_000))
    assert isinstance(error, KeyNotFound)
    assert error.stage == "wait"
    assert isinstance(get_error(peer, incarnation=3), PeerUnavailable)
    assert isinstance(get_error(peer, key="\0"), InvalidRequest)


def test_a_get_waits_for_the_commit(daemon: RunningDaemon, peer: RawClient) -> None:
    key = fresh_key()
    stream = Stream(peer.stub.Get)
    opening = pb.GetOpen(
        key=key,
        request_id=str(uuid.uuid4()),
        incarnation=peer.incarnation,
        transports=["ucx"],
        wait=Duration(seconds=15),
    )
    stream.send(pb.GetRequest(open=opening))
    receipt = peer.transfer(key, snapshot())
    offer = stream.read().source.offer
    assert (offer.key, offer.generation) == (key, receipt.generation)
    assert peer.stub.Stat(pb.StatRequest(key=key), timeout=5).snapshot.reader_count == 1
    stream.cut()
    eventually(
        lambda: peer.stub.Stat(pb.StatRequest(key=key), timeout=5).snapshot.reader_count == 0,
        5,
        "the pin is given back",
    )


def test_a_view_is_given_only_by_what_can_show_it(peer: RawClient) -> None:
    """Copies come instead, to whoever asks for more."""
    key = fresh_key()
    peer.transfer(key, snapshot())
    stream = Stream(peer.stub.Get)
    opening = pb.GetOpen(
        key=key, request_id=str(uuid.uuid4()), incarnation=peer.incarnation, transports=["ucx"], view=True
    )
    stream.send(pb.GetRequest(open=opening))
    assert not stream.read().source.offer.view
    stream.cut()


def test_a_put_is_no_view(peer: RawClient) -> None:
    offer = Prepared.of(snapshot()).offer(fresh_key(), peer.incarnation, view=True)
    error = put_error(peer, offer)
    assert isinstance(error, InvalidRequest)
    assert error.field == "view"


def test_a_reader_under_way_keeps_a_deleted_snapshot_in_memory(daemon: RunningDaemon, peer: RawClient) -> None:
    held, key = daemon.node_state().arena.held_bytes, fresh_key()
    peer.transfer(key, snapshot())
    stream = Stream(peer.stub.Get)
    stream.send(
        pb.GetRequest(
            open=pb.GetOpen(
                key=key, request_id=str(uuid.uuid4()), incarnation=peer.incarnation, transports=["ucx"], consume=True
            )
        )
    )
    assert stream.read().source.HasField("offer")
    assert isinstance(get_error(peer, key=key, consume=True), KeyBusy)
    peer.stub.Delete(pb.DeleteRequest(key=key), timeout=5)
    assert daemon.node_state().arena.held_bytes > held
    stream.cut()
    eventually(lambda: daemon.node_state().arena.held_bytes == held, 5, "freed with its last reader")


def test_what_the_target_says_of_itself_is_checked(peer: RawClient) -> None:
    key = fresh_key()
    peer.transfer(key, snapshot())
    for accept in (pb.Accept(transfer=1 << 40, transport="ucx", window=4), pb.Accept(transfer=1, transport="tls")):
        stream = Stream(peer.stub.Get)
        opening = pb.GetOpen(key=key, request_id=str(uuid.uuid4()), incarnation=peer.incarnation, transports=["ucx"])
        stream.send(pb.GetRequest(open=opening))
        assert stream.read().source.HasField("offer")
        stream.send(pb.GetRequest(target=pb.TargetMessage(accept=accept)))
        for message in messages(stream):
            assert message.source.HasField("stop")
        assert isinstance(stream.error, ProtocolViolation)


def test_a_snapshot_comes_out_as_it_went_in_and_is_consumed_once(daemon: RunningDaemon, peer: RawClient) -> None:
    key, value = fresh_key(), snapshot(layers=3, pages=5)
    peer.transfer(key, value)
    config = ht.ClientConfig(ucx={"first_port": 21000, "last_port": 29999})  # type: ignore[arg-type]
    with ht.connect(daemon.address, config=config) as client:
        with client.get(key) as got:
            for layer in range(3):
                for role in ("key", "value"):
                    for seq in range(2):
                        assert (
                            got.tokens(layer=layer, role=role, seq=seq).tobytes()
                            == value.tokens(layer=layer, role=role, seq=seq).tobytes()
                        )
        client.get(key, consume=True).close()
        with pytest.raises(KeyDeleted):
            client.get(key)


def test_a_stream_that_breaks_under_an_answer_is_no_fault_of_the_node() -> None:
    class Broken:
        async def write(self, _message: object) -> None:
            raise RuntimeError("ExecuteBatchError")

    with pytest.raises(PeerUnavailable) as caught:
        asyncio.run(_write(Broken(), pb.SessionResponse()))  # type: ignore[arg-type]
    assert caught.value.stage == "session"
