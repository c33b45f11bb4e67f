"""The socket transports: the inherited suite in both modes, peers that die or stop, resources, settings."""

import hashlib
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import time
import tracemalloc
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hurray_wire.errors import CapabilityMismatch, DataPlaneUnavailable, Misuse, PeerUnavailable, ProtocolViolation
from hurray_wire.testing.transport_suite import (
    Lost,
    Pair,
    TransportSuite,
    all_fired,
    drive,
    pattern,
    post_parts,
    post_receive,
    post_send,
    settle,
)
from hurray_wire.transport._socket_frames import CREDIT_BYTES, MAX_ANNOUNCED
from hurray_wire.transport._sockets import open_descriptors
from hurray_wire.transport.base import TransportParameters
from hurray_wire.transport.tls import SocketConfig, TcpTransport, TlsTransport
from transport.certificates import Authority

LONG = 1 << 20
LISTENS = SocketConfig(listen_host="127.0.0.1")
DIALS = SocketConfig()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates")).issue("node")


class Sockets(TransportSuite):
    """The first transport of a test listens, and the others dial it."""

    rendezvous_bytes = LONG

    @pytest.fixture(autouse=True)
    def _none_listens_yet(self, credentials):
        self.config, self.credentials = LISTENS, credentials

    def make_transport(self):
        config, self.config = self.config, DIALS
        return self.make_with(config)


class TestTcpTransport(Sockets):
    def make_with(self, config):
        return TcpTransport(config)


class TestTlsTransport(Sockets):
    def make_with(self, config):
        return TlsTransport(config, self.credentials)


@pytest.fixture(params=["tcp", "tls"])
def make(request, credentials):
    """Makes transports of one mode, and closes them."""
    made = []

    def make(config=LISTENS):
        made.append(TcpTransport(config) if request.param == "tcp" else TlsTransport(config, credentials))
        return made[-1]

    make.arguments = [] if request.param == "tcp" else [credentials.certificate, credentials.key, credentials.ca]
    yield make
    for transport in made:
        transport.close()


def exchange(pair, nbytes=100_000, tag=0xFFFF_0000):
    TransportSuite().exchange(pair, nbytes, tag)


# --- two processes -----------------------------------------------------------------------------------------------


class Peer:
    """A dialing transport in a process of its own, and an endpoint to it."""

    def __init__(self, transport, arguments) -> None:
        self.transport = transport
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("socket_peer_process.py")), "{}", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        said = self.hear()
        parameters = TransportParameters(said["kind"], bytes.fromhex(said["address"]), said["settings"])
        self.lost = Lost()
        self.endpoint = transport.connect(2, parameters, self.lost)
        own = transport.parameters()
        self.tell(connect={"kind": own.kind, "address": own.address.hex(), "settings": dict(own.settings)})

    def tell(self, **order) -> None:
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        """The next line, while this side's transport goes on."""
        end = time.monotonic() + 30
        while not select.select([self.process.stdout], [], [], 0)[0]:
            assert time.monotonic() < end
            if not self.transport.progress():
                self.transport.park(0.01)
        return json.loads(self.process.stdout.readline())

    def exchange(self, tag) -> None:
        buffer = np.zeros(LONG, np.uint8)
        received = post_receive(self.endpoint, tag, buffer)
        self.tell(send=tag, nbytes=LONG)
        assert self.hear() == {"tag": tag, "error": None, "digest": hashlib.sha256(pattern(LONG, tag)).hexdigest()}
        drive([self.transport], lambda: received.fired)
        assert received.error is None
        assert (buffer == pattern(LONG, tag)).all()
        sent = post_send(self.endpoint, tag + 1, pattern(LONG, tag + 1))
        self.tell(receive=tag + 1, nbytes=LONG)
        digest = hashlib.sha256(pattern(LONG, tag + 1)).hexdigest()
        assert self.hear() == {"tag": tag + 1, "error": None, "digest": digest}
        drive([self.transport], lambda: sent.fired)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def spawn(make):
    """Starts peers, and leaves none behind."""
    peers = []

    def spawn(transport) -> Peer:
        peers.append(Peer(transport, make.arguments))
        return peers[-1]

    yield spawn
    for peer in peers:
        if peer.process.poll() is None:
            peer.end()


