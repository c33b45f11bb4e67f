"""What one side receives from its peer through shared memory: receives and messages that wait for each other.

The peer's ring is memory that the peer can change at any time. It is read once, by the copy into the buffer that was
posted; whatever looks at bytes looks at that copy. What a view shows is mapped, and not looked at here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hurray_wire import memfd
from hurray_wire.errors import Cancelled, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.transport._shm_frames import (
    EAGER_CREDIT_BYTES,
    MAX_ANNOUNCED,
    MAX_RING_BYTES,
    Frame,
    Kind,
    eager_cost,
    grains_at_once,
    violation,
)
from hurray_wire.transport._shm_outgoing import Emit, Finish
from hurray_wire.transport.base import Buffer, Completion
from hurray_wire.view import Mapping, View

_CREDIT_STEP_BYTES: Final = EAGER_CREDIT_BYTES // 4
"""Credit is given back in steps of this size, not for each message."""


@dataclass(eq=False, slots=True)
class _Receive:
    tag: int
    done: Completion
    buffer: Buffer | None = None
    view: View | None = None
    """Neither: what comes is dropped."""
    message_bytes: int = 0
    is_shown: bool = False
    """Whether what came is a view."""
    wanted_bytes: int = 0
    landed_bytes: int = 0
    mapping: Mapping | None = None

    def meet(self, frame: Frame) -> None:
        """This message is taken: how much of it is wanted."""
        self.message_bytes = frame.nbytes
        self.is_shown = frame.kind is Kind.VIEW
        if self.view is not None and self.is_shown and self.view.nbytes == frame.nbytes:
            self.wanted_bytes = frame.nbytes
        elif self.buffer is not None and not self.is_shown:
            self.wanted_bytes = min(frame.nbytes, self.buffer.nbytes)

    def outcome(self) -> HurrayError | None:
        agreed = self.buffer if self.view is None else self.view
        if agreed is None:
            return None
        if self.is_shown != (self.view is not None):
            came, wanted = ("a view", "a message") if self.is_shown else ("a message", "a view")
            return ProtocolViolation(f"{came} came where {wanted} was agreed", tag=f"{self.tag:#x}")
        if self.message_bytes == agreed.nbytes:
            return None
        wrong = "longer" if self.message_bytes > agreed.nbytes else "shorter"
        return ProtocolViolation(
            f"a message was {wrong} than agreed",
            tag=f"{self.tag:#x}",
            offered=self.message_bytes,
            required=agreed.nbytes,
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Message:
    frame: Frame
    payload: bytes


class Incoming:
    """One direction of one connection. Raises ProtocolViolation for what the peer may not say."""

    def __init__(self, emit: Emit, finish: Finish) -> None:
        self._emit = emit
        self._finish = finish
        self._ring: Buffer | None = None
        self._posted: dict[int, _Receive] = {}
        self._untaken: dict[int, deque[_Message]] = {}
        self._pulling: dict[int, _Receive] = {}
        self._viewing: dict[int, _Receive] = {}
        self._next_number = 0
        self._announced_count = 0
        self._eager_untaken_bytes = 0
        self._credit_owed_bytes = 0
        self.copied_bytes = 0
        """Copied out of the ring so far."""

    def receive(self, tag: int, done: Completion, *, buffer: Buffer | None = None, view: View | None = None) -> None:
        """Take the message with this tag when it comes, or the view; with neither, drop it."""
        assert tag not in self._posted, f"tag {tag:#x} has a receive already"
        receive = _Receive(tag, done, buffer, view)
        message = self._pop_untaken(tag)
        if message is None:
            self._posted[tag] = receive
        else:
            self._take(message, receive)

    def forget(self, tag: int) -> None:
        """Withdraw a receive; one whose message is under way stays."""
        receive = self._posted.pop(tag, None)
        if receive is not None:
            self._finish(receive.done, Cancelled("the receive was withdrawn"))

    def drain_unknown(self, is_known: Callable[[int], bool]) -> int:
        """Drop the untaken messages of unknown tags; how many."""
        count = 0
        for tag in [tag for tag in self._untaken if not is_known(tag)]:
            while (message := self._pop_untaken(tag)) is not None:
                self._take(message, _Receive(tag, _nobody))
                count += 1
        return count

    def on_ring(self, nbytes: int, descriptor: int) -> None:
        """The peer's ring; the descriptor stays the caller's."""
        if self._ring is not None:
            raise violation("ring", "a second one", "one")
        if not 0 < nbytes <= MAX_RING_BYTES or nbytes % PAGE_BYTES:
            raise violation("ring", nbytes, f"a multiple of {PAGE_BYTES}, at most {MAX_RING_BYTES}")
        try:
            self._ring = memfd.map_received(descriptor, nbytes)
        except OSError as error:
            raise PeerUnavailable(f"the peer's ring cannot be mapped: {error}", stage="data_plane") from error

    def on_message(self, frame: Frame, payload: memoryview) -> None:
        """EAGER, ANNOUNCE, VIEW or STAGED. The payload is only valid during the call."""
        if frame.nbytes == 0:
            raise violation("nbytes", 0, "at least 1")
        match frame.kind:
            case Kind.EAGER:
                self._eager_untaken_bytes += eager_cost(frame.nbytes)
                if self._eager_untaken_bytes > EAGER_CREDIT_BYTES:
                    raise violation("eager", self._eager_untaken_bytes, f"at most {EAGER_CREDIT_BYTES} untaken")
            case Kind.ANNOUNCE | Kind.VIEW:
                if frame.number != self._next_number:
                    raise violation("number", frame.number, self._next_number)
                self._next_number += 1
                self._count_announced()
            case Kind.STAGED:
                self._check_range(frame)
                self._count_announced()
        receive = self._posted.pop(frame.tag, None)
        message = _Message(frame, bytes(payload))
        if receive is None:
            self._untaken.setdefault(frame.tag, deque()).append(message)
        else:
            self._take(message, receive)

    def on_piece(self, frame: Frame) -> None:
        """The next piece of a message that was pulled."""
        receive = self._pulling.get(frame.number)
        if receive is None:
            raise violation("number", frame.number, "a message that was pulled")
        self._check_range(frame)
        left_bytes = receive.wanted_bytes - receive.landed_bytes
        if not 0 < frame.nbytes <= left_bytes:
            raise violation("nbytes", frame.nbytes, f"1 to the {left_bytes} that are left")
        self._copy(frame, receive, frame.nbytes)
        receive.landed_bytes += frame.nbytes
        if receive.landed_bytes == receive.wanted_bytes:
            del self._pulling[frame.number]
            self._finish(receive.done, receive.outcome())

    def on_grains(self, frame: Frame, descriptors: tuple[int, ...]) -> None:
        """The next grains of a view that was pulled; the descriptors stay the caller's."""
        receive = self._viewing.get(frame.number)
        if receive is None:
            raise violation("number", frame.number, "a view that was pulled")
        assert receive.view is not None
        try:
            if receive.mapping is None:
                receive.mapping = Mapping(receive.wanted_bytes, frame.nbytes)
            mapping = receive.mapping
            count = grains_at_once(mapping.left_bytes, mapping.grain_bytes)
            is_last = count * mapping.grain_bytes >= mapping.left_bytes
            if (frame.nbytes, frame.offset) != (mapping.grain_bytes, mapping.mapped_bytes):
                offered, required = (frame.nbytes, frame.offset), (mapping.grain_bytes, mapping.mapped_bytes)
                raise violation("grains", "{} bytes at {}".format(*offered), "{} bytes at {}".format(*required))
            if len(descriptors) != count + is_last:
                raise violation("descriptors", len(descriptors), count + is_last)
            if not is_last:  # at once: the next ones come while these are mapped
                left_bytes = mapping.left_bytes - count * mapping.grain_bytes
                self._emit(Frame(Kind.PULL, number=frame.number, nbytes=left_bytes))
            mapping.add(descriptors[:count])
            if is_last:
                receive.view.memory = mapping.finish(descriptors[count])
        except OSError as error:
            raise PeerUnavailable(f"the peer's view cannot be mapped: {error}", stage="data_plane") from error
        if is_last:
            del self._viewing[frame.number]
            self._finish(receive.done, None)

    def end(self, error: HurrayError) -> None:
        """Every receive ends with this error; messages are forgotten, the ring and what was mapped are let go of."""
        for receive in [*self._posted.values(), *self._pulling.values(), *self._viewing.values()]:
            self._finish(receive.done, error)
        self._posted.clear()
        self._pulling.clear()
        self._viewing.clear()
        self._untaken.clear()
        self._ring = None

    def _count_announced(self) -> None:
        self._announced_count += 1
        if self._announced_count > MAX_ANNOUNCED:
            raise violation("announced", self._announced_count, f"at most {MAX_ANNOUNCED} untaken")

    def _check_range(self, frame: Frame) -> None:
        ring_bytes = 0 if self._ring is None else self._ring.nbytes
        if frame.offset + frame.nbytes > ring_bytes:
            raise violation("offset", f"{frame.nbytes} bytes at {frame.offset}", f"inside the ring of {ring_bytes}")

    def _pop_untaken(self, tag: int) -> _Message | None:
        messages = self._untaken.get(tag)
        if messages is None:
            return None
        message = messages.popleft()
        if not messages:
            del self._untaken[tag]
        return message

    def _take(self, message: _Message, receive: _Receive) -> None:
        frame = message.frame
        receive.meet(frame)
        wanted = receive.wanted_bytes
        match frame.kind:
            case Kind.EAGER:
                if wanted:
                    assert receive.buffer is not None
                    receive.buffer[:wanted] = np.frombuffer(message.payload, np.uint8, wanted)
                self._give_credit(eager_cost(frame.nbytes))
            case Kind.STAGED:
                self._announced_count -= 1
                self._copy(frame, receive, wanted)
            case _:
                self._announced_count -= 1
                self._emit(Frame(Kind.PULL, number=frame.number, nbytes=wanted))
                if wanted:
                    (self._viewing if receive.is_shown else self._pulling)[frame.number] = receive
                    return
        self._finish(receive.done, receive.outcome())

    def _copy(self, frame: Frame, receive: _Receive, nbytes: int) -> None:
        """Out of the ring, and give the range back."""
        if nbytes:
            assert self._ring is not None
            assert receive.buffer is not None
            start = receive.landed_bytes
            np.copyto(receive.buffer[start : start + nbytes], self._ring[frame.offset : frame.offset + nbytes])
            self.copied_bytes += nbytes
        self._emit(Frame(Kind.RELEASE, offset=frame.offset))

    def _give_credit(self, cost: int) -> None:
        self._eager_untaken_bytes -= cost
        self._credit_owed_bytes += cost
        if self._credit_owed_bytes >= _CREDIT_STEP_BYTES:
            self._emit(Frame(Kind.CREDIT, nbytes=self._credit_owed_bytes))
            self._credit_owed_bytes = 0


def _nobody(_error: HurrayError | None) -> None:
    """Hears of a message that is dropped."""
