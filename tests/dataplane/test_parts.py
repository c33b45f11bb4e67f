"""A source over a transport that sends pages from where they lie: what leaves, and who holds the pool for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dataplane.pair import Pair, Transfer
from hurray_wire import session as s
from hurray_wire.errors import Cancelled
from hurray_wire.image import plan_image
from hurray_wire.limits import Limits
from hurray_wire.memory import aligned_empty
from hurray_wire.prepare import prepare
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.target_payloads import ImageTarget, OwnMemory
from hurray_wire.transport.tls import SocketConfig, TcpTransport

PAGE = (16, 8, 128)
PAGES = 96
DIRT = 0x7BFF


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(
        lambda: TcpTransport(SocketConfig()),
        lambda: TcpTransport(SocketConfig(listen_host="127.0.0.1")),
        kind="tcp",
        drain_s=0.5,
    )
    yield pair
    pair.close()


class Pool(np.ndarray[Any, np.dtype[np.float16]]):
    """One that weak references can follow, whatever views are taken of it."""


def engine(seed: int) -> tuple[KVSnapshot, dict[str, Pool]]:
    """Pages in random order, some adjacent; each sequence's last page is partial, and dirty behind its tokens."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(10), rng.permutation(np.arange(10, PAGES))])
    tables = np.split(ids, [30, 50, 51])
    counts = [len(table) * PAGE[0] - short for table, short in zip(tables, (3, 0, 15, 1), strict=True)]
    pools = {}
    for role in ("key", "value"):
        pool = aligned_empty(PAGES * 2 * int(np.prod(PAGE))).view(np.uint16).reshape(PAGES, *PAGE)
        pool[:] = rng.integers(1, 0x7B00, pool.shape, dtype=np.uint16)
        for table, count in zip(tables, counts, strict=True):
            pool[table[-1], PAGE[0] - (len(table) * PAGE[0] - count) :] = DIRT
        pools[role] = pool.view(np.float16).view(Pool)
    caches = {(0, role): pool for role, pool in pools.items()}
    return KVSnapshot.from_paged(caches, block_tables=[*map(np.ndarray.tolist, tables)], token_counts=counts), pools


def begin(pair: Pair, snapshot: KVSnapshot, **options: Any) -> tuple[Transfer, ImageTarget, SnapshotSource]:
    prepared = prepare(snapshot)
    plan = plan_image([tensor.descriptor for tensor in prepared.tensors], 256 << 10, Limits())
    source = SnapshotSource(prepared, plan)
    target = ImageTarget(plan, prepared.structure.token_counts, OwnMemory(aligned_empty))
    return pair.begin(source, target, **options), target, source


@pytest.mark.parametrize("window", [1, 8])
def test_pages_leave_clean_and_the_engines_stay_as_they_are(pair: Pair, window: int) -> None:
    snapshot, pools = engine(window)
    before = {role: pool.copy() for role, pool in pools.items()}

    transfer, target, source = begin(pair, snapshot, window=window)

    assert [end.error for end in transfer.result()] == [None, None]
    summary = transfer.prepared.result().summary
    assert (summary.dirty_dead_slot_count, summary.dead_slot_count) == (0, 2 * (3 + 15 + 1))
    prepared = prepare(snapshot)
    for tensor, role in enumerate(pools):
        expected = np.empty((PAGES, 2 * int(np.prod(PAGE))), np.uint8)
        prepared.fill(tensor, 0, PAGES, expected)
        assert np.array_equal(target.buffer(tensor, 0), expected.reshape(-1))
        assert DIRT in before[role].view(np.uint16)
        assert DIRT not in target.buffer(tensor, 0).view(np.uint16)
        assert np.array_equal(pools[role].view(np.uint16), before[role].view(np.uint16))
    staged = [source.stage(chunk, lambda: aligned_empty(chunk.nbytes), True) for chunk in source.plan.chunks]  # noqa: B023
    in_parts = [chunk for chunk in staged if isinstance(chunk, list)]
    assert len(in_parts) == len(staged) - source.plan.index_chunk_count, "nothing was sent as it lies"


def test_a_failed_transfer_lets_go_of_the_pool(pair: Pair) -> None:
    snapshot, pools = engine(0)
    followed = [weakref.ref(pool) for pool in pools.values()]

    def withhold_checksums(_who: str, output: object, go: Any) -> None:
        if not isinstance(output, s.TellChecksums):
            go()

    transfer, target, source = begin(pair, snapshot, window=2, deliver=withhold_checksums)
    pair.source.post(transfer.source_number, s.Failed(Cancelled("by the caller")))

    ended, _ = transfer.result()
    assert isinstance(ended.error, Cancelled)
    snapshot.close()
    del snapshot, pools, target, source
    gc.collect()
    assert [pool() for pool in followed] == [None, None]
