"""Nothing adds up: neither where clients come and go, nor where a node is restarted under a client, nor after many
puts, gets, aborts, kills and expired leases at once.

    SOAK_CYCLES=200 pytest tests/faults/test_lifetime.py

runs as many cycles of each as that; without it few enough for every run.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import hurray_client as ht
from faults.harness import clean, next_works, settings, snapshot
from faults.processes import Held, resident_bytes, shared_memory_names
from faults.remote_client import remote_client
from sdk.snapshots import assert_same_tokens
from support.daemon import RunningDaemon, children, eventually, running_daemon

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(3600 if "SOAK_CYCLES" in os.environ else 120)]

CYCLES = int(os.environ.get("SOAK_CYCLES", "0"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
TRANSPORTS = ("shm", "tcp", "ucx")
CHUNK_BYTES = 16 << 10
PAGES = 256  # 256 KiB in all
GROWTH_BYTES = 16 << 20


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(f"[transfers]\nchunk_bytes = {CHUNK_BYTES}\nwindow = 2") as daemon:
        yield daemon


def client_of(daemon: RunningDaemon, transport: str) -> ht.Client:
    return ht.connect(daemon.address, config=settings(daemon, transport, chunk_bytes=CHUNK_BYTES))


def mover_of(daemon: RunningDaemon) -> int:
    return eventually(lambda: (daemon.node_state().ready and daemon.mover_pid) or 0, 20, "a mover that is ready")


# --- one side comes and goes ----------------------------------------------------------------------------------------


def test_clients_that_come_and_go_leave_nothing_at_the_node(daemon: RunningDaemon) -> None:
    """In order, or killed in the middle of a put."""
    value, mover = snapshot(1, PAGES), mover_of(daemon)

    def cycle(number: int) -> None:
        transport = TRANSPORTS[number % len(TRANSPORTS)]
        if number % 10 == 9:
            variables = {"HURRAY_TRANSPORTS": transport, "HURRAY_SHM__PATH": daemon.shm_path}
            with remote_client(daemon.address, "killed", **variables) as killed:
                killed.tell(f"put cut/{number} 1")
                assert killed.hear() == {"middle": True}
        else:
            with client_of(daemon, transport) as client:
                next_works(client, f"come/{number}", value)

    def settled() -> tuple[Held, Held]:
        eventually(lambda: ended_count(daemon) == len(daemon.logged("session opened")), 10, "all sessions are over")
        eventually(lambda: daemon.node_state().arena.held_bytes == 0, 10, "nothing is held")
        return Held.by(daemon.pid), Held.by(mover)

    for number in range(10):
        cycle(number)
    before, memory = settled(), resident_bytes(daemon.pid)
    for number in range(10, 10 + max(50, CYCLES)):
        cycle(number)
    eventually(lambda: settled() == before, 10, f"{settled()} is as {before}")
    assert daemon.mover_pid == mover
    assert resident_bytes(daemon.pid) - memory < GROWTH_BYTES


def ended_count(daemon: RunningDaemon) -> int:
    return len(daemon.logged("session closed")) + len(daemon.logged("session lost"))


def test_a_node_that_is_restarted_leaves_nothing_at_its_clients(daemon: RunningDaemon) -> None:
    value = snapshot(2, PAGES)
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon, transport)) for transport in TRANSPORTS]

        def cycle(number: int) -> Held:
            with ThreadPoolExecutor(len(clients)) as pool:
                keys = [f"node/{number}/{transport}" for transport in TRANSPORTS]
                list(pool.map(next_works, clients, keys, itertools.repeat(value)))
            held = Held.by(os.getpid())
            os.kill(mover_of(daemon), signal.SIGKILL)
            eventually(lambda: len(daemon.logged("mover down")) == number + 1, 10, "its death is noticed")
            return held

        first = [cycle(number) for number in range(3)][-1]
        later = [cycle(number) for number in range(3, 3 + max(3, CYCLES // 4))]
        # Threads of gRPC's pool, and descriptors of connections that are still closing, come and go.
        assert later[-1].descriptors - first.descriptors <= 8, (first, later)
        assert later[-1].threads - first.threads <= 8, (first, later)


# --- all at once ----------------------------------------------------------------------------------------------------


class Load:
    """Threads that hand over small snapshots all the time."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.failed: list[BaseException] = []
        self.count = itertools.count()
        self._daemon = daemon
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(transport,)) for transport in TRANSPORTS]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, transport: str) -> None:
        value = snapshot(3, 16)
        try:
            with client_of(self._daemon, transport) as client:
                while not self._ended.wait(0.02):
                    number = next(self.count)
                    try:
                        client.put(f"load/{number}", value, lease_s=5)
                        with client.get(f"load/{number}", consume=True) as got:
                            assert_same_tokens(value, got)
                    except (ht.PeerUnavailable, ht.DataPlaneUnavailable, ht.OutcomeUnknown, ht.SnapshotLost):
                        continue  # the mover was killed under it
                    except ht.KeyNotFound:
                        continue
        except BaseException as error:
            self.failed.append(error)


