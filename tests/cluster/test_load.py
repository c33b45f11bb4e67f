"""Nodes under load: restarted one after the other, and left alone for long."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cluster import matrix
from cluster.harness import PORT, TENANT, Agent, Node, all_at_once, cluster
from cluster.matrix import Row
from faults.processes import Held, resident_bytes
from support.daemon import eventually

SOAK_S = float(os.environ.get("SOAK_S", "40"))

pytestmark = pytest.mark.timeout(300 + SOAK_S)

NODES = ("node-a", "node-b", "node-c")
TRANSPORTS = ("tls", "tcp", "ucx")
MIB = 4


@dataclass
class Load:
    """Three nodes, and an agent per transport that hands over to one after the other."""

    nodes: list[Node]
    agents: dict[str, Agent]

    def start(self) -> None:
        addresses = [f"{node.host}:{PORT}" for node in self.nodes]
        for transport, agent in self.agents.items():
            key = f"{TENANT}/load/{transport}"
            agent.tell(do="load", nodes=addresses, transport=transport, mib=MIB, budget_s=30.0, key=key)

    def stop(self) -> dict[str, dict[str, Any]]:
        for agent in self.agents.values():
            agent.tell(stop=True)
        return {transport: agent.hear() for transport, agent in self.agents.items()}

    def committed(self) -> list[int]:
        """By node, so far."""
        return [node.log().count('"event": "snapshot committed"') for node in self.nodes]

    def moves_on(self) -> None:
        """Until every node has committed more."""
        before = self.committed()
        eventually(lambda: all(now > then for now, then in zip(self.committed(), before, strict=True)), 60, "they work")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    with cluster(tmp_path_factory.mktemp("pki")) as made:
        nodes = [made.make_node(name, arena_mib=64) for name in NODES]
        agents = {transport: made.make_agent(f"agent-{transport}") for transport in TRANSPORTS}
        all_at_once(*(container.start for container in (*nodes, *agents.values())))
        yield Load(nodes, agents)


def test_a_rolling_restart_of_all_nodes(load: Load) -> None:
    """What fails meanwhile says that the node drains or is not there; nothing else fails, and nothing is left."""
    load.start()
    load.moves_on()
    for node in load.nodes:
        node.restart()
        load.moves_on()
    said = load.stop()
    books = sorted({node.balanced() for node in load.nodes}, reverse=True)
    for transport, heard in said.items():
        outcomes = Counter(heard["outcomes"])
        good, slowest_s = outcomes.pop("OK"), heard["slowest_s"]
        failed = ", ".join(f"{count} {reason}" for reason, count in outcomes.items()) or "none failed"
        right = not heard["unexpected"] and books == ["balanced"]
        matrix.ROWS.append(Row("rolling restart", transport, f"{good} committed, {failed}", slowest_s, books[0], right))
        assert right, (heard, books)


def test_a_soak(load: Load) -> None:
    """At full load nothing grows: not what the processes hold in memory, nor descriptors, nor threads."""
    load.start()
    load.moves_on()
    load.moves_on()
    before = measure(load.nodes)
    time.sleep(SOAK_S)  # the load goes on
    after = measure(load.nodes)
    said = load.stop()
    for heard in said.values():
        assert not heard["unexpected"], heard
        assert set(heard["outcomes"]) == {"OK"}, heard
    books = sorted({node.balanced() for node in load.nodes}, reverse=True)
    total = sum(heard["outcomes"]["OK"] for heard in said.values())
    for name, (then_bytes, then) in before.items():
        now_bytes, now = after[name]
        right = (
            now_bytes < 1.25 * then_bytes + (16 << 20)
            and now.descriptors <= then.descriptors + 8
            and now.threads <= then.threads + 4
            and books == ["balanced"]
        )
        changes = {
            "MiB": (then_bytes >> 20, now_bytes >> 20),
            "descriptors": (then.descriptors, now.descriptors),
            "threads": (then.threads, now.threads),
        }
        outcome = f"{name}: " + ", ".join(f"{first} to {last} {what}" for what, (first, last) in changes.items())
        scenario = f"soak of {SOAK_S:.0f} s, {total} handoffs"
        matrix.ROWS.append(Row(scenario, "all", outcome, None, books[0], right))
        assert right, outcome


def measure(nodes: list[Node]) -> dict[str, tuple[int, Held]]:
    """What the processes of each node hold."""
    found = {}
    for node in nodes:
        for part, name in (("/bin/hurrayd", "daemon"), ("hurray_server.mover", "mover")):
            pid = node.pids(part)[-1]
            found[f"{name} of {node.host}"] = resident_bytes(pid), Held.by(pid)
    return found
