"""The transports over TCP sockets, for host memory: one code in two modes.

`TlsTransport` ("tls") is for any network: TLS 1.3, both sides with a certificate. `TcpTransport` ("tcp") has neither
encryption nor integrity and is for trusted networks only. In both a connection carries nothing before the two sides
have proved to each other that they know both tokens, which their parameters bring over the authenticated control plane
(`_socket_handshake`).

Of two peers exactly one listens, and the other dials it: a side that listens never connects to an address that a peer
told it. Deadlines are looked at in `progress`; who sleeps on `fileno` without `park` wakes up now and then while
connections are being made.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import ssl
import struct
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

from hurray_wire.credentials import Credentials
from hurray_wire.errors import CapabilityMismatch, DataPlaneUnavailable, HurrayError, Misuse, ProtocolViolation
from hurray_wire.log import get_logger
from hurray_wire.transport._pacing import unpace
from hurray_wire.transport._socket_channel import Channel, PlainChannel, TlsChannel
from hurray_wire.transport._socket_endpoint import Flow, SocketEndpoint
from hurray_wire.transport._socket_frames import FRAMES_VERSION
from hurray_wire.transport._socket_handshake import TOKEN_BYTES, accept, dial, new_token, refused, token_id
from hurray_wire.transport._tls_credentials import identity_of, watch_contexts
from hurray_wire.transport.base import Transport, TransportParameters
from hurray_wire.transport.settings import check_settings

__all__ = ["EXPECTED_IDENTITY", "Credentials", "SocketConfig", "SocketEndpoint", "TcpTransport", "TlsTransport"]

_log = get_logger("hurray.transport")

EXPECTED_IDENTITY: Final = "expected_identity"
"""A setting that this side's control plane adds to a peer's parameters, in place of any that the peer stated: the
identity that the certificate of the data connection must have. A connection in plain mode has none and is refused."""

MAX_HALF_OPEN: Final = 64
"""Dialers that have not proved who they are. A further one takes the place of the oldest."""

_ACCEPTS_PER_STEP: Final = 16
_BACKLOG: Final = 128
_MAX_EVENTS: Final = 256
_MAX_ADDRESS_BYTES: Final = 128
_ADDRESS: Final = struct.Struct(f"<{TOKEN_BYTES}sH")


@dataclass(frozen=True, slots=True)
class SocketConfig:
    """How a socket transport runs on this node. Raises Misuse, naming the field, for a value that cannot work."""

    listen_host: str | None = None
    """Address or name of this host to listen at. None: this side dials, and its peers must listen."""

    listen_port: int = 0
    """0: any that is free."""

    advertised_host: str | None = None
    """Address by which peers reach this side, or a name of it, looked up here and once. None: `listen_host`."""

    connect_timeout_s: float = 5.0
    """From `connect` until the connection is bound; also how long a dialer may take to prove who it is."""

    user_timeout_s: float = 5.0
    """How long sent data may stay unacknowledged, and a silent peer unheard, before the connection counts as lost."""

    eager_max_bytes: int = 16 << 10
    """Longest message that goes without waiting for its receive. Equal on all nodes."""

    socket_buffer_bytes: int | None = None
    """Send and receive buffer of each socket in the kernel. None: as the kernel finds fit."""

    def __post_init__(self) -> None:
        _require(0 <= self.listen_port <= 65535, "listen_port", self.listen_port, "0 to 65535")
        listens = self.listen_host is not None
        for name in ("listen_port", "advertised_host"):
            _require(listens or not getattr(self, name), name, getattr(self, name), "unset where nothing listens")
        bounds: tuple[tuple[str, float, float], ...] = (
            ("connect_timeout_s", 0.1, 3600),
            ("user_timeout_s", 0.1, 3600),
            ("eager_max_bytes", 1, 256 << 10),
            ("socket_buffer_bytes", 16 << 10, 256 << 20),
        )
        for name, least, most in bounds:
            value = getattr(self, name)
            _require(value is None or least <= value <= most, name, value, f"{least} to {most}")


def _require(holds: bool, name: str, offered: object, required: str) -> None:
    if not holds:
        raise Misuse(
            f"{name} of a socket transport is {offered!r}; it must be {required}",
            field=f"socket.{name}",
            offered=offered,
            required=required,
        )


@dataclass(eq=False, slots=True)
class _Handshake:
    """A connection that is not bound yet. `endpoint` is there where this side dials."""

    channel: Channel
    steps: Generator[int, None, Any]
    deadline: float
    endpoint: SocketEndpoint | None = None
    wanted: int = 0


class _SocketTransport(Transport):
    """What both modes share."""

    def __init__(self, config: SocketConfig) -> None:
        self.refused_dialer_count = 0
        """Connections that came in and did not prove to be an expected peer's."""
        self._config = config
        self._token = new_token()
        self._closed = False
        self._due: deque[Callable[[], None]] = deque()
        self._endpoints: dict[SocketEndpoint, None] = {}
        self._waiting: dict[SocketEndpoint, tuple[float, str | None]] = {}
        self._handshakes: dict[_Handshake, None] = {}
        self._stirred: dict[SocketEndpoint, None] = {}
        self._unread: dict[SocketEndpoint, None] = {}
        self._blocked: set[SocketEndpoint] = set()
        self._descriptors: dict[SocketEndpoint, int] = {}
        self._sources: dict[int, SocketEndpoint | _Handshake] = {}
        self._expects_more = False
        self._next_deadline = float("inf")
        self._listener, self._host = _listen(config)
        self._epoll = select.epoll()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if self._listener is not None:
            self._epoll.register(self._listener, select.EPOLLIN)

    def parameters(self) -> TransportParameters:
        port = self._listener.getsockname()[1] if self._listener is not None else 0
        return TransportParameters(
            self.kind,
            _ADDRESS.pack(self._token, port) + self._host.encode(),
            {"frames": FRAMES_VERSION, "eager_max_bytes": str(self._config.eager_max_bytes)},
        )

    def check_peer(self, parameters: TransportParameters) -> None:
        stated = {name: value for name, value in parameters.settings.items() if name != EXPECTED_IDENTITY}
        check_settings(self.parameters(), replace(parameters, settings=stated))
        _, host, _ = _unpack_address(parameters.address)
        if bool(host) is (self._listener is not None):
            listens, dials = "an address to dial", "none"
            offered, required = (listens, dials) if host else (dials, listens)
            raise CapabilityMismatch(
                f"the peer has {offered}; it must have {required}: of two peers exactly one listens",
                field=f"{self.kind}.address",
                offered=offered,
                required=required,
            )

    def connect(
        self, peer: int, parameters: TransportParameters, on_lost: Callable[[HurrayError], None]
    ) -> SocketEndpoint:
        assert not self._closed
        token, host, port = _unpack_address(parameters.address)
        endpoint = SocketEndpoint(self, peer, token, on_lost, eager_max_bytes=self._config.eager_max_bytes)
        deadline = time.monotonic() + self._config.connect_timeout_s
        self._endpoints[endpoint] = None
        self._waiting[endpoint] = deadline, parameters.settings.get(EXPECTED_IDENTITY)
        self._next_deadline = min(self._next_deadline, deadline)
        if self._listener is not None:
            self._expects_more = True
        elif host:
            self._dial(endpoint, deadline, host, port)
        else:
            self.finish(partial(endpoint.lose, endpoint.gone("neither side listens")))
        return endpoint

    def progress(self) -> bool:
        assert not self._closed
        moved = self._poll()
        if self._expects_more:
            moved = True
            self._expects_more = False
            for handshake in [*self._handshakes]:
                if not handshake.wanted:
                    self._advance(handshake)
        for endpoint in [*self._unread]:
            moved |= self._read(endpoint)
        for endpoint in [*self._stirred]:
            moved |= self._write(endpoint)
        if time.monotonic() >= self._next_deadline:
            self._expire(time.monotonic())
        return self._fire() or moved

    def fileno(self) -> int:
        return self._epoll.fileno()

    def arm(self) -> bool:
        return not (self._due or self._stirred or self._unread or self._expects_more)

    def park(self, timeout_s: float | None) -> None:
        left_s = max(0.0, self._next_deadline - time.monotonic())
        if timeout_s is None or left_s < timeout_s:
            timeout_s = None if left_s == float("inf") else left_s
        super().park(timeout_s)

    def drain_unknown(self, is_known: Callable[[int], bool]) -> int:
        return sum(endpoint.drop_unknown(is_known) for endpoint in self._endpoints)

    def close(self) -> None:
        if self._closed:
            return
        for endpoint in [*self._endpoints]:
            endpoint.end(endpoint.gone("the transport was closed"), abort=False)
        for handshake in [*self._handshakes]:
            self._drop(handshake)
        while self._fire():
            pass
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
        os.close(self._spare)
        self._closed = True

    # --- for endpoints ----------------------------------------------------------------------------------------------

    def finish(self, call: Callable[[], None]) -> None:
        """Call it in `progress`."""
        self._due.append(call)

    def stir(self, endpoint: SocketEndpoint) -> None:
        """The endpoint has something to send."""
        if endpoint not in self._blocked and endpoint in self._descriptors:
            self._stirred[endpoint] = None

    def release(self, endpoint: SocketEndpoint, channel: Channel | None, *, abort: bool) -> None:
        """The endpoint has ended, and with it whatever connects it."""
        del self._endpoints[endpoint]
        self._waiting.pop(endpoint, None)
        self._stirred.pop(endpoint, None)
        self._unread.pop(endpoint, None)
        self._blocked.discard(endpoint)
        descriptor = self._descriptors.pop(endpoint, None)
        if descriptor is not None:
            self._forget_source(descriptor)
        if channel is not None:
            channel.close(abort=abort)
        for handshake in [entry for entry in self._handshakes if entry.endpoint is endpoint]:
            self._drop(handshake)

    # --- connections being made -------------------------------------------------------------------------------------

    @abstractmethod
    def _wrap(self, connection: socket.socket, *, accepts: bool) -> Channel:
        """The channel over a socket."""

    def _dial(self, endpoint: SocketEndpoint, deadline: float, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self.finish(partial(endpoint.lose, endpoint.gone(f"no socket: {error}")))
            return
        try:
            _set_options(connection, self._config)
            connection.setblocking(False)
            code = connection.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            unpace(connection)
            channel = self._wrap(connection, accepts=False)
        except OSError as error:
            connection.close()
            self.finish(partial(endpoint.lose, endpoint.gone(f"the peer cannot be reached: {error}")))
            return
        steps = dial(channel, self.kind, self._token, endpoint.peer_token)
        self._begin(_Handshake(channel, steps, deadline, endpoint))

    def _accept_all(self) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_PER_STEP):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse_with_spare()
                continue  # else the dialer has gone already
            try:
                _set_options(connection, self._config)
                unpace(connection)
                channel = self._wrap(connection, accepts=True)
            except OSError:
                connection.close()
                continue
            half_open = [handshake for handshake in self._handshakes if handshake.endpoint is None]
            if len(half_open) >= MAX_HALF_OPEN:
                self._refuse(half_open[0], "too many dialers")
            steps = accept(channel, self.kind, self._token, self._find_expected)
            self._begin(_Handshake(channel, steps, time.monotonic() + self._config.connect_timeout_s))

    def _refuse_with_spare(self) -> None:
        """Out of descriptors, a dialer that nobody accepts would keep the listener readable for ever."""
        assert self._listener is not None
        os.close(self._spare)
        with suppress(OSError):
            self._listener.accept()[0].close()
            self.refused_dialer_count += 1
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _find_expected(self, dialer_id: bytes) -> SocketEndpoint | None:
        for endpoint in self._waiting:
            if token_id(endpoint.peer_token) == dialer_id:
                return endpoint
        return None

    def _begin(self, handshake: _Handshake) -> None:
        self._handshakes[handshake] = None
        self._sources[handshake.channel.fileno()] = handshake
        self._epoll.register(handshake.channel.fileno(), 0)
        self._next_deadline = min(self._next_deadline, handshake.deadline)
        self._advance(handshake)

    def _advance(self, handshake: _Handshake) -> None:
        try:
            wanted = next(handshake.steps)
        except StopIteration as end:
            self._bind(handshake, handshake.endpoint or end.value)
        except (OSError, HurrayError) as error:
            self._fail(handshake, error)
        else:
            if wanted != handshake.wanted:
                handshake.wanted = wanted
                self._epoll.modify(handshake.channel.fileno(), wanted)

    def _bind(self, handshake: _Handshake, endpoint: SocketEndpoint) -> None:
        channel = handshake.channel
        if not endpoint.waiting:
            self._refuse(handshake, "its connection is there already, or was closed")
            return
        identity = identity_of(channel.peer_certificate()[1])
        _, expected = self._waiting[endpoint]
        if expected not in (None, identity):
            self._drop(handshake)
            endpoint.lose(refused(f"its certificate names {identity!r}, its control plane {expected!r}"))
            return
        del self._handshakes[handshake]
        del self._waiting[endpoint]
        descriptor = channel.fileno()
        self._sources[descriptor] = endpoint
        self._descriptors[endpoint] = descriptor
        self._epoll.modify(descriptor, select.EPOLLIN)
        endpoint.bind(channel, identity)
        self._unread[endpoint] = None  # what came behind the proof may be in this process already

    def _fail(self, handshake: _Handshake, error: OSError | HurrayError) -> None:
        endpoint = handshake.endpoint
        if endpoint is None:
            self._refuse(handshake, str(error))
        elif isinstance(error, HurrayError):
            endpoint.lose(error)
        elif isinstance(error, ssl.SSLCertVerificationError):
            endpoint.lose(refused(error.verify_message))
        else:
            endpoint.lose(endpoint.gone(f"the connection was not made: {error}"))

    def _refuse(self, handshake: _Handshake, why: str) -> None:
        self.refused_dialer_count += 1
        _log.info("dialer refused", kind=self.kind, why=why)
        self._drop(handshake)

    def _drop(self, handshake: _Handshake) -> None:
        del self._handshakes[handshake]
        self._forget_source(handshake.channel.fileno())
        handshake.steps.close()
        handshake.channel.close(abort=False)

    def _forget_source(self, descriptor: int) -> None:
        del self._sources[descriptor]
        self._epoll.unregister(descriptor)

    def _expire(self, now: float) -> None:
        for handshake in [entry for entry in self._handshakes if entry.endpoint is None and now >= entry.deadline]:
            self._refuse(handshake, "it took too long")
        for endpoint in [entry for entry, (deadline, _) in self._waiting.items() if now >= deadline]:
            endpoint.lose(endpoint.gone(f"no connection within {self._config.connect_timeout_s:g} s"))
        deadlines = [handshake.deadline for handshake in self._handshakes]
        deadlines += [deadline for deadline, _ in self._waiting.values()]
        self._next_deadline = min(deadlines, default=float("inf"))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _poll(self) -> bool:
        events = self._epoll.poll(0, _MAX_EVENTS)
        dialed = False
        for descriptor, mask in events:
            source = self._sources.get(descriptor)
            if source is None:
                dialed |= self._listener is not None and descriptor == self._listener.fileno()
            elif isinstance(source, SocketEndpoint):
                if mask & select.EPOLLOUT:
                    self._blocked.discard(source)
                    self._epoll.modify(descriptor, select.EPOLLIN)
                    self._stirred[source] = None
                if mask & ~select.EPOLLOUT:
                    self._read(source)
            elif source.wanted:
                self._advance(source)
            else:
                self._refuse(source, "it went away while it waited")
        if dialed:  # after the rest, whose descriptors a new connection may reuse
            self._accept_all()
        return bool(events)

    def _read(self, endpoint: SocketEndpoint) -> bool:
        try:
            moved, flow = endpoint.read()
        except (OSError, ProtocolViolation) as error:
            self._lose(endpoint, error)
            return True
        if flow is Flow.MORE:
            self._unread[endpoint] = None
        else:
            self._unread.pop(endpoint, None)
        return moved

    def _write(self, endpoint: SocketEndpoint) -> bool:
        try:
            moved, flow = endpoint.write()
        except OSError as error:
            self._lose(endpoint, error)
            return True
        if flow is not Flow.MORE:
            self._stirred.pop(endpoint, None)
        if flow is Flow.BLOCKED:
            self._blocked.add(endpoint)
            self._epoll.modify(self._descriptors[endpoint], select.EPOLLIN | select.EPOLLOUT)
        return moved

    def _lose(self, endpoint: SocketEndpoint, error: OSError | ProtocolViolation) -> None:
        gone = endpoint.gone(f"the connection was lost: {error}")
        endpoint.lose(error if isinstance(error, ProtocolViolation) else gone)

    def _fire(self) -> bool:
        count = len(self._due)
        for _ in range(count):
            self._due.popleft()()
        return count > 0


