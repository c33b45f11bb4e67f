"""One transfer and the stream that carries it, brought together.

The stream's thread hands what the node says to the data plane; the data-plane thread hands what the machine says to the
stream. The machine decides. A transfer is over when both the machine has ended, so that no memory is in use any more,
and the node has told the outcome, or lost the stream. The caller's thread only waits for that: an interrupt (Ctrl-C) in
the middle of gRPC leaves a stream that can neither be read nor cancelled.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

import grpc
import structlog

from hurray_client.call import Alarm, Call
from hurray_client.node import Node, Session, has_details, rpc_error
from hurray_wire import session as s
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import (
    Cancelled,
    DataPlaneUnavailable,
    HurrayError,
    InternalError,
    Misuse,
    PeerUnavailable,
)
from hurray_wire.orders import Ended, Listener, Output
from hurray_wire.status import from_status

_log = structlog.get_logger("hurray.client")

SETTLE_S: Final = 2.0
"""How long the node may take to tell the outcome of a transfer that has ended here, draining included."""

SETTLE_LEAST_S: Final = 0.2

_PATIENCE_S: Final = 0.005
"""How long a transfer may run before the data plane is told that it has begun, unless something else wakes it."""

DRAIN: Final = s.SourcePhase.SETTLING.value
"""Stage of a failed transfer whose memory is not free yet; the same at source and target."""


class Exchange:
    """See the module. Messages go out through `tell`, the machine's end comes back through `listener`."""

    def __init__(self, node: Node, session: Session, method: str, refusal: Callable[[HurrayError], s.Event]) -> None:
        """`refusal`: what it means to the machine that the node ended the transfer with this error. Raises Misuse."""
        self.node = node
        self.plane: DataPlane = session.plane
        self.number = session.plane.new_transfer()
        self.accepted = False
        self._side = _SIDES[method]
        self._refusal = refusal
        self._ended: Ended | None = None
        self._node_over = False
        self._awaits_first = method == "Get"
        self._take: Callable[[Any], None] | None = None
        self._takers: SimpleQueue[Callable[[Any], None]] = SimpleQueue()
        self._first: SimpleQueue[Any] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._settle_alarm: Alarm | None = None
        self._left = False
        self._to_keep = [None]
        self._failed = False
        self._stream = node.streams.take(method, self)

    # --- from the caller's thread -----------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """Send a message to the node."""
        self._stream.tell(self, message)

    def post(self, event: s.Event) -> None:
        """Feed the machine."""
        self.plane.post(self.number, event)

    def conclude(self, event: s.ReceiptReceived) -> None:
        """Feed the machine its receipt, and do not wait for its end: all was sent, and no memory of the caller's is in
        use."""
        self.plane.post(self.number, event, soon=False)
        if self._ended is None:
            self._ended = Ended(None, event.receipt, ())
            self._bell.put(None)

    def cancel(self) -> None:
        """The caller gives up."""
        self.post(s.Failed(Cancelled("the call was cancelled")))

    def first(self, call: Call, stage: str) -> Any:
        """The first message of the node; None for a transfer that ended without. Until it comes no machine keeps the
        time. Afterwards one of `follow`, `refuse`, `drop` and `abandon` is due.

        Raises RpcError, the node's error, and the errors of the call.
        """
        try:
            with call.on_cancel(lambda: self._first.put(None)):
                heard = None
                while heard is None:
                    with suppress(Empty):
                        heard = self._first.get(timeout=call.left_s(stage))
        except BaseException:
            self.abandon()
            raise
        if isinstance(heard, Exception):
            self._keep_stream()
            raise heard
        return None if heard is _END else heard

    def follow(self, take: Callable[[Any], None]) -> None:
        """Once the machine has begun: hand all that comes, in a get after the first message, to `take`, in the stream's
        thread. Whatever the node says before that, or the end of the stream, waits for it: a machine that has not begun
        would not hear of it, and wait for the rest of its time."""
        self._takers.put(take)

    def run(self, call: Call, *, for_node: bool = True) -> Ended:
        """Once the machine has begun: wait until both it and the node are done; how the machine ended. Without
        `for_node` a success of the machine is enough: nothing depends on what the node makes of it."""
        try:
            with call.on_cancel(self.cancel):
                try:
                    ended = self._wait(for_node=for_node)
                    return ended if ended.error is None else self._wait(for_node=True)
                except HurrayError:
                    raise
                except BaseException:
                    # The caller's thread is interrupted: memory may be in use until the machine has ended.
                    self.cancel()
                    self._wait(for_node=False)
                    raise
        finally:
            self._left = True
            self._keep_stream()
            self.plane.wake()

    def refuse(self, message: Any) -> None:
        """Before the machine has begun: tell the node why not, and wait until the node is done with it."""
        self.tell(message)
        self.drop()

    def drop(self) -> None:
        """Before the machine has begun: wait until the node is done with the transfer."""
        self._settle(SETTLE_S)
        self.follow(_ignore)
        while not self._node_over:
            self._bell.get()
        self._keep_stream()

    def abandon(self) -> None:
        """Before the machine has begun: cut the stream, and wait for nothing."""
        self.follow(_ignore)
        self._settle(0.0)

    def _wait(self, *, for_node: bool) -> Ended:
        # Not a condition or a future: an interrupt inside those can leave their lock taken.
        patience_s = _PATIENCE_S
        while self._ended is None or (for_node and not self._node_over):
            try:
                self._bell.get(timeout=patience_s)
            except Empty:
                patience_s = 1.0
                self.plane.wake()
                if self._ended is None and not self.plane.running:
                    self._settle(0.0)
                    raise DataPlaneUnavailable("the data plane of this process is gone", stage="drain") from None
        return self._ended

    def _settle(self, seconds: float) -> None:
        """Nothing more will be told: the node has this long to tell the outcome before the stream is cut."""
        self._settle_alarm = self.node.alarms.after(seconds, self._stream.cut)

    def _keep_stream(self) -> None:
        """If the node is done: the stream is free for another transfer, once, unless this one failed: then the two
        sides may disagree about where it ended. If the node is not done, its alarm cuts the stream."""
        if not self._node_over:
            return
        with suppress(IndexError):  # the caller's thread and the stream's may both come here
            self._to_keep.pop()
            if self._settle_alarm is not None:
                self._settle_alarm.cancel()
            self.node.streams.give_back(self._stream, keep=not self._failed)

    # --- from the data-plane thread ---------------------------------------------------------------------------------

    def listener(self, encode: Callable[[Output], Any]) -> Listener:
        """Where the machine's outputs go: to the node, as `encode` says them (None: not at all)."""

        def listen(output: Output) -> None:
            if isinstance(output, Ended):
                if not self._node_over:
                    drain_s = sum(seconds for stage, seconds in output.stages if stage == DRAIN)
                    self._settle(max(SETTLE_LEAST_S, SETTLE_S - drain_s))
                self._failed = self._failed or output.error is not None
                self._ended = output
                self._bell.put(None)
                return
            message = encode(output)
            if message is not None:
                self._stream.tell(self, message)

        return listen

    # --- from the stream's thread -----------------------------------------------------------------------------------

    def heard(self, response: Any) -> None:
        """See streams.User."""
        has_message, over = response.HasField(self._side), response.HasField("outcome")
        if over:
            # Known before the machine ends of what came with it, so that nobody waits for the node any more.
            self._node_over = True
        if has_message and self._awaits_first:
            self._awaits_first = False
            self._first.put(response)
        elif has_message:
            self._hand_over(response)
        if over and not self._awaits_first:
            self._await_machine()
        if over and response.outcome.HasField("error"):
            self._failed = True
            error = from_status(response.outcome.error)
            self.post(self._refusal(error))
            self._end(error)
        elif over:
            self._end(None, machine_knows=has_message)

    def lost(self, failure: Exception | None) -> None:
        """See streams.User."""
        if self._node_over:
            return
        if not self._awaits_first:
            self._await_machine()
        if isinstance(failure, grpc.RpcError):
            self._explain(failure)
        elif failure is not None:
            failure = self._fault(failure)
            self.post(s.Failed(failure))
        else:
            failure = PeerUnavailable("the node ended the stream", stage="offer", peer=self.node.target)
        self._node_over = True
        self._end(failure)

    def _hand_over(self, response: Any) -> None:
        take = self._await_machine()
        try:
            take(response)
        except HurrayError as error:
            self.post(s.Failed(error))

    def _await_machine(self) -> Callable[[Any], None]:
        if self._take is None:
            self._take = self._takers.get()
        return self._take

    def _end(self, failure: Exception | None, *, machine_knows: bool = False) -> None:
        """Nothing more will be heard."""
        if not machine_knows:
            self.post(s.StreamLost())
        self._first.put(failure or _END)
        self._bell.put(None)
        if self._left:
            self._keep_stream()

    def _explain(self, failure: grpc.RpcError) -> None:
        """Tell the machine what the status says: without details of the node it is no more than a broken stream, unless
        gRPC itself refused something."""
        error = rpc_error(failure, stage="pages" if self.accepted else "offer", peer=self.node.target)
        if has_details(failure):
            self.post(self._refusal(error))
        elif error.code not in ("DEADLINE_EXCEEDED", "UNAVAILABLE"):
            self.post(s.Failed(error))

    def _fault(self, error: Exception) -> HurrayError:
        """What neither the node nor gRPC's status explains: the channel was closed meanwhile, or a fault of ours."""
        if isinstance(error, HurrayError):
            return error
        if self.node.closed:
            return Misuse("the client is closed")
        log_id = uuid.uuid4().hex[:12]
        _log.error("internal error", log_id=log_id, node=self.node.target, exc_info=error)
        return InternalError("a fault of this program; its log has the cause", log_id=log_id)


_SIDES: Final = {"Put": "target", "Get": "source"}
"""The field of a response that has what the node says as the other side of the transfer."""

_END: Final = object()
"""Comes first in a transfer that ended well without a message."""


def _ignore(_message: Any) -> None:
    """What comes when nobody asks any more."""
