"""One machine against a peer that says anything at any time: its own bookkeeping holds, and it ends."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_wire import session as s
from hurray_wire.errors import Cancelled, DeadlineExceeded, PeerUnavailable
from hurray_wire.session_phases import SOURCE_OVER, TARGET_OVER

CHUNK_COUNT = 5
LIE = Cancelled("so it says")

counts = st.one_of(st.integers(0, CHUNK_COUNT + 1), st.sampled_from([2**32 - 1, 2**64 - 1]))
messages = st.one_of(
    st.builds(s.Accepted, counts),
    st.builds(s.ReceiptReceived, st.just("receipt")),
    st.builds(s.PeerStopped, st.just(LIE), counts),
    st.builds(s.ChecksumsReceived, counts, st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple)),
    st.builds(s.ChecksumsReceived, st.integers(0, CHUNK_COUNT - 1), st.just((7,))),
)
prefixes = st.integers(0, 30)
"""How long the peer keeps to the protocol."""
scripts = st.lists(st.one_of(messages, st.integers(0, 63)), max_size=12)
"""What comes then: its messages, and completions of ours."""


class Alone:
    """A driver that keeps its contract, and knows nothing of what the peer does."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.open: list[int] = []
        self.answers: deque[s.Event] = deque()
        self.actions: list[s.Action] = []
        self.carry_out(machine.start() if isinstance(machine, s.TargetSession) else [])

    def feed(self, event: s.Event) -> None:
        self.carry_out(self.machine.handle(event))

    def carry_out(self, actions: list[s.Action]) -> None:
        for action in actions:
            assert not any(isinstance(earlier, s.End) for earlier in self.actions)
            self.actions.append(action)
            match action:
                case s.SendChunk(chunk):
                    self.open.append(chunk)
                    self.answers.append(s.ChunkPosted(chunk, 7))
                case s.PostReceive(chunk) | s.Discard(chunk):
                    assert chunk not in self.open
                    self.open.append(chunk)
                case s.Forget(chunk):
                    assert chunk in self.open
                case s.Reserve():
                    self.answers.append(s.Reserved())
                case s.CheckIndex():
                    self.answers.append(s.IndexChecked())
                case s.CheckContents():
                    self.answers.append(s.ContentsChecked())
                case s.Commit():
                    assert not self.open
                    assert self.machine.verified_chunk_count == CHUNK_COUNT
                    self.answers.append(s.Committed("receipt"))
                case s.Release():
                    assert not self.open
        assert len(self.open) <= 16

    def move(self, number: int) -> None:
        if self.answers and (number % 2 or not self.open):
            self.feed(self.answers.popleft())
        elif self.open:
            chunk = self.open.pop(number // 2 % len(self.open))
            error = PeerUnavailable("cut") if number == 62 else None
            sends = isinstance(self.machine, s.SourceSession)
            self.feed(s.SendDone(chunk, error) if sends else s.ReceiveDone(chunk, error, 7))

    def finish(self) -> s.End:
        over = SOURCE_OVER | {s.SourcePhase.CANCELLING} | TARGET_OVER
        while self.answers:
            self.feed(self.answers.popleft())
        if self.machine.phase not in over:
            self.feed(s.Failed(DeadlineExceeded("the budget ran out")))
        if not isinstance(self.actions[-1], s.End):
            self.feed(s.DrainExpired())
        while self.open:
            self.move(0)
        assert sum(isinstance(action, s.Release) for action in self.actions) == 1
        assert sum(isinstance(action, s.TellStop) for action in self.actions) <= 1
        end = self.actions[-1]
        assert isinstance(end, s.End)
        return end


def play(machine: Any, prefix: int, script: list[s.Event | int]) -> Alone:
    alone = Alone(machine)
    agreed: deque[s.Event] = deque([s.Accepted(2)])
    if isinstance(machine, s.TargetSession):
        agreed = deque(s.ChecksumsReceived(chunk, (7,)) for chunk in range(CHUNK_COUNT))
    for number in range(prefix):
        if agreed and machine.phase not in (s.TargetPhase.RESERVING, s.TargetPhase.COMMITTING) and number % 3 != 1:
            alone.feed(agreed.popleft())
        else:
            alone.move(number % 4)
    for move in script:
        if isinstance(move, int):
            alone.move(move)
        else:
            alone.feed(move)
    return alone


@settings(max_examples=400, deadline=None)
@given(prefixes, scripts, st.integers(1, CHUNK_COUNT), st.integers(1, 3))
def test_target_survives_any_source(
    prefix: int, script: list[s.Event | int], index_chunk_count: int, window: int
) -> None:
    alone = play(s.TargetSession(CHUNK_COUNT, index_chunk_count, window), prefix, script)
    end = alone.finish()
    assert (end.error is None) == (s.Commit() in alone.actions) == (s.Release(keep=True) in alone.actions)


@settings(max_examples=400, deadline=None)
@given(prefixes, scripts, st.integers(1, CHUNK_COUNT), st.booleans())
def test_source_survives_any_target(
    prefix: int, script: list[s.Event | int], index_chunk_count: int, checksummed: bool
) -> None:
    machine = s.SourceSession(CHUNK_COUNT, index_chunk_count, CHUNK_COUNT, checksummed=checksummed)
    end = play(machine, prefix, script).finish()
    assert (end.error is None) == (end.receipt == "receipt")
