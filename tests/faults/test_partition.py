"""The network between a node and its clients is cut in the middle of transfers, one way or both, and heals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from faults.remote_client import RemoteClient, remote_client
from support.daemon import RunningDaemon, eventually, running_daemon
from support.netns import Host, two_hosts

pytestmark = pytest.mark.ucx

NOTICED_S = 8.0
MIDDLE = 20
PORT = 7411
CHUNK_BYTES = 32 << 10  # none of it is sent before there is a receive for it


@dataclass(frozen=True)
class Cluster:
    node: Host
    other: Host
    daemon: RunningDaemon
    clients: dict[str, RemoteClient]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node, and four clients of it: they live through all tests."""
    with two_hosts() as (node, other), ExitStack() as stack:
        config = "\n".join(
            [
                f'listen = "{node.address}:{PORT}"',
                "insecure = true",
                'transports = ["tcp", "ucx"]',
                "[tcp]",
                f'listen = "{node.address}:0"',
                "[ucx]",
                f'net_devices = ["{node.device}"]',
                'trusted = ["10.77.0.0/24"]',
                "[transfers]",
                f"chunk_bytes = {CHUNK_BYTES}",
                "window = 2",
            ]
        )
        daemon = stack.enter_context(running_daemon(config, prefix=node.command))
        clients = {}
        for name in ("tcp put", "tcp get", "ucx put", "ucx get"):
            settings = {
                "HURRAY_TRANSPORTS": name.partition(" ")[0],
                "HURRAY_UCX__NET_DEVICES": other.device,
                "HURRAY_UCX__TRUSTED": "10.77.0.0/24",
                "HURRAY_CHUNK_BYTES": str(CHUNK_BYTES),
                "HURRAY_WINDOW": "2",
            }
            client = remote_client(f"{node.address}:{PORT}", name, prefix=other.command, **settings)
            clients[name] = stack.enter_context(client)
        for name, client in clients.items():
            client.tell(f"hold held/{name.replace(' ', '/')}")
        assert [client.hear()["reason"] for client in clients.values()] == ["OK"] * 4
        yield Cluster(node, other, daemon, clients)


@pytest.mark.parametrize("deaf", ["both", "the node", "the clients"])
def test_a_partition_is_noticed_on_both_sides_and_the_next_transfer_works_once_it_heals(
    cluster: Cluster, deaf: str
) -> None:
    daemon, clients, keys = cluster.daemon, cluster.clients, {}
    for name, client in clients.items():
        kind = name.split()[1]
        keys[name] = f"held/{name.replace(' ', '/')}" if kind == "get" else f"cut/{name}/{deaf}".replace(" ", "/")
        client.tell(f"{kind} {keys[name]} {MIDDLE}")
    heard = {name: client.hear() for name, client in clients.items()}
    assert heard == {name: {"middle": True} for name in clients}
    mover, failed_before = daemon.mover_pid, len(daemon.logged("transfer failed"))

    hosts = [
        host for host, name in ((cluster.node, "the node"), (cluster.other, "the clients")) if deaf in ("both", name)
    ]
    for host in hosts:
        host.deafen()
    cut_s = time.monotonic()
    for client in clients.values():
        client.tell("go on")
    try:
        for name, client in clients.items():
            heard = client.hear()
            assert time.monotonic() - cut_s < NOTICED_S, (name, heard)
            assert heard.get("code") == "UNAVAILABLE", (name, heard)
            assert heard["stage"] in ("pages", "data_plane"), (name, heard)
        eventually(
            lambda: len(daemon.logged("transfer failed")) == failed_before + 4,
            NOTICED_S - (time.monotonic() - cut_s),
            f"the node notices: {daemon.logged('transfer failed')[failed_before:]}",
        )
        for entry in daemon.logged("transfer failed")[failed_before:]:
            assert "UNAVAILABLE" in entry["reason"], entry
    finally:
        for host in hosts:
            host.heal()

    for name, client in clients.items():
        client.tell(f"small next/{name.replace(' ', '/')}")
    for name, client in clients.items():
        heard = client.hear()
        assert heard["reason"] == "OK", (name, heard)
    assert daemon.mover_pid == mover
    assert {entry["key"] for entry in daemon.logged("snapshot committed")}.isdisjoint(
        key for key in keys.values() if key.startswith("cut/")
    )
