"""One suite for every transport. Subclass it, set two attributes, inherit every test:

    class TestMine(TransportSuite):
        rendezvous_bytes = 65536

        def make_transport(self) -> Transport:
            return MyTransport(...)

Both sides live in the test's thread and are driven in turn. The tests hold the contract of `transport.base`: they pass
for whatever keeps it, over sockets, shared memory or inside one process.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from hurray_wire.errors import Cancelled, CapabilityMismatch, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.transport.base import Endpoint, Transport, chunk_tag

Bytes = npt.NDArray[np.uint8]

DEADLINE_S = 20.0
"""How long anything may take before a test fails: far above what a loaded machine needs."""

GUARD = 0xA5
GUARD_BYTES = 4096


class Outcome:
    """A completion to pass to `send` or `receive`: remembers what came, and fails when it comes twice or too early."""

    def __init__(self) -> None:
        self.calls: list[HurrayError | None] = []
        self.thread = threading.get_ident()
        self.allowed = False

    def __call__(self, error: HurrayError | None) -> None:
        assert threading.get_ident() == self.thread, "a completion fired in a foreign thread"
        assert self.allowed, "a completion fired inside the call that posted the operation"
        assert not self.calls, f"a completion fired twice: {self.calls[0]!r}, then {error!r}"
        assert error is None or isinstance(error, HurrayError)
        self.calls.append(error)

    @property
    def fired(self) -> bool:
        return bool(self.calls)

    @property
    def error(self) -> HurrayError | None:
        (error,) = self.calls
        return error


class Lost:
    """An `on_lost` that remembers, and fails when it fires twice."""

    def __init__(self) -> None:
        self.errors: list[HurrayError] = []

    def __call__(self, error: HurrayError) -> None:
        assert not self.errors, "on_lost fired twice"
        self.errors.append(error)


class Pair:
    """Two connected sides: `a` and `b`, each with its endpoint to the other."""

    def __init__(self, a: Transport, b: Transport) -> None:
        self.a, self.b = a, b
        self.lost_a, self.lost_b = Lost(), Lost()
        self.to_b: Endpoint = a.connect(0xB, b.parameters(), self.lost_a)
        self.to_a: Endpoint = b.connect(0xA, a.parameters(), self.lost_b)


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes that differ between seeds and between places, so that nothing can land wrong unseen."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def guarded(nbytes: int) -> tuple[Bytes, Bytes]:
    """A buffer of `nbytes` inside a larger block of guard bytes: (block, buffer)."""
    block = np.full(nbytes + 2 * GUARD_BYTES, GUARD, np.uint8)
    return block, block[GUARD_BYTES : GUARD_BYTES + nbytes]


def assert_guards(block: Bytes) -> None:
    assert (block[:GUARD_BYTES] == GUARD).all(), "bytes landed before the buffer"
    assert (block[-GUARD_BYTES:] == GUARD).all(), "bytes landed after the buffer"


def drive(transports: list[Transport], until: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Progress all until the condition holds; resting when nothing moves."""
    end = time.monotonic() + deadline_s
    while not until():
        assert time.monotonic() < end, f"nothing came of it within {deadline_s} s"
        moved = [transport.progress() for transport in transports]
        if not any(moved):
            transports[0].park(0.0005)


def all_fired(outcomes: Iterable[Outcome]) -> bool:
    return all(outcome.fired for outcome in outcomes)


def settle(*transports: Transport, quiet_rounds: int = 20) -> None:
    """Progress until nothing has moved for some rounds: for proving that something does not happen."""
    quiet = 0
    while quiet < quiet_rounds:
        moved = [transport.progress() for transport in transports]
        quiet = 0 if any(moved) else quiet + 1
        if quiet:
            transports[0].park(0.001)


def post_send(endpoint: Endpoint, tag: int, data: Bytes) -> Outcome:
    outcome = Outcome()
    endpoint.send(tag, data, outcome)
    outcome.allowed = True
    return outcome


