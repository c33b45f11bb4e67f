"""Sources, targets and movers are killed, paused, stopped and started again in the middle of transfers of 256 MiB, over
every transport at once: each is committed or leaves no trace, and the next handoff works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster import matrix
from cluster.engine import Engine
from cluster.harness import (
    BUDGET_S,
    GRACE_S,
    PORT,
    SETTLED_S,
    TENANT,
    TRANSPORTS,
    Agent,
    Cluster,
    Node,
    all_at_once,
    cluster,
)
from cluster.matrix import Row
from support.daemon import eventually

pytestmark = pytest.mark.timeout(400)

MIB = 256
HALF = 0.5
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
VICTIMS = ("source", "target", "mover")


@dataclass
class Pair:
    """Two nodes, of which `a` is used, and an agent per transport beside it."""

    a: Node
    b: Node
    agents: dict[str, Agent]
    number: int = 0
    held: set[str] = field(default_factory=set)

    def order(self, transport: str, do: str, key: str, mib: int, **others: Any) -> dict[str, Any]:
        return {
            "do": do,
            "key": f"{TENANT}/{key}",
            "node": f"{self.a.host}:{PORT}",
            "transport": transport,
            "mib": mib,
            "budget_s": BUDGET_S,
            **others,
        }

    def hold(self) -> None:
        """A snapshot of 256 MiB per transport."""
        for transport, agent in self.agents.items():
            if f"{TENANT}/held/{transport}" not in self.a.keys():
                said = agent.ask(**self.order(transport, "put", f"held/{transport}", MIB))
                assert said["reason"] == "OK", said


@pytest.fixture(scope="module")
def pair(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with cluster(engine, tmp_path_factory.mktemp("pki")) as made:
        a, b = made.make_node("node-a"), made.make_node("node-b", arena_mib=64)
        all_at_once(a.start, b.start)
        agents = {transport: made.make_agent(f"agent-{transport}", beside="node-a") for transport in TRANSPORTS}
        all_at_once(*(agent.start for agent in agents.values()))
        yield Pair(a, b, agents)


def test_a_handoff_over_each_transport(pair: Pair) -> None:
    for transport, agent in pair.agents.items():
        said = agent.ask(**pair.order(transport, "put", f"whole/{transport}", MIB))
        assert (said["reason"], said["transport"]) == ("OK", transport), said
        got = agent.ask(**pair.order(transport, "get", f"whole/{transport}", MIB))
        assert (got["reason"], got["transport"]) == ("OK", transport), got
    pair.a.clear()
    books = pair.a.balanced()
    for transport in TRANSPORTS:
        matrix.ROWS.append(Row("handoff, 256 MiB", transport, "committed", None, books, books == "balanced"))
    assert books == "balanced"


FAULTS = [
    (do, victim, how)
    for do in ("put", "get")
    for victim in VICTIMS
    for how in ("kill -9", "pause", "stop", "restart")
]


@pytest.mark.parametrize(("do", "victim", "how"), FAULTS, ids=[" ".join(fault) for fault in FAULTS])
def test_in_the_middle(pair: Pair, do: str, victim: str, how: str) -> None:
    """What the fault hits is the agents, the node, or the node's mover."""
    pair.number += 1
    agents, node = pair.agents, pair.a
    keys = {name: f"held/{name}" if do == "get" else f"cut/{pair.number}/{name}" for name in agents}
    if do == "get":
        pair.hold()
    for name, agent in agents.items():
        agent.tell(**pair.order(name, do, keys[name], MIB, at=HALF))
    for name, agent in agents.items():
        assert agent.hear() == {"middle": True}, name

    hits_agents = (victim == "source") == (do == "put") and victim != "mover"
    began_s = time.monotonic()
    if hits_agents:
        said = hit_agents(pair, how)
    else:
        said = hit_node(pair, how, mover=victim == "mover")
    check(pair, f"{do}: {how} of the {victim}", keys, said, began_s, do=do)


