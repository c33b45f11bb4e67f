"""Packets between processes of one host: SOCK_SEQPACKET, each whole or not at all, with a few descriptors at most."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hurray_wire.errors import PeerUnavailable, ProtocolViolation

MAX_DESCRIPTORS: Final = 64
"""In one packet: the kernel closes whatever else a peer sends along."""

_DESCRIPTORS_BYTES: Final = socket.CMSG_LEN(4 * MAX_DESCRIPTORS)

_UCRED: Final = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Packet:
    """What arrived. The data is valid until the next `receive` into the same buffer; descriptors are the taker's."""

    data: memoryview
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


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

    def send(self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int] = ()) -> bool:
        """Send one packet. False: there is no room now. Raises Closed, and PeerUnavailable where this user has too many
        descriptors on their way."""
        ancillary = []
        if descriptors:
            ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)))
        try:
            self._socket.sendmsg(parts, ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                raise PeerUnavailable("too many descriptors are on their way", stage="data_plane") from error
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
        packet = Packet(memoryview(buffer)[:nbytes], _descriptors(ancillary))
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            packet.close()
            raise ProtocolViolation(
                "the peer sent a packet too long, or descriptors for which there is no room", field="shm.packet"
            )
        if nbytes == 0:
            packet.close()
            raise Closed
        return packet

    def _receive(self, buffer: bytearray) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        for _ in range(2):
            try:
                return self._socket.recvmsg_into([buffer], _DESCRIPTORS_BYTES, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                # Said once by a peer that closed without reading everything; what it had sent before comes after.
                continue
        raise Closed


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += array.array("i", data[: len(data) // 4 * 4])
    return tuple(found)
