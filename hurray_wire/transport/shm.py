"""The transport between processes of one host: messages over a Unix socket, bytes through shared memory.

One side listens at a path, the other dials the path of its own configuration; no path from a peer is ever opened. That
both are on one host is proved, not inferred: the boot ids that the control plane carries are equal, the connection
arrives, and over it memory that holds what only the right peer can know (`_shm_proof`).

Each direction of a connection has a ring: memory of the sender (`_shm_ring`), made when first needed, which the peer
may only read. `take_staging` lends it, so that a source gathers straight into it. The receiver copies out of it into
the buffer that was posted: what another process can write is read by that one copy and by nothing else. Between them
go frames (`_shm_frames`); `_shm_outgoing` and `_shm_incoming` say what follows from each.

Everything is anonymous but the listener's path: a killed process leaves no memory behind, and a name that its successor
takes over.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, Protocol

from hurray_wire.errors import (
    Cancelled,
    CapabilityMismatch,
    DataPlaneUnavailable,
    HurrayError,
    Misuse,
    PeerUnavailable,
)
from hurray_wire.limits import PAGE_BYTES, SHM_STAGING_BYTES
from hurray_wire.log import get_logger
from hurray_wire.transport import _shm_proof as proof
from hurray_wire.transport._shm_frames import (
    EAGER_MAX_BYTES,
    FRAME_BYTES,
    MAX_RING_BYTES,
    PACKET_MAX_BYTES,
    PROTOCOL,
    Frame,
    Kind,
    decode,
    violation,
)
from hurray_wire.transport._shm_incoming import Incoming
from hurray_wire.transport._shm_listener import Listener
from hurray_wire.transport._shm_outgoing import Outgoing
from hurray_wire.transport._shm_packets import Closed, Packet, PacketSocket
from hurray_wire.transport.base import Buffer, Completion, Endpoint, Transport, TransportParameters
from hurray_wire.transport.settings import check_settings
from hurray_wire.view import Shown, View

_log = get_logger("hurray.transport")

DEFAULT_PATH: Final = "/run/hurray/hurrayd.sock"

_MAX_PATH_BYTES: Final = 107
"""sockaddr_un, without its final zero."""

_MAX_GUESTS: Final = 64
"""Connections that have not yet said who they are; and as many again that have, and whose control plane is late."""

_MAX_UNSENT_BYTES: Final = 4 << 20
"""More than everything that an honest peer can make this side say while it reads nothing."""

_RINGS_MAX_BYTES: Final = 2 << 30
"""Of all rings, each of which is memory that is there. Those of further peers have two slots each, and are slower."""

_PACKETS_AT_ONCE: Final = 64
_COPY_AT_ONCE_BYTES: Final = 1 << 20
"""After so much of one connection, completions fire and the others have their turn."""


@dataclass(frozen=True, slots=True)
class ShmConfig:
    """How processes of one host meet. Raises Misuse, naming the field, for a value that cannot work."""

    path: str = DEFAULT_PATH
    """Where the listener's socket is, as this process sees it."""

    listens: bool = False
    """True for the one process that listens there; all others dial."""

    mode: int = 0o660
    """Permissions of the socket: who may connect. Whoever does must then prove to be a peer."""

    group: str | None = None
    """Name or number of the socket's group. None: the process's, or its folder's where that is setgid."""

    ring_bytes: int = 36 << 20
    """Memory towards each peer, made when it is first needed: more than the processor's caches hold, so that what the
    peer's core has read is no longer in its cache when it is written again."""

    staging_bytes: int = SHM_STAGING_BYTES
    """How much may be staged for each peer at once. Far more than this does not stay in the processor's cache."""

    slot_bytes: int = 1 << 20
    """Largest piece of a message that is not staged, and how much may be in the ring beyond `staging_bytes`: so that
    pieces always find a place."""

    def __post_init__(self) -> None:
        encoded = os.fsencode(self.path)
        usable = self.path.startswith("/") and b"\0" not in encoded and len(encoded) <= _MAX_PATH_BYTES
        _require(usable, "path", self.path, f"an absolute path of at most {_MAX_PATH_BYTES} bytes")
        _require(0 <= self.mode <= 0o777, "mode", self.mode, "0 to 0o777")
        for name, least, most in (
            ("slot_bytes", PAGE_BYTES, MAX_RING_BYTES // 2),
            ("staging_bytes", PAGE_BYTES, MAX_RING_BYTES // 2),
            ("ring_bytes", self.staging_bytes + self.slot_bytes, MAX_RING_BYTES),
        ):
            value = getattr(self, name)
            fits = least <= value <= most and value % PAGE_BYTES == 0
            _require(fits, name, value, f"{least} to {most}, a multiple of {PAGE_BYTES}")


def _require(holds: bool, name: str, offered: object, required: str) -> None:
    if not holds:
        raise Misuse(
            f"shm {name} is {offered!r}; it must be {required}",
            field=f"shm.{name}",
            offered=offered,
            required=required,
        )


class _Watcher(Protocol):
    """What has a descriptor that the transport polls."""

    def on_ready(self) -> None:
        """There is something to read, or room to write."""


class _Guest:
    """A connection that was accepted and does not belong to an endpoint yet."""

    def __init__(self, transport: ShmTransport, link: PacketSocket) -> None:
        self.link = link
        self.said: proof.Hello | None = None
        self._transport = transport
        self._nonce = proof.draw_nonce()

    def greet(self) -> bool:
        try:
            return self.link.send([proof.challenge(self._nonce)])
        except Closed:
            return False

    def on_ready(self) -> None:
        transport = self._transport
        try:
            packet = self.link.receive(transport._packet)
            if packet is None:
                return
            try:
                if self.said is not None:
                    raise violation("handshake", "a packet before Welcome", "none")
                self.said = proof.read_hello(packet, transport._identity, self._nonce)
            finally:
                packet.close()
        except (Closed, HurrayError) as error:
            transport._refuse(self, str(error) or "it went away")
        else:
            transport._seat(self)


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A frame that waits for room in the socket. `over` is called once, when it is sent or dropped."""

    frame: bytes
    payload: bytes
    descriptors: Sequence[int]
    over: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        return FRAME_BYTES + len(self.payload)

    def end(self) -> None:
        if self.over is not None:
            self.over()


class ShmEndpoint(Endpoint):
    """A connection of a ShmTransport. Made by `ShmTransport.connect`."""

    def __init__(
        self,
        transport: ShmTransport,
        peer: int,
        remote: proof.Identity,
        on_lost: Callable[[HurrayError], None],
    ) -> None:
        self.peer = peer
        self.peer_uid: int | None = None
        """Effective user of the peer's process as this one's user namespace has it (SO_PEERCRED); None before it is
        connected."""
        self._transport = transport
        self._remote = remote
        self._on_lost = on_lost
        self._link: PacketSocket | None = None
        self._nonces = b""
        self._proven = False
        self._ended_by: HurrayError | None = None
        self._unsent: deque[_Unsent] = deque()
        self._unsent_bytes = 0
        self._deaf = False
        config = transport._config
        self._outgoing = Outgoing(
            self._emit,
            transport._finish,
            take_ring=transport._take_ring,
            staging_bytes=config.staging_bytes,
            slot_bytes=config.slot_bytes,
        )
        self._incoming = Incoming(self._emit, transport._finish)

    @property
    def alive(self) -> bool:
        return self._ended_by is None

    @property
    def proven(self) -> bool:
        """True once the peer has proved to be the right one, on this host."""
        return self._proven

    def send(self, tag: int, buffer: Buffer, done: Completion) -> None:
        assert buffer.nbytes > 0
        if self.alive:
            self._outgoing.send(tag, buffer, done)
        else:
            self._transport._finish(done, self._gone("the connection is closed"))

    def receive(self, tag: int, buffer: Buffer, done: Completion) -> None:
        assert buffer.nbytes > 0
        self._take(tag, done, buffer=buffer)

    def discard(self, tag: int, done: Completion) -> None:
        self._take(tag, done)

    def send_view(self, tag: int, shown: Shown, done: Completion) -> None:
        if self.alive:
            self._outgoing.show(tag, shown, done)
        else:
            shown.pin.close()
            self._transport._finish(done, self._gone("the connection is closed"))

    def receive_view(self, tag: int, view: View, done: Completion) -> None:
        self._take(tag, done, view=view)

    def _take(self, tag: int, done: Completion, *, buffer: Buffer | None = None, view: View | None = None) -> None:
        if self.alive:
            self._incoming.receive(tag, done, buffer=buffer, view=view)
        else:
            self._transport._finish(done, self._gone("the connection is closed"))

    def forget(self, tag: int) -> None:
        self._incoming.forget(tag)

    def take_staging(self, nbytes: int) -> Buffer | None:
        return self._outgoing.take_staging(nbytes) if self.alive else None

    def return_staging(self, buffer: Buffer) -> None:
        if not self.alive:
            return
        try:
            self._outgoing.return_staging(buffer)
        except HurrayError as error:
            self._lose_soon(error)

    def close(self) -> None:
        self._end(Cancelled("the connection was closed here"))

    def abort(self) -> None:
        self._end(self._gone("the connection was aborted here"))

    def __repr__(self) -> str:
        state = ("proven" if self._proven else "connecting") if self.alive else "closed"
        return f"<ShmEndpoint peer={self.peer:#x} {state}>"

    def _gone(self, why: str) -> PeerUnavailable:
        return PeerUnavailable(why, stage="data_plane", peer=f"{self.peer:#x}")

    # --- connecting ----------------------------------------------------------------------------------------------

    def _dial(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(path)
            self._attach(PacketSocket(connection))
        except OSError as error:
            connection.close()
            self._lose_soon(self._gone(f"nobody can be reached at {path}: {error}"))

    def _attach(self, link: PacketSocket) -> None:
        self._link = link
        self.peer_uid = link.peer_uid
        self._transport._watch(link.fileno(), self)

    def _answer_challenge(self, packet: Packet) -> None:
        assert self._link is not None
        own, nonce = self._transport._identity, proof.draw_nonce()
        theirs = proof.read_challenge(packet)
        said, descriptor = proof.hello(own, self._remote, theirs, nonce)
        _say(self._link, said, descriptor)
        self._nonces = theirs + nonce

    def _adopt(self, guest: _Guest) -> None:
        """The listener's half of the end of the handshake. Raises Closed, ProtocolViolation, OSError."""
        assert guest.said is not None
        own = self._transport._identity
        proof.check_hello(guest.said, own, self._remote)
        said, descriptor = proof.welcome(own, self._remote, guest.said.nonces)
        _say(guest.link, said, descriptor)
        self._attach(guest.link)
        self._be_proven()

    def _be_proven(self) -> None:
        self._proven = True
        self._flush()

    # --- moving --------------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        try:
            self._flush()
            self._read()
        except Closed:
            self._lose(self._gone("the connection was lost" if self._proven else "the peer refused the handshake"))
        except HurrayError as error:
            self._lose(error.with_traceback(None))  # which would hold every frame below this one, and what they hold
        except OSError as error:
            self._lose(self._gone(f"the handshake failed: {error}"))

    def _read(self) -> None:
        copied_before = self._incoming.copied_bytes
        for _ in range(_PACKETS_AT_ONCE):
            packet = self._link.receive(self._transport._packet) if self._link is not None else None
            if packet is None:
                return
            try:
                self._handle(packet)
            finally:
                packet.close()
            if self._incoming.copied_bytes - copied_before >= _COPY_AT_ONCE_BYTES:
                return

    def _handle(self, packet: Packet) -> None:
        if self._proven:
            self._obey(packet)
        elif not self._nonces:
            self._answer_challenge(packet)
        else:
            proof.check_welcome(packet, self._transport._identity, self._remote, self._nonces)
            self._be_proven()

    def _obey(self, packet: Packet) -> None:
        frame = decode(packet.data)
        if frame.kind is not Kind.GRAINS and len(packet.descriptors) != (frame.kind is Kind.RING):
            raise violation("descriptors", len(packet.descriptors), f"what {frame.kind.name} has")
        match frame.kind:
            case Kind.EAGER | Kind.ANNOUNCE | Kind.VIEW | Kind.STAGED:
                if frame.kind is Kind.EAGER and frame.nbytes > EAGER_MAX_BYTES:
                    raise violation("nbytes", frame.nbytes, f"at most {EAGER_MAX_BYTES}")
                self._incoming.on_message(frame, packet.data[FRAME_BYTES:])
            case Kind.PIECE:
                self._incoming.on_piece(frame)
            case Kind.GRAINS:
                self._incoming.on_grains(frame, packet.descriptors)
            case Kind.RING:
                self._incoming.on_ring(frame.nbytes, *packet.descriptors)
            case Kind.PULL:
                self._outgoing.on_pull(frame.number, frame.nbytes)
            case Kind.RELEASE:
                self._outgoing.on_release(frame.offset)
            case Kind.CREDIT:
                self._outgoing.on_credit(frame.nbytes)

    def _emit(
        self,
        frame: Frame,
        payload: bytes = b"",
        descriptors: Sequence[int] = (),
        over: Callable[[], None] | None = None,
    ) -> None:
        unsent = _Unsent(frame.encode(), payload, descriptors, over)
        self._unsent.append(unsent)
        self._unsent_bytes += unsent.nbytes
        if self._unsent_bytes > _MAX_UNSENT_BYTES:
            self._lose_soon(violation("peer", "not reading", "reading what it makes this side say"))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        if not self._proven or self._link is None:
            return
        blocked = False
        while self._unsent and not blocked:
            unsent = self._unsent[0]
            parts = [unsent.frame, unsent.payload] if unsent.payload else [unsent.frame]
            try:
                blocked = not self._deaf and not self._link.send(parts, unsent.descriptors)
            except Closed:
                self._deaf = True  # what it sent before is still to be read; then reading tells of the end
            except PeerUnavailable as error:
                self._deaf = True
                self._lose_soon(error)
            if not blocked:
                self._unsent.popleft()
                self._unsent_bytes -= unsent.nbytes
                unsent.end()
        self._transport._watch_room(self._link.fileno(), wanted=blocked)

    # --- ending --------------------------------------------------------------------------------------------------

    def _lose_soon(self, error: HurrayError) -> None:
        """In the next progress: nothing completes inside the call that caused it."""
        self._transport._losing.append((self, error))

    def _lose(self, error: HurrayError) -> None:
        if self.alive:
            self._end(error)
            self._transport._due.append(partial(self._on_lost, error))

    def _end(self, error: HurrayError) -> None:
        if not self.alive:
            return
        self._ended_by = error
        self._outgoing.end(error)
        self._incoming.end(error)
        for unsent in self._unsent:
            unsent.end()
        self._unsent.clear()
        if self._link is not None:
            self._transport._unwatch(self._link.fileno())
            self._link.close()
            self._link = None
        self._transport._remove(self)


class ShmTransport(Transport):
    """The processes of this host that share one socket path, for one thread."""

    kind: ClassVar[str] = "shm"
    optional: ClassVar[bool] = True

    def __init__(self, config: ShmConfig) -> None:
        """Raises DataPlaneUnavailable where it cannot listen at the path, or cannot tell which host this is."""
        self._config = config
        self._identity = proof.draw_identity(listens=config.listens)
        self._boot_id = _read_boot_id()
        self._closed = False
        self._packet = bytearray(PACKET_MAX_BYTES)
        self._endpoints: dict[ShmEndpoint, None] = {}
        self._rings_bytes = 0
        self._unclaimed: dict[_Guest, None] = {}
        self._seated: dict[bytes, _Guest] = {}
        self._due: deque[Callable[[], None]] = deque()
        self._losing: deque[tuple[ShmEndpoint, HurrayError]] = deque()
        self._watched: dict[int, _Watcher] = {}
        self._waits_for_room: set[int] = set()
        self._listener = Listener(config.path, config.mode, config.group) if config.listens else None
        self._poll = select.epoll()
        if self._listener is not None:
            self._watch(self._listener.fileno(), self)

    def parameters(self) -> TransportParameters:
        """Its address is a secret between this side and its peers."""
        return TransportParameters(self.kind, self._identity.pack(), {"boot_id": self._boot_id, "protocol": PROTOCOL})

    def check_peer(self, parameters: TransportParameters) -> None:
        check_settings(self.parameters(), parameters)
        theirs = proof.read_identity(parameters.address)
        if theirs.listens == self._identity.listens:
            offered, required = proof.role(theirs.listens), proof.role(not self._identity.listens)
            raise CapabilityMismatch(
                f"the peer {offered}, as this side does; of two that share memory one listens and one dials",
                field="shm.role",
                offered=offered,
                required=required,
            )

    def connect(
        self, peer: int, parameters: TransportParameters, on_lost: Callable[[HurrayError], None]
    ) -> ShmEndpoint:
        assert not self._closed
        endpoint = ShmEndpoint(self, peer, proof.read_identity(parameters.address), on_lost)
        self._endpoints[endpoint] = None
        if self._config.listens:
            self._introduce()
        else:
            endpoint._dial(self._config.path)
        return endpoint

    def progress(self) -> bool:
        assert not self._closed
        ready = self._poll.poll(0)
        for descriptor, _ in ready:
            watcher = self._watched.get(descriptor)
            if watcher is not None:
                watcher.on_ready()
        while self._losing:
            endpoint, error = self._losing.popleft()
            endpoint._lose(error)
        return self._fire() or bool(ready)

    def fileno(self) -> int:
        return self._poll.fileno()

    def arm(self) -> bool:
        return not (self._due or self._losing)

    def drain_unknown(self, is_known: Callable[[int], bool]) -> int:
        return sum(endpoint._incoming.drain_unknown(is_known) for endpoint in self._endpoints)

    def close(self) -> None:
        if self._closed:
            return
        for endpoint in [*self._endpoints]:
            endpoint._end(endpoint._gone("the transport was closed"))
        for guest in [*self._unclaimed, *self._seated.values()]:
            self._drop_guest(guest)
        if self._listener is not None:
            self._listener.close()
        self._losing.clear()
        while self._due:
            self._fire()
        self._closed = True
        self._poll.close()

    # --- guests --------------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """Somebody dials."""
        assert self._listener is not None
        for _ in range(_PACKETS_AT_ONCE):
            connection = self._listener.accept()
            if connection is None:
                return
            guest = _Guest(self, PacketSocket(connection))
            self._unclaimed[guest] = None
            self._watch(guest.link.fileno(), guest)
            if not guest.greet():
                self._drop_guest(guest)
            elif len(self._unclaimed) > _MAX_GUESTS:
                self._refuse(next(iter(self._unclaimed)), "too many dialers")

    def _seat(self, guest: _Guest) -> None:
        """It has said who it is; an earlier connection of the same dialer is out of date."""
        assert guest.said is not None
        del self._unclaimed[guest]
        earlier = self._seated.get(guest.said.dialer)
        if earlier is not None:
            self._drop_guest(earlier)
        elif len(self._seated) >= _MAX_GUESTS:
            self._refuse(next(iter(self._seated.values())), "too many dialers")
        self._seated[guest.said.dialer] = guest
        self._introduce()

    def _introduce(self) -> None:
        """Bring endpoints that wait together with guests that are theirs."""
        for endpoint in [*self._endpoints]:
            guest = self._seated.get(endpoint._remote.name) if endpoint._link is None else None
            if guest is None:
                continue
            del self._seated[endpoint._remote.name]
            self._unwatch(guest.link.fileno())
            try:
                endpoint._adopt(guest)
            except (Closed, HurrayError, OSError) as error:
                _log.info("dialer refused", kind=self.kind, why=str(error) or "it went away")
                guest.link.close()

    def _refuse(self, guest: _Guest, why: str) -> None:
        _log.info("dialer refused", kind=self.kind, why=why)
        self._drop_guest(guest)

    def _drop_guest(self, guest: _Guest) -> None:
        self._unclaimed.pop(guest, None)
        if guest.said is not None and self._seated.get(guest.said.dialer) is guest:
            del self._seated[guest.said.dialer]
        self._unwatch(guest.link.fileno())
        guest.link.close()

    # --- polling and completing ------------------------------------------------------------------------------------

    def _watch(self, descriptor: int, watcher: _Watcher) -> None:
        self._watched[descriptor] = watcher
        self._poll.register(descriptor, select.EPOLLIN)

    def _watch_room(self, descriptor: int, *, wanted: bool) -> None:
        if wanted == (descriptor in self._waits_for_room):
            return
        (self._waits_for_room.add if wanted else self._waits_for_room.discard)(descriptor)
        self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def _unwatch(self, descriptor: int) -> None:
        del self._watched[descriptor]
        self._waits_for_room.discard(descriptor)
        self._poll.unregister(descriptor)

    def _take_ring(self) -> int:
        """Bytes for one more ring."""
        nbytes = self._config.ring_bytes
        if self._rings_bytes + nbytes > _RINGS_MAX_BYTES:
            nbytes = min(nbytes, 2 * self._config.slot_bytes)
        self._rings_bytes += nbytes
        return nbytes

    def _remove(self, endpoint: ShmEndpoint) -> None:
        self._endpoints.pop(endpoint, None)
        self._rings_bytes -= endpoint._outgoing.ring_bytes

    def _finish(self, done: Completion, error: HurrayError | None) -> None:
        self._due.append(partial(done, error))

    def _fire(self) -> bool:
        count = len(self._due)
        for _ in range(count):
            self._due.popleft()()
        return count > 0


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise DataPlaneUnavailable(f"the boot id of this host cannot be read: {error}", stage="start") from error


def _say(link: PacketSocket, said: bytes, descriptor: int) -> None:
    """A word of the handshake. Raises Closed also where there is no room for it: it is the first on its way."""
    try:
        if not link.send([said], (descriptor,)):
            raise Closed
    finally:
        os.close(descriptor)
