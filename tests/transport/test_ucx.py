import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from contextlib import closing
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
    post_receive,
    post_send,
    settle,
)
from hurray_wire.transport import _sockets, ucx
from hurray_wire.transport._sockets import open_descriptors
from hurray_wire.transport.base import TransportParameters
from hurray_wire.transport.ucx import UcxTransport, loaded_ucx
from hurray_wire.transport.ucx_config import UcxConfig

pytest.importorskip("ucxx")
pytestmark = pytest.mark.ucx

PORTS = {"first_port": 21000, "last_port": 21999}
PORT_RANGE = set(range(PORTS["first_port"], PORTS["last_port"] + 1))
CONFIG = UcxConfig(**PORTS)
LONG = 1 << 20
ROOT = Path(__file__).parents[2]


class TestUcxTransport(TransportSuite):
    rendezvous_bytes = LONG

    def make_transport(self):
        return UcxTransport(CONFIG)


@pytest.fixture
def transport():
    transport = UcxTransport(CONFIG)
    yield transport
    transport.close()


class Peer:
    """A transport in a process of its own (peer_process.py), and an endpoint to it."""

    def __init__(self, transport: UcxTransport) -> None:
        self.transport = transport
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer_process.py")), json.dumps(PORTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        said = self.hear()
        self.parameters = TransportParameters(said["kind"], bytes.fromhex(said["address"]), said["settings"])
        self.lost = Lost()

    def connect(self) -> "Peer":
        self.endpoint = self.transport.connect(2, self.parameters, self.lost)
        own = self.transport.parameters()
        self.tell(connect={"kind": own.kind, "address": own.address.hex(), "settings": dict(own.settings)})
        return self

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

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> None:
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def spawn(transport):
    """Starts peers, and leaves none behind."""
    peers = []

    def spawn(own: UcxTransport = transport) -> Peer:
        peers.append(Peer(own))
        return peers[-1].connect()

    yield spawn
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


def exchange(peer: Peer, tag: int) -> None:
    buffer = np.zeros(LONG, np.uint8)
    received = post_receive(peer.endpoint, tag, buffer)
    peer.tell(send=tag, nbytes=LONG)
    assert peer.hear() == {"tag": tag, "error": None, "digest": hashlib.sha256(pattern(LONG, tag)).hexdigest()}
    drive([peer.transport], lambda: received.fired)
    assert received.error is None
    assert (buffer == pattern(LONG, tag)).all()
    sent = post_send(peer.endpoint, tag + 1, pattern(LONG, tag + 1))
    peer.tell(receive=tag + 1, nbytes=LONG)
    digest = hashlib.sha256(pattern(LONG, tag + 1)).hexdigest()
    assert peer.hear() == {"tag": tag + 1, "error": None, "digest": digest}
    drive([peer.transport], lambda: sent.fired)


# --- two processes -----------------------------------------------------------------------------------------------


def test_two_processes_exchange(spawn):
    peer = spawn()
    for tag in range(0, 10, 2):
        exchange(peer, tag)


def test_a_killed_peer_ends_everything_at_once_and_the_survivor_lives(transport, spawn):
    descriptors, threads = [], []
    for start in (0, 1000, 2000):
        peer = spawn()
        exchange(peer, start)
        big = np.zeros(64 << 20, np.uint8)
        pending = [
            post_send(peer.endpoint, start + 10, pattern(LONG)),
            post_receive(peer.endpoint, start + 11, np.zeros(LONG, np.uint8)),
            post_receive(peer.endpoint, start + 12, big),
        ]
        peer.tell(send=start + 12, nbytes=big.nbytes)
        peer.tell(send=start + 13, nbytes=LONG)
        peer.tell(send=start + 14, nbytes=100)
        drive([transport], lambda big=big: bool(big[:4096].any()))
        killed_at = time.monotonic()
        peer.kill()
        drive([transport], lambda peer=peer, pending=pending: all_fired(pending) and bool(peer.lost.errors))
        assert time.monotonic() - killed_at < 5
        assert all(isinstance(o.error, PeerUnavailable) for o in pending[:2])
        assert not peer.endpoint.alive
        peer.endpoint.close()
        settle(transport)
        descriptors.append(len(open_descriptors()))
        threads.append(len(os.listdir("/proc/self/task")))
    assert descriptors[0] == descriptors[-1]
    assert threads[0] == threads[-1]
    exchange(spawn(), 3000)


