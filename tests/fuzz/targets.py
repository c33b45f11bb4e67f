"""What is fuzzed: each target takes bytes as a peer or a file may bring them. Whatever it raises is a fault.

Errors of ours are what a peer's nonsense deserves, and are caught here.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from hurray_wire import messages
from hurray_wire.descriptor import Descriptor, build_descriptor, decode_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.errors import HurrayError
from hurray_wire.image import plan_image
from hurray_wire.limits import Limits
from hurray_wire.policy import STRICT, Policy
from hurray_wire.status import from_status
from hurray_wire.testing.transport_suite import Outcome, TransportSuite, post_send
from hurray_wire.transport import _shm_frames as shm_frames
from hurray_wire.transport import _socket_frames as tcp_frames
from hurray_wire.transport.base import Transport
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.validate import read_structure
from transport.test_shm_hostile import Dialer
from transport.test_tls_hostile import Hostile

LIMITS = Limits(max_sequences=1 << 12, max_index_entries=1 << 14)
LENIENT = Policy(private_agreed=True, allow_unaligned_gpu=True)
STEPS = 64


# --- the format -----------------------------------------------------------------------------------------------------


def descriptor(data: bytes) -> None:
    """A descriptor, read strictly and leniently, and all that follows from its fields."""
    for policy in (STRICT, LENIENT):
        with suppress(HurrayError):
            read, consumed = decode_descriptor(data, policy)
            assert 0 < consumed <= len(data)
            for name in dir(Descriptor):
                if isinstance(getattr(Descriptor, name), property):
                    getattr(read, name)
            again = read.encode(policy)
            assert decode_descriptor(again, policy)[0].encode(policy) == again
            plan_image([read], 1 << 20, Limits())


_INDEX = struct.Struct("<BBHBB")


def index(data: bytes) -> None:
    """Index buffers: 6 bytes say of what geometry, then come token counts, seq_ptr and block_table."""
    if len(data) < _INDEX.size:
        return
    wide, page_size, num_pages, num_seqs, entries = _INDEX.unpack_from(data)
    width, rest = (8 if wide & 1 else 4), data[_INDEX.size :]
    counts = [
        int(count) for count in np.frombuffer(rest[: num_seqs // 2 * 2 * 2].ljust(2 * num_seqs, b"\0"), np.uint16)
    ]
    ptr_bytes, table_bytes = (num_seqs + 1) * width, entries * width
    rest = rest[2 * num_seqs :].ljust(ptr_bytes + table_bytes, b"\0")
    with suppress(HurrayError):
        described = build_descriptor(
            element_type=BY_NAME["float16"],
            page_size=page_size,
            num_pages=num_pages,
            num_heads=1,
            head_dim=1,
            total_tokens=sum(counts),
            num_seqs=num_seqs,
            total_logical_pages=entries,
            kv_role=0,
            layer_index=0,
            block_table_index_type=wide & 1,
        )
        structure = read_structure(
            described,
            np.frombuffer(rest, np.uint8, table_bytes, ptr_bytes),
            np.frombuffer(rest, np.uint8, ptr_bytes),
            counts,
            Policy(limits=LIMITS),
        )
        assert int(structure.token_counts.sum()) == sum(counts)
        assert not structure.block_table.size or int(structure.block_table.max()) < num_pages


# --- the control plane ----------------------------------------------------------------------------------------------


def _offer(offer: pb.Offer) -> None:
    messages.check_sizes(offer, LIMITS)
    messages.check_request_id(offer.request_id)
    messages.check_key(offer.key)
    if offer.HasField("lease"):
        messages.read_duration(offer.lease, "lease")
    messages.read_offer(offer, LIMITS)


def _put(message: pb.PutRequest) -> None:
    if message.source.HasField("offer"):
        _offer(message.source.offer)
    else:
        messages.read_source_message(message.source)


def _get(message: pb.GetRequest) -> None:
    if message.HasField("open"):
        messages.check_key(message.open.key)
        messages.check_request_id(message.open.request_id)
        messages.read_duration(message.open.wait, "wait")
        messages.check_transports(message.open.transports)
    else:
        messages.read_target_message(message.target)


def _session(message: pb.SessionRequest) -> None:
    for transport in message.hello.transports:
        messages.read_transport(transport)


def _answers(message: pb.PutResponse) -> None:
    messages.read_target_message(message.target)
    from_status(message.target.stop.error)


_MESSAGES: tuple[tuple[type[Message], Callable[[Any], None]], ...] = (
    (pb.PutRequest, _put),
    (pb.GetRequest, _get),
    (pb.SessionRequest, _session),
    (pb.PutResponse, _answers),
)


def control(data: bytes) -> None:
    """A message of the control plane: the first byte says which."""
    if not data:
        return
    kind, read = _MESSAGES[data[0] % len(_MESSAGES)]
    with suppress(DecodeError, HurrayError):
        message = kind.FromString(data[1:])
        read(message)


# --- transports -----------------------------------------------------------------------------------------------------


def _steps(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Operation, tag, size and the bytes that come with it: 4 bytes each, then as many as the fourth says."""
    at = 0
    for _ in range(STEPS):
        if at + 4 > len(data):
            return
        operation, tag, size, count = data[at : at + 4]
        yield operation, tag, size << (size & 7), data[at + 4 : at + 4 + count]
        at += 4 + count


