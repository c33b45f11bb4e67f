"""A peer that says and sends what it may not, over a socket of its own making."""

import array
import fcntl
import itertools
import os
import socket
from contextlib import closing, suppress
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hurray_wire import memfd
from hurray_wire.errors import PeerUnavailable, ProtocolViolation
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.testing.transport_suite import (
    GUARD,
    Lost,
    Outcome,
    Pair,
    all_fired,
    drive,
    pattern,
    post_receive,
    post_send,
    settle,
)
from hurray_wire.transport import _shm_proof as proof
from hurray_wire.transport import shm
from hurray_wire.transport._shm_frames import (
    _FIELDS,
    EAGER_CREDIT_BYTES,
    EAGER_MAX_BYTES,
    GRAINS_AT_ONCE,
    MAX_ANNOUNCED,
    Frame,
    Kind,
)
from hurray_wire.transport._shm_packets import Packet
from hurray_wire.transport._sockets import open_descriptors
from hurray_wire.transport.base import TransportParameters
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.view import View
from support.grains import owner_of, views_of

RING_BYTES = 1 << 20
LONG = 100_000


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "data.sock")


@pytest.fixture
def transport(path):
    with closing(ShmTransport(ShmConfig(path=path, listens=True))) as transport:
        yield transport


def identity_of(transport):
    return proof.read_identity(transport.parameters().address)


def send(connection, packet, *descriptors):
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([packet], ancillary)


class Dialer:
    """Dials a transport as a peer would, step by step."""

    def __init__(self, transport, path):
        self.transport = transport
        self.own = proof.draw_identity(listens=False)
        self.listener = identity_of(transport)
        self.lost = Lost()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)
        self.socket.settimeout(10)
        settle(transport, quiet_rounds=2)
        self.nonce = proof.draw_nonce()
        self.theirs = proof.read_challenge(Packet(memoryview(self.socket.recv(1000))))

    def parameters(self):
        return TransportParameters("shm", self.own.pack(), self.transport.parameters().settings)

    def connect(self):
        self.endpoint = self.transport.connect(7, self.parameters(), self.lost)
        return self

    def say_hello(self, *, own=None, listener=None, theirs=None):
        packet, descriptor = proof.hello(own or self.own, listener or self.listener, theirs or self.theirs, self.nonce)
        send(self.socket, packet, descriptor)
        os.close(descriptor)
        settle(self.transport, quiet_rounds=2)
        return self

    def hear_welcome(self):
        data, descriptors, _, _ = socket.recv_fds(self.socket, 1000, 4)
        packet = Packet(memoryview(data), tuple(descriptors))
        proof.check_welcome(packet, self.own, self.listener, self.theirs + self.nonce)
        os.close(descriptors[0])
        return self

    def offer_ring(self, nbytes=RING_BYTES):
        descriptor, self.ring = memfd.create("rogue", nbytes)
        send(self.socket, Frame(Kind.RING, nbytes=nbytes).encode(), descriptor)
        os.close(descriptor)

    def say(self, packet, *descriptors):
        send(self.socket, packet.encode() if isinstance(packet, Frame) else packet, *descriptors)

    @property
    def turned_away(self):
        settle(self.transport, quiet_rounds=2)
        self.socket.setblocking(False)
        with suppress(BlockingIOError, ConnectionResetError):
            return self.socket.recv(1000) == b""
        return False


@pytest.fixture
def dial(transport, path):
    """Makes dialers; afterwards an honest peer must still be served, and no descriptor be left."""
    before = len(open_descriptors())
    made = []

    def dial():
        made.append(Dialer(transport, path))
        return made[-1]

    yield dial
    for dialer in made:
        dialer.socket.close()
        dialer.ring = None
    with closing(ShmTransport(ShmConfig(path=path))) as honest:
        pair = Pair(transport, honest)
        buffer = np.zeros(LONG, np.uint8)
        outcomes = [post_receive(pair.to_a, 1, buffer), post_send(pair.to_b, 1, pattern(LONG))]
        drive([transport, honest], lambda: all_fired(outcomes))
        assert (buffer == pattern(LONG)).all()
    settle(transport)
    assert len(open_descriptors()) == before


