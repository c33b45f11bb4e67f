"""An engine in a container of its own: puts and gets as its standard input says, and stops in the middle when told.

A line of JSON per command: {"do": "put" | "get" | "small", "key", "node", "transport", "mib", "at", "budget_s"}. With
`at`, 0 to 1, it says {"middle": true} once that part of the chunks has moved, and waits for a line. Then a line of JSON
with what came of it, how long it took, and when by the host's monotonic clock. {"do": "load", "nodes": [...], ...} goes
on until there is a line.
"""

from __future__ import annotations

import itertools
import json
import select
import sys
import time
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import hurray_client as ht
from hurray_wire.image import Chunk
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.target_payloads import ImageTarget, ScatterTarget

PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
LAYERS, PAGE_SIZE, HEADS, HEAD_DIM = 8, 16, 8, 64
PAGES_PER_MIB = 4
Pools = dict[tuple[int | None, str], npt.NDArray[np.float16]]

Steps = tuple[tuple[type, str], ...]
SENDING: Steps = ((SnapshotSource, "stage"),)
ARRIVING: Steps = ((ImageTarget, "arrived"), (ScatterTarget, "arrived"))


@cache
def pools(mib: int) -> Pools:
    """So many MiB in all, no two pages alike."""
    draw = np.random.default_rng(mib)
    shape = (PAGES_PER_MIB * mib, PAGE_SIZE, HEADS, HEAD_DIM)
    return {
        (layer, role): draw.integers(0, 1000, shape, dtype=np.uint16).view(np.float16)
        for layer in range(LAYERS)
        for role in ("key", "value")
    }


@cache
def room(mib: int) -> Pools:
    """To get into."""
    return {name: np.zeros_like(pool) for name, pool in pools(mib).items()}


def tables(mib: int) -> list[list[int]]:
    return [list(range(PAGES_PER_MIB * mib))]


def snapshot(mib: int) -> ht.KVSnapshot:
    count = PAGES_PER_MIB * mib * PAGE_SIZE - 3
    return ht.KVSnapshot.from_paged(pools(mib), block_tables=tables(mib), token_counts=[count])


def check(got: ht.KVSnapshot, mib: int) -> None:
    expected = snapshot(mib)
    for tensor in expected.tensors:
        ours = expected.tokens(tensor.layer_index, tensor.role, 0)
        theirs = got.tokens(tensor.layer_index, tensor.role, 0)
        assert ours.tobytes() == theirs.tobytes(), f"other bytes than were put: {tensor.name}"


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Gate:
    """Has the data-plane thread wait for a line, once, where so much of the next transfer has moved."""

    def __init__(self, steps: Steps, at: float) -> None:
        self._at = at
        self._whole = {(kind, method): getattr(kind, method) for kind, method in steps}
        for (kind, method), whole in self._whole.items():
            setattr(kind, method, self._patched(whole))

    def _patched(self, whole: Any) -> Any:
        gate = self

        def patched(self: Any, chunk: Chunk, *others: Any) -> Any:
            if chunk.index == int(gate._at * len(self.plan.chunks)):
                gate.lift()
                answer(middle=True)
                sys.stdin.readline()
            return whole(self, chunk, *others)

        return patched

    def lift(self) -> None:
        for (kind, method), whole in self._whole.items():
            setattr(kind, method, whole)


@cache
def client(node: str, transport: str) -> ht.Client:
    """Each has a data plane of its own."""
    return ht.connect(node, transports=[transport])


def put(to: ht.Client, key: str, mib: int, budget_s: float, transport: str) -> str:
    return to.put(key, snapshot(mib), timeout_s=budget_s, require_transport=transport).transport


def get(of: ht.Client, key: str, mib: int, budget_s: float, transport: str) -> str:
    # What is not copied has no middle: over shm it is got into pages of our own.
    options: dict[str, Any] = {"into": room(mib), "block_tables": tables(mib)} if transport == "shm" else {}
    with of.get(key, timeout_s=budget_s, require_transport=transport, **options) as got:
        check(got, mib)
        return got.receipt.transport


def small(node: ht.Client, key: str, mib: int, budget_s: float, transport: str) -> str:
    """A handoff there and back."""
    put(node, key, mib, budget_s, transport)
    with node.get(key, timeout_s=budget_s, require_transport=transport, consume=True) as got:
        check(got, mib)
        return got.receipt.transport


def load(nodes: list[str], transport: str, mib: int, budget_s: float, key: str) -> None:
    """Handoffs, one after the other, to one node after the other, until there is a line to read: how many, what those
    that failed failed of, and the longest that one took."""
    outcomes: Counter[str] = Counter()
    unexpected, slowest_s = [], 0.0
    for number, node in enumerate(itertools.cycle(nodes)):
        if select.select([sys.stdin], [], [], 0)[0]:
            break
        began_s = time.monotonic()
        try:
            small(client(node, transport), f"{key}/{number}", mib, budget_s, transport)
            outcomes["OK"] += 1
        except ht.HurrayError as error:
            outcomes[error.reason] += 1
            # What a node held is gone when it starts again, as every receipt says.
            if not isinstance(error, ht.KeyNotFound) and (error.code not in PASSING or not error.stage):
                unexpected.append(str(error))
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    sys.stdin.readline()
    answer(outcomes=outcomes, unexpected=unexpected, slowest_s=slowest_s)


WORK = {"put": put, "get": get, "small": small}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        do, at = order.pop("do"), order.pop("at", None)
        snapshot(order["mib"])
        if do == "load":
            load(**order)
            continue
        gate = None
        if at is not None:
            gate = Gate(SENDING if do == "put" else ARRIVING, at)
        began_s = time.monotonic()
        try:
            transport = WORK[do](client(order.pop("node"), order["transport"]), **order)
        except ht.HurrayError as error:
            now_s = time.monotonic()
            said = {"reason": error.reason, "code": error.code, "stage": error.stage, "text": str(error)}
        else:
            now_s = time.monotonic()
            said = {"reason": "OK", "transport": transport}
        finally:
            if gate is not None:
                gate.lift()
        answer(**said, seconds=now_s - began_s, at_s=now_s)


if __name__ == "__main__":
    main()