def post_parts(endpoint: Endpoint, tag: int, parts: Sequence[memoryview]) -> Outcome:
    outcome = Outcome()
    endpoint.send_parts(tag, parts, outcome)
    outcome.allowed = True
    return outcome


def post_receive(endpoint: Endpoint, tag: int, buffer: Bytes) -> Outcome:
    outcome = Outcome()
    endpoint.receive(tag, buffer, outcome)
    outcome.allowed = True
    return outcome


class TransportSuite:
    """Inherit to test a transport."""

    rendezvous_bytes: ClassVar[int]
    """Size of a message whose send completes only when a receive took it; any size that surely is."""

    eager_bytes: ClassVar[int] = 1024
    """Size of a message whose send completes without a receive."""

    def make_transport(self) -> Transport:
        """A new transport; all that one test makes can reach each other."""
        raise NotImplementedError

    @pytest.fixture
    def make(self) -> Iterator[Callable[[], Transport]]:
        """Makes transports, and closes them after the test."""
        made: list[Transport] = []

        def make() -> Transport:
            made.append(self.make_transport())
            return made[-1]

        yield make
        for transport in made:
            transport.close()

    @pytest.fixture
    def pair(self, make: Callable[[], Transport]) -> Pair:
        return Pair(make(), make())

    def exchange(self, pair: Pair, nbytes: int = 100_000, tag: int = 0xFFFF_0000) -> None:
        """One message each way, to show that a connection works."""
        for index, (source, target) in enumerate([(pair.to_b, pair.to_a), (pair.to_a, pair.to_b)]):
            data, buffer = pattern(nbytes, index), np.zeros(nbytes, np.uint8)
            outcomes = [
                post_receive(target, tag + index, buffer),
                post_send(source, tag + index, data),
            ]
            drive([pair.a, pair.b], partial(all_fired, outcomes))
            assert [o.error for o in outcomes] == [None, None]
            assert (buffer == data).all()

    # --- bytes ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, 8191, 8192, 1 << 16, 1 << 20, (4 << 20) + 1, 16 << 20])
    @pytest.mark.parametrize("receive_first", [True, False])
    def test_every_byte_arrives_and_no_other_is_touched(self, pair: Pair, nbytes: int, receive_first: bool) -> None:
        data = pattern(nbytes)
        sent = data.copy()
        block, buffer = guarded(nbytes)
        if receive_first:
            received = post_receive(pair.to_a, 7, buffer)
            done = post_send(pair.to_b, 7, sent)
        else:
            done = post_send(pair.to_b, 7, sent)
            settle(pair.a, pair.b, quiet_rounds=3)
            received = post_receive(pair.to_a, 7, buffer)
        drive([pair.a, pair.b], lambda: done.fired and received.fired)
        assert (done.error, received.error) == (None, None)
        assert (buffer == data).all()
        assert (sent == data).all()
        assert_guards(block)

    @pytest.mark.parametrize(("sent_bytes", "posted_bytes"), [(200, 100), (100_000, 100), (5 << 20, 4 << 20)])
    def test_a_longer_message_is_cut_and_never_overruns(self, pair: Pair, sent_bytes: int, posted_bytes: int) -> None:
        block, buffer = guarded(posted_bytes)
        received = post_receive(pair.to_a, 7, buffer)
        done = post_send(pair.to_b, 7, pattern(sent_bytes))
        drive([pair.a, pair.b], lambda: done.fired and received.fired)
        settle(pair.a, pair.b)
        assert isinstance(received.error, ProtocolViolation)
        assert_guards(block)
        assert pair.to_b.alive
        self.exchange(pair)

    @pytest.mark.parametrize(
        ("sent_bytes", "posted_bytes"), [(1, 100), (84, 100), (1, 100_000), (99_000, 100_000), (4 << 20, 5 << 20)]
    )
    @pytest.mark.parametrize("receive_first", [True, False])
    def test_a_shorter_message_is_no_success(
        self, pair: Pair, sent_bytes: int, posted_bytes: int, receive_first: bool
    ) -> None:
        block, buffer = guarded(posted_bytes)
        buffer[:] = 1
        outcomes = [post_receive(pair.to_a, 7, buffer)] if receive_first else []
        outcomes.append(post_send(pair.to_b, 7, pattern(sent_bytes)))
        if not receive_first:
            settle(pair.a, pair.b, quiet_rounds=3)
            outcomes.insert(0, post_receive(pair.to_a, 7, buffer))
        drive([pair.a, pair.b], partial(all_fired, outcomes))
        assert isinstance(outcomes[0].error, ProtocolViolation)
        assert (buffer[sent_bytes:] == 1).all()
        assert_guards(block)
        self.exchange(pair)

    @pytest.mark.parametrize("seed", range(5))
    def test_tags_match_in_any_order(self, pair: Pair, seed: int) -> None:
        rng = random.Random(seed)
        tags = [chunk_tag(rng.getrandbits(40), rng.getrandbits(24)) for _ in range(60)]
        sizes = {tag: rng.choice([1, 500, 8192, 100_000, 300_000]) for tag in tags}
        buffers = {tag: np.zeros(sizes[tag], np.uint8) for tag in tags}
        steps = [(kind, tag) for kind in ("send", "receive") for tag in tags]
        rng.shuffle(steps)
        outcomes = []
        for kind, tag in steps:
            if kind == "send":
                outcomes.append(post_send(pair.to_b, tag, pattern(sizes[tag], tag)))
            else:
                outcomes.append(post_receive(pair.to_a, tag, buffers[tag]))
            if rng.random() < 0.2:
                pair.a.progress()
                pair.b.progress()
        drive([pair.a, pair.b], lambda: all_fired(outcomes))
        assert all(o.error is None for o in outcomes)
        for tag in tags:
            assert (buffers[tag] == pattern(sizes[tag], tag)).all()

    def test_both_directions_at_once_with_many_in_flight(self, pair: Pair) -> None:
        nbytes, count = 256 << 10, 32
        outcomes, landed = [], []
        for index in range(count):
            for source, target, tag in ((pair.to_b, pair.to_a, index), (pair.to_a, pair.to_b, 1000 + index)):
                buffer = np.zeros(nbytes, np.uint8)
                outcomes.append(post_receive(target, tag, buffer))
                outcomes.append(post_send(source, tag, pattern(nbytes, tag)))
                landed.append((buffer, tag))
        drive([pair.a, pair.b], lambda: all_fired(outcomes))
        assert all(o.error is None for o in outcomes)
        assert all((buffer == pattern(nbytes, tag)).all() for buffer, tag in landed)

    @pytest.mark.parametrize(
        "lengths", [[1], [9, 1, 90], [5000, 1, 70_000, 3], [1000] * 1500, [2 << 20, 4096, 3 << 20]]
    )
    @pytest.mark.parametrize("missing_bytes", [0, 1, -2500])
    def test_parts_arrive_as_one_message(self, pair: Pair, lengths: list[int], missing_bytes: int) -> None:
        if not pair.to_b.takes_parts:
            pytest.skip("this transport takes no parts")
        ends = np.cumsum(lengths)
        data = pattern(int(ends[-1]))
        expected = data.copy()
        whole = memoryview(data).toreadonly()  # type: ignore[arg-type]
        parts = [whole[end - size : end] for size, end in zip(lengths, ends.tolist(), strict=True)]
        block, buffer = guarded(max(1, data.size - missing_bytes))
        received, done = post_receive(pair.to_a, 7, buffer), post_parts(pair.to_b, 7, parts)
        drive([pair.a, pair.b], lambda: done.fired and received.fired)
        assert done.error is None
        assert (received.error is None) == (buffer.size == data.size)
        common = min(buffer.size, data.size)
        assert (buffer[:common] == expected[:common]).all()
        assert (data == expected).all()
        assert_guards(block)
        self.exchange(pair)

    # --- completions ---------------------------------------------------------------------------------------------

    def test_a_short_send_completes_without_a_receive(self, pair: Pair) -> None:
        done = post_send(pair.to_b, 7, pattern(self.eager_bytes))
        drive([pair.a, pair.b], lambda: done.fired)
        assert done.error is None

    def test_an_unmatched_send_completes_only_when_it_is_matched(self, pair: Pair) -> None:
        data, buffer = pattern(self.rendezvous_bytes), np.zeros(self.rendezvous_bytes, np.uint8)
        done = post_send(pair.to_b, 7, data)
        settle(pair.a, pair.b)
        assert not done.fired
        received = post_receive(pair.to_a, 7, buffer)
        drive([pair.a, pair.b], lambda: done.fired and received.fired)
        assert done.error is None
        assert (buffer == data).all()

    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_ending_a_connection_completes_everything_once(self, pair: Pair, how: str) -> None:
        self.exchange(pair)
        unmatched = [post_send(pair.to_b, 100 + i, pattern(self.rendezvous_bytes)) for i in range(3)]
        buffers = [np.full(self.rendezvous_bytes, GUARD, np.uint8) for _ in range(3)]
        waiting = [post_receive(pair.to_b, 200 + i, buffers[i]) for i in range(3)]
        for index in range(4):
            post_receive(pair.to_a, 300 + index, np.zeros(4 << 20, np.uint8))
        under_way = [post_send(pair.to_b, 300 + i, pattern(4 << 20)) for i in range(4)]
        if pair.to_b.takes_parts:
            post_receive(pair.to_a, 310, np.zeros(4 << 20, np.uint8))
            under_way.append(post_parts(pair.to_b, 310, [memoryview(bytes(1 << 20))] * 4))
        pair.a.progress()

        started = time.monotonic()
        getattr(pair.to_b, how)()
        assert time.monotonic() - started < 2
        assert not pair.to_b.alive
        drive([pair.a, pair.b], lambda: all_fired(unmatched + waiting + under_way))
        ended = Cancelled if how == "close" else PeerUnavailable
        assert all(isinstance(o.error, ended) for o in unmatched + waiting)
        assert all(o.error is None or isinstance(o.error, ended) for o in under_way)
        drive([pair.a, pair.b], lambda: bool(pair.lost_b.errors))
        assert isinstance(pair.lost_b.errors[0], PeerUnavailable)
        assert not pair.to_a.alive
        settle(pair.a, pair.b)
        assert not pair.lost_a.errors
        assert all((buffer == GUARD).all() for buffer in buffers)

    def test_the_other_side_completes_everything_once_too(self, pair: Pair) -> None:
        self.exchange(pair)
        pending = [
            post_send(pair.to_a, 100, pattern(self.rendezvous_bytes)),
            post_receive(pair.to_a, 200, np.zeros(self.rendezvous_bytes, np.uint8)),
        ]
        settle(pair.a, pair.b, quiet_rounds=5)
        pair.to_b.close()
        drive([pair.a, pair.b], lambda: all_fired(pending) and bool(pair.lost_b.errors))
        assert all(isinstance(o.error, PeerUnavailable) for o in pending)

    def test_closing_both_sides_loses_nothing(self, pair: Pair) -> None:
        self.exchange(pair)
        pair.to_b.close()
        pair.to_a.close()
        pair.to_a.close()
        pair.to_b.abort()
        settle(pair.a, pair.b)
        assert (pair.lost_a.errors, pair.lost_b.errors) == ([], [])
        assert (pair.to_a.alive, pair.to_b.alive) == (False, False)

    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_a_buffer_is_left_alone_after_its_completion(self, pair: Pair, how: str) -> None:
        self.exchange(pair)
        count, nbytes = 8, 2 << 20
        buffers = [np.zeros(nbytes, np.uint8) for _ in range(count)]
        received = [post_receive(pair.to_a, i, buffers[i]) for i in range(count)]
        sends = [post_send(pair.to_b, i, pattern(nbytes, i)) for i in range(count)]
        drive([pair.a, pair.b], lambda: any(o.fired for o in received))
        getattr(pair.to_a, how)()
        marked = []

        def mark_completed() -> bool:
            for index, outcome in enumerate(received):
                if outcome.fired and index not in marked:
                    marked.append(index)
                    buffers[index][:] = GUARD
            return len(marked) == count

        drive([pair.a, pair.b], mark_completed)
        drive([pair.a, pair.b], lambda: all_fired(sends))
        settle(pair.a, pair.b)
        assert all((buffer == GUARD).all() for buffer in buffers)

    def test_operations_on_a_dead_endpoint_complete_with_an_error(self, pair: Pair) -> None:
        self.exchange(pair)
        pair.to_b.close()
        settle(pair.a, pair.b, quiet_rounds=3)
        late = [
            post_send(pair.to_b, 1, pattern(10)),
            post_receive(pair.to_b, 2, np.zeros(10, np.uint8)),
        ]
        discarded = Outcome()
        pair.to_b.discard(3, discarded)
        discarded.allowed = True
        pair.to_b.forget(4)
        drive([pair.a, pair.b], lambda: all_fired([*late, discarded]))
        assert all(isinstance(o.error, PeerUnavailable) for o in [*late, discarded])

    def test_a_completion_may_post_and_close(self, pair: Pair) -> None:
        landed: list[int] = []
        count = 10
        buffers = [np.zeros(50_000, np.uint8) for _ in range(count)]

        def post_next(index: int) -> None:
            if index == count:
                pair.to_a.close()
                return

            def done(error: HurrayError | None) -> None:
                assert error is None
                landed.append(index)
                post_next(index + 1)

            pair.to_a.receive(index, buffers[index], done)

        post_next(0)
        for index in range(count):
            post_send(pair.to_b, index, pattern(50_000, index))
        drive([pair.a, pair.b], lambda: len(landed) == count and bool(pair.lost_a.errors))
        assert landed == list(range(count))
        assert all((buffers[i] == pattern(50_000, i)).all() for i in range(count))

    # --- forget, discard, drain ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("nbytes", [500, 200_000])
    def test_a_forgotten_receive_is_left_alone(self, pair: Pair, nbytes: int) -> None:
        self.exchange(pair)
        block, buffer = guarded(nbytes)
        buffer[:] = GUARD
        received = post_receive(pair.to_a, 7, buffer)
        other = np.zeros(nbytes, np.uint8)
        kept = post_receive(pair.to_a, 8, other)
        pair.to_a.forget(7)
        drive([pair.a, pair.b], lambda: received.fired)
        assert isinstance(received.error, Cancelled)
        buffer[:] = GUARD
        late = post_send(pair.to_b, 7, pattern(nbytes))
        done = post_send(pair.to_b, 8, pattern(nbytes, 8))
        drive([pair.a, pair.b], lambda: kept.fired and done.fired)
        settle(pair.a, pair.b)
        assert (block == GUARD).all()
        assert (other == pattern(nbytes, 8)).all()
        again = np.zeros(nbytes, np.uint8)
        received = post_receive(pair.to_a, 7, again)
        drive([pair.a, pair.b], lambda: received.fired and late.fired)
        assert (again == pattern(nbytes)).all()

    def test_forgetting_what_has_landed_changes_nothing(self, pair: Pair) -> None:
        buffer = np.zeros(100, np.uint8)
        received = post_receive(pair.to_a, 7, buffer)
        post_send(pair.to_b, 7, pattern(100))
        drive([pair.a, pair.b], lambda: received.fired)
        pair.to_a.forget(7)
        pair.to_a.forget(12345)
        settle(pair.a, pair.b)
        assert received.error is None
        self.exchange(pair)

    @pytest.mark.parametrize("nbytes", [1, 500, 200_000, 4 << 20])
    @pytest.mark.parametrize("arrived", [True, False])
    def test_discard_takes_a_message_and_drops_it(self, pair: Pair, nbytes: int, arrived: bool) -> None:
        sent, discarded = post_send(pair.to_b, 7, pattern(nbytes)), Outcome()
        if arrived:
            settle(pair.a, pair.b, quiet_rounds=3)
        pair.to_a.discard(7, discarded)
        discarded.allowed = True
        drive([pair.a, pair.b], lambda: sent.fired and discarded.fired)
        assert (sent.error, discarded.error) == (None, None)
        assert pair.b.drain_unknown(lambda tag: False) == 0
        self.exchange(pair)

    def test_drain_takes_unknown_messages_and_spares_known_ones(self, pair: Pair) -> None:
        rng = random.Random(1)
        known = [chunk_tag(5, index) for index in range(6)] + [0, (1 << 64) - 1]
        unknown = [chunk_tag(6, index) for index in range(10)] + [rng.getrandbits(64) | 2 for _ in range(10)] + [1]
        tags = known + unknown
        rng.shuffle(tags)
        sizes = {tag: rng.choice([1, 500, 100_000]) for tag in tags}
        sends = [post_send(pair.to_b, tag, pattern(sizes[tag], tag)) for tag in tags]
        taken = 0

        def drained() -> bool:
            nonlocal taken
            taken += pair.b.drain_unknown(known.__contains__)
            return taken >= len(unknown)

        drive([pair.a, pair.b], drained)
        settle(pair.a, pair.b)
        assert taken == len(unknown)
        assert pair.b.drain_unknown(known.__contains__) == 0
        buffers = {tag: np.zeros(sizes[tag], np.uint8) for tag in known}
        received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in known]
        drive([pair.a, pair.b], lambda: all_fired(received + sends))
        assert all(o.error is None for o in received + sends)
        assert all((buffers[tag] == pattern(sizes[tag], tag)).all() for tag in known)

    # --- loss and return -----------------------------------------------------------------------------------------

    def test_a_peer_that_goes_away_is_noticed_once(self, pair: Pair) -> None:
        self.exchange(pair)
        pending = [
            post_send(pair.to_b, 100, pattern(self.rendezvous_bytes)),
            post_receive(pair.to_b, 200, np.zeros(self.rendezvous_bytes, np.uint8)),
        ]
        settle(pair.a, pair.b, quiet_rounds=5)
        pair.b.close()
        drive([pair.a], lambda: all_fired(pending) and bool(pair.lost_a.errors))
        assert all(isinstance(o.error, PeerUnavailable) for o in pending)
        assert isinstance(pair.lost_a.errors[0], PeerUnavailable)
        assert not pair.to_b.alive
        settle(pair.a)

    def test_a_peer_that_came_back_is_reached_afresh(self, pair: Pair, make: Callable[[], Transport]) -> None:
        self.exchange(pair)
        pair.b.close()
        drive([pair.a], lambda: bool(pair.lost_a.errors))
        again = Pair(pair.a, make())
        self.exchange(again)
        assert not again.lost_a.errors

    def test_the_same_two_connect_again(self, pair: Pair) -> None:
        for tag in range(0, 50, 10):
            self.exchange(pair, tag=tag)
            pair.to_b.close()
            pair.to_a.close()
            settle(pair.a, pair.b, quiet_rounds=2)
            pair = Pair(pair.a, pair.b)
        self.exchange(pair, tag=100)

    def test_the_loss_of_one_peer_leaves_the_others_alone(self, pair: Pair, make: Callable[[], Transport]) -> None:
        other = Pair(pair.a, make())
        self.exchange(pair)
        self.exchange(other, tag=50)
        pair.b.close()
        drive([other.a, other.b], lambda: bool(pair.lost_a.errors))
        self.exchange(other, tag=60)
        assert not other.lost_a.errors

    def test_closing_the_transport_completes_everything(self, pair: Pair) -> None:
        self.exchange(pair)
        pending = [
            post_send(pair.to_b, 100, pattern(self.rendezvous_bytes)),
            post_receive(pair.to_b, 200, np.zeros(self.rendezvous_bytes, np.uint8)),
        ]
        pair.a.close()
        assert all(isinstance(o.error, PeerUnavailable) for o in pending)
        assert not pair.lost_a.errors
        pair.a.close()
        drive([pair.b], lambda: bool(pair.lost_b.errors))

    # --- waiting -------------------------------------------------------------------------------------------------

    def test_an_idle_park_lasts_as_long_as_asked(self, pair: Pair) -> None:
        self.exchange(pair)
        settle(pair.a, pair.b)
        elapsed_s = 0.0
        for _ in itertools.repeat(None, 50):
            started = time.monotonic()
            pair.a.park(0.05)
            elapsed_s = time.monotonic() - started
            assert elapsed_s < DEADLINE_S / 2
            if not pair.a.progress() and elapsed_s >= 0.04:
                break
        assert elapsed_s >= 0.04
        started = time.monotonic()
        pair.a.park(0)
        assert time.monotonic() - started < DEADLINE_S / 2

    def test_a_message_ends_a_park(self, make: Callable[[], Transport]) -> None:
        """The two sides in two threads, as they are in life: the receiver sleeps, and wakes without being told."""
        a = make()
        ready, connected, received = threading.Event(), threading.Event(), threading.Event()
        shared: dict[str, Transport] = {}
        faults: list[BaseException] = []
        buffer = np.zeros(self.rendezvous_bytes, np.uint8)

        def run_target() -> None:
            try:
                b = self.make_transport()
                shared["b"] = b
                ready.set()
                assert connected.wait(DEADLINE_S)
                to_a = b.connect(0xA, a.parameters(), Lost())
                outcome = post_receive(to_a, 7, buffer)
                connected_end = time.monotonic() + DEADLINE_S
                while not outcome.fired and time.monotonic() < connected_end:
                    if not b.progress():
                        b.park(DEADLINE_S)
                assert outcome.error is None
                received.set()
                b.close()
            except BaseException as error:
                faults.append(error)

        target = threading.Thread(target=run_target)
        target.start()
        assert ready.wait(DEADLINE_S)
        to_b = a.connect(0xB, shared["b"].parameters(), Lost())
        connected.set()
        done = post_send(to_b, 7, pattern(self.rendezvous_bytes))
        drive([a], lambda: received.is_set() or bool(faults))
        target.join(DEADLINE_S)
        assert not faults
        drive([a], lambda: done.fired)
        assert (buffer == pattern(self.rendezvous_bytes)).all()

    # --- settings ------------------------------------------------------------------------------------------------

    def test_a_peer_like_oneself_is_accepted(self, make: Callable[[], Transport]) -> None:
        a, b = make(), make()
        a.check_peer(b.parameters())
        assert b.parameters().kind == type(b).kind

    def test_a_different_setting_is_refused_naming_both_values(self, make: Callable[[], Transport]) -> None:
        a, b = make(), make()
        offered = b.parameters()
        for name, value in offered.settings.items():
            with pytest.raises(CapabilityMismatch) as caught:
                a.check_peer(replace(offered, settings={**offered.settings, name: "elsewise"}))
            assert caught.value.field is not None
            assert name in caught.value.field
            assert caught.value.details["offered"] == "elsewise"
            assert caught.value.details["required"] == value
            assert "elsewise" in caught.value.message
            assert value in caught.value.message
            missing = {other: kept for other, kept in offered.settings.items() if other != name}
            with pytest.raises(CapabilityMismatch, match=name):
                a.check_peer(replace(offered, settings=missing))
        with pytest.raises(CapabilityMismatch, match="newer"):
            a.check_peer(replace(offered, settings={**offered.settings, "newer": "1"}))
        with pytest.raises(CapabilityMismatch, match="pigeon"):
            a.check_peer(replace(offered, kind="pigeon"))
