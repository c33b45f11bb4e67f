import grp
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hurray_wire import memfd
from hurray_wire.errors import CapabilityMismatch, DataPlaneUnavailable, Misuse, PeerUnavailable, ProtocolViolation
from hurray_wire.memory import is_page_aligned
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
from hurray_wire.transport import _shm_outgoing, shm
from hurray_wire.transport._shm_frames import EAGER_MAX_BYTES
from hurray_wire.transport._sockets import open_descriptors
from hurray_wire.transport.base import TransportParameters
from hurray_wire.transport.shm import ShmConfig, ShmTransport

LONG = 1 << 20
PAGE = 4096
ROOT = Path(__file__).parents[2]


class TestShmTransport(TransportSuite):
    rendezvous_bytes = LONG

    @pytest.fixture(autouse=True)
    def one_path(self, tmp_path):
        self.path = str(tmp_path / "data.sock")
        self.count = 0

    def make_transport(self):
        self.count += 1
        return ShmTransport(ShmConfig(path=self.path, listens=self.count == 1))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "data.sock")


@pytest.fixture
def pair(path):
    with (
        closing(ShmTransport(ShmConfig(path=path, listens=True))) as a,
        closing(ShmTransport(ShmConfig(path=path))) as b,
    ):
        yield connected(a, b)


def connected(a, b):
    pair = Pair(a, b)
    drive([a, b], lambda: pair.to_b.proven and pair.to_a.proven)
    return pair


def exchange_in_place(pair, tag=0xFFFF):
    TestShmTransport().exchange(pair, tag=tag)


# --- staging -----------------------------------------------------------------------------------------------------


def test_what_is_staged_arrives_and_frees_its_place(pair):
    for index in range(40):
        staging = pair.to_b.take_staging(LONG)
        assert is_page_aligned(staging)
        assert staging.nbytes == LONG
        staging[:] = pattern(LONG, index)
        sent = post_send(pair.to_b, index, staging)
        if index % 2:
            settle(pair.a, pair.b, quiet_rounds=2)
            assert not sent.fired
        buffer = np.zeros(LONG, np.uint8)
        received = post_receive(pair.to_a, index, buffer)
        drive([pair.a, pair.b], lambda sent=sent, received=received: sent.fired and received.fired)
        assert (sent.error, received.error) == (None, None)
        assert (buffer == pattern(LONG, index)).all()


def test_a_part_of_what_was_staged_can_be_sent(pair):
    for nbytes in (1, EAGER_MAX_BYTES, EAGER_MAX_BYTES + 1, 100_001):
        staging = pair.to_b.take_staging(200_000)[:nbytes]
        staging[:] = pattern(nbytes)
        buffer = np.zeros(nbytes, np.uint8)
        outcomes = [post_send(pair.to_b, nbytes, staging), post_receive(pair.to_a, nbytes, buffer)]
        drive([pair.a, pair.b], lambda outcomes=outcomes: all_fired(outcomes))
        assert (buffer == pattern(nbytes)).all()
    assert len([pair.to_b.take_staging(LONG) for _ in range(8)]) == 8


def test_staging_runs_out_and_comes_back(pair):
    loans = [pair.to_b.take_staging(LONG) for _ in range(8)]
    assert all(loan is not None for loan in loans)
    assert len({loan.ctypes.data for loan in loans}) == 8
    assert pair.to_b.take_staging(LONG) is None
    assert pair.to_b.take_staging(PAGE * 3) is None
    pair.to_b.return_staging(loans[3])
    assert pair.to_b.take_staging(LONG).ctypes.data not in {loan.ctypes.data for loan in loans}
    assert pair.to_b.take_staging(LONG) is None
    assert pair.to_b.take_staging(9 << 20) is None


def test_short_messages_need_no_staging(pair):
    assert pair.to_b.take_staging(EAGER_MAX_BYTES) is None
    assert pair.to_b.take_staging(EAGER_MAX_BYTES + 1) is not None


