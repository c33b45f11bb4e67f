import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hurray_wire.errors import Cancelled, PeerUnavailable, ProtocolViolation
from hurray_wire.testing.transport_suite import (
    Lost,
    Outcome,
    Pair,
    TransportSuite,
    drive,
    pattern,
    post_receive,
    post_send,
    settle,
)
from hurray_wire.transport.base import Transport
from hurray_wire.transport.memory import DEFAULT_EAGER_MAX_BYTES, Faults, MemoryFabric, MemoryTransport


class TestMemoryTransport(TransportSuite):
    rendezvous_bytes = 64 << 10

    def make_transport(self) -> Transport:
        if not hasattr(self, "fabric"):
            self.fabric = MemoryFabric()
        return MemoryTransport(self.fabric)


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def pair(fabric: MemoryFabric, faults: Faults) -> Pair:
    """`a` sends, and `b` receives with faults."""
    return Pair(MemoryTransport(fabric), MemoryTransport(fabric, faults=faults))


SHORT, LONG = 100, 100_000


def test_the_eager_limit_is_exact(pair):
    short = post_send(pair.to_b, 1, pattern(DEFAULT_EAGER_MAX_BYTES))
    long = post_send(pair.to_b, 2, pattern(DEFAULT_EAGER_MAX_BYTES + 1))
    settle(pair.a, pair.b)
    assert (short.fired, long.fired) == (True, False)


@pytest.mark.parametrize("nbytes", [SHORT, LONG])
@pytest.mark.parametrize("receive_first", [True, False])
def test_corruption_strikes_exactly_the_byte_asked_for(pair, faults, nbytes, receive_first):
    faults.corrupt(tag=2, offset_bytes=5, mask=0x10)
    buffers = {tag: np.zeros(nbytes, np.uint8) for tag in (1, 2, 3)}
    received = []
    if receive_first:
        received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in buffers]
    sent = {tag: pattern(nbytes, tag) for tag in buffers}
    for tag, data in sent.items():
        post_send(pair.to_b, tag, data)
    settle(pair.a, pair.b)
    if not receive_first:
        received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in buffers]
    drive([pair.a, pair.b], lambda: all(o.fired for o in received))
    expected = pattern(nbytes, 2)
    expected[5] ^= 0x10
    assert (buffers[2] == expected).all()
    assert all((buffers[tag] == sent[tag]).all() for tag in (1, 3))
    assert all((sent[tag] == pattern(nbytes, tag)).all() for tag in sent)


def test_faults_skip_count_and_run_out(pair, faults):
    faults.drop(skip=1, count=2)
    received = [post_receive(pair.to_a, tag, np.zeros(SHORT, np.uint8)) for tag in range(5)]
    for tag in range(5):
        post_send(pair.to_b, tag, pattern(SHORT))
    settle(pair.a, pair.b)
    assert [o.fired for o in received] == [True, False, False, True, True]
    pair.to_a.close()
    settle(pair.a, pair.b)
    assert [isinstance(o.error, Cancelled) for o in received] == [False, True, True, False, False]


def test_a_dropped_long_message_keeps_its_send_pending_until_the_end(pair, faults):
    faults.drop()
    done = post_send(pair.to_b, 1, pattern(LONG))
    received = post_receive(pair.to_a, 1, np.zeros(LONG, np.uint8))
    settle(pair.a, pair.b)
    assert (done.fired, received.fired) == (False, False)
    pair.to_b.abort()
    settle(pair.a, pair.b)
    assert isinstance(done.error, PeerUnavailable)
    assert isinstance(received.error, PeerUnavailable)


@pytest.mark.parametrize("nbytes", [SHORT, LONG])
def test_held_messages_arrive_when_released(pair, faults, nbytes):
    faults.hold(count=None)
    buffers = [np.zeros(nbytes, np.uint8) for _ in range(3)]
    received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in range(3)]
    for tag in range(3):
        post_send(pair.to_b, tag, pattern(nbytes, tag))
    settle(pair.a, pair.b)
    assert not any(o.fired for o in received)
    faults.release()
    pair.b.park(None)
    drive([pair.a, pair.b], lambda: all(o.fired for o in received))
    assert all((buffers[tag] == pattern(nbytes, tag)).all() for tag in range(3))


def test_a_held_long_message_that_was_aborted_never_lands(pair, faults):
    faults.hold()
    data, buffer = pattern(LONG), np.zeros(LONG, np.uint8)
    done = post_send(pair.to_b, 1, data)
    settle(pair.a, pair.b)
    pair.to_b.abort()
    drive([pair.a], lambda: done.fired)
    again = Pair(pair.a, pair.b)
    received = post_receive(again.to_a, 1, buffer)
    faults.release()
    settle(pair.a, pair.b)
    assert not received.fired
    assert not buffer.any()


def test_a_cut_takes_both_sides_before_the_message_lands(pair, faults):
    faults.cut(skip=1)
    buffers = [np.zeros(LONG, np.uint8) for _ in range(3)]
    received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in range(3)]
    sent = [post_send(pair.to_b, tag, pattern(LONG)) for tag in range(2)]
    settle(pair.a, pair.b)
    assert [o.error is None for o in received] == [True, False, False]
    assert [o.error is None for o in sent] == [True, False]
    assert not buffers[1].any()
    assert len(pair.lost_a.errors) == len(pair.lost_b.errors) == 1


def test_the_fabric_cuts_between_two_and_leaves_others(fabric, pair):
    other = Pair(pair.a, MemoryTransport(fabric))
    fabric.cut(pair.a, pair.b)
    unnoticed = post_send(pair.to_b, 1, pattern(SHORT))
    assert pair.to_b.alive
    settle(pair.a, pair.b, other.b)
    assert isinstance(unnoticed.error, PeerUnavailable)
    assert len(pair.lost_a.errors) == len(pair.lost_b.errors) == 1
    assert other.to_b.alive
    assert other.to_a.alive


