"""TransferService over gRPC: check, call the core, map the error."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, Final, TypeVar

import structlog
from google.protobuf.message import DecodeError
from structlog.contextvars import bind_contextvars

from hurray_server.audit import Audit, Decision
from hurray_server.grants import Right
from hurray_server.identity import Callers
from hurray_server.node import Node
from hurray_server.principal import Principal
from hurray_server.requests import Running
from hurray_server.rpc import Context, answers, not_a_message
from hurray_server.store import Pin, Snapshot
from hurray_server.streams import FIRST_MESSAGE_S, Budget, Direction, TransferStream
from hurray_server.transfers import GetTransfer, PutTransfer
from hurray_wire.dtypes import BY_TAG
from hurray_wire.errors import (
    DeadlineExceeded,
    HurrayError,
    InvalidRequest,
    KeyNotFound,
    PeerUnavailable,
    ProtocolViolation,
)
from hurray_wire.image import align
from hurray_wire.limits import KEY_MAX_BYTES
from hurray_wire.memory import STANDARD
from hurray_wire.messages import (
    PROTOCOL_VERSION,
    check_key,
    check_place,
    check_request_id,
    check_sizes,
    check_transports,
    choose_transport,
    read_duration,
    read_offer,
    to_duration,
)
from hurray_wire.transport.settings import SHOWING
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1 import transfer_pb2_grpc

_log = structlog.get_logger("hurray.service")

INLINE_TENSORS: Final = 64
INLINE_TOKEN_COUNTS: Final = 1 << 14
"""An offer of more is checked in a thread: it takes milliseconds that other calls should not wait for."""

SCHEME_TAGS: Final = (0x01, 0x02, 0x03)
"""Quantization schemes of the format that are taken."""

LIST_DEFAULT: Final = 100
LIST_MAX: Final = 1000


class Service(transfer_pb2_grpc.TransferServiceServicer):
    """The handlers. `on_drain(deadline_s)` is called when an administrator asks for the node's end."""

    def __init__(self, node: Node, callers: Callers, audit: Audit, on_drain: Callable[[float], None]) -> None:
        self.callers: Final = callers
        self.audit: Final = audit
        self.tally: Final = node.tally
        self.calls: Final = node.calls
        self._node = node
        self._on_drain = on_drain
        self._version = version("hurray-transfer")  # read from a file: once, while there are descriptors to open it

    # --- the node -------------------------------------------------------------------------------------------------

    @answers
    async def GetNode(self, _: pb.GetNodeRequest, __: Context, ___: Decision) -> pb.GetNodeResponse:
        """See the contract."""
        node, limits = self._node, self._node.limits
        mover = node.link.started or mpb.MoverStarted()
        return pb.GetNodeResponse(
            protocol_version=PROTOCOL_VERSION,
            incarnation=node.incarnation,
            version=self._version,
            node=node.config.node,
            transports=[pb.Transport(kind=item.kind, settings=item.settings) for item in node.link.transports],
            type_tags=sorted(BY_TAG),
            scheme_tags=SCHEME_TAGS,
            device_tags=[node.device_tag],
            memory_classes=[STANDARD],
            limits=pb.NodeLimits(
                max_tensors=limits.max_tensors,
                max_descriptor_bytes=limits.max_descriptor_bytes,
                max_snapshot_bytes=limits.max_snapshot_bytes,
                max_sequences=limits.max_sequences,
                max_index_entries=limits.max_index_entries,
                max_lease=to_duration(node.config.leases.max_s),
            ),
            arena=node.link.usage.arena,
            ready=node.ready,
            ucx=mover.ucx,
            address=node.config.advertise or "",
            time=node.to_timestamp(node.now_s()),
            unusable_transports=node.link.usage.unusable,
        )

    @answers
    async def Session(self, requests: AsyncIterator[pb.SessionRequest], context: Context, decision: Decision) -> None:
        """See the contract."""
        first = await _first(requests, context)
        if first.WhichOneof("message") != "hello":
            raise ProtocolViolation("a session begins with Hello", offered=first.WhichOneof("message"))
        self._node.require_not_draining("session")
        session, welcome = await self._node.sessions.open(decision.caller, first.hello)
        decision.facts.update(peer=f"{session.peer:016x}", transports=session.transports)
        self.audit.record(decision, None)
        decision.begun = True
        orderly = False
        heard = asyncio.ensure_future(anext(requests, None))
        try:
            await _write(context, pb.SessionResponse(welcome=welcome))
            waits: set[asyncio.Future[Any]] = {heard, session.ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if session.ended.done():
                raise session.ended.result()
            try:
                message = heard.result()
            except DecodeError:
                raise not_a_message() from None
            orderly = message is not None and message.WhichOneof("message") == "bye"
            if message is not None and not orderly:
                raise ProtocolViolation("unexpected message", offered=message.WhichOneof("message"), required="bye")
        finally:
            heard.cancel()
            await self._node.sessions.close(session, abort=not orderly)
        if orderly:
            await _write(context, pb.SessionResponse(bye=pb.Bye()))

    @answers
    async def Drain(self, request: pb.DrainRequest, _: Context, decision: Decision) -> pb.DrainResponse:
        """See the contract."""
        decision.caller.require_admin()
        deadline_s = self._node.config.drain_s
        if request.HasField("deadline"):
            deadline_s = read_duration(request.deadline, "deadline")
        response = pb.DrainResponse(transfer_count=len(self._node.transfers))
        self._on_drain(deadline_s)
        return response

    # --- transfers ------------------------------------------------------------------------------------------------

    async def Put(self, _: object, context: Context) -> None:
        """See the contract."""
        await TransferStream(
            self,
            self._node,
            context,
            Direction(
                action="put",
                begin=self._begin_put,
                is_first=lambda message: message.source.HasField("offer"),
                to_input=lambda message: mpb.TransferInput(source=message.source),
                respond=lambda message, outcome: pb.PutResponse(target=message, outcome=outcome),
            ),
        ).serve()

    async def _begin_put(self, first: pb.PutRequest, budget: Budget, decision: Decision) -> PutTransfer | pb.Receipt:
        kind = first.source.WhichOneof("message")
        if kind != "offer":
            raise ProtocolViolation("a put begins with Offer", offered=kind)
        offer = first.source.offer
        if offer.view:
            raise InvalidRequest("a put is no view", field="view", offered="true", required="false")
        _name(decision, offer, Right.PUT, *([Right.DELETE] if offer.overwrite else []))
        check_sizes(offer, self._node.limits)
        running = await self._claim_request(decision.caller, offer, budget)
        if isinstance(running, pb.Receipt):
            decision.facts.update(generation=running.generation, retry=True)
            return running
        try:
            return await self._make_put(decision.caller, offer, running, budget)
        except BaseException:
            self._node.requests.fail(running)
            raise

    async def _claim_request(self, principal: Principal, offer: pb.Offer, budget: Budget) -> Running | pb.Receipt:
        """The request as one that now runs, or the receipt of its first success. While an earlier attempt runs, waits
        for its outcome."""
        node, digest = self._node, offer_digest(offer)
        while True:
            known = node.requests.look_up(principal.tenant, offer.request_id, digest, node.now_s())
            if isinstance(known, pb.Receipt):
                return known
            node.require_ready("offer", principal.tenant)
            if known is None:
                return node.requests.begin(principal.tenant, offer.request_id, digest)
            with node.beginning(principal.tenant):
                await self._wait(known.watch, budget.left_s(), "retry")

    async def _make_put(self, principal: Principal, offer: pb.Offer, running: Running, budget: Budget) -> PutTransfer:
        node = self._node
        lease_s = self._lease_s(offer.lease if offer.HasField("lease") else None)
        if len(offer.tensors) > INLINE_TENSORS or len(offer.token_counts) > INLINE_TOKEN_COUNTS:
            with node.beginning(principal.tenant):
                offered = await asyncio.to_thread(read_offer, offer, node.limits)
            node.require_ready("offer", principal.tenant)  # others may have begun meanwhile, or a drain
        else:
            offered = read_offer(offer, node.limits)
        check_place(offered.descriptors, node.device_tag, STANDARD, via_host=offer.via_host)
        session = node.sessions.find(principal, offer.incarnation)
        node.link.require_up("offer")
        transport = choose_transport(session.transports, offer.transports)
        claim = node.store.claim(offer.key, overwrite=offer.overwrite, now_s=node.now_s())
        with ExitStack() as undo:
            undo.callback(node.store.abandon, claim)
            charge = node.quotas.charge(principal.tenant, align(offered.plan.image_bytes))
            undo.callback(node.quotas.release, charge)
            end_slot = node.quotas.begin_transfer(principal.tenant)
            undo.callback(end_slot)
            transfer = PutTransfer(
                node,
                session,
                offer,
                offered,
                transport,
                running=running,
                claim=claim,
                charge=charge,
                end_slot=end_slot,
                lease_s=lease_s,
                budget_s=budget.left_s(),
            )
            undo.pop_all()
            return transfer

    async def Get(self, _: object, context: Context) -> None:
        """See the contract."""
        await TransferStream(
            self,
            self._node,
            context,
            Direction(
                action="get",
                begin=self._begin_get,
                is_first=lambda message: message.HasField("open"),
                to_input=lambda message: mpb.TransferInput(target=message.target),
                respond=lambda message, outcome: pb.GetResponse(source=message, outcome=outcome),
            ),
        ).serve()

    async def _begin_get(self, first: pb.GetRequest, budget: Budget, decision: Decision) -> GetTransfer:
        principal, node = decision.caller, self._node
        if first.WhichOneof("message") != "open":
            raise ProtocolViolation("a get begins with GetOpen", offered=first.WhichOneof("message"))
        _name(decision, first.open, Right.GET, *([Right.DELETE] if first.open.consume else []))
        check_transports(first.open.transports)
        node.sessions.find(principal, first.open.incarnation)
        node.require_ready("offer", principal.tenant)
        with ExitStack() as undo:
            end_slot = node.quotas.begin_transfer(principal.tenant)
            undo.callback(end_slot)
            pin = await self._wait_and_pin(first.open, budget)
            undo.callback(node.store.unpin, pin)
            _note(decision, pin.snapshot)
            session = node.sessions.find(principal, first.open.incarnation)
            node.require_ready("offer", principal.tenant)
            node.link.require_up("offer")
            # The caller is the target: its order counts.
            wanted = [kind for kind in first.open.transports if kind in session.transports]
            transport = choose_transport(wanted or session.transports, first.open.transports)
            view = first.open.view and transport in SHOWING and node.may_view(principal.tenant, pin.snapshot.contents)
            transfer = GetTransfer(
                node,
                session,
                pin,
                transport,
                first.open.request_id,
                view=view,
                checksum=(pb.CHECKSUM_MIX64 if first.open.checksum == pb.CHECKSUM_MIX64 else pb.CHECKSUM_XXH3_64),
                takes_checksums=first.open.takes_checksums,
                end_slot=end_slot,
                budget_s=budget.left_s(),
            )
            undo.pop_all()
            return transfer

    async def _wait_and_pin(self, open_: pb.GetOpen, budget: Budget) -> Pin:
        """Pin the snapshot, as soon as it is committed within the wait that the caller allows. Where that would be
        longer than the call may take, nobody knows at its end whether the snapshot comes: DeadlineExceeded."""
        node = self._node
        wait_s = read_duration(open_.wait, "wait") if open_.HasField("wait") else 0.0
        budget_s = budget.left_s()
        until_s = node.now_s() + min(wait_s, budget_s)
        while True:
            try:
                return node.store.pin(open_.key, open_.generation, node.now_s(), consume=open_.consume)
            except HurrayError as error:
                left_s = until_s - node.now_s()
                may_come = error.code == "NOT_FOUND" and (not open_.generation or isinstance(error, KeyNotFound))
                if not may_come or left_s <= 0:
                    if may_come and wait_s > budget_s:
                        raise DeadlineExceeded(
                            "the budget of the call ran out", stage="wait", budget_s=round(budget_s, 3)
                        ) from None
                    if wait_s:
                        error.details.update(stage="wait", wait_s=f"{wait_s:g}")
                    raise
            node.require_not_draining("wait")

            def watch(notify: Callable[[], None]) -> Callable[[], None]:
                return node.store.watch(open_.key, notify)

            try:
                await self._wait(watch, left_s, "wait")
            except DeadlineExceeded:
                continue  # one last look says what is there instead

    async def _wait(
        self, register: Callable[[Callable[[], None]], Callable[[], None]], timeout_s: float, stage: str
    ) -> None:
        """Wait until what was registered is called, or the node drains. Raises DeadlineExceeded."""
        woken = asyncio.Event()
        unregister = register(woken.set)
        undrain = self._node.on_drain(woken.set)
        try:
            async with asyncio.timeout(timeout_s):
                await woken.wait()
        except TimeoutError:
            raise DeadlineExceeded("the wait ran out", stage=stage, budget_s=round(timeout_s, 3)) from None
        finally:
            undrain()
            unregister()

    def _lease_s(self, lease: Any | None) -> float:
        leases = self._node.config.leases
        if lease is None:
            return leases.default_s
        lease_s = read_duration(lease, "lease")
        if lease_s == 0:
            raise InvalidRequest("a lease of no time", field="lease", offered="0 s", required="above 0 s")
        return min(lease_s, leases.max_s)

    # --- snapshots ------------------------------------------------------------------------------------------------

    @answers
    async def Stat(self, request: pb.StatRequest, _: Context, decision: Decision) -> pb.StatResponse:
        """See the contract."""
        _name(decision, request, Right.GET)
        snapshot = self._node.store.find(request.key, request.generation, self._node.now_s())
        response = pb.StatResponse(snapshot=self._info(snapshot), tensors=snapshot.contents.tensors)
        response.token_counts.extend(snapshot.contents.counts())
        return response

    @answers
    async def List(self, request: pb.ListRequest, _: Context, decision: Decision) -> pb.ListResponse:
        """See the contract."""
        if request.prefix:
            check_key(request.prefix)
        decision.facts["prefix"] = request.prefix
        size = min(request.page_size or LIST_DEFAULT, LIST_MAX)
        after, found = _read_page_token(request.page_token), list[Snapshot]()
        for prefix in decision.caller.listable(request.prefix):
            found += self._node.store.scan(prefix, after=after, limit=size + 1 - len(found), now_s=self._node.now_s())
        response, left_bytes = pb.ListResponse(), self._node.limits.max_message_bytes // 2
        for snapshot in found[:size]:
            info = self._info(snapshot)
            left_bytes -= info.ByteSize()
            if left_bytes < 0 and response.snapshots:
                break
            response.snapshots.append(info)
        if len(found) > len(response.snapshots):
            response.next_page_token = base64.urlsafe_b64encode(response.snapshots[-1].key.encode()).decode()
        return response

    @answers
    async def Delete(self, request: pb.DeleteRequest, _: Context, decision: Decision) -> pb.DeleteResponse:
        """See the contract."""
        _name(decision, request, Right.DELETE)
        snapshot = self._node.store.delete(request.key, request.generation, self._node.now_s())
        _note(decision, snapshot)
        _log.info("snapshot deleted", key=snapshot.key, generation=snapshot.generation)
        return pb.DeleteResponse(generation=snapshot.generation)

    @answers
    async def Renew(self, request: pb.RenewRequest, _: Context, decision: Decision) -> pb.RenewResponse:
        """See the contract."""
        _name(decision, request, Right.PUT)
        node = self._node
        lease_s = self._lease_s(request.lease if request.HasField("lease") else None)
        node.take_over(node.store.find(request.key, request.generation, node.now_s()), decision.caller.tenant)
        snapshot = node.store.renew(request.key, request.generation, lease_s=lease_s, now_s=node.now_s())
        _note(decision, snapshot)
        return pb.RenewResponse(generation=snapshot.generation, expire_time=self._node.to_timestamp(snapshot.expires_s))

    def _info(self, snapshot: Snapshot) -> pb.SnapshotInfo:
        contents = snapshot.contents
        return pb.SnapshotInfo(
            key=snapshot.key,
            generation=snapshot.generation,
            create_time=self._node.to_timestamp(snapshot.created_s),
            expire_time=self._node.to_timestamp(snapshot.expires_s),
            held_bytes=contents.held_bytes,
            tensor_count=len(contents.tensors),
            num_seqs=contents.num_seqs,
            total_tokens=contents.total_tokens,
            page_size=contents.page_size,
            num_pages=contents.num_pages,
            reader_count=snapshot.reader_count,
            annotations=contents.annotations,
        )


def _name(decision: Decision, request: Any, *rights: Right) -> None:
    """Check the names in a request, complete its key, and see that the caller has these rights to it. Nothing has been
    looked up until then, so that a refusal is the same whatever is held. Raises InvalidRequest, PermissionDenied."""
    check_key(request.key)
    request.key = decision.caller.key(request.key)
    check_key(request.key)
    decision.facts["key"] = request.key
    if hasattr(request, "request_id"):
        check_request_id(request.request_id)
        decision.facts["request_id"] = request.request_id
    bind_contextvars(tenant=decision.caller.tenant, **decision.facts)
    for right in rights:
        decision.caller.require(right, request.key)


def _note(decision: Decision, snapshot: Snapshot) -> None:
    """Which snapshot it came to, for the audit log."""
    decision.facts.update(generation=snapshot.generation, bytes=snapshot.contents.held_bytes)


MessageT = TypeVar("MessageT")


async def _first(requests: AsyncIterator[MessageT], context: Context) -> MessageT:
    """The message that begins a stream. Raises ProtocolViolation, DeadlineExceeded."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            return await anext(requests)
    except StopAsyncIteration:
        raise ProtocolViolation("the stream ended before its first message") from None
    except DecodeError:
        raise not_a_message() from None
    except TimeoutError:
        raise DeadlineExceeded(
            "no first message in time", stage="open", budget_s=FIRST_MESSAGE_S, peer=context.peer()
        ) from None


async def _write(context: Context, message: pb.SessionResponse) -> None:
    """Say something in a session. Raises PeerUnavailable where its stream is broken."""
    try:
        await context.write(message)
    except Exception:  # whatever gRPC raises on a stream that cannot be written
        raise PeerUnavailable("the stream broke", stage="session") from None


def offer_digest(offer: pb.Offer) -> bytes:
    """What makes two offers the same request: all but how the source is reached, and in what pieces it sends."""
    body = pb.Offer()
    body.CopyFrom(offer)
    body.ClearField("incarnation")
    body.ClearField("transports")
    body.ClearField("chunk_bytes")
    body.ClearField("checksums")
    return hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=32).digest()


def _read_page_token(token: str) -> str:
    try:
        if len(token) > 2 * KEY_MAX_BYTES:
            raise ValueError
        return base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest("not a page token", field="page_token", offered=token[:64]) from None
