"""Put and get: what is asked of the node, what the two session machines are given, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, cast

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from hurray_client.call import Call
from hurray_client.devices import CPU, Device, Way
from hurray_client.exchange import DRAIN, Exchange
from hurray_client.node import STAGING, Node, Session, TryAgain, has_details, is_passing, rpc_error
from hurray_client.progress import Counted, OnProgress, Reporter
from hurray_client.receipt import Receipt
from hurray_client.stream import NOTHING_READY, ReadyTensors
from hurray_wire import session as s
from hurray_wire.alike import pack_each
from hurray_wire.checksum import NONE, Hash
from hurray_wire.destination import Destination
from hurray_wire.errors import (
    CapabilityMismatch,
    GeometryMismatch,
    HurrayError,
    InvalidRequest,
    ProtocolViolation,
)
from hurray_wire.image import ImagePlan, plan_image
from hurray_wire.limits import Limits, window_for
from hurray_wire.memory import HOST, STANDARD
from hurray_wire.messages import (
    DURATION_MAX_S,
    OfferedSnapshot,
    check_key,
    check_place,
    check_request_id,
    choose_transport,
    read_offer,
    read_source_message,
    read_target_message,
    to_duration,
    to_source_message,
    to_target_message,
)
from hurray_wire.orders import Ended, Output, PrepareCommit, SourceOrder, TargetOrder
from hurray_wire.pages import runs
from hurray_wire.payload import SourcePayload, TargetPayload
from hurray_wire.pool import MemoryPool
from hurray_wire.prepare import PreparedSnapshot
from hurray_wire.snapshot import KVSnapshot, KVTensor
from hurray_wire.source_payloads import SnapshotSource, StagedSource
from hurray_wire.status import from_status, to_status
from hurray_wire.target_payloads import ImageTarget, OwnMemory, ScatterTarget, ViewTarget
from hurray_wire.transport.settings import SHOWING
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.validate import BlockStructure

EAGER_BYTES: Final = 64 << 10
"""A snapshot up to this size is staged before it is offered, and its checksums go with the offer."""


class ReceivedSnapshot(KVSnapshot):
    """A snapshot that a get brought. It outlives the client. `receipt` tells how it came.

    It is in memory of this process or, where `receipt.mapped_bytes` says so, its page pools are the node's own memory,
    read-only. The node holds that until the snapshot is closed or gone, and every array that was taken out of it, too.
    """

    receipt: Receipt

    @classmethod
    def of(cls, tensors: Sequence[KVTensor], structure: BlockStructure, receipt: Receipt) -> ReceivedSnapshot:
        """Of what the receipt is for."""
        received = cls(tensors, structure)
        received.receipt = receipt
        return received


def optional_duration(seconds: float | None, field_name: str) -> Duration | None:
    """A duration for the wire, or None. Raises InvalidRequest for one that is negative or not finite."""
    if seconds is None:
        return None
    if not (math.isfinite(seconds) and 0 <= seconds <= DURATION_MAX_S):
        raise InvalidRequest(
            "duration out of range",
            field=field_name,
            offered=seconds,
            required=f"0 to {DURATION_MAX_S:g} s",
        )
    return to_duration(seconds)


def check_generation(generation: int) -> None:
    """Raise InvalidRequest unless it can be a generation, or 0 for the newest."""
    if not 0 <= generation < 1 << 64:
        raise InvalidRequest("not a generation", field="generation", offered=generation, required="0 to 2**64 - 1")


@dataclass(frozen=True)
class PutOrder:
    """What a put asks for. All attempts of one put are alike."""

    key: str
    prepared: PreparedSnapshot
    request_id: str
    hash: Hash | None = None
    """None: as suits where the bytes are, on both sides."""
    via_host: bool = False
    lease_s: float | None = None
    overwrite: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    require_transport: str | None = None
    on_progress: OnProgress | None = None
    ready: ReadyTensors | None = None
    """Tensors that are final; None: all."""

    def __post_init__(self) -> None:
        check_key(self.key)
        check_request_id(self.request_id)

    def offer(self, plan: ImagePlan, incarnation: int, transports: list[str], *, hash_: Hash, staged: bool) -> pb.Offer:
        """As it is told to the node."""
        return pb.Offer(
            request_id=self.request_id,
            key=self.key,
            lease=optional_duration(self.lease_s, "lease_s"),
            overwrite=self.overwrite,
            incarnation=incarnation,
            tensors=[pb.TensorOffer(descriptor=encoded) for encoded in pack_each(plan.descriptors)],
            token_counts=self.prepared.structure.token_counts.tolist(),
            transports=transports,
            checksum=cast("pb.Checksum", hash_.number),
            chunk_bytes=plan.chunk_bytes,
            annotations=self.annotations,
            via_host=self.via_host,
            staged=staged,
        )


@dataclass(frozen=True)
class GetOrder:
    """What a get asks for."""

    key: str
    request_id: str
    wait_s: float = 0.0
    consume: bool = False
    generation: int = 0
    destination: Destination | None = None
    require: dict[str, str] = field(default_factory=dict)
    device: Device = CPU
    """What it is received into, where there is no destination."""
    via_host: bool = False
    require_transport: str | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        check_key(self.key)
        check_request_id(self.request_id)
        check_generation(self.generation)

    @property
    def lands_on(self) -> Device:
        """Where the pages end up."""
        return self.device if self.destination is None else self.destination.device

    def open(self, incarnation: int, transports: list[str], hash_: Hash) -> pb.GetOpen:
        """As it is told to the node."""
        return pb.GetOpen(
            key=self.key,
            generation=self.generation,
            wait=optional_duration(self.wait_s or None, "wait_s"),
            consume=self.consume,
            incarnation=incarnation,
            transports=transports,
            request_id=self.request_id,
            view=self.destination is None and self.device == CPU and all(kind in SHOWING for kind in transports),
            checksum=cast("pb.Checksum", hash_.number),
            takes_checksums=True,
        )


def _choose_transport(session: Session, required: str | None) -> str:
    if required is None:
        return session.transports[0]
    if required not in session.transports:
        reason = session.left_out.get(required)
        if reason is not None:
            why = f"does not connect this client and the node: {reason.message}"
        elif required in session.info.unusable_transports:
            why = f"cannot be used by the node: {session.info.unusable_transports[required]}"
        elif required not in session.info.transports:
            why = "is none of the node's"
        else:
            why = "was not asked for when this client connected: connect(transports=[...]) names it"
        raise CapabilityMismatch(
            f"the required transport {why}",
            field="require_transport",
            offered=", ".join(session.transports),
            required=required,
        )
    return required


def put_once(node: Node, call: Call, order: PutOrder) -> Receipt:
    """One attempt to put. Raises TryAgain where another may work, OutcomeUnknown where only another can tell."""
    session = node.session(call)
    transport = _choose_transport(session, order.require_transport)
    descriptors = [tensor.descriptor for tensor in order.prepared.tensors]
    way = Way.of(order.prepared.snapshot.device, session.plane.takes_device_memory(transport))
    plan = plan_image(descriptors, way.chunk_bytes(transport, node.config.chunk_bytes), Limits())
    told = hash_ = order.hash or way.hash(session.info.device_tags)
    offer = order.offer(plan, session.plane.incarnation, [transport], hash_=hash_, staged=way.in_host)
    payload: SourcePayload = SnapshotSource(order.prepared, plan, way.place, in_host=way.in_host)
    if order.ready is None and plan.wire_bytes <= EAGER_BYTES:
        with way.place.work():
            try:
                payload = staged = StagedSource(payload)
            except HurrayError as error:
                error.details.setdefault("stage", STAGING)
                raise
            if hash_.verifies:
                offer.checksums.extend(map(hash_, staged.chunks))
        told = NONE  # nothing more
    reporter = Reporter(call, order.on_progress, plan.wire_bytes) if order.on_progress is not None else None
    if reporter is not None:
        payload = cast("SourcePayload", Counted(payload, reporter))
    budget_s = call.left_s("offer")
    exchange = Exchange(node, session, "Put", s.PeerStopped)

    def take(response: pb.PutResponse) -> None:
        message = read_target_message(response.target)
        if isinstance(message, pb.Accept):
            if message.transport != transport:
                raise ProtocolViolation(
                    "the node chose a transport that was not offered",
                    field="transport",
                    offered=message.transport,
                    required=transport,
                )
            exchange.accepted = True
            exchange.plane.accept(exchange.number, message.transfer, message.transport, message.window)
            return
        if isinstance(message, s.ReceiptReceived):
            _check_receipt(message.receipt, order.request_id)
            if isinstance(payload, StagedSource) and payload.all_staged:
                exchange.conclude(message)
                return
        exchange.post(message)

    def encode(output: Output) -> pb.PutRequest:
        return pb.PutRequest(source=to_source_message(output))

    with reporter or nullcontext():
        exchange.tell(pb.PutRequest(source=pb.SourceMessage(offer=offer), budget=to_duration(budget_s)))
        begin = SourceOrder(session.peer, payload, told, budget_s, exchange.listener(encode))
        if order.ready is None:
            exchange.plane.begin_source(exchange.number, begin, soon=False)
        else:
            exchange.plane.begin_source(exchange.number, replace(begin, ready_tensors=NOTHING_READY))
            order.ready.follow(exchange.plane, exchange.number, plan)
        exchange.follow(take)
        ended = exchange.run(call)
        _raise_if_failed(exchange, ended)
    return Receipt.from_proto(ended.receipt)


def _check_receipt(receipt: pb.Receipt, request_id: str) -> None:
    if receipt.request_id != request_id:
        raise ProtocolViolation(
            "the receipt of another request",
            field="request_id",
            offered=receipt.request_id[:64],
            required=request_id,
        )


def get_once(node: Node, call: Call, order: GetOrder) -> ReceivedSnapshot:
    """One attempt to get. Raises TryAgain where another may work."""
    session = node.session(call)
    transport = _choose_transport(session, order.require_transport)
    budget_s = call.left_s("offer")
    exchange = Exchange(node, session, "Get", s.Failed)
    way = Way.of(order.lands_on, session.plane.takes_device_memory(transport))
    opening = order.open(session.plane.incarnation, [transport], way.hash())
    exchange.tell(pb.GetRequest(open=opening, budget=to_duration(budget_s)))
    offer = _await_offer(exchange, call, "wait" if order.wait_s else "offer")
    try:
        choose_transport([transport], offer.transports)
        offered = _check_offer(order, opening, offer)
        landing = _Landing(order.destination, offered, node.plane.memory, way)
        budget_s = call.left_s("offer")
    except HurrayError as error:
        exchange.refuse(pb.GetRequest(target=pb.TargetMessage(stop=pb.Stop(error=to_status(error)))))
        raise
    except BaseException:
        exchange.abandon()
        raise
    total_bytes = offered.plan.wire_bytes + offered.plan.mapped_bytes
    reporter = Reporter(call, order.on_progress, total_bytes) if order.on_progress is not None else None
    payload: TargetPayload = landing.payload
    if reporter is not None:
        payload = cast("TargetPayload", Counted(payload, reporter))
    scatters = order.destination is not None
    window = window_for(transport, offer.chunk_bytes, node.config.window, scatters=scatters)
    accept = pb.Accept(transfer=exchange.number, transport=transport, window=window)

    def take(response: pb.GetResponse) -> None:
        exchange.post(read_source_message(response.source))

    def encode(output: Output) -> pb.GetRequest | None:
        if isinstance(output, PrepareCommit):
            # Nobody else can see this memory: being complete and valid is all there is to its commit.
            exchange.post(s.Committed(_own_receipt(offer, output, transport, way)))
            return None
        return pb.GetRequest(target=to_target_message(output, lambda: accept))

    with reporter or nullcontext():
        exchange.accepted = True
        listener, checksums = exchange.listener(encode), tuple(offer.checksums)
        target = TargetOrder(
            session.peer, transport, payload, offered.hash, budget_s, window, listener, checksums=checksums
        )
        exchange.plane.begin_target(exchange.number, target)
        exchange.follow(take)
        # Of a view the node hears again, when it is let go of.
        ended = exchange.run(call, for_node=order.consume or offered.plan.view_chunk is None)
        if ended.error is not None:
            landing.explain(ended.error)
        _raise_if_failed(exchange, ended)
    receipt = replace(Receipt.from_proto(ended.receipt), node=session.info.node)
    return landing.snapshot(receipt)


def _raise_if_failed(exchange: Exchange, ended: Ended) -> None:
    error = ended.error
    if error is not None:
        passed = [stage for stage, _ in ended.stages if stage != DRAIN]
        error.details.setdefault("stage", passed[-1] if passed else "offer")
        if error.code in ("CANCELLED", "UNAVAILABLE"):
            error.details.setdefault("peer", exchange.node.target)
        # Without a connection nothing moved, whoever accepted: the session is lost, and its thread about to see it.
        again = not exchange.accepted or error.stage == "connect"
        raise TryAgain(error) if is_passing(error) and again else error


def _await_offer(exchange: Exchange, call: Call, stage: str) -> pb.Offer:
    """The first message of a get."""
    try:
        response: pb.GetResponse | None = exchange.first(call, stage)
    except grpc.RpcError as failure:
        if not has_details(failure):
            call.left_s(stage)
        refusal = rpc_error(failure, stage=stage, peer=exchange.node.target)
        raise TryAgain(refusal) if is_passing(refusal) else refusal from None
    except HurrayError as error:
        raise TryAgain(error) if is_passing(error) else error from None
    message = pb.SourceMessage() if response is None else response.source
    kind = message.WhichOneof("message")
    if kind == "offer":
        return message.offer
    exchange.drop()
    if kind == "stop":
        stopped = from_status(message.stop.error)
        raise TryAgain(stopped) if is_passing(stopped) else stopped
    raise ProtocolViolation("unexpected message", offered=kind or "nothing", required="offer", stage=stage)


def _check_offer(order: GetOrder, opening: pb.GetOpen, offer: pb.Offer) -> OfferedSnapshot:
    """Check what the node offers, before a byte of it moves. Raises what is wrong with it."""
    # A node that knows tenants says whose key it is, where the caller did not.
    own_key = "/" not in order.key and offer.key.endswith(f"/{order.key}")
    for field_name, offered, required in (
        ("key", offer.key, offer.key if own_key else order.key),
        ("generation", offer.generation, order.generation or offer.generation),
        ("view", offer.view, offer.view and opening.view),
    ):
        if offered != required:
            raise ProtocolViolation(
                "the node offers what was not asked for", field=field_name, offered=offered, required=required
            )
    checked = read_offer(offer, Limits())
    _check_annotations(offer.annotations, order.require)
    check_place(checked.descriptors, order.lands_on[0], STANDARD, via_host=order.via_host)
    if order.destination is not None:
        order.destination.check(checked.descriptors, checked.token_counts)
    return checked


def _check_annotations(offered: Mapping[str, str], required: Mapping[str, str]) -> None:
    different = [name for name in required if offered.get(name) != required[name]]
    if different:
        name = different[0]
        others = f" (and in {', '.join(different[1:])})" if different[1:] else ""
        raise GeometryMismatch(
            f"the snapshot and what is required of it differ in {name}{others}",
            field=name,
            offered=offered.get(name, "nothing"),
            required=required[name],
        )


class _Landing:
    """Where a get's bytes go: memory of its own, or the caller's pages."""

    def __init__(self, destination: Destination | None, offered: OfferedSnapshot, pool: MemoryPool, way: Way) -> None:
        self._destination = destination
        plan, counts = offered.plan, offered.token_counts
        self.payload: ImageTarget | ScatterTarget | ViewTarget
        if destination is not None:
            self.payload = ScatterTarget(plan, counts, destination, pool.take, place=way.place, in_host=way.in_host)
        elif plan.view_chunk is not None:
            self.payload = ViewTarget(plan, counts, pool.take)
        else:
            memory = OwnMemory(pool.take if way.place is HOST else way.place.take)
            self.payload = ImageTarget(plan, counts, memory, place=way.place, in_host=way.in_host)

    def snapshot(self, receipt: Receipt) -> ReceivedSnapshot:
        """What has arrived. After the commit."""
        payload = self.payload
        if self._destination is not None:
            placed = self._destination.snapshot()
            return ReceivedSnapshot.of(placed.tensors, placed.structure, receipt)
        assert not isinstance(payload, ScatterTarget)
        assert payload.structure is not None
        tensors = [
            KVTensor.over(descriptor, payload.buffer(number, 0), payload.parameters(number))
            for number, descriptor in enumerate(payload.summary().descriptors)
        ]
        return ReceivedSnapshot.of(tensors, payload.structure, receipt)

    def explain(self, error: HurrayError) -> None:
        """Add to the error of a failed get which pages of the caller it has cost."""
        pages = self.payload.touched_pages if isinstance(self.payload, ScatterTarget) else None
        if pages is not None:
            parts = (f"{first}-{first + count - 1}" for _, first, count in runs(np.sort(pages)).tolist())
            error.details["cleared_pages"] = ",".join(parts)


def _own_receipt(offer: pb.Offer, prepared: PrepareCommit, transport: str, way: Way) -> pb.Receipt:
    """The receipt of a get: told to the node, and given to the caller."""
    summary = prepared.summary
    staged = offer.staged or way.in_host or summary.changed_device
    return pb.Receipt(
        request_id=offer.request_id,
        key=offer.key,
        generation=offer.generation,
        wire_bytes=summary.wire_bytes,
        mapped_bytes=summary.mapped_bytes,
        tensor_count=len(summary.descriptors),
        logical_page_count=summary.logical_page_count,
        distinct_page_count=summary.distinct_page_count,
        dead_slot_count=summary.dead_slot_count,
        dirty_dead_slot_count=summary.dirty_dead_slot_count,
        verified_chunk_count=prepared.verified_chunk_count,
        checksum=offer.checksum,
        transport=transport,
        stages=[pb.StageTime(stage=name, duration=to_duration(seconds)) for name, seconds in prepared.stages],
        volatile_memory=True,
        staged_bytes=summary.wire_bytes if staged else 0,
        device_tag=way.place.device_tag,
    )
