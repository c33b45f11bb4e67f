"""Who gets a data connection, and what a dialer that does not can do to the rest."""

import os
import shutil
import socket
import ssl
import time
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from hurray_wire.errors import Misuse, PeerUnavailable, Unauthenticated
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
from hurray_wire.transport._sockets import open_descriptors
from hurray_wire.transport._tls_credentials import identity_of
from hurray_wire.transport.tls import (
    EXPECTED_IDENTITY,
    MAX_HALF_OPEN,
    Credentials,
    SocketConfig,
    TcpTransport,
    TlsTransport,
)
from transport.certificates import Authority

LISTENS = SocketConfig(listen_host="127.0.0.1")
DIALS = SocketConfig()
NODE, ENGINE = "spiffe://example.org/node/decode-3", "spiffe://example.org/tenant/alpha"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder)


@pytest.fixture(scope="module")
def node(authority):
    return authority.issue("node", spiffe=NODE)


@pytest.fixture(scope="module")
def engine(authority):
    return authority.issue("engine", spiffe=ENGINE)


@pytest.fixture(params=["tcp", "tls"])
def pair_of(request, node, engine):
    """Makes a listening and a dialing transport of one mode, and closes them."""
    made = []

    def pair_of(listens=LISTENS, dials=DIALS):
        if request.param == "tcp":
            made.extend([TcpTransport(listens), TcpTransport(dials)])
        else:
            made.extend([TlsTransport(listens, node), TlsTransport(dials, engine)])
        return made[-2:]

    yield pair_of
    for transport in made:
        transport.close()


def exchange(pair, tag=0xFFFF_0000):
    TransportSuite().exchange(pair, tag=tag)


def port_of(transport):
    return transport._listener.getsockname()[1]


def reached(parameters, port):
    """The same parameters, by way of another port."""
    address = bytearray(parameters.address)
    address[32:34] = port.to_bytes(2, "little")
    return replace(parameters, address=bytes(address))


# --- tokens ------------------------------------------------------------------------------------------------------


def test_a_dialer_with_a_wrong_token_waits_in_vain(pair_of):
    """Its token is nobody's that was named here: it is never answered."""
    a, b = pair_of(replace(LISTENS, connect_timeout_s=0.3), replace(DIALS, connect_timeout_s=5))
    lost_a, lost_b = Lost(), Lost()
    stranger = replace(b.parameters(), address=os.urandom(32) + b"\0\0")
    a.connect(2, stranger, lost_a)
    to_a = b.connect(1, a.parameters(), lost_b)
    sent = post_send(to_a, 1, pattern(100))
    drive([a, b], lambda: bool(lost_a.errors and lost_b.errors))
    assert isinstance(sent.error, PeerUnavailable)
    assert a.refused_dialer_count == 1


def test_a_dialer_that_knows_only_its_own_token_is_refused(pair_of):
    """A recorded parameters' exchange of one side is not enough: the proof takes both tokens."""
    a, b = pair_of()
    lost_a, lost_b = Lost(), Lost()
    wrong = bytearray(a.parameters().address)
    wrong[0] ^= 1
    a.connect(2, b.parameters(), lost_a)
    b.connect(1, replace(a.parameters(), address=bytes(wrong)), lost_b)
    drive([a, b], lambda: bool(lost_b.errors))
    assert isinstance(lost_b.errors[0], Unauthenticated)
    settle(a, b)
    assert a.refused_dialer_count == 1
    assert not lost_a.errors
    b.connect(1, a.parameters(), Lost())
    exchange_after(a, b)


def exchange_after(a, b):
    """The expected peer is still welcome, whoever pretended to be it before."""
    to_b, to_a = next(iter(a._endpoints)), next(iter(b._endpoints))
    buffer = np.zeros(1000, np.uint8)
    outcomes = [post_receive(to_b, 5, buffer), post_send(to_a, 5, pattern(1000))]
    drive([a, b], lambda: all_fired(outcomes))
    assert [o.error for o in outcomes] == [None, None]
    assert (buffer == pattern(1000)).all()


