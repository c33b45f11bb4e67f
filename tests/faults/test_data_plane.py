"""The data plane's connection fails at several points of a put and a get, over sockets and over shared memory.

One outcome, as for the control plane; UCX hands out no connection that a proxy could stand in, and has
`test_partition.py` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import hurray_client as ht
from faults.harness import BUDGET_S, attempt, check_get, check_put, clean, next_works, settings, snapshot
from hurray_wire.transport._shm_frames import Kind as ShmKind
from hurray_wire.transport._socket_frames import Kind as TcpKind
from hurray_wire.transport.tls import SocketConfig, SocketEndpoint, TcpTransport
from support.daemon import RunningDaemon, running_daemon
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
WORKERS = 64

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


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    config = f"[transfers]\nchunk_bytes = {CHUNK_BYTES}\nwindow = 2"
    with running_daemon(config, arena_bytes=256 << 20) as daemon:
        yield daemon


class ProxiedTcp(TcpTransport):
    """Dials a proxy instead, which learns from it whom it was for."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(SocketConfig())
        self._proxy = proxy

    def _dial(self, endpoint: SocketEndpoint, deadline: float, host: str, port: int) -> None:
        self._proxy.target = f"{host}:{port}"
        super()._dial(endpoint, deadline, host, int(self._proxy.address.rpartition(":")[2]))


def tcp_framing(direction: Direction) -> Framing:
    return TcpFrames(TCP_UP if direction is UP else TCP_DOWN)


@contextmanager
def through_tcp(daemon: RunningDaemon, _: Path) -> Iterator[tuple[Proxy, ht.Client]]:
    with (
        Proxy("", framing=tcp_framing) as proxy,
        ht.connect(daemon.address, config=settings(daemon, "tcp", chunk_bytes=CHUNK_BYTES)) as client,
    ):
        client._plane._makers["tcp"] = lambda: ProxiedTcp(proxy)  # type: ignore[union-attr]
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

THROUGH = {"tcp": through_tcp, "shm": through_shm}


def hand_over(
    daemon: RunningDaemon,
    transport: str,
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
    with THROUGH[transport](daemon, folder) as (proxy, client):
        fired = proxy.at(point(), fault)
        if kind == "put":
            outcome = attempt(lambda: client.put(key, value, timeout_s=BUDGET_S))
            assert fired.wait(5)
            check_put(daemon, direct, key, value, outcome, codes=codes)
        else:
            direct.put(key, value)
            outcome = attempt(lambda: client.get(key, timeout_s=BUDGET_S))
            assert fired.wait(5)
            check_get(direct, key, value, outcome, codes=codes)
        proxy.do(release)
        next_works(client, f"{key}/next", value)


@pytest.mark.parametrize("kind", ["put", "get"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_there_is_one_outcome(daemon: RunningDaemon, tmp_path: Path, transport: str, kind: str) -> None:
    points, faults = (TCP_POINTS, TCP_FAULTS) if transport == "tcp" else (SHM_POINTS, SHM_FAULTS)
    with ht.connect(daemon.address, config=settings(daemon, "shm", chunk_bytes=CHUNK_BYTES)) as direct:
        with ThreadPoolExecutor(WORKERS) as pool:
            running = {}
            for number, (fault, at) in enumerate((fault, at) for fault in faults for at in points[kind]):
                key, folder = f"{transport}/{kind}/{fault}/{at}", tmp_path / str(number)
                codes = CODES_OF_A_PACKET_CUT_SHORT if fault == "a packet cut short" else CODES
                running[f"{fault} at {at}"] = pool.submit(
                    hand_over, daemon, transport, direct, kind, key, folder, points[kind][at], faults[fault], codes
                )
        failed = [f"{name}: {error!r:.300}" for name, future in running.items() if (error := future.exception())]
        assert not failed, "\n".join(failed)
        clean(daemon, direct)
