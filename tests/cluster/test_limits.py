"""Clocks that differ, arenas that are full, memory that a container has not, ports that are taken: each is named."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cluster import matrix
from cluster.engine import Container, docker
from cluster.harness import BUDGET_S, PORT, START_S, TENANT, TRANSPORTS, Agent, Cluster, Node, all_at_once
from cluster.matrix import Row
from support.daemon import eventually

pytestmark = pytest.mark.timeout(300)

FAKETIME = next(Path("/usr/lib").rglob("libfaketimeMT.so.1"), None)
REMOTE = ("tls", "tcp", "ucx")


def at(offset: str) -> list[str]:
    """For a container whose clock is wrong by so much."""
    settings = {"LD_PRELOAD": "/faketime.so", "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    settings["DONT_FAKE_MONOTONIC"] = "1"
    mount = ["--volume", f"{FAKETIME}:/faketime.so:ro"]
    return mount + [part for item in settings.items() for part in ("--env", "=".join(item))]


def ask(agent: Agent, do: str, key: str, transport: str, node: str = "node-a", mib: int = 16, **others: Any) -> Any:
    order = {"do": do, "key": f"{TENANT}/{key}", "node": f"{node}:{PORT}", "transport": transport, "mib": mib}
    return agent.ask(**(order | {"budget_s": BUDGET_S} | others))


def row(scenario: str, transport: str, outcome: str, books: str, *, right: bool, seconds: float | None = None) -> None:
    right = right and books in ("balanced", "")
    matrix.ROWS.append(Row(scenario, transport, outcome, seconds, books, right))
    assert right, matrix.ROWS[-1]


def refuses_to_start(node: Node, scenario: str, *named: str) -> None:
    """It ends by itself, with a status that says so, and its log says why."""
    docker("start", node.name)
    status, said = node.wait(), node.log()
    right = status != 0 and all(text in said for text in named)
    row(scenario, "", f"no start, status {status}", "", right=right)


@pytest.mark.skipif(FAKETIME is None, reason="CLOCK SKEW IS NOT TESTED: no libfaketime")
def test_clocks_that_differ(bare: Cluster) -> None:
    """By hours: nothing depends on it. By months: the certificate is not valid, and that is said."""
    bare.make_node("node-a", arena_mib=300, options=at("+2h")).start()
    early, late = bare.make_agent("early", options=at("-30m")), bare.make_agent("late", options=at("+60d"))
    all_at_once(early.start, late.start)
    for transport in REMOTE:
        said = ask(early, "small", transport, transport)
        books = bare.nodes["node-a"].balanced()
        row("node 2 h ahead, peer 30 min behind", transport, "committed", books, right=said["reason"] == "OK")
    said = ask(late, "put", "late", "tls")
    right = "certificate is not valid now" in said["text"]
    row("peer 60 days ahead", "tls", f"{said['reason']}: certificate not valid", books, right=right)
    months = bare.make_node("months", arena_mib=64, options=at("+60d"))
    refuses_to_start(months, "node 60 days ahead", "tls.certificate is not valid now")


def test_an_arena_that_is_full(bare: Cluster) -> None:
    """Who comes too late is told so at once, and served as soon as there is room. What is there stays."""
    node = bare.make_node("node-a", arena_mib=400)
    node.start()
    agent = bare.make_agent("agent", beside="node-a")
    agent.start()
    for transport in TRANSPORTS:
        assert ask(agent, "put", "first", transport, mib=256)["reason"] == "OK"
        said = ask(agent, "put", "second", transport, mib=256)
        assert (said["reason"], said["code"], said["stage"]) == ("ARENA_FULL", "RESOURCE_EXHAUSTED", "offer"), said
        assert ask(agent, "get", "first", transport, mib=256)["reason"] == "OK"
        node.clear()
        assert ask(agent, "small", "third", transport, mib=256)["reason"] == "OK"
        books = node.balanced()
        row("arena full", transport, "ARENA_FULL in offer", books, right=True, seconds=said["seconds"])


def test_more_arena_than_the_container_may_have(bare: Cluster) -> None:
    node = bare.make_node("node-a", arena_mib=600, options=["--memory", "300m", "--memory-swap", "300m"])
    refuses_to_start(node, "arena beyond the container's memory", "arena.bytes", "control group")


def test_the_memory_limit_of_the_container_is_hit(bare: Cluster) -> None:
    """The kernel kills the mover in the middle of a put, the daemon goes on with another."""
    node = bare.make_node("node-a", arena_mib=300, options=["--memory", "800m", "--memory-swap", "800m"])
    node.start()
    agents = {transport: bare.make_agent(f"agent-{transport}", beside="node-a") for transport in TRANSPORTS}
    all_at_once(*(agent.start for agent in agents.values()))
    for transport, agent in agents.items():
        assert ask(agent, "put", f"cut/{transport}", transport, mib=256, at=0.5) == {"middle": True}
        began_s = time.monotonic()
        exhaust(node, node.mover)
        agent.tell(go=True)
        said = agent.hear()
        node.wait_ready()
        following = ask(agent, "small", f"next/{transport}", transport)
        right = said.get("code") == "UNAVAILABLE" and bool(said["stage"]) and following["reason"] == "OK"
        outcome, took = f"{said['reason']} in {said.get('stage')}", said["at_s"] - began_s
        row("memory limit hit, mover killed", transport, outcome, node.balanced(), right=right, seconds=took)


def exhaust(container: Container, victim: int) -> None:
    """Take all the memory that a container may have, until the kernel has killed that process of it."""
    Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
    # What takes it ends by itself, killed or not.
    take = "open('/proc/self/oom_score_adj', 'w').write('500'); bytearray(780 << 20)"
    subprocess.run(["docker", "exec", container.name, "python3", "-c", take], capture_output=True, check=False)
    eventually(lambda: not Path(f"/proc/{victim}").exists(), START_S, "it was killed")


def test_the_memory_limit_of_a_client_is_hit(bare: Cluster) -> None:
    """The kernel kills it in the middle of a get; the node is left with nothing of it."""
    node = bare.make_node("node-a", arena_mib=300)
    node.start()
    agent = bare.make_agent("agent", options=["--memory", "800m", "--memory-swap", "800m"])
    for transport in REMOTE:
        agent.start()
        assert ask(agent, "put", "held", transport, mib=128)["reason"] == "OK"
        assert ask(agent, "get", "held", transport, mib=128, at=0.5) == {"middle": True}
        exhaust(agent, agent.pids("agent.py")[-1])
        said = agent.hear()
        agent.wait()
        node.clear()
        row("memory limit hit, target killed", transport, "no trace", node.balanced(), right=said["reason"] == "ENDED")


def test_a_port_that_is_taken(bare: Cluster) -> None:
    """The second daemon in one network says so, and does not disturb the first."""
    first = bare.make_node("node-a", arena_mib=64)
    first.start()
    second = bare.make_node("second", arena_mib=64, network_of=first)
    refuses_to_start(second, "port taken", "port taken", f"0.0.0.0:{PORT}")
    agent = bare.make_agent("agent")
    agent.start()
    for transport in REMOTE:
        said = ask(agent, "small", transport, transport)
        row("port taken: the first node", transport, "committed", first.balanced(), right=said["reason"] == "OK")
