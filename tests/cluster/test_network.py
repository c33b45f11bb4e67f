"""The network between a node and its peers is taken away, or is narrow, lossy or long; and names move."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import matrix
from cluster.engine import Container, docker
from cluster.harness import BUDGET_S, PORT, START_S, TENANT, TESTS, Agent, Cluster, Node, all_at_once
from cluster.matrix import Row
from cluster.site import Site, site
from support.daemon import eventually

pytestmark = pytest.mark.timeout(300)

DEVICE = "eth0"

LOSSY = """
table inet lossy {
 chain arriving {
  type filter hook input priority 0; policy accept;
  iifname != "lo" numgen random mod 100 < 5 drop
 }
}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("pki")) as made:
        yield made


@pytest.mark.parametrize("do", ["put", "get"])
def test_unplugged_in_the_middle(place: Site, do: str) -> None:
    keys = place.begin(do)
    began_s = time.monotonic()
    place.node.in_network("ip", "link", "set", DEVICE, "down")
    try:
        said = place.go_on()
    finally:
        place.node.in_network("ip", "link", "set", DEVICE, "up")
    place.check(f"{do}: cable pulled, plugged in again", do, keys, said, began_s)


def test_disconnected_in_the_middle(place: Site) -> None:
    """The node's device is taken away, and another one of that name comes back. UCX does not know that one: the node
    takes another mover as soon as it holds nothing."""
    node = place.node
    for transports in (("shm", "tls", "tcp"), ("ucx",)):
        node.clear()
        mover = node.mover
        keys = place.begin("put", transports)
        began_s = time.monotonic()
        docker("network", "disconnect", place.made.network, node.name)
        try:
            said = place.go_on()
        finally:
            docker("network", "connect", "--ip", node.address, "--alias", node.host, place.made.network, node.name)
            rename_device(node)
        if transports == ("ucx",):
            eventually(lambda old=mover: node.mover != old, START_S, "it has another mover")
        place.check("put: network disconnected, connected again", "put", keys, said, began_s)
        node.restart()  # the engine does not find the renamed device again


def rename_device(node: Node) -> None:
    """The engine counts on: what was eth0 comes back as eth1."""
    (name,) = [link["ifname"] for link in json.loads(node.in_network("ip", "-j", "link")) if link["ifname"] != "lo"]
    for change in (("down",), ("name", DEVICE), ("up",)):
        node.in_network("ip", "link", "set", name if change[0] != "up" else DEVICE, *change)


