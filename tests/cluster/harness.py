"""Nodes and agents in containers on a network of their own, and what must be true of them after each fault."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import hurray_client as ht
from cluster.engine import Container, Engine, docker
from hurray_client.certs import CA_CERTIFICATE, Authority, write_files
from support.daemon import eventually

TENANT = "tests"
TRANSPORTS = ("shm", "tls", "tcp", "ucx")
PORT, METRICS = 7411, 7413
TESTS = Path(__file__).parent
START_S = 60.0
"""Of a container until what is in it works, on a busy machine."""

SETTLED_S = 30.0
"""Until a fault is over on the side that was not told of it: keepalive, drain, settle."""

ANSWER_S = 90.0
"""Longest silence of an agent that is not stuck."""

BUDGET_S = 20.0
"""Of one transfer."""

GRACE_S = 6.0
"""What a call may take beyond it: to drain and to settle."""

CONFIG = """
listen = "0.0.0.0:{port}"
transports = ["shm", "tls", "tcp", "ucx"]
drain_s = 5.0
[arena]
bytes = "{arena_mib}MiB"
[shm]
path = "/run/hurray/hurrayd.sock"
[tcp]
listen = "0.0.0.0:7414"
advertise = "{advertised}"
[ucx]
net_devices = ["eth0"]
trusted = ["eth0"]
[tls]
certificate = "/pki/node-{host}.pem"
key = "/pki/node-{host}.key"
ca = "/pki/ca.pem"
[tls.data]
certificate = "/pki/data-{host}.pem"
key = "/pki/data-{host}.key"
[metrics]
listen = "0.0.0.0:{metrics}"
[leases]
default_s = 600.0
"""


@dataclass
class Node(Container):
    """A hurrayd, and the volume with its socket."""

    volume: str
    credentials: ht.Credentials
    ready: str = ""
    """The line that it says when it is, of this start."""

    def connect(self) -> ht.Client:
        """A client of the control plane alone, from this host."""
        return ht.connect(f"{self.address}:{PORT}", config=ht.ClientConfig(retry_s=0, tls=self.credentials))

    def start(self) -> None:
        docker("start", self.name)
        self.wait_ready()

    def restart(self) -> None:
        docker("restart", "--time", "20", self.name)
        self.wait_ready()

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            with suppress(ht.HurrayError), self.connect() as client:
                return client.node(timeout_s=5).ready
            assert self.state["Running"], f"{self.host} has ended: {self.log()[-2000:]}"
            return False

        eventually(is_ready, START_S, f"{self.host} is ready: {self.log()[-2000:]}")

    @property
    def mover(self) -> int:
        """The process id of its mover, on this host."""
        return eventually(lambda: self.pids("hurray_server.mover"), START_S, f"{self.host} has a mover")[0]

    def failures(self) -> tuple[int, Counter[tuple[str, ...]]]:
        """The incarnation, and what its metrics count of transfers that failed: direction, transport, cause."""
        with self.connect() as client, urllib.request.urlopen(f"http://{self.address}:{METRICS}/metrics") as answer:
            incarnation, text = client.node().incarnation, answer.read().decode()
        counted: Counter[tuple[str, ...]] = Counter()
        for labels, count in re.findall(r"^hurray_transfers_total{(.*)} (\S+)$", text, re.MULTILINE):
            label = dict(re.findall(r'(\w+)="(.*?)"', labels))
            if label["outcome"] != "succeeded":
                counted[label["direction"], label["transport"], label["cause"]] = int(float(count))
        return incarnation, counted

    def keys(self, prefix: str = "") -> set[str]:
        with self.connect() as client:
            return {info.key for info in client.list(f"{TENANT}/{prefix}")}

    def clear(self) -> None:
        """Delete all that it holds."""
        with self.connect() as client:
            for info in client.list():
                with suppress(ht.KeyNotFound, ht.KeyDeleted, ht.KeyExpired, ht.SnapshotLost):
                    client.delete(info.key)

    def balanced(self, held_bytes: int = 0) -> str:
        """How its books are once nothing runs any more: "balanced" where so much is held, and all else is free."""

        def whole() -> bool:
            with suppress(ht.HurrayError), self.connect() as client:
                arena = client.node(timeout_s=5).arena
                return arena.held_bytes == held_bytes and arena.free_bytes + held_bytes == arena.total_bytes
            return False

        try:
            eventually(whole, SETTLED_S)
        except AssertionError:
            with self.connect() as client:
                return f"UNBALANCED {client.node().arena}"
        return "balanced"


class Agent(Container):
    """An engine, see agent.py. `start` begins a process anew."""

    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            ["docker", "start", "--attach", "--interactive", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, args=(self._process, self._heard), daemon=True)
        self._listener.start()
        eventually(lambda: self.state["Running"], START_S, f"{self.host} runs")

    @staticmethod
    def _listen(process: subprocess.Popen[str], heard: queue.SimpleQueue[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith("{"):  # UCX writes there, too
                    heard.put(line)
        heard.put("")

    @property
    def running(self) -> bool:
        return bool(self.state["Running"])

    def tell(self, **order: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def hear(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Its next answer; {"reason": "ENDED"} if it has none any more."""
        try:
            line = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.host} says nothing") from None
        if not line:
            return {"reason": "ENDED"}
        return dict(json.loads(line))

    def ask(self, timeout_s: float = ANSWER_S, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear(timeout_s)

    def close(self) -> None:
        """Listen no more to what it says."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._listener.join()
            self._process = None


@dataclass
class Cluster:
    """Some nodes, and the agents that were asked for."""

    engine: Engine
    network: str
    prefix: str
    pki: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    agents: dict[str, Agent] = field(default_factory=dict)
    _next: int = 10

    def address(self) -> str:
        """One that nobody has."""
        self._next += 1
        return f"{self.prefix}.{self._next}"

    @property
    def credentials(self) -> ht.Credentials:
        return ht.Credentials(self.pki / f"{TENANT}.pem", self.pki / f"{TENANT}.key", self.pki / CA_CERTIFICATE)

    def issue(self, node: str, *hosts: str) -> None:
        """Certificates for a node that is reached by these names and addresses."""
        authority = Authority.load(self.pki)
        day = timedelta(days=30)
        control, data = authority.issue_node(node, [node, "localhost", *hosts], day), authority.issue_data(node, day)
        files = {}
        for kind, issued in (("node", control), ("data", data)):
            files[self.pki / f"{kind}-{node}.pem"] = issued.certificate
            files[self.pki / f"{kind}-{node}.key"] = issued.key
        write_files(files, force=True)
        share(self.pki)

    def make_node(
        self,
        host: str,
        *,
        arena_mib: int = 1600,
        options: Sequence[str] = (),
        reached_as: str | None = None,
        network_of: Container | None = None,
    ) -> Node:
        """A node that does not run yet. `reached_as`: what it advertises, where that is not `host`. `network_of`: whose
        network it shares, which has a certificate of its name."""
        address = self.address() if network_of is None else network_of.address
        self.issue(host, address, *filter(None, [reached_as]))
        config = self.pki / f"{host}.toml"
        config.write_text(
            CONFIG.format(port=PORT, metrics=METRICS, arena_mib=arena_mib, host=host, advertised=reached_as or host)
        )
        volume = self.engine.make_volume(f"socket-{host}")
        place = ["--network", self.network, "--ip", address, "--network-alias", host, "--hostname", host]
        if network_of is not None:
            place = ["--network", f"container:{network_of.name}"]
        name = self.engine.create(
            host,
            [
                *place,
                *("--env", f"HURRAY_NODE={host}", "--env", f"HURRAY_ADVERTISE={reached_as or host}:{PORT}"),
                "--no-healthcheck",
                *("--volume", f"{self.pki}:/pki:ro", "--volume", f"{config}:/etc/hurray/hurrayd.toml:ro"),
                *("--volume", f"{volume}:/run/hurray"),
                *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
                *options,
            ],
            ["hurrayd"],
        )
        node = Node(name, host, address, volume, self.credentials)
        self.nodes[host] = node
        return node

    def make_agent(self, host: str, *, beside: str | None = None, options: Sequence[str] = ()) -> Agent:
        """An agent that does not run yet. `beside`: the node whose socket it sees."""
        address = self.address()
        socket = ["--volume", f"{self.nodes[beside].volume}:/mnt/node"] if beside is not None else []
        settings = {
            "HURRAY_TLS__CERTIFICATE": f"/pki/{TENANT}.pem",
            "HURRAY_TLS__KEY": f"/pki/{TENANT}.key",
            "HURRAY_TLS__CA": f"/pki/{CA_CERTIFICATE}",
            "HURRAY_SHM__PATH": "/mnt/node/hurrayd.sock",
            "HURRAY_UCX__NET_DEVICES": "eth0",
            "HURRAY_UCX__TRUSTED": "eth0",
            "HURRAY_KEEPALIVE_INTERVAL_S": "2",
            "OPENBLAS_NUM_THREADS": "1",
        }
        name = self.engine.create(
            host,
            [
                *("--interactive", "--network", self.network, "--ip", address, "--no-healthcheck"),
                *(part for item in settings.items() for part in ("--env", "=".join(item))),
                *("--volume", f"{self.pki}:/pki:ro", "--volume", f"{TESTS}:/tests:ro", *socket),
                *options,
            ],
            ["python3", "/tests/agent.py"],
        )
        agent = Agent(name, host, address)
        self.agents[host] = agent
        return agent

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()


def share(pki: Path) -> None:
    """Others of this host may read the keys: the user in the containers is another."""
    pki.chmod(0o755)
    for path in pki.iterdir():
        path.chmod(0o644)


@contextmanager
def cluster(pki: Path) -> Iterator[Cluster]:
    """A network and an authority, with nothing on it yet."""
    authority = Authority.new("hurray tests", timedelta(days=60))
    tenant = authority.issue_tenant(TENANT, timedelta(days=30))
    write_files(
        {
            pki / CA_CERTIFICATE: authority.certificate,
            pki / "ca.key": authority.key,
            pki / f"{TENANT}.pem": tenant.certificate,
            pki / f"{TENANT}.key": tenant.key,
        },
        force=False,
    )
    share(pki)
    engine = Engine()
    try:
        made = Cluster(engine, *engine.make_network(), pki)
        try:
            yield made
        finally:
            made.close()
    finally:
        engine.remove_all()


def all_at_once(*work: Callable[[], object]) -> None:
    """Each in a thread of its own; the first error of them is raised."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
