"""A client on the other side of a cable. Takes one command a line, answers with one line of JSON each.

`python -m faults.partition_client ADDRESS`

    prepare KEY     put a large snapshot (128 chunks of 32 KiB)
    put KEY, get KEY    hand a large one over; in the middle of it says "middle", and waits for a line
    small KEY       put and get a small one
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import hurray_client as ht
from hurray_wire.image import Chunk
from hurray_wire.payload import ImageTarget, SnapshotSource
from sdk.snapshots import assert_same_tokens, make_snapshot
from sdk.test_node import large_snapshot

MIDDLE = 20


def pause_once(kind: type, method: str) -> None:
    """Have the data-plane thread wait for a line at one chunk of the next transfer."""
    whole = getattr(kind, method)

    def patched(self: Any, chunk: Chunk, *others: Any) -> Any:
        if chunk.index == MIDDLE:
            setattr(kind, method, whole)
            answer(middle=True)
            sys.stdin.readline()
        return whole(self, chunk, *others)

    setattr(kind, method, patched)


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def attempt(work: Callable[[], object]) -> None:
    began_s = time.monotonic()
    try:
        work()
    except ht.HurrayError as error:
        answer(reason=error.reason, code=error.code, stage=error.stage, text=str(error))
    else:
        answer(reason="OK", seconds=time.monotonic() - began_s)


def main() -> None:
    with ht.connect(sys.argv[1]) as client:
        for line in sys.stdin:
            command, key = line.split()
            attempt(partial(COMMANDS[command], client, key))


def prepare(client: ht.Client, key: str) -> None:
    client.put(key, large_snapshot())


def put(client: ht.Client, key: str) -> None:
    pause_once(SnapshotSource, "stage")
    client.put(key, large_snapshot(), timeout_s=30)


def get(client: ht.Client, key: str) -> None:
    pause_once(ImageTarget, "arrived")
    client.get(key, timeout_s=30).close()


def small(client: ht.Client, key: str) -> None:
    value = make_snapshot()
    client.put(key, value, timeout_s=30)
    with client.get(key, consume=True, timeout_s=30) as got:
        assert_same_tokens(value, got)


COMMANDS = {"prepare": prepare, "put": put, "get": get, "small": small}


if __name__ == "__main__":
    main()