class Tap:
    """A listener that passes on what a dialer and the true listener say, and keeps it."""

    def __init__(self, target_port):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(0.001)
        self.target_port = target_port
        self.port = self.server.getsockname()[1]
        self.said = bytearray()
        self.sides = []

    def progress(self):
        if not self.sides:
            try:
                dialer = self.server.accept()[0]
            except TimeoutError:
                return False
            self.sides = [dialer, socket.create_connection(("127.0.0.1", self.target_port))]
            for side in self.sides:
                side.settimeout(0.001)
        for source, target in (self.sides, self.sides[::-1]):
            try:
                data = source.recv(1 << 16)
            except TimeoutError:
                continue
            if source is self.sides[0]:
                self.said += data
            target.sendall(data)
        return False

    def close(self):
        for side in [*self.sides, self.server]:
            side.close()


def test_a_replayed_handshake_is_refused(pair_of):
    a, b = pair_of()
    with closing(Tap(port_of(a))) as tap:
        pair = Pair.__new__(Pair)
        pair.a, pair.b, pair.lost_a, pair.lost_b = a, b, Lost(), Lost()
        pair.to_b = a.connect(2, b.parameters(), pair.lost_a)
        pair.to_a = b.connect(1, reached(a.parameters(), tap.port), pair.lost_b)
        sent = post_send(pair.to_a, 1, pattern(100))
        drive([a, b, tap], lambda: sent.fired)
        received = post_receive(pair.to_b, 1, np.zeros(100, np.uint8))
        drive([a, b, tap], lambda: received.fired)
        pair.to_b.close()
        pair.to_a.close()
    expected = a.connect(2, b.parameters(), Lost())
    buffer = np.zeros(100, np.uint8)
    post_receive(expected, 1, buffer)
    with socket.create_connection(("127.0.0.1", port_of(a))) as replay:
        replay.sendall(tap.said)
        drive([a], lambda: a.refused_dialer_count == 1)
    settle(a)
    assert expected.waiting
    assert not buffer.any()


