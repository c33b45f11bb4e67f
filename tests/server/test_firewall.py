"""UCX's port is there for hosts that have a session, and for nobody else."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.remote_client import RemoteClient, remote_client
from hurray_server import firewall
from hurray_server.config import load_config
from hurray_server.firewall import Address, Firewall, address_of
from hurray_server.mover_config import MoverConfig, TransportsConfig
from hurray_server.mover_link import MoverLink
from hurray_server.preflight import preflight
from hurray_server.principal import Principal
from hurray_server.sessions import Sessions
from hurray_wire.errors import DataPlaneUnavailable, InvalidRequest, PeerUnavailable
from hurray_wire.limits import Limits
from hurray_wire.messages import PROTOCOL_VERSION
from hurray_wire.transport.shm import ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx_config import UcxConfig
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import UCX_PORTS, RunningDaemon, children, command, environment, eventually, running_daemon, state
from support.netns import Host, add_address, run, two_hosts

SOON_S = 20.0
TABLE = "hurrayd_test"

# --- a node, and hosts on its network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A node, and a host whose client may have a session."""

    node: Host
    other: Host
    network: str

    @property
    def config(self) -> str:
        address = f"[{self.node.address}]" if ":" in self.node.address else self.node.address
        return (
            f'listen = "{address}:7411"\ninsecure = true\ntransports = ["ucx"]\n'
            f'[ucx]\nnet_devices = ["{self.node.device}"]\ntrusted = ["{self.network}"]\nfirewall = true\n'
        )

    @contextmanager
    def client(self, daemon: RunningDaemon) -> Iterator[RemoteClient]:
        settings = {
            "HURRAY_TRANSPORTS": "ucx",
            "HURRAY_UCX__NET_DEVICES": self.other.device,
            "HURRAY_UCX__TRUSTED": self.network,
        }
        with remote_client(daemon.address, "client", prefix=self.other.command, **settings) as client:
            yield client

    def reaches(self, port: int, source: str) -> bool:
        """Whether a plain connection from an address gets in."""
        with knock(self, port, source) as knocking:
            return knocking.stdout is not None and knocking.stdout.readline() == "in\n"

    def stranger_reaches(self, port: int) -> bool:
        """Whether a host without a session does: another address, for as long as that takes. Beside an older one UCX
        would connect from it, and gRPC might."""
        stranger = str(ipaddress.ip_network(self.network)[3])
        add_address(self.other, stranger, self.network)
        try:
            return self.reaches(port, stranger)
        finally:
            run("ip", "-n", self.other.name, "addr", "flush", "to", stranger)

    def tables(self) -> str:
        return subprocess.check_output([*self.node.command, "nft", "list", "tables"], text=True)


KNOCK = """
import socket, sys
try:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10, (sys.argv[3], 0))
except ConnectionRefusedError:
    sys.exit("refused")
print("in", flush=True)
sys.stdin.readline()
try:
    connection.sendall(b"x")  # UCX waits for more of it
    connection.recv(1)
except ConnectionResetError:
    print("cut", flush=True)
"""