def hit_agents(pair: Pair, how: str) -> dict[str, dict[str, Any]]:
    """What they say of their transfers: nothing, where they are no more."""
    agents = list(pair.agents.values())
    if how == "pause":
        all_at_once(*(agent.pause for agent in agents))
        try:
            eventually(lambda: pair.a.log().count('"transfer failed"') >= 0 and settled(pair.a), SETTLED_S, "noticed")
        finally:
            all_at_once(*(agent.unpause for agent in agents))
        for agent in agents:
            agent.tell(go=True)
        return {name: agent.hear() for name, agent in pair.agents.items()}
    all_at_once(*((agent.kill if how == "kill -9" else agent.stop) for agent in agents))
    said = {name: agent.hear() for name, agent in pair.agents.items()}
    if how == "restart":
        all_at_once(*(agent.start for agent in agents))
    return said


def settled(node: Node) -> bool:
    """Whether nothing is being received or read."""
    with node.connect() as client:
        return client.node().arena.receiving_bytes == 0 and all(not info.reader_count for info in client.list())


def hit_node(pair: Pair, how: str, *, mover: bool) -> dict[str, dict[str, Any]]:
    """What the agents say, who go on as soon as it has happened."""
    node, agents = pair.a, pair.agents

    def let_go() -> dict[str, dict[str, Any]]:
        for agent in agents.values():
            agent.tell(go=True)
        return {name: agent.hear() for name, agent in agents.items()}

    if mover:
        pid = node.mover
        if how == "pause":
            os.kill(pid, signal.SIGSTOP)
            try:
                return let_go()
            finally:
                os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM if how == "stop" else signal.SIGKILL)
        if how == "restart":  # again, as soon as there is another one
            os.kill(eventually(lambda: [found for found in node.pids("hurray_server.mover") if found != pid], 30)[0], 9)
        return let_go()
    if how == "pause":
        node.pause()
        try:
            return let_go()
        finally:
            node.unpause()
    if how == "kill -9":
        node.kill()
        return let_go()
    signals = node.log().count('"event": "signal"')
    stopping = threading.Thread(target=node.stop)
    stopping.start()
    eventually(lambda: node.log().count('"event": "signal"') > signals, 30, "it was told to stop")
    said = let_go()
    stopping.join()
    return said


def check(
    pair: Pair, scenario: str, keys: dict[str, str], said: dict[str, dict[str, Any]], began_s: float, *, do: str
) -> None:
    """What must be true whatever happened; a row of the table for each transport."""
    node, agents = pair.a, pair.agents
    if not node.state["Running"]:
        node.start()
    node.wait_ready()
    all_at_once(*(agent.start for agent in agents.values() if not agent.running))
    held = node.keys()
    wrong: dict[str, list[str]] = {name: [] for name in agents}
    for name, heard in said.items():
        if heard["reason"] not in ("OK", "ENDED"):
            if heard["code"] not in PASSING or not heard["stage"]:
                wrong[name].append(f"an error that names no passing cause and its stage: {heard}")
            if heard["seconds"] > BUDGET_S + GRACE_S + paused_s(scenario):
                wrong[name].append(f"late: {heard}")
        there = f"{TENANT}/{keys[name]}" in held
        if do == "put" and there and heard["reason"] not in ("OK", "OUTCOME_UNKNOWN"):
            wrong[name].append(f"committed, and the source is told {heard}")

    for name, agent in agents.items():
        next_one = agent.ask(**pair.order(name, "small", f"next/{pair.number}/{name}", 4))
        if next_one["reason"] != "OK":
            wrong[name].append(f"the next handoff fails: {next_one}")
    for key in node.keys("cut/"):
        with node.connect() as client:
            client.delete(key)
    books = [node.balanced(held_keys=True), pair.b.balanced()]
    for name, heard in said.items():
        outcome = {"OK": "committed" if do == "put" else "got", "ENDED": "no trace"}.get(
            heard["reason"], f"{heard['reason']} in {heard.get('stage')}"
        )
        right = not wrong[name] and set(books) == {"balanced"}
        took = heard["at_s"] - began_s if "code" in heard else None
        matrix.ROWS.append(Row(scenario, name, outcome, took, books[0], right))
    assert not any(wrong.values()), wrong
    assert set(books) == {"balanced"}, books


def paused_s(scenario: str) -> float:
    """What a process that was paused cannot have noticed."""
    return SETTLED_S if "pause" in scenario else 0.0
