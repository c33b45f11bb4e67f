"""Two network namespaces joined by one cable, which a test can cut one way or both."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A namespace: its name, its end of the cable, its address."""

    name: str
    device: str
    address: str

    @property
    def command(self) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.name]

    def deafen(self) -> None:
        """Nothing reaches it any more."""
        rules = "table inet cut {\n chain arriving {\n type filter hook input priority 0; policy drop;\n }\n}\n"
        subprocess.run([*self.command, "nft", "-f", "-"], input=rules, text=True, check=True)

    def heal(self) -> None:
        """Everything reaches it again."""
        with suppress(subprocess.CalledProcessError):  # it was not deaf
            subprocess.run([*self.command, "nft", "delete", "table", "inet", "cut"], check=True, capture_output=True)


@contextmanager
def two_hosts(network: str = "10.77.0.0/24", *, untested: str = "PARTITION") -> Iterator[tuple[Host, Host]]:
    """Skips the test where this process may not make namespaces, or has not the tools."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"NO {untested} IS TESTED: {'no ' + ', '.join(missing) if missing else 'not root'}")
    tag = uuid.uuid4().hex[:6]
    first, second = str(ipaddress.ip_network(network)[1]), str(ipaddress.ip_network(network)[2])
    hosts = Host(f"hurray-{tag}-a", f"hry{tag}a", first), Host(f"hurray-{tag}-b", f"hry{tag}b", second)
    try:
        for host in hosts:
            made = subprocess.run(["ip", "netns", "add", host.name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"NO {untested} IS TESTED: {made.stderr.strip()}")
        for host in hosts:
            run("ip", "-n", host.name, "link", "set", "lo", "up")
        plug_in(hosts, network)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def plug_in(hosts: tuple[Host, Host], network: str = "10.77.0.0/24") -> None:
    """Lay the cable between them."""
    a, b = hosts
    run("ip", "link", "add", a.device, "netns", a.name, "type", "veth", "peer", b.device, "netns", b.name)
    for host in hosts:
        add_address(host, host.address, network)
        run("ip", "-n", host.name, "link", "set", host.device, "up")


def unplug(hosts: tuple[Host, Host]) -> None:
    """Take it away, and with it the devices at its ends. Those of another one have the same names, and are others."""
    run("ip", "-n", hosts[0].name, "link", "del", hosts[0].device)


def add_address(host: Host, address: str, network: str) -> None:
    """Give it one of this network."""
    at_once = ["nodad"] if ":" in address else []
    length = ipaddress.ip_network(network).prefixlen
    run("ip", "-n", host.name, "addr", "add", f"{address}/{length}", "dev", host.device, *at_once)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
