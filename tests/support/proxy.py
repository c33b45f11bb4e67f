"""A proxy between two processes that harms what passes, at points that the bytes themselves determine.

    with Proxy("127.0.0.1:7411", framing=Http2) as proxy:
        proxy.at(passed(UP, 4096), cut)                                     # after 4096 bytes of who dialled
        proxy.at(message(DOWN, pb.PutResponse, "target.accept"), silence(DOWN))  # instead of the first Accept
        proxy.do(cut)                                                       # now

One thread, no sleeps: what happens depends on the bytes alone. It forwards TCP connections and, with `framing=Packets`,
Unix sockets that carry packets with file descriptors. Connections made after a fault was carried out are forwarded
whole, unless another fault waits for them.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

from google.protobuf.message import DecodeError

READ_BYTES = 1 << 16
MAX_DESCRIPTORS = 16
MAX_WAITING_BYTES = 1 << 20
"""Of one direction: more is not read before some of it is gone, so that a slow receiver slows the sender."""


class Direction(Enum):
    """UP: from who dialled to who listens. DOWN: back."""

    UP = "up"
    DOWN = "down"


UP, DOWN = Direction.UP, Direction.DOWN


@dataclass(eq=False)
class Piece:
    """What passes at once. `messages`: gRPC messages that it ends, or frames that it begins."""

    data: bytearray
    messages: list[Any] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def drop(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


class Framing(Protocol):
    """Cuts what arrives from one side into pieces."""

    def feed(self, data: bytes) -> Iterable[Piece]: ...


class Raw:
    """Bytes without meaning."""

    def feed(self, data: bytes) -> Iterable[Piece]:
        yield Piece(bytearray(data))


class Http2:
    """gRPC: a piece is an HTTP/2 frame, a message the bytes of a protobuf message."""

    _PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    _DATA = 0

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._streams: dict[int, bytearray] = {}

    def feed(self, data: bytes) -> Iterable[Piece]:
        self._buffer += data
        while (size := self._next_bytes()) and len(self._buffer) >= size:
            frame, self._buffer = self._buffer[:size], self._buffer[size:]
            yield Piece(frame, self._messages(frame))

    def _next_bytes(self) -> int:
        if self._buffer[:3] == self._PREFACE[:3]:
            return len(self._PREFACE)
        return 9 + int.from_bytes(self._buffer[:3], "big") if len(self._buffer) >= 9 else 0

    def _messages(self, frame: bytearray) -> list[bytes]:
        if frame[:3] == self._PREFACE[:3] or frame[3] != self._DATA:
            return []
        body = self._streams.setdefault(int.from_bytes(frame[5:9], "big") & 0x7FFFFFFF, bytearray())
        body += frame[9:]
        found = []
        while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5], "big")):
            found.append(bytes(body[5:end]))
            del body[:end]
        return found


class TcpFrames:
    """The socket transport in plain mode: a piece is a frame's header or a part of a body, a message its kind."""

    _HEADER = struct.Struct("<QQQ")
    _WITH_BODY = (1, 4)

    def __init__(self, handshake_bytes: int) -> None:
        self._buffer = bytearray()
        self._body_bytes = handshake_bytes

    def feed(self, data: bytes) -> Iterable[Piece]:
        self._buffer += data
        while self._buffer:
            if self._body_bytes:
                part, self._buffer = self._buffer[: self._body_bytes], self._buffer[self._body_bytes :]
                self._body_bytes -= len(part)
                yield Piece(part)
            elif len(self._buffer) < self._HEADER.size:
                return
            else:
                header, self._buffer = self._buffer[: self._HEADER.size], self._buffer[self._HEADER.size :]
                kind, _, length = self._HEADER.unpack(header)
                self._body_bytes = length if kind in self._WITH_BODY else 0
                yield Piece(header, [kind])


class Packets:
    """Shared memory's Unix socket: a piece is a packet, a message its first byte."""

    def feed(self, data: bytes) -> Iterable[Piece]:
        yield Piece(bytearray(data), [data[0]])


