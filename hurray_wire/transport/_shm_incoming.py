"""What one side receives from its peer through shared memory: receives and messages that wait for each other.

The peer's ring is memory that the peer can change at any time. It is read once, by the copy into the buffer that was
posted; whatever looks at bytes looks at that copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hurray_wire.errors import Cancelled, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.transport import _memfd
from hurray_wire.transport._shm_frames import (
    EAGER_CREDIT_BYTES,
    MAX_ANNOUNCED,
    MAX_RING_BYTES,
    Frame,
    Kind,
    eager_cost,
    violation,
)
from hurray_wire.transport._shm_outgoing import Emit, Finish
from hurray_wire.transport.base import Buffer, Completion

_CREDIT_STEP_BYTES: Final = EAGER_CREDIT_BYTES // 4
"""Credit is given back in steps of this size, not for each message."""


@dataclass(eq=False, slots=True)
class _Receive:
    tag: int
    buffer: Buffer | None
    """None: what comes is dropped."""
    done: Completion
    message_bytes: int = 0
    wanted_bytes: int = 0
    landed_bytes: int = 0

    def outcome(self) -> HurrayError | None:
        if self.buffer is None or self.message_bytes == self.buffer.nbytes:
            return None
        wrong = "longer" if self.message_bytes > self.buffer.nbytes else "shorter"
        return ProtocolViolation(
            f"a message was {wrong} than agreed",
            tag=f"{self.tag:#x}",
            offered=self.message_bytes,
            required=self.buffer.nbytes,
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
        self._next_number = 0
        self._announced_count = 0
        self._eager_untaken_bytes = 0
        self._credit_owed_bytes = 0
        self.copied_bytes = 0
        """Copied out of the ring so far."""

    def receive(self, tag: int, buffer: Buffer | None, done: Completion) -> None:
        """Take the message with this tag when it comes; without a buffer, drop it."""
        assert tag not in self._posted, f"tag {tag:#x} has a receive already"
        receive = _Receive(tag, buffer, done)
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
                self._take(message, _Receive(tag, None, _nobody))
                count += 1
        return count

    def on_ring(self, nbytes: int, descriptor: int) -> None:
        """The peer's ring; the descriptor stays the caller's."""
        if self._ring is not None:
            raise violation("ring", "a second one", "one")
        if not 0 < nbytes <= MAX_RING_BYTES or nbytes % PAGE_BYTES:
            raise violation("ring", nbytes, f"a multiple of {PAGE_BYTES}, at most {MAX_RING_BYTES}")
        try:
            self._ring = _memfd.map_received(descriptor, nbytes)
        except OSError as error:
            raise PeerUnavailable(f"the peer's ring cannot be mapped: {error}", stage="data_plane") from error

    def on_message(self, frame: Frame, payload: memoryview) -> None:
        """EAGER, ANNOUNCE or STAGED. The payload is only valid during the call."""
        if frame.nbytes == 0:
            raise violation("nbytes", 0, "at least 1")
        match frame.kind:
            case Kind.EAGER:
                self._eager_untaken_bytes += eager_cost(frame.nbytes)
                if self._eager_untaken_bytes > EAGER_CREDIT_BYTES:
                    raise violation("eager", self._eager_untaken_bytes, f"at most {EAGER_CREDIT_BYTES} untaken")
            case Kind.ANNOUNCE:
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

    def end(self, error: HurrayError) -> None:
        """Every receive ends with this error; messages are forgotten and the ring is let go of."""
        for receive in [*self._posted.values(), *self._pulling.values()]:
            self._finish(receive.done, error)
        self._posted.clear()
        self._pulling.clear()
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
        receive.message_bytes = frame.nbytes
        wanted = receive.wanted_bytes = 0 if receive.buffer is None else min(frame.nbytes, receive.buffer.nbytes)
        match frame.kind:
            case Kind.EAGER:
                if receive.buffer is not None:
                    receive.buffer[:wanted] = np.frombuffer(message.payload, np.uint8, wanted)
                self._give_credit(eager_cost(frame.nbytes))
            case Kind.STAGED:
                self._announced_count -= 1
                self._copy(frame, receive, wanted)
            case _:
                self._announced_count -= 1
                self._emit(Frame(Kind.PULL, number=frame.number, nbytes=wanted))
                if wanted:
                    self._pulling[frame.number] = receive
                    return
        self._finish(receive.done, receive.outcome())

    def _copy(self, frame: Frame, receive: _Receive, nbytes: int) -> None:
        """Out of the ring, and give the range back."""
        if receive.buffer is not None:
            assert self._ring is not None
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