class Stop(Exception):
    """What an aborted put is told."""


def stop_at_once(_: ht.Progress) -> None:
    raise Stop


def test_many_cycles_of_everything_under_load(daemon: RunningDaemon) -> None:
    dice, value = random.Random(SEED), snapshot(4, PAGES)
    names, transports = shared_memory_names(), itertools.cycle(TRANSPORTS)
    number = itertools.count()

    def put(client: ht.Client) -> None:
        client.put(f"cycle/{next(number)}", value, lease_s=2)

    def get(client: ht.Client) -> None:
        key = f"cycle/{next(number)}"
        client.put(key, value, lease_s=30)
        with client.get(key, consume=True) as got:
            assert_same_tokens(value, got)

    def abort(client: ht.Client) -> None:
        key = f"abort/{next(number)}"
        with pytest.raises(Stop):
            client.put(key, value, on_progress=stop_at_once, lease_s=2)

    def expire(client: ht.Client) -> None:
        client.put(f"expire/{next(number)}", value, lease_s=0.05)

    def reconnect(_: ht.Client) -> None:
        with client_of(daemon, next(transports)) as another:
            get(another)

    def kill_client(_: ht.Client) -> None:
        variables = {"HURRAY_TRANSPORTS": next(transports), "HURRAY_SHM__PATH": daemon.shm_path}
        with remote_client(daemon.address, "killed", **variables) as killed:
            killed.tell(f"put killed/{next(number)} {dice.choice((0, 1, 5, -1))}")
            assert killed.hear() == {"middle": True}

    def kill_mover(client: ht.Client) -> None:
        os.kill(mover_of(daemon), signal.SIGKILL)
        eventually(lambda: not daemon.node_state().ready, 5, "the mover is down")
        get(client)

    weights: dict[Callable[[ht.Client], None], int] = {
        put: 6, get: 8, abort: 6, expire: 6, reconnect: 4, kill_client: 1, kill_mover: 1
    }  # fmt: skip
    deck = [action for action, weight in weights.items() for _ in range(weight)]
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon, transport)) for transport in TRANSPORTS]

        def cycles(count: int) -> None:
            for _ in range(count):
                hand = [dice.choice(deck) for _ in range(4)]
                with ThreadPoolExecutor(len(hand)) as pool:
                    list(pool.map(safely, hand, [dice.choice(clients) for _ in hand]))

        def safely(action: Callable[[ht.Client], None], client: ht.Client) -> None:
            try:
                action(client)
            except (ht.PeerUnavailable, ht.DataPlaneUnavailable, ht.OutcomeUnknown, ht.SnapshotLost, ht.KeyBusy):
                assert kill_mover in weights  # another hand killed the mover under it

        def at_rest() -> tuple[int, Held, int]:
            eventually(lambda: not list(clients[0].list("load/")), 20, "no load is left")
            clean(clients[0])
            eventually(
                lambda: ended_count(daemon) + len(clients) >= len(daemon.logged("session opened")), 10, "sessions"
            )
            return resident_bytes(daemon.pid), Held.by(daemon.pid), resident_bytes(os.getpid())

        with Load(daemon) as load:
            cycles(4)
        memory, held, own = at_rest()
        with load.__class__(daemon) as load:
            cycles(max(10, CYCLES))
        assert load.failed == []
        memory_after, held_after, own_after = at_rest()
        print(
            f"\n{CYCLES} cycles, {next(load.count)} of load: {(memory_after - memory) >> 10} KiB, {held} {held_after}"
        )
        assert memory_after - memory < GROWTH_BYTES
        assert own_after - own < GROWTH_BYTES + (64 << 20)  # staging that is kept
        assert held_after.descriptors - held.descriptors <= 8, (held, held_after)
        assert held_after.threads - held.threads <= 8, (held, held_after)
    assert shared_memory_names() <= names
    assert children(daemon.pid) == [daemon.mover_pid]
