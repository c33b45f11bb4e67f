"""An endpoint of a socket transport: what is sent and received with tags, over one channel.

A short message goes at once, as far as the peer's credit reaches: then its receiver keeps it until a receive is
posted. Any other is announced, and moves when its receiver has cleared it: from the sender's memory into the posted
memory. So what a peer can make this side hold is bounded, a side that waits for memory never stops to read, and no two
sides can wait for each other.

Messages match receives of the same connection only: no peer can land in what another was meant to fill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar, Final, Protocol

from hurray_wire.errors import Cancelled, HurrayError, Misuse, PeerUnavailable, ProtocolViolation
from hurray_wire.transport._socket_channel import Channel
from hurray_wire.transport._socket_frames import (
    CREDIT_BYTES,
    HEADER_BYTES,
    MAX_ANNOUNCED,
    MAX_MESSAGE_BYTES,
    Kind,
    eager_cost,
    pack,
    unpack,
    violation,
)
from hurray_wire.transport.base import Buffer, Completion, Endpoint

_AHEAD_BYTES: Final = 16 << 10
"""Read at a time where headers and short messages are expected; what it holds of a long message's body is copied."""

_SINK_BYTES: Final = 64 << 10

_NOTHING: Final = memoryview(b"")

_STAGED_BYTES: Final = 1 << 20
"""Frames of the same connection follow each other in one call up to here; longer bodies go as one."""

_MAX_ANSWERS: Final = 2 * MAX_ANNOUNCED
"""More than everything that an honest peer can make this side say while it reads nothing."""

_MAX_VIEWS: Final = 256
"""Parts that one call sends; below IOV_MAX (1024)."""

STEP_BYTES: Final = 4 << 20
"""What one endpoint reads, and what it writes, before the others have their turn."""


@dataclass(eq=False, slots=True)
class _Send:
    """A send until its completion is due."""

    tag: int
    views: list[memoryview]
    nbytes: int
    done: Completion


@dataclass(eq=False, slots=True)
class _Receive:
    """A receive until its completion is due. `view` is None for one that drops its message."""

    tag: int
    view: memoryview | None
    done: Completion

    @property
    def nbytes(self) -> int:
        return len(self.view) if self.view is not None else 0


@dataclass(eq=False, slots=True)
class _Arrived:
    """A message that came before its receive: whole, or announced under a number."""

    payload: bytearray | None
    number: int
    nbytes: int


@dataclass(eq=False, slots=True)
class _Out:
    """What is being sent: `views` from number `at` on, `left_bytes` in all; `send` completes with it."""

    views: list[memoryview]
    left_bytes: int
    send: _Send | None = None
    at: int = 0

    def take(self, count: int) -> None:
        """The first `count` bytes, fewer than are left, were sent."""
        self.left_bytes -= count
        while count >= len(self.views[self.at]):
            count -= len(self.views[self.at])
            self.at += 1
        self.views[self.at] = self.views[self.at][count:]


class Flow(Enum):
    """DONE: nothing more to do. BLOCKED: the socket takes no more now. MORE: others have their turn first."""

    DONE = "done"
    BLOCKED = "blocked"
    MORE = "more"


class Owner(Protocol):
    """The transport, as its endpoints see it."""

    def finish(self, call: Callable[[], None]) -> None:
        """Call it in progress."""

    def stir(self, endpoint: SocketEndpoint) -> None:
        """The endpoint has something to send."""

    def release(self, endpoint: SocketEndpoint, channel: Channel | None, *, abort: bool) -> None:
        """The endpoint has ended."""


