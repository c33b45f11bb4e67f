"""A real hurrayd in a process of its own, on free ports, and what tests want to know of it."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub

START_S = 60.0
STOP_S = 20.0
UCX_PORTS = (21000, 29999)
"""Wide, and below the ephemeral ports: many workers of many tests share it."""

T = TypeVar("T")


class RunningDaemon:
    """A hurrayd that is ready. `address` is "127.0.0.1:port", `log_path` its log (one JSON object a line)."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path, ready: str) -> None:
        self.process = process
        self.log_path = log_path
        self.shm_path = str(log_path.with_name("shm.sock"))
        self.ready = ready
        found = re.fullmatch(
            r"hurrayd ready: address=(\S+) listen=(\S+) node=(\S+) incarnation=([0-9a-f]{16}) .*", ready.strip()
        )
        assert found is not None, ready
        self.address, self.node = found[1], found[3]
        self.watched = ready.partition(" metrics=")[2].partition(" ")[0]
        """Address of its metrics."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def mover_pid(self) -> int | None:
        """Pid of the mover that lives now."""
        for child in children(self.pid):
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"hurray_server.mover" in command and state(child) != "Z":
                return child
        return None

    def log(self) -> list[dict[str, Any]]:
        """The log so far."""
        entries = []
        for line in self.log_path.read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                entries.append({"event": line})
        return entries

    def logged(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        """Log entries of this event with these fields."""
        return [
            entry
            for entry in self.log()
            if entry.get("event") == event and all(entry.get(name) == value for name, value in fields.items())
        ]

    def node_state(self) -> pb.GetNodeResponse:
        """What GetNode says, over a channel of its own."""
        with grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            return TransferServiceStub(channel).GetNode(pb.GetNodeRequest(), timeout=5, wait_for_ready=True)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(timeout_s)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9 of the control process alone."""
        self.process.kill()
        self.process.wait(STOP_S)

    def kill_mover(self) -> int:
        """kill -9 of the mover; its pid."""
        pid = self.mover_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid


def children(pid: int) -> list[int]:
    """Child processes of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found


def state(pid: int) -> str | None:
    """One letter, as in ps; None for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def eventually(probe: Callable[[], T], timeout_s: float, what: str = "") -> T:
    """The first true value of `probe`, asked every 10 ms until `timeout_s` have passed."""
    until_s = time.monotonic() + timeout_s
    while not (value := probe()):
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
    return value


def environment(**settings: str) -> dict[str, str]:
    """This process's, without settings of ours but those given."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HURRAY_")} | settings


def command(*arguments: str) -> list[str]:
    """hurrayd, as people start it: that of this environment, else of the path."""
    found = shutil.which("hurrayd", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found is not None, "there is no hurrayd"
    return [found, *arguments]


@contextmanager
def running_daemon(
    config: str = "",
    *,
    arena_bytes: int = 64 << 20,
    node: str = "test",
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    noise: str = "{",
) -> Iterator[RunningDaemon]:
    """A ready daemon, killed with all its children at the end. `config`: more TOML; a table that is named in it is the
    caller's as a whole ([arena] excepted: give `arena_bytes`; [ucx] gets its ports). `prefix`: a command that becomes
    it. `noise`: what lines of its log may contain that are no JSON: gRPC's own."""
    with tempfile.TemporaryDirectory(prefix="hurrayd-") as folder:
        path, log_path = Path(folder, "hurrayd.toml"), Path(folder, "log")
        top = [] if "listen =" in config else ['listen = "127.0.0.1:0"']
        tables = ["[arena]", f"bytes = {arena_bytes}"]
        if "[shm]" not in config:
            tables += ["[shm]", f'path = "{folder}/shm.sock"']
        if "[tcp]" not in config:
            tables += ["[tcp]", 'listen = "127.0.0.1:0"']
        ports = f"[ucx]\nfirst_port = {UCX_PORTS[0]}\nlast_port = {UCX_PORTS[1]}\n"
        if "[ucx]" not in config:
            tables.append(ports)
        elif "first_port" not in config:
            config = config.replace("[ucx]\n", ports)
        path.write_text("\n".join([*top, f'node = "{node}"', config, *tables]))
        with log_path.open("wb") as sink:
            process = subprocess.Popen(
                [*prefix, *command("--config", str(path))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment(**(env or {})),
                text=True,
            )
        assert process.stdout is not None
        with process, process.stdout:
            movers: list[int] = []
            try:
                readable, _, _ = select.select([process.stdout], [], [], START_S)
                ready = process.stdout.readline() if readable else ""
                assert ready, f"hurrayd did not start:\n{log_path.read_text()}"
                yield RunningDaemon(process, log_path, ready)
            finally:
                movers = children(process.pid)
                process.kill()
                process.wait(STOP_S)
                for mover in movers:
                    eventually(lambda mover=mover: state(mover) in (None, "Z"), 20, "the mover outlives its daemon")
            faults = [line for line in log_path.read_text().splitlines() if '"event": "internal error"' in line]
            assert not faults, "\n".join(faults)
            strange = [
                line for line in log_path.read_text().splitlines() if not line.startswith("{") and noise not in line
            ]
            assert not strange, "\n".join(strange)