# --- when -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Trigger:
    """A point of what passes. `weigh`: how much of the way a piece is. `divides`: the point may lie inside a piece.
    `before`: the fault meets the piece that completes the way."""

    direction: Direction
    left: int
    weigh: Callable[[Piece], int]
    divides: bool = False
    before: bool = True


def passed(direction: Direction, count_bytes: int) -> Trigger:
    """As soon as exactly so many bytes have passed in this direction."""
    return Trigger(direction, count_bytes, lambda piece: len(piece.data), divides=True, before=False)


def message(direction: Direction, kind: type, path: str, number: int = 1, *, before: bool = True) -> Trigger:
    """Where the `number`-th gRPC message ends that parses as `kind` and has the field `path`; or right after it."""

    def weigh(piece: Piece) -> int:
        return sum(_has(kind, path, data) for data in piece.messages)

    return Trigger(direction, number, weigh, before=before)


def frame(direction: Direction, kind: int, number: int = 1, *, before: bool = True) -> Trigger:
    """At the `number`-th frame or packet of a kind; or right after it."""
    return Trigger(direction, number, lambda piece: piece.messages.count(kind), before=before)


def _has(kind: Any, path: str, data: bytes) -> bool:
    try:
        found = kind.FromString(data)
    except DecodeError:
        return False
    for name in path.split("."):
        if not found.HasField(name):
            return False
        found = getattr(found, name)
    return True


# --- what -------------------------------------------------------------------------------------------------------------


class Mode(Enum):
    """What becomes of the bytes of a direction. DROP reads and forgets them, HOLD lets them wait at their sender."""

    FORWARD = "forward"
    DROP = "drop"
    HOLD = "hold"


Fault = Callable[["Link", Piece | None], None]


def cut(link: Link, _: Piece | None = None) -> None:
    """Both sides are told that the other has ended."""
    link.close()


def reset(link: Link, _: Piece | None = None) -> None:
    """Both sides get a reset."""
    link.close(reset=True)


def silence(*directions: Direction) -> Fault:
    """Nothing passes any more; the sender notices nothing."""

    def fault(link: Link, _: Piece | None = None) -> None:
        for direction in directions:
            link.lanes[direction].mode = Mode.DROP

    return fault


def hold(*directions: Direction) -> Fault:
    """Nothing is read any more: the sender's buffers fill."""

    def fault(link: Link, _: Piece | None = None) -> None:
        for direction in directions:
            link.lanes[direction].mode = Mode.HOLD

    return fault


def release(link: Link, _: Piece | None = None) -> None:
    """What was held or slowed goes on; what was dropped is gone."""
    for lane in link.lanes.values():
        lane.mode, lane.step_bytes, lane.pause_s = Mode.FORWARD, READ_BYTES, 0.0


def half_open(gone: Direction) -> Fault:
    """The side that sends in this direction has no connection any more, the other one still has it."""

    def fault(link: Link, _: Piece | None = None) -> None:
        lane, back = link.lanes[gone], link.lanes[_BACK[gone]]
        lane.mode = back.mode = Mode.DROP
        lane.close_source()

    return fault


def truncate(direction: Direction) -> Fault:
    """The rest of this direction is missing, and its end is there."""

    def fault(link: Link, _: Piece | None = None) -> None:
        link.lanes[direction].end()

    return fault


def drip(direction: Direction, step_bytes: int, pause_s: float) -> Fault:
    """Few bytes at a time."""

    def fault(link: Link, _: Piece | None = None) -> None:
        lane = link.lanes[direction]
        lane.step_bytes, lane.pause_s = step_bytes, pause_s

    return fault


def delay(direction: Direction, seconds: float) -> Fault:
    """What comes next waits for so long, once."""

    def fault(link: Link, _: Piece | None = None) -> None:
        link.lanes[direction].resumes_s = time.monotonic() + seconds

    return fault


def flip_bit(offset: int = -1) -> Fault:
    """One bit of the piece at the trigger is wrong."""

    def fault(_: Link, piece: Piece | None) -> None:
        assert piece is not None
        piece.data[offset] ^= 1

    return fault


def shorten(size: int) -> Fault:
    """The piece at the trigger has only so many bytes."""

    def fault(_: Link, piece: Piece | None) -> None:
        assert piece is not None
        del piece.data[size:]

    return fault


