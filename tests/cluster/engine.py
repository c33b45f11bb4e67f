"""Containers, networks and volumes of one run of tests, by the command `docker`. None is left when it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

IMAGE = os.environ.get("IMAGE", "hurray-transfer")
LABEL = "hurray.tests"
COMMAND_S = 90.0
ROOT = Path(__file__).parents[2]


def docker(*arguments: str, check: bool = True, timeout_s: float = COMMAND_S) -> str:
    """Its standard output. Raises RuntimeError with what it says where it fails."""
    ran = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and ran.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout.strip()


def require_engine() -> None:
    """Skip, and say so, where no containers can be run."""
    why = None
    if shutil.which("docker") is None:
        why = "there is no docker here"
    elif not docker("version", "--format", "{{.Server.Version}}", check=False):
        why = "no engine answers (deploy/engine.sh starts one)"
    elif os.geteuid() != 0:
        why = "not root, who alone reaches into the containers' networks"
    else:
        missing = [tool for tool in ("nsenter", "nft", "tc") if shutil.which(tool) is None]
        why = f"no {', '.join(missing)}" if missing else None
    if why is not None:
        pytest.skip(f"THE CLUSTER IS NOT TESTED: {why}")


@dataclass
class Engine:
    """What one run has made."""

    tag: str = field(default_factory=lambda: f"hurray-{uuid.uuid4().hex[:6]}")

    @property
    def _labels(self) -> tuple[str, ...]:
        return ("--label", f"{LABEL}={os.getpid()}", "--label", f"{LABEL}.tag={self.tag}")

    def make_network(self) -> tuple[str, str]:
        """A network that leads nowhere else; its name, and the beginning of all its addresses."""
        name = f"{self.tag}-net"
        create = ("network", "create", "--internal", *self._labels)
        docker(*create, name)
        subnet = json.loads(docker("network", "inspect", name))[0]["IPAM"]["Config"][0]["Subnet"]
        # Once more, with the one that it chose: only where it was named do addresses stay.
        docker("network", "rm", name)
        docker(*create, "--subnet", subnet, name)
        return name, subnet.rpartition(".")[0]

    def make_volume(self, name: str) -> str:
        docker("volume", "create", *self._labels, f"{self.tag}-{name}")
        return f"{self.tag}-{name}"

    def create(self, name: str, options: Sequence[str], command: Sequence[str]) -> str:
        """A container that does not run yet; its name."""
        full = f"{self.tag}-{name}"
        docker("create", "--name", full, *self._labels, "--init", *options, IMAGE, *command)
        return full

    def remove_all(self) -> None:
        _remove(f"{LABEL}.tag={self.tag}")


def _remove(label: str) -> None:
    mine = ("--quiet", "--filter", f"label={label}")
    for listing, removal in (
        (("ps", "--all"), ("rm", "--force", "--volumes")),
        (("network", "ls"), ("network", "rm")),
        (("volume", "ls"), ("volume", "rm", "--force")),
    ):
        if found := docker(*listing, *mine).split():
            docker(*removal, *found)


def remove_leavings() -> None:
    """What runs left behind that were killed."""
    listed = docker("ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.Label "{LABEL}"}}}}')
    for pid in set(listed.split()):
        if not Path(f"/proc/{pid}").exists():
            _remove(f"{LABEL}={pid}")


@dataclass
class Container:
    """One of them, at an address that stays."""

    name: str
    host: str
    """As others on its network call it."""

    address: str

    def kill(self) -> None:
        docker("kill", "--signal", "KILL", self.name)
        self.wait()

    def stop(self) -> None:
        """SIGTERM, and what follows."""
        docker("stop", "--time", "20", self.name)

    def pause(self) -> None:
        docker("pause", self.name)

    def unpause(self) -> None:
        docker("unpause", self.name)

    def wait(self) -> int:
        """Until it has ended; its exit status."""
        return int(docker("wait", self.name))

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", "--format", "{{json .State}}", self.name)))

    @property
    def pid(self) -> int:
        """Of its first process, on this host."""
        return int(self.state["Pid"])

    def in_network(self, *command: str, stdin: str | None = None, check: bool = True) -> str:
        """Run one of this host's commands in its network."""
        enter = ["nsenter", "--target", str(self.pid), "--net", *command]
        ran = subprocess.run(enter, input=stdin, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if check and ran.returncode:
            raise RuntimeError(f"{' '.join(command)} in {self.host}: {ran.stderr.strip()}")
        return ran.stdout

    def pids(self, part: str) -> list[int]:
        """Of its processes, on this host, with `part` in their command lines."""
        lines = docker("top", self.name, "-eo", "pid,args").splitlines()[1:]
        return [int(line.split()[0]) for line in lines if part in line]

    def log(self) -> str:
        ran = subprocess.run(
            ["docker", "logs", self.name], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        return ran.stdout + ran.stderr