def test_what_a_dead_peer_left_unmatched_blocks_neither_draining_nor_closing(spawn, transport):
    peer = spawn()
    exchange(peer, 0)
    for tag in range(100, 110):
        peer.tell(send=tag, nbytes=LONG)
    peer.tell(send=200, nbytes=100)
    assert peer.hear()["tag"] == 200
    settle(transport)
    peer.process.send_signal(signal.SIGSTOP)
    assert transport.drain_unknown(lambda tag: tag != 100) == 1
    peer.kill()
    started = time.monotonic()
    transport.close()
    assert time.monotonic() - started < 3


def test_a_stopped_peer_blocks_nobody(spawn, transport):
    peer = spawn()
    exchange(peer, 0)
    big = np.zeros(64 << 20, np.uint8)
    pending = [
        post_send(peer.endpoint, 10, pattern(LONG)),
        post_receive(peer.endpoint, 11, np.zeros(LONG, np.uint8)),
        post_receive(peer.endpoint, 12, big),
    ]
    peer.tell(send=12, nbytes=big.nbytes)
    drive([transport], lambda: bool(big[:4096].any()))
    peer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    peer.endpoint.close()
    drive([transport], lambda: all_fired(pending))
    assert time.monotonic() - started < 5
    big[:] = 0xA5
    peer.process.send_signal(signal.SIGCONT)
    settle(transport, quiet_rounds=100)
    assert (big == 0xA5).all()


def test_the_kernel_ends_a_connection_whose_data_nobody_takes(spawn):
    """A stopped process looks to TCP as a full receiver; a silent partition looks to it as lost acknowledgements."""
    with closing(UcxTransport(UcxConfig(**PORTS, user_timeout_s=0.5))) as transport:
        peer = spawn(transport)
        big = np.ones(256 << 20, np.uint8)
        sent = post_send(peer.endpoint, 1, big)
        settle(transport)
        peer.tell(receive=1, nbytes=big.nbytes)
        drive([transport], lambda: _unsent_bytes() > 1 << 20)
        peer.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        drive([transport], lambda: sent.fired and bool(peer.lost.errors))
        assert time.monotonic() - started < 10
        assert isinstance(sent.error, PeerUnavailable)


def _tcp_sockets():
    for descriptor in open_descriptors():
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family == socket.AF_INET:
                    yield descriptor, connection


def _peer_port(connection):
    try:
        return connection.getpeername()[1]
    except OSError:
        return None


def _unsent_bytes():
    """The most that any of UCX's connections has handed to the kernel and not got acknowledged."""
    return max(
        struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))[0]
        for descriptor, connection in _tcp_sockets()
        if _peer_port(connection) and {connection.getsockname()[1], _peer_port(connection)} & PORT_RANGE
    )


# --- resources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["both", "one"])
def test_fifty_connections_leave_nothing_behind(sides):
    before = len(open_descriptors())
    config = UcxConfig(**PORTS, keepalive_interval_s=0.1)
    a, b = UcxTransport(config), UcxTransport(config)
    suite = TestUcxTransport()
    counts = []
    for round_number in range(50 if sides == "both" else 10):
        pair = Pair(a, b)
        tag = round_number * 10
        suite.exchange(pair, nbytes=20_000, tag=tag)
        pending = [
            post_send(pair.to_b, tag + 2, pattern(LONG)),
            post_send(pair.to_a, tag + 3, pattern(LONG)),
            post_receive(pair.to_b, tag + 4, np.zeros(LONG, np.uint8)),
        ]
        pair.to_b.close()
        if sides == "both":
            pair.to_a.close()
        drive([a, b], lambda pair=pair, pending=pending: all_fired(pending) and not pair.to_a.alive)
        a.drain_unknown(lambda _: False)
        b.drain_unknown(lambda _: False)
        settle(a, b, quiet_rounds=3)
        counts.append((len(open_descriptors()), len(os.listdir("/proc/self/task"))))
    assert max(counts[5:]) <= max(counts[:5])
    a.close()
    b.close()
    assert len(open_descriptors()) == before


