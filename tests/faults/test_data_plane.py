"""The data plane's connection fails at several points of a put and a get, over sockets and over shared memory.

One outcome, as for the control plane; UCX hands out no connection that a proxy could stand in, and has
`test_partition.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

import hurray_client as ht
from faults.harness import BUDGET_S, attempt, check_get, check_put, clean, next_works, settings, snapshot
from hurray_wire.transport._shm_frames import Kind as ShmKind
from hurray_wire.transport._socket_frames import Kind as TcpKind
from hurray_wire.transport.tls import SocketConfig, SocketEndpoint, TcpTransport, TlsTransport
from support.daemon import RunningDaemon, running_daemon
from support.identities import Identified, identified_daemon
from support.proxy import (
    DOWN,
    UP,
    Direction,
    Fault,
    Framing,
    Packets,
    Proxy,
    TcpFrames,
    Trigger,
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
    shorten,
    silence,
    truncate,
)

CHUNK_BYTES = 32 << 10
PAGES = 512  # some sixteen chunks, few of which go without waiting for its receive
WORKERS = 20

FAULTS: dict[str, Fault] = {
    "cut": cut,
    "reset": reset,
    "silent up": silence(UP),
    "silent down": silence(DOWN),
    "silent both ways": silence(UP, DOWN),
    "held": hold(UP, DOWN),
    "client gone, node not told": half_open(UP),
    "node gone, client not told": half_open(DOWN),
    "truncated up": truncate(UP),
    "truncated down": truncate(DOWN),
    "delayed": delay(DOWN, 0.3),
}
TCP_FAULTS = FAULTS | {"a drip": drip(UP, 1500, 0.0001)}
TLS_FAULTS = TCP_FAULTS | {"a flipped bit": flip_bit(0)}
SHM_FAULTS = FAULTS | {"a packet cut short": shorten(7)}

# A connection that was made already would only be one fault later than these.
TCP_UP, TCP_DOWN = 56 + 32, 64
"""Bytes of the handshake."""
TCP_POINTS: dict[str, dict[str, Callable[[], Trigger]]] = {
    "put": {
        "dialler's hello": lambda: passed(UP, 40),
        "listener's proof": lambda: passed(DOWN, 60),
        "fifth announcement": lambda: frame(UP, TcpKind.ANNOUNCE, 5),
        "middle of a chunk": lambda: passed(UP, TCP_UP + 5 * CHUNK_BYTES + 100),
        "third clearance": lambda: frame(DOWN, TcpKind.CLEAR, 3),
    },
    "get": {
        "fifth announcement": lambda: frame(DOWN, TcpKind.ANNOUNCE, 5),
        "middle of a chunk": lambda: passed(DOWN, TCP_DOWN + 5 * CHUNK_BYTES + 100),
        "third clearance": lambda: frame(UP, TcpKind.CLEAR, 3),
    },
}
_MAGIC = ord("H")
SHM_POINTS: dict[str, dict[str, Callable[[], Trigger]]] = {
    "put": {
        "challenge": lambda: frame(DOWN, _MAGIC, 1),
        "hello": lambda: frame(UP, _MAGIC, 1),
        "welcome": lambda: frame(DOWN, _MAGIC, 2),
        "ring": lambda: frame(UP, ShmKind.RING),
        "fifth piece": lambda: frame(UP, ShmKind.PIECE, 5),
        "third release": lambda: frame(DOWN, ShmKind.RELEASE, 3),
    },
    "get": {
        "ring": lambda: frame(DOWN, ShmKind.RING),
        "fifth piece": lambda: frame(DOWN, ShmKind.PIECE, 5),
        "third release": lambda: frame(UP, ShmKind.RELEASE, 3),
    },
}
# What is encrypted can only be counted: the dialler's first flight is about 250 bytes, the listener's some 1,300.
TLS_POINTS: dict[str, dict[str, Callable[[], Trigger]]] = {
    "put": {
        "first flight": lambda: passed(UP, 200),
        "middle of a chunk": lambda: passed(UP, 5 * CHUNK_BYTES),
    },
    "get": {
        "second flight": lambda: passed(DOWN, 900),
        "middle of a chunk": lambda: passed(DOWN, 5 * CHUNK_BYTES),
    },
}
POINTS = {"tcp": TCP_POINTS, "shm": SHM_POINTS, "tls": TLS_POINTS}
KINDS_OF_FAULTS = {"tcp": TCP_FAULTS, "shm": SHM_FAULTS, "tls": TLS_FAULTS}

CONFIG = f"[transfers]\nchunk_bytes = {CHUNK_BYTES}\nwindow = 2"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG, arena_bytes=256 << 20) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identified]:
    """One that asks for certificates."""
    with identified_daemon(tmp_path_factory.mktemp("tls"), CONFIG, arena_bytes=256 << 20) as node:
        yield node


T = TypeVar("T", TcpTransport, TlsTransport)


def proxied(transport: T, proxy: Proxy) -> T:
    """Dials the proxy instead, which learns from it whom it was for."""
    dial = transport._dial

    def dial_proxy(endpoint: SocketEndpoint, deadline: float, host: str, port: int) -> None:
        proxy.target = f"{host}:{port}"
        dial(endpoint, deadline, host, int(proxy.address.rpartition(":")[2]))

    transport._dial = dial_proxy  # type: ignore[method-assign]
    return transport


def tcp_framing(direction: Direction) -> Framing:
    return TcpFrames(TCP_UP if direction is UP else TCP_DOWN)


@contextmanager
def through_tcp(daemon: RunningDaemon, _: Path) -> Iterator[tuple[Proxy, ht.Client]]:
    with (
        Proxy("", framing=tcp_framing) as proxy,
        ht.connect(daemon.address, config=settings(daemon, "tcp", chunk_bytes=CHUNK_BYTES)) as client,
    ):
        client._plane._makers["tcp"] = lambda: proxied(TcpTransport(SocketConfig()), proxy)  # type: ignore[union-attr]
        yield proxy, client


@contextmanager
def through_tls(node: Identified, _: Path) -> Iterator[tuple[Proxy, ht.Client]]:
    tls = node.tenant("a")
    config = settings(node.daemon, "tls", chunk_bytes=CHUNK_BYTES, tls=tls)
    with Proxy("") as proxy, ht.connect(node.address, config=config) as client:
        client._plane._makers["tls"] = lambda: proxied(TlsTransport(SocketConfig(), tls), proxy)  # type: ignore[union-attr]
        yield proxy, client


@contextmanager
def through_shm(daemon: RunningDaemon, folder: Path) -> Iterator[tuple[Proxy, ht.Client]]:
    path = str(folder / "proxy")
    config = settings(daemon, "shm", chunk_bytes=CHUNK_BYTES, shm={"path": path})
    with (
        Proxy(daemon.shm_path, path=path, framing=Packets) as proxy,
        ht.connect(daemon.address, config=config) as client,
    ):
        yield proxy, client


CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
CODES_OF_A_PACKET_CUT_SHORT = (*CODES, "FAILED_PRECONDITION")

Through = Callable[[Path], AbstractContextManager[tuple[Proxy, ht.Client]]]


def hand_over(
    daemon: RunningDaemon,
    through: Through,
    direct: ht.Client,
    kind: str,
    key: str,
    folder: Path,
    point: Callable[[], Trigger],
    fault: Fault,
    codes: tuple[str, ...],
) -> None:
    value = snapshot(3, PAGES)
    folder.mkdir()
    with through(folder) as (proxy, client):
        if kind == "get":
            direct.put(key, value)
        fired = proxy.at(point(), fault)
        if kind == "put":
            outcome = attempt(lambda: client.put(key, value, timeout_s=BUDGET_S))
            assert fired.wait(5)
            check_put(daemon, direct, key, value, outcome, codes=codes)
        else:
            outcome = attempt(lambda: client.get(key, timeout_s=BUDGET_S))
            assert fired.wait(5)
            check_get(direct, key, value, outcome, codes=codes)
        proxy.do(release)
        next_works(client, f"{key}/next", value)


def hand_over_among_faults(
    daemon: RunningDaemon, through: Through, direct: ht.Client, transport: str, kind: str, folder: Path
) -> None:
    points, faults = POINTS[transport][kind], KINDS_OF_FAULTS[transport]
    with ThreadPoolExecutor(WORKERS) as pool:
        running = {}
        for number, (fault, at) in enumerate((fault, at) for fault in faults for at in points):
            key = f"a/{transport}/{kind}/{fault}/{at}"
            codes = CODES_OF_A_PACKET_CUT_SHORT if fault == "a packet cut short" else CODES
            arguments = (key, folder / str(number), points[at], faults[fault], codes)
            running[f"{fault} at {at}"] = pool.submit(hand_over, daemon, through, direct, kind, *arguments)
    failed = [f"{name}: {error!r:.300}" for name, future in running.items() if (error := future.exception())]
    assert not failed, "\n".join(failed)
    clean(direct)


@pytest.mark.parametrize("kind", ["put", "get"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_there_is_one_outcome(daemon: RunningDaemon, tmp_path: Path, transport: str, kind: str) -> None:
    through = partial({"tcp": through_tcp, "shm": through_shm}[transport], daemon)
    with ht.connect(daemon.address, config=settings(daemon, "shm", chunk_bytes=CHUNK_BYTES)) as direct:
        hand_over_among_faults(daemon, through, direct, transport, kind, tmp_path)


@pytest.mark.parametrize("kind", ["put", "get"])
def test_there_is_one_outcome_over_tls(node: Identified, tmp_path: Path, kind: str) -> None:
    """A flipped bit is refused by TLS itself: UNAVAILABLE, as for whatever else ends a connection."""
    config = settings(node.daemon, "shm", chunk_bytes=CHUNK_BYTES, tls=node.tenant("a"))
    with ht.connect(node.address, config=config) as direct:
        hand_over_among_faults(node.daemon, partial(through_tls, node), direct, "tls", kind, tmp_path)


@pytest.mark.parametrize("kind", ["put", "get"])
def test_a_bit_that_flips_on_a_plain_wire_is_lost_data(daemon: RunningDaemon, tmp_path: Path, kind: str) -> None:
    through, point = partial(through_tcp, daemon), TCP_POINTS[kind]["middle of a chunk"]
    with ht.connect(daemon.address, config=settings(daemon, "shm", chunk_bytes=CHUNK_BYTES)) as direct:
        hand_over(daemon, through, direct, kind, "flipped", tmp_path / "x", point, flip_bit(0), ("DATA_LOSS",))
        assert [info.key for info in direct.list("flipped")] == (["flipped"] if kind == "get" else [])
        clean(direct)
