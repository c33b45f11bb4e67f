"""Frames on a socket: whole, bounded, in order, and never in the way of who sends them."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from hurray_server.framing import FrameSender, pack, read_frame, receive_frame
from hurray_wire.errors import ProtocolViolation
from hurray_wire.v1 import mover_pb2 as mpb

MESSAGE = mpb.MoverReport(usage=mpb.MoverUsage(unknown_tag_count=3))


def read_all(data: bytes, max_bytes: int = 1000) -> mpb.MoverReport:
    async def read() -> mpb.MoverReport:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        report = mpb.MoverReport()
        await read_frame(reader, report, max_bytes)
        return report

    return asyncio.run(read())


def receive_all(data: bytes, max_bytes: int = 1000) -> mpb.MoverReport:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        report = mpb.MoverReport()
        receive_frame(ours, report, max_bytes)
        return report


@pytest.mark.parametrize("read", [read_all, receive_all])
def test_a_frame_is_read_or_refused(read: object) -> None:
    assert callable(read)
    assert read(pack(MESSAGE)) == MESSAGE
    for cut in (b"", pack(MESSAGE)[:3], pack(MESSAGE)[:-1]):
        with pytest.raises(EOFError):
            read(cut)
    with pytest.raises(ProtocolViolation):
        read(struct.pack("<I", 1 << 31) + b"x")  # nothing is allocated for it
    with pytest.raises(ProtocolViolation):
        read(struct.pack("<I", 4) + b"\xff\xff\xff\xff")


def test_a_sender_never_waits_for_its_reader_and_keeps_the_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        count, padding = 200, "x" * 20000
        for number in range(count):  # far more than the socket takes
            sender.send(mpb.MoverReport(started=mpb.MoverStarted(incarnation=number, ucx=padding)))
        for number in range(count):
            report = mpb.MoverReport()
            receive_frame(theirs, report, 1 << 20)
            assert (report.started.incarnation, report.started.ucx) == (number, padding)


def test_a_sender_whose_reader_is_gone_does_not_mind() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        sender = FrameSender(ours)
        theirs.close()
        for _ in range(3):
            sender.send(MESSAGE)