@contextmanager
def knock(network: Network, port: int, source: str) -> Iterator[subprocess.Popen[str]]:
    """A stranger's connection: says "in", waits for a line, and says "cut" if it cannot go on."""
    with subprocess.Popen(
        [*network.other.command, sys.executable, "-c", KNOCK, network.node.address, str(port), source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def laid(network: str) -> Iterator[Network]:
    with two_hosts(network, untested="FIREWALL") as (node, other):
        yield Network(node, other, network)


@pytest.fixture
def network() -> Iterator[Network]:
    with laid("10.77.0.0/24") as found:
        yield found


def unread(pid: int) -> int:
    """Bytes in the pipe that is a process's standard input."""
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def guarded_port(daemon: RunningDaemon) -> int:
    return int(daemon.logged("firewall")[-1]["port"])


@pytest.mark.ucx
@pytest.mark.parametrize("addresses", ["10.77.0.0/24", "fd77::/64"])
def test_only_a_host_with_a_session_reaches_ucx(addresses: str) -> None:
    with laid(addresses) as network, running_daemon(network.config, prefix=network.node.command) as daemon:
        port, host = guarded_port(daemon), network.other.address
        assert not network.reaches(port, host)
        with network.client(daemon) as client:
            client.tell("small a/b")
            assert client.hear()["reason"] == "OK"
            assert network.reaches(port, host)
            assert not network.stranger_reaches(port)
            subprocess.run([*network.node.command, "nft", "flush", "ruleset"], check=True)
            assert not network.stranger_reaches(port), "another's flush opens nothing"
            with knock(network, port, host) as inside:
                assert inside.stdout is not None
                assert inside.stdin is not None
                assert inside.stdout.readline() == "in\n"
                client.process.kill()
                eventually(lambda: not network.reaches(port, host), SOON_S, "the session is over")
                inside.stdin.write("\n")
                inside.stdin.flush()
                assert inside.stdout.readline() == "cut\n", "what was connected already is not served either"
        mover = daemon.mover_pid
        assert mover is not None
        (nft,) = [child for child in children(daemon.pid) if child != mover]
        with network.client(daemon) as client:
            client.tell("small a/b")
            assert client.hear()["reason"] == "OK", "the same host may come again"
            os.kill(nft, signal.SIGSTOP)
        eventually(lambda: unread(nft), SOON_S, "nft is told to shut it out")
        os.kill(mover, signal.SIGSTOP)
        daemon.kill()
        os.kill(nft, signal.SIGCONT)
        eventually(lambda: not network.reaches(port, host), SOON_S, "nft does what it was told, though nobody asks")
        assert network.tables(), "while the mover is there, so is what guards it"
        assert not network.stranger_reaches(port)
        os.kill(mover, signal.SIGCONT)
        eventually(lambda: state(mover) in (None, "Z"), SOON_S, "the mover ends")
        eventually(lambda: not network.tables(), SOON_S, "nothing is left")


@pytest.mark.ucx
def test_without_its_firewall_nothing_listens(network: Network) -> None:
    with running_daemon(network.config, prefix=network.node.command) as daemon:
        first = daemon.mover_pid
        assert first is not None
        (nft,) = [child for child in children(daemon.pid) if child != first]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(nft, number)  # as to a whole control group
        assert not network.reaches(guarded_port(daemon), network.other.address)
        assert len(daemon.logged("firewall")) == 1, "these are hurrayd's to obey"
        os.kill(nft, signal.SIGKILL)
        eventually(lambda: state(first) in (None, "Z"), SOON_S, "the mover dies of it")
        eventually(lambda: len(daemon.logged("mover up")) == 2, SOON_S, "another is guarded from its start")
        assert not network.reaches(guarded_port(daemon), network.other.address)
        with network.client(daemon) as client:
            client.tell("small a/b")
            assert client.hear()["reason"] == "OK"
        daemon.terminate()
        assert daemon.wait() == 0
        assert not network.tables()


# --- whether it can be had --------------------------------------------------------------------------------------------


def test_without_the_right_to_set_it_up_nothing_starts(tmp_path: Path) -> None:
    drop = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"] if os.geteuid() == 0 else []
    missing = [tool for tool in ("nft", *drop[:1]) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"NO FIREWALL IS TESTED: no {', '.join(missing)}")
    path = tmp_path / "hurrayd.toml"
    path.write_text('listen = "127.0.0.1:0"\ntransports = ["ucx"]\n[ucx]\nfirewall = true\n')
    for arguments in (["--check"], []):
        tried = subprocess.run(
            [*drop, *command("--config", str(path), *arguments)],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert tried.returncode == 2, tried.stderr
        assert tried.stderr.startswith(
            "hurrayd: configuration: ucx.firewall: nft cannot set it up (it takes CAP_NET_ADMIN"
        )
        assert "Operation not permitted" in tried.stderr


def test_what_cannot_be_guarded_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hurrayd.toml"
    path.write_text('transports = ["ucx"]\n[ucx]\nfirewall = true\n')
    config = load_config(path, {})
    monkeypatch.setattr(firewall.shutil, "which", lambda *_, **__: None)
    with pytest.raises(InvalidRequest, match=r"ucx\.firewall: nft does not run: .* install nftables") as refused:
        preflight(config)
    assert refused.value.field == "ucx.firewall"
    preflight(load_config(path, {"transports": ["shm"]}))  # there is nothing to guard
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: "infiniband" in path.parts)
        with pytest.raises(InvalidRequest, match=r"ucx\.firewall: what goes over mlx5_0:1 passes no firewall"):
            firewall.check_firewall(("mlx5_0:1",))


@pytest.mark.parametrize(
    ("caller", "address"),
    [
        ("ipv4:10.0.0.7:40312", "10.0.0.7"),
        ("ipv6:%5Bfd00::7%5D:40312", "fd00::7"),
        ("ipv6:[::ffff:10.0.0.7]:40312", "10.0.0.7"),
        ("ipv4:127.0.0.1:40312", None),
        ("ipv6:[::1]:40312", None),
        ("ipv6:[::ffff:127.0.0.1]:40312", None),
        ("unix:", None),
    ],
)
def test_a_caller_is_admitted_by_its_address(caller: str, address: str | None) -> None:
    assert address_of(caller) == (ipaddress.ip_address(address) if address else None)


@pytest.mark.parametrize("caller", ["", "ipv4:", "ipv4:host:1", "ipv6:[fe80::1%25eth0]:1", "vsock:3:1"])
def test_a_caller_that_the_table_cannot_name_is_not_admitted(caller: str) -> None:
    with pytest.raises(DataPlaneUnavailable) as refused:
        address_of(caller)
    assert (refused.value.field, refused.value.stage) == ("ucx.firewall", "session")


# --- with another nft -------------------------------------------------------------------------------------------------


def fake_nft(folder: Path, cases: str) -> Path:
    """One that takes every command, but those of these cases of a shell, and writes down what it is told."""
    path = folder / "nft"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -i ] || exit 0\nwhile read -r line; do\n echo "$line" >> {folder}/told\n'
        f' case "$line" in\n {cases}\n "list set"*) echo "}}";;\n esac\ndone\n'
    )
    path.chmod(0o755)
    return path


