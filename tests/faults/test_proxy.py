"""The proxy does what it says, at the byte where it says so."""

from __future__ import annotations

import array
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.proxy import (
    DOWN,
    UP,
    Http2,
    Packets,
    Proxy,
    TcpFrames,
    cut,
    delay,
    drip,
    flip_bit,
    frame,
    half_open,
    hold,
    passed,
    release,
    reset,
    silence,
    truncate,
)

TIMEOUT_S = 10.0


class Echo:
    """Sends back what it gets; `got` is all of it."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            try:
                while data := connection.recv(4096):
                    self.got += data
                    connection.sendall(data)
            except OSError:
                pass
        self.ended.set()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.address) as proxy:
        yield proxy


@pytest.fixture
def near(proxy: Proxy) -> Iterator[socket.socket]:
    host, port = proxy.address.split(":")
    with closing(socket.create_connection((host, int(port)), TIMEOUT_S)) as near:
        yield near


def read(near: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := near.recv(size - len(data))):
        data += more
    return data


def test_what_passes_is_what_was_sent(near: socket.socket) -> None:
    data = os.urandom(1 << 20)
    threading.Thread(target=near.sendall, args=(data,), daemon=True).start()
    assert read(near, len(data)) == data


def test_a_cut_after_so_many_bytes(proxy: Proxy, near: socket.socket, echo: Echo) -> None:
    fired = proxy.at(passed(UP, 1000), cut)
    near.sendall(bytes(1500))
    assert fired.wait(TIMEOUT_S)
    assert echo.ended.wait(TIMEOUT_S)
    assert echo.got == bytes(1000)


def test_a_reset_is_one(proxy: Proxy, near: socket.socket) -> None:
    near.sendall(b"x")
    assert read(near, 1) == b"x"
    proxy.do(reset)
    with pytest.raises(ConnectionResetError):
        near.recv(1)


def test_silence_one_way(proxy: Proxy, near: socket.socket, echo: Echo) -> None:
    fired = proxy.at(passed(DOWN, 3), silence(DOWN))
    near.sendall(b"12345")
    assert read(near, 3) == b"123"
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(1)
    assert fired.is_set()
    near.shutdown(socket.SHUT_WR)
    assert echo.ended.wait(TIMEOUT_S)
    assert echo.got == b"12345"


def test_what_is_held_comes_later(proxy: Proxy, near: socket.socket) -> None:
    near.sendall(b"1")
    assert read(near, 1) == b"1"
    proxy.do(hold(UP))
    near.sendall(b"2")
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(1)
    near.settimeout(TIMEOUT_S)
    proxy.do(release)
    assert read(near, 1) == b"2"


def test_half_open(proxy: Proxy, near: socket.socket, echo: Echo) -> None:
    near.sendall(b"1")
    assert read(near, 1) == b"1"
    proxy.do(half_open(UP))
    assert near.recv(1) == b""
    assert not echo.ended.wait(0.2)


def test_a_truncated_direction_ends(proxy: Proxy, near: socket.socket, echo: Echo) -> None:
    proxy.at(passed(UP, 2), truncate(UP))
    near.sendall(b"1234")
    assert echo.ended.wait(TIMEOUT_S)
    assert echo.got == b"12"
    assert read(near, 3) == b"12"


def test_a_drip_brings_all_of_it_slowly(proxy: Proxy, near: socket.socket) -> None:
    near.sendall(b"1")
    assert read(near, 1) == b"1"
    proxy.do(drip(UP, 1, 0.001))
    began_s = time.monotonic()
    near.sendall(bytes(range(50)))
    assert read(near, 50) == bytes(range(50))
    assert time.monotonic() - began_s > 0.045


def test_a_delay_is_once(proxy: Proxy, near: socket.socket) -> None:
    proxy.at(passed(UP, 1), delay(UP, 0.2))
    began_s = time.monotonic()
    near.sendall(b"12")
    assert read(near, 2) == b"12"
    assert time.monotonic() - began_s > 0.19


def test_a_bit_is_flipped_where_it_says(proxy: Proxy, near: socket.socket) -> None:
    proxy.at(passed(UP, 3), flip_bit(0))
    near.sendall(b"aaaaaa")
    assert read(near, 6) == b"aaa`aa"


def test_frames_of_http2_are_whole_and_their_messages_found() -> None:
    body = b"\0\0\0\0\x05hello\0\0\0\0\x02"
    frames = b"".join(
        len(part).to_bytes(3, "big") + bytes([kind, 0]) + (1).to_bytes(4, "big") + part
        for kind, part in ((0, body), (1, b"headers"), (0, b"yo"))
    )
    framing, pieces = Http2(), []
    for byte in Http2._PREFACE + frames:
        pieces += framing.feed(bytes([byte]))
    assert b"".join(piece.data for piece in pieces) == Http2._PREFACE + frames
    assert [piece.messages for piece in pieces] == [[], [b"hello"], [], [b"yo"]]


def test_frames_of_the_socket_transport_are_found_behind_its_handshake() -> None:
    header = TcpFrames._HEADER
    sent = b"h" * 88 + header.pack(2, 7, 1000) + header.pack(4, 0, 1000) + bytes(1000) + header.pack(5, 0, 9)
    framing, kinds, whole = TcpFrames(88), [], b""
    for start in range(0, len(sent), 13):
        for piece in framing.feed(sent[start : start + 13]):
            kinds += piece.messages
            whole += piece.data
    assert kinds == [2, 4, 5]
    assert whole == sent


def test_packets_pass_with_their_descriptors(tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(target)
        listener.listen()
        with (
            Proxy(target, path=str(tmp_path / "proxy"), framing=Packets) as proxy,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as near,
        ):
            near.connect(proxy.address)
            with listener.accept()[0] as far:
                far.settimeout(TIMEOUT_S)
                with (tmp_path / "file").open("wb") as file:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
                    near.sendmsg([b"\x08ring"], rights)
                    data, descriptors, _, _ = socket.recv_fds(far, 100, 4)
                    assert data == b"\x08ring"
                    assert os.path.samestat(os.fstat(descriptors[0]), os.fstat(file.fileno()))
                    os.close(descriptors[0])
                proxy.at(frame(UP, 3), cut)
                near.send(b"\x01one")
                assert far.recv(100) == b"\x01one"
                near.send(b"\x03three")
                assert far.recv(100) == b""
    assert not os.path.exists(proxy.address)
