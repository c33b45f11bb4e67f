"""Streams that carry transfers, of Put and Get alike: one transfer at a time, each begun by a first message.

A stream of one transfer ends with it, with the call's status. One that is kept tells the outcome as a message and
waits for the next: opening a stream costs about as much as all messages of a small transfer. What breaks the stream
breaks the transfer that it carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from structlog.contextvars import bind_contextvars, clear_contextvars

from hurray_server.audit import Decision
from hurray_server.node import Node
from hurray_server.rpc import Answering, Context, abort, judge, not_a_message
from hurray_server.transfers import Mailbox, Transfer
from hurray_wire.errors import DeadlineExceeded, HurrayError, NodeDraining, PeerUnavailable, ProtocolViolation
from hurray_wire.messages import read_duration
from hurray_wire.status import to_status
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb

GRACE_S: Final = 5.0
"""A caller's gRPC deadline is its budget and this much more, so that the error with a stage comes first."""

FIRST_MESSAGE_S: Final = 30.0
"""How long a stream may be open without a transfer."""


class Budget:
    """What is left of the caller's time: of what it stated with the first message, or of the call's deadline."""

    def __init__(self, context: Context, first: Any, max_s: float) -> None:
        """Raises InvalidRequest."""
        loop = asyncio.get_running_loop()
        if first.HasField("budget"):
            left_s = read_duration(first.budget, "budget")
        else:
            remaining_s = context.time_remaining()
            # A deadline too short for the grace gives up a part of itself for it.
            left_s = max_s if remaining_s is None else max(remaining_s - GRACE_S, remaining_s / 2)
        self._until_s = loop.time() + min(max_s, left_s)

    def left_s(self) -> float:
        """Seconds, never less than 0."""
        return max(0.0, self._until_s - asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class Direction:
    """What Put and Get differ in. `begin` makes a transfer of a first message, or finds the receipt of an earlier one.
    It raises what is wrong with it."""

    action: str
    begin: Callable[[Any, Budget, Decision], Awaitable[Transfer[Any] | pb.Receipt]]
    is_first: Callable[[Any], bool]
    to_input: Callable[[Any], mpb.TransferInput]
    respond: Callable[[Any | None, pb.Outcome | None], Any]
    """`respond(message, outcome)`: either may be None."""


class TransferStream:
    """One call of Put or Get."""

    def __init__(self, servicer: Answering, node: Node, context: Context, direction: Direction) -> None:
        self._servicer = servicer
        self._node = node
        self._context = context
        self._direction = direction
        self._transfer: Transfer[Any] | None = None
        self._firsts: Mailbox[Any | HurrayError | None] = Mailbox()
        """First messages; None: no more of them; an error: what came could not be read."""
        self._has_carried = False
        self._loop = asyncio.get_running_loop()
        self._idle_since_s: float | None = self._loop.time()
        """None while it carries a transfer."""
        self._timer = self._loop.call_later(FIRST_MESSAGE_S, self._look)
        self._ending = ExitStack()
        self._begun = asyncio.Event()
        """Nothing is read while a transfer is being begun."""

    async def serve(self) -> None:
        """Carry transfers until the stream ends."""
        reader = asyncio.create_task(self._read())
        undrain = self._node.on_drain(lambda: self._firsts.put(None))
        try:
            first = await self._first()
            while first is not None:
                kept = not isinstance(first, HurrayError) and first.HasField("budget")
                error, told = await self._carry_one(first)
                first = None  # the call keeps what ends it, with this frame: a hostile offer takes a gigabyte
                if not kept:
                    if error is not None:
                        await abort(self._context, error)
                    return
                if not told:
                    with suppress(PeerUnavailable):  # its end is the reader's to see
                        await self._tell(None, pb.Outcome(error=to_status(error) if error is not None else None))
                first = await self._next()
            if self._node.draining:
                # Of a kept stream the next first message may be on its way: whoever sent it learns why none is taken.
                await abort(self._context, NodeDraining("the node is shutting down", stage="offer"))
        finally:
            self._ending.close()
            undrain()
            self._timer.cancel()
            reader.cancel()

    async def _first(self) -> Any:
        try:
            tenant = self._servicer.callers.principal(self._context).tenant
            self._ending.enter_context(self._servicer.calls.taken(tenant))
        except HurrayError as error:
            return error
        first = await self._firsts.get()
        if first is None and not self._node.draining:
            return ProtocolViolation("the stream ended before its first message")
        return first

    async def _next(self) -> Any:
        if self._node.draining:
            return None
        self._idle_since_s = self._loop.time()
        return await self._firsts.get()

    def _look(self) -> None:
        """Give up a stream that has carried nothing for long. One timer serves all its transfers."""
        left_s = FIRST_MESSAGE_S
        if self._idle_since_s is not None:
            left_s = self._idle_since_s + FIRST_MESSAGE_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._has_carried:
            self._firsts.put(None)
        else:
            self._firsts.put(
                DeadlineExceeded(
                    "no first message in time", stage="open", budget_s=FIRST_MESSAGE_S, peer=self._context.peer()
                )
            )

    async def _read(self) -> None:
        direction, is_new = self._direction, True
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # no stub
                if self._transfer is not None:
                    self._transfer.input(direction.to_input(message))
                    await self._node.link.drain()
                elif is_new or direction.is_first(message):
                    is_new = False
                    self._begun.clear()
                    self._firsts.put(message)
                    message = None  # nor does this frame keep it
                    await self._begun.wait()
                # Else it has crossed with the end of the transfer that it is about.
        except DecodeError:
            self._end_reading(not_a_message())
        except Exception:  # whatever gRPC raises on a stream that cannot be read: it is broken
            if self._transfer is not None:
                self._transfer.stream_lost()
            self._end_reading(None)
        else:
            self._end_reading(None)

    def _end_reading(self, error: HurrayError | None) -> None:
        if error is not None and self._transfer is not None:
            self._transfer.cancel(error)
        else:
            self._firsts.put(error)

    async def _carry_one(self, first: Any) -> tuple[HurrayError | None, bool]:
        """Begin a transfer and carry it to its end; what it failed with, and whether its outcome was told already."""
        context, direction = self._context, self._direction
        self._has_carried, self._idle_since_s = True, None
        clear_contextvars()
        bind_contextvars(method=direction.action.title(), address=context.peer())
        decision = Decision(direction.action, context.peer())

        async def work() -> bool:
            if isinstance(first, HurrayError):
                raise first
            kept = first.HasField("budget")
            try:
                budget = Budget(context, first, self._node.config.transfers.max_budget_s)
                transfer = await direction.begin(first, budget, decision)
                if isinstance(transfer, Transfer):
                    self._transfer = transfer
            finally:
                self._begun.set()
            if isinstance(transfer, Transfer):
                return await self._carry(transfer, decision, kept=kept)
            await self._tell(pb.TargetMessage(receipt=transfer), pb.Outcome() if kept else None)
            return True

        told, error = await judge(self._servicer, decision, context, work)
        self._begun.set()  # also where it was not even known who calls
        return error, bool(told)

    async def _carry(self, transfer: Transfer[Any], decision: Decision, *, kept: bool) -> bool:
        """Tell the peer what the transfer has to tell, until it is over, or has nothing more to tell. Raises its error;
        if the stream breaks first, the transfer is told."""
        try:
            while (message := await transfer.messages.get()) is not None:
                if kept and isinstance(message, pb.TargetMessage) and message.HasField("receipt"):
                    # What is left is between this node and its mover; the next one may begin before this is written.
                    self._transfer = None
                    await self._tell(message, pb.Outcome())
                    return True
                await self._tell(message, None)
        finally:
            self._transfer = None
            transfer.stream_lost()
            decision.facts.update(transfer.facts)
            decision.begun = transfer.accepted
        if transfer.error is not None:
            raise transfer.error
        return False

    async def _tell(self, message: Any, outcome: pb.Outcome | None) -> None:
        try:
            await self._context.write(self._direction.respond(message, outcome))
        except Exception:
            stage = None if self._transfer is None else self._transfer.stage
            raise PeerUnavailable("the stream broke", stage=stage) from None
