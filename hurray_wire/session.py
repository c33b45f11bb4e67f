"""The two sides of one transfer as state machines: no I/O, no clock, no threads.

Whoever drives a machine feeds it events and carries out the actions it returns, in order, all of one event before the
next event goes in (`session_events`). Everything that takes time comes back as another event. The same events always
give the same actions, so a recorded list replays a transfer (`replay`).

The phases and what may happen in each are one table, `session_phases`.

What the machines guarantee, whatever is lost, repeated or late:

* `Release` comes once, and only when no posted operation is open: memory is never reused under a transfer.
* `Commit` comes only after every chunk arrived, equalled its checksum, and passed validation.
* `End` comes once, last, with the one outcome. A source that cannot know it says OutcomeUnknown.
* Nobody waits for ever, given three things: a phase that takes too long is told so (`Failed`), CANCELLING and SETTLING
  are ended by one `DrainExpired`, and every open operation completes after `CloseEndpoint`.

A failing side tells the other (`TellStop`). The source's answer counts the chunks it sent, all lower indexes first, so
the target knows exactly which posted receives can still be written to (wait for them), which never will be (`Forget`),
and which messages nobody posted for (`Discard`). Without that answer, or with one that cannot be true, the connection
is closed, which ends all of them.

Two kinds of wrong event are kept apart: one from the peer fails the transfer with ProtocolViolation, one from our own
side raises Misuse and changes nothing. After the last byte a wrong message only makes the source cancel: the target's
answer still decides. While COMMITTING, SETTLING and ENDED it is ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hurray_wire.errors import (
    Cancelled,
    ChecksumMismatch,
    DeadlineExceeded,
    HurrayError,
    Misuse,
    OutcomeUnknown,
    PeerUnavailable,
    ProtocolViolation,
)
from hurray_wire.limits import MAX_WINDOW
from hurray_wire.session_events import (
    Accepted,
    Action,
    CheckContents,
    CheckIndex,
    ChecksumsReceived,
    ChunkPosted,
    ChunksReady,
    CloseEndpoint,
    Commit,
    CommitRefused,
    Committed,
    ContentsChecked,
    Discard,
    DrainExpired,
    End,
    Event,
    Failed,
    Forget,
    IndexChecked,
    PeerLost,
    PeerStopped,
    PostReceive,
    ReceiptReceived,
    ReceiveDone,
    Release,
    Reserve,
    Reserved,
    SendChunk,
    SendDone,
    StreamLost,
    TellAccept,
    TellChecksums,
    TellReceipt,
    TellStop,
)
from hurray_wire.session_phases import (
    SOURCE_OVER,
    SOURCE_TABLE,
    TARGET_OVER,
    TARGET_TABLE,
    SourcePhase,
    State,
    TargetPhase,
)

__all__ = [
    "CHECKSUM_BATCH",
    "Accepted",
    "Action",
    "CheckContents",
    "CheckIndex",
    "ChecksumsReceived",
    "ChunkPosted",
    "ChunksReady",
    "CloseEndpoint",
    "Commit",
    "CommitRefused",
    "Committed",
    "ContentsChecked",
    "Discard",
    "DrainExpired",
    "End",
    "Event",
    "Failed",
    "Forget",
    "IndexChecked",
    "PeerLost",
    "PeerStopped",
    "PostReceive",
    "ReceiptReceived",
    "ReceiveDone",
    "Release",
    "Reserve",
    "Reserved",
    "SendChunk",
    "SendDone",
    "SourcePhase",
    "SourceSession",
    "State",
    "StreamLost",
    "TargetPhase",
    "TargetSession",
    "TellAccept",
    "TellChecksums",
    "TellReceipt",
    "TellStop",
    "replay",
]

CHECKSUM_BATCH: Final = 16
"""Checksums told in one message while pages flow."""

_S, _T = SourcePhase, TargetPhase


@dataclass
class SourceSession:
    """The side that has the pages.

    `chunk_count`: chunks of the plan, index chunks first, of which there are `index_chunk_count`, at least one.
    `ready_chunk_count`: how many may be sent at the start (all, unless tensors are announced one by one).
    """

    chunk_count: int
    index_chunk_count: int
    ready_chunk_count: int
    checksummed: bool = True
    phase: SourcePhase = field(default=SourcePhase.OFFERED, init=False)
    outcome: HurrayError | None = field(default=None, init=False)
    receipt: Any = field(default=None, init=False)
    in_flight: set[int] = field(default_factory=set, init=False)
    sent_chunk_count: int = field(default=0, init=False)
    _window: int = field(default=0, init=False)
    _untold: list[int] = field(default_factory=list, init=False)
    _told_count: int = field(default=0, init=False)
    _stream_open: bool = field(default=True, init=False)
    _stop_told: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    _actions: list[Action] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert 1 <= self.index_chunk_count <= self.chunk_count, (self.index_chunk_count, self.chunk_count)
        assert 0 <= self.ready_chunk_count <= self.chunk_count, (self.ready_chunk_count, self.chunk_count)

    @property
    def state(self) -> State:
        """Public state."""
        return _state(self.phase is _S.OFFERED, self.phase is _S.ENDED, self.outcome)

    @property
    def stage(self) -> str:
        """What errors name: the phase, or "announce" while all that was announced has been sent."""
        waits = self.phase is _S.SENDING and not self.in_flight and self.sent_chunk_count == self.ready_chunk_count
        return "announce" if waits else self.phase.value

    def handle(self, event: Event) -> list[Action]:
        """Feed one event; the actions to carry out, in order.

        Raises Misuse for an event of our own side that the phase does not allow.
        """
        self._actions = []
        allowed = SOURCE_TABLE[self.phase].get(type(event))
        if allowed is None:
            self._refuse(event)
            return self._actions
        getattr(self, f"_on_{type(event).__name__}")(event)
        assert self.phase in allowed, (event, self.phase)
        return self._actions

    def _refuse(self, event: Event) -> None:
        if not event.from_peer:
            raise Misuse("event not allowed", event=type(event).__name__, phase=self.phase.name)
        error = ProtocolViolation("unexpected message", offered=type(event).__name__, stage=self.phase.value)
        if self.phase in (_S.OFFERED, _S.SENDING):
            self._fail(error)
        elif self.phase is _S.DELIVERED:
            self._cancel(error)

    def _on_Accepted(self, event: Accepted) -> None:
        if self.phase is not _S.OFFERED:
            return
        if event.window < 1:
            self._fail(
                ProtocolViolation(
                    "no window", field="window", offered=event.window, required=">= 1", stage=self.phase.value
                )
            )
            return
        self.phase = _S.SENDING
        self._window = min(event.window, MAX_WINDOW)
        self._fill_window()

    def _on_ChunksReady(self, event: ChunksReady) -> None:
        self.ready_chunk_count = max(self.ready_chunk_count, min(event.count, self.chunk_count))
        if self.phase is _S.SENDING:
            self._fill_window()

    def _on_ChunkPosted(self, event: ChunkPosted) -> None:
        if self.phase is not _S.SENDING or not self.checksummed:
            return
        posted = self._told_count + len(self._untold)
        if event.chunk != posted or posted >= self.sent_chunk_count:
            raise Misuse("chunks are posted in order", offered=event.chunk, required=posted)
        self._untold.append(event.checksum)
        is_last = event.chunk + 1 == self.chunk_count
        burst_over = event.chunk + 1 == self.sent_chunk_count
        index_due = burst_over and self._told_count < self.index_chunk_count
        if is_last or index_due or len(self._untold) >= CHECKSUM_BATCH:
            self._actions.append(TellChecksums(self._told_count, tuple(self._untold)))
            self._told_count += len(self._untold)
            self._untold.clear()
        if is_last:
            self.phase = _S.DELIVERED

    def _on_SendDone(self, event: SendDone) -> None:
        _complete(self.in_flight, event.chunk)
        match self.phase:
            case _S.SENDING if event.error is not None:
                self._fail(event.error)
            case _S.SENDING:
                self._fill_window()
            case _S.DELIVERED if event.error is not None:
                # The target may wait for this chunk, or have it all: only its answer tells.
                self._cancel(event.error)
            case _S.SETTLING:
                self._settle()

    def _on_ReceiptReceived(self, event: ReceiptReceived) -> None:
        if self.phase in (_S.OFFERED, _S.DELIVERED, _S.CANCELLING):
            self.receipt = event.receipt
            self.outcome = None
            self._settle()

    def _on_PeerStopped(self, event: PeerStopped) -> None:
        if self.phase is _S.CANCELLING:
            self._settle()  # the target confirms; the outcome is why we gave up
        elif self.phase not in SOURCE_OVER:
            error = event.error
            if isinstance(error, DeadlineExceeded) and self.stage == "announce":
                # Both sides count one budget. Whoever was first to say that it is spent: the target did not know why.
                details: dict[str, Any] = error.details | {"stage": self.stage}
                error = DeadlineExceeded(error.message, **details)
            self._fail(error)

    def _on_StreamLost(self, _: StreamLost) -> None:
        self._stream_open = False
        match self.phase:
            case _S.OFFERED | _S.SENDING:
                self._fail(PeerUnavailable("the stream to the target broke", stage=self.phase.value))
            case _S.DELIVERED | _S.CANCELLING:
                self._give_up_unknown()

    def _on_PeerLost(self, event: PeerLost) -> None:
        # After the last byte the target may have it all: the stream will tell.
        if self.phase in (_S.OFFERED, _S.SENDING):
            self._fail(event.error)

    def _on_Failed(self, event: Failed) -> None:
        if self.phase is _S.DELIVERED:
            self._cancel(event.error)
        elif self.phase in (_S.OFFERED, _S.SENDING):
            self._fail(event.error)

    def _on_DrainExpired(self, _: DrainExpired) -> None:
        if self.phase is _S.CANCELLING:
            self._give_up_unknown()
        if self.phase is _S.SETTLING:
            self._close()

    def _fill_window(self) -> None:
        limit = min(self.chunk_count, self.ready_chunk_count)
        while self.sent_chunk_count < limit and len(self.in_flight) < self._window:
            self.in_flight.add(self.sent_chunk_count)
            self._actions.append(SendChunk(self.sent_chunk_count))
            self.sent_chunk_count += 1
        # Where checksums are told, the target cannot commit before it has the last one.
        if not self.checksummed and self.sent_chunk_count == self.chunk_count:
            self.phase = _S.DELIVERED

    def _fail(self, error: HurrayError) -> None:
        self.outcome = error
        self._tell_stop(error)
        self._settle()

    def _cancel(self, error: HurrayError) -> None:
        """Give up after the last byte: the target's answer decides, this error stands only if it did not commit."""
        self.outcome = error
        self._tell_stop(error)
        self.phase = _S.CANCELLING

    def _give_up_unknown(self) -> None:
        cause = self.outcome
        self.outcome = OutcomeUnknown(
            "no outcome arrived after the last byte was sent; retry with the same request id to learn it",
            stage=self.phase.value,
            cause=cause.reason if cause is not None else None,
        )
        self._settle()

    def _tell_stop(self, error: HurrayError) -> None:
        if self._stream_open and not self._stop_told:
            self._stop_told = True
            self._actions.append(TellStop(error, self.sent_chunk_count))

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._actions.append(CloseEndpoint())

    def _settle(self) -> None:
        """End once no send is open. A target that was never told how many to expect cannot drain them: cut it off."""
        self.phase = _S.SETTLING
        if not self.in_flight:
            self.phase = _S.ENDED
            self._actions += [Release(), End(self.outcome, self.receipt)]
        elif self.outcome is not None and not self._stream_open and not self._stop_told:
            self._close()


