"""Processes die or stop, at each point of a put and a get: the others are told in time, nothing of it is left, and
whoever did not die goes on untouched."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import hurray_client as ht
from faults.harness import BUDGET_S, GRACE_S, attempt, check_error, clean, next_works, settings, snapshot
from faults.remote_client import remote_client
from hurray_wire.image import Chunk
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.target_payloads import ImageTarget
from sdk.test_node import free_port
from support.daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.ucx

TRANSPORTS = ("shm", "tcp", "ucx")
CHUNK_BYTES = 32 << 10
NOTICED_S = 8.0
CONFIG = f"[transfers]\nchunk_bytes = {CHUNK_BYTES}\nwindow = 2"

POINTS = {"after the offer": 0, "in the middle of the pages": 8, "before the commit": -1}


# --- clients die ----------------------------------------------------------------------------------------------------


def test_clients_die() -> None:
    """Each at another point, killed or stopped, over some transport; all at once, and none may disturb the others."""
    cases = list(itertools.product(("killed", "stopped"), ("put", "get"), (*POINTS, "while idle")))
    with running_daemon(CONFIG, arena_bytes=256 << 20) as daemon, ExitStack() as stack:
        clients = {}
        for number, case in enumerate(cases):
            variables = {
                "HURRAY_TRANSPORTS": TRANSPORTS[number % len(TRANSPORTS)],
                "HURRAY_SHM__PATH": daemon.shm_path,
                "HURRAY_CHUNK_BYTES": str(CHUNK_BYTES),
                "HURRAY_WINDOW": "2",
            }
            clients[case] = stack.enter_context(remote_client(daemon.address, " ".join(case), **variables))
        bystander = stack.enter_context(ht.connect(daemon.address, config=settings(daemon, "tcp", chunk_bytes=4096)))
        value = snapshot(9, 240)
        bystander.put("held", value)
        for number, ((_, kind, _), client) in enumerate(clients.items()):
            client.tell(f"hold held/{number}" if kind == "get" else f"small warm/{number}")
        assert all(client.hear()["reason"] == "OK" for client in clients.values())
        busy = {}
        for number, ((how, kind, point), client) in enumerate(clients.items()):
            if point in POINTS:
                busy[how, kind, point] = client
                client.tell(f"{kind} {'held' if kind == 'get' else 'cut'}/{number} {POINTS[point]}")
        assert all(client.hear() == {"middle": True} for client in busy.values())
        began_s = time.monotonic()
        for (how, *_), client in clients.items():
            client.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        eventually(lambda: len(daemon.logged("transfer failed")) == len(busy), NOTICED_S, "all have failed")
        eventually(lambda: len(ended_sessions(daemon)) == len(cases), NOTICED_S, "all sessions are over")
        assert time.monotonic() - began_s < NOTICED_S + 2
        for entry in daemon.logged("transfer failed"):
            assert entry["reason"] in ("PEER_UNAVAILABLE", "OUTCOME_UNKNOWN"), entry
        assert not list(bystander.list("cut/"))
        next_works(bystander, "next", value)
        clean(bystander)

        survivors = {case: client for case, client in clients.items() if case[0] == "stopped"}
        for client in survivors.values():
            client.process.send_signal(signal.SIGCONT)
        for case, client in survivors.items():
            if case in busy:
                client.tell("go on")
                reasons = {"PEER_UNAVAILABLE", "OUTCOME_UNKNOWN"}
                if case[2] == "before the commit":
                    reasons.add("OK")  # the put asked again, the get had it all
                heard = client.hear()
                assert heard["reason"] in reasons, (case, heard)
        for number, client in enumerate(survivors.values()):
            client.tell(f"small again/{number}")
        assert all(client.hear()["reason"] == "OK" for client in survivors.values())


def ended_sessions(daemon: RunningDaemon) -> set[str]:
    return {entry["peer"] for event in ("session closed", "session lost") for entry in daemon.logged(event)}


# --- the node dies --------------------------------------------------------------------------------------------------


class Node:
    """A node whose addresses outlive it."""

    def __init__(self, folder: Path) -> None:
        self._config = f'listen = "127.0.0.1:{free_port()}"\n{CONFIG}\n[shm]\npath = "{folder}/shm.sock"'
        self._stack = ExitStack()
        self.shm_path = str(folder / "shm.sock")
        self.start()

    def start(self) -> None:
        self.daemon = self._stack.enter_context(running_daemon(self._config, arena_bytes=128 << 20))

    def signal(self, number: int, *, mover: bool = False, control: bool = False) -> None:
        mover_pid = self.daemon.mover_pid
        assert mover_pid is not None
        for pid in [self.daemon.pid] * control + [mover_pid] * mover:
            os.kill(pid, number)

    def stop(self) -> None:
        self._stack.close()


@dataclass
class Gate:
    """Where the data-plane thread of one client waits. `at`: a chunk, from the end if negative."""

    at: int
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


class Gates(dict[int, Gate]):
    """By the number of pages, which is another one for each client."""

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for kind, method in ((SnapshotSource, "stage"), (ImageTarget, "arrived")):
            patch.setattr(kind, method, self._gated(getattr(kind, method)))

    def _gated(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def method(payload: Any, chunk: Chunk, *others: Any) -> Any:
            gate = self.get(payload.plan.descriptors[0].num_pages)
            if gate is not None and chunk.index == gate.at % len(payload.plan.chunks):
                gate.reached.set()
                assert gate.go.wait(60)
            return whole(payload, chunk, *others)

        return method


@dataclass(frozen=True)
class Survivor:
    """A client that lives through all that happens to its node. `at` None: it does nothing meanwhile."""

    name: str
    kind: str
    at: int | None
    pages: int
    value: ht.KVSnapshot
    client: ht.Client

    def hand_over(self, key: str) -> Any:
        if self.kind == "put":
            return self.client.put(key, self.value, timeout_s=BUDGET_S)
        return self.client.get(key, timeout_s=BUDGET_S)


@dataclass(frozen=True)
class Scene:
    node: Node
    gates: Gates
    survivors: list[Survivor]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    gates, survivors = Gates(), []
    node = Node(tmp_path_factory.mktemp("node"))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(node.stop)
        gates.watch(patch)
        for number, (kind, point) in enumerate(itertools.product(("put", "get"), (*POINTS, "while idle"))):
            transport, pages = TRANSPORTS[number % len(TRANSPORTS)], 512 + number
            config = settings(node.daemon, transport, chunk_bytes=CHUNK_BYTES, shm={"path": node.shm_path})
            client = stack.enter_context(ht.connect(node.daemon.address, config=config))
            value = snapshot(number, pages)
            name = f"{kind} {point} over {transport}"
            survivors.append(Survivor(name, kind, POINTS.get(point), pages, value, client))
        yield Scene(node, gates, survivors)


def ready(node: Node, *, is_ready: bool, within_s: float) -> None:
    """Health and GetNode say the same, soon."""
    serving = health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(node.daemon.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        eventually(
            lambda: (
                (ask(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True).status == serving) is is_ready
            ),
            within_s,
            f"health: {is_ready}",
        )
        eventually(lambda: node.daemon.node_state().ready is is_ready, within_s, f"ready: {is_ready}")


def killed_mover(node: Node) -> None:
    node.signal(signal.SIGKILL, mover=True)


def restarted(node: Node) -> None:
    ready(node, is_ready=True, within_s=10)


def stopped_mover(node: Node) -> None:
    node.signal(signal.SIGSTOP, mover=True)


def found_out(node: Node) -> None:
    """It is killed once it has not answered for 10 s."""
    ready(node, is_ready=False, within_s=20)
    ready(node, is_ready=True, within_s=10)
    assert node.daemon.logged("mover condemned")


def frozen(node: Node) -> None:
    node.signal(signal.SIGSTOP, mover=True, control=True)


def thawed(node: Node) -> None:
    node.signal(signal.SIGCONT, mover=True, control=True)


def killed_and_started_again(node: Node) -> None:
    node.daemon.kill()
    node.start()


@pytest.mark.parametrize(
    ("harm", "mend"),
    [(killed_mover, restarted), (frozen, thawed), (stopped_mover, found_out), (killed_and_started_again, restarted)],
    ids=["mover killed", "node frozen", "mover stopped", "node restarted"],
)
def test_the_node_dies(scene: Scene, harm: Callable[[Node], None], mend: Callable[[Node], None]) -> None:
    node = scene.node
    busy = [(number, survivor) for number, survivor in enumerate(scene.survivors) if survivor.at is not None]
    keys = {survivor.name: f"{harm.__name__}/{number}" for number, survivor in enumerate(scene.survivors)}
    for survivor in scene.survivors:
        next_works(survivor.client, f"before/{survivor.pages}", survivor.value)
        if survivor.kind == "get":
            survivor.client.put(keys[survivor.name], survivor.value)
    with ThreadPoolExecutor(len(busy)) as pool:
        gates = {survivor.pages: Gate(survivor.at) for _, survivor in busy if survivor.at is not None}
        scene.gates.update(gates)
        running = {
            survivor.name: pool.submit(attempt, partial(survivor.hand_over, keys[survivor.name]))
            for _, survivor in busy
        }
        assert all(gate.reached.wait(20) for gate in gates.values())
        scene.gates.clear()
        harm(node)
        harmed_s = time.monotonic()
        for gate in gates.values():
            gate.go.set()
        outcomes = {name: future.result() for name, future in running.items()}
        assert time.monotonic() - harmed_s < BUDGET_S + GRACE_S
    for name, outcome in outcomes.items():
        check_error(outcome)
        # The last chunk of a get may have been there: then it is whole. A put asks a node that is back once more.
        assert outcome.error is not None or "before the commit" in name, name
    mend(node)

    for survivor in scene.survivors:
        next_works(survivor.client, f"after/{survivor.pages}", survivor.value)
    direct = scene.survivors[0].client
    held = [info.key for info in direct.list()]
    for name, outcome in outcomes.items():
        if name.startswith("put") and keys[name] in held:
            assert outcome.error is None or isinstance(outcome.error, ht.OutcomeUnknown), name
    clean(direct)
