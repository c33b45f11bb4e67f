"""Transfers that run, as the control process sees them: between a gRPC stream on one side and the mover on the other.

A transfer lives from the order to the mover until the mover's `ended`, whatever becomes of the stream meanwhile: only
then are key, request and pin given back. What it has to tell its peer waits in `messages`, None is the end.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import structlog

from hurray_server.quotas import Charge
from hurray_server.requests import Running
from hurray_server.sessions import Session
from hurray_server.store import Claim, Contents, Pin, Snapshot
from hurray_wire.alike import change_each, pack_each
from hurray_wire.errors import DataPlaneUnavailable, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.limits import window_for
from hurray_wire.messages import OfferedSnapshot
from hurray_wire.payload import held_in
from hurray_wire.status import from_status, to_status
from hurray_wire.transport.settings import SHOWING
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.view import VIEW_CHECKSUM

if TYPE_CHECKING:
    from hurray_server.node import Node

_log = structlog.get_logger("hurray.transfers")

OVERDUE_S: Final = 10.0
"""A mover that has not ended a transfer this long after its budget will never: it is condemned."""

MessageT = TypeVar("MessageT", pb.TargetMessage, pb.SourceMessage)


ItemT = TypeVar("ItemT")


class Mailbox(Generic[ItemT]):
    """A queue of any length for one reader: an asyncio.Queue without what that costs."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: ItemT) -> None:
        """Add an item."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> ItemT:
        """The next item, when there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class Transfer(ABC, Generic[MessageT]):
    """What puts and gets have in common. `error` is set before the end is in `messages`; None: it succeeded."""

    kind: str
    direction: str

    def __init__(
        self,
        node: Node,
        session: Session,
        key: str,
        request_id: str,
        transport: str,
        *,
        end_slot: Callable[[], None],
        budget_s: float,
    ) -> None:
        """`end_slot` is called when it is over. Raises DataPlaneUnavailable."""
        self.number: Final = node.link.new_transfer(self)
        self.tenant: Final = session.principal.tenant
        self.messages: Mailbox[MessageT | None] = Mailbox()
        self.error: HurrayError | None = None
        self.facts: dict[str, object] = {}
        """For the audit log."""
        self.stage = "offer"
        self.accepted = False
        """From then on bytes may have moved."""
        self.transport: Final = transport
        self._node = node
        self._end_slot = end_slot
        self._over = False
        self._stream_lost = False
        self._began_s = time.monotonic()
        self._names: dict[str, object] = {
            "transfer": self.number,
            "kind": self.kind,
            "key": key,
            "request_id": request_id,
            "transport": transport,
            "tenant": self.tenant,
            "peer": f"{session.peer:016x}",
        }
        """For the log."""
        self._overdue = asyncio.get_running_loop().call_later(
            budget_s + OVERDUE_S, node.link.condemn, f"transfer {self.number} is overdue"
        )
        node.add(self)

    def input(self, message: mpb.TransferInput) -> None:
        """Pass on what the peer said, or what happened."""
        message.transfer = self.number
        self._node.link.input(message)

    def stream_lost(self) -> None:
        """The stream to the peer broke. Nothing happens once the transfer is over."""
        if not self._over and not self._stream_lost:
            self._stream_lost = True
            self.input(mpb.TransferInput(stream_lost=mpb.StreamLost()))

    def cancel(self, error: HurrayError) -> None:
        """This node gives the transfer up."""
        self.input(mpb.TransferInput(cancel=to_status(error)))

    def on_mover_down(self, error: HurrayError) -> None:
        """See Outputs."""
        self._end(DataPlaneUnavailable(error.message, retry_after_s=error.retry_after_s, stage=self.stage))

    def _end(self, error: HurrayError | None) -> None:
        self._over = True
        self.error = error
        self._overdue.cancel()
        self._leave()
        self._settle()
        if error is not None and not self.succeeded:
            if self.accepted:
                self._node.tally.fail(self.direction, self.transport, error)
            _log.warning(
                "transfer failed",
                **self._names,
                seconds=self._seconds(),
                stage=error.stage or self.stage,
                reason=error.reason,
                error=str(error),
            )
        self.messages.put(None)
        self._node.ended(self)

    def _tell_success(self, event: str, done: pb.Receipt | mpb.SourceSummary, **facts: object) -> None:
        seconds = self._seconds()
        self._node.tally.succeed(
            self.direction,
            self.transport,
            seconds,
            done.stages,
            crossed_bytes=done.wire_bytes,
            mapped_bytes=done.mapped_bytes,
        )
        _log.info(event, **self._names, seconds=seconds, bytes=done.wire_bytes, **facts)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_s, 6)

    def _leave(self) -> None:
        """Make room for another."""
        self._node.remove(self)
        self._end_slot()

    @property
    def succeeded(self) -> bool:
        """Whether it has, whatever may follow."""
        return self._over and self.error is None

    @abstractmethod
    def on_output(self, output: mpb.TransferOutput) -> None:
        """See Outputs."""

    @abstractmethod
    def _settle(self) -> None:
        """Give back what the transfer held."""


