"""What one side sends to its peer through shared memory: messages, and the ring that they pass.

A message that is short goes with the socket. A longer one is either *staged*, already in the ring when it is sent, or
*announced*, and copied into the ring piece by piece once the peer has asked for it. Only what the peer asked for takes
free ranges of the ring, and staging leaves a slot of it free: so a message that nobody receives holds up no other.

Memory that the peer may map as it is, a view, is announced too; its descriptors go out as the peer asks for them, so
that those of one who reads nothing do not pile up on their way.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from hurray_wire.errors import HurrayError, PeerUnavailable
from hurray_wire.transport._shm_frames import (
    EAGER_CREDIT_BYTES,
    EAGER_MAX_BYTES,
    MAX_ANNOUNCED,
    Frame,
    Kind,
    eager_cost,
    grains_at_once,
    violation,
)
from hurray_wire.transport._shm_ring import Ring, round_up
from hurray_wire.transport.base import Buffer, Completion
from hurray_wire.view import Shown

Finish = Callable[[Completion, HurrayError | None], None]
"""Makes a completion due."""


class Emit(Protocol):
    """Sends a frame to the peer, now or as soon as there is room."""

    def __call__(
        self,
        frame: Frame,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        over: Callable[[], None] | None = None,
    ) -> None:
        """`over`: called once the frame has been sent, or never will be."""


@dataclass(eq=False, slots=True)
class _Send:
    tag: int
    buffer: Buffer
    done: Completion
    offset: int | None = None
    """Where it is staged."""
    wanted_bytes: int = 0
    """How much of it the peer pulls; then how much was copied, and how much was released."""
    copied_bytes: int = 0
    released_bytes: int = 0


@dataclass(eq=False, slots=True)
class _Show:
    tag: int
    shown: Shown
    done: Completion
    shown_bytes: int = 0


class Outgoing:
    """One direction of one connection. Raises ProtocolViolation for what the peer may not say."""

    def __init__(
        self, emit: Emit, finish: Finish, *, take_ring: Callable[[], int], staging_bytes: int, slot_bytes: int
    ) -> None:
        """`take_ring`: asked once for how many bytes the ring may have, two slots at least."""
        self._emit = emit
        self._finish = finish
        self.ring_bytes = 0
        """Once there is one, or was to be."""
        self._take_ring = take_ring
        self._staging_bytes = staging_bytes
        self._slot_bytes = slot_bytes
        self._ring: Ring | None = None
        self._loans: dict[int, tuple[int, float]] = {}
        self._staged_bytes = 0
        self._next_number = 0
        self._eager_used_bytes = 0
        self._announced: dict[int, _Send | _Show] = {}
        self._showing: dict[int, _Show] = {}
        self._held: deque[_Send | _Show] = deque()
        self._pulled: deque[tuple[int, _Send]] = deque()
        self._in_ring: dict[int, tuple[_Send, int]] = {}
        self._staged_count = 0

    def take_staging(self, nbytes: int) -> Buffer | None:
        """A range of the ring, uint8 [nbytes]; None while there is none, and for what travels in the socket."""
        needed = round_up(nbytes)
        if nbytes <= EAGER_MAX_BYTES:
            return None
        try:
            ring = self._require_ring()
        except PeerUnavailable:
            return None
        if self._staged_bytes + needed > self._staging_bytes:
            return None
        offset = ring.ranges.take(nbytes)
        if offset is None:
            return None
        self._loans[offset] = needed, time.perf_counter()
        self._staged_bytes += needed
        return ring.memory[offset : offset + nbytes]

    def return_staging(self, buffer: Buffer) -> None:
        """A loan that is not sent."""
        assert self._ring is not None
        offset = self._ring.offset_of(buffer)
        assert offset is not None
        assert offset in self._loans, "not on loan"
        self._end_loan(offset)
        self._pump()

    def send(self, tag: int, buffer: Buffer, done: Completion) -> None:
        """Begin to send; `done` becomes due later."""
        send = _Send(tag, buffer, done, self._staged_at(buffer))
        if buffer.nbytes > EAGER_MAX_BYTES or not self._send_eager(send):
            self._announce_or_hold(send)

    def show(self, tag: int, shown: Shown, done: Completion) -> None:
        """Begin to show memory; `done` becomes due once its last descriptor was sent, or when it was not wanted."""
        self._announce_or_hold(_Show(tag, shown, done))

    def on_pull(self, number: int, nbytes: int) -> None:
        """The peer takes an announced message, and wants this much of it; or more of a view."""
        send = self._announced.pop(number, None) or self._showing.get(number)
        if send is None:
            raise violation("number", number, "a message that was announced and not yet taken")
        self._announce_held()
        if isinstance(send, _Show):
            self._showing[number] = send
            self._show_more(number, send, nbytes)
            return
        send.wanted_bytes = nbytes
        if nbytes > send.buffer.nbytes:
            self._announced[number] = send  # it ends with all others
            raise violation("nbytes", nbytes, f"at most the {send.buffer.nbytes} of the message")
        if nbytes == 0:
            self._finish(send.done, None)
        else:
            self._pulled.append((number, send))
            self._pump()

    def on_release(self, offset: int) -> None:
        """The peer has copied what was in the ring there."""
        found = self._in_ring.pop(offset, None)
        if found is None:
            raise violation("offset", offset, "a range that is in use")
        send, nbytes = found
        if send.offset is not None:
            self._staged_count -= 1
            self._staged_bytes -= nbytes
            self._finish(send.done, None)
            self._announce_held()
        else:
            send.released_bytes += nbytes
            if send.released_bytes == send.wanted_bytes:
                self._finish(send.done, None)
        assert self._ring is not None
        self._ring.ranges.give_back(offset)
        self._pump()

    def on_credit(self, nbytes: int) -> None:
        """The peer took eager messages."""
        if nbytes > self._eager_used_bytes:
            raise violation("nbytes", nbytes, f"at most the {self._eager_used_bytes} that were sent")
        self._eager_used_bytes -= nbytes

    def end(self, error: HurrayError) -> None:
        """Every send ends with this error, and the ring is let go of."""
        pulled = [send for _, send in self._pulled]
        in_ring = [send for send, _ in self._in_ring.values()]
        showing = self._showing.values()
        for send in dict.fromkeys([*self._announced.values(), *self._held, *showing, *pulled, *in_ring]):
            if isinstance(send, _Show):
                send.shown.pin.close()
            self._finish(send.done, error)
        self._announced.clear()
        self._showing.clear()
        self._held.clear()
        self._pulled.clear()
        self._in_ring.clear()
        self._ring = None

    def _staged_at(self, buffer: Buffer) -> int | None:
        if not self._loans or self._ring is None:
            return None
        offset = self._ring.offset_of(buffer)
        if offset not in self._loans:
            return None
        self._ring.note_staged(buffer.nbytes, time.perf_counter() - self._loans[offset][1])
        return offset

    def _end_loan(self, offset: int) -> None:
        assert self._ring is not None
        self._staged_bytes -= self._loans.pop(offset)[0]
        self._ring.ranges.give_back(offset)

    def _send_eager(self, send: _Send) -> bool:
        nbytes = send.buffer.nbytes
        if self._eager_used_bytes + eager_cost(nbytes) > EAGER_CREDIT_BYTES:
            return False
        self._eager_used_bytes += eager_cost(nbytes)
        self._emit(Frame(Kind.EAGER, tag=send.tag, nbytes=nbytes), send.buffer.tobytes())
        if send.offset is not None:
            self._end_loan(send.offset)
        self._finish(send.done, None)
        return True

    def _announce_or_hold(self, send: _Send | _Show) -> None:
        if len(self._announced) + self._staged_count >= MAX_ANNOUNCED:
            self._held.append(send)
        else:
            self._announce(send)

    def _announce(self, send: _Send | _Show) -> None:
        nbytes = send.shown.nbytes if isinstance(send, _Show) else send.buffer.nbytes
        if isinstance(send, _Show):
            self._announced[self._next_number] = send
            self._emit(Frame(Kind.VIEW, number=self._next_number, tag=send.tag, nbytes=nbytes))
            self._next_number += 1
        elif send.offset is None:
            self._announced[self._next_number] = send
            self._emit(Frame(Kind.ANNOUNCE, number=self._next_number, tag=send.tag, nbytes=nbytes))
            self._next_number += 1
        else:
            self._in_ring[send.offset] = (send, self._loans.pop(send.offset)[0])
            self._staged_count += 1
            self._emit(Frame(Kind.STAGED, tag=send.tag, nbytes=nbytes, offset=send.offset))

    def _announce_held(self) -> None:
        while self._held and len(self._announced) + self._staged_count < MAX_ANNOUNCED:
            self._announce(self._held.popleft())

    def _show_more(self, number: int, show: _Show, nbytes: int) -> None:
        shown, done_bytes = show.shown, show.shown_bytes
        left_bytes = shown.nbytes - done_bytes
        if nbytes == 0 and done_bytes == 0:
            self._end_show(number)
            return
        if nbytes != left_bytes or not left_bytes:  # all shown: the pin is on its way, and may be closed before it is
            raise violation("nbytes", nbytes, f"the {left_bytes} of the view that were not shown yet")
        first = done_bytes // shown.grain_bytes
        count = grains_at_once(left_bytes, shown.grain_bytes)
        grains = shown.grains[first : first + count]
        show.shown_bytes = min(shown.nbytes, done_bytes + count * shown.grain_bytes)
        frame = Frame(Kind.GRAINS, number=number, nbytes=shown.grain_bytes, offset=done_bytes)
        if show.shown_bytes < shown.nbytes:
            self._emit(frame, descriptors=grains)
        else:
            self._emit(frame, descriptors=(*grains, shown.pin.fileno()), over=partial(self._end_show, number))

    def _end_show(self, number: int) -> None:
        show = self._showing.pop(number, None)
        if show is not None:
            show.shown.pin.close()
            self._finish(show.done, None)

    def _require_ring(self) -> Ring:
        if self._ring is None:
            self.ring_bytes = nbytes = self.ring_bytes or self._take_ring()
            self._staging_bytes = min(self._staging_bytes, nbytes - self._slot_bytes)
            try:
                self._ring = Ring(nbytes, self._staging_bytes + self._slot_bytes)
            except OSError as error:
                raise PeerUnavailable(f"no memory for a ring of {nbytes} bytes: {error}", stage="data_plane") from error
            descriptor = self._ring.descriptor
            self._emit(Frame(Kind.RING, nbytes=nbytes), descriptors=(descriptor,), over=partial(os.close, descriptor))
        return self._ring

    def _pump(self) -> None:
        """Copy pieces of what is pulled into what is free, each message in turn."""
        while self._pulled:
            number, send = self._pulled[0]
            ring = self._require_ring()
            left_bytes = send.wanted_bytes - send.copied_bytes
            found = ring.ranges.take_piece(min(self._slot_bytes, left_bytes))
            if found is None:
                return
            offset, nbytes = found
            piece = send.buffer[send.copied_bytes : send.copied_bytes + nbytes]
            began = time.perf_counter()
            np.copyto(ring.memory[offset : offset + nbytes], piece)
            ring.note_staged(nbytes, time.perf_counter() - began)
            send.copied_bytes += nbytes
            self._in_ring[offset] = (send, nbytes)
            self._pulled.popleft()
            if nbytes < left_bytes:
                self._pulled.append((number, send))
            self._emit(Frame(Kind.PIECE, number=number, nbytes=nbytes, offset=offset))