@pytest.fixture
def rogue(dial):
    """A peer that has proved itself."""
    return dial().connect().say_hello().hear_welcome()


# --- the handshake -----------------------------------------------------------------------------------------------


def test_a_dialer_made_by_hand_is_served(rogue, transport):
    assert rogue.endpoint.proven
    assert rogue.endpoint.peer_uid == os.getuid()
    rogue.offer_ring()
    rogue.ring[PAGE_BYTES : PAGE_BYTES + 9000] = pattern(9000)
    buffer = np.zeros(9000, np.uint8)
    received = post_receive(rogue.endpoint, 5, buffer)
    rogue.say(Frame(Kind.STAGED, tag=5, nbytes=9000, offset=PAGE_BYTES))
    drive([transport], lambda: received.fired)
    assert (buffer == pattern(9000)).all()
    assert rogue.socket.recv(1000) == Frame(Kind.RELEASE, offset=PAGE_BYTES).encode()


def test_without_the_listeners_token_nobody_gets_in(dial):
    dialer = dial().connect()
    dialer.say_hello(listener=proof.Identity(True, dialer.listener.name, bytes(32)))
    assert dialer.turned_away
    assert not dialer.endpoint.proven
    assert dialer.endpoint.alive
    dialer.endpoint.close()


def test_who_has_no_token_is_not_even_kept_waiting(dial):
    stranger = dial()
    stranger.say_hello(listener=proof.Identity(True, stranger.listener.name, bytes(32)))
    assert stranger.turned_away
    known = dial().say_hello()
    assert not known.turned_away


def test_the_listeners_token_alone_does_not_make_another_peer(dial, transport):
    """Whoever has a session has the token; it must not do to take the place of another's."""
    victim = dial().connect()
    thief = dial()
    thief.say_hello(own=proof.Identity(False, victim.own.name, bytes(32)))
    assert thief.turned_away
    assert not victim.endpoint.proven
    victim.say_hello().hear_welcome()
    assert victim.endpoint.proven


def test_a_hello_holds_for_its_own_connection_only(dial):
    dialer, other = dial().connect(), dial()
    other.own = dialer.own
    other.say_hello(theirs=dialer.theirs)
    assert other.turned_away
    dialer.say_hello().hear_welcome()


@pytest.mark.parametrize("connects_first", [True, False])
def test_either_side_may_be_first(dial, connects_first):
    dialer = dial()
    if connects_first:
        dialer.connect().say_hello()
    else:
        dialer.say_hello().connect()
    dialer.hear_welcome()
    assert dialer.endpoint.proven


def test_a_hello_without_memory_proves_nothing(dial):
    for descriptors in ([], ["null"], ["unsealed"], ["small"], ["its own", "its own"]):
        dialer = dial().connect()
        packet, descriptor = proof.hello(dialer.own, dialer.listener, dialer.theirs, dialer.nonce)
        made = [make_descriptor(kind) if kind != "its own" else os.dup(descriptor) for kind in descriptors]
        dialer.say(packet, *made)
        for opened in [*made, descriptor]:
            os.close(opened)
        assert dialer.turned_away, descriptors
        dialer.endpoint.close()


@pytest.mark.parametrize("packet", [b"x", b"HURRYSHH", bytes(72), b"HURRYSHH" + bytes(64), bytes(9000)])
def test_what_is_not_a_hello_is_turned_away(dial, packet):
    dialer = dial()
    dialer.say(packet)
    assert dialer.turned_away


def test_strangers_cannot_take_all_descriptors(dial, transport, path):
    before = len(open_descriptors())
    strangers = [dial() for _ in range(100)]
    assert len(open_descriptors()) - before <= 100 + 65
    with closing(ShmTransport(ShmConfig(path=path))) as honest:
        pair = Pair(transport, honest)
        drive([transport, honest], lambda: pair.to_b.proven and pair.to_a.proven)
    seated = [dial().say_hello() for _ in range(100)]
    assert len(open_descriptors()) - before <= 200 + 2 * 65
    for stranger in strangers + seated:
        stranger.socket.close()
    settle(transport)
    assert len(open_descriptors()) == before


