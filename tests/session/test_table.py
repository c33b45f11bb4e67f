"""The table of phases and events is complete, and each way to fail does what the module promises."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hurray_wire import session as s
from hurray_wire import session_events
from hurray_wire.errors import (
    Cancelled,
    ChecksumMismatch,
    DeadlineExceeded,
    HurrayError,
    InvalidContents,
    KeyBusy,
    Misuse,
    OutcomeUnknown,
    PeerUnavailable,
    ProtocolViolation,
)
from hurray_wire.limits import MAX_WINDOW
from hurray_wire.session_phases import SOURCE_TABLE, TARGET_TABLE

S, T = s.SourcePhase, s.TargetPhase
LOST = PeerUnavailable("the connection was cut")
CANCEL = Cancelled("the caller cancelled")
LATE = DeadlineExceeded("the budget ran out")

NAMES = [value for value in vars(session_events).values() if isinstance(value, type)]
EVENT_TYPES = [value for value in NAMES if issubclass(value, s.Event) and value is not s.Event]


def feed(machine: s.SourceSession | s.TargetSession, *events: s.Event) -> list[s.Action]:
    """Feed events; the actions of the last one."""
    actions: list[s.Action] = []
    for event in events:
        actions = machine.handle(event)
    return actions


def end_of(actions: list[s.Action]) -> s.End:
    """The End that closes these actions, with Release before it."""
    assert isinstance(actions[-1], s.End), actions
    assert sum(isinstance(action, s.Release) for action in actions) == 1, actions
    return actions[-1]


def posted(*chunks: int) -> list[s.Event]:
    return [s.ChunkPosted(chunk, 100 + chunk) for chunk in chunks]


def sums(first: int, end: int) -> s.ChecksumsReceived:
    return s.ChecksumsReceived(first, tuple(range(100 + first, 100 + end)))


def arrive(*chunks: int) -> list[s.Event]:
    return [s.ReceiveDone(chunk, None, 100 + chunk) for chunk in chunks]


def source_in(phase: s.SourcePhase, **changes: Any) -> s.SourceSession:
    """Four chunks, one of them index, window 2; sends 2 and 3 are open from DELIVERED to SETTLING."""
    machine = s.SourceSession(4, 1, 4, **changes)
    delivered = [s.Accepted(2), *posted(0, 1), s.SendDone(0), s.SendDone(1), *posted(2, 3)]
    scripts: dict[s.SourcePhase, list[s.Event]] = {
        S.OFFERED: [],
        S.SENDING: [s.Accepted(2)],
        S.DELIVERED: delivered,
        S.CANCELLING: [*delivered, s.Failed(CANCEL)],
        S.SETTLING: [*delivered, s.ReceiptReceived("receipt")],
        S.ENDED: [s.Failed(CANCEL)],
    }
    feed(machine, *scripts[phase])
    assert machine.phase is phase
    return machine


def target_in(phase: s.TargetPhase, **changes: Any) -> s.TargetSession:
    """Four chunks, one of them index, window 2; two receives are open in PAGES and SETTLING."""
    machine = s.TargetSession(4, 1, 2, **changes)
    index = [s.Reserved(), sums(0, 1), *arrive(0)]
    pages = [*index, s.IndexChecked()]
    checking = [*pages, sums(1, 4), *arrive(1, 2, 3)]
    scripts: dict[s.TargetPhase, list[s.Event]] = {
        T.RESERVING: [],
        T.INDEX: [s.Reserved()],
        T.CHECKING_INDEX: index,
        T.PAGES: pages,
        T.CHECKING_CONTENTS: checking,
        T.COMMITTING: [*checking, s.ContentsChecked()],
        T.SETTLING: [*pages, s.Failed(CANCEL)],
        T.ENDED: [*checking, s.ContentsChecked(), s.Committed("receipt")],
    }
    feed(machine, *scripts[phase])
    assert machine.phase is phase
    return machine


def sample(event_type: type[s.Event], machine: Any) -> s.Event:
    """An event of this type that fits the machine as it is."""
    open_chunk = min(machine.in_flight, default=0)
    values: dict[type[s.Event], tuple[Any, ...]] = {
        s.Failed: (LATE,),
        s.PeerLost: (LOST,),
        s.PeerStopped: (CANCEL, 4 if getattr(machine, "posted_chunk_count", 1) else 0),
        s.Accepted: (2,),
        s.ChunksReady: (4,),
        s.ChunkPosted: (0, 100),
        s.SendDone: (open_chunk,),
        s.ReceiptReceived: ("receipt",),
        s.ChecksumsReceived: (len(getattr(machine, "_told", ())), (100,)),
        s.ReceiveDone: (open_chunk, None, 100 + open_chunk),
        s.Committed: ("receipt",),
        s.CommitRefused: (KeyBusy("taken"),),
    }
    return event_type(*values.get(event_type, ()))


# --- the table ----------------------------------------------------------------------------------------------------


def test_table_names_every_phase_and_only_real_events() -> None:
    assert set(SOURCE_TABLE) == set(S)
    assert set(TARGET_TABLE) == set(T)
    used = {event for table in (SOURCE_TABLE, TARGET_TABLE) for row in table.values() for event in row}
    assert used == set(EVENT_TYPES)


@pytest.mark.parametrize("phase", S)
@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_source_pair(phase: s.SourcePhase, event_type: type[s.Event]) -> None:
    machine = source_in(phase)
    check_pair(machine, SOURCE_TABLE, event_type, fails_in={S.OFFERED, S.SENDING}, cancels_in={S.DELIVERED})


@pytest.mark.parametrize("phase", T)
@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_target_pair(phase: s.TargetPhase, event_type: type[s.Event]) -> None:
    machine = target_in(phase)
    fails_in = {T.RESERVING, T.INDEX, T.CHECKING_INDEX, T.PAGES, T.CHECKING_CONTENTS}
    check_pair(machine, TARGET_TABLE, event_type, fails_in=fails_in, cancels_in=set())


def check_pair(
    machine: Any, table: Any, event_type: type[s.Event], *, fails_in: set[Any], cancels_in: set[Any]
) -> None:
    phase, before = machine.phase, copy.deepcopy(vars(machine))
    event = sample(event_type, machine)
    if event_type in table[phase]:
        machine.handle(event)
        assert machine.phase in table[phase][event_type]
    elif not event_type.from_peer:
        with pytest.raises(Misuse, match="not allowed"):
            machine.handle(event)
        assert shown(vars(machine)) == shown(before | {"_actions": []})
    else:
        actions = machine.handle(event)
        if phase in fails_in | cancels_in:
            assert isinstance(machine.outcome, ProtocolViolation)
            assert machine.outcome.stage == phase.value
            assert sum(isinstance(action, s.TellStop) for action in actions) == 1
            over = {S.CANCELLING} if phase in cancels_in else {S.SETTLING, S.ENDED, T.SETTLING, T.ENDED}
            assert machine.phase in over
        else:
            assert actions == []
            assert shown(vars(machine)) == shown(before | {"_actions": []})


def shown(state: dict[str, Any]) -> str:
    return repr(sorted(state.items()))


def test_public_states() -> None:
    for phase in set(S) - {S.OFFERED, S.ENDED}:
        assert source_in(phase).state is s.State.RUNNING
    for target_phase in set(T) - {T.RESERVING, T.ENDED}:
        assert target_in(target_phase).state is s.State.RUNNING
    assert source_in(S.OFFERED).state is s.State.PREPARING
    assert target_in(T.RESERVING).state is s.State.PREPARING
    assert source_in(S.ENDED).state is s.State.CANCELLED
    assert target_in(T.ENDED).state is s.State.SUCCEEDED
    failed = source_in(S.OFFERED)
    feed(failed, s.Failed(LATE))
    assert failed.state is s.State.FAILED


def test_replay_gives_the_same_actions_and_carries_out_each() -> None:
    events = [s.Reserved(), *arrive(0), sums(0, 1), s.IndexChecked(), *arrive(1, 2, 3), sums(1, 4), s.ContentsChecked()]
    recorded = s.TargetSession(4, 1, 2)
    asked = recorded.start()
    for event in events:
        asked += recorded.handle(event)
    carried_out: list[s.Action] = []
    assert s.replay(s.TargetSession(4, 1, 2), events, carried_out.append) == asked == carried_out
    assert asked[0] == s.Reserve()
    assert asked[-1] == s.Commit()


def test_every_public_name_of_events_comes_from_session() -> None:
    expected = {value.__name__ for value in NAMES if issubclass(value, s.Event | s.Action)}
    assert expected <= set(s.__all__)


# --- source -------------------------------------------------------------------------------------------------------


def test_source_succeeds() -> None:
    machine = source_in(S.DELIVERED)
    assert feed(machine, s.SendDone(2), s.SendDone(3)) == []
    assert feed(machine, s.ReceiptReceived("receipt")) == [s.Release(), s.End(None, "receipt")]


def test_source_keeps_its_memory_until_the_last_send_completed() -> None:
    machine = source_in(S.DELIVERED)
    assert feed(machine, s.ReceiptReceived("receipt")) == []
    assert feed(machine, s.SendDone(3)) == []
    assert feed(machine, s.SendDone(2, LOST)) == [s.Release(), s.End(None, "receipt")]


def test_retry_is_answered_with_the_first_receipt() -> None:
    machine = source_in(S.OFFERED)
    assert feed(machine, s.ReceiptReceived("first")) == [s.Release(), s.End(None, "first")]


def test_window_bounds_what_is_in_flight() -> None:
    machine = s.SourceSession(40, 1, 40)
    assert len(feed(machine, s.Accepted(2**32 - 1))) == MAX_WINDOW
    machine = s.SourceSession(3, 1, 3)
    assert feed(machine, s.Accepted(1)) == [s.SendChunk(0)]
    assert feed(machine, *posted(0), s.SendDone(0)) == [s.SendChunk(1)]


def test_window_of_zero_is_refused() -> None:
    actions = feed(source_in(S.OFFERED), s.Accepted(0))
    error = end_of(actions).error
    assert isinstance(error, ProtocolViolation)
    assert error.details == {"field": "window", "offered": "0", "required": ">= 1", "stage": "offer"}
    assert actions[0] == s.TellStop(error, 0)


def test_chunks_are_sent_as_they_become_ready() -> None:
    machine = s.SourceSession(4, 1, 1)
    feed(machine, s.ChunksReady(2))
    assert feed(machine, s.Accepted(4)) == [s.SendChunk(0), s.SendChunk(1)]
    assert feed(machine, s.ChunksReady(1)) == []
    assert feed(machine, s.ChunksReady(10**9)) == [s.SendChunk(2), s.SendChunk(3)]


@pytest.mark.parametrize(("sent", "stage"), [(2, "announce"), (1, "pages")])
def test_who_is_first_to_say_that_the_budget_is_spent_does_not_hide_what_was_waited_for(sent: int, stage: str) -> None:
    machine = s.SourceSession(4, 1, 2)
    feed(machine, s.Accepted(4), *[s.SendDone(chunk) for chunk in range(sent)])
    feed(machine, s.PeerStopped(DeadlineExceeded("spent", stage="pages", budget_s=2)))
    assert machine.outcome is not None
    assert (machine.outcome.stage, machine.outcome.details["budget_s"]) == (stage, "2")


def test_checksums_are_told_with_the_index_then_in_batches_then_at_the_end() -> None:
    machine = s.SourceSession(2 + s.CHECKSUM_BATCH + 3, 2, 2)
    feed(machine, s.Accepted(16))
    assert feed(machine, *posted(0)) == []
    assert feed(machine, *posted(1)) == [s.TellChecksums(0, (100, 101))]
    feed(machine, s.SendDone(0), s.SendDone(1), s.ChunksReady(machine.chunk_count))
    told = []
    while machine.phase is S.SENDING:
        chunk = machine._told_count + len(machine._untold)
        told += [action for action in feed(machine, *posted(chunk)) if isinstance(action, s.TellChecksums)]
        feed(machine, s.SendDone(chunk))
    assert [(action.first, len(action.values)) for action in told] == [(2, s.CHECKSUM_BATCH), (18, 3)]


def test_checksums_are_told_while_sends_complete_faster_than_they_are_posted() -> None:
    machine = s.SourceSession(60, 1, 60)
    feed(machine, s.Accepted(4))
    longest = 0
    for chunk in range(60):
        feed(machine, *posted(chunk))
        longest = max(longest, len(machine._untold))
        feed(machine, s.SendDone(chunk))
    assert longest < s.CHECKSUM_BATCH


def test_source_without_checksums_is_delivered_with_the_last_send() -> None:
    machine = s.SourceSession(2, 1, 2, checksummed=False)
    assert feed(machine, s.Accepted(2)) == [s.SendChunk(0), s.SendChunk(1)]
    assert machine.phase is S.DELIVERED
    assert feed(machine, *posted(0, 1), s.SendDone(0), s.SendDone(1)) == []
    assert isinstance(end_of(feed(machine, s.StreamLost())).error, OutcomeUnknown)


@pytest.mark.parametrize("event", [s.Failed(LATE), s.PeerLost(LATE), s.PeerStopped(LATE), s.SendDone(0, LATE)])
def test_source_that_fails_while_sending_counts_what_it_sent_and_waits_for_it(event: s.Event) -> None:
    machine = source_in(S.SENDING)
    assert feed(machine, event)[:1] == [s.TellStop(LATE, 2)]
    open_chunks = sorted(machine.in_flight)
    assert all(not feed(machine, s.SendDone(chunk)) for chunk in open_chunks[:-1])
    assert feed(machine, s.SendDone(open_chunks[-1])) == [s.Release(), s.End(LATE)]
    assert feed(machine, *posted(0)) == []


def test_source_whose_stream_breaks_while_sending_cuts_the_connection() -> None:
    machine = source_in(S.SENDING)
    assert feed(machine, s.StreamLost()) == [s.CloseEndpoint()]
    assert isinstance(machine.outcome, PeerUnavailable)
    assert feed(machine, s.SendDone(0, LOST)) == []
    assert end_of(feed(machine, s.SendDone(1, LOST))).error is machine.outcome


def test_source_that_told_its_count_leaves_the_connection_alone_until_the_drain_expires() -> None:
    machine = source_in(S.SENDING)
    feed(machine, s.Failed(CANCEL))
    assert feed(machine, s.StreamLost(), s.SendDone(0)) == []
    assert feed(machine, s.DrainExpired()) == [s.CloseEndpoint()]
    assert feed(machine, s.DrainExpired()) == []
    assert end_of(feed(machine, s.SendDone(1, LOST))).error is CANCEL


def test_losing_the_connection_after_the_last_byte_decides_nothing() -> None:
    machine = source_in(S.DELIVERED)
    assert feed(machine, s.PeerLost(LOST)) == []
    assert machine.phase is S.DELIVERED


def test_a_send_that_fails_after_the_last_byte_asks_the_target() -> None:
    machine = source_in(S.DELIVERED)
    assert feed(machine, s.SendDone(2, LOST)) == [s.TellStop(LOST, 4)]
    assert machine.phase is S.CANCELLING
    assert feed(machine, s.SendDone(3, LOST)) == []
    assert feed(machine, s.ReceiptReceived("receipt")) == [s.Release(), s.End(None, "receipt")]


def test_target_that_refuses_after_the_last_byte() -> None:
    machine = source_in(S.DELIVERED)
    refusal = InvalidContents("scales")
    assert feed(machine, s.PeerStopped(refusal)) == [s.TellStop(refusal, 4)]
    assert end_of(feed(machine, s.SendDone(2), s.SendDone(3))).error is refusal


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (s.ReceiptReceived("receipt"), type(None)),
        (s.PeerStopped(CANCEL), Cancelled),
        (s.StreamLost(), OutcomeUnknown),
        (s.DrainExpired(), OutcomeUnknown),
    ],
)
def test_after_cancelling_the_answer_decides(answer: s.Event, expected: type[HurrayError | None]) -> None:
    machine = source_in(S.CANCELLING)
    feed(machine, s.SendDone(2), s.SendDone(3), s.Failed(LATE), s.PeerLost(LOST))
    end = end_of(feed(machine, answer))
    assert type(end.error) is expected
    assert end.receipt == ("receipt" if end.error is None else None)
    if isinstance(end.error, OutcomeUnknown):
        assert end.error.details == {"stage": "cancel", "cause": "CANCELLED"}


def test_one_drain_timer_ends_cancelling_and_the_open_sends() -> None:
    machine = source_in(S.CANCELLING)
    assert feed(machine, s.DrainExpired()) == [s.CloseEndpoint()]
    assert isinstance(end_of(feed(machine, s.SendDone(2, LOST), s.SendDone(3, LOST))).error, OutcomeUnknown)


def test_a_wrong_message_after_the_last_byte_leaves_the_answer_to_decide() -> None:
    machine = source_in(S.DELIVERED)
    assert isinstance(feed(machine, s.Accepted(2))[0], s.TellStop)
    assert feed(machine, s.Accepted(2)) == []
    feed(machine, s.SendDone(2), s.SendDone(3))
    assert end_of(feed(machine, s.ReceiptReceived("receipt"))).error is None


def test_a_wrong_message_after_the_outcome_changes_nothing() -> None:
    for phase in (S.SETTLING, S.ENDED):
        machine = source_in(phase)
        outcome = machine.outcome
        assert feed(machine, s.ChecksumsReceived(0, (1,))) == []
        assert machine.outcome is outcome


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunks_posted_out_of_order_are_our_own_mistake(chunk: int) -> None:
    machine = source_in(S.SENDING)
    with pytest.raises(Misuse):
        machine.handle(s.ChunkPosted(chunk, 0))
    assert feed(machine, *posted(0, 1)) == [s.TellChecksums(0, (100, 101))]
    with pytest.raises(Misuse):
        machine.handle(s.ChunkPosted(2, 0))


def test_a_completion_comes_once() -> None:
    source, target = source_in(S.SENDING), target_in(T.PAGES)
    feed(source, s.SendDone(0))
    feed(target, *arrive(1))
    with pytest.raises(Misuse):
        source.handle(s.SendDone(0))
    with pytest.raises(Misuse):
        target.handle(arrive(1)[0])


# --- target -------------------------------------------------------------------------------------------------------


def test_target_succeeds() -> None:
    machine = s.TargetSession(4, 1, 2)
    assert machine.start() == [s.Reserve()]
    assert feed(machine, s.Reserved()) == [s.TellAccept(), s.PostReceive(0)]
    assert feed(machine, *arrive(0)) == []
    assert feed(machine, sums(0, 1)) == [s.CheckIndex()]
    assert feed(machine, sums(1, 2)) == []
    assert feed(machine, s.IndexChecked()) == [s.PostReceive(1), s.PostReceive(2)]
    assert feed(machine, *arrive(2)) == [s.PostReceive(3)]
    assert feed(machine, *arrive(1, 3)) == []
    assert feed(machine, sums(2, 4)) == [s.CheckContents()]
    assert machine.verified_chunk_count == 4
    assert feed(machine, s.ContentsChecked()) == [s.Commit()]
    assert feed(machine, s.Committed("receipt")) == [
        s.Release(keep=True),
        s.TellReceipt("receipt"),
        s.End(None, "receipt"),
    ]


def test_index_larger_than_the_window() -> None:
    machine = s.TargetSession(4, 3, 1)
    assert feed(machine, s.Reserved())[1:] == [s.PostReceive(0)]
    assert feed(machine, *arrive(0)) == [s.PostReceive(1)]
    assert feed(machine, *arrive(1)) == [s.PostReceive(2)]
    assert feed(machine, *arrive(2)) == []
    assert feed(machine, sums(0, 3)) == [s.CheckIndex()]
    assert feed(machine, s.IndexChecked()) == [s.PostReceive(3)]


def test_snapshot_without_pages() -> None:
    machine = s.TargetSession(1, 1, 4)
    assert feed(machine, s.Reserved(), sums(0, 1), *arrive(0)) == [s.CheckIndex()]
    assert feed(machine, s.IndexChecked()) == [s.CheckContents()]


def test_target_without_checksums() -> None:
    machine = s.TargetSession(2, 1, 2, checksummed=False)
    assert feed(machine, s.Reserved(), *arrive(0)) == [s.CheckIndex()]
    assert feed(machine, s.IndexChecked(), *arrive(1)) == [s.CheckContents()]
    assert machine.verified_chunk_count == 0
    told = s.TargetSession(2, 1, 2, checksummed=False)
    feed(told, s.Reserved(), sums(0, 1))
    assert isinstance(told.outcome, ProtocolViolation)


@pytest.mark.parametrize("told_first", [True, False])
def test_bytes_that_differ_are_refused(told_first: bool) -> None:
    machine = target_in(T.PAGES)
    wrong = s.ReceiveDone(2, None, 7)
    feed(machine, *([sums(1, 4), wrong] if told_first else [wrong, sums(1, 4)]))
    assert isinstance(machine.outcome, ChecksumMismatch)
    assert machine.outcome.details["chunk"] == "2"
    assert machine.phase is T.SETTLING


@pytest.mark.parametrize("first", [0, 2, 10**6])
def test_checksums_out_of_order_are_refused(first: int) -> None:
    machine = target_in(T.PAGES)
    feed(machine, s.ChecksumsReceived(first, (1,)))
    assert isinstance(machine.outcome, ProtocolViolation)
    assert machine.outcome.field == "first_chunk"


def test_more_checksums_than_chunks_are_refused() -> None:
    machine = target_in(T.PAGES)
    feed(machine, sums(1, 5))
    assert isinstance(machine.outcome, ProtocolViolation)


def test_stop_of_the_source_takes_back_what_was_not_sent_and_waits_for_what_was() -> None:
    machine = target_in(T.PAGES)  # 1 and 2 are open
    assert feed(machine, s.PeerStopped(CANCEL, 2)) == [s.TellStop(CANCEL), s.Forget(2)]
    assert feed(machine, s.ReceiveDone(2, CANCEL)) == []
    assert feed(machine, s.PeerStopped(CANCEL, 4), s.Failed(LATE)) == []
    assert feed(machine, *arrive(1)) == [s.Release(), s.End(CANCEL)]


def test_stop_of_the_source_drops_what_has_no_receive_within_the_window() -> None:
    machine = s.TargetSession(7, 1, 2)
    feed(machine, s.Reserved(), *arrive(0), sums(0, 1))
    assert feed(machine, s.PeerStopped(CANCEL, 5)) == [s.TellStop(CANCEL), s.Discard(1), s.Discard(2)]
    assert feed(machine, s.ReceiveDone(2)) == [s.Discard(3)]
    assert feed(machine, s.ReceiveDone(1)) == [s.Discard(4)]
    assert feed(machine, s.ReceiveDone(4), s.ReceiveDone(3)) == [s.Release(), s.End(CANCEL)]


def test_target_that_fails_waits_for_the_count_of_the_source() -> None:
    machine = target_in(T.PAGES)
    invalid = InvalidContents("index")
    assert feed(machine, s.Failed(invalid)) == [s.TellStop(invalid)]
    assert feed(machine, *arrive(1, 2)) == []
    assert feed(machine, s.PeerStopped(invalid, 3)) == [s.Release(), s.End(invalid)]


@pytest.mark.parametrize("count", [0, 5, 2**64 - 1])
@pytest.mark.parametrize("settling", [False, True])
def test_a_count_that_cannot_be_true_cuts_the_connection(count: int, settling: bool) -> None:
    machine = target_in(T.SETTLING if settling else T.PAGES)
    actions = feed(machine, s.PeerStopped(LATE, count))
    assert actions[0] == s.CloseEndpoint()
    assert not any(isinstance(action, s.Forget | s.Discard) for action in actions)
    assert isinstance(machine.outcome, Cancelled if settling else ProtocolViolation)
    assert feed(machine, s.ReceiveDone(1, LOST)) == []
    assert end_of(feed(machine, s.ReceiveDone(2, LOST))).error is machine.outcome


def test_checksums_that_came_with_the_offer_are_compared_with_what_arrives() -> None:
    machine = s.TargetSession(3, 1, 2, offered_checksums=(100, 101))
    assert machine.start() == [s.Reserve()]
    assert feed(machine, s.Reserved(), *arrive(0))[-1] == s.CheckIndex()
    feed(machine, s.IndexChecked(), *arrive(1, 2))
    assert machine.verified_chunk_count == 2
    assert feed(machine, sums(2, 3)) == [s.CheckContents()]

    other = s.TargetSession(3, 1, 2, offered_checksums=(99,))
    other.start()
    feed(other, s.Reserved(), *arrive(0))
    assert isinstance(other.outcome, ChecksumMismatch)


@pytest.mark.parametrize("changes", [{"checksummed": False}, {"offered_checksums": (1, 2, 3)}])
def test_checksums_that_cannot_be_are_refused_before_anything_is_reserved(changes: dict[str, Any]) -> None:
    machine = s.TargetSession(2, 1, 2, **{"offered_checksums": (1,), **changes})
    actions = machine.start()
    assert s.Reserve() not in actions
    assert isinstance(end_of(actions).error, ProtocolViolation)


def test_what_came_with_the_offer_says_nothing_of_what_was_sent() -> None:
    machine = s.TargetSession(4, 1, 2, offered_checksums=(100, 101, 102, 103))
    machine.start()
    assert feed(machine, s.Reserved(), s.PeerStopped(CANCEL, 0)) == [s.TellStop(CANCEL), s.Forget(0)]
    arrived = s.TargetSession(4, 1, 2, offered_checksums=(100, 101, 102, 103))
    arrived.start()
    assert s.CloseEndpoint() in feed(arrived, s.Reserved(), *arrive(0), s.PeerStopped(CANCEL, 0))
    told = s.TargetSession(4, 1, 2, offered_checksums=(100,))
    told.start()
    assert s.CloseEndpoint() in feed(told, s.Reserved(), sums(1, 3), s.PeerStopped(CANCEL, 2))


def test_a_count_below_what_arrived_or_was_told_cannot_be_true() -> None:
    arrived, told = target_in(T.PAGES), target_in(T.PAGES)
    assert s.CloseEndpoint() in feed(arrived, *arrive(2), s.PeerStopped(CANCEL, 2))
    assert s.CloseEndpoint() in feed(told, sums(1, 4), s.PeerStopped(CANCEL, 3))
    before_accept = target_in(T.RESERVING)
    assert s.CloseEndpoint() in feed(before_accept, s.PeerStopped(CANCEL, 1))
    assert before_accept.phase is T.ENDED


def test_stop_before_memory_is_reserved() -> None:
    machine = target_in(T.RESERVING)
    assert feed(machine, s.PeerStopped(CANCEL)) == [s.TellStop(CANCEL), s.Release(), s.End(CANCEL)]
    assert feed(machine, s.Reserved()) == []


def test_stream_lost_cuts_the_connection_and_waits_for_the_receives() -> None:
    machine = target_in(T.PAGES)
    assert feed(machine, s.StreamLost()) == [s.CloseEndpoint()]
    assert feed(machine, s.ReceiveDone(2, LOST), s.PeerStopped(CANCEL, 3)) == []
    assert isinstance(end_of(feed(machine, *arrive(1))).error, PeerUnavailable)


def test_stream_lost_after_the_count_is_known_leaves_the_connection_alone() -> None:
    machine = target_in(T.PAGES)
    feed(machine, s.PeerStopped(CANCEL, 3))
    assert feed(machine, s.StreamLost(), *arrive(2)) == []
    assert feed(machine, *arrive(1)) == [s.Release(), s.End(CANCEL)]


def test_stream_lost_while_settling_without_a_count() -> None:
    machine = target_in(T.SETTLING)
    assert feed(machine, s.StreamLost()) == [s.CloseEndpoint()]
    nothing_open = target_in(T.CHECKING_INDEX)
    feed(nothing_open, s.Failed(CANCEL))
    assert feed(nothing_open, s.StreamLost()) == [s.CloseEndpoint(), s.Release(), s.End(CANCEL)]


def test_drain_expires_with_and_without_open_receives() -> None:
    machine = target_in(T.SETTLING)
    assert feed(machine, s.DrainExpired()) == [s.CloseEndpoint()]
    assert feed(machine, s.DrainExpired(), s.ReceiveDone(1, LOST)) == []
    assert feed(machine, s.ReceiveDone(2, LOST)) == [s.Release(), s.End(CANCEL)]
    nothing_open = target_in(T.CHECKING_INDEX)
    feed(nothing_open, s.Failed(CANCEL))
    assert feed(nothing_open, s.DrainExpired()) == [s.CloseEndpoint(), s.Release(), s.End(CANCEL)]


def test_a_lost_connection_needs_no_count() -> None:
    machine = target_in(T.PAGES)
    assert feed(machine, s.PeerLost(LOST)) == [s.TellStop(LOST)]
    assert feed(machine, s.PeerStopped(LOST, 1), s.ReceiveDone(1, LOST)) == []
    assert feed(machine, s.ReceiveDone(2, LOST)) == [s.Release(), s.End(LOST)]
    nothing_open = target_in(T.CHECKING_INDEX)
    assert feed(nothing_open, s.PeerLost(LOST)) == [s.TellStop(LOST), s.Release(), s.End(LOST)]
    settling = target_in(T.CHECKING_INDEX)
    feed(settling, s.Failed(CANCEL))
    assert feed(settling, s.PeerLost(LOST)) == [s.Release(), s.End(CANCEL)]


def test_a_connection_lost_that_leaves_receives_open_is_cut_when_the_drain_expires() -> None:
    machine = target_in(T.PAGES)
    feed(machine, s.PeerLost(LOST))
    assert feed(machine, s.DrainExpired()) == [s.CloseEndpoint()]


def test_losing_the_connection_when_all_arrived_is_no_matter() -> None:
    machine = target_in(T.CHECKING_CONTENTS)
    assert feed(machine, s.PeerLost(LOST)) == []
    assert feed(machine, s.ContentsChecked()) == [s.Commit()]


def test_a_receive_that_fails_in_the_middle() -> None:
    machine = target_in(T.PAGES)
    assert feed(machine, s.ReceiveDone(1, LOST)) == [s.TellStop(LOST)]
    assert feed(machine, s.PeerStopped(LOST, 4)) == [s.Discard(3)]
    assert feed(machine, *arrive(2), s.ReceiveDone(3)) == [s.Release(), s.End(LOST)]


def test_only_the_answer_ends_a_commit() -> None:
    machine = target_in(T.COMMITTING)
    noise = [s.Failed(LATE), s.PeerLost(LOST), s.PeerStopped(CANCEL, 4), s.StreamLost(), s.Accepted(1)]
    assert all(feed(machine, event) == [] for event in noise)
    assert machine.phase is T.COMMITTING
    assert feed(machine, s.Committed("receipt")) == [s.Release(keep=True), s.End(None, "receipt")]


def test_commit_refused() -> None:
    machine = target_in(T.COMMITTING)
    busy = KeyBusy("taken")
    assert feed(machine, s.CommitRefused(busy)) == [s.TellStop(busy), s.Release(), s.End(busy)]


@pytest.mark.parametrize("event", [s.Failed(LATE), s.PeerStopped(LATE, 4)])
def test_failing_while_contents_are_checked_releases_at_once(event: s.Event) -> None:
    machine = target_in(T.CHECKING_CONTENTS)
    assert feed(machine, event) == [s.TellStop(LATE), s.Release(), s.End(LATE)]
    assert feed(machine, s.ContentsChecked()) == []