class Run:
    """A firewall over a fake nft."""

    def __init__(self, folder: Path) -> None:
        self.failures: list[str] = []
        self.failed = asyncio.Event()
        self.firewall = Firewall(TABLE, on_failed=self._on_failed)
        self._told = folder / "told"

    def _on_failed(self, why: str) -> None:
        self.failures.append(why)
        self.failed.set()

    def told(self) -> list[str]:
        """Changes to who is admitted."""
        return [line for line in self._told.read_text().splitlines() if "element" in line and "sessions" in line]


def with_nft(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cases: str, body: Callable[[Run], Coroutine[Any, Any, None]]
) -> None:
    path = str(fake_nft(folder, cases))
    monkeypatch.setattr(firewall, "find_nft", lambda: path)

    async def main() -> None:
        run = Run(folder)
        try:
            await body(run)
        finally:
            await run.firewall.stop()

    asyncio.run(main())


async def settled(run: Run) -> None:
    """What a release asks for is done."""
    for _ in range(2):  # it gets its turn between these two
        await run.firewall.guard(7421)


A, A_AGAIN, B = "ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv6:[fd00::1]:1"


def test_an_address_is_admitted_once_and_until_its_last_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(run: Run) -> None:
        wall = run.firewall
        await wall.guard(7420)
        addresses = await asyncio.gather(*map(wall.admit, (A, B, A_AGAIN)))
        assert await wall.admit("unix:") is None
        add = [
            f"add element inet {TABLE} sessions4 {{ 10.0.0.1 }}",
            f"add element inet {TABLE} sessions6 {{ fd00::1 }}",
        ]
        assert run.told() == add
        for address in addresses:
            assert address is not None
        wall.release(ipaddress.ip_address("10.0.0.1"))
        await settled(run)
        assert run.told() == add
        wall.release(ipaddress.ip_address("10.0.0.1"))
        await settled(run)
        assert run.told() == [*add, f"delete element inet {TABLE} sessions4 {{ 10.0.0.1 }}"]
        assert not run.failures

    with_nft(tmp_path, monkeypatch, "", body)


