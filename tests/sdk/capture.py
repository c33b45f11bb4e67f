"""What crosses the loopback device, as a third party sees it: a raw packet capture, put together by connection."""

from __future__ import annotations

import ctypes
import itertools
import socket
import struct
import threading
from collections import defaultdict

_ETH_P_ALL = 0x0003
_PACKET_OUTGOING = 4
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_SO_RCVBUFFORCE = 33
_SO_ATTACH_FILTER = 26
_ETHERNET_BYTES = 14


class Capture:
    """Payload of TCP connections on `lo` that touch a range of ports, from `start` to `stop`.

    Raises PermissionError where raw sockets are not allowed.
    """

    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._segments: dict[tuple[int, int], list[tuple[int, bytes]]] = defaultdict(list)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 256 << 20)
        _attach_filter(self._socket, ports)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.05)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> int:
        """End, once; how many packets were missed."""
        self._ended.set()
        self._thread.join()
        dropped: int = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        self._socket.close()
        return dropped

    def streams(self) -> list[bytes]:
        """The bytes of each direction of each connection, in order, repetitions dropped. After `stop`."""
        return [_joined(segments) for segments in self._segments.values()]

    def _run(self) -> None:
        # One more timeout after the end: what was sent before it is in the socket's buffer by then.
        for _ in iter(lambda: self._ended.is_set() and not self._drain(), True):
            self._drain()

    def _drain(self) -> bool:
        """Take what is there; False if nothing was."""
        took = False
        for _ in itertools.count():
            try:
                packet, address = self._socket.recvfrom(1 << 18)
            except TimeoutError:
                return took
            took = True
            if address[2] != _PACKET_OUTGOING:
                self._take(packet[_ETHERNET_BYTES:])
        return took

    def _take(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        tcp = packet[(packet[0] & 0x0F) * 4 :]
        source, target, sequence = struct.unpack("!HHI", tcp[:8])
        payload = tcp[(tcp[12] >> 4) * 4 :]
        if payload and (source in self._ports or target in self._ports):
            self._segments[source, target].append((sequence, payload))


def _attach_filter(capture: socket.socket, ports: range) -> None:
    """Let the kernel drop what is not of these ports: others may use the device, too, and much more of it."""
    load_half, load_byte, load_half_indexed, load_header_bytes = 0x28, 0x30, 0x48, 0xB1
    equal, greater, at_least, give = 0x15, 0x25, 0x35, 0x06
    code = [  # operation, instructions to skip if so, if not, value
        (load_half, 0, 0, 12),  # the Ethernet type
        (equal, 0, 10, 0x0800),
        (load_byte, 0, 0, 23),  # the IP protocol
        (equal, 0, 8, socket.IPPROTO_TCP),
        (load_header_bytes, 0, 0, _ETHERNET_BYTES),
        (load_half_indexed, 0, 0, _ETHERNET_BYTES),  # source
        (at_least, 0, 1, ports[0]),
        (greater, 0, 3, ports[-1]),
        (load_half_indexed, 0, 0, _ETHERNET_BYTES + 2),  # target
        (at_least, 0, 2, ports[0]),
        (greater, 1, 0, ports[-1]),
        (give, 0, 0, 0xFFFFFFFF),
        (give, 0, 0, 0),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    capture.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(code), ctypes.addressof(program)))


def _joined(segments: list[tuple[int, bytes]]) -> bytes:
    first = segments[0][0]
    # Sequence numbers wrap at 2**32: order by the distance from the first, which may itself have come late.
    placed = sorted(((sequence - first + (1 << 31)) % (1 << 32), payload) for sequence, payload in segments)
    joined, end = bytearray(), placed[0][0]
    for at, payload in placed:
        fresh = payload[max(0, end - at) :]
        joined += fresh
        end = max(end, at + len(payload))
    return bytes(joined)