def test_a_killed_peer_ends_everything_at_once_and_the_survivor_lives(make, spawn):
    transport = make()
    descriptors = []
    for start in (0, 1000):
        peer = spawn(transport)
        peer.exchange(start)
        big = np.zeros(64 << 20, np.uint8)
        pending = [
            post_send(peer.endpoint, start + 10, pattern(LONG)),
            post_receive(peer.endpoint, start + 11, np.zeros(LONG, np.uint8)),
            post_receive(peer.endpoint, start + 12, big),
        ]
        peer.tell(send=start + 12, nbytes=big.nbytes)
        drive([transport], lambda big=big: bool(big[:4096].any()))
        killed_at = time.monotonic()
        peer.end()
        drive([transport], lambda peer=peer, pending=pending: all_fired(pending) and bool(peer.lost.errors))
        assert time.monotonic() - killed_at < 5
        assert all(isinstance(o.error, PeerUnavailable) for o in pending[:2])
        assert not peer.endpoint.alive
        settle(transport)
        descriptors.append(len(open_descriptors()))
    assert descriptors[0] == descriptors[1]


def test_a_stopped_peer_blocks_nobody_and_its_bytes_land_nowhere_after_the_close(make, spawn):
    transport = make()
    peer = spawn(transport)
    peer.exchange(0)
    big = np.zeros(64 << 20, np.uint8)
    pending = [post_send(peer.endpoint, 10, pattern(LONG)), post_receive(peer.endpoint, 12, big)]
    peer.tell(send=12, nbytes=big.nbytes)
    drive([transport], lambda: bool(big[:4096].any()))
    peer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    peer.endpoint.close()
    drive([transport], lambda: all_fired(pending))
    assert time.monotonic() - started < 2
    big[:] = 0xA5
    peer.process.send_signal(signal.SIGCONT)
    said = peer.hear()
    assert said.get("error") == "PEER_UNAVAILABLE", said
    settle(transport)
    assert (big == 0xA5).all()


def test_a_stopped_peer_that_takes_nothing_is_lost_in_time(make, spawn):
    """To TCP a stopped process is a receiver that stays full; a silent partition is data that stays unacknowledged."""
    transport = make(replace(LISTENS, user_timeout_s=0.5))
    peer = spawn(transport)
    peer.exchange(0)
    big = np.ones(256 << 20, np.uint8)
    sent = post_send(peer.endpoint, 10, big)
    peer.tell(receive=10, nbytes=big.nbytes)
    drive([transport], lambda: bool(peer.endpoint._wire))
    peer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    drive([transport], lambda: sent.fired and bool(peer.lost.errors))
    assert time.monotonic() - started < 10
    assert isinstance(sent.error, PeerUnavailable)


# --- resources ---------------------------------------------------------------------------------------------------


def test_fifty_connections_leave_nothing_behind(make):
    before = len(open_descriptors())
    a, b = make(LISTENS), make(DIALS)
    counts = []
    for round_number in range(50):
        pair = Pair(a, b)
        tag = round_number * 10
        exchange(pair, 20_000, tag)
        pending = [
            post_send(pair.to_b, tag + 2, pattern(LONG)),
            post_send(pair.to_a, tag + 3, pattern(100)),
            post_receive(pair.to_b, tag + 4, np.zeros(LONG, np.uint8)),
        ]
        (pair.to_b if round_number % 2 else pair.to_a).close()
        drive(
            [a, b], lambda pair=pair, pending=pending: all_fired(pending) and not (pair.to_a.alive or pair.to_b.alive)
        )
        counts.append(len(open_descriptors()))
    assert set(counts) == {counts[0]}
    a.close()
    b.close()
    assert len(open_descriptors()) == before
    a._closed = b._closed = True


def test_a_completed_operation_holds_on_to_no_memory(make):
    pair = Pair(make(LISTENS), make(DIALS))
    for nbytes in (1000, LONG):
        maps = [mmap.mmap(-1, nbytes) for _ in range(4)]
        outcomes = [
            post_send(pair.to_b, nbytes, np.frombuffer(maps[0], np.uint8)),
            post_receive(pair.to_a, nbytes, np.frombuffer(maps[1], np.uint8)),
            post_receive(pair.to_a, nbytes + 1, np.frombuffer(maps[2], np.uint8)),
            post_parts(pair.to_b, nbytes + 1, [memoryview(maps[3])[:700], memoryview(maps[3])[700:]]),
        ]
        drive([pair.a, pair.b], lambda outcomes=outcomes: all_fired(outcomes))
        for memory in maps:
            memory.close()  # BufferError while anyone refers to it


def test_an_idle_connection_costs_next_to_no_processor_time(make, spawn):
    transport = make()
    peer = spawn(transport)
    peer.exchange(0)
    post_receive(peer.endpoint, 50, np.zeros(LONG, np.uint8))
    settle(transport)
    started, used = time.monotonic(), time.process_time()
    parks = 0
    while time.monotonic() - started < 1:
        parks += 1
        if not transport.progress():
            transport.park(0.5)
    assert time.process_time() - used < 0.02
    assert parks < 20