def test_a_crash_is_seen_by_the_peers_and_completes_nothing_of_its_own(fabric, pair):
    own = post_send(pair.to_b, 1, pattern(LONG))
    pending = post_receive(pair.to_a, 2, np.zeros(LONG, np.uint8))
    settle(pair.a, pair.b)
    fabric.crash(pair.a)
    drive([pair.b], lambda: pending.fired and bool(pair.lost_b.errors))
    pair.a.progress()
    assert not own.fired
    buffer = np.zeros(LONG, np.uint8)
    again = Pair(MemoryTransport(fabric), pair.b)
    received = post_receive(again.to_a, 1, buffer)
    settle(again.a, pair.b)
    assert not received.fired


@pytest.mark.parametrize("how", ["refused", "unknown address"])
def test_a_connect_that_fails_shows_in_progress(fabric, faults, how):
    a, b = MemoryTransport(fabric), MemoryTransport(fabric, faults=faults)
    parameters = a.parameters()
    if how == "refused":
        faults.refuse_connects()
    else:
        a.close()
    lost = Lost()
    endpoint = b.connect(1, parameters, lost)
    sent = post_send(endpoint, 1, pattern(SHORT))
    assert endpoint.alive
    assert not lost.errors
    b.progress()
    assert not endpoint.alive
    assert isinstance(sent.error, PeerUnavailable)
    assert len(lost.errors) == 1
    if how == "refused":
        assert not a.progress()
        b.connect(1, parameters, lost)
        b.progress()
        assert len(lost.errors) == 1


def test_delayed_completions_come_after_so_many_steps(pair, faults):
    faults.delay_completions(3)
    received = post_receive(pair.to_a, 1, np.zeros(SHORT, np.uint8))
    post_send(pair.to_b, 1, pattern(SHORT))
    fired = []
    for _ in range(5):
        pair.b.progress()
        fired.append(received.fired)
        if received.fired:
            break
        pair.b.park(None)
    assert fired == [False, False, False, True]


def test_close_waits_for_no_delay(pair, faults):
    faults.delay_completions(1000)
    received = post_receive(pair.to_a, 1, np.zeros(SHORT, np.uint8))
    pair.b.close()
    assert isinstance(received.error, PeerUnavailable)


def test_two_threads_move_everything_once(fabric):
    count, nbytes = 200, 40_000
    ready = threading.Barrier(2, timeout=20)
    transports = [MemoryTransport(fabric), MemoryTransport(fabric)]
    faults: list[BaseException] = []

    def run(me: int) -> None:
        try:
            own = transports[me]
            endpoint = own.connect(1 - me, transports[1 - me].parameters(), Lost())
            ready.wait()
            buffers = [np.zeros(nbytes, np.uint8) for _ in range(count)]
            outcomes = []
            for tag in range(count):
                outcomes.append(post_receive(endpoint, tag, buffers[tag]))
                outcomes.append(post_send(endpoint, tag, pattern(nbytes, tag)))
                own.progress()
            drive([own], lambda: all(o.fired and o.error is None for o in outcomes))
            assert all((buffers[tag] == pattern(nbytes, tag)).all() for tag in range(count))
            ready.wait()
            own.close()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not faults


class MemoryMachine(RuleBasedStateMachine):
    """Anything in any order: every operation completes once, and a receive that succeeds holds its message."""

    @initialize()
    def connect(self):
        self.pair = _new_pair()
        self.sends: list[Outcome] = []
        self.receives: dict[int, tuple[Outcome, np.ndarray]] = {}
        self.sent = Counter()

    @rule(tag=st.integers(0, 5), nbytes=st.sampled_from([1, 100, 20_000]))
    def send(self, tag, nbytes):
        if not self.sent[tag]:
            self.sent[tag] = nbytes
            self.sends.append(post_send(self.pair.to_b, tag, pattern(nbytes, tag)))

    @rule(tag=st.integers(0, 5))
    def receive(self, tag):
        if tag not in self.receives:
            buffer = np.zeros(20_000, np.uint8)
            self.receives[tag] = (post_receive(self.pair.to_a, tag, buffer), buffer)

    @rule(tag=st.integers(0, 5))
    def forget(self, tag):
        self.pair.to_a.forget(tag)

    @rule(known=st.sets(st.integers(0, 5)))
    def drain(self, known):
        self.pair.b.drain_unknown(known.__contains__)

    @rule(side=st.sampled_from(["a", "b"]))
    def progress(self, side):
        getattr(self.pair, side).progress()

    @rule(side=st.sampled_from(["to_a", "to_b"]), how=st.sampled_from(["close", "abort"]))
    def end(self, side, how):
        getattr(getattr(self.pair, side), how)()

    @invariant()
    def what_landed_is_what_was_sent(self):
        for tag, (outcome, buffer) in getattr(self, "receives", {}).items():
            if not outcome.fired:
                continue
            if outcome.error is None or isinstance(outcome.error, ProtocolViolation):
                assert (buffer[: self.sent[tag]] == pattern(self.sent[tag], tag)).all()
                assert (outcome.error is None) == (self.sent[tag] == buffer.size)
            else:
                assert not buffer.any()

    def teardown(self):
        if hasattr(self, "pair"):
            self.pair.a.close()
            self.pair.b.close()
            assert all(o.fired for o in self.sends)
            assert all(outcome.fired for outcome, _ in self.receives.values())


def _new_pair() -> Pair:
    fabric = MemoryFabric()
    return Pair(MemoryTransport(fabric), MemoryTransport(fabric))


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