def test_of_two_hellos_of_one_dialer_the_later_holds(dial):
    earlier, later = dial(), dial()
    later.own = earlier.own
    earlier.say_hello()
    later.say_hello()
    assert earlier.turned_away
    later.connect().hear_welcome()
    assert later.endpoint.proven


@pytest.mark.parametrize("answer", ["nothing", "garbage", "challenge again", "no memory", "wrong proof"])
def test_a_listener_that_is_not_the_peer_gets_nothing(path, answer):
    """It has taken the peer's place at the path, and knows the peer's token, but not the dialer's."""
    before = len(open_descriptors())
    listener = proof.draw_identity(listens=True)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        closing(ShmTransport(ShmConfig(path=path))) as transport,
    ):
        server.bind(path)
        server.listen()
        lost = Lost()
        parameters = TransportParameters("shm", listener.pack(), transport.parameters().settings)
        endpoint = transport.connect(1, parameters, lost)
        sent = post_send(endpoint, 1, pattern(100))
        connection = server.accept()[0]
        connection.send(proof.challenge(bytes(16)))
        settle(transport)
        heard, descriptors, _, _ = socket.recv_fds(connection, 10_000, 4)
        assert identity_of(transport).token not in heard
        assert listener.token not in heard
        dialer = proof.Identity(False, identity_of(transport).name, bytes(32))
        packet, descriptor = proof.welcome(listener, dialer, bytes(16) + heard[24:40])
        match answer:
            case "garbage":
                connection.send(b"x" * 100)
            case "challenge again":
                connection.send(proof.challenge(bytes(16)))
            case "no memory":
                connection.send(packet)
            case "wrong proof":
                send(connection, packet, descriptor)
        for opened in [*descriptors, descriptor]:
            os.close(opened)
        if answer == "nothing":
            connection.close()
        drive([transport], lambda: bool(lost.errors) and sent.fired)
        assert isinstance(lost.errors[0], PeerUnavailable if answer == "nothing" else ProtocolViolation)
        assert not endpoint.proven
        assert connection.fileno() == -1 or connection.recv(1000) == b""
        connection.close()
    assert len(open_descriptors()) == before


# --- memory ------------------------------------------------------------------------------------------------------


def make_descriptor(kind):
    if kind == "null":
        return os.open("/dev/null", os.O_RDWR)
    if kind == "huge":
        try:
            descriptor = os.memfd_create("rogue", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        except OSError as error:
            pytest.skip(f"NOT TESTED: this kernel has no huge pages ({error})")
        os.ftruncate(descriptor, 2 << 20)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, memfd.SIZE_SEALS)
        return descriptor
    descriptor = os.memfd_create("rogue", os.MFD_ALLOW_SEALING)
    os.ftruncate(
        descriptor, {"small": 100, "truncated": RING_BYTES // 2, "grown": RING_BYTES * 2}.get(kind, RING_BYTES)
    )
    seals = {
        "unsealed": 0,
        "may shrink": fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        "may grow": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        "more seals": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
    }.get(kind, memfd.SIZE_SEALS)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    "kind", ["null", "small", "truncated", "grown", "unsealed", "may shrink", "may grow", "more seals", "huge"]
)
def test_memory_that_is_not_safe_to_map_is_refused(rogue, transport, kind):
    descriptor = make_descriptor(kind)
    nbytes = 2 << 20 if kind == "huge" else RING_BYTES
    rogue.say(Frame(Kind.RING, nbytes=nbytes), descriptor)
    os.close(descriptor)
    drive([transport], lambda: bool(rogue.lost.errors))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)
    assert rogue.lost.errors[0].field.startswith("shm.memory")