def test_staged_messages_that_nobody_takes_hold_up_no_other(pair):
    stuck = []
    for index in range(8):
        staging = pair.to_b.take_staging(LONG)
        staging[:] = index
        stuck.append(post_send(pair.to_b, 100 + index, staging))
    waiting = [post_send(pair.to_b, 200 + index, pattern(LONG, index)) for index in range(50)]
    exchange_in_place(pair)
    TestShmTransport().exchange(pair, nbytes=30 << 20, tag=0xFFFF_00)
    assert not any(outcome.fired for outcome in stuck + waiting)
    buffers = [np.zeros(LONG, np.uint8) for _ in range(58)]
    received = [post_receive(pair.to_a, 100 + i if i < 8 else 192 + i, buffers[i]) for i in range(58)]
    drive([pair.a, pair.b], lambda: all_fired(stuck + waiting + received))
    assert all((buffers[i] == i).all() for i in range(8))
    assert all((buffers[8 + i] == pattern(LONG, i)).all() for i in range(50))


def test_loans_outlive_their_connection(pair):
    kept, returned, sent = (pair.to_b.take_staging(LONG) for _ in range(3))
    outcome = post_send(pair.to_b, 1, sent)
    pair.to_b.close()
    drive([pair.a, pair.b], lambda: outcome.fired)
    pair.to_b.return_staging(returned)
    kept[:] = 7
    assert (kept == 7).all()
    assert pair.to_b.take_staging(LONG) is None
    late = post_send(pair.to_b, 2, kept)
    drive([pair.a, pair.b], lambda: late.fired)
    assert isinstance(late.error, PeerUnavailable)


def test_more_messages_than_may_be_announced_wait_their_turn(pair):
    count = 5000
    data = pattern(9000)
    sent = [post_send(pair.to_b, tag, data) for tag in range(count)]
    settle(pair.a, pair.b, quiet_rounds=3)
    received = [post_receive(pair.to_a, tag, np.zeros(9000, np.uint8)) for tag in range(count)]
    drive([pair.a, pair.b], lambda: all_fired(sent + received))
    assert all(outcome.error is None for outcome in sent + received)


def test_a_staged_message_that_is_taken_makes_room_for_another(pair, monkeypatch):
    monkeypatch.setattr(_shm_outgoing, "MAX_ANNOUNCED", 2)
    staging = pair.to_b.take_staging(LONG)
    staged, announced = post_send(pair.to_b, 1, staging), post_send(pair.to_b, 2, pattern(LONG))
    held = [post_send(pair.to_b, 3, pair.to_b.take_staging(LONG)), post_send(pair.to_b, 4, pattern(LONG))]
    received = [post_receive(pair.to_a, tag, np.zeros(LONG, np.uint8)) for tag in (4, 3)]
    settle(pair.a, pair.b)
    assert not any(outcome.fired for outcome in [staged, announced, *held])
    received.append(post_receive(pair.to_a, 1, np.zeros(LONG, np.uint8)))
    drive([pair.a, pair.b], lambda: all_fired([staged, *held, *received]))
    assert not announced.fired


def test_short_messages_beyond_the_credit_wait_for_their_receives(pair):
    count, data = 1000, pattern(8000)
    sent = [post_send(pair.to_b, tag, data) for tag in range(count)]
    settle(pair.a, pair.b, quiet_rounds=3)
    fired = sum(outcome.fired for outcome in sent)
    assert 100 < fired < 200
    for _ in range(3):
        buffers = [np.zeros(8000, np.uint8) for _ in range(count)]
        received = [post_receive(pair.to_a, tag, buffers[tag]) for tag in range(count)]
        drive([pair.a, pair.b], lambda sent=sent, received=received: all_fired(sent + received))
        assert all((buffer == data).all() for buffer in buffers)
        sent = [post_send(pair.to_b, tag, data) for tag in range(count)]
    pair.b.drain_unknown(lambda _: False)


# --- two processes -----------------------------------------------------------------------------------------------


