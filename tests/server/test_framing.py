"""Frames on a socket: whole, bounded, in order, and never in the way of who sends them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_server.framing import FrameConnection, Frames, FrameSender, pack, receive
from hurray_wire.errors import ProtocolViolation
from hurray_wire.v1 import mover_pb2 as mpb

MESSAGE = mpb.MoverReport(usage=mpb.MoverUsage(unknown_tag_count=3))


Read = Callable[[bytes], list[mpb.MoverReport]]


def read_all(data: bytes) -> list[mpb.MoverReport]:
    """In an event loop."""

    async def read() -> list[mpb.MoverReport]:
        ours, theirs = socket.socketpair()
        found: list[mpb.MoverReport] = []
        with theirs:
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                lambda: FrameConnection(Frames(mpb.MoverReport, 1000), found.append), sock=ours
            )
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            await connection.ended
        return found

    return asyncio.run(read())


def receive_all(data: bytes) -> list[mpb.MoverReport]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return list(receive(ours, Frames(mpb.MoverReport, 1000)))


@pytest.mark.parametrize("read", [read_all, receive_all])
def test_frames_are_read_or_refused(read: Read) -> None:
    assert read(pack(MESSAGE)) == [MESSAGE]
    assert read(3 * pack(MESSAGE)) == 3 * [MESSAGE]
    for cut in (b"", pack(MESSAGE)[:3], pack(MESSAGE)[:-1]):
        assert read(pack(MESSAGE) + cut) == [MESSAGE]
    with pytest.raises(ProtocolViolation):
        read(struct.pack("<I", 1 << 31) + b"x")  # nothing is allocated for it
    with pytest.raises(ProtocolViolation):
        read(struct.pack("<I", 4) + b"\xff\xff\xff\xff")


@given(data=st.data())
def test_frames_come_out_whole_however_they_come_in(data: st.DataObject) -> None:
    sent = [
        mpb.MoverReport(usage=mpb.MoverUsage(peer_count=number)) for number in data.draw(st.lists(st.integers(0, 9)))
    ]
    whole = b"".join(map(pack, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    frames, found = Frames(mpb.MoverReport, 1000), list[mpb.MoverReport]()
    for start, end in pairwise([0, *cuts, len(whole)]):
        found += frames.feed(whole[start:end])
    assert found == sent


def test_a_reader_that_falls_behind_holds_up_who_drains() -> None:
    async def body() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        with theirs:
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                lambda: FrameConnection(Frames(mpb.MoverReport, 1000), lambda _: None), sock=ours
            )
            for _ in range(200):  # far more than the socket takes
                connection.send(mpb.MoverReport(started=mpb.MoverStarted(ucx="x" * 20000)))
            drained = asyncio.ensure_future(connection.drain())
            await asyncio.sleep(0)
            assert not drained.done()
            while not drained.done():
                with suppress(BlockingIOError):
                    theirs.recv(1 << 20)
                await asyncio.sleep(0)
            connection.close()

    asyncio.run(body())


def test_a_sender_never_waits_for_its_reader_and_keeps_the_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, reports = FrameSender(ours), receive(theirs, Frames(mpb.MoverReport, 1 << 20))
        count, padding = 200, "x" * 20000
        for number in range(count):  # far more than the socket takes
            sender.send(mpb.MoverReport(started=mpb.MoverStarted(incarnation=number, ucx=padding)))
        for number in range(count):
            report = next(reports)
            assert (report.started.incarnation, report.started.ucx) == (number, padding)


def test_a_sender_whose_reader_is_gone_does_not_mind() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        sender = FrameSender(ours)
        theirs.close()
        for _ in range(3):
            sender.send(MESSAGE)
