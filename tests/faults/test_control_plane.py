"""The control plane's connection fails at every message of a put and a get, in every way a connection can.

Whatever happens there is one outcome: a receipt and a snapshot that is there, whole, once; or an error of ours that
names its stage, within the time that was given. Nothing is left of it, and the next handoff works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

import hurray_client as ht
from hurray_wire.v1 import transfer_pb2 as pb
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import RunningDaemon, eventually, running_daemon
from support.proxy import (
    DOWN,
    UP,
    Fault,
    Http2,
    Proxy,
    Trigger,
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

BUDGET_S = 8.0
GRACE_S = 6.0
"""What a call may take beyond its budget to drain (2 s) and to settle (2 s), on a busy machine."""

TRANSPORTS = ("shm", "tcp", "ucx")


def config(daemon: RunningDaemon, transport: str) -> ht.ClientConfig:
    return ht.ClientConfig(
        transports=(transport,),
        shm={"path": daemon.shm_path},  # type: ignore[arg-type]
        chunk_bytes=4096,
        window=2,
        keepalive_interval_s=1.0,
        keepalive_timeout_s=1.5,
        retry_s=BUDGET_S,
        connect_timeout_s=4.0,
    )


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


def snapshot(seed: int) -> ht.KVSnapshot:
    """Some sixty chunks of 4096 bytes."""
    return make_snapshot(make_caches(num_pages=240, page_size=8, seed=seed), [list(range(240))], [1917])


@dataclass(frozen=True)
class Outcome:
    """Of one call."""

    value: Any
    error: ht.HurrayError | None
    seconds: float


def attempt(work: Any) -> Outcome:
    began_s = time.monotonic()
    try:
        value, error = work(), None
    except ht.HurrayError as raised:
        value, error = None, raised
    return Outcome(value, error, time.monotonic() - began_s)


def check_error(outcome: Outcome) -> None:
    assert outcome.seconds < BUDGET_S + GRACE_S, f"{outcome.seconds:.1f} s: {outcome.error}"
    if outcome.error is not None:
        assert outcome.error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"), outcome.error
        assert outcome.error.stage, outcome.error


def put_through(
    daemon: RunningDaemon, settings: ht.ClientConfig, direct: ht.Client, key: str, point: Point, fault: Fault
) -> None:
    value = snapshot(seed=1)
    with Proxy(daemon.address, framing=Http2) as proxy, ht.connect(proxy.address, config=settings) as client:
        fired = proxy.at(trigger(point), fault)
        outcome = attempt(lambda: client.put(key, value, timeout_s=BUDGET_S))
        assert fired.wait(5)
        check_error(outcome)
        held = [info.generation for info in direct.list(key) if info.key == key]
        if outcome.error is None:
            assert held == [outcome.value.generation]
        elif held:
            assert isinstance(outcome.error, ht.OutcomeUnknown), f"committed, and the source is told {outcome.error}"
        assert len(daemon.logged("snapshot committed", key=key)) == len(held)
        if held:
            with direct.get(key) as got:
                assert_same_tokens(value, got)
        if fault in SLOW:
            proxy.do(release)
        next_works(client, f"{key}/next", value)


def get_through(
    daemon: RunningDaemon, settings: ht.ClientConfig, direct: ht.Client, key: str, point: Point, fault: Fault
) -> None:
    value = snapshot(seed=2)
    direct.put(key, value)
    with Proxy(daemon.address, framing=Http2) as proxy, ht.connect(proxy.address, config=settings) as client:
        fired = proxy.at(trigger(point), fault)
        outcome = attempt(lambda: client.get(key, timeout_s=BUDGET_S))
        assert fired.wait(5)
        check_error(outcome)
        if outcome.error is None:
            assert_same_tokens(value, outcome.value)
        if fault in SLOW:
            proxy.do(release)
        next_works(client, f"{key}/next", value)
    eventually(lambda: direct.stat(key).info.reader_count == 0, 10, "nobody reads it any more")


def trigger(point: Point) -> Trigger:
    return message(*point)


def next_works(client: ht.Client, key: str, value: ht.KVSnapshot) -> None:
    client.put(key, value, timeout_s=30)
    with client.get(key, timeout_s=30) as got:
        assert_same_tokens(value, got)


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
            settings, key = config(daemon, transport), f"{fault}/{kind}/{at}"
            future = pool.submit(run, daemon, settings, direct, key, point, FAULTS[fault])
            running[f"{fault} at {at} of {kind} over {transport}"] = future
        failed = [f"{name}: {error}" for name, future in running.items() if (error := future.exception())]
        assert not failed, "\n".join(failed)
        for info in direct.list():
            direct.delete(info.key)
        eventually(lambda: balanced(daemon), 15, "the arena is whole")


def balanced(daemon: RunningDaemon) -> bool:
    arena = daemon.node_state().arena
    return bool(arena.free_bytes == arena.total_bytes)
