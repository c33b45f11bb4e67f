"""The transport inside one process: two sides in one or two threads, with the semantics of the real ones.

`MemoryTransport` behaves as UCX does where it matters to whoever sits on the seam. Tags match exactly, per transport
and whatever the order of send and receive. A message of at most `eager_max_bytes` is copied when it is sent, and its
send completes without the receiver; a longer one stays in the sender's buffer until a receive takes it, so its send
completes only then. Everything completes in the owner's `progress`, never inside the call that caused it.

One lock per fabric guards all state of its transports; completions and `on_lost` run without it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import ClassVar

import numpy as np

from hurray_wire.errors import Cancelled, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.memory import copy_into, to_host
from hurray_wire.transport.base import Buffer, Completion, Endpoint, Transport, TransportParameters
from hurray_wire.transport.settings import check_settings

DEFAULT_EAGER_MAX_BYTES = 8191
"""Longest message that is copied at the send: one byte below the rendezvous threshold of the ucx transport."""


def _nobody() -> None:
    """Wakes no transport: the faults belong to none yet."""


class _Action(Enum):
    CORRUPT = "corrupt"
    DROP = "drop"
    HOLD = "hold"
    CUT = "cut"


@dataclass(eq=False, slots=True)
class _Rule:
    action: _Action
    tag: int | None
    skip: int
    count: int | None
    offset_bytes: int = 0
    mask: int = 0


class Faults:
    """What goes wrong at one transport. Any thread may call the methods; every fault is exact and repeatable.

    The message faults act on arrival at this transport. Each takes `tag` (None: any), skips the first `skip`
    matching messages counted from the call, then strikes `count` times (None: for ever). A message obeys the
    oldest rule that wants it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._held: list[_Message] = []
        self._released: list[_Message] = []
        self._refusals = 0
        self._delay_steps = 0
        self._wake: Callable[[], None] = _nobody

    def corrupt(
        self,
        *,
        tag: int | None = None,
        skip: int = 0,
        count: int | None = 1,
        offset_bytes: int = 0,
        mask: int = 0xFF,
    ) -> None:
        """Flip the bits of `mask` in one byte of what lands; an offset past the end strikes the last byte."""
        self._add(_Rule(_Action.CORRUPT, tag, skip, count, offset_bytes, mask))

    def drop(self, *, tag: int | None = None, skip: int = 0, count: int | None = 1) -> None:
        """Lose a message. Its receive stays posted; a send that waits for it stays pending until the end of the
        connection."""
        self._add(_Rule(_Action.DROP, tag, skip, count))

    def hold(self, *, tag: int | None = None, skip: int = 0, count: int | None = 1) -> None:
        """Keep a message back until `release`. With `count=None` on both sides: a partition without any error."""
        self._add(_Rule(_Action.HOLD, tag, skip, count))

    def cut(self, *, tag: int | None = None, skip: int = 0) -> None:
        """Break the connection that a message came by, just before it would have landed."""
        self._add(_Rule(_Action.CUT, tag, skip, 1))

    def release(self) -> None:
        """End all holding: what was held arrives, in order, at this transport's next `progress`."""
        with self._lock:
            self._rules = [rule for rule in self._rules if rule.action is not _Action.HOLD]
            self._released += self._held
            self._held = []
        self._wake()

    @property
    def held_count(self) -> int:
        """Messages that are being held back."""
        with self._lock:
            return len(self._held)

    def refuse_connects(self, count: int = 1) -> None:
        """Let the next `count` connects of this transport fail: the endpoint is lost at the next `progress`."""
        with self._lock:
            self._refusals = count

    def delay_completions(self, steps: int) -> None:
        """From now on fire each completion only `steps` calls of `progress` after it would have fired."""
        with self._lock:
            self._delay_steps = steps

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _judge(self, message: _Message) -> _Rule | None:
        """The rule that strikes this message, counted as used."""
        with self._lock:
            for rule in self._rules:
                if rule.tag not in (None, message.tag):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                if rule.count is not None:
                    rule.count -= 1
                    if rule.count == 0:
                        self._rules.remove(rule)
                if rule.action is _Action.HOLD:
                    self._held.append(message)
                return rule
        return None

    def _take_released(self) -> list[_Message]:
        with self._lock:
            released, self._released = self._released, []
        return released

    def _take_refusal(self) -> bool:
        with self._lock:
            if not self._refusals:
                return False
            self._refusals -= 1
            return True


