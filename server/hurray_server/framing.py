"""How hurrayd and its mover put messages on their socket: a length of 4 bytes, little-endian, then the message."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from hurray_wire.errors import ProtocolViolation

_LENGTH: Final = struct.Struct("<I")

FRAME_OVERHEAD_BYTES: Final = 1 << 20
"""What a frame may be longer than the longest message of a peer that it carries."""

_READ_BYTES: Final = 256 << 10

MessageT = TypeVar("MessageT", bound=Message)


def pack(message: Message) -> bytes:
    """A message as a frame."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


class Frames(Generic[MessageT]):
    """Takes what comes on a socket apart into messages of one kind."""

    def __init__(self, kind: type[MessageT], max_bytes: int) -> None:
        self._kind = kind
        self._max_bytes = max_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """The messages that are complete with this. Raises ProtocolViolation for what is none."""
        held = self._held
        held += data
        while len(held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held)
            if length > self._max_bytes:
                raise ProtocolViolation("frame too long", offered=length, required=f"<= {self._max_bytes}")
            end = _LENGTH.size + length
            if len(held) < end:
                return
            frame = bytes(held[_LENGTH.size : end])
            del held[:end]
            try:
                message = self._kind.FromString(frame)
            except DecodeError:
                raise ProtocolViolation("not a message", offered=f"{length} bytes") from None
            yield message


def receive(connection: socket.socket, frames: Frames[MessageT]) -> Iterator[MessageT]:
    """All messages that come on a blocking socket, until it ends. Raises ProtocolViolation."""
    while True:
        try:
            data = connection.recv(_READ_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        yield from frames.feed(data)


class FrameConnection(asyncio.Protocol, Generic[MessageT]):
    """One end of the socket in an event loop. `take` is called with each message as it comes; what it raises as
    ProtocolViolation ends the connection.

    `ended` is done when no more comes: with a ProtocolViolation where that is why.
    """

    def __init__(self, frames: Frames[MessageT], take: Callable[[MessageT], None]) -> None:
        self._frames = frames
        self._take = take
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.ended: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()

    def send(self, message: Message) -> None:
        """Send or queue one message. An end of the connection is told by `ended`: it is ignored here."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def take_all(self, messages: Iterable[MessageT]) -> None:
        """Take these, as if they came now."""
        try:
            for message in messages:
                self._take(message)
        except ProtocolViolation as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            self.close()

    async def drain(self) -> None:
        """Wait until the other end has taken enough for more to be sent."""
        if not self._writable.is_set():
            await self._writable.wait()

    def close(self) -> None:
        """End the connection once what was sent is on its way."""
        if self._transport is not None:
            self._transport.close()

    # --- from the event loop ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.take_all(self._frames.feed(data))

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's
        """See asyncio.BaseProtocol."""
        self._writable.set()
        if not self.ended.done():
            self.ended.set_result(None)


class FrameSender:
    """Sends frames on a socket from any thread without ever blocking it.

    What the socket does not take at once is sent later by a thread of its own, in order.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._more = threading.Event()
        threading.Thread(target=self._run, name="hurray-frames", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send or queue one message. An end of the connection is the reader's to see: it is ignored here."""
        frame = pack(message)
        with self._lock:
            if not self._waiting:
                frame = frame[self._try(frame) :]
            if frame:
                self._waiting.append(frame)
                self._more.set()

    def _try(self, frame: bytes) -> int:
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _run(self) -> None:
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        while True:
            self._more.wait()
            writable.poll()
            with self._lock:
                frame = self._waiting.popleft()
                rest = frame[self._try(frame) :]
                if rest:
                    self._waiting.appendleft(rest)
                elif not self._waiting:
                    self._more.clear()
