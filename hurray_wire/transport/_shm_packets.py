"""Packets between processes of one host: SOCK_SEQPACKET, each whole or not at all, with at most one descriptor."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hurray_wire.errors import ProtocolViolation

_ONE_DESCRIPTOR_BYTES: Final = socket.CMSG_LEN(4)
"""Room for one: the kernel closes whatever else a peer sends along."""

_UCRED: Final = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Packet:
    """What arrived. The data is valid until the next `receive` into the same buffer; the descriptor is the taker's."""

    data: memoryview
    descriptor: int | None


class Closed(Exception):
    """The peer is gone, and all it sent has been read."""


class PacketSocket:
    """A connected socket. Never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.peer_uid: int = _UCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size),
        )[1]

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, parts: Sequence[bytes | memoryview], descriptor: int | None = None) -> bool:
        """Send one packet. False: there is no room now. Raises Closed."""
        ancillary = []
        if descriptor is not None:
            ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])))
        try:
            self._socket.sendmsg(parts, ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Closed from error
        return True

    def receive(self, buffer: bytearray) -> Packet | None:
        """The next packet, if one is there. Raises Closed, and ProtocolViolation for what does not fit."""
        try:
            nbytes, ancillary, flags, _ = self._receive(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Closed from error
        descriptors = _descriptors(ancillary)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(descriptors) > 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProtocolViolation(
                "the peer sent a packet too long, or descriptors for which there is no room", field="shm.packet"
            )
        if nbytes == 0:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Closed
        return Packet(memoryview(buffer)[:nbytes], descriptors[0] if descriptors else None)

    def _receive(self, buffer: bytearray) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        for _ in range(2):
            try:
                return self._socket.recvmsg_into([buffer], _ONE_DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                # Said once by a peer that closed without reading everything; what it had sent before comes after.
                continue
        raise Closed


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += array.array("i", data[: len(data) // 4 * 4])
    return found