def test_own_memory_can_neither_shrink_nor_be_written_by_the_peer():
    descriptor, memory = memfd.create("own", RING_BYTES)
    reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    for work in (
        lambda: os.ftruncate(reopened, 0),
        lambda: os.ftruncate(reopened, 2 * RING_BYTES),
        lambda: os.write(reopened, b"x"),
        lambda: fcntl.fcntl(reopened, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            work()
    seen = memfd.map_received(descriptor, RING_BYTES)
    memory[:] = 7
    assert (seen == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    os.close(reopened)
    os.close(descriptor)


def test_what_the_peer_writes_after_a_completion_is_not_seen(rogue, transport):
    rogue.offer_ring()
    rogue.ring[:LONG] = pattern(LONG)
    buffer = np.zeros(LONG, np.uint8)
    received = post_receive(rogue.endpoint, 5, buffer)
    rogue.say(Frame(Kind.STAGED, tag=5, nbytes=LONG))
    drive([transport], lambda: received.fired)
    rogue.ring[:] = 0
    assert (buffer == pattern(LONG)).all()


# --- views -------------------------------------------------------------------------------------------------------

GRAIN = 2 * PAGE_BYTES


def make_grains(count, *, nbytes=GRAIN, seals=memfd.SIZE_SEALS):
    grains = []
    for _ in range(count):
        grains.append(os.memfd_create("rogue-grain", os.MFD_ALLOW_SEALING))
        os.ftruncate(grains[-1], nbytes)
        fcntl.fcntl(grains[-1], fcntl.F_ADD_SEALS, seals)
    return grains


def show_by_hand(rogue, transport, packets, *, nbytes):
    """Announce a view that is wanted, then say packets: (frame, descriptors). The view, what came of it, the pin."""
    view, seen = View(nbytes), Outcome()
    rogue.endpoint.receive_view(1, view, seen)
    seen.allowed = True
    rogue.say(Frame(Kind.VIEW, tag=1, nbytes=nbytes))
    settle(transport, quiet_rounds=2)
    watched, given = socket.socketpair()
    with watched, given:
        for frame, descriptors in packets:
            rogue.say(frame, *(given.fileno() if item == "pin" else item for item in descriptors))
            settle(transport, quiet_rounds=2)
        for item in {item for _, descriptors in packets for item in descriptors} - {"pin"}:
            os.close(item)
    return view, seen


def test_a_view_shown_by_hand_is_seen(rogue, transport):
    grains = make_grains(3)
    frame = Frame(Kind.GRAINS, nbytes=GRAIN)
    view, seen = show_by_hand(rogue, transport, [(frame, [*grains, "pin"])], nbytes=2 * GRAIN + 100)
    assert seen.error is None
    assert (view.memory == 0).all()
    assert view.memory.nbytes == 2 * GRAIN + 100
    assert len(views_of("rogue-grain")) == 3


@pytest.mark.parametrize(
    ("kind", "count", "frame", "pinned"),
    [
        ("unsealed", 3, Frame(Kind.GRAINS, nbytes=GRAIN), True),
        ("may shrink", 3, Frame(Kind.GRAINS, nbytes=GRAIN), True),
        ("may be unsealed", 3, Frame(Kind.GRAINS, nbytes=GRAIN), True),
        ("short", 3, Frame(Kind.GRAINS, nbytes=GRAIN), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=GRAIN), False),
        ("good", 2, Frame(Kind.GRAINS, nbytes=GRAIN), True),
        ("good", 4, Frame(Kind.GRAINS, nbytes=GRAIN), True),
        ("good", 0, Frame(Kind.GRAINS, nbytes=GRAIN), False),
        ("good", 3, Frame(Kind.GRAINS, nbytes=GRAIN, offset=GRAIN), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=GRAIN, number=1), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=0), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=100), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=2 * GRAIN), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=(1 << 64) - PAGE_BYTES), True),
        ("good", 3, Frame(Kind.GRAINS, nbytes=PAGE_BYTES), True),
    ],
)
def test_grains_that_are_not_as_agreed_are_not_mapped(rogue, transport, kind, count, frame, pinned):
    seals = {
        "unsealed": 0,
        "may shrink": fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        "may be unsealed": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
    }.get(kind, memfd.SIZE_SEALS)
    grains = make_grains(count, nbytes=GRAIN // 2 if kind == "short" else GRAIN, seals=seals)
    packets = [(frame, [*grains, "pin"] if pinned else grains)]
    view, seen = show_by_hand(rogue, transport, packets, nbytes=3 * GRAIN)
    assert isinstance(seen.error, ProtocolViolation)
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)
    assert view.memory is None
    assert not views_of("rogue-grain")