def test_what_nobody_receives_takes_bounded_memory_and_stops_nothing(make):
    """Short messages turn into announced ones when the credit is used up; there are only so many of those, too."""
    pair = Pair(make(LISTENS), make(DIALS))
    exchange(pair)
    data = pattern(1000)
    tracemalloc.start()
    try:
        sends = [post_send(pair.to_b, tag, data) for tag in range(3000)]
        settle(pair.a, pair.b, quiet_rounds=3)
        endpoint = pair.to_a
        kept = sum(len(message.payload or b"") for queue in endpoint._arrived.values() for message in queue)
        assert CREDIT_BYTES // 2 < kept < CREDIT_BYTES
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 << 20
    assert 0 < sum(o.fired for o in sends) < 3000
    exchange(pair)
    buffers = [np.zeros(1000, np.uint8) for _ in range(3000)]
    received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in reversed(range(3000))]
    drive([pair.a, pair.b], lambda: all_fired(sends + received))
    assert all(o.error is None for o in sends + received)
    assert all((buffer == data).all() for buffer in buffers)
    again = [post_send(pair.to_b, tag, data) for tag in range(500)]
    drive([pair.a, pair.b], lambda: all_fired(again))


def test_no_more_than_so_many_announcements_are_open(make):
    pair = Pair(make(LISTENS), make(DIALS))
    data = np.ones(20_000, np.uint8)
    sends = [post_send(pair.to_b, tag, data) for tag in range(MAX_ANNOUNCED + 100)]
    settle(pair.a, pair.b, quiet_rounds=3)
    assert sum(map(len, pair.to_a._arrived.values())) == MAX_ANNOUNCED
    assert pair.a.arm()
    assert pair.b.arm()
    dropped = 0

    def all_dropped():
        nonlocal dropped
        dropped += pair.b.drain_unknown(lambda _: False)
        return dropped == len(sends)

    drive([pair.a, pair.b], all_dropped)
    drive([pair.a, pair.b], lambda: all_fired(sends))
    exchange(pair)


def test_out_of_descriptors_dialers_are_refused_and_the_rest_goes_on(make):
    pair = Pair(make(LISTENS), make(DIALS))
    exchange(pair)
    other = make(DIALS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lost = Lost()
    pair.a.connect(9, other.parameters(), Lost())
    other.connect(9, pair.a.parameters(), lost)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 1, hard))
    holes = []
    try:
        with suppress(OSError):
            while True:
                holes.append(os.open(os.devnull, os.O_RDONLY))
        drive([pair.a, other], lambda: bool(lost.errors))
        assert pair.a.refused_dialer_count == 1
        exchange(pair)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)


# --- connecting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["listener", "dialer"])
def test_either_side_may_connect_first(make, first):
    a, b = make(LISTENS), make(DIALS)
    lost_a, lost_b = Lost(), Lost()
    if first == "listener":
        to_b = a.connect(2, b.parameters(), lost_a)
        settle(a, b, quiet_rounds=3)
        to_a = b.connect(1, a.parameters(), lost_b)
    else:
        to_a = b.connect(1, a.parameters(), lost_b)
        settle(a, b, quiet_rounds=3)
        assert a.arm(), "a dialer that waits to be expected keeps nobody awake"
        to_b = a.connect(2, b.parameters(), lost_a)
    buffer = np.zeros(LONG, np.uint8)
    outcomes = [post_receive(to_b, 1, buffer), post_send(to_a, 1, pattern(LONG))]
    drive([a, b], lambda: all_fired(outcomes))
    assert (buffer == pattern(LONG)).all()


@pytest.mark.parametrize("side", ["listener", "dialer"])
def test_a_peer_that_never_comes_is_lost_in_time(make, side):
    config = SocketConfig(connect_timeout_s=0.2)
    other = make(LISTENS if side == "dialer" else DIALS)
    own = make(config if side == "dialer" else replace(LISTENS, connect_timeout_s=0.2))
    lost = Lost()
    endpoint = own.connect(1, other.parameters(), lost)
    sent = post_send(endpoint, 1, pattern(100))
    started = time.monotonic()
    while not lost.errors:
        if not own.progress():
            own.park(None)
    assert 0.1 < time.monotonic() - started < 5
    assert isinstance(sent.error, PeerUnavailable)
    assert isinstance(lost.errors[0], PeerUnavailable)