def tcp(data: bytes) -> None:
    """Frames of the socket transport, from a peer that is let in, while this side receives and sends."""
    hostile = Hostile()
    outcomes: list[Outcome] = []
    try:
        for operation, tag, size, body in _steps(data):
            match operation % 4:
                case 0 if hostile.endpoint.alive and tag not in {o.tag for o in outcomes if not o.fired}:
                    outcomes.append(_receive(hostile.endpoint, tag, size))
                case 1 if hostile.endpoint.alive:
                    post_send(hostile.endpoint, tag, np.zeros(max(1, size), np.uint8))
                case 2:
                    kind = tcp_frames.Kind(1 + operation // 4 % 5)
                    _send(hostile.socket, tcp_frames.pack(kind, tag, len(body) or size) + body)
                case _:
                    _send(hostile.socket, body)
            _progress(hostile.own)
        TransportSuite().exchange(hostile.pair, nbytes=100)
    finally:
        hostile.close()


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.setblocking(False)
        connection.send(data)


def _progress(transport: Transport) -> None:
    """What was sent on this host has arrived: there is nothing to wait for."""
    for _ in range(3):
        transport.progress()


class _Receive(Outcome):
    """Knows its tag."""

    tag = 0


def _receive(endpoint: Any, tag: int, size: int) -> _Receive:
    outcome = _Receive()
    outcome.tag = tag
    endpoint.receive(tag, np.zeros(max(1, size), np.uint8), outcome)
    outcome.allowed = True
    return outcome


_FOLDER = tempfile.TemporaryDirectory()


def shm(data: bytes) -> None:
    """Packets of the Unix socket: the first bit says whether the handshake is among what is fuzzed."""
    path = str(Path(_FOLDER.name, "data.sock"))
    transport = ShmTransport(ShmConfig(path=path, listens=True))
    transport.park = lambda timeout_s: None  # type: ignore[method-assign]  # see _progress
    dialer = Dialer(transport, path).connect()
    outcomes: list[_Receive] = []
    try:
        if data[:1] < b"\x80":
            dialer.say_hello().hear_welcome().offer_ring()
        for operation, tag, size, body in _steps(data[1:]):
            alive = dialer.endpoint.alive
            match operation % 4:
                case 0 if alive and tag not in {outcome.tag for outcome in outcomes if not outcome.fired}:
                    outcomes.append(_receive(dialer.endpoint, tag, size))
                case 1 if alive:
                    post_send(dialer.endpoint, tag, np.zeros(max(1, size), np.uint8))
                case 2:
                    _send(dialer.socket, _frame(operation // 4, tag, size, body))
                case _ if body:
                    _send(dialer.socket, body)
            _progress(transport)
    finally:
        dialer.socket.close()
        _progress(transport)
        transport.close()


def _frame(number: int, tag: int, size: int, body: bytes) -> bytes:
    kinds = list(shm_frames.Kind)
    kind = kinds[number % len(kinds)]
    eager = kind is shm_frames.Kind.EAGER
    values = {"tag": tag, "number": size & 15, "nbytes": len(body) if eager else size, "offset": size & ~4095}
    fields = {name: value for name, value in values.items() if name in shm_frames._FIELDS[kind]}
    return shm_frames.Frame(kind, **fields).encode() + (body if eager else b"")


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (descriptor, index, control, tcp, shm)
}
