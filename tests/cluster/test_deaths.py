"""Sources, targets and movers are killed, paused, stopped and started again in the middle of transfers of 256 MiB, over
every transport at once: each is committed or leaves no trace, and the next handoff works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from cluster import matrix
from cluster.harness import SETTLED_S, TRANSPORTS, all_at_once
from cluster.matrix import Row
from cluster.site import MIB, Site, site
from support.daemon import eventually

pytestmark = pytest.mark.timeout(300)

MOVER = "hurray_server.mover"
FAULTS = [
    (do, victim, how)
    for do in ("put", "get")
    for victim in ("source", "target", "mover")
    for how in ("kill -9", "pause", "stop", "restart")
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("pki")) as made:
        yield made


def test_a_handoff_over_each_transport(place: Site) -> None:
    for transport, agent in place.agents.items():
        for do in ("put", "get"):
            said = agent.ask(**place.order(transport, do, f"whole/{transport}", MIB))
            assert (said["reason"], said["transport"]) == ("OK", transport), said
    place.node.clear()
    books = place.books()
    for transport in TRANSPORTS:
        matrix.ROWS.append(Row("handoff of 256 MiB", transport, "committed, got", None, books, books == "balanced"))
    assert books == "balanced"


@pytest.mark.parametrize(("do", "victim", "how"), FAULTS, ids=[" ".join(fault) for fault in FAULTS])
def test_in_the_middle(place: Site, do: str, victim: str, how: str) -> None:
    """What is hit are the agents, the node, or the node's mover."""
    keys = place.begin(do)
    began_s = time.monotonic()
    if victim == "mover":
        said = hit_mover(place, how)
    elif (victim == "source") == (do == "put"):
        said = hit_agents(place, how)
    else:
        said = hit_node(place, how)
    unnoticed_s = SETTLED_S if how == "pause" else 0.0
    place.check(f"{do}: {how} of the {victim}", do, keys, said, began_s, unnoticed_s=unnoticed_s)


def hit_agents(place: Site, how: str) -> dict[str, dict[str, Any]]:
    """What they say of their transfers: nothing, where they are no more."""
    agents = list(place.agents.values())
    if how == "pause":
        all_at_once(*(agent.pause for agent in agents))
        try:
            eventually(place.settled, SETTLED_S, "the node gives them up")
        finally:
            all_at_once(*(agent.unpause for agent in agents))
        return place.go_on()
    all_at_once(*((agent.kill if how == "kill -9" else agent.stop) for agent in agents))
    said = place.hear()
    if how == "restart":
        all_at_once(*(agent.start for agent in agents))
    return said


def hit_node(place: Site, how: str) -> dict[str, dict[str, Any]]:
    """What the agents say, who go on as soon as it has happened."""
    node = place.node
    if how == "kill -9":
        node.kill()
        return place.go_on()
    if how == "pause":
        node.pause()
        try:
            return place.go_on()
        finally:
            node.unpause()
    before = node.log().count('"event": "signal"')
    ending = threading.Thread(target=node.stop if how == "stop" else node.restart)
    ending.start()
    eventually(lambda: node.log().count('"event": "signal"') > before, SETTLED_S, "it was told to stop")
    said = place.go_on()
    ending.join()
    return said


def hit_mover(place: Site, how: str) -> dict[str, dict[str, Any]]:
    """The same. "restart": the one that comes instead is killed, too."""
    pid = place.node.mover
    if how == "pause":
        os.kill(pid, signal.SIGSTOP)
        try:
            return place.go_on()
        finally:
            with suppress(ProcessLookupError):  # its supervisor has killed it: it did not answer
                os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGTERM if how == "stop" else signal.SIGKILL)
    if how == "restart":
        (other,) = eventually(lambda: [found for found in place.node.pids(MOVER) if found != pid], SETTLED_S)
        os.kill(other, signal.SIGKILL)
    return place.go_on()
