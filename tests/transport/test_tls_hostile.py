"""What a peer that is let in can do with frames that no peer of this version sends: lose its connection, no more."""

import os
import pickle
import socket
import tracemalloc
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hurray_wire.errors import PeerUnavailable, ProtocolViolation
from hurray_wire.testing.transport_suite import (
    GUARD,
    Lost,
    Outcome,
    Pair,
    TransportSuite,
    all_fired,
    drive,
    pattern,
    post_receive,
    post_send,
    settle,
)
from hurray_wire.transport._socket_channel import PlainChannel
from hurray_wire.transport._socket_endpoint import STEP_BYTES, Flow
from hurray_wire.transport._socket_frames import CREDIT_BYTES, MAX_ANNOUNCED, MAX_MESSAGE_BYTES, Kind, eager_cost, pack
from hurray_wire.transport._socket_handshake import dial
from hurray_wire.transport.tls import SocketConfig, TcpTransport

LISTENS, DIALS = SocketConfig(listen_host="127.0.0.1"), SocketConfig()
EAGER_MAX = LISTENS.eager_max_bytes


class Hostile:
    """A listening transport, an honest peer of it, and a connection that is bound to a raw socket."""

    def __init__(self, config=LISTENS):
        self.own, self.honest = TcpTransport(config), TcpTransport(DIALS)
        self.pair = Pair(self.own, self.honest)
        token = os.urandom(32)
        self.lost = Lost()
        given = replace(self.own.parameters(), address=token + b"\0\0")
        self.endpoint = self.own.connect(666, given, self.lost)
        self.socket = socket.create_connection(self.own._listener.getsockname())
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in dial(PlainChannel(self.socket), "tcp", token, self.own._token):
            self.own.progress()
        drive([self.own], lambda: not self.endpoint.waiting)

    def say(self, *parts):
        """Send all, as far as the other side still takes it."""
        rest = memoryview(b"".join(parts))
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                self.own.progress()
            except OSError:
                break
        settle(self.own, quiet_rounds=2)

    def check_lost(self):
        drive([self.own], lambda: bool(self.lost.errors))
        assert not self.endpoint.alive
        self.check_rest()
        return self.lost.errors[0]

    def check_rest(self):
        TransportSuite().exchange(self.pair)

    def close(self):
        self.socket.close()
        self.own.close()
        self.honest.close()


@pytest.fixture
def hostile():
    with closing(Hostile()) as made:
        yield made


class Bomb:
    def __reduce__(self):
        return os._exit, (66,)


