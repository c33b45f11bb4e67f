"""The network device of UCX is taken away, and another one of its name and address comes: UCX needs another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from faults.remote_client import RemoteClient, remote_client
from support.daemon import RunningDaemon, eventually, running_daemon
from support.netns import Host, plug_in, two_hosts, unplug

pytestmark = pytest.mark.ucx

PORT = 7411
NOTICED_S = 20.0
"""The mover tells every 2 s; the machine may be busy."""


@dataclass(frozen=True)
class Place:
    node: Host
    other: Host
    daemon: RunningDaemon

    def client(self, transports: str, **settings: str) -> AbstractContextManager[RemoteClient]:
        ucx = {"HURRAY_UCX__NET_DEVICES": self.other.device, "HURRAY_UCX__TRUSTED": "10.77.0.0/24"}
        return remote_client(
            f"{self.node.address}:{PORT}",
            transports,
            prefix=self.other.command,
            **{"HURRAY_TRANSPORTS": transports, **ucx, **settings},
        )

    def replace_device(self) -> None:
        unplug((self.node, self.other))
        plug_in((self.node, self.other))

    def transport_of(self, key: str) -> str:
        (committed,) = eventually(lambda: self.daemon.logged("snapshot committed", key=key), NOTICED_S, "committed")
        return str(committed["transport"])

    def metrics(self) -> str:
        read = "import sys, urllib.request as u; sys.stdout.buffer.write(u.urlopen(sys.argv[1]).read())"
        command = [*self.other.command, sys.executable, "-c", read, f"http://{self.daemon.watched}/metrics"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with two_hosts(untested="DEVICE OF UCX") as (node, other):
        config = "\n".join(
            [
                f'listen = "{node.address}:{PORT}"',
                "insecure = true",
                'transports = ["ucx", "tcp"]',
                "[tcp]",
                f'listen = "{node.address}:0"',
                "[ucx]",
                f'net_devices = ["{node.device}"]',
                'trusted = ["10.77.0.0/24"]',
                "[leases]",
                "default_s = 600.0",
                "[metrics]",
                f'listen = "{node.address}:0"',
            ]
        )
        with running_daemon(config, prefix=node.command) as daemon:
            yield Place(node, other, daemon)


def ask(client: RemoteClient, order: str) -> dict[str, str]:
    client.tell(order)
    return client.hear()


def test_a_node_takes_another_mover_once_it_holds_nothing_and_a_client_takes_another_transport(place: Place) -> None:
    daemon = place.daemon
    with place.client("ucx,tcp") as old:
        assert ask(old, "hold held") == {"reason": "OK"}
        assert place.transport_of("held") == "ucx"
        mover = daemon.mover_pid
        place.replace_device()
        (unusable,) = eventually(lambda: daemon.logged("transports that cannot be used"), NOTICED_S, "it is noticed")
        assert "was replaced" in unusable["transports"]["ucx"]

        # What the node holds stays, for whoever has another transport; who has not hears why.
        with place.client("ucx", HURRAY_RETRY_S="0") as stubborn, place.client("ucx,tcp") as new:
            assert ask(new, "small before") == {"reason": "OK"}
            assert place.transport_of("before") == "tcp"
            refused = ask(stubborn, "small refused")
            assert (refused["reason"], refused["stage"]) == ("DATA_PLANE_UNAVAILABLE", "connect"), refused
            assert "ucx cannot be used: at the node, its device" in refused["text"]
            assert daemon.mover_pid == mover
            metrics = place.metrics()
            assert 'hurray_transport_up{transport="ucx"} 0.0' in metrics
            assert 'hurray_transport_up{transport="tcp"} 1.0' in metrics
            assert "hurray_ready 1.0" in metrics

            assert ask(new, "take held") == {"reason": "OK"}
            eventually(lambda: len(daemon.logged("mover up")) == 2, NOTICED_S, "another mover")
            assert not daemon.logged("what the mover held is lost")
            assert ask(new, "small after") == {"reason": "OK"}
            assert place.transport_of("after") == "ucx"

        # This process's own UCX has the same trouble, and no other process.
        assert ask(old, "small last") == {"reason": "OK"}
        assert place.transport_of("last") == "tcp"


def test_no_mover_is_ended_before_another_would_start(place: Place) -> None:
    daemon = place.daemon
    with place.client("ucx") as client:
        assert ask(client, "small first") == {"reason": "OK"}
    movers, told = len(daemon.logged("mover up")), len(daemon.logged("transports that cannot be used"))
    unplug((place.node, place.other))
    (gone,) = eventually(lambda: daemon.logged("transports that cannot be used")[told:], NOTICED_S, "it is noticed")
    assert gone["transports"]["ucx"].endswith("is gone")
    plug_in((place.node, place.other))
    with place.client("ucx", HURRAY_RETRY_S="30") as client:
        assert ask(client, "small next") == {"reason": "OK"}
    assert place.transport_of("next") == "ucx"
    assert len(daemon.logged("mover up")) == movers + 1