def test_a_port_that_nobody_listens_at_is_a_lost_peer(make):
    other, own = make(LISTENS), make(DIALS)
    parameters = other.parameters()
    other.close()
    lost = Lost()
    own.connect(1, parameters, lost)
    drive([own], lambda: bool(lost.errors))
    assert isinstance(lost.errors[0], PeerUnavailable)


def test_closing_while_connecting_leaves_nothing(make):
    before = open_descriptors()
    other, own = make(LISTENS), make(DIALS)
    lost = Lost()
    endpoint = own.connect(1, other.parameters(), lost)
    endpoint.abort()
    own.connect(1, other.parameters(), lost)
    own.progress()
    own.close()
    other.progress()
    other.close()
    assert not lost.errors
    assert open_descriptors() == before


def test_what_was_sent_before_an_orderly_close_arrives(make):
    pair = Pair(make(LISTENS), make(DIALS))
    exchange(pair)
    buffer = np.zeros(1000, np.uint8)
    received = post_receive(pair.to_a, 1, buffer)
    sent = post_send(pair.to_b, 1, pattern(1000))
    while not sent.fired:
        pair.a.progress()
    pair.to_b.close()
    drive([pair.b], lambda: received.fired and bool(pair.lost_b.errors))
    assert received.error is None
    assert (buffer == pattern(1000)).all()


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("listen_port", {"listen_host": "127.0.0.1", "listen_port": 65536}),
        ("listen_port", {"listen_port": 7412}),
        ("advertised_host", {"advertised_host": "127.0.0.1"}),
        ("connect_timeout_s", {"connect_timeout_s": 0.0}),
        ("connect_timeout_s", {"connect_timeout_s": float("nan")}),
        ("user_timeout_s", {"user_timeout_s": 1e9}),
        ("eager_max_bytes", {"eager_max_bytes": CREDIT_BYTES}),
        ("socket_buffer_bytes", {"socket_buffer_bytes": 1}),
    ],
)
def test_a_value_that_cannot_work_is_refused(field, given):
    with pytest.raises(Misuse) as caught:
        SocketConfig(**given)
    assert caught.value.field == f"socket.{field}"
    assert caught.value.details["required"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "256.0.0.1", "no.such.host.invalid"])
def test_an_address_that_peers_cannot_dial_is_refused(host):
    with pytest.raises(Misuse, match=r"address|advertised"):
        TcpTransport(SocketConfig(listen_host=host))


def test_what_is_advertised_may_differ_from_what_is_listened_at():
    config = SocketConfig(listen_host="0.0.0.0", advertised_host="127.0.0.1")
    with closing(TcpTransport(config)) as a, closing(TcpTransport(DIALS)) as b:
        assert a.parameters().address.endswith(b"127.0.0.1")
        exchange(Pair(a, b))


def test_ipv6_works():
    with closing(TcpTransport(SocketConfig(listen_host="::1"))) as a, closing(TcpTransport(DIALS)) as b:
        exchange(Pair(a, b))


def test_a_port_that_is_taken_is_the_data_plane_unavailable():
    with closing(TcpTransport(LISTENS)) as taken:
        port = taken._listener.getsockname()[1]
        with pytest.raises(DataPlaneUnavailable, match=str(port)):
            TcpTransport(SocketConfig(listen_host="127.0.0.1", listen_port=port))


@pytest.mark.parametrize("config", [LISTENS, DIALS])
def test_exactly_one_of_two_listens(make, config):
    a, b = make(config), make(config)
    with pytest.raises(CapabilityMismatch, match="exactly one listens"):
        a.check_peer(b.parameters())


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"x" * 33,
        b"x" * 32 + b"\0\0" + b"127.0.0.1",
        b"x" * 32 + b"\1\0",
        b"x" * 32 + b"\1\0" + b"example.com",
        b"x" * 32 + b"\1\0" + b"127.0.0.1\0",
        b"x" * 32 + b"\1\0" + b"\xff\xfe",
        b"x" * 32 + b"\1\0" + b"1" * 5000,
    ],
)
def test_a_malformed_address_is_refused(make, address):
    transport = make(DIALS)
    parameters = replace(transport.parameters(), address=address)
    with pytest.raises(ProtocolViolation):
        transport.check_peer(parameters)
    with pytest.raises(ProtocolViolation):
        transport.connect(1, parameters, Lost())


def test_memory_that_is_not_the_hosts_is_refused_in_the_completion(make):
    pair = Pair(make(LISTENS), make(DIALS))

    class Elsewhere:
        nbytes = 10

    sent = post_send(pair.to_b, 1, Elsewhere())
    drive([pair.a, pair.b], lambda: sent.fired)
    assert isinstance(sent.error, Misuse)
    exchange(pair)
