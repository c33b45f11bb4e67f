"""A node, one more that nothing happens to, an agent for each transport, and what must be true after every fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import matrix
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

MIB = 256
HALF = 0.5
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""Codes of what a fault of a process or a network may end with."""


@dataclass
class Site:
    """See the module. `node` is what faults hit."""

    made: Cluster
    node: Node
    other: Node
    agents: dict[str, Agent]
    number: int = 0
    _held_bytes: int = 0
    _busy: dict[str, Agent] = field(default_factory=dict)
    _counted: tuple[int, Counter[tuple[str, ...]]] = (0, Counter())

    def order(self, transport: str, do: str, key: str, mib: int, **others: Any) -> dict[str, Any]:
        """For an agent."""
        return {
            "do": do,
            "key": f"{TENANT}/{key}",
            "node": f"{self.node.host}:{PORT}",
            "transport": transport,
            "mib": mib,
            "budget_s": BUDGET_S,
            **others,
        }

    def hold(self, mib: int = MIB) -> None:
        """A snapshot to get, over every transport."""
        held = self.node.keys("held/")
        for transport, agent in self.agents.items():
            if f"{TENANT}/held/{transport}" not in held:
                said = agent.ask(**self.order(transport, "put", f"held/{transport}", mib))
                assert said["reason"] == "OK", said
        with self.node.connect() as client:
            self._held_bytes = client.node().arena.held_bytes

    def begin(
        self,
        do: str,
        transports: Sequence[str] = TRANSPORTS,
        *,
        mib: int = MIB,
        at: float | None = HALF,
        budget_s: float = BUDGET_S,
    ) -> dict[str, str]:
        """Have the agents put or get; with `at`, until they are there. The keys by transport."""
        self.number += 1
        if do == "get":
            self.hold(mib)
        self._counted = self.node.failures()
        self._busy = {name: self.agents[name] for name in transports}
        keys = {name: f"held/{name}" if do == "get" else f"cut/{self.number}/{name}" for name in transports}
        for name, agent in self._busy.items():
            agent.tell(**self.order(name, do, keys[name], mib, at=at, budget_s=budget_s))
        if at is not None:
            for name, agent in self._busy.items():
                assert (said := agent.hear()) == {"middle": True}, (name, said)
        return keys

    def go_on(self) -> dict[str, dict[str, Any]]:
        """Let those that wait in the middle go on; what comes of it."""
        for agent in self._busy.values():
            agent.tell(go=True)
        return self.hear()

    def hear(self) -> dict[str, dict[str, Any]]:
        """What comes of what was begun."""
        return {name: agent.hear() for name, agent in self._busy.items()}

    def check(
        self,
        scenario: str,
        do: str,
        keys: dict[str, str],
        said: dict[str, dict[str, Any]],
        began_s: float,
        *,
        budget_s: float = BUDGET_S,
        unnoticed_s: float = 0.0,
        expected: Callable[[str, dict[str, Any]], bool] = lambda _name, _heard: True,
    ) -> None:
        """What must be true whatever happened; a row of the table for each transport. `unnoticed_s`: for so long who
        was to be told could not be. `expected`: whether that is what must come of it over this transport."""
        if not self.node.state["Running"]:
            self.node.start()
        self.node.wait_ready()
        all_at_once(*(agent.start for agent in self.agents.values() if not agent.running))
        held = self.node.keys()
        wrong: dict[str, list[str]] = {name: [] for name in said}
        for name, heard in said.items():
            if heard["reason"] not in ("OK", "ENDED"):
                if heard["code"] not in PASSING or not heard["stage"]:
                    wrong[name].append("an error that names no passing cause and its stage")
                if heard["seconds"] > budget_s + GRACE_S + unnoticed_s:
                    wrong[name].append("late")
            there = f"{TENANT}/{keys[name]}" in held
            if do == "put" and there and heard["reason"] not in ("OK", "OUTCOME_UNKNOWN"):
                wrong[name].append("committed, and the source is told otherwise")
            if not expected(name, heard):
                wrong[name].append("another outcome than must be")
        for name, problems in wrong.items():
            next_one = self.agents[name].ask(**self.order(name, "small", f"next/{self.number}/{name}", 4))
            if next_one["reason"] != "OK":
                problems.append(f"the next handoff fails: {next_one}")
        with self.node.connect() as client:
            for key in self.node.keys("cut/"):
                client.delete(key)
        books = self.books()
        counted = {}
        for name, heard in said.items():
            told = heard["reason"] in ("OK", "OUTCOME_UNKNOWN")
            counted[name] = self.counted("in" if do == "put" else "out", name, wait=not told)
            if not told and not counted[name]:
                wrong[name].append("no metric counts it")
        for name, heard in said.items():
            committed = "committed" if do == "put" else "got"
            outcome = {"OK": committed, "ENDED": "no trace"}.get(
                heard["reason"], f"{heard['reason']} in {heard.get('stage')}"
            )
            took = heard["at_s"] - began_s if "code" in heard else None
            matrix.ROWS.append(
                Row(scenario, name, outcome, took, books, not wrong[name] and books == "balanced", counted[name])
            )
        assert not any(wrong.values()), {name: (problems, said[name]) for name, problems in wrong.items() if problems}
        assert books == "balanced"

    def counted(self, direction: str, transport: str, *, wait: bool) -> str:
        """The causes that the node's metrics have counted since the transfers began; "restarted" where it forgot. With
        `wait` there must be one."""

        def causes() -> str:
            before, now = self._counted, self.node.failures()
            if before[0] != now[0]:
                return "restarted"
            return ", ".join(sorted(cause for *flow, cause in now[1] - before[1] if flow == [direction, transport]))

        try:
            return eventually(causes, SETTLED_S if wait else 0.0, "counted")
        except AssertionError:
            return ""

    def books(self) -> str:
        """Of both nodes: what no key holds is free."""
        found = {self.node.balanced(self._held_bytes if self.node.keys() else 0), self.other.balanced()}
        return "; ".join(sorted(found)) if len(found) > 1 else found.pop()

    def settled(self) -> bool:
        """Whether nothing is being received or read any more."""
        with self.node.connect() as client:
            return client.node().arena.receiving_bytes == 0 and all(not info.reader_count for info in client.list())


@contextmanager
def site(pki: Path) -> Iterator[Site]:
    """All of it, ready."""
    with cluster(pki) as made:
        node, other = made.make_node("node-a"), made.make_node("node-b", arena_mib=64)
        all_at_once(node.start, other.start)
        agents = {transport: made.make_agent(f"agent-{transport}", beside="node-a") for transport in TRANSPORTS}
        all_at_once(*(agent.start for agent in agents.values()))
        yield Site(made, node, other, agents)