def test_an_idle_connection_costs_next_to_no_processor_time(spawn, transport):
    peer = spawn()
    exchange(peer, 0)
    post_receive(peer.endpoint, 50, np.zeros(LONG, np.uint8))
    settle(transport)
    started, used = time.monotonic(), time.process_time()
    parks = 0
    while time.monotonic() - started < 1.5:
        parks += 1
        if not transport.progress():
            transport.park(0.5)
    assert (time.process_time() - used) / (time.monotonic() - started) < 0.02
    assert parks < 100


def test_every_socket_of_ucx_and_no_other_gets_the_timeout():
    config = UcxConfig(**PORTS, user_timeout_s=4.2)
    others = {descriptor for descriptor, _ in _tcp_sockets()}  # what else this process has open is not looked at
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as own,
        server.accept()[0] as accepted,
        closing(UcxTransport(config)) as a,
        closing(UcxTransport(config)) as b,
    ):
        TestUcxTransport().exchange(Pair(a, b))
        foreign = {server.fileno(), own.fileno(), accepted.fileno()}
        timeouts_ms = {"foreign": set(), "ucx": set()}
        ucx_count = 0
        for descriptor, connection in _tcp_sockets():
            if descriptor in others:
                continue
            timeout_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            if descriptor in foreign:
                timeouts_ms["foreign"].add(timeout_ms)
            elif {connection.getsockname()[1], _peer_port(connection)} & PORT_RANGE:
                timeouts_ms["ucx"].add(timeout_ms)
                ucx_count += 1
        assert timeouts_ms == {"foreign": {0}, "ucx": {4200}}
        assert ucx_count >= 4


def test_ports_come_from_the_range_and_run_out_with_an_error():
    config = UcxConfig(first_port=22500, last_port=22500)
    only = UcxTransport(config)
    ports, worker_address = ucx._unpack_address(only.parameters().address)
    assert ports == {22500}
    assert worker_address
    with pytest.raises(DataPlaneUnavailable, match="22500-22500"):
        UcxTransport(config)
    only.close()
    UcxTransport(config).close()


def test_a_taken_port_is_no_reason_to_try_for_ever():
    with socket.create_server(("127.0.0.1", 22510)), pytest.raises(DataPlaneUnavailable) as caught:
        UcxTransport(UcxConfig(first_port=22510, last_port=22510))
    assert (caught.value.stage, caught.value.field) == ("start", "ucx.last_port")
    with (
        socket.create_server(("127.0.0.1", 22511)),
        closing(UcxTransport(UcxConfig(first_port=22511, last_port=22512))) as b,
    ):
        assert ucx._unpack_address(b.parameters().address)[0] == {22512}


def test_a_port_is_free_again_as_soon_as_its_worker_is_closed():
    """Else every process that comes and goes takes one of few ports for a minute."""
    config = UcxConfig(first_port=22520, last_port=22521)
    with closing(UcxTransport(config)) as stays:
        for _ in range(8):
            with closing(UcxTransport(config)) as goes:
                TestUcxTransport().exchange(Pair(goes, stays))
                TestUcxTransport().exchange(Pair(stays, goes))


def test_a_descriptor_that_becomes_another_under_the_eyes_is_passed_over(monkeypatch):
    """Other threads of an engine open and close what they like; an exception here would end the data plane."""
    with socket.socket() as own, open(os.devnull) as other:
        dup = os.dup
        monkeypatch.setattr(os, "dup", lambda number: dup(other.fileno() if number == own.fileno() else number))
        before = len(open_descriptors())
        assert not _sockets.any_blocked(local_ports=(1,), remote_ports=(1,))
        assert len(open_descriptors()) == before


def test_a_socket_with_the_number_of_one_closed_meanwhile_is_seen():
    old, new = socket.socket(), socket.create_server(("127.0.0.1", 22530))
    with old, new:
        before = _sockets.open_sockets() - {os.readlink(f"/proc/self/fd/{new.fileno()}")}
        number = old.fileno()
        os.dup2(new.fileno(), number)
        new.close()
        assert _sockets.listening_ports(22530, 22530, opened_before=before) == {22530}