class Peer:
    """A transport in a process of its own (peer_process.py), and an endpoint to it."""

    def __init__(self, transport, config, prefix=()):
        self.transport = transport
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("peer_process.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        said = self.hear()
        parameters = TransportParameters(said["kind"], bytes.fromhex(said["address"]), said["settings"])
        transport.check_peer(parameters)
        self.lost = Lost()
        own = transport.parameters()
        if config.get("listens"):
            self.tell(connect={"kind": own.kind, "address": own.address.hex(), "settings": dict(own.settings)})
        self.endpoint = transport.connect(2, parameters, self.lost)
        if not config.get("listens"):
            self.tell(connect={"kind": own.kind, "address": own.address.hex(), "settings": dict(own.settings)})

    def tell(self, **order):
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self):
        """The next line, while this side's transport goes on."""
        end = time.monotonic() + 30
        while not select.select([self.process.stdout], [], [], 0)[0]:
            assert time.monotonic() < end
            if not self.transport.progress():
                self.transport.park(0.01)
        line = self.process.stdout.readline()
        assert line, "the peer's process has ended"
        return json.loads(line)

    def kill(self):
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def spawn():
    """Starts peers, and leaves none behind."""
    peers = []

    def spawn(transport, config, prefix=()):
        peers.append(Peer(transport, config, prefix))
        return peers[-1]

    yield spawn
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


def exchange(peer, tag, nbytes=3 * LONG):
    buffer = np.zeros(nbytes, np.uint8)
    received = post_receive(peer.endpoint, tag, buffer)
    peer.tell(send=tag, nbytes=nbytes)
    assert peer.hear() == {"tag": tag, "error": None, "digest": hashlib.sha256(pattern(nbytes, tag)).hexdigest()}
    drive([peer.transport], lambda: received.fired)
    assert received.error is None
    assert (buffer == pattern(nbytes, tag)).all()
    staging = peer.endpoint.take_staging(nbytes)
    staging[:] = pattern(nbytes, tag + 1)
    sent = post_send(peer.endpoint, tag + 1, staging)
    peer.tell(receive=tag + 1, nbytes=nbytes)
    digest = hashlib.sha256(pattern(nbytes, tag + 1)).hexdigest()
    assert peer.hear() == {"tag": tag + 1, "error": None, "digest": digest}
    drive([peer.transport], lambda: sent.fired)
    assert sent.error is None
    assert peer.endpoint.peer_uid == os.getuid()


