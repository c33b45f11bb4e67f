"""A source and a target machine against each other, with everything around them simulated and everything checked.

The world is a set of steps that can happen next (a message arrives, a chunk lands, an operation completes, a check
answers, a timer fires) and of faults that can be thrown in. Whoever drives it only picks. What machines ask for is held
against the truth, which the world knows: who wrote what, what was sent, what is open, what was committed. A breach
raises Violation at once.

An operation is open, and its memory the transport's, from the action that asks for it until its completion is fed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

from hurray_wire import session as s
from hurray_wire.errors import (
    ArenaFull,
    Cancelled,
    DeadlineExceeded,
    HurrayError,
    InternalError,
    InvalidContents,
    KeyBusy,
    Misuse,
    OutcomeUnknown,
    PeerUnavailable,
)
from hurray_wire.limits import MAX_WINDOW
from hurray_wire.session_phases import SOURCE_TABLE, TARGET_TABLE

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of a non-empty sequence."""

Step = tuple[Callable[..., None], tuple[Any, ...]]

RECEIPT = "receipt"
WIND_DOWN_STEPS = 3000


class Violation(AssertionError):
    """A machine broke a guarantee."""


@dataclass(frozen=True)
class Setting:
    chunk_count: int
    index_chunk_count: int
    window: int
    checksummed: bool = True
    ready_chunk_count: int | None = None
    eager: frozenset[int] = frozenset()
    """Chunks whose sends complete before anybody takes them, as small messages do."""
    offered: bool = False
    """Where there are checksums: all of them come with the offer."""

    @property
    def first_ready(self) -> int:
        return self.chunk_count if self.ready_chunk_count is None else self.ready_chunk_count

    def source(self, kind: type[s.SourceSession] = s.SourceSession) -> s.SourceSession:
        told = self.checksummed and not self.offered
        return kind(self.chunk_count, self.index_chunk_count, self.first_ready, checksummed=told)

    def target(self, kind: type[s.TargetSession] = s.TargetSession) -> s.TargetSession:
        return kind(
            self.chunk_count,
            self.index_chunk_count,
            self.window,
            checksummed=self.checksummed,
            offered_checksums=self.offered_checksums,
        )

    @property
    def offered_checksums(self) -> tuple[int, ...]:
        offered = self.checksummed and self.offered
        return tuple(checksum_of(chunk) for chunk in range(self.chunk_count)) if offered else ()


def checksum_of(chunk: int) -> int:
    return (chunk + 1) * 0x9E3779B97F4A7C15 % 2**64


class Fault(Enum):
    SOURCE_FAILS = auto()
    TARGET_FAILS = auto()
    STREAM_CUT = auto()
    CONNECTION_CUT = auto()
    SOURCE_FREEZES = auto()
    TARGET_FREEZES = auto()
    RESERVE_REFUSED = auto()
    STAGING_FAILS = auto()
    RECEIVE_FAILS = auto()
    CORRUPTION = auto()
    INDEX_INVALID = auto()
    CONTENTS_INVALID = auto()
    COMMIT_REFUSED = auto()
    ROGUE_TO_SOURCE = auto()
    ROGUE_TO_TARGET = auto()
    STALE_TO_SOURCE = auto()
    STALE_TO_TARGET = auto()


ARMED = frozenset(
    {
        Fault.RESERVE_REFUSED,
        Fault.STAGING_FAILS,
        Fault.RECEIVE_FAILS,
        Fault.CORRUPTION,
        Fault.INDEX_INVALID,
        Fault.CONTENTS_INVALID,
        Fault.COMMIT_REFUSED,
    }
)
"""Faults that strike at the next occasion instead of at once."""

_DRAINING = frozenset({s.SourcePhase.CANCELLING, s.SourcePhase.SETTLING, s.TargetPhase.SETTLING})
_STALE: tuple[s.Event, ...] = (
    s.Failed(Cancelled("again")),
    s.StreamLost(),
    s.PeerLost(PeerUnavailable("again")),
    s.DrainExpired(),
    s.PeerStopped(Cancelled("again"), 0),
    s.Accepted(3),
    s.ChunksReady(1),
    s.ChunkPosted(0, 0),
    s.ReceiptReceived("another receipt"),
    s.Reserved(),
    s.ChecksumsReceived(0, (1,)),
    s.IndexChecked(),
    s.ContentsChecked(),
)
_LATE = frozenset({s.Failed, s.Accepted, s.ChunksReady, s.ReceiptReceived, s.ChecksumsReceived, s.IndexChecked})
"""Of those, what may come late without having come before."""