def test_a_relay_between_two_tls_connections_is_refused(authority, node, engine):
    """Another tenant of the same authority in the middle: the proofs name the certificates that were really seen."""
    middle = authority.issue("middle")
    server, client = (ssl.SSLContext(p) for p in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    for context in (server, client):
        context.check_hostname = False
        context.load_verify_locations(middle.ca)
        context.load_cert_chain(middle.certificate, middle.key)
    with (
        closing(TlsTransport(LISTENS, node)) as a,
        closing(TlsTransport(DIALS, engine)) as b,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        lost_a, lost_b = Lost(), Lost()
        a.connect(2, b.parameters(), lost_a)
        b.connect(1, reached(a.parameters(), own.getsockname()[1]), lost_b)
        b.progress()
        sides = [
            Stepped(own.accept()[0], server, accepts=True),
            Stepped(socket.create_connection(("127.0.0.1", port_of(a))), client, accepts=False),
        ]

        def relayed():
            for side, other in (sides, sides[::-1]):
                other.pending += side.step()
            return bool(lost_b.errors)

        drive([a, b], relayed)
        assert isinstance(lost_b.errors[0], Unauthenticated)
        assert not lost_a.errors
        for side in sides:
            side.socket.close()


class Stepped:
    """A TLS connection that is driven without blocking."""

    def __init__(self, connection, context, *, accepts):
        connection.setblocking(False)
        self.socket = context.wrap_socket(connection, server_side=accepts, do_handshake_on_connect=False)
        self.shaken, self.pending = False, b""

    def step(self):
        try:
            if not self.shaken:
                self.socket.do_handshake()
                self.shaken = True
            if self.pending:
                self.pending = self.pending[self.socket.send(self.pending) :]
            return self.socket.recv(1 << 16)
        except (ssl.SSLWantReadError, OSError):
            return b""


# --- certificates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["listener", "dialer"])
@pytest.mark.parametrize("wrong", ["foreign", "expired"])
def test_a_certificate_that_is_not_accepted_makes_no_connection(folder, authority, node, engine, who, wrong):
    if wrong == "foreign":
        bad = Authority(folder, "elsewhere").issue("foreign", spiffe=ENGINE, trusts=authority)
    else:
        bad = authority.issue("expired", spiffe=ENGINE, expired=True)
    with (
        closing(TlsTransport(LISTENS, bad if who == "listener" else node)) as a,
        closing(TlsTransport(DIALS, bad if who == "dialer" else engine)) as b,
    ):
        lost_b = Lost()
        waiting = a.connect(2, b.parameters(), Lost())
        to_a = b.connect(1, a.parameters(), lost_b)
        buffer = np.zeros(100, np.uint8)
        post_receive(waiting, 1, buffer)
        sent = post_send(to_a, 1, pattern(100))
        drive([a, b], lambda: bool(lost_b.errors) and sent.fired)
        assert isinstance(lost_b.errors[0], Unauthenticated if who == "listener" else PeerUnavailable)
        assert sent.error is not None
        drive([a], lambda: a.refused_dialer_count == 1)
        assert waiting.waiting
        assert not buffer.any()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("shown", [True, False])
def test_only_tls_1_3_with_a_certificate_is_spoken(node, engine, version, shown):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    context.load_verify_locations(engine.ca)
    if shown:
        context.load_cert_chain(engine.certificate, engine.key)
    with closing(TlsTransport(LISTENS, node)) as a:
        side = Stepped(socket.create_connection(("127.0.0.1", port_of(a))), context, accepts=False)

        def done():
            side.step()
            return side.shaken or a.refused_dialer_count == 1

        drive([a], done)
        settle(a)
        welcome = shown and version is ssl.TLSVersion.TLSv1_3
        assert a.refused_dialer_count == (0 if welcome else 1)
        side.socket.close()


def test_the_peers_identity_is_what_its_certificate_says(authority, node, engine):
    plain = authority.issue("by-name")
    for dialer, identity in ((engine, ENGINE), (plain, "by-name")):
        with closing(TlsTransport(LISTENS, node)) as a, closing(TlsTransport(DIALS, dialer)) as b:
            pair = Pair(a, b)
            exchange(pair)
            assert (pair.to_b.identity, pair.to_a.identity) == (identity, NODE)


def test_a_certificate_with_two_names_names_nobody():
    both = (("URI", "spiffe://a/b"), ("URI", "spiffe://a/c"))
    assert identity_of({"subjectAltName": both}) is None
    assert identity_of({"subjectAltName": (("DNS", "spiffe://a/b"),), "subject": ()}) is None
    assert identity_of({"subject": ((("commonName", "x"),), (("commonName", "y"),))}) is None
    assert identity_of({"subject": ((("commonName", "x"),),), "subjectAltName": both[:1]}) == "spiffe://a/b"


@pytest.mark.parametrize("expecting", ["listener", "dialer"])
@pytest.mark.parametrize("right", [True, False])
def test_the_control_plane_may_require_an_identity(node, engine, expecting, right):
    with closing(TlsTransport(LISTENS, node)) as a, closing(TlsTransport(DIALS, engine)) as b:
        own, other = (a, b) if expecting == "listener" else (b, a)
        actual = ENGINE if expecting == "listener" else NODE
        parameters = other.parameters()
        identity = actual if right else actual + "x"
        parameters = replace(parameters, settings={**parameters.settings, EXPECTED_IDENTITY: identity})
        own.check_peer(parameters)
        lost = Lost()
        to_other = own.connect(2, parameters, lost)
        other_lost = Lost()
        to_own = other.connect(1, own.parameters(), other_lost)
        outcomes = [post_send(to_own, 1, pattern(100)), post_receive(to_other, 1, np.zeros(100, np.uint8))]
        drive([a, b], lambda: all_fired(outcomes))
        if right:
            assert [o.error for o in outcomes] == [None, None]
        else:
            drive([a, b], lambda: bool(lost.errors))
            assert isinstance(lost.errors[0], Unauthenticated)
            assert identity in lost.errors[0].message
            drive([a, b], lambda: bool(other_lost.errors))


def test_a_required_identity_is_never_found_in_plain_mode():
    with closing(TcpTransport(LISTENS)) as a, closing(TcpTransport(DIALS)) as b:
        parameters = b.parameters()
        lost = Lost()
        a.connect(2, replace(parameters, settings={**parameters.settings, EXPECTED_IDENTITY: ENGINE}), lost)
        b.connect(1, a.parameters(), Lost())
        drive([a, b], lambda: bool(lost.errors))
        assert isinstance(lost.errors[0], Unauthenticated)


def test_changed_credentials_serve_the_next_connection(tmp_path, node, engine):
    authority = Authority(tmp_path)
    names = ("certificate", "key", "ca")

    def install(credentials):
        for name in names:
            staged = tmp_path / "staged"
            shutil.copy(getattr(credentials, name), staged)
            staged.replace(tmp_path / name)
        return Credentials(*(tmp_path / name for name in names))

    own = install(authority.issue("old"))
    with closing(TlsTransport(LISTENS, own)) as a, closing(TlsTransport(DIALS, own)) as b:
        pair = Pair(a, b)
        exchange(pair)
        assert pair.to_a.identity == "old"
        install(authority.issue("new"))
        (tmp_path / "key").write_bytes(engine.key.read_bytes())
        broken = Pair(a, b)
        exchange(broken)
        assert broken.to_a.identity == "old", "files that do not fit change nothing"
        install(authority.issue("newer"))
        renewed = Pair(a, b)
        exchange(renewed)
        assert renewed.to_a.identity == "newer"
        exchange(pair, tag=7)


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_credentials_that_cannot_be_used_are_refused_at_the_start(tmp_path, node, name, content):
    path = tmp_path / "bad.pem"
    if content is not None:
        path.write_bytes(content)
    before = open_descriptors()
    with pytest.raises(Misuse, match=r"bad\.pem"):
        TlsTransport(LISTENS, replace(node, **{name: path}))
    assert open_descriptors() == before


# --- dialers that mean no good -----------------------------------------------------------------------------------


GARBAGE = [
    b"\0" * 64,
    b"\xff" * 200,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
    b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."
    * 2,
    (1 << 62).to_bytes(8, "big") * 10,
]


@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_garbage_is_refused_and_the_rest_goes_on(pair_of, number):
    a, b = pair_of()
    pair = Pair(a, b)
    exchange(pair)
    with socket.create_connection(("127.0.0.1", port_of(a))) as dialer:
        dialer.sendall(GARBAGE[number])
        drive([a, b], lambda: a.refused_dialer_count == 1)
        exchange(pair, tag=10)
        dialer.settimeout(5)
        with suppress(ConnectionResetError):
            while dialer.recv(4096):
                pass


def test_half_open_dialers_are_bounded_and_keep_nobody_out(pair_of):
    a, b = pair_of()
    before = len(open_descriptors())
    held = [socket.create_connection(("127.0.0.1", port_of(a))) for _ in range(100)]
    for dialer in held:
        dialer.sendall(b"\x16")
    settle(a)
    assert len(a._handshakes) == MAX_HALF_OPEN
    assert len(open_descriptors()) == before + 100 + MAX_HALF_OPEN
    assert a.refused_dialer_count == 100 - MAX_HALF_OPEN
    exchange(Pair(a, b))
    for dialer in held:
        dialer.close()
    drive([a, b], lambda: not a._handshakes)
    assert a.refused_dialer_count == 100


def test_a_slow_dialer_has_one_deadline_for_all_it_says(pair_of):
    a, _ = pair_of(replace(LISTENS, connect_timeout_s=0.3))
    hello = b"HURRAY\x00\x01" if a.kind == "tcp" else b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    said = iter(hello + bytes(55 - len(hello)))
    with socket.create_connection(("127.0.0.1", port_of(a))) as dialer:
        started = time.monotonic()
        for byte in said:
            dialer.send(bytes([byte]))
            a.park(0.002)
            a.progress()
            assert a.refused_dialer_count == 0 or time.monotonic() - started > 0.25
        drive([a], lambda: a.refused_dialer_count == 1)
        assert 0.25 < time.monotonic() - started < 5


def test_the_plain_and_the_encrypted_mode_do_not_meet(node):
    with closing(TlsTransport(LISTENS, node)) as a, closing(TcpTransport(DIALS)) as b:
        lost = Lost()
        a.connect(2, b.parameters(), Lost())
        b.connect(1, a.parameters(), lost)
        drive([a, b], lambda: bool(lost.errors))
        assert a.refused_dialer_count == 1