def test_a_pin_must_be_a_socket(rogue, transport):
    grains = make_grains(2)
    frame = Frame(Kind.GRAINS, nbytes=GRAIN)
    view, seen = show_by_hand(rogue, transport, [(frame, grains)], nbytes=GRAIN)
    assert isinstance(seen.error, ProtocolViolation)
    assert seen.error.field == "shm.pin"
    assert view.memory is None
    assert not views_of("rogue-grain")


@pytest.mark.parametrize("wrong", ["offset", "size", "count", "unsealed"])
def test_later_grains_are_looked_at_like_the_first(rogue, transport, wrong):
    first = make_grains(GRAINS_AT_ONCE)
    second = make_grains(2, seals=0 if wrong == "unsealed" else memfd.SIZE_SEALS)
    shown_bytes = GRAINS_AT_ONCE * GRAIN
    frame = Frame(
        Kind.GRAINS,
        nbytes=2 * GRAIN if wrong == "size" else GRAIN,
        offset=0 if wrong == "offset" else shown_bytes,
    )
    packets = [(Frame(Kind.GRAINS, nbytes=GRAIN), first), (frame, [*second[: 1 if wrong == "count" else 2], "pin"])]
    view, seen = show_by_hand(rogue, transport, packets, nbytes=shown_bytes + 2 * GRAIN)
    if wrong == "count":
        os.close(second[1])
    assert isinstance(seen.error, ProtocolViolation)
    assert view.memory is None
    assert not views_of("rogue-grain")


@pytest.mark.parametrize("grain_bytes", [PAGE_BYTES, 1 << 40])
def test_a_view_of_any_size_takes_no_memory_before_its_grains_come(rogue, transport, grain_bytes):
    """And none at all where there would be too many, or addresses run out."""
    (grain,) = make_grains(1)
    frame = Frame(Kind.GRAINS, nbytes=grain_bytes)
    view, seen = show_by_hand(rogue, transport, [(frame, [grain])], nbytes=1 << 50)
    assert isinstance(seen.error, ProtocolViolation | PeerUnavailable)
    assert view.memory is None


@pytest.mark.parametrize("pulls", [[1], [3 * GRAIN + 1], [3 * GRAIN, 1], [3 * GRAIN, 0], [0, 0], [3 * GRAIN] * 2])
def test_pulls_of_a_view_that_make_no_sense_end_the_connection(rogue, transport, pulls):
    with owner_of(pattern(3 * GRAIN), GRAIN) as owner:
        shown = Outcome()
        rogue.endpoint.send_view(1, owner.shown, shown)
        shown.allowed = True
        settle(transport, quiet_rounds=2)
        for nbytes in pulls:
            rogue.say(Frame(Kind.PULL, nbytes=nbytes))
        drive([transport], lambda: shown.fired and bool(rogue.lost.errors))
        assert isinstance(rogue.lost.errors[0], ProtocolViolation)
        rogue.socket.close()
        assert not owner.pinned


def test_a_view_whose_end_is_on_its_way_is_not_pulled_once_more(rogue, transport):
    """Sent a second time, the descriptor of the pin would be whatever had got its number since."""
    number = itertools.count()
    while not rogue.endpoint._unsent:  # which needs a peer that does not read
        flood(rogue, transport, [Frame(Kind.ANNOUNCE, number=next(number), tag=2, nbytes=1).encode()])
        transport.drain_unknown(lambda _: False)
    with owner_of(pattern(3 * GRAIN), GRAIN) as owner:
        shown = Outcome()
        rogue.endpoint.send_view(1, owner.shown, shown)
        shown.allowed = True
        pull = [Frame(Kind.PULL, nbytes=nbytes).encode() for nbytes in (3 * GRAIN, 0)]
        flood(rogue, transport, pull)
        drive([transport], lambda: shown.fired and bool(rogue.lost.errors))
        assert isinstance(rogue.lost.errors[0], ProtocolViolation)
        assert not owner.pinned


