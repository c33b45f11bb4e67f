"""How hurrayd and its mover put messages on their socket: a length of 4 bytes, little-endian, then the message."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections import deque
from typing import Final

from google.protobuf.message import DecodeError, Message

from hurray_wire.errors import ProtocolViolation

_LENGTH: Final = struct.Struct("<I")

FRAME_OVERHEAD_BYTES: Final = 1 << 20
"""What a frame may be longer than the longest message of a peer that it carries."""


def pack(message: Message) -> bytes:
    """A message as a frame."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader, message: Message, max_bytes: int) -> None:
    """Parse the next frame into `message`. Raises EOFError at the end, ProtocolViolation for what is none."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > max_bytes:
            raise _too_long(length, max_bytes)
        _parse(message, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None


def receive_frame(connection: socket.socket, message: Message, max_bytes: int) -> None:
    """Like `read_frame`, from a blocking socket."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > max_bytes:
        raise _too_long(length, max_bytes)
    _parse(message, _receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = connection.recv_into(view)
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError
        view = view[count:]
    return data


def _parse(message: Message, data: bytes | bytearray) -> None:
    try:
        message.ParseFromString(bytes(data))
    except DecodeError:
        raise ProtocolViolation("not a message", offered=f"{len(data)} bytes") from None


def _too_long(length: int, max_bytes: int) -> ProtocolViolation:
    return ProtocolViolation("frame too long", offered=length, required=f"<= {max_bytes}")


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