def test_ten_megabits_a_second(place: Site) -> None:
    """What is too much for the budget ends when the budget does; what fits goes through."""
    place.node.clear()
    for agent in place.agents.values():
        shape = ("rate", "10mbit", "burst", "64kb", "latency", "300ms")
        agent.in_network("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)
    budget_s = 8.0
    try:
        for mib, scenario in ((256, "put of 256 MiB at 10 Mbit/s"), (4, "put of 4 MiB at 10 Mbit/s")):
            began_s = time.monotonic()
            keys = place.begin("put", mib=mib, at=None, budget_s=budget_s if mib == 256 else BUDGET_S)
            said = place.hear()

            def fits(name: str, heard: dict[str, Any], mib: int = mib) -> bool:
                return heard["reason"] == ("OK" if mib == 4 or name == "shm" else "DEADLINE_EXCEEDED")

            place.check(scenario, "put", keys, said, began_s, expected=fits)
    finally:
        for agent in place.agents.values():
            agent.in_network("tc", "qdisc", "del", "dev", DEVICE, "root")


def test_five_percent_of_all_packets_lost(place: Site) -> None:
    """On their way to the node and to its peers."""
    everyone = [place.node, *place.agents.values()]
    for container in everyone:
        container.in_network("nft", "-f", "-", stdin=LOSSY)
    try:
        for do in ("put", "get"):
            place.node.clear()
            began_s = time.monotonic()
            keys = place.begin(do, mib=16, at=None, budget_s=60.0)
            said = place.hear()
            place.check(
                f"{do} of 16 MiB, 5 % loss",
                do,
                keys,
                said,
                began_s,
                budget_s=60.0,
                expected=lambda _, heard: heard["reason"] == "OK",
            )
    finally:
        for container in everyone:
            container.in_network("nft", "delete", "table", "inet", "lossy")
    place.node.clear()


def test_two_hundred_milliseconds_away(bare: Cluster) -> None:
    """A relay holds every byte for 100 ms in each direction. UCX reaches the node by itself: of it, only the control
    plane is far."""
    node = bare.make_node("far", arena_mib=400, reached_as="relay")
    address = bare.address()
    name = bare.engine.create(
        "relay",
        [
            *("--network", bare.network, "--ip", address, "--network-alias", "relay", "--no-healthcheck"),
            *("--volume", f"{TESTS}:/tests:ro"),
        ],
        ["python3", "/tests/relay.py", node.address, "0.1", str(PORT), "7412", "7414"],
    )
    docker("start", name)
    node.start()
    relay = Container(name, "relay", address)
    eventually(lambda: "ready" in relay.log(), START_S, "the relay")
    agent = bare.make_agent("agent")
    agent.start()
    for transport in ("tls", "tcp", "ucx"):
        for do in ("put", "get"):
            said = ask(agent, do, f"{do}/{transport}" if do == "put" else f"put/{transport}", transport, "relay", 64)
            assert said["reason"] == "OK", said
            assert said["seconds"] > 0.2, f"that was no long way: {said}"
    node.clear()
    for transport in ("tls", "tcp", "ucx"):
        agent.tell(**order("put", f"cut/{transport}", transport, "relay", 64, at=0.5))
        assert agent.hear() == {"middle": True}
        began_s = time.monotonic()
        relay.pause()
        try:
            agent.tell(go=True)
            cut = agent.hear()
        finally:
            relay.unpause()
        # UCX goes on, and nobody tells whether it is committed; the retry with the same id does.
        assert cut["reason"] in ("PEER_UNAVAILABLE", "DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN"), cut
        assert cut["stage"], cut
        following = ask(agent, "small", f"next/{transport}", transport, "relay", 4)
        assert following["reason"] == "OK", following
        node.clear()
        books = node.balanced()
        outcome = f"committed; cut: {cut['reason']} in {cut['stage']}"
        row = Row("200 ms away, then cut", transport, outcome, cut["at_s"] - began_s, books, books == "balanced")
        matrix.ROWS.append(row)
        assert books == "balanced"


def test_a_name_that_changes_its_address(bare: Cluster) -> None:
    """The node comes back elsewhere, under its name: who knows the name finds it."""
    node = bare.make_node("moving", arena_mib=400)
    node.start()
    agents = {transport: bare.make_agent(f"agent-{transport}") for transport in ("tls", "tcp", "ucx")}
    all_at_once(*(agent.start for agent in agents.values()))
    for transport, agent in agents.items():
        said = ask(agent, "put", f"before/{transport}", transport, "moving", 64)
        assert said["reason"] == "OK", said
    first, began_s = node.address, time.monotonic()
    docker("rm", "--force", node.name)
    node = bare.make_node("moving", arena_mib=400)
    node.start()
    assert node.address != first
    for transport, agent in agents.items():
        said = ask(agent, "small", f"after/{transport}", transport, "moving", 64)
        found_s = said["at_s"] - began_s
        books = node.balanced()
        right = said["reason"] == "OK" and books == "balanced"
        outcome = "committed" if right else said["reason"]
        matrix.ROWS.append(
            Row(f"a name's address changes: found after {found_s:.0f} s", transport, outcome, None, books, right)
        )
        assert right, (said, books)


def order(do: str, key: str, transport: str, node: str, mib: int, **others: Any) -> dict[str, Any]:
    values = {"do": do, "key": f"{TENANT}/{key}", "node": f"{node}:{PORT}", "transport": transport, "mib": mib}
    return {**values, "budget_s": BUDGET_S, **others}


def ask(agent: Agent, do: str, key: str, transport: str, node: str, mib: int) -> dict[str, Any]:
    return agent.ask(**order(do, key, transport, node, mib))