@dataclass(eq=False, slots=True)
class _Operation:
    """A send or a receive, until its completion is due."""

    endpoint: MemoryEndpoint
    tag: int
    buffer: Buffer
    done: Completion
    may_be_cut: bool = False
    over: bool = False

    def finish(self, error: HurrayError | None = None) -> None:
        self.endpoint._transport._finish(self, error)


@dataclass(eq=False, slots=True)
class _Message:
    """What arrives: an eager copy, or the word that `send` waits with its buffer."""

    tag: int
    send: _Operation
    payload: Buffer | None
    corruption: _Rule | None = None

    @property
    def stale(self) -> bool:
        """True for the word of a send that has ended meanwhile: its buffer is no longer ours to read."""
        return self.payload is None and self.send.over


@dataclass(eq=False, slots=True)
class _Loss:
    endpoint: MemoryEndpoint
    error: HurrayError


@dataclass(eq=False, slots=True)
class _Due:
    call: Callable[[], None]
    steps: int


class MemoryFabric:
    """The network between the transports of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._transports: dict[bytes, MemoryTransport] = {}
        self._next_address = 0

    def cut(self, first: MemoryTransport, second: MemoryTransport) -> None:
        """Break every connection between two transports, as a failing link does: both sides lose it."""
        with self._lock:
            for endpoint in [*first._endpoints]:
                if endpoint._remote == second._address:
                    endpoint._break("the link was cut")
            for endpoint in [*second._endpoints]:
                if endpoint._remote == first._address:
                    endpoint._break("the link was cut")

    def crash(self, transport: MemoryTransport) -> None:
        """Let a transport's process die: its operations never complete, and its peers lose it."""
        with self._lock:
            self._transports.pop(transport._address, None)
            transport._crashed = True
            for endpoint in [*transport._endpoints]:
                for operation in endpoint._operations:
                    operation.over = True
                endpoint._open = False
            transport._forget_everything()
            self._remove_stale()
            self._lose_all(transport._address, "the peer died")

    def _join(self, transport: MemoryTransport) -> bytes:
        with self._lock:
            address = f"memory-{self._next_address}".encode()
            self._next_address += 1
            self._transports[address] = transport
            return address

    def _remove_stale(self) -> None:
        for transport in self._transports.values():
            transport._unexpected = [message for message in transport._unexpected if not message.stale]

    def _lose_all(self, address: bytes, why: str) -> None:
        for transport in self._transports.values():
            for endpoint in [*transport._endpoints]:
                if endpoint._remote == address:
                    endpoint._lose_soon(why)