def mapped_memory():
    """What this process has mapped of the transport's memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:hurray" in line]


@pytest.mark.parametrize("peer_listens", [True, False])
def test_a_killed_peer_ends_everything_at_once_and_leaves_nothing(path, spawn, peer_listens):
    shared_before = sorted(os.listdir("/dev/shm"))
    with closing(ShmTransport(ShmConfig(path=path, listens=not peer_listens))) as transport:
        descriptors = []
        for start in (0, 1000, 2000):
            peer = spawn(transport, {"path": path, "listens": peer_listens})
            exchange(peer, start)
            big = np.zeros(64 << 20, np.uint8)
            pending = [
                post_send(peer.endpoint, start + 10, pattern(LONG)),
                post_receive(peer.endpoint, start + 11, np.zeros(LONG, np.uint8)),
                post_receive(peer.endpoint, start + 12, big),
                post_send(peer.endpoint, start + 15, np.ones(64 << 20, np.uint8)),
            ]
            peer.tell(receive=start + 15, nbytes=64 << 20)
            peer.tell(send=start + 12, nbytes=big.nbytes)
            peer.tell(send=start + 13, nbytes=LONG)
            drive([transport], lambda big=big: bool(big[:PAGE].any()))
            killed_at = time.monotonic()
            peer.kill()
            drive([transport], lambda peer=peer, pending=pending: all_fired(pending) and bool(peer.lost.errors))
            assert time.monotonic() - killed_at < 5
            assert all(isinstance(outcome.error, PeerUnavailable) for outcome in pending[:2])
            assert not peer.endpoint.alive
            settle(transport)
            descriptors.append(len(open_descriptors()))
            assert mapped_memory() == []
        assert len(set(descriptors)) == 1
        exchange(spawn(transport, {"path": path, "listens": peer_listens}), 3000)
    assert sorted(os.listdir("/dev/shm")) == shared_before


def test_a_stopped_peer_blocks_nobody(path, spawn):
    with closing(ShmTransport(ShmConfig(path=path, listens=True))) as transport:
        peer = spawn(transport, {"path": path})
        exchange(peer, 0)
        big = np.zeros(64 << 20, np.uint8)
        pending = [
            post_send(peer.endpoint, 10, pattern(LONG)),
            post_receive(peer.endpoint, 11, np.zeros(LONG, np.uint8)),
            post_receive(peer.endpoint, 12, big),
        ]
        peer.tell(send=12, nbytes=big.nbytes)
        drive([transport], lambda: bool(big[:PAGE].any()))
        peer.process.send_signal(signal.SIGSTOP)
        pending += [post_send(peer.endpoint, 1000 + i, pattern(8000)) for i in range(2000)]
        exchange(spawn(transport, {"path": path}), 0)
        started = time.monotonic()
        peer.endpoint.close()
        drive([transport], lambda: all_fired(pending))
        assert time.monotonic() - started < 5
        big[:] = 0xA5
        peer.process.send_signal(signal.SIGCONT)
        settle(transport, quiet_rounds=100)
        assert (big == 0xA5).all()


def test_an_idle_connection_costs_next_to_no_processor_time(path, spawn):
    with closing(ShmTransport(ShmConfig(path=path, listens=True))) as transport:
        peer = spawn(transport, {"path": path})
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
        assert parks < 20


CONTAINER = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs none "$1"
mount -t tmpfs none /dev/shm
shift
exec "$@"
"""