class PutTransfer(Transfer[pb.TargetMessage]):
    """A snapshot that comes in."""

    kind = "put"
    direction = "in"

    def __init__(
        self,
        node: Node,
        session: Session,
        offer: pb.Offer,
        offered: OfferedSnapshot,
        transport: str,
        *,
        running: Running,
        claim: Claim,
        charge: Charge,
        end_slot: Callable[[], None],
        lease_s: float,
        budget_s: float,
    ) -> None:
        super().__init__(node, session, offer.key, offer.request_id, transport, end_slot=end_slot, budget_s=budget_s)
        self.stage = "reserve"
        self._offer = offer
        self._offered = offered
        self._running = running
        self._claim = claim
        self._charge = charge
        self._owner = session.principal.owner(offer.key)
        self._lease_s = lease_s
        self.snapshot: Snapshot | None = None
        """Once it is committed."""
        node.link.begin_target(
            mpb.BeginTarget(
                transfer=self.number,
                peer=session.peer,
                offer=without_names(offer),
                transport=transport,
                window=window_for(transport, offer.chunk_bytes, node.config.transfers.window),
                budget_s=budget_s,
                image_bytes=offered.plan.image_bytes,
                chunk_count=len(offered.plan.chunks),
                index_chunk_count=offered.plan.index_chunk_count,
                tenant=node.tenant_number(self._owner),
            )
        )
        self._held = _as_held(offer, offered, node.device_tag)  # while the mover works

    @property
    def succeeded(self) -> bool:
        """See Transfer."""
        return self.snapshot is not None

    def on_output(self, output: mpb.TransferOutput) -> None:
        """See Outputs."""
        match output.WhichOneof("output"):
            case "target":
                if output.target.WhichOneof("message") == "accept":
                    self.stage, self.accepted = "pages", True
                self.messages.put(output.target)
            case "prepared":
                self._commit(output.prepared)
            case "ended":
                self._end(from_status(output.ended.error) if output.ended.HasField("error") else None)

    def _commit(self, prepared: mpb.Prepared) -> None:
        """The one point at which the snapshot becomes visible, or never will be."""
        self.stage = "commit"
        if self._stream_lost or self.snapshot is not None:
            error = PeerUnavailable("the stream to the source broke before the commit", stage="commit")
            self.input(mpb.TransferInput(commit=mpb.CommitResult(error=to_status(error))))
            return
        node, descriptor = self._node, self._offered.descriptors[0]
        now_s = node.now_s()
        snapshot = node.store.commit(
            self._claim,
            Contents(
                memory=self.number,
                held_bytes=self._offered.plan.image_bytes,
                tensors=self._held,
                token_counts=self._offered.token_counts.tobytes(),
                total_tokens=descriptor.total_tokens,
                num_seqs=descriptor.num_seqs,
                page_size=descriptor.page_size,
                num_pages=descriptor.num_pages,
                annotations=dict(self._offer.annotations),
                viewed_by=self._owner if prepared.viewable else None,
                index_checksum=self._index_checksum(prepared),
            ),
            lease_s=self._lease_s,
            now_s=now_s,
        )
        self.snapshot = snapshot
        node.keep(snapshot, self._charge)
        receipt = prepared.receipt
        receipt.request_id = self._offer.request_id
        receipt.key = snapshot.key
        receipt.generation = snapshot.generation
        receipt.expire_time.CopyFrom(node.to_timestamp(snapshot.expires_s))
        receipt.volatile_memory = True
        receipt.node = node.config.node
        node.requests.succeed(self._running, receipt, lease_s=self._lease_s, now_s=now_s)
        self.facts = {"generation": snapshot.generation, "bytes": snapshot.contents.held_bytes}
        self._leave()
        # The source first: nothing that follows can change its outcome.
        self.messages.put(pb.TargetMessage(receipt=receipt))
        self.input(mpb.TransferInput(commit=mpb.CommitResult()))
        asyncio.get_running_loop().call_soon(self._after_commit, receipt)

    def _index_checksum(self, prepared: mpb.Prepared) -> int | None:
        index, chunk_bytes = self._offered.plan.chunks[0], min(map(self._node.chunk_bytes, SHOWING))
        return prepared.index_checksum if prepared.HasField("index_checksum") and index.nbytes <= chunk_bytes else None

    def _after_commit(self, receipt: pb.Receipt) -> None:
        self._node.leases_changed()
        self._node.tally.dirty_dead_slot_count += receipt.dirty_dead_slot_count
        self._tell_success(
            "snapshot committed",
            receipt,
            generation=receipt.generation,
            tensors=receipt.tensor_count,
            dirty_dead_slots=receipt.dirty_dead_slot_count,
        )

    def _settle(self) -> None:
        if self.snapshot is None:
            self._node.store.abandon(self._claim)
            self._node.quotas.release(self._charge)
            self._node.requests.fail(self._running)