def test_who_takes_no_grains_has_only_a_packet_of_them_on_the_way(rogue, transport):
    with owner_of(pattern(200 * PAGE_BYTES), PAGE_BYTES) as owner:
        shown = Outcome()
        rogue.endpoint.send_view(1, owner.shown, shown)
        shown.allowed = True
        settle(transport, quiet_rounds=2)
        assert rogue.socket.recv(1000) == Frame(Kind.VIEW, tag=1, nbytes=200 * PAGE_BYTES).encode()
        rogue.say(Frame(Kind.PULL, nbytes=200 * PAGE_BYTES))
        settle(transport)
        data, grains, _, _ = socket.recv_fds(rogue.socket, 1000, 253)
        assert data == Frame(Kind.GRAINS, nbytes=PAGE_BYTES).encode()
        assert len(grains) == GRAINS_AT_ONCE
        for grain in grains:
            os.close(grain)
        settle(transport)
        rogue.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            rogue.socket.recv(1000)
        assert not shown.fired
        rogue.endpoint.close()
        drive([transport], lambda: shown.fired)


# --- frames ------------------------------------------------------------------------------------------------------

TOP = (1 << 64) - 1

FRAMES = {
    "empty": b"\0",
    "short": bytes(39),
    "no kind": bytes(40),
    "unknown kind": b"\x0b" + bytes(39),
    "padding": b"\1\1" + Frame(Kind.EAGER, tag=3, nbytes=1).encode()[2:] + b"x",
    "a field it has not": Frame(Kind.EAGER, number=1, tag=3, nbytes=1).encode() + b"x",
    "trailing": Frame(Kind.RELEASE).encode() + b"x",
    "too long": bytes(9000),
    "eager, shorter": Frame(Kind.EAGER, tag=1, nbytes=5).encode() + b"abcd",
    "eager, longer": Frame(Kind.EAGER, tag=1, nbytes=5).encode() + b"abcdef",
    "eager, nothing": Frame(Kind.EAGER, tag=1).encode(),
    "eager, top": Frame(Kind.EAGER, tag=1, nbytes=TOP).encode(),
    "announce, nothing": Frame(Kind.ANNOUNCE, tag=1).encode(),
    "announce, number": Frame(Kind.ANNOUNCE, number=1, tag=1, nbytes=1).encode(),
    "staged, nothing": Frame(Kind.STAGED, tag=1).encode(),
    "staged, beyond": Frame(Kind.STAGED, tag=1, nbytes=RING_BYTES + 1).encode(),
    "staged, over the end": Frame(Kind.STAGED, tag=1, nbytes=2, offset=RING_BYTES - 1).encode(),
    "staged, wrapping": Frame(Kind.STAGED, tag=1, nbytes=2, offset=TOP).encode(),
    "piece of nothing": Frame(Kind.PIECE, nbytes=1).encode(),
    "piece, over the end": Frame(Kind.PIECE, nbytes=2, offset=RING_BYTES - 1).encode(),
    "pull of nothing": Frame(Kind.PULL, number=1, nbytes=1).encode(),
    "pull of too much": Frame(Kind.PULL, number=0, nbytes=LONG + 1).encode(),
    "release of nothing": Frame(Kind.RELEASE).encode(),
    "credit for nothing": Frame(Kind.CREDIT, nbytes=1).encode(),
    "ring without memory": Frame(Kind.RING, nbytes=RING_BYTES).encode(),
    "view, nothing": Frame(Kind.VIEW, tag=1).encode(),
    "view, number": Frame(Kind.VIEW, number=1, tag=1, nbytes=1).encode(),
    "grains of nothing": Frame(Kind.GRAINS, nbytes=PAGE_BYTES).encode(),
}


@pytest.mark.parametrize("has_ring", [True, False])
@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_not_allowed_ends_the_connection(rogue, transport, name, has_ring):
    if has_ring:
        rogue.offer_ring()
    buffer = np.full(LONG, GUARD, np.uint8)
    pending = [post_receive(rogue.endpoint, 1, buffer), post_send(rogue.endpoint, 2, pattern(LONG))]
    settle(transport, quiet_rounds=2)
    rogue.say(FRAMES[name])
    drive([transport], lambda: bool(rogue.lost.errors) and all_fired(pending))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)
    assert all(isinstance(outcome.error, ProtocolViolation) for outcome in pending)
    assert (buffer == GUARD).all()