def test_a_caller_that_gives_up_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(run: Run) -> None:
        await run.firewall.guard(7420)
        waiting = asyncio.create_task(run.firewall.admit(A))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the command is on its way
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await settled(run)
        assert [line.split()[0] for line in run.told()] in ([], ["add", "delete"])
        assert not run.failures

    with_nft(tmp_path, monkeypatch, "", body)


def test_who_is_refused_is_not_admitted_and_may_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(run: Run) -> None:
        await run.firewall.guard(7420)
        for _ in range(2):
            with pytest.raises(DataPlaneUnavailable, match=r"10\.0\.0\.1 cannot be admitted: Error: no") as refused:
                await run.firewall.admit(A)
            assert (refused.value.field, refused.value.stage) == ("ucx.firewall", "session")
        await run.firewall.admit(B)
        assert not run.failures

    with_nft(tmp_path, monkeypatch, '*"add element"*sessions4*) echo "Error: no";;', body)


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        ("*delete*) echo 'Error: no';;", "10.0.0.1 cannot be shut out: Error: no"),
        ("*delete*) exit 0;;", "nft has ended"),
        ("*delete*) exec sleep 60;;", "nft does not answer"),
    ],
)
def test_when_nobody_is_shut_out_any_more_it_says_so_and_begins_anew(
    cases: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firewall, "ANSWER_S", 0.3)

    async def body(run: Run) -> None:
        await run.firewall.guard(7420)
        await run.firewall.admit(A)
        run.firewall.release(ipaddress.ip_address("10.0.0.1"))
        await run.failed.wait()
        assert run.failures == [f"its firewall has failed: {why}"]
        with pytest.raises(DataPlaneUnavailable, match="it is not there"):
            await run.firewall.admit(B)
        await run.firewall.guard(7421)
        await run.firewall.admit(B)
        assert len(run.failures) == 1

    with_nft(tmp_path, monkeypatch, cases, body)