# --- the library -------------------------------------------------------------------------------------------------

LOAD_SCRIPT = """
import logging, os, sys
sys.path.insert(0, sys.argv[1])
def state():
    masks = [line.split() for line in open("/proc/self/status") if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
    caught = [(name, int(mask, 16) & ((1 << 31) - 1)) for name, mask in masks]  # above 31: the C library's own
    log = logging.getLogger("ucx")
    return dict(os.environ), caught, log.handlers[:], log.filters[:], log.level, log.propagate
before = state()
from hurray_wire.transport.ucx import UcxTransport, loaded_ucx
from hurray_wire.transport.ucx_config import UcxConfig
assert "ucxx" not in sys.modules
assert loaded_ucx()["version"]
transport = UcxTransport(UcxConfig(first_port=21000, last_port=21999))
assert "ucxx" in sys.modules
assert state() == before, (before, state())
transport.close()
assert state() == before
"""


@pytest.mark.parametrize("own", [{}, {"UCX_LOG_LEVEL": "fatal", "UCX_RNDV_THRESH": "1234", "UCX_DEBUG_SIGNO": "12"}])
def test_loading_leaves_environment_signals_and_logging_alone(own):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    run = subprocess.run(
        [sys.executable, "-c", LOAD_SCRIPT, str(ROOT)],
        env={**environment, **own},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("", "")


def test_the_loaded_library_is_named():
    loaded = loaded_ucx()
    assert loaded["version"].count(".") == 2
    assert "tcp" in loaded["transports"].split(",")
    assert Path(loaded["path"]).is_file()
    assert "libucp" in loaded["path"]


def test_a_missing_library_is_the_data_plane_unavailable(monkeypatch):
    ucx._load_ucxx.cache_clear()
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    environment = dict(os.environ)
    with pytest.raises(DataPlaneUnavailable, match="cannot be loaded"):
        UcxTransport(CONFIG)
    assert dict(os.environ) == environment


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("net_devices", ()),
        ("net_devices", ("lo,eth0",)),
        ("net_devices", ("../x",)),
        ("trusted", ("10.0.0.0/33",)),
        ("tls", ()),
        ("tls", ("TCP",)),
        ("first_port", 0),
        ("first_port", 80),
        ("last_port", 7419),
        ("last_port", 65536),
        ("tcp_tx_seg_size_bytes", 100),
        ("tcp_tx_seg_size_bytes", 2 << 20),
        ("tcp_rx_seg_size_bytes", 1 << 30),
        ("rndv_thresh_bytes", 0),
        ("keepalive_interval_s", 0.0),
        ("user_timeout_s", float("nan")),
    ],
)
def test_a_value_that_cannot_work_is_refused(field, value):
    with pytest.raises(Misuse) as caught:
        UcxConfig(**{field: value})
    assert caught.value.details["offered"]
    assert caught.value.details["required"]
    assert caught.value.field is not None
    assert caught.value.field.startswith("ucx.")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(Misuse, match="nosuch0"):
        UcxTransport(UcxConfig(net_devices=("nosuch0",), trusted=("nosuch0",)))


def test_segment_sizes_must_agree(transport):
    other = UcxTransport(UcxConfig(**PORTS, tcp_tx_seg_size_bytes=256 << 10))
    with pytest.raises(CapabilityMismatch) as caught:
        transport.check_peer(other.parameters())
    assert caught.value.details == {
        "field": "ucx.tcp_tx_seg_size",
        "offered": str(256 << 10),
        "required": str(1 << 20),
    }
    other.close()


@pytest.mark.parametrize("address", [b"", b"\0", b"\x01\0\0", b"\xff" * 600, b"\0" + b"x" * 5000])
def test_a_malformed_address_is_refused(transport, address):
    offered = transport.parameters()
    parameters = TransportParameters(offered.kind, address, offered.settings)
    with pytest.raises(ProtocolViolation):
        transport.check_peer(parameters)
    with pytest.raises(ProtocolViolation):
        transport.connect(1, parameters, Lost())