@dataclass
class TargetSession:
    """The side that receives the pages. Begin with `start()`.

    `chunk_count`, `index_chunk_count`: of the plan, index chunks first, at least one. `window`: receives posted at
    once. Without checksums `verified_chunk_count` stays 0. `offered_checksums`: those of the first chunks that came
    with the offer, before anything was sent.
    """

    chunk_count: int
    index_chunk_count: int
    window: int
    checksummed: bool = True
    offered_checksums: tuple[int, ...] = ()
    phase: TargetPhase = field(default=TargetPhase.RESERVING, init=False)
    outcome: HurrayError | None = field(default=None, init=False)
    receipt: Any = field(default=None, init=False)
    in_flight: set[int] = field(default_factory=set, init=False)
    posted_chunk_count: int = field(default=0, init=False)
    arrived_chunk_count: int = field(default=0, init=False)
    verified_chunk_count: int = field(default=0, init=False)
    _arrived_end: int = field(default=0, init=False)
    _unverified: dict[int, int] = field(default_factory=dict, init=False)
    _told: array[int] = field(default_factory=lambda: array("Q"), init=False)
    _stream_open: bool = field(default=True, init=False)
    _stop_told: bool = field(default=False, init=False)
    _sent_chunk_count: int | None = field(default=None, init=False)
    _forgot: bool = field(default=False, init=False)
    _severed: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    _actions: list[Action] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert 1 <= self.index_chunk_count <= self.chunk_count, (self.index_chunk_count, self.chunk_count)
        assert self.window >= 1, self.window

    @property
    def state(self) -> State:
        """Public state."""
        return _state(self.phase is _T.RESERVING, self.phase is _T.ENDED, self.outcome)

    @property
    def stage(self) -> str:
        """What errors name."""
        return self.phase.value

    def start(self) -> list[Action]:
        """The first actions."""
        self._actions = []
        if self.offered_checksums:
            self._on_ChecksumsReceived(ChecksumsReceived(0, self.offered_checksums))
        if self.phase is _T.RESERVING:
            self._actions.append(Reserve())
        return self._actions

    def handle(self, event: Event) -> list[Action]:
        """Feed one event; the actions to carry out, in order.

        Raises Misuse for an event of our own side that the phase does not allow.
        """
        self._actions = []
        allowed = TARGET_TABLE[self.phase].get(type(event))
        if allowed is None:
            self._refuse(event)
            return self._actions
        getattr(self, f"_on_{type(event).__name__}")(event)
        assert self.phase in allowed, (event, self.phase)
        return self._actions

    def _refuse(self, event: Event) -> None:
        if not event.from_peer:
            raise Misuse("event not allowed", event=type(event).__name__, phase=self.phase.name)
        if self.phase is not _T.COMMITTING and self.phase not in TARGET_OVER:
            self._fail(ProtocolViolation("unexpected message", offered=type(event).__name__, stage=self.phase.value))

    def _on_Reserved(self, _: Reserved) -> None:
        if self.phase is _T.RESERVING:
            self.phase = _T.INDEX
            self._actions.append(TellAccept())
            self._post()

    def _on_ChecksumsReceived(self, event: ChecksumsReceived) -> None:
        if self.phase in TARGET_OVER:
            return
        told_count = len(self._told)
        end = event.first + len(event.values)
        if not self.checksummed or event.first != told_count or end > self.chunk_count:
            self._fail(
                ProtocolViolation(
                    "checksums out of order" if self.checksummed else "checksums where none were agreed",
                    field="first_chunk",
                    offered=f"{event.first}+{len(event.values)}",
                    required=f"{told_count}, at most {self.chunk_count}" if self.checksummed else None,
                    stage=self.phase.value,
                )
            )
            return
        self._told.extend(event.values)
        for chunk in range(event.first, end):
            if chunk in self._unverified and not self._verify(chunk, self._unverified.pop(chunk)):
                return
        self._advance()

    def _on_ReceiveDone(self, event: ReceiveDone) -> None:
        _complete(self.in_flight, event.chunk)
        if event.error is None:
            self._arrived_end = max(self._arrived_end, event.chunk + 1)
        if self.phase is _T.SETTLING:
            self._settle()
            return
        if event.error is not None:
            self._fail(event.error)
            return
        self.arrived_chunk_count += 1
        if self.checksummed:
            if event.chunk >= len(self._told):
                self._unverified[event.chunk] = event.checksum
            elif not self._verify(event.chunk, event.checksum):
                return
        self._advance()

    def _on_IndexChecked(self, _: IndexChecked) -> None:
        if self.phase is _T.CHECKING_INDEX:
            self.phase = _T.PAGES
            self._advance()

    def _on_ContentsChecked(self, _: ContentsChecked) -> None:
        if self.phase is _T.CHECKING_CONTENTS:
            self.phase = _T.COMMITTING
            self._actions.append(Commit())

    def _on_Committed(self, event: Committed) -> None:
        self.receipt = event.receipt
        self.phase = _T.ENDED
        self._actions.append(Release(keep=True))
        if self._stream_open:
            self._actions.append(TellReceipt(event.receipt))
        self._actions.append(End(None, event.receipt))

    def _on_CommitRefused(self, event: CommitRefused) -> None:
        self._fail(event.error)

    def _on_PeerStopped(self, event: PeerStopped) -> None:
        if self.phase in (_T.COMMITTING, _T.ENDED):
            return
        error = event.error
        if self._sent_chunk_count is None and not self._severed:
            told_count = len(self._told)  # what came with the offer says nothing of what was sent
            lowest = max(self._arrived_end, told_count if told_count > len(self.offered_checksums) else 0)
            highest = self.chunk_count if self.posted_chunk_count else 0
            if lowest <= event.sent_chunk_count <= highest:
                self._sent_chunk_count = event.sent_chunk_count
            else:
                # A source that miscounts may still write to what this side would take back.
                self._close()
                error = ProtocolViolation(
                    "a count that cannot be true",
                    field="sent_chunk_count",
                    offered=event.sent_chunk_count,
                    required=f"{lowest} to {highest}",
                    stage=self.phase.value,
                )
        if self.phase is _T.SETTLING:
            self._settle()
        else:
            self._fail(error)

    def _on_StreamLost(self, _: StreamLost) -> None:
        self._stream_open = False
        if self.phase is _T.SETTLING:
            self._settle()
        elif self.phase not in (_T.COMMITTING, _T.ENDED):
            self._fail(PeerUnavailable("the stream to the source broke", stage=self.phase.value))

    def _on_PeerLost(self, event: PeerLost) -> None:
        self._severed = True
        if self.phase is _T.SETTLING:
            self._settle()
        elif self.phase not in (_T.CHECKING_CONTENTS, _T.COMMITTING, _T.ENDED):
            self._fail(event.error)

    def _on_Failed(self, event: Failed) -> None:
        if self.phase not in (_T.COMMITTING, _T.SETTLING, _T.ENDED):
            self._fail(event.error)

    def _on_DrainExpired(self, _: DrainExpired) -> None:
        if self.phase is _T.SETTLING:
            self._close()
            self._settle()

    def _post(self) -> None:
        limit = self.index_chunk_count if self.phase is _T.INDEX else self.chunk_count
        while self.posted_chunk_count < limit and len(self.in_flight) < self.window:
            self.in_flight.add(self.posted_chunk_count)
            self._actions.append(PostReceive(self.posted_chunk_count))
            self.posted_chunk_count += 1

    def _verify(self, chunk: int, arrived: int) -> bool:
        """Compare a chunk that arrived with what was told; fail and return False where they differ."""
        told = self._told[chunk]
        if arrived == told:
            self.verified_chunk_count += 1
            return True
        self._fail(
            ChecksumMismatch(
                "bytes that arrived are not those that were sent",
                chunk=chunk,
                offered=f"{arrived:#018x}",
                required=f"{told:#018x}",
                stage=self.phase.value,
            )
        )
        return False

    def _advance(self) -> None:
        """Post what the window allows, and move on when a phase is complete."""
        if self.phase not in (_T.INDEX, _T.PAGES):
            return
        self._post()
        complete = self.verified_chunk_count if self.checksummed else self.arrived_chunk_count
        if self.phase is _T.INDEX and complete == self.index_chunk_count:
            self.phase = _T.CHECKING_INDEX
            self._actions.append(CheckIndex())
        elif self.phase is _T.PAGES and complete == self.chunk_count:
            self.phase = _T.CHECKING_CONTENTS
            self._actions.append(CheckContents())

    def _fail(self, error: HurrayError) -> None:
        self.outcome = error
        if self._stream_open and not self._stop_told:
            self._stop_told = True
            self._actions.append(TellStop(error))
        self._settle()

    def _close(self) -> None:
        self._severed = True
        if not self._closed:
            self._closed = True
            self._actions.append(CloseEndpoint())

    def _settle(self) -> None:
        """End when no receive is open and no further message of this transfer can arrive; else see to it."""
        self.phase = _T.SETTLING
        if self._sent_chunk_count is not None and not self._severed:
            self._account(self._sent_chunk_count)
        expected = self.chunk_count if self._sent_chunk_count is None else self._sent_chunk_count
        accounted = self.posted_chunk_count == 0 or (self.posted_chunk_count >= expected and not self.in_flight)
        if not accounted and self._sent_chunk_count is None and not self._stream_open and not self._severed:
            self._close()
        if (accounted or self._severed) and not self.in_flight:
            self.phase = _T.ENDED
            self._actions += [Release(), End(self.outcome)]

    def _account(self, sent_chunk_count: int) -> None:
        """Take back receives that nothing will come for; take and drop messages that have none, within the window."""
        if not self._forgot:
            self._forgot = True
            self._actions += [Forget(chunk) for chunk in sorted(self.in_flight) if chunk >= sent_chunk_count]
        while self.posted_chunk_count < sent_chunk_count and len(self.in_flight) < self.window:
            self.in_flight.add(self.posted_chunk_count)
            self._actions.append(Discard(self.posted_chunk_count))
            self.posted_chunk_count += 1


def _complete(in_flight: set[int], chunk: int) -> None:
    if chunk not in in_flight:
        raise Misuse("completion of a chunk that is not in flight", offered=chunk, required=sorted(in_flight))
    in_flight.remove(chunk)


def _state(preparing: bool, ended: bool, outcome: HurrayError | None) -> State:
    if not ended:
        return State.PREPARING if preparing else State.RUNNING
    if outcome is None:
        return State.SUCCEEDED
    return State.CANCELLED if isinstance(outcome, Cancelled) else State.FAILED


def replay(
    machine: SourceSession | TargetSession,
    events: Iterable[Event],
    carry_out: Callable[[Action], None] = lambda _: None,
) -> Sequence[Action]:
    """Feed recorded events to a fresh machine; every action it asks for, in order, each also given to `carry_out`."""
    asked: list[Action] = []
    pending = machine.start() if isinstance(machine, TargetSession) else []
    for event in (None, *events):
        if event is not None:
            pending = machine.handle(event)
        for action in pending:
            asked.append(action)
            carry_out(action)
    return asked
