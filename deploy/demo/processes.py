"""The demo's processes: daemons that are stopped when it is over, and engines that run to their end."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Final

START_S: Final = 60.0
STOP_S: Final = 10.0
ENGINE_S: Final = 60.0


@contextmanager
def daemon(name: str, folder: Path, arena_bytes: int = 64 << 20) -> Iterator[str]:
    """A hurrayd with its log in `folder`, from ready to stopped; its address. Raises RuntimeError with its log."""
    config, log = folder / f"{name}.toml", folder / f"{name}.log"
    config.write_text(
        f'listen = "127.0.0.1:0"\nnode = "{name}"\n[arena]\nbytes = {arena_bytes}\n'
        f'[shm]\npath = "{socket_of(name, folder)}"\n'
    )
    command = [str(Path(sys.executable).with_name("hurrayd")), "--config", str(config)]
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=sink, env=_environment()) as process,
    ):
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def socket_of(name: str, folder: Path) -> str:
    """By which processes of this host reach the daemon of that name through shared memory."""
    return f"{folder / name}.sock"


def run_engine(name: str, *arguments: str, socket: str) -> dict[str, Any]:
    """Run one engine beside the daemon with that socket to its end; what it reports."""
    command = [sys.executable, "-m", f"deploy.demo.{name}", *arguments]
    # Matrices this small gain nothing from more threads, which would only stand in the way of the daemons.
    environment = {**_environment(), "OPENBLAS_NUM_THREADS": "1", "HURRAY_SHM__PATH": socket}
    ran = subprocess.run(command, stdout=PIPE, env=environment, timeout=ENGINE_S, check=True)
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """What the daemon says when it is ready."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_S)
    ready = process.stdout.readline().decode() if readable else ""
    found = re.match(r"hurrayd ready: address=(\S+)", ready)
    if found is None:
        raise RuntimeError(f"hurrayd did not start: {ready}\n{log.read_text()}")
    return found[1]


def _environment() -> dict[str, str]:
    """This process's, without settings that would make it another demo."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HURRAY_")}