@pytest.mark.parametrize("cases", ["*'add table'*) echo 'Operation not permitted (you must be root)'; exit 0;;"])
def test_a_table_that_cannot_be_made_keeps_the_node_from_starting(
    cases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(run: Run) -> None:
        with pytest.raises(DataPlaneUnavailable, match="nft has ended; Operation not permitted") as refused:
            await run.firewall.guard(7420)
        assert (refused.value.field, refused.value.stage) == ("ucx.firewall", "start")

    with_nft(tmp_path, monkeypatch, cases, body)


@pytest.mark.ucx
def test_a_mover_that_came_up_after_the_firewall_had_failed_is_ended() -> None:
    class Fallen:
        descriptors, stands = (), False

        async def guard(self, port: int) -> None:
            pass

    def never(*_: object) -> None:
        raise AssertionError

    async def main() -> None:
        ports = UcxConfig(first_port=UCX_PORTS[0], last_port=UCX_PORTS[1])
        transports = TransportsConfig(("ucx",), ShmConfig(), SocketConfig(), ports)
        config = MoverConfig(
            1 << 20, prefault=False, transports=transports, limits=Limits(), log_level="info", log_format="json"
        )
        link = MoverLink(
            config,
            on_up=never,
            on_down=never,
            on_peer_lost=never,
            on_reader_gone=never,
            firewall=Fallen(),  # type: ignore[arg-type]
        )
        with pytest.raises(DataPlaneUnavailable, match="the firewall of this node has failed"):
            await link.start()
        assert not [child for child in children(os.getpid()) if state(child) != "Z"]

    asyncio.run(main())


# --- sessions ---------------------------------------------------------------------------------------------------------


class Link:
    """Stands for the mover: writes down what it is told."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opened = ("shm", "ucx")
        self.usage = mpb.MoverUsage()

    @property
    def transports(self) -> list[pb.Transport]:
        return [pb.Transport(kind=kind) for kind in ("shm", "ucx")]

    def require_up(self, _: str) -> mpb.MoverStarted:
        return mpb.MoverStarted(transports=self.transports)

    async def open_peer(self, *_: object) -> tuple[str, ...]:
        self.events.append("open")
        return self.opened

    def close_peer(self, *_: object, abort: bool) -> asyncio.Future[None]:
        self.events.append(f"close {abort=}")
        return self.closed


class Gate:
    """Stands for the firewall."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.error: DataPlaneUnavailable | None = None

    async def admit(self, caller: str) -> Address | None:
        self.events.append("admit")
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return address_of(caller)

    def release(self, address: Address) -> None:
        self.events.append(f"release {address}")


def with_sessions(body: Callable[[Sessions, Link, Gate], Coroutine[Any, Any, None]]) -> list[str]:
    """What it came to, in order."""
    events: list[str] = []

    async def main() -> None:
        link, gate = Link(events), Gate(events)
        await body(Sessions(link, max_sessions=9, firewall=gate), link, gate)  # type: ignore[arg-type]

    asyncio.run(main())
    return events


CALLER = Principal("t", admin=False, address=A, identity=None, grants=None)


def hello(*kinds: str) -> pb.Hello:
    transports = [pb.Transport(kind=kind, address=b"x") for kind in kinds]
    return pb.Hello(protocol_version=PROTOCOL_VERSION, incarnation=7, transports=transports)


@pytest.mark.parametrize("abort", [False, True])
def test_a_peer_is_admitted_before_it_is_opened_and_until_it_is_closed(abort: bool) -> None:
    async def body(sessions: Sessions, link: Link, gate: Gate) -> None:
        session, _ = await sessions.open(CALLER, hello("ucx"))
        closing = asyncio.create_task(sessions.close(session, abort=abort))
        await asyncio.sleep(0)
        gate.events.append("closed")
        link.closed.set_result(None)
        await closing
        await sessions.close(session, abort=True)  # a second time, nothing

    assert with_sessions(body) == ["admit", "open", f"close {abort=}", "closed", "release 10.0.0.1"]


def test_a_peer_that_cannot_be_admitted_has_no_session() -> None:
    async def body(sessions: Sessions, link: Link, gate: Gate) -> None:
        gate.error = DataPlaneUnavailable("no", field="ucx.firewall")
        with pytest.raises(DataPlaneUnavailable) as refused:
            await sessions.open(CALLER, hello("shm", "ucx"))
        assert refused.value is gate.error
        assert len(sessions) == 0

    assert with_sessions(body) == ["admit", "close abort=True"]


def test_a_peer_whose_session_ends_while_it_is_admitted_is_not_opened() -> None:
    async def body(sessions: Sessions, _: Link, gate: Gate) -> None:
        opening = asyncio.create_task(sessions.open(CALLER, hello("ucx")))
        await asyncio.sleep(0)
        sessions.lose_all(DataPlaneUnavailable("the mover died"))
        with pytest.raises(DataPlaneUnavailable, match="the mover died"):
            await opening
        gate.events.append("over")

    assert with_sessions(body) == ["admit", "release 10.0.0.1", "over"]


def test_a_lost_peer_is_shut_out_when_its_stream_ends() -> None:
    async def body(sessions: Sessions, _: Link, gate: Gate) -> None:
        session, _welcome = await sessions.open(CALLER, hello("ucx"))
        sessions.lose(session.peer, PeerUnavailable("gone"))
        await sessions.close(session, abort=True)
        gate.events.append("over")

    assert with_sessions(body) == ["admit", "open", "release 10.0.0.1", "over"]


def test_who_does_not_use_ucx_is_not_admitted() -> None:
    async def body(sessions: Sessions, *_: object) -> None:
        await sessions.open(CALLER, hello("shm"))

    assert with_sessions(body) == ["open"]

    async def opened_without(sessions: Sessions, link: Link, _: Gate) -> None:
        link.opened = ("shm",)
        await sessions.open(CALLER, hello("shm", "ucx"))

    assert with_sessions(opened_without) == ["admit", "open", "release 10.0.0.1"]