VIOLATIONS = {
    "random bytes": (os.urandom(4096), "kind"),
    "a pickle": (pickle.dumps(Bomb()) + bytes(64), "kind"),
    "HTTP": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n", "kind"),
    "kind 0": (bytes(24), "kind"),
    "kind 6": ((6).to_bytes(8, "little") + bytes(16), "kind"),
    "a gigabyte at once": (pack(Kind.EAGER, 1, 1 << 30), "length"),
    "all the bytes there are": (pack(Kind.EAGER, 1, (1 << 64) - 1), "length"),
    "nothing at once": (pack(Kind.EAGER, 1, 0), "length"),
    "one byte too many at once": (pack(Kind.EAGER, 1, EAGER_MAX + 1), "length"),
    "nothing announced": (pack(Kind.ANNOUNCE, 1, 0), "length"),
    "too much announced": (pack(Kind.ANNOUNCE, 1, MAX_MESSAGE_BYTES + 1), "length"),
    "data nobody cleared": (pack(Kind.DATA, 0, 100), "number"),
    "an answer to no announcement": (pack(Kind.CLEAR, 0, 100), "number"),
    "credit that was not used": (pack(Kind.CREDIT, 0, 1), "credit"),
    "much more than the credit": (
        (pack(Kind.EAGER, 1, EAGER_MAX) + bytes(EAGER_MAX)) * (CREDIT_BYTES // eager_cost(EAGER_MAX) + 1),
        "length",
    ),
    "too many announcements": (pack(Kind.ANNOUNCE, 1, 1 << 30) * (MAX_ANNOUNCED + 1), "announcement"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_ends_the_connection_and_takes_no_memory(hostile, name):
    said, field = VIOLATIONS[name]
    buffer = np.full(1000, GUARD, np.uint8)
    received = post_receive(hostile.endpoint, 0xDEAD, buffer)
    tracemalloc.start()
    try:
        hostile.say(said)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = hostile.check_lost()
    assert isinstance(error, ProtocolViolation)
    assert error.field == f"frame.{field}"
    assert {"offered", "required"} <= error.details.keys()
    assert received.error is error
    assert peak_bytes < 8 << 20
    assert (buffer == GUARD).all()
    assert not hostile.endpoint._arrived


@pytest.mark.parametrize(("cleared", "data"), [(100, 101), (100, 99), (50, 100)])
def test_data_of_another_length_than_was_cleared_ends_the_connection(hostile, cleared, data):
    buffer = np.full(cleared, GUARD, np.uint8)
    received = post_receive(hostile.endpoint, 1, buffer)
    hostile.say(pack(Kind.ANNOUNCE, 1, 100), pack(Kind.DATA, 0, data))
    assert isinstance(hostile.check_lost(), ProtocolViolation)
    assert isinstance(received.error, ProtocolViolation)
    assert (buffer == GUARD).all()


def test_a_longer_answer_than_the_announcement_ends_the_connection(hostile):
    sent = post_send(hostile.endpoint, 1, pattern(100_000))
    hostile.own.progress()
    hostile.say(pack(Kind.CLEAR, 0, 100_001))
    assert isinstance(hostile.check_lost(), ProtocolViolation)
    assert isinstance(sent.error, ProtocolViolation)


@pytest.mark.parametrize("again", [0, 100_000])
def test_an_announcement_is_answered_once(hostile, again):
    sent = post_send(hostile.endpoint, 1, pattern(100_000))
    hostile.own.progress()
    hostile.say(pack(Kind.CLEAR, 0, 100_000), pack(Kind.CLEAR, 0, again))
    assert isinstance(hostile.check_lost(), ProtocolViolation)
    assert sent.fired


def test_bytes_that_drip_are_put_together(hostile):
    data = pattern(300).tobytes()
    buffers = [np.zeros(300, np.uint8) for _ in range(2)]
    received = [post_receive(hostile.endpoint, tag, buffers[tag]) for tag in range(2)]
    frames = [pack(Kind.EAGER, 0, 300), data, pack(Kind.ANNOUNCE, 1, 300), pack(Kind.DATA, 0, 300), data]
    for byte in b"".join(frames):
        hostile.socket.send(bytes([byte]))
        hostile.own.progress()
    drive([hostile.own], lambda: all_fired(received))
    assert [o.error for o in received] == [None, None]
    assert all(buffer.tobytes() == data for buffer in buffers)


def test_a_message_that_breaks_off_never_counts_as_arrived(hostile):
    buffer = np.zeros(1 << 20, np.uint8)
    received = post_receive(hostile.endpoint, 1, buffer)
    hostile.say(pack(Kind.ANNOUNCE, 1, buffer.nbytes), pack(Kind.DATA, 0, buffer.nbytes), bytes(buffer.nbytes - 1))
    assert not received.fired
    hostile.socket.close()
    assert isinstance(hostile.check_lost(), PeerUnavailable)
    assert isinstance(received.error, PeerUnavailable)


def test_a_peer_that_never_stops_leaves_the_others_their_turn(hostile):
    buffer = np.zeros(16 << 20, np.uint8)
    post_receive(hostile.endpoint, 1, buffer)
    hostile.say(pack(Kind.ANNOUNCE, 1, buffer.nbytes), pack(Kind.DATA, 0, buffer.nbytes))

    class Endless:
        def receive_into(self, view):
            return len(view)

    channel, hostile.endpoint._channel = hostile.endpoint._channel, Endless()
    assert hostile.endpoint.read() == (True, Flow.MORE)
    assert len(hostile.endpoint._body) == buffer.nbytes - STEP_BYTES
    hostile.endpoint._channel = channel


def test_a_peer_cannot_land_in_what_another_was_meant_to_fill(hostile):
    buffer = np.zeros(100, np.uint8)
    received = post_receive(hostile.pair.to_b, 77, buffer)
    hostile.say(pack(Kind.EAGER, 77, 100), b"\xee" * 100, pack(Kind.ANNOUNCE, 77, 100))
    dropped = []

    def both_dropped():
        dropped.append(hostile.own.drain_unknown(lambda _: False))
        return sum(dropped) == 2

    drive([hostile.own, hostile.honest], both_dropped)
    assert not received.fired
    post_send(hostile.pair.to_a, 77, pattern(100))
    drive([hostile.own, hostile.honest], lambda: received.fired)
    assert (buffer == pattern(100)).all()


def test_a_peer_that_reads_no_answer_loses_its_connection():
    with closing(Hostile(replace(LISTENS, socket_buffer_bytes=16 << 10))) as hostile:
        hostile.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            hostile.say(pack(Kind.ANNOUNCE, 1, 1 << 20) * MAX_ANNOUNCED)
            hostile.own.drain_unknown(lambda _: False)
            assert len(hostile.endpoint._control) <= 3 * MAX_ANNOUNCED
        error = hostile.check_lost()
        assert isinstance(error, ProtocolViolation)
        assert error.field == "frame.answers"


FRAMES = st.builds(
    lambda kind, tag, length, body: pack(kind, tag, length) + bytes(min(body, length)),
    st.sampled_from(list(Kind)),
    st.integers(0, 3),
    st.sampled_from([0, 1, 99, 100, 101, 5000, EAGER_MAX, 1 << 20, 1 << 63]),
    st.sampled_from([0, 1, 100, 1 << 20]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40)), max_size=12))
def test_whatever_is_said_every_operation_ends_once_and_nothing_else_is_touched(said):
    with closing(Hostile()) as hostile:
        blocks = [np.full(3000, GUARD, np.uint8) for _ in range(3)]
        operations = [post_receive(hostile.endpoint, tag, blocks[tag][1000:1100]) for tag in range(3)]
        operations += [post_send(hostile.endpoint, tag, np.ones(100_000, np.uint8)) for tag in range(2)]
        hostile.say(*said)
        hostile.check_rest()
        hostile.endpoint.close()
        drive([hostile.own], lambda: all_fired(operations))
        for block in blocks:
            assert (block[:1000] == GUARD).all()
            assert (block[1100:] == GUARD).all()


class SocketMachine(RuleBasedStateMachine):
    """Anything in any order: every operation completes once, and a receive that succeeds holds its message."""

    @initialize()
    def connect(self):
        self.pair = Pair(TcpTransport(LISTENS), TcpTransport(DIALS))
        self.sends: list[Outcome] = []
        self.receives: dict[int, tuple[Outcome, np.ndarray]] = {}
        self.discards: list[Outcome] = []
        self.sent = Counter()

    @rule(tag=st.integers(0, 5), nbytes=st.sampled_from([1, 100, 20_000, 3_000_000]))
    def send(self, tag, nbytes):
        if not self.sent[tag]:
            self.sent[tag] = nbytes
            self.sends.append(post_send(self.pair.to_b, tag, pattern(nbytes, tag)))

    @rule(tag=st.integers(0, 5), nbytes=st.sampled_from([100, 20_000, 3_000_000]))
    def receive(self, tag, nbytes):
        if tag not in self.receives:
            nbytes = self.sent[tag] or nbytes
            buffer = np.zeros(nbytes, np.uint8)
            self.receives[tag] = (post_receive(self.pair.to_a, tag, buffer), buffer)

    @rule(tag=st.integers(6, 9), nbytes=st.sampled_from([100, 3_000_000]), first=st.booleans())
    def send_and_discard(self, tag, nbytes, first):
        if not self.sent[tag]:
            self.sent[tag] = nbytes
            outcome = Outcome()
            if first:
                self.pair.to_a.discard(tag, outcome)
            self.sends.append(post_send(self.pair.to_b, tag, pattern(nbytes, tag)))
            if not first:
                self.pair.to_a.discard(tag, outcome)
            outcome.allowed = True
            self.discards.append(outcome)

    @rule(tag=st.integers(0, 5))
    def forget(self, tag):
        self.pair.to_a.forget(tag)

    @rule(known=st.sets(st.integers(0, 9)))
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
            if outcome.fired and outcome.error is None:
                assert (buffer == pattern(self.sent[tag], tag)).all()

    def teardown(self):
        if hasattr(self, "pair"):
            settle(self.pair.a, self.pair.b, quiet_rounds=2)
            self.pair.a.close()
            self.pair.b.close()
            outcomes = [*self.sends, *self.discards, *(outcome for outcome, _ in self.receives.values())]
            assert all_fired(outcomes)


TestSocketMachine = SocketMachine.TestCase
TestSocketMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
