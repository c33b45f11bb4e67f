"""gRPC channels to one node: in plain text, or over mutual TLS with credentials that may change while calls run.

A channel keeps the credentials it was made with. After they change on disk the next call gets a new one; an old one is
closed when the last call on it, a session's included, has ended.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from hurray_client.config import ClientConfig
from hurray_wire.credentials import Credentials, Pem, WatchedCredentials
from hurray_wire.limits import Limits
from hurray_wire.log import get_logger
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub

_log = get_logger("hurray.client")

LOOK_S: Final = 2.0
"""How long it may take to find out why a TLS connection is not made."""

LOOK_AGAIN_S: Final = 5.0

TLS_NODE: Final = (
    "the node speaks TLS only, and this client has no certificates: name them (tls=, HURRAY_TLS__*, or hurrayctl "
    "--certificate, --key and --ca)"
)
PLAIN_TEXT_NODE: Final = (
    "the node speaks plain text only: give it certificates ([tls] in hurrayd.toml), or call it without any where the "
    "network is trusted"
)

_FRAME_HEADER_BYTES: Final = 9
_FRAME_TYPE_OFFSET: Final = 3
_SETTINGS: Final = 4
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""The preface and empty SETTINGS (RFC 9113, 3.4, 4.1 and 6.5)."""


def channel_options(config: ClientConfig) -> list[tuple[str, Any]]:
    """gRPC's settings for a channel: message size, keepalive, and reconnecting soon."""
    message_bytes = Limits().max_message_bytes
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.keepalive_time_ms", int(config.keepalive_interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_s * 1000)),  # else a ping may take a minute
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A name that fails is looked up again soon, not after 30 s: the node may have come back elsewhere.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        # A proxy from the environment would see loopback calls, and could not pass keepalive on.
        ("grpc.enable_http_proxy", 0),
    ]


class _Line:
    """One channel. `pem`: what it was made with."""

    def __init__(self, channel: grpc.Channel, pem: Pem | None) -> None:
        self.channel = channel
        self.pem = pem
        self.stub = TransferServiceStub(channel)
        self.users = 0


class Channels:
    """See the module. Raises Misuse, naming the file, for credentials that cannot be used."""

    def __init__(self, target: str, config: ClientConfig) -> None:
        self._target = target
        if config.tls is None and not _is_of_this_host(target):
            _log.warning("plain text to another host: whoever is on the way reads and changes it", node=target)
        self._config = config
        self._credentials = config.tls
        self._watched = None if config.tls is None else WatchedCredentials(config.tls, _valid)
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._line = self._open(None if self._watched is None else self._watched.current())
        self._retired: set[_Line] = set()

    @property
    def stub(self) -> TransferServiceStub:
        """By which calls are made now, to compare with: only `use` keeps its channel open."""
        with self._lock:
            return self._current().stub

    @contextmanager
    def use(self) -> Iterator[TransferServiceStub]:
        """The stub to make calls by, until they have ended."""
        with self._lock:
            line = self._current()
            line.users += 1
        try:
            yield line.stub
        finally:
            with self._lock:
                line.users -= 1
                self._close_unused()

    def close(self) -> None:
        """Close every channel: what runs on them is cancelled."""
        with self._lock:
            lines = [self._line, *self._retired]
        for line in lines:
            line.channel.close()

    def why_no_connection(self) -> str | None:
        """What is wrong with TLS, or its absence, between here and the node: None where nothing is found, and while the
        last look is no more than a few seconds old. Takes up to a few times LOOK_S."""
        with self._lock:
            now = time.monotonic()
            if now < self._looked_at + LOOK_AGAIN_S:
                return None
            self._looked_at = now
        if self._credentials is None:
            return look_for_tls(self._target)
        why = look_at_tls(self._target, self._credentials)
        return None if why is None else f"no TLS connection to the node: {why}"

    def _current(self) -> _Line:
        pem = None if self._watched is None else self._watched.current()
        if pem is not self._line.pem:
            self._retired.add(self._line)
            self._line = self._open(pem)
            self._close_unused()
        return self._line

    def _close_unused(self) -> None:
        for line in [line for line in self._retired if not line.users]:
            self._retired.discard(line)
            line.channel.close()

    def _open(self, pem: Pem | None) -> _Line:
        options = channel_options(self._config)
        if pem is None:
            return _Line(grpc.insecure_channel(self._target, options), None)
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        return _Line(grpc.secure_channel(self._target, credentials, options), pem)


def _is_of_this_host(target: str) -> bool:
    host = target.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or target.startswith("unix:")


def _valid(pem: Pem) -> Pem:
    pem.require_valid("tls")
    return pem


def look_at_tls(target: str, credentials: Credentials) -> str | None:
    """Make a TLS connection as gRPC does, which does not tell why one fails: what is wrong, or None."""
    place = _place(target)
    if place is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(credentials.ca))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC is not that strict, and its refusal is looked for
        context.load_cert_chain(credentials.certificate, credentials.key, password=lambda: "")
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(place, timeout=LOOK_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=place[0]) as connection:
                    return _look_for_refusal(connection)
            except ssl.SSLCertVerificationError:
                raise
            except OSError:
                if _speaks_plain_text(place):
                    return PLAIN_TEXT_NODE
                raise
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of the node: {error.verify_message}"
    except ssl.SSLError as error:
        return (error.reason or str(error)).lower().replace("_", " ")
    except OSError:
        return None


def look_for_tls(target: str) -> str | None:
    """Whether a call in plain text has met a node that wants TLS: what is wrong, or None. Nothing is told to the node,
    or believed of it."""
    place = _place(target)
    if place is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(place, timeout=LOOK_S) as plain, context.wrap_socket(plain):
            return TLS_NODE
    except ssl.SSLError as error:
        # Up to TLS 1.2 who comes without a certificate is turned away in the middle of the handshake: an answer, too.
        return TLS_NODE if "ALERT" in (error.reason or "") else None
    except OSError:
        return None


def _place(target: str) -> tuple[str, int] | None:
    """Host and port of a target that is no more than these."""
    host, _, port = target.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    return (host, int(port)) if host and port.isdigit() and "/" not in host else None


def _speaks_plain_text(place: tuple[str, int]) -> bool:
    """Whether HTTP/2 without TLS is answered in kind: by SETTINGS."""
    try:
        with socket.create_connection(place, timeout=LOOK_S) as connection:
            connection.sendall(_HTTP2_HELLO)
            frame = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(frame) == _FRAME_HEADER_BYTES and frame[_FRAME_TYPE_OFFSET] == _SETTINGS


def _look_for_refusal(connection: ssl.SSLSocket) -> str | None:
    """With TLS 1.3 a server refuses a certificate after the handshake; one that takes it begins to speak HTTP/2."""
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until and select.select([connection], [], [], LOOK_S)[0]:
        try:
            return None if connection.recv(1) else "the node closed the connection: it does not take this certificate"
        except ssl.SSLWantReadError:
            continue
    return None