class GetTransfer(Transfer[pb.SourceMessage]):
    """A snapshot that goes out. Takes over the pin. `view`: as a view, which keeps the pin after the transfer."""

    kind = "get"
    direction = "out"

    def __init__(
        self,
        node: Node,
        session: Session,
        pin: Pin,
        transport: str,
        request_id: str,
        *,
        view: bool,
        checksum: pb.Checksum,
        takes_checksums: bool,
        end_slot: Callable[[], None],
        budget_s: float,
    ) -> None:
        super().__init__(node, session, pin.snapshot.key, request_id, transport, end_slot=end_slot, budget_s=budget_s)
        self._pin = pin
        self._view = view
        if view:
            node.readers.begin(self.number, pin)
            node.store.limit(pin, node.now_s() + node.config.leases.max_pin_s)
            node.leases_changed()
        contents = pin.snapshot.contents
        offer = pb.Offer(
            tensors=contents.tensors,
            transports=[transport],
            checksum=checksum,
            chunk_bytes=node.chunk_bytes(transport),
            view=view,
            staged=node.stages(transport),
        )
        offer.token_counts.extend(contents.counts())
        if view and takes_checksums and contents.index_checksum is not None and checksum == pb.CHECKSUM_XXH3_64:
            offer.checksums.extend((contents.index_checksum, VIEW_CHECKSUM))
        self._untold: mpb.BeginSource | None = mpb.BeginSource(
            transfer=self.number, peer=session.peer, snapshot=contents.memory, budget_s=budget_s
        )
        self._offer = offer
        # Not before the caller is told, so that both read the offer at once: the mover would take this process's core.
        asyncio.get_running_loop().call_soon(self._begin)
        offer.request_id = request_id
        offer.key = pin.snapshot.key
        offer.generation = pin.snapshot.generation
        offer.annotations.update(contents.annotations)
        self.messages.put(pb.SourceMessage(offer=offer))

    def _begin(self) -> None:
        """Have the mover begin."""
        order, self._untold = self._untold, None
        if order is not None and not self._over:
            order.offer.CopyFrom(without_names(self._offer))
            self._node.link.begin_source(order)

    def input(self, message: mpb.TransferInput) -> None:
        """See Transfer."""
        self._begin()
        if message.target.HasField("accept"):
            self.stage, self.accepted = "pages", True
        elif message.target.HasField("receipt") and self.stage == "offer":
            # A source's machine takes it for that of an earlier attempt, which a get has none of.
            self.cancel(ProtocolViolation("a receipt for what was not accepted", offered="receipt", required="accept"))
            return
        super().input(message)

    def on_output(self, output: mpb.TransferOutput) -> None:
        """See Outputs."""
        match output.WhichOneof("output"):
            case "source":
                self.messages.put(output.source)
            case "ended":
                self._end(from_status(output.ended.error) if output.ended.HasField("error") else None)
                if self.error is None:
                    self._after_success(output.ended.source)

    def _settle(self) -> None:
        store, snapshot = self._node.store, self._pin.snapshot
        if self.error is None and self._pin.consume:
            store.consume(self._pin, self._node.now_s())
        if self._view:
            self._node.readers.transferred(self.number)
        else:
            store.unpin(self._pin)
        self._names |= {"generation": snapshot.generation, "consumed": self._pin.consume}

    def _after_success(self, summary: mpb.SourceSummary) -> None:
        self._tell_success("transfer succeeded", summary, mapped_bytes=summary.mapped_bytes)


def _as_held(offer: pb.Offer, offered: OfferedSnapshot, device_tag: int) -> tuple[pb.TensorOffer, ...]:
    """The tensors with device, class and alignment of the mover's memory."""
    held = []
    changed = change_each(offered.descriptors, partial(held_in, device_tag=device_tag))
    for tensor, encoded in zip(offer.tensors, pack_each(changed), strict=True):
        copy = pb.TensorOffer(descriptor=encoded)
        if tensor.HasField("kv_scale"):
            copy.kv_scale = tensor.kv_scale
        held.append(copy)
    return tuple(held)


def without_names(offer: pb.Offer) -> pb.Offer:
    """An offer as the mover gets it: what the bytes are, not whose or what for."""
    bare = pb.Offer(
        tensors=offer.tensors,
        transports=offer.transports,
        checksum=offer.checksum,
        chunk_bytes=offer.chunk_bytes,
        staged=offer.staged,
        view=offer.view,
    )
    bare.token_counts.MergeFrom(offer.token_counts)
    bare.checksums.MergeFrom(offer.checksums)
    return bare