@pytest.mark.parametrize(
    "pieces",
    [
        [Frame(Kind.PIECE, nbytes=LONG + 1)],
        [Frame(Kind.PIECE, nbytes=LONG - 1), Frame(Kind.PIECE, nbytes=2)],
        [Frame(Kind.PIECE)],
        [Frame(Kind.PIECE, nbytes=LONG), Frame(Kind.PIECE, nbytes=1)],
        [Frame(Kind.PIECE, number=1, nbytes=1)],
    ],
)
def test_more_pieces_than_were_asked_for_land_nowhere(rogue, transport, pieces):
    rogue.offer_ring()
    block = np.full(2 * LONG, GUARD, np.uint8)
    post_receive(rogue.endpoint, 1, block[:LONG])
    rogue.say(Frame(Kind.ANNOUNCE, tag=1, nbytes=LONG))
    settle(transport, quiet_rounds=2)
    for piece in pieces:
        rogue.say(piece)
    drive([transport], lambda: bool(rogue.lost.errors))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)
    assert (block[LONG:] == GUARD).all()


def test_descriptors_nobody_asked_for_end_the_connection(rogue, transport):
    null = os.open("/dev/null", os.O_RDONLY)
    rogue.say(Frame(Kind.CREDIT), null)
    os.close(null)
    drive([transport], lambda: bool(rogue.lost.errors))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)


@pytest.mark.parametrize("count", [2, 100])
def test_more_descriptors_than_one_end_the_connection(rogue, transport, count):
    descriptor = make_descriptor("sealed")
    rogue.say(Frame(Kind.RING, nbytes=RING_BYTES), *[descriptor] * count)
    os.close(descriptor)
    drive([transport], lambda: bool(rogue.lost.errors))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)


@pytest.mark.parametrize("nbytes", [0, 1000, (64 << 20) + PAGE_BYTES, TOP])
def test_a_ring_of_no_good_size_ends_the_connection(rogue, transport, nbytes):
    descriptor = make_descriptor("sealed")
    rogue.say(Frame(Kind.RING, nbytes=nbytes), descriptor)
    os.close(descriptor)
    drive([transport], lambda: bool(rogue.lost.errors))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)


def test_a_second_ring_ends_the_connection(rogue, transport):
    rogue.offer_ring()
    rogue.offer_ring()
    drive([transport], lambda: bool(rogue.lost.errors))
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)


def flood(rogue, transport, packets):
    """Say all of it, as far as the peer listens; how many it took."""
    rogue.socket.setblocking(False)
    for count, packet in enumerate(packets):
        while True:
            try:
                rogue.socket.send(packet)
                break
            except BlockingIOError:
                transport.progress()
            except OSError:
                return count
    settle(transport, quiet_rounds=2)
    return count + 1


def test_short_messages_that_nobody_waits_for_take_bounded_memory(rogue, transport):
    packet = Frame(Kind.EAGER, tag=1, nbytes=EAGER_MAX_BYTES).encode() + bytes(EAGER_MAX_BYTES)
    taken = flood(rogue, transport, [packet] * 1000)
    assert taken * EAGER_MAX_BYTES < EAGER_CREDIT_BYTES + (1 << 20)
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)
    assert not rogue.endpoint._incoming._untaken


def test_announcements_that_nobody_waits_for_are_bounded(rogue, transport):
    packets = [Frame(Kind.ANNOUNCE, number=i, tag=i, nbytes=1 << 60).encode() for i in range(2 * MAX_ANNOUNCED)]
    flood(rogue, transport, packets)
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)


def test_a_peer_that_makes_one_talk_and_does_not_read_is_left(rogue, transport, monkeypatch):
    monkeypatch.setattr(shm, "_MAX_UNSENT_BYTES", 1 << 16)
    rogue.offer_ring()
    packets = [Frame(Kind.STAGED, tag=1, nbytes=1).encode()] * 1000
    for _ in range(20):
        flood(rogue, transport, packets)
        transport.drain_unknown(lambda _: False)
        if not rogue.endpoint.alive:
            break
    settle(transport)
    assert isinstance(rogue.lost.errors[0], ProtocolViolation)