class MemoryEndpoint(Endpoint):
    """A connection of a MemoryTransport. Made by `MemoryTransport.connect`."""

    def __init__(
        self, transport: MemoryTransport, peer: int, remote: bytes, on_lost: Callable[[HurrayError], None]
    ) -> None:
        self.peer = peer
        self._transport = transport
        self._remote = remote
        self._on_lost = on_lost
        self._partner: MemoryEndpoint | None = None
        self._operations: dict[_Operation, None] = {}
        self._open = True
        self._severed = False

    @property
    def alive(self) -> bool:
        return self._open

    def send(self, tag: int, buffer: Buffer, done: Completion) -> None:
        assert buffer.nbytes > 0
        with self._transport._lock:
            operation = self._start(tag, buffer, done)
            if not self._open:
                self._transport._finish(operation, self._gone("the connection is closed"))
                return
            if self._severed:
                return
            target = self._transport._fabric._transports[self._remote]
            eager = buffer.nbytes <= self._transport._eager_max_bytes
            target._deliver(_Message(tag, operation, np.copy(to_host(buffer)) if eager else None))
            if eager:
                self._transport._finish(operation, None)

    def receive(self, tag: int, buffer: Buffer, done: Completion) -> None:
        self._receive(tag, buffer, done, may_be_cut=False)

    def _receive(self, tag: int, buffer: Buffer, done: Completion, *, may_be_cut: bool) -> None:
        assert buffer.nbytes > 0
        with self._transport._lock:
            operation = self._start(tag, buffer, done)
            operation.may_be_cut = may_be_cut
            if self._open:
                self._transport._post(operation)
            else:
                self._transport._finish(operation, self._gone("the connection is closed"))

    def forget(self, tag: int) -> None:
        with self._transport._lock:
            operation = self._transport._posted.pop(tag, None)
            if operation is not None:
                self._transport._finish(operation, Cancelled("the receive was withdrawn"))

    def discard(self, tag: int, done: Completion) -> None:
        self._receive(tag, np.empty(1, np.uint8), done, may_be_cut=True)

    def close(self) -> None:
        with self._transport._lock:
            self._end(Cancelled("the connection was closed here"), "the peer closed the connection")

    def abort(self) -> None:
        with self._transport._lock:
            self._end(self._gone("the connection was aborted here"), "the peer aborted the connection")

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"<MemoryEndpoint peer={self.peer:#x} {state} operations={len(self._operations)}>"

    def _start(self, tag: int, buffer: Buffer, done: Completion) -> _Operation:
        assert not self._transport._closed
        operation = _Operation(self, tag, buffer, done)
        self._operations[operation] = None
        return operation

    def _gone(self, why: str) -> PeerUnavailable:
        return PeerUnavailable(why, stage="data_plane", peer=f"{self.peer:#x}")

    def _end(self, error: HurrayError, seen_by_peer: str) -> None:
        """Finish what is pending and tell the partner, once."""
        if not self._open:
            return
        self._open = False
        self._transport._endpoints.pop(self, None)
        for operation in [*self._operations]:
            if self._transport._posted.get(operation.tag) is operation:
                del self._transport._posted[operation.tag]
            self._transport._finish(operation, error)
        self._transport._fabric._remove_stale()
        partner, self._partner = self._partner, None
        if partner is not None:
            partner._partner = None
            partner._lose_soon(seen_by_peer)

    def _break(self, why: str) -> None:
        """Both sides lose this connection."""
        self._lose_soon(why)
        if self._partner is not None:
            self._partner._lose_soon(why)

    def _lose_soon(self, why: str) -> None:
        """The owner notices in its own progress, after what arrived before; until then its sends go nowhere."""
        self._severed = True
        self._transport._deliver(_Loss(self, self._gone(why)))


