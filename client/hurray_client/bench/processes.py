"""The benchmark's processes: how they are started and spoken to, and what they cost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from types import TracebackType
from typing import Any, Final, Self

STOP_S: Final = 10.0
ANSWER_S: Final = 300.0

UCX_PORTS: Final = {"HURRAY_UCX__FIRST_PORT": "21000", "HURRAY_UCX__LAST_PORT": "29999"}
"""Wide, and apart from the default: a hurrayd in use on this host keeps its own."""


class BenchError(Exception):
    """A part of the benchmark cannot be run, or failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What some processes have used. CPU in seconds, memory in bytes; `peak_bytes` since the last `reset_peak`."""

    cpu_s: float
    rss_bytes: int
    peak_bytes: int


def usage(pids: Sequence[int]) -> Usage:
    """Of these processes together, threads that have ended included."""
    rss = peak = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        rss += _kib(status, "VmRSS")
        peak += _kib(status, "VmHWM")
    # Linux's clock of a process, by its pid (CPUCLOCK_SCHED): nanoseconds, where /proc has ticks of 10 ms.
    return Usage(sum(time.clock_gettime(~pid << 3 | 2) for pid in pids), rss, peak)


def reset_peak(pids: Sequence[int]) -> None:
    """Let the peak memory of these processes begin anew; where that is not allowed it stays that of their life."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def children(pid: int) -> list[int]:
    """Child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _kib(status: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found is not None else 0


class Worker:
    """A process that does what it is told: `ask` one method of its kind, or `tell` now and `answer` later.

    `kind` names a class in `worker.KINDS`. A context manager: the process ends with the block.
    """

    def __init__(self, kind: str, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in __exit__
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module
                [sys.executable, "-P", "-m", "hurray_client.bench.worker", kind, str(theirs.fileno())],
                stdin=DEVNULL,
                stdout=DEVNULL,  # peers print there
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **UCX_PORTS, **(env or {})},
                # A group of its own, that Ctrl-C does not reach, in this session: when this process dies, the kernel
                # wakes and ends what was paused.
                process_group=0,
            )
        ours.settimeout(ANSWER_S)
        self.kind = kind
        self._socket = ours
        self._stream = ours.makefile("rwb")

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of which the cost is measured."""
        return (self._process.pid,)

    def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """What the method returned. Raises BenchError for what it raised."""
        self.tell(method, **arguments)
        return self.answer()

    def tell(self, method: str, **arguments: Any) -> None:
        """Let the method run; `answer` waits for it."""
        try:
            self._stream.write(json.dumps({"do": method, **arguments}).encode() + b"\n")
            self._stream.flush()
        except OSError:
            raise self._gone() from None

    def answer(self) -> dict[str, Any]:
        """What the method that was told to run returned."""
        try:
            line = self._stream.readline()
        except OSError:
            line = b""
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.kind}: {answer['error']}")
        return answer

    def pause(self) -> None:
        """Stop the process: some peers' threads spin as long as they live, and would take the cores from all others."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def _gone(self) -> BenchError:
        self._process.kill()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return BenchError(f"{self.kind}: the process ended or hung{': ' + said[-1] if said else ''}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.resume()
        with suppress(OSError):
            self._stream.close()
        self._socket.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