def test_a_message_of_any_announced_length_is_cut_to_what_was_posted(rogue, transport):
    rogue.offer_ring()
    block = np.full(3 * PAGE_BYTES, GUARD, np.uint8)
    buffer = block[PAGE_BYTES : 2 * PAGE_BYTES]
    received = post_receive(rogue.endpoint, 1, buffer)
    rogue.say(Frame(Kind.ANNOUNCE, tag=1, nbytes=TOP))
    settle(transport, quiet_rounds=2)
    assert rogue.socket.recv(100) == Frame(Kind.PULL, nbytes=PAGE_BYTES).encode()
    rogue.say(Frame(Kind.PIECE, nbytes=PAGE_BYTES))
    drive([transport], lambda: received.fired)
    assert isinstance(received.error, ProtocolViolation)
    assert rogue.endpoint.alive
    assert (block[:PAGE_BYTES] == GUARD).all()
    assert (block[2 * PAGE_BYTES :] == GUARD).all()


def test_an_end_in_the_middle_of_a_message_ends_its_receive(rogue, transport):
    rogue.offer_ring()
    received = post_receive(rogue.endpoint, 1, np.zeros(LONG, np.uint8))
    discarded = Outcome()
    rogue.endpoint.discard(2, discarded)
    discarded.allowed = True
    rogue.say(Frame(Kind.ANNOUNCE, tag=1, nbytes=LONG))
    rogue.say(Frame(Kind.PIECE, nbytes=LONG // 2))
    rogue.socket.close()
    drive([transport], lambda: received.fired and discarded.fired and bool(rogue.lost.errors))
    assert isinstance(received.error, PeerUnavailable)


def test_what_was_sent_before_an_abrupt_end_still_arrives(rogue, transport):
    """The peer closes without having read everything, which the kernel reports before what is still to be read."""
    buffers = [np.zeros(100, np.uint8) for _ in range(3)]
    received = [post_receive(rogue.endpoint, tag, buffers[tag]) for tag in range(3)]
    post_send(rogue.endpoint, 9, pattern(100))
    for tag in range(3):
        rogue.say(Frame(Kind.EAGER, tag=tag, nbytes=100).encode() + pattern(100, tag).tobytes())
    rogue.socket.close()
    drive([transport], lambda: all_fired(received) and bool(rogue.lost.errors))
    assert [outcome.error for outcome in received] == [None] * 3
    assert all((buffers[tag] == pattern(100, tag)).all() for tag in range(3))


frames = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    number=st.integers(0, 3),
    tag=st.integers(0, 3),
    nbytes=st.sampled_from([0, 1, 100, LONG, RING_BYTES, RING_BYTES + 1, TOP]),
    offset=st.sampled_from([0, 1, PAGE_BYTES, RING_BYTES - 1, RING_BYTES, TOP]),
)


def only_its_fields(frame):
    has = _FIELDS[frame.kind]
    kept = {name: value if name in has else 0 for name, value in asdict(frame).items() if name != "kind"}
    payload = bytes(frame.nbytes) if frame.kind is Kind.EAGER and frame.nbytes <= 100 else b""
    return Frame(frame.kind, **kept).encode() + payload


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(frames.map(only_its_fields), min_size=1, max_size=12))
def test_whatever_a_peer_says_everything_completes_once_and_nothing_lands_outside(transport, path, said):
    rogue = Dialer(transport, path).connect().say_hello().hear_welcome()
    rogue.offer_ring()
    block = np.full(5 * LONG, GUARD, np.uint8)
    pending = [post_receive(rogue.endpoint, tag, block[(2 * tag + 1) * LONG : (2 * tag + 2) * LONG]) for tag in (0, 1)]
    pending += [post_send(rogue.endpoint, tag, pattern(LONG)) for tag in (0, 1)]
    with suppress(OSError):
        for packet in said:
            rogue.say(packet)
    settle(transport, quiet_rounds=1)
    rogue.socket.close()
    drive([transport], lambda: all_fired(pending) and bool(rogue.lost.errors))
    assert all((block[2 * gap * LONG : (2 * gap + 1) * LONG] == GUARD).all() for gap in range(3))
    assert not transport._endpoints