class MemoryTransport(Transport):
    """One side on a MemoryFabric."""

    kind: ClassVar[str] = "memory"
    takes_device_memory = True

    def __init__(
        self,
        fabric: MemoryFabric,
        *,
        faults: Faults | None = None,
        eager_max_bytes: int = DEFAULT_EAGER_MAX_BYTES,
    ) -> None:
        self.faults = faults or Faults()
        self.faults._wake = self._stir
        self._fabric = fabric
        self._lock = fabric._lock
        self._eager_max_bytes = eager_max_bytes
        self._closed = False
        self._crashed = False
        self._endpoints: dict[MemoryEndpoint, None] = {}
        self._inbox: deque[_Message | _Loss] = deque()
        self._unexpected: list[_Message] = []
        self._posted: dict[int, _Operation] = {}
        self._due: deque[_Due] = deque()
        self._stirred = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._address = fabric._join(self)

    def parameters(self) -> TransportParameters:
        return TransportParameters(self.kind, self._address, {"eager_max_bytes": str(self._eager_max_bytes)})

    def check_peer(self, parameters: TransportParameters) -> None:
        check_settings(self.parameters(), parameters)

    def connect(
        self, peer: int, parameters: TransportParameters, on_lost: Callable[[HurrayError], None]
    ) -> MemoryEndpoint:
        assert not self._closed
        with self._lock:
            endpoint = MemoryEndpoint(self, peer, parameters.address, on_lost)
            self._endpoints[endpoint] = None
            other = self._fabric._transports.get(parameters.address)
            if other is None or self.faults._take_refusal():
                endpoint._lose_soon("the peer cannot be reached")
                return endpoint
            for candidate in other._endpoints:
                if candidate._remote == self._address and candidate._partner is None and candidate is not endpoint:
                    candidate._partner, endpoint._partner = endpoint, candidate
                    break
            return endpoint

    def progress(self) -> bool:
        assert not self._closed
        with self._lock:
            moved = self._take_arrivals()
            due_count = len(self._due)
        return self._fire(due_count) or moved

    def fileno(self) -> int:
        return self._stirred

    def arm(self) -> bool:
        with suppress(BlockingIOError):
            os.eventfd_read(self._stirred)
        with self._lock:
            return not (self._inbox or self._due or self.faults._released)

    def drain_unknown(self, is_known: Callable[[int], bool]) -> int:
        with self._lock:
            unknown = [message for message in self._unexpected if not is_known(message.tag)]
            for message in unknown:
                self._unexpected.remove(message)
                if message.payload is None:
                    message.send.finish()
            return len(unknown)

    def close(self) -> None:
        if self._closed:
            return
        with self._lock:
            for endpoint in [*self._endpoints]:
                endpoint._end(endpoint._gone("the transport was closed"), "the peer closed its transport")
            self._fabric._transports.pop(self._address, None)
            self._fabric._lose_all(self._address, "the peer closed its transport")
        while self._due:
            self._fire(len(self._due))
        with self._lock:
            self._closed = True
            self._forget_everything()
            os.close(self._stirred)

    def _stir(self) -> None:
        """Any thread: there is something to progress."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._stirred, 1)

    def _take_arrivals(self) -> bool:
        released = self.faults._take_released()
        moved = bool(released)
        for message in released:
            self._land_or_keep(message)
        while self._inbox:
            moved = True
            arrival = self._inbox.popleft()
            if isinstance(arrival, _Loss):
                self._lose(arrival)
            else:
                self._arrive(arrival)
        return moved

    def _arrive(self, message: _Message) -> None:
        rule = self.faults._judge(message)
        if rule is None:
            self._land_or_keep(message)
        elif rule.action is _Action.CORRUPT:
            message.corruption = rule
            self._land_or_keep(message)
        elif rule.action is _Action.CUT:
            message.send.endpoint._break("the connection was cut")

    def _land_or_keep(self, message: _Message) -> None:
        if message.stale:
            return
        operation = self._posted.pop(message.tag, None)
        if operation is None:
            self._unexpected.append(message)
        else:
            self._land(message, operation)

    def _land(self, message: _Message, receive: _Operation) -> None:
        source = message.send.buffer if message.payload is None else message.payload
        landed_bytes = min(source.nbytes, receive.buffer.nbytes)
        copy_into(receive.buffer[:landed_bytes], source[:landed_bytes])
        if message.corruption is not None:
            at = min(message.corruption.offset_bytes, landed_bytes - 1)
            receive.buffer[at] ^= message.corruption.mask
        wrong = (
            "longer" if source.nbytes > landed_bytes else "shorter" if receive.buffer.nbytes > landed_bytes else None
        )
        if wrong is None or receive.may_be_cut:
            receive.finish(None)
        else:
            receive.finish(ProtocolViolation(f"a message was {wrong} than agreed", tag=f"{receive.tag:#x}"))
        if message.payload is None:
            message.send.finish()

    def _post(self, receive: _Operation) -> None:
        assert receive.tag not in self._posted, f"tag {receive.tag:#x} has a receive already"
        for message in self._unexpected:
            if message.tag == receive.tag:
                self._unexpected.remove(message)
                self._land(message, receive)
                return
        self._posted[receive.tag] = receive

    def _lose(self, loss: _Loss) -> None:
        endpoint = loss.endpoint
        if not endpoint._open:
            return
        endpoint._end(loss.error, str(loss.error.message))
        self._due.append(_Due(partial(endpoint._on_lost, loss.error), 0))

    def _finish(self, operation: _Operation, error: HurrayError | None) -> None:
        """The last that the transport does with an operation's buffer is before this; the completion comes later."""
        if operation.over:
            return
        operation.over = True
        operation.endpoint._operations.pop(operation, None)
        self._due.append(_Due(partial(operation.done, error), self.faults._delay_steps))
        self._stir()

    def _fire(self, count: int) -> bool:
        fired = False
        for _ in range(count):
            due = self._due.popleft()
            if due.steps > 0:
                due.steps -= 1
                self._due.append(due)
            else:
                fired = True
                due.call()
        return fired

    def _deliver(self, arrival: _Message | _Loss) -> None:
        if not self._crashed and not self._closed:
            self._inbox.append(arrival)
            self._stir()

    def _forget_everything(self) -> None:
        self._endpoints.clear()
        self._inbox.clear()
        self._unexpected.clear()
        self._posted.clear()
        self._due.clear()