_BACK = {UP: DOWN, DOWN: UP}


# --- connections ------------------------------------------------------------------------------------------------------


class Lane:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, framing: Framing) -> None:
        self.source, self.target, self.framing = source, target, framing
        self.mode = Mode.FORWARD
        self.step_bytes, self.pause_s = READ_BYTES, 0.0
        self.resumes_s = 0.0
        self.waiting: deque[Piece] = deque()
        self.is_packets = source.type == socket.SOCK_SEQPACKET
        self.source_ended = False
        self.target_ended = False

    def read(self) -> bytes | None:
        """What has arrived; None at the end. Descriptors are kept with it."""
        self.came_with: list[int] = []
        try:
            if not self.is_packets:
                return self.source.recv(READ_BYTES) or None
            data, ancillary, _, _ = self.source.recvmsg(READ_BYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
        except BlockingIOError:
            return b""
        except OSError:
            return None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.came_with += array.array("i", content[: len(content) // 4 * 4])
        return data or None

    def put(self, piece: Piece) -> None:
        if self.mode is Mode.DROP or self.target_ended:
            piece.drop()
        else:
            self.waiting.append(piece)

    def write(self) -> None:
        """Send what may be sent now."""
        while self.waiting and self.mode is not Mode.HOLD and time.monotonic() >= self.resumes_s:
            piece = self.waiting[0]
            try:
                sent = self._send(piece)
            except BlockingIOError:
                return
            except OSError:
                self.drop_waiting()
                return
            del piece.data[:sent]
            if not piece.data:
                self.waiting.popleft().drop()
            if self.pause_s:
                self.resumes_s = time.monotonic() + self.pause_s
        if self.source_ended and not self.waiting and self.mode is Mode.FORWARD:
            self.end()

    def _send(self, piece: Piece) -> int:
        if not self.is_packets:
            return self.target.send(piece.data[: self.step_bytes], socket.MSG_NOSIGNAL)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", piece.descriptors))]
        return self.target.sendmsg([piece.data], rights if piece.descriptors else [], socket.MSG_NOSIGNAL)

    def end(self) -> None:
        """The target is told that there is nothing more."""
        self.drop_waiting()
        if not self.target_ended:
            self.target_ended = True
            with suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)

    def close_source(self) -> None:
        self.source_ended = True
        self.source.close()

    def drop_waiting(self) -> None:
        while self.waiting:
            self.waiting.popleft().drop()

    @property
    def wants_read(self) -> bool:
        full = sum(len(piece.data) for piece in self.waiting) >= MAX_WAITING_BYTES
        return not self.source_ended and self.mode is not Mode.HOLD and not full

    @property
    def wants_write(self) -> bool:
        return bool(self.waiting) and self.mode is not Mode.HOLD and not self.target_ended


class Link:
    """One connection, in both directions."""

    def __init__(self, near: socket.socket, far: socket.socket, framings: dict[Direction, Framing]) -> None:
        self.lanes = {UP: Lane(near, far, framings[UP]), DOWN: Lane(far, near, framings[DOWN])}
        self.sockets = (near, far)
        self.closed = False
        for part in self.sockets:
            part.setblocking(False)
            if part.family != socket.AF_UNIX:
                part.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self, *, reset: bool = False) -> None:
        self.closed = True
        for lane in self.lanes.values():
            lane.drop_waiting()
        for part in self.sockets:
            with suppress(OSError):
                if reset:
                    part.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                part.close()


class Proxy:
    """See the module. `target`: "host:port", or the path of a Unix socket; then `path` is where this one listens."""

    def __init__(
        self, target: str, *, path: str | None = None, framing: Callable[[Direction], Framing] | type = Raw
    ) -> None:
        self.target = target
        self._make_framing = framing
        self._links: list[Link] = []
        self._triggers: list[tuple[Trigger, Fault, threading.Event]] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._stopped = False
        self.connection_count = 0
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(path)
            self._listener.listen(64)
            self.address = path
        self._listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def at(self, trigger: Trigger, fault: Fault) -> threading.Event:
        """Carry out a fault on the connection that meets the trigger first, once; the event says that it happened."""
        fired = threading.Event()
        self._call(lambda: self._triggers.append((trigger, fault, fired)))
        return fired

    def do(self, fault: Fault) -> None:
        """Carry out a fault on every connection that is open, now."""
        self._call(lambda: [fault(link, None) for link in self._links if not link.closed])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call(lambda: setattr(self, "_stopped", True))
        self._thread.join()
        os.close(self._wake)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _call(self, command: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._commands.append(run)
        os.eventfd_write(self._wake, 1)
        assert done.wait(10)

    def _run(self) -> None:
        while not self._stopped:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                selector.register(self._listener, selectors.EVENT_READ)
                self._register(selector)
                selector.select(self._timeout_s())
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while self._commands:
                self._commands.popleft()()
            self._accept()
            for link in self._links:
                self._serve(link)
            self._links = [link for link in self._links if not link.closed]
        for link in self._links:
            link.close()
        self._listener.close()
        if self._listener.family == socket.AF_UNIX:
            os.unlink(self.address)

    def _register(self, selector: selectors.BaseSelector) -> None:
        wanted: dict[socket.socket, int] = {}
        now_s = time.monotonic()
        for link in self._links:
            for lane in link.lanes.values():
                if lane.wants_read:
                    wanted[lane.source] = wanted.get(lane.source, 0) | selectors.EVENT_READ
                if lane.wants_write and lane.resumes_s <= now_s:
                    wanted[lane.target] = wanted.get(lane.target, 0) | selectors.EVENT_WRITE
        for part, events in wanted.items():
            if part.fileno() >= 0:
                selector.register(part, events)

    def _timeout_s(self) -> float | None:
        lanes = [lane for link in self._links for lane in link.lanes.values() if lane.wants_write]
        times = [lane.resumes_s for lane in lanes if lane.resumes_s > time.monotonic()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except BlockingIOError:
            return
        far = socket.socket(near.family, near.type)
        try:
            if near.family == socket.AF_UNIX:
                far.connect(self.target)
            else:
                host, _, port = self.target.rpartition(":")
                far.connect((host, int(port)))
        except OSError:
            near.close()
            far.close()
            return
        self.connection_count += 1
        make = self._make_framing
        framings = {way: make() if isinstance(make, type) else make(way) for way in Direction}
        self._links.append(Link(near, far, framings))

    def _serve(self, link: Link) -> None:
        for direction, lane in link.lanes.items():
            if not link.closed and lane.wants_read and (data := lane.read()) != b"":
                if data is None:
                    lane.source_ended = True
                else:
                    self._take(link, direction, data)
            if not link.closed:
                lane.write()
        if not link.closed and all(lane.target_ended for lane in link.lanes.values()):
            link.close()

    def _take(self, link: Link, direction: Direction, data: bytes) -> None:
        lane = link.lanes[direction]
        came_with = lane.came_with
        for piece in lane.framing.feed(data):
            piece.descriptors, came_with = came_with, []
            if link.closed:
                piece.drop()
            else:
                self._meet(link, direction, piece)

    def _meet(self, link: Link, direction: Direction, piece: Piece) -> None:
        """Pass one piece by all triggers: those that it reaches are carried out, before or after it is put in line."""
        lane, after = link.lanes[direction], []
        for entry in list(self._triggers):
            trigger, fault, fired = entry
            if trigger.direction is not direction:
                continue
            weight = trigger.weigh(piece)
            if weight < trigger.left or not weight:
                trigger.left -= weight
                continue
            self._triggers.remove(entry)
            if trigger.divides and weight > trigger.left:
                first = Piece(piece.data[: trigger.left], descriptors=piece.descriptors)
                piece = Piece(piece.data[trigger.left :], piece.messages)
                lane.put(first)
                lane.write()
                fault(link, piece)
                fired.set()
            elif trigger.before:
                fault(link, piece)
                fired.set()
            else:
                after.append((fault, fired))
            if link.closed:
                piece.drop()
                return
        lane.put(piece)
        if after:
            lane.write()
        for fault, fired in after:
            fault(link, None)
            fired.set()