class SocketEndpoint(Endpoint):
    """A connection of a socket transport. Made by its `connect`; carries bytes from `bind` on."""

    takes_parts: ClassVar[bool] = True

    def __init__(
        self,
        owner: Owner,
        peer: int,
        peer_token: bytes,
        on_lost: Callable[[HurrayError], None],
        *,
        eager_max_bytes: int,
    ) -> None:
        self.peer = peer
        self.peer_token = peer_token
        self.identity: str | None = None
        """The peer's, out of its verified certificate; None in plain mode and before the connection is bound."""
        self._owner = owner
        self._on_lost = on_lost
        self._eager_max_bytes = eager_max_bytes
        self._channel: Channel | None = None
        self._ended_by: HurrayError | None = None
        self._operations: dict[_Send | _Receive, None] = {}

        self._outbox: deque[_Send] = deque()
        self._announced: dict[int, _Send] = {}
        self._next_number = 0
        self._credit = CREDIT_BYTES
        self._control: deque[bytes] = deque()
        self._cleared: deque[tuple[int, _Send, int]] = deque()
        self._wire: deque[_Out] = deque()

        self._posted: dict[int, _Receive] = {}
        self._arrived: dict[int, deque[_Arrived]] = {}
        self._landing: dict[int, tuple[_Receive, int, int]] = {}
        self._peer_number = 0
        self._peer_announced = 0
        self._held_cost = 0
        self._taken_cost = 0

        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead_start = self._ahead_end = 0
        self._body = _NOTHING
        self._sink_bytes = 0
        self._body_done: Callable[[], None] | None = None

    @property
    def alive(self) -> bool:
        return self._ended_by is None

    def send(self, tag: int, buffer: Buffer, done: Completion) -> None:
        view = self._view(buffer, done)
        if view is not None:
            self.send_parts(tag, [view], done)

    def send_parts(self, tag: int, parts: Sequence[memoryview], done: Completion) -> None:
        send = _Send(tag, [*parts], sum(map(len, parts)), done)
        if self._start(send):
            self._outbox.append(send)
            self._owner.stir(self)

    def receive(self, tag: int, buffer: Buffer, done: Completion) -> None:
        view = self._view(buffer, done)
        if view is not None:
            self._post(_Receive(tag, view, done))

    def forget(self, tag: int) -> None:
        receive = self._posted.pop(tag, None)
        if receive is not None:
            self._finish(receive, Cancelled("the receive was withdrawn"))

    def discard(self, tag: int, done: Completion) -> None:
        self._post(_Receive(tag, None, done))

    def close(self) -> None:
        self.end(Cancelled("the connection was closed here"), abort=False)

    def abort(self) -> None:
        self.end(self.gone("the connection was aborted here"), abort=True)

    def __repr__(self) -> str:
        state = "ended" if self._ended_by else "open" if self._channel else "connecting"
        return f"<SocketEndpoint peer={self.peer:#x} {state} operations={len(self._operations)}>"

    # --- for the transport ----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """True until the connection is bound or has ended."""
        return self._channel is None and self._ended_by is None

    def gone(self, why: str) -> PeerUnavailable:
        """The error for a peer that is there no more."""
        return PeerUnavailable(why, stage="data_plane", peer=f"{self.peer:#x}")

    def bind(self, channel: Channel, identity: str | None) -> None:
        """Carry frames over this channel from now on."""
        assert self.waiting
        self._channel = channel
        self.identity = identity
        self._owner.stir(self)

    def lose(self, error: HurrayError) -> None:
        """The connection ended without this side's doing."""
        if self._ended_by is None:
            self.end(error, abort=True)
            self._owner.finish(partial(self._on_lost, error))

    def end(self, error: HurrayError, *, abort: bool) -> None:
        """Complete everything that is pending, and let go of the channel. Nothing is touched from here on."""
        if self._ended_by is not None:
            return
        self._ended_by = error
        for operation in [*self._operations]:
            self._finish(operation, error)
        for held in (self._outbox, self._announced, self._control, self._cleared, self._wire):
            held.clear()
        for kept in (self._posted, self._arrived, self._landing):
            kept.clear()
        self._body, self._sink_bytes, self._body_done = _NOTHING, 0, None
        channel, self._channel = self._channel, None
        self._owner.release(self, channel, abort=abort)

    def drop_unknown(self, is_known: Callable[[int], bool]) -> int:
        """Drop arrived messages whose tag is not known; how many."""
        unknown = [tag for tag in self._arrived if not is_known(tag)]
        count = 0
        for tag in unknown:
            for message in self._arrived.pop(tag):
                count += 1
                self._drop(message)
        return count

    # --- operations -----------------------------------------------------------------------------------------------

    def _view(self, buffer: Buffer, done: Completion) -> memoryview | None:
        """The bytes of a buffer, or None where a socket cannot carry them, which makes the completion due."""
        try:
            view = memoryview(buffer)
        except (TypeError, ValueError, BufferError) as error:
            misuse = Misuse(f"a socket carries host memory only: {error}", stage="data_plane")
            self._owner.finish(partial(done, misuse))
            return None
        assert view.nbytes == len(view) > 0, "a buffer is uint8 and not empty"
        return view

    def _start(self, operation: _Send | _Receive) -> bool:
        """False where its completion is due already."""
        self._operations[operation] = None
        if self._ended_by is not None:
            self._finish(operation, self.gone("the connection is closed"))
            return False
        return True

    def _finish(self, operation: _Send | _Receive, error: HurrayError | None = None) -> None:
        del self._operations[operation]
        if isinstance(operation, _Send):
            operation.views.clear()
        else:
            operation.view = None
        self._owner.finish(partial(operation.done, error))

    def _post(self, receive: _Receive) -> None:
        if not self._start(receive):
            return
        messages = self._arrived.get(receive.tag)
        if messages is None:
            assert receive.tag not in self._posted, f"tag {receive.tag:#x} has a receive already"
            self._posted[receive.tag] = receive
            return
        message = messages.popleft()
        if not messages:
            del self._arrived[receive.tag]
        if message.payload is None:
            self._clear(receive, message.number, message.nbytes)
        else:
            self._land_kept(receive, message.payload)

    def _land_kept(self, receive: _Receive, payload: bytearray) -> None:
        count = min(len(payload), receive.nbytes)
        if receive.view is not None:
            receive.view[:count] = memoryview(payload)[:count]
        self._take_eager(len(payload))
        self._finish_receive(receive, len(payload))

    def _finish_receive(self, receive: _Receive, sent_bytes: int) -> None:
        """The last bytes of a message are in memory. Who drops it does not mind its length."""
        error = None
        if receive.view is not None and sent_bytes != receive.nbytes:
            wrong = "longer" if sent_bytes > receive.nbytes else "shorter"
            error = ProtocolViolation(
                f"a message was {wrong} than agreed",
                tag=f"{receive.tag:#x}",
                offered=sent_bytes,
                required=receive.nbytes,
            )
        self._finish(receive, error)

    def _clear(self, receive: _Receive, number: int, nbytes: int) -> None:
        """Answer an announcement with what the receive takes of it."""
        taken = min(nbytes, receive.nbytes)
        self._tell(pack(Kind.CLEAR, number, taken))
        if taken:
            self._landing[number] = (receive, taken, nbytes)
        else:
            self._peer_announced -= 1
            self._finish(receive)

    def _drop(self, message: _Arrived) -> None:
        if message.payload is None:
            self._peer_announced -= 1
            self._tell(pack(Kind.CLEAR, message.number, 0))
        else:
            self._take_eager(message.nbytes)

    def _take_eager(self, nbytes: int) -> None:
        """Memory of an eager message is free again: give its credit back, many at a time."""
        self._taken_cost += eager_cost(nbytes)
        if self._taken_cost >= CREDIT_BYTES // 4:
            self._tell(pack(Kind.CREDIT, 0, self._taken_cost))
            self._held_cost -= self._taken_cost
            self._taken_cost = 0

    def _tell(self, frame: bytes) -> None:
        self._control.append(frame)
        if len(self._control) == _MAX_ANSWERS:
            unread = violation("answers", _MAX_ANSWERS, "read by the peer that makes this side give them")
            self._owner.finish(partial(self.lose, unread))
        self._owner.stir(self)

    # --- sending --------------------------------------------------------------------------------------------------

    def write(self) -> tuple[bool, Flow]:
        """Send what there is, up to STEP_BYTES: whether anything went, and how it goes on.

        Raises OSError where the connection has ended.
        """
        channel, sent_bytes = self._channel, 0
        if channel is None:
            return False, Flow.DONE
        while sent_bytes < STEP_BYTES:
            self._stage()
            if not self._wire:
                return sent_bytes > 0, Flow.DONE
            count = channel.send(self._next_views())
            sent_bytes += count
            self._take_sent(count)
            if channel.blocked:
                return sent_bytes > 0, Flow.BLOCKED
        return True, Flow.MORE

    def _stage(self) -> None:
        """Put frames in the order they go: answers first, then new messages, then bodies that were cleared."""
        staged_bytes = sum(out.left_bytes for out in self._wire)
        while staged_bytes < _STAGED_BYTES and len(self._wire) < _MAX_VIEWS:
            if self._control:
                staged_bytes += self._put([memoryview(self._control.popleft())], HEADER_BYTES)
            elif self._outbox and len(self._announced) < MAX_ANNOUNCED:
                staged_bytes += self._stage_message(self._outbox.popleft())
            elif self._cleared:
                number, send, nbytes = self._cleared.popleft()
                head = memoryview(pack(Kind.DATA, number, nbytes))
                views = send.views if nbytes == send.nbytes else _first(send.views, nbytes)
                staged_bytes += self._put([head, *views], HEADER_BYTES + nbytes, send)
            else:
                return

    def _stage_message(self, send: _Send) -> int:
        nbytes = send.nbytes
        if nbytes <= self._eager_max_bytes and eager_cost(nbytes) <= self._credit:
            self._credit -= eager_cost(nbytes)
            head = memoryview(pack(Kind.EAGER, send.tag, nbytes))
            return self._put([head, *send.views], HEADER_BYTES + nbytes, send)
        self._announced[self._next_number] = send
        self._next_number += 1
        return self._put([memoryview(pack(Kind.ANNOUNCE, send.tag, nbytes))], HEADER_BYTES)

    def _put(self, views: list[memoryview], nbytes: int, send: _Send | None = None) -> int:
        self._wire.append(_Out(views, nbytes, send))
        return nbytes

    def _next_views(self) -> list[memoryview]:
        """What one call sends."""
        views: list[memoryview] = []
        for out in self._wire:
            views += out.views[out.at : out.at + _MAX_VIEWS - len(views)]
            if len(views) == _MAX_VIEWS:
                break
        return views

    def _take_sent(self, count: int) -> None:
        while count:
            out = self._wire[0]
            if count < out.left_bytes:
                out.take(count)
                return
            count -= out.left_bytes
            self._wire.popleft()
            if out.send is not None:
                self._finish(out.send)

    # --- receiving ------------------------------------------------------------------------------------------------

    def read(self) -> tuple[bool, Flow]:
        """Receive what there is, up to STEP_BYTES: whether anything came, and how it goes on.

        Raises OSError at the end of the connection, ProtocolViolation for what no peer of this version sends.
        """
        channel, received_bytes = self._channel, 0
        if channel is None:
            return False, Flow.DONE
        while received_bytes < STEP_BYTES:
            body = bool(self._body)
            view = self._body[: STEP_BYTES - received_bytes] if body else self._ahead[self._ahead_end :]
            count = channel.receive_into(view)
            received_bytes += count
            if body:
                self._body = self._body[count:]
                self._continue_body()
            else:
                self._ahead_end += count
                self._parse()
            if count < len(view):
                channel.expect(len(self._body))
                return received_bytes > 0, Flow.DONE
        return True, Flow.MORE

    def _parse(self) -> None:
        """Go through what was read ahead: whole headers, and bodies as far as it has them."""
        while True:
            available = self._ahead_end - self._ahead_start
            if self._body:
                count = min(available, len(self._body))
                if not count:
                    break
                self._body[:count] = self._ahead[self._ahead_start : self._ahead_start + count]
                self._ahead_start += count
                self._body = self._body[count:]
                self._continue_body()
            elif available >= HEADER_BYTES:
                kind, tag, length = unpack(self._ahead, self._ahead_start)
                self._ahead_start += HEADER_BYTES
                self._take_frame(kind, tag, length)
            else:
                break
        rest = self._ahead_end - self._ahead_start
        self._ahead[:rest] = bytes(self._ahead[self._ahead_start : self._ahead_end])
        self._ahead_start, self._ahead_end = 0, rest

    def _continue_body(self) -> None:
        """At the end of a body's part: on to what is to be dropped of it, or to what comes after it."""
        if self._body:
            return
        self._body = _NOTHING  # an empty slice would still hold on to the caller's memory
        if self._sink_bytes:
            self._body = memoryview(bytearray(min(self._sink_bytes, _SINK_BYTES)))
            self._sink_bytes -= len(self._body)
        elif self._body_done is not None:
            done, self._body_done = self._body_done, None
            done()

    def _take_frame(self, kind: Kind, tag: int, length: int) -> None:
        match kind:
            case Kind.EAGER:
                self._take_eager_frame(tag, length)
            case Kind.ANNOUNCE:
                self._take_announcement(tag, length)
            case Kind.CLEAR:
                self._take_clear(tag, length)
            case Kind.DATA:
                self._take_data(tag, length)
            case Kind.CREDIT:
                if self._credit + length > CREDIT_BYTES:
                    raise violation("credit", length, f"at most {CREDIT_BYTES - self._credit}")
                self._credit += length
                self._owner.stir(self)

    def _take_eager_frame(self, tag: int, nbytes: int) -> None:
        if not 1 <= nbytes <= self._eager_max_bytes:
            raise violation("length", nbytes, f"1 to {self._eager_max_bytes} for a message that was not announced")
        if self._held_cost + eager_cost(nbytes) > CREDIT_BYTES:
            raise violation("length", nbytes, "within the credit")
        self._held_cost += eager_cost(nbytes)
        receive = self._posted.pop(tag, None)
        if receive is None:
            payload = bytearray(nbytes)
            self._expect_body(memoryview(payload), 0, partial(self._keep, tag, payload))
            return
        taken = min(nbytes, receive.nbytes)
        view = receive.view[:taken] if receive.view is not None else _NOTHING

        def landed() -> None:
            self._take_eager(nbytes)
            self._finish_receive(receive, nbytes)

        self._expect_body(view, nbytes - taken, landed)

    def _keep(self, tag: int, payload: bytearray) -> None:
        receive = self._posted.pop(tag, None)
        if receive is not None:  # posted while the message came in
            self._land_kept(receive, payload)
        else:
            self._arrived.setdefault(tag, deque()).append(_Arrived(payload, 0, len(payload)))

    def _take_announcement(self, tag: int, nbytes: int) -> None:
        if not 1 <= nbytes <= MAX_MESSAGE_BYTES:
            raise violation("length", nbytes, f"1 to {MAX_MESSAGE_BYTES}")
        if self._peer_announced >= MAX_ANNOUNCED:
            raise violation("announcement", self._peer_announced + 1, f"at most {MAX_ANNOUNCED} open at a time")
        number = self._peer_number
        self._peer_number += 1
        self._peer_announced += 1
        receive = self._posted.pop(tag, None)
        if receive is not None:
            self._clear(receive, number, nbytes)
        else:
            self._arrived.setdefault(tag, deque()).append(_Arrived(None, number, nbytes))

    def _take_clear(self, number: int, nbytes: int) -> None:
        send = self._announced.pop(number, None)
        if send is None:
            raise violation("number", number, "of an open announcement")
        if nbytes > send.nbytes:
            raise violation("length", nbytes, f"at most the {send.nbytes} announced")
        if nbytes:
            self._cleared.append((number, send, nbytes))
        else:
            self._finish(send)
        self._owner.stir(self)

    def _take_data(self, number: int, nbytes: int) -> None:
        receive, taken, sent_bytes = self._landing.pop(number, (None, 0, 0))
        if receive is None:
            raise violation("number", number, "of a cleared announcement")
        if nbytes != taken:
            raise violation("length", nbytes, f"the {taken} cleared")
        assert receive.view is not None

        def landed() -> None:
            self._peer_announced -= 1
            self._finish_receive(receive, sent_bytes)

        self._expect_body(receive.view[:nbytes], 0, landed)

    def _expect_body(self, view: memoryview, sink_bytes: int, done: Callable[[], None]) -> None:
        """The next bytes go to `view`, as many more as `sink_bytes` nowhere; then `done`."""
        self._body, self._sink_bytes, self._body_done = view, sink_bytes, done
        self._continue_body()


def _first(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of what lies in these."""
    taken: list[memoryview] = []
    for view in views:
        if nbytes <= len(view):
            return [*taken, view[:nbytes]]
        taken.append(view)
        nbytes -= len(view)
    return taken
