"""A client in a process of its own. Takes one command a line, answers with one line of JSON each.

`python -m faults.remote_client ADDRESS`

    hold KEY            put a large snapshot: 4 MiB
    put KEY N           put a large one; at chunk N (-1: the last) says {"middle": true}, and waits for a line
    get KEY N           get a large one likewise
    take KEY            get one, and delete it
    small KEY           put and get a small one
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hurray_client as ht
from hurray_wire.image import Chunk
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.target_payloads import ImageTarget
from sdk.ports import WIDE_PORTS
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import environment

TESTS = Path(__file__).parents[1]

# --- in the test's process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteClient:
    """What the test has of it."""

    name: str
    process: subprocess.Popen[str]

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float = 40) -> dict[str, Any]:
        """Its next answer."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert readable, f"{self.name} says nothing"
        line = self.process.stdout.readline()
        assert line.startswith("{"), (self.name, line, self.process.poll())
        return dict(json.loads(line))


@contextmanager
def remote_client(address: str, name: str, *, prefix: Sequence[str] = (), **settings: str) -> Iterator[RemoteClient]:
    """One that is started, and killed at the end. `settings`: its environment, beyond the wide range of ports."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-m", "faults.remote_client", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(**(WIDE_PORTS | {"PYTHONPATH": str(TESTS)} | settings)),
        text=True,
    ) as process:
        try:
            yield RemoteClient(name, process)
        finally:
            process.kill()


# --- in its own -----------------------------------------------------------------------------------------------------


def large_snapshot() -> ht.KVSnapshot:
    caches = make_caches(layers=4, num_pages=128, page_size=16, heads=4, head_dim=32)
    return make_snapshot(caches, tables=[list(range(128))], counts=[2048])


def pause_once(kind: type, method: str, at: int) -> None:
    """Have the data-plane thread wait for a line at one chunk of the next transfer."""
    whole = getattr(kind, method)

    def patched(self: Any, chunk: Chunk, *others: Any) -> Any:
        if chunk.index == at % len(self.plan.chunks):
            setattr(kind, method, whole)
            answer(middle=True)
            sys.stdin.readline()
        return whole(self, chunk, *others)

    setattr(kind, method, patched)


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def attempt(work: Callable[[], object]) -> None:
    try:
        work()
    except ht.HurrayError as error:
        answer(reason=error.reason, code=error.code, stage=error.stage, text=str(error))
    else:
        answer(reason="OK")


def hold(client: ht.Client, key: str) -> None:
    client.put(key, large_snapshot())


def put(client: ht.Client, key: str, at: str) -> None:
    pause_once(SnapshotSource, "stage", int(at))
    client.put(key, large_snapshot(), timeout_s=30)


def get(client: ht.Client, key: str, at: str) -> None:
    pause_once(ImageTarget, "arrived", int(at))
    client.get(key, timeout_s=30).close()


def take(client: ht.Client, key: str) -> None:
    client.get(key, consume=True, timeout_s=30).close()


def small(client: ht.Client, key: str) -> None:
    value = make_snapshot()
    client.put(key, value, timeout_s=30)
    with client.get(key, consume=True, timeout_s=30) as got:
        assert_same_tokens(value, got)


COMMANDS = {"hold": hold, "put": put, "get": get, "take": take, "small": small}


def main() -> None:
    with ht.connect(sys.argv[1]) as client:
        for line in sys.stdin:
            command, *arguments = line.split()
            attempt(partial(COMMANDS[command], client, *arguments))


if __name__ == "__main__":
    main()