@pytest.mark.parametrize("peer_listens", [True, False])
def test_containers_that_share_only_the_sockets_directory(path, spawn, peer_listens):
    unshare = shutil.which("unshare")
    isolation = [unshare, "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc"]
    if unshare is None or subprocess.run([*isolation, "true"], capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED: this user may not make namespaces (unshare)")
    prefix = [*isolation, "sh", "-c", CONTAINER, "sh", str(Path(path).parent)]
    with closing(ShmTransport(ShmConfig(path=path, listens=not peer_listens))) as transport:
        peer = spawn(transport, {"path": "/mnt/data.sock", "listens": peer_listens}, prefix)
        exchange(peer, 0)
        peer.kill()
        drive([transport], lambda: bool(peer.lost.errors))


# --- resources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", ["both", "one"])
def test_fifty_connections_leave_nothing_behind(path, sides):
    before = len(open_descriptors())
    a, b = ShmTransport(ShmConfig(path=path, listens=True)), ShmTransport(ShmConfig(path=path))
    counts = []
    for tag in range(0, 500, 10):
        pair = connected(a, b)
        TestShmTransport().exchange(pair, nbytes=20_000, tag=tag)
        pending = [
            post_send(pair.to_b, tag + 2, pattern(LONG)),
            post_send(pair.to_a, tag + 3, pair.to_a.take_staging(LONG)),
            post_receive(pair.to_b, tag + 4, np.zeros(LONG, np.uint8)),
        ]
        pair.to_b.close()
        if sides == "both":
            pair.to_a.close()
        drive([a, b], lambda pair=pair, pending=pending: all_fired(pending) and not pair.to_a.alive)
        counts.append(len(open_descriptors()))
        assert mapped_memory() == []
    assert len(set(counts)) == 1
    a.close()
    b.close()
    assert len(open_descriptors()) == before
    assert not os.path.lexists(path)


def test_without_memory_for_a_ring_sends_end_with_an_error(pair, monkeypatch):
    def no_memory(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memfd, "populate", lambda *_: False)
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    assert pair.to_b.take_staging(LONG) is None
    received = post_receive(pair.to_a, 1, np.zeros(LONG, np.uint8))
    sent = post_send(pair.to_b, 1, pattern(LONG))
    drive([pair.a, pair.b], lambda: sent.fired and received.fired)
    assert isinstance(sent.error, PeerUnavailable)
    assert isinstance(received.error, PeerUnavailable)
    assert "no memory" in sent.error.message


def test_rings_of_many_peers_take_bounded_memory(path, monkeypatch):
    """Those that come late have small ones, as long as the others are there."""
    config = ShmConfig(path=path, listens=True, ring_bytes=8 << 20, staging_bytes=4 << 20, slot_bytes=64 << 10)
    monkeypatch.setattr(shm, "_RINGS_MAX_BYTES", 2 * config.ring_bytes)
    data = pattern(3 << 20)

    def send_to(pair):
        buffer = np.zeros_like(data)
        staged = pair.to_b.take_staging(data.nbytes)
        if staged is not None:
            staged[:] = data
        outcomes = [post_receive(pair.to_a, 1, buffer)]
        outcomes.append(post_send(pair.to_b, 1, data if staged is None else staged))
        drive([pair.a, pair.b], lambda: all_fired(outcomes))
        assert [outcome.error for outcome in outcomes] == [None, None]
        assert (buffer == data).all()
        return pair.to_b._outgoing._ring.memory.nbytes

    def meet(listener):
        pair = Pair(listener, ShmTransport(ShmConfig(path=path)))
        drive([pair.a, pair.b], lambda: pair.to_b.proven and pair.to_a.proven)
        return pair

    with closing(ShmTransport(config)) as listener:
        pairs = [meet(listener) for _ in range(4)]
        small_bytes = 2 * config.slot_bytes
        assert [send_to(pair) for pair in pairs] == [config.ring_bytes] * 2 + [small_bytes] * 2
        for pair in pairs:
            pair.b.close()
        drive([listener], lambda: all(pair.lost_a.errors for pair in pairs))
        pairs = [meet(listener)]
        assert send_to(pairs[0]) == config.ring_bytes
        pairs[0].b.close()


def test_a_dialer_that_finds_no_descriptor_left_is_turned_away(path):
    with closing(ShmTransport(ShmConfig(path=path, listens=True))) as transport:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dialer:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 1, hard))
            try:
                fillers = fill_descriptors()
                dialer.connect(path)
                settle(transport)
                assert dialer.recv(100) == b""
                for filler in fillers:
                    os.close(filler)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with closing(ShmTransport(ShmConfig(path=path))) as other:
            exchange_in_place(connected(transport, other))


def fill_descriptors():
    fillers = []
    while True:
        try:
            fillers.append(os.dup(0))
        except OSError:
            return fillers


# --- the path ----------------------------------------------------------------------------------------------------


def test_what_a_killed_listener_left_is_replaced(path, spawn):
    with closing(ShmTransport(ShmConfig(path=path))) as transport:
        peer = spawn(transport, {"path": path, "listens": True})
        peer.kill()
    assert stat.S_ISSOCK(os.lstat(path).st_mode)
    with (
        closing(ShmTransport(ShmConfig(path=path, listens=True))) as a,
        closing(ShmTransport(ShmConfig(path=path))) as b,
    ):
        exchange_in_place(connected(a, b))
    assert not os.path.lexists(path)


def test_a_path_where_someone_listens_is_left_alone(path):
    with closing(ShmTransport(ShmConfig(path=path, listens=True))) as a:
        before = len(open_descriptors())
        with pytest.raises(DataPlaneUnavailable, match="another process listens"):
            ShmTransport(ShmConfig(path=path, listens=True))
        assert len(open_descriptors()) == before
        with closing(ShmTransport(ShmConfig(path=path))) as b:
            exchange_in_place(connected(a, b))


def test_what_is_not_a_socket_is_left_alone(path):
    Path(path).write_text("mine")
    with pytest.raises(DataPlaneUnavailable, match="not a socket"):
        ShmTransport(ShmConfig(path=path, listens=True))
    assert Path(path).read_text() == "mine"