class TcpTransport(_SocketTransport):
    """Plain sockets, for trusted networks: whoever can read or change their traffic can read or change the data."""

    kind: ClassVar[str] = "tcp"

    def _wrap(self, connection: socket.socket, *, accepts: bool) -> Channel:  # noqa: ARG002 -- both sides are alike
        return PlainChannel(connection)


class TlsTransport(_SocketTransport):
    """TLS 1.3 with a certificate on both sides. Raises Misuse for credentials that cannot be used."""

    kind: ClassVar[str] = "tls"

    def __init__(self, config: SocketConfig, credentials: Credentials) -> None:
        self._credentials = watch_contexts(credentials)
        super().__init__(config)

    def _wrap(self, connection: socket.socket, *, accepts: bool) -> Channel:
        contexts = self._credentials.current()
        context = contexts.server if accepts else contexts.client
        return TlsChannel(connection, context, contexts.certificate, accepts=accepts)


def _listen(config: SocketConfig) -> tuple[socket.socket | None, str]:
    """The listening socket and the address to advertise; (None, "") for a side that dials."""
    if config.listen_host is None:
        return None, ""
    try:
        found = socket.getaddrinfo(
            config.listen_host, config.listen_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        name = config.advertised_host or str(address[0])
        host = str(socket.getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM)[0][4][0])
        any_address = ipaddress.ip_address(host).is_unspecified
        _require(not any_address, "advertised_host", config.advertised_host, "given where every address is listened at")
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise Misuse(
            f"the addresses of a socket transport cannot be used: {error}",
            field="socket.listen_host",
            offered=f"{config.listen_host}, advertised as {config.advertised_host}",
            required="names or addresses of this host",
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_options(listener, config)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise DataPlaneUnavailable(
            f"cannot listen at {config.listen_host}, port {config.listen_port}: {error}", stage="start"
        ) from error
    return listener, host


def _set_options(connection: socket.socket, config: SocketConfig) -> None:
    """A silent partition shows within `user_timeout_s` and a probe: on data that is not acknowledged, and when idle."""
    seconds = max(1, round(config.user_timeout_s / 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.user_timeout_s * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    if config.socket_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.socket_buffer_bytes)


def _unpack_address(address: bytes) -> tuple[bytes, str, int]:
    """Token, then port (u16, little-endian), then the IP address as text; port 0 and no address for a side that dials.

    Raises ProtocolViolation for anything else.
    """
    if _ADDRESS.size <= len(address) <= _MAX_ADDRESS_BYTES:
        token, port = _ADDRESS.unpack_from(address)
        host = address[_ADDRESS.size :]
        if not port and not host:
            return token, "", 0
        if port:
            with suppress(ValueError):
                return token, str(ipaddress.ip_address(host.decode("ascii"))), port
    raise ProtocolViolation(
        "the peer's address is malformed",
        field="socket.address",
        offered=f"{len(address)} bytes",
        required=f"a token of {TOKEN_BYTES} bytes, a port and an IP address",
    )
