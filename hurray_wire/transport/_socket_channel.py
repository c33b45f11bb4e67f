"""A connected TCP socket as a stream that never blocks, in plain and in TLS.

TLS runs over memory, not over the socket: one `recv` brings many records and one `send` takes many, where OpenSSL on a
socket makes two system calls per record of 16 KiB.

Errors of the connection, its end included, are raised as OSError (which ssl.SSLError is).
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, cast

_RECORD_BYTES: Final = 16 << 10
"""Plaintext of one TLS record: the most that OpenSSL reads or writes at a time."""

_TLS_STEP_BYTES: Final = 128 << 10
"""How much is encrypted before it is sent, and received before it is decrypted."""


_BATCH_BYTES: Final = 512 << 10
"""Received at a time, where the kernel's buffer has the room; it polls as readable before it is full."""


class Channel(ABC):
    """One connection. The socket is given over, and closed by `close`."""

    local_certificate: bytes = b""
    """Certificate that this side shows (DER); empty in plain mode."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._batch_bytes = 1
        self.blocked = False
        """Whether the socket took less than it was given last: more only once it polls as writable."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def check_connected(self) -> None:
        """Raise why a connect that was under way has failed."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, f"connecting failed with errno {code}")

    @abstractmethod
    def handshake(self) -> bool:
        """Go on with the channel's own handshake. True: it is done."""

    @abstractmethod
    def receive_into(self, view: memoryview) -> int:
        """Receive up to len(view) bytes, at least 1; how many, 0 for none now."""

    @abstractmethod
    def send(self, views: Sequence[memoryview]) -> int:
        """Give bytes from the front of `views` to the kernel; how many, 0 for none now. What was not taken leads the
        next call, too."""

    @property
    def unsent(self) -> bool:
        """True while bytes of the channel's own, or encrypted ones, still wait in this process: call `send` again."""
        return False

    @property
    def interest(self) -> int:
        """Events to poll for before the next step of the handshake."""
        return select.EPOLLIN | select.EPOLLOUT if self.unsent else select.EPOLLIN

    def expect(self, nbytes: int) -> None:
        """So many bytes are sure to come next: in the midst of many, do not poll as readable for each few."""
        batch_bytes = _BATCH_BYTES if nbytes >= _BATCH_BYTES else 1
        if batch_bytes != self._batch_bytes:
            self._batch_bytes = batch_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, batch_bytes)

    def peer_certificate(self) -> tuple[bytes, dict[str, object]]:
        """The peer's verified certificate, DER and decoded; empty in plain mode."""
        return b"", {}

    def close(self, *, abort: bool) -> None:
        """Close the socket; `abort` discards what the kernel has not sent yet."""
        if abort:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _receive(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            return 0
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        return count

    def _send(self, views: Sequence[memoryview]) -> int:
        try:
            count = self._socket.sendmsg(views, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            count = 0
        self.blocked = count < sum(map(len, views))
        return count


class PlainChannel(Channel):
    """Bytes as they are: straight from the caller's memory and straight into it."""

    def handshake(self) -> bool:
        return True

    def receive_into(self, view: memoryview) -> int:
        return self._receive(view)

    def send(self, views: Sequence[memoryview]) -> int:
        return self._send(views)


class TlsChannel(Channel):
    """TLS over the socket."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, certificate: bytes, *, accepts: bool):
        super().__init__(connection)
        self.local_certificate = certificate
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._arrived = memoryview(bytearray(_TLS_STEP_BYTES))
        self._encrypted = memoryview(b"")
        self._taken = 0

    def handshake(self) -> bool:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    return False
            except ssl.SSLError:
                self._flush()  # the alert that tells the peer why
                raise
            else:
                self._flush()
                return True

    def receive_into(self, view: memoryview) -> int:
        total = 0
        while total < len(view):
            try:
                # With a buffer, which may be any writable one, it returns a count: more than its types tell.
                count = cast("int", self._tls.read(len(view) - total, cast("bytearray", view[total:])))
            except ssl.SSLWantReadError:
                try:
                    if self._fill():
                        continue
                except OSError:
                    if not total:  # what came before the end counts; the next call finds the end again
                        raise
                break
            if count == 0:
                raise ConnectionResetError("the peer closed the connection")
            total += count
        return total

    def send(self, views: Sequence[memoryview]) -> int:
        if not self._taken:
            self._encrypt(views)
        if not self._flush():
            return 0
        taken, self._taken = self._taken, 0
        return taken

    @property
    def unsent(self) -> bool:
        return bool(self._encrypted) or bool(self._outgoing.pending)

    def peer_certificate(self) -> tuple[bytes, dict[str, object]]:
        return self._tls.getpeercert(binary_form=True) or b"", dict(self._tls.getpeercert() or {})

    def _encrypt(self, views: Sequence[memoryview]) -> None:
        for view in views:
            start = 0
            while start < len(view) and self._taken < _TLS_STEP_BYTES:
                count = self._tls.write(view[start : start + _RECORD_BYTES])
                start += count
                self._taken += count

    def _fill(self) -> int:
        count = self._receive(self._arrived)
        if count:
            self._incoming.write(self._arrived[:count])
        return count

    def _flush(self) -> bool:
        """Send what is encrypted; True if all of it went."""
        while self.unsent:
            if not self._encrypted:
                self._encrypted = memoryview(self._outgoing.read())
            count = self._send([self._encrypted])
            if not count:
                return False
            self._encrypted = self._encrypted[count:]
        return True