@dataclass
class Side:
    name: str
    machine: Any
    table: Any
    inbox: deque[s.Event] = field(default_factory=deque)
    answers: deque[Callable[[], s.Event]] = field(default_factory=deque)
    open: dict[int, str] = field(default_factory=dict)
    """Open operations: chunk -> send, receive, discard, forgotten."""
    frozen: bool = False
    """Does nothing, hears nothing and is not missed, until the other side has ended: SIGSTOP, or a silent partition."""
    stream_lost: bool = False
    peer_lost: bool = False
    timer_fired: bool = False
    deadline_fired: bool = False
    released: bool = False
    end: s.End | None = None
    stops: list[s.TellStop] = field(default_factory=list)
    events: list[s.Event] = field(default_factory=list)
    actions: list[s.Action] = field(default_factory=list)
    phases: list[Any] = field(default_factory=list)

    def saw(self, event_type: type[s.Event]) -> bool:
        return any(type(event) is event_type for event in self.events)


class World:
    def __init__(
        self,
        setting: Setting,
        pick: Pick,
        source_type: type[s.SourceSession] = s.SourceSession,
        target_type: type[s.TargetSession] = s.TargetSession,
        seen: Counter[tuple[Any, Any]] | None = None,
    ) -> None:
        self.setting = setting
        self.pick = pick
        self.seen = Counter() if seen is None else seen
        self.faults: list[Fault] = []
        self.armed: set[Fault] = set()
        self.source = Side("source", setting.source(source_type), SOURCE_TABLE)
        self.target = Side("target", setting.target(target_type), TARGET_TABLE)
        self.ready = setting.first_ready
        self.stream_cut = False
        self.connected = True
        self.asked_to_send = 0
        self.sent: set[int] = set()
        self.unsendable: set[int] = set()
        self.in_transit: set[int] = set()
        self.landed: set[int] = set()
        self.broken_receives: set[int] = set()
        self.corrupted: set[int] = set()
        self.forgotten: set[int] = set()
        self.checksums_told = 0
        self.posted = 0
        self.reserved = False
        self.index_valid = False
        self.contents_valid = False
        self.committed = False
        self._carry_out_all(self.target, self.target.machine.start())

    # --- what can happen next ---------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        steps: list[Step] = []
        for side in (self.source, self.target):
            if side.frozen or side.end is not None:
                continue
            if side.inbox:
                steps.append((self._deliver, (side,)))
            elif not side.stream_lost and (self.stream_cut or self._other(side).end is not None):
                steps.append((self._lose_stream, (side,)))
            if side.answers:
                steps.append((self._answer, (side,)))
            if not self.connected and not side.peer_lost:
                steps.append((self._lose_peer, (side,)))
            steps += [(self._complete, (side, chunk)) for chunk in side.open if self._completable(side, chunk)]
        if not self.target.frozen:
            steps += [(self._land, (chunk,)) for chunk in self.target.open if self._landable(chunk)]
        if self.ready < self.setting.chunk_count and self.source.end is None and not self.source.frozen:
            steps.append((self._make_ready, ()))
        return steps

    def timers(self) -> list[Step]:
        return [
            (self._expire, (side,))
            for side in (self.source, self.target)
            if side.machine.phase in _DRAINING and not side.timer_fired and not side.frozen
        ]

    def take(self, step: Step) -> None:
        step[0](*step[1])

    def inject(self, fault: Fault) -> None:
        self.seen[self.source.machine.phase, fault] += 1
        self.seen[self.target.machine.phase, fault] += 1
        self.faults.append(fault)
        if fault in ARMED:
            self.armed.add(fault)
            return
        match fault:
            case Fault.SOURCE_FAILS | Fault.ROGUE_TO_SOURCE | Fault.STALE_TO_SOURCE if self.source.frozen:
                pass
            case Fault.TARGET_FAILS | Fault.ROGUE_TO_TARGET | Fault.STALE_TO_TARGET if self.target.frozen:
                pass
            case Fault.SOURCE_FAILS:
                self._feed(self.source, s.Failed(Cancelled("the caller cancelled")))
            case Fault.TARGET_FAILS:
                self._feed(self.target, s.Failed(Cancelled("the target cancelled")))
            case Fault.SOURCE_FREEZES:
                self.source.frozen = True
            case Fault.TARGET_FREEZES:
                self.target.frozen = True
            case Fault.STREAM_CUT:
                self._cut_stream()
            case Fault.CONNECTION_CUT:
                self._cut_connection(None)
            case Fault.ROGUE_TO_SOURCE:
                self._feed_rogue(self.source, [s.Accepted(2), s.ChecksumsReceived(0, (1,))])
            case Fault.ROGUE_TO_TARGET:
                wrong = s.ChecksumsReceived(self.setting.chunk_count, (1, 2))
                self._feed_rogue(self.target, [s.Accepted(2), s.ReceiptReceived(RECEIPT), wrong])
            case Fault.STALE_TO_SOURCE:
                self._feed_stale(self.source)
            case Fault.STALE_TO_TARGET:
                self._feed_stale(self.target)

    def wind_down(self) -> None:
        """No more faults: both sides have to end by themselves, each with one drain timer at most.

        A deadline may be needed only against a peer that is frozen, and a timer against one that hears nothing.
        """
        for _ in range(WIND_DOWN_STEPS):
            steps = self.steps() or self._last_resorts()
            if not steps:
                break
            self.take(self.pick(steps))
        for side in (self.source, self.target):
            self._require(side.end is not None, f"{side.name} waits for ever in {side.machine.phase}")
        self._check_outcomes()
        for side in (self.source, self.target):
            for event in _STALE:
                if type(event) in side.table[side.machine.phase]:
                    self._feed(side, event)

    def _last_resorts(self) -> list[Step]:
        frozen = {Fault.SOURCE_FREEZES, Fault.TARGET_FREEZES} & set(self.faults)
        early = self.source.timer_fired or self.target.timer_fired
        timers = self.timers()
        orderly = not (self.stream_cut or self.unsendable or frozen or early)
        self._require(not (timers and orderly), "only a timer ends what could end in order")
        awake = [side for side in (self.source, self.target) if not side.frozen and side.end is None]
        deadlines: list[Step] = [(self._exceed, (side,)) for side in awake if frozen and not side.deadline_fired]
        asleep = self.source.frozen or self.target.frozen
        thaw: list[Step] = [(self._thaw, ())] if asleep and not awake else []
        return timers or deadlines or thaw

    # --- steps ------------------------------------------------------------------------------------------------

    def _other(self, side: Side) -> Side:
        return self.target if side is self.source else self.source

    def _deliver(self, side: Side) -> None:
        self._feed(side, side.inbox.popleft())

    def _answer(self, side: Side) -> None:
        self._feed(side, side.answers.popleft()())

    def _lose_stream(self, side: Side) -> None:
        side.stream_lost = True
        self._feed(side, s.StreamLost())

    def _lose_peer(self, side: Side) -> None:
        side.peer_lost = True
        self._feed(side, s.PeerLost(PeerUnavailable("the connection was cut")))

    def _expire(self, side: Side) -> None:
        side.timer_fired = True
        self._feed(side, s.DrainExpired())

    def _exceed(self, side: Side) -> None:
        side.deadline_fired = True
        self._feed(side, s.Failed(DeadlineExceeded("the budget ran out")))

    def _thaw(self) -> None:
        self.source.frozen = self.target.frozen = False

    def _make_ready(self) -> None:
        self.ready += 1
        self._feed(self.source, s.ChunksReady(self.ready))

    def _completable(self, side: Side, chunk: int) -> bool:
        if chunk in self.unsendable and side is self.source:
            return False  # never handed over
        if not self.connected or chunk in self.landed:
            return True
        if side is self.source:
            return chunk in self.setting.eager
        return side.open[chunk] == "forgotten"

    def _complete(self, side: Side, chunk: int) -> None:
        kind = side.open.pop(chunk)
        error: HurrayError | None = None
        if side is self.source:
            if chunk not in self.landed and not (chunk in self.setting.eager and chunk in self.sent):
                error = PeerUnavailable("the connection was cut")
            self._feed(side, s.SendDone(chunk, error))
            return
        self.in_transit.discard(chunk)
        if kind == "forgotten":
            error = Cancelled("withdrawn")
        elif chunk in self.broken_receives or chunk not in self.landed:
            error = PeerUnavailable("the receive failed")
        checksum = 0 if error is not None or kind == "discard" else checksum_of(chunk) ^ (chunk in self.corrupted)
        self._feed(side, s.ReceiveDone(chunk, error, checksum))

    def _landable(self, chunk: int) -> bool:
        return chunk in self.sent and chunk not in self.landed and (self.connected or chunk in self.in_transit)

    def _land(self, chunk: int) -> None:
        self.landed.add(chunk)
        if self.target.open[chunk] == "forgotten":
            raise Violation(f"chunk {chunk} lands in a receive that was withdrawn")
        if self._strikes(Fault.RECEIVE_FAILS):
            self.broken_receives.add(chunk)
        if self.setting.checksummed and self._strikes(Fault.CORRUPTION):
            self.corrupted.add(chunk)

    # --- faults -----------------------------------------------------------------------------------------------

    def _strikes(self, fault: Fault) -> bool:
        struck = fault in self.armed
        self.armed.discard(fault)
        return struck

    def _cut_stream(self) -> None:
        self.stream_cut = True
        for side in (self.source, self.target):
            kept = self.pick(range(len(side.inbox) + 1))
            while len(side.inbox) > kept:
                side.inbox.pop()

    def _cut_connection(self, by: Side | None) -> None:
        if by is not None:
            by.peer_lost = True  # whoever closes is not told
        if self.connected:
            self.connected = False
            self.in_transit = {chunk for chunk in self.target.open if chunk in self.sent - self.landed}

    def _feed_rogue(self, side: Side, messages: Sequence[s.Event]) -> None:
        allowed = side.table[side.machine.phase]
        # An Accept before the real one would be a start; the checksums here are wrong at any time.
        wrong = [message for message in messages if type(message) not in allowed or side is self.target]
        self._feed(side, self.pick(wrong))

    def _feed_stale(self, side: Side) -> None:
        """Something that came before, or that comes too late, where the table says that it leads nowhere."""
        phase = side.machine.phase
        over = phase.name in ("SETTLING", "ENDED")

        def can_come(kind: type[s.Event]) -> bool:
            return phase.name == "ENDED" or side.saw(kind) or (over and kind in _LATE)

        def leads_nowhere(kind: type[s.Event]) -> bool:
            second_stop = kind is s.PeerStopped and phase is s.TargetPhase.SETTLING and side.saw(kind)
            return second_stop or side.table[phase].get(kind) == {phase}

        stale = [event for event in _STALE if can_come(type(event)) and leads_nowhere(type(event))]
        if stale:
            self._feed(side, self.pick(stale))

    # --- machine and world ------------------------------------------------------------------------------------

    def _feed(self, side: Side, event: s.Event) -> None:
        phase = side.machine.phase
        self.seen[phase, type(event)] += 1
        side.events.append(event)
        try:
            actions = side.machine.handle(event)
        except (Misuse, AssertionError) as error:
            raise Violation(f"{side.name} in {phase} met {event}: {error!r}") from error
        side.phases.append(side.machine.phase)
        self._carry_out_all(side, actions)

    def _carry_out_all(self, side: Side, actions: list[s.Action]) -> None:
        for action in actions:
            self._require(side.end is None, f"{side.name} asks for {action} after End")
            side.actions.append(action)
            getattr(self, f"_do_{type(action).__name__}")(side, action)

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(otherwise)

    def _tell(self, side: Side, message: s.Event) -> None:
        if not self.stream_cut and self._other(side).end is None:
            self._other(side).inbox.append(message)

    def _do_SendChunk(self, side: Side, action: s.SendChunk) -> None:
        chunk = action.chunk
        self._require(chunk == self.asked_to_send, "chunks are sent in order, each once")
        self._require(chunk < self.ready, "sent before it was ready")
        self._require(chunk not in self.forgotten, "sent after the target was told that it would not be")
        self._require(not side.stops, "sent after TellStop")
        self._require(len(side.open) < min(self.setting.window, MAX_WINDOW), "more sends than the window allows")
        self.asked_to_send += 1
        side.open[chunk] = "send"
        if self._strikes(Fault.STAGING_FAILS):
            self.unsendable.add(chunk)
            side.answers.append(lambda: self._staging_failed(chunk))
            return
        if self.connected:
            self.sent.add(chunk)
        checksum = checksum_of(chunk)
        side.answers.append(lambda: s.ChunkPosted(chunk, checksum))

    def _staging_failed(self, chunk: int) -> s.Event:
        del self.source.open[chunk]
        return s.SendDone(chunk, InternalError("staging failed"))

    def _do_TellChecksums(self, side: Side, action: s.TellChecksums) -> None:
        end = action.first + len(action.values)
        self._require(self.setting.checksummed, "checksums that nobody agreed on")
        self._require(not self.setting.offered, "told again what came with the offer")
        self._require(action.first == self.checksums_told and end <= self.asked_to_send, "checksums out of order")
        self._require(0 < len(action.values) <= s.CHECKSUM_BATCH, "batch too large")
        right = tuple(checksum_of(chunk) for chunk in range(action.first, end))
        self._require(action.values == right, "wrong checksums told")
        self.checksums_told = end
        self._tell(side, s.ChecksumsReceived(action.first, action.values))

    def _do_TellStop(self, side: Side, action: s.TellStop) -> None:
        self._require(not side.stops, "TellStop twice")
        count = self.asked_to_send if side is self.source else 0
        self._require(action.sent_chunk_count == count, f"miscounted: {action.sent_chunk_count} for {count}")
        side.stops.append(action)
        self._tell(side, s.PeerStopped(action.error, action.sent_chunk_count))

    def _do_Reserve(self, side: Side, _: s.Reserve) -> None:
        refused = self._strikes(Fault.RESERVE_REFUSED)
        self.reserved = not refused
        side.answers.append(lambda: s.Failed(ArenaFull("no memory")) if refused else s.Reserved())

    def _do_TellAccept(self, side: Side, _: s.TellAccept) -> None:
        self._require(self.reserved, "accepted without memory")
        self._tell(side, s.Accepted(self.setting.window))

    def _do_PostReceive(self, side: Side, action: s.PostReceive) -> None:
        chunk = action.chunk
        self._require(chunk == self.posted < self.setting.chunk_count, "receives are posted in order, each once")
        self._require(self.reserved and not side.released, "posted memory that is not the transfer's")
        self._require(chunk < self.setting.index_chunk_count or self.index_valid, "pages before a valid index")
        self._require(len(side.open) < self.setting.window, "more receives than the window allows")
        self._require(side.machine.outcome is None, "posted after failure")
        self.posted += 1
        side.open[chunk] = "receive"

    def _do_Forget(self, side: Side, action: s.Forget) -> None:
        self._require(side.open.get(action.chunk) == "receive", "withdrawn, but not posted")
        self._require(action.chunk >= self.asked_to_send, "withdrawn, but it may be under way")
        self.forgotten.add(action.chunk)
        side.open[action.chunk] = "forgotten"

    def _do_Discard(self, side: Side, action: s.Discard) -> None:
        chunk = action.chunk
        self._require(chunk not in side.open and chunk not in self.landed, "discarded, but it has a receive")
        self._require(chunk < self.asked_to_send, "discarded, but never sent")
        self._require(len(side.open) < self.setting.window, "more discards than the window allows")
        side.open[chunk] = "discard"

    def _do_CheckIndex(self, side: Side, _: s.CheckIndex) -> None:
        self._require_complete(side, self.setting.index_chunk_count)
        invalid = self._strikes(Fault.INDEX_INVALID)
        self.index_valid = not invalid
        side.answers.append(lambda: s.Failed(InvalidContents("index")) if invalid else s.IndexChecked())

    def _do_CheckContents(self, side: Side, _: s.CheckContents) -> None:
        self._require_complete(side, self.setting.chunk_count)
        invalid = self._strikes(Fault.CONTENTS_INVALID)
        self.contents_valid = not invalid
        side.answers.append(lambda: s.Failed(InvalidContents("scales")) if invalid else s.ContentsChecked())

    def _require_complete(self, side: Side, count: int) -> None:
        self._require(not side.open, "checked while receives are open")
        self._require(self.landed >= set(range(count)), "checked before everything arrived")
        self._require(not self.broken_receives, "checked what did not arrive")
        if self.setting.checksummed:
            told = len(self.setting.offered_checksums)
            told += sum(len(event.values) for event in side.events if isinstance(event, s.ChecksumsReceived))
            self._require(told >= count, "checked before its checksums were told")
            self._require(not self.corrupted, "checked what differs from what was sent")
            self._require(side.machine.verified_chunk_count == count, "verified chunks miscounted")

    def _do_Commit(self, side: Side, _: s.Commit) -> None:
        self._require(not side.released, "committed memory that was given back")
        self._require_complete(side, self.setting.chunk_count)
        self._require(self.index_valid and self.contents_valid, "committed before it was validated")
        self._require(side.saw(s.ContentsChecked), "committed before the contents were checked")
        self._require(sum(isinstance(action, s.Commit) for action in side.actions) == 1, "committed twice")
        side.answers.append(self._answer_commit)

    def _answer_commit(self) -> s.Event:
        if self._strikes(Fault.COMMIT_REFUSED):
            return s.CommitRefused(KeyBusy("taken"))
        self.committed = True
        return s.Committed(RECEIPT)

    def _do_TellReceipt(self, side: Side, action: s.TellReceipt) -> None:
        self._require(self.committed and action.receipt == RECEIPT, "receipt without commit")
        self._require(not side.stops, "receipt after TellStop")
        self._tell(side, s.ReceiptReceived(action.receipt))

    def _do_CloseEndpoint(self, side: Side, _: s.CloseEndpoint) -> None:
        # The connection serves every transfer of the two peers: never cut where an orderly end was possible.
        self._require(side.saw(s.StreamLost) or side.saw(s.DrainExpired), "closed without need")
        self._require(sum(isinstance(action, s.CloseEndpoint) for action in side.actions) == 1, "closed twice")
        self._cut_connection(side)

    def _do_Release(self, side: Side, action: s.Release) -> None:
        self._require(not side.open, f"{side.name} released while {sorted(side.open)} are open")
        self._require(not side.released, "released twice")
        self._require(action.keep == (side is self.target and self.committed), "kept what was not committed")
        side.released = True

    def _do_End(self, side: Side, action: s.End) -> None:
        self._require(side.released, "ended without Release")
        side.end = action

    # --- at the end -------------------------------------------------------------------------------------------

    def _check_outcomes(self) -> None:
        source, target = self.source.end, self.target.end
        assert source is not None
        assert target is not None
        self._require((target.error is None) == self.committed, "target's outcome is not what it did")
        if source.error is None:
            self._require(self.committed and source.receipt == RECEIPT, "source reports a commit that was not")
        elif self.committed:
            self._require(isinstance(source.error, OutcomeUnknown), f"committed, but the source says {source.error}")
        self._require(not self.connected or self.sent <= self.landed, "messages are left that nobody takes")
        if isinstance(source.error, OutcomeUnknown):
            heard = self.source.saw(s.StreamLost) or self.source.saw(s.DrainExpired)
            self._require(heard, "unknown, though the target would have told")
        for side in (self.source, self.target):
            assert side.end is not None
            state = side.machine.state
            if side.end.error is None:
                self._require(state is s.State.SUCCEEDED, f"{state} after success")
            else:
                self._require(state in (s.State.FAILED, s.State.CANCELLED), f"{state} after {side.end.error}")
        if not self.faults:
            self._require(source.error is None and target.error is None, f"failed unharmed: {source} {target}")
            self._require(not self.source.stops and not self.target.stops, "stopped unharmed")

    def check_replay(self) -> None:
        """The same events give the same actions."""
        for side in (self.source, self.target):
            again: Any = self.setting.source() if side is self.source else self.setting.target()
            heard: list[s.Action] = []
            replayed = s.replay(again, side.events, heard.append)
            self._require(_shown(replayed) == _shown(heard) == _shown(side.actions), "replay differs")
            self._require(again.phase is side.machine.phase, "replay ends elsewhere")


def _shown(actions: Sequence[s.Action]) -> list[str]:
    # Errors made by a machine are equal in what they say, not as objects.
    return [str(action) for action in actions]
