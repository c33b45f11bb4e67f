"""The control plane's connection fails at every message of a put and a get, in every way a connection can.

Whatever happens there is one outcome: a receipt and a snapshot that is there, whole, once; or an error of ours that
names its stage, within the time that was given. Nothing is left of it, and the next handoff works.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import hurray_client as ht
from faults.harness import BUDGET_S, attempt, check_get, check_put, clean, next_works, settings, snapshot
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import RunningDaemon, running_daemon
from support.proxy import (
    DOWN,
    UP,
    Fault,
    Http2,
    Proxy,
    cut,
    delay,
    drip,
    half_open,
    message,
    release,
    reset,
    silence,
    truncate,
)

pytestmark = pytest.mark.ucx

TRANSPORTS = ("shm", "tcp", "ucx")
PAGES = 240  # some sixty chunks of 4096 bytes

FAULTS: dict[str, Fault] = {
    "cut": cut,
    "reset": reset,
    "silent up": silence(UP),
    "silent down": silence(DOWN),
    "silent both ways": silence(UP, DOWN),
    "client gone, node not told": half_open(UP),
    "node gone, client not told": half_open(DOWN),
    "truncated up": truncate(UP),
    "truncated down": truncate(DOWN),
    "delayed": delay(DOWN, 0.3),
    "a drip": drip(DOWN, 7, 0.0001),
}

SLOW = (FAULTS["delayed"], FAULTS["a drip"])

Point = tuple[Any, ...]
SESSION: dict[str, Point] = {
    "hello": (UP, pb.SessionRequest, "hello"),
    "welcome": (DOWN, pb.SessionResponse, "welcome"),
}
PUT: dict[str, Point] = SESSION | {
    "offer": (UP, pb.PutRequest, "source.offer"),
    "accept": (DOWN, pb.PutResponse, "target.accept"),
    "checksums": (UP, pb.PutRequest, "source.checksums"),
    "second checksums": (UP, pb.PutRequest, "source.checksums", 2),
    "receipt": (DOWN, pb.PutResponse, "target.receipt"),
}
GET: dict[str, Point] = SESSION | {
    "open": (UP, pb.GetRequest, "open"),
    "offer": (DOWN, pb.GetResponse, "source.offer"),
    "accept": (UP, pb.GetRequest, "target.accept"),
    "checksums": (DOWN, pb.GetResponse, "source.checksums"),
    "second checksums": (DOWN, pb.GetResponse, "source.checksums", 2),
    "receipt": (UP, pb.GetRequest, "target.receipt"),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("[transfers]\nchunk_bytes = 4096\nwindow = 2") as daemon:
        yield daemon


def put_through(daemon: RunningDaemon, transport: str, direct: ht.Client, key: str, point: Point, fault: Fault) -> None:
    value, config = snapshot(1, PAGES), settings(daemon, transport, chunk_bytes=4096)
    with Proxy(daemon.address, framing=Http2) as proxy, ht.connect(proxy.address, config=config) as client:
        fired = proxy.at(message(*point), fault)
        outcome = attempt(lambda: client.put(key, value, timeout_s=BUDGET_S))
        assert fired.wait(5)
        check_put(daemon, direct, key, value, outcome)
        if fault in SLOW:
            proxy.do(release)
        next_works(client, f"{key}/next", value)


def get_through(daemon: RunningDaemon, transport: str, direct: ht.Client, key: str, point: Point, fault: Fault) -> None:
    value, config = snapshot(2, PAGES), settings(daemon, transport, chunk_bytes=4096)
    direct.put(key, value)
    with Proxy(daemon.address, framing=Http2) as proxy, ht.connect(proxy.address, config=config) as client:
        fired = proxy.at(message(*point), fault)
        outcome = attempt(lambda: client.get(key, timeout_s=BUDGET_S))
        assert fired.wait(5)
        check_get(direct, key, value, outcome)
        if fault in SLOW:
            proxy.do(release)
        next_works(client, f"{key}/next", value)


@pytest.mark.parametrize("fault", FAULTS)
def test_there_is_one_outcome(daemon: RunningDaemon, fault: str) -> None:
    """Every point, each over one of the transports: all of them meet all transports between them."""
    cases = [(put_through, "put", at, point) for at, point in PUT.items()]
    cases += [(get_through, "get", at, point) for at, point in GET.items()]
    first = list(FAULTS).index(fault)
    with ht.connect(daemon.address) as direct, ThreadPoolExecutor(len(cases)) as pool:
        running = {}
        for number, (run, kind, at, point) in enumerate(cases):
            transport = TRANSPORTS[(first + number) % len(TRANSPORTS)]
            key = f"{fault}/{kind}/{at}"
            running[f"{fault} at {at} of {kind} over {transport}"] = pool.submit(
                run, daemon, transport, direct, key, point, FAULTS[fault]
            )
        failed = [f"{name}: {error}" for name, future in running.items() if (error := future.exception())]
        assert not failed, "\n".join(failed)
        clean(direct)