def test_closing_leaves_a_successors_socket_alone(path):
    first = ShmTransport(ShmConfig(path=path, listens=True))
    os.unlink(path)
    with closing(ShmTransport(ShmConfig(path=path, listens=True))) as second:
        first.close()
        with closing(ShmTransport(ShmConfig(path=path))) as dialer:
            exchange_in_place(connected(second, dialer))


def test_a_directory_that_is_not_there_is_the_data_plane_unavailable(tmp_path):
    with pytest.raises(DataPlaneUnavailable, match="nosuch"):
        ShmTransport(ShmConfig(path=str(tmp_path / "nosuch" / "data.sock"), listens=True))


def test_the_socket_has_the_permissions_asked_for(path):
    with closing(ShmTransport(ShmConfig(path=path, listens=True, mode=0o620))):
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o620


def test_the_socket_is_for_the_group_asked_for(path):
    for group in (str(12345 if os.geteuid() == 0 else os.getegid()), grp.getgrgid(os.getegid()).gr_name):
        with closing(ShmTransport(ShmConfig(path=path, listens=True, group=group))):
            found = os.lstat(path)
            assert stat.S_IMODE(found.st_mode) == 0o660
            assert found.st_gid == (int(group) if group.isdecimal() else os.getegid())


def test_a_group_that_is_not_there_is_the_data_plane_unavailable(path):
    with pytest.raises(DataPlaneUnavailable, match="nosuchgroup"):
        ShmTransport(ShmConfig(path=path, listens=True, group="nosuchgroup"))
    assert not os.path.lexists(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "data.sock"),
        ("path", "/" + "x" * 107),
        ("path", "/x\0y"),
        ("mode", 0o1777),
        ("mode", -1),
        ("staging_bytes", 0),
        ("staging_bytes", 5000),
        ("staging_bytes", 1 << 30),
        ("slot_bytes", 0),
        ("slot_bytes", 1 << 30),
        ("ring_bytes", 8 << 20),
        ("ring_bytes", 1 << 30),
    ],
)
def test_a_value_that_cannot_work_is_refused(field, value):
    with pytest.raises(Misuse) as caught:
        ShmConfig(**{field: value})
    assert caught.value.field == f"shm.{field}"
    assert caught.value.details["offered"]
    assert caught.value.details["required"]


# --- who is at the other end -------------------------------------------------------------------------------------


def test_another_host_is_refused_naming_both(pair):
    offered = pair.b.parameters()
    other = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(CapabilityMismatch) as caught:
        pair.a.check_peer(replace(offered, settings={**offered.settings, "boot_id": other}))
    own = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert caught.value.details == {"field": "shm.boot_id", "offered": other, "required": own}


def test_of_two_one_listens_and_one_dials(pair, tmp_path):
    with closing(ShmTransport(ShmConfig(path=str(tmp_path / "other.sock"), listens=True))) as other:
        for own, peer in ((pair.a, other), (pair.b, pair.b)):
            with pytest.raises(CapabilityMismatch) as caught:
                own.check_peer(peer.parameters())
            assert caught.value.field == "shm.role"


def test_a_path_where_nobody_listens_is_a_lost_connection(path, pair, tmp_path):
    with closing(ShmTransport(ShmConfig(path=str(tmp_path / "nosuch.sock")))) as transport:
        lost = Lost()
        endpoint = transport.connect(1, pair.a.parameters(), lost)
        sent = post_send(endpoint, 1, pattern(10))
        assert not lost.errors
        assert not transport.arm()
        drive([transport], lambda: bool(lost.errors) and sent.fired)
        assert isinstance(lost.errors[0], PeerUnavailable)
        assert not endpoint.alive


@pytest.mark.parametrize("address", [b"", b"\0" * 48, b"\2" + b"\0" * 48, b"\0" * 50])
def test_a_malformed_address_is_refused(pair, address):
    parameters = replace(pair.b.parameters(), address=address)
    with pytest.raises(ProtocolViolation):
        pair.a.check_peer(parameters)
    with pytest.raises(ProtocolViolation):
        pair.a.connect(1, parameters, Lost())
