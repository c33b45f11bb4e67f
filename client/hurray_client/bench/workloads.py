"""What is moved: the benchmark's snapshots, by name and size, and how their pages lie."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hurray_wire.paged import CacheKey

MIB: Final = 1 << 20

Action = Literal["put", "tiny", "concurrent", "stats_beside", "echoes_beside", "get", "get_into", "get_held"]
"""What is done with it. `tiny` is many puts for their latency, `concurrent` one put by each of several sources,
`stats_beside` a put beside Stat calls, `echoes_beside` beside as many calls to another server, `get_held` a get of
something that is put for it and deleted after it."""

Order = Literal["random", "adjacent", "shared"]
"""How block_table names the pages: in random order, in the order they lie in, or most of them by every sequence."""

Index = npt.NDArray[np.uint32]
Counts = npt.NDArray[np.uint64]

ROLES: Final = ("key", "value")
_ITEM_BYTES: Final = 2
_SEED: Final = 20_240_229


@dataclass(frozen=True, slots=True)
class Workload:
    """One snapshot: `layers` key and value pools of `num_pages` float16 pages [page_size, num_heads, head_dim], every
    page named, all full but where a sequence ends."""

    name: str
    action: Action
    layers: int
    num_pages: int
    order: Order = "random"
    num_seqs: int = 1
    shared_pages: int = 0
    """Pages that every sequence begins with."""
    page_size: int = 16
    num_heads: int = 8
    head_dim: int = 128

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one tensor."""
        return self.page_size * self.num_heads * self.head_dim * _ITEM_BYTES

    @property
    def tensor_count(self) -> int:
        """Key and value of every layer."""
        return self.layers * len(ROLES)

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct pages: what must cross."""
        return self.tensor_count * self.num_pages * self.page_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for another process."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large and how often. Sizes are those of snapshots, and multiples of 4 MiB."""

    paged_bytes: int = 256 * MIB
    large_bytes: int = 4096 * MIB
    source_bytes: int = 256 * MIB
    """Of each source of `concurrent`."""
    num_seqs: int = 100_000
    """Of `sequences_100k`."""
    tiny_count: int = 200
    """Tiny puts in a round."""
    rounds: int = 15
    budget_s: float | None = None
    """No round begins when the whole run has taken this long; None: all rounds are run."""
    every_checksum: bool = True
    """Whether all puts are run without checksums, too, or only `paged` and `adjacent`."""


FULL: Final = Scale()
QUICK: Final = Scale(
    large_bytes=1024 * MIB, source_bytes=64 * MIB, tiny_count=40, rounds=5, budget_s=47.0, every_checksum=False
)

SOURCE_COUNT: Final = 4
PLOT_BYTES: Final = tuple(4**power * MIB for power in range(6))
PLOT_PREFIX: Final = "size_"

_PAGED_LAYERS: Final = 32
"""With 8 heads of 128 and 16 tokens a page: 32 KiB pages, as a model of 8 billion parameters has them."""


def catalogue(scale: Scale) -> dict[str, Workload]:
    """All workloads, by name, in the order in which they are run and shown."""
    pages = _pages(scale.paged_bytes)
    large = _pages(scale.large_bytes)
    own, shared = 2, 18
    all_ = (
        Workload("paged", "put", _PAGED_LAYERS, pages),
        Workload("adjacent", "put", _PAGED_LAYERS, pages, order="adjacent"),
        Workload("small_tensors", "put", 80, 2),
        Workload("tiny", "tiny", 1, 1, page_size=4, num_heads=4),
        Workload("large", "put", _PAGED_LAYERS, large),
        Workload("sequences_100k", "put", 1, 15 * scale.num_seqs, num_seqs=scale.num_seqs, num_heads=1, head_dim=2),
        Workload("concurrent", "concurrent", _PAGED_LAYERS, _pages(scale.source_bytes)),
        Workload("stat_load", "stats_beside", _PAGED_LAYERS, pages),
        Workload("echo_load", "echoes_beside", _PAGED_LAYERS, pages),
        Workload("get", "get", _PAGED_LAYERS, pages),
        Workload("get_large", "get_held", _PAGED_LAYERS, large),
        Workload("get_into", "get_into", _PAGED_LAYERS, pages),
        Workload(
            "shared_prefix",
            "put",
            _PAGED_LAYERS,
            shared + 32 * own,
            order="shared",
            num_seqs=32,
            shared_pages=shared,
        ),
    )
    return {workload.name: workload for workload in all_}


def plot_workloads() -> dict[str, Workload]:
    """Snapshots of growing size, for throughput against size."""
    sizes = {f"{PLOT_PREFIX}{nbytes // MIB}_mib": nbytes for nbytes in PLOT_BYTES}
    return {
        name: Workload(name, "put", min(_PAGED_LAYERS, nbytes // MIB), max(16, _pages(nbytes)))
        for name, nbytes in sizes.items()
    }


def _pages(nbytes: int) -> int:
    """Pages of 32 KiB in each pool of a snapshot of `_PAGED_LAYERS` layers."""
    return max(1, nbytes // (len(ROLES) * _PAGED_LAYERS * 32 * 1024))


@dataclass(frozen=True, slots=True)
class Tables:
    """Block tables and token counts, as KVSnapshot.from_paged takes them."""

    seq_ptr: Counts
    block_table: Index
    token_counts: Counts


def tables(workload: Workload, *, variant: int = 0) -> Tables:
    """The block tables of a workload. `variant` gives other tables that hold the same tokens."""
    rng = np.random.default_rng(_SEED + variant)
    pages = np.arange(workload.num_pages, dtype=np.uint32)
    if workload.order != "adjacent":
        rng.shuffle(pages)
    count = workload.num_seqs
    if workload.order == "shared":
        own = pages[workload.shared_pages :].reshape(count, -1)
        prefix = np.broadcast_to(pages[: workload.shared_pages], (count, workload.shared_pages))
        block_table = np.concatenate([prefix, own], axis=1).reshape(-1)
    else:
        block_table = pages
    per_seq = block_table.size // count
    assert per_seq * count == block_table.size, workload
    # Every sequence ends inside its last page, as sequences do.
    tokens = per_seq * workload.page_size - np.arange(count, dtype=np.uint64) % np.uint64(workload.page_size)
    if workload.order == "adjacent":
        tokens[:] = per_seq * workload.page_size
    return Tables(
        np.arange(0, block_table.size + 1, per_seq, dtype=np.uint64),
        np.ascontiguousarray(block_table),
        tokens.astype(np.uint64),
    )


def caches(workload: Workload, memory: npt.NDArray[np.uint8]) -> dict[CacheKey, npt.NDArray[np.float16]]:
    """The pools of a workload, one after the other in `memory`, uint8, which may be larger."""
    shape = (workload.num_pages, workload.page_size, workload.num_heads, workload.head_dim)
    pool_bytes = workload.num_pages * workload.page_bytes
    pools: dict[CacheKey, npt.NDArray[np.float16]] = {}
    for layer in range(workload.layers):
        for role in ROLES:
            offset = len(pools) * pool_bytes
            pools[layer, role] = memory[offset : offset + pool_bytes].view(np.float16).reshape(shape)
    return pools


def page_order(workload: Workload) -> npt.NDArray[np.int64]:
    """Pages in the order in which a snapshot of one sequence sends them, counted through all its pools."""
    table = tables(workload).block_table.astype(np.int64)
    pools = np.arange(workload.tensor_count, dtype=np.int64)[:, None]
    return (pools * workload.num_pages + table[None, :]).reshape(-1)


def fill(memory: npt.NDArray[np.uint8], seed: int = 0) -> None:
    """Bytes of which no two pages are alike, written at the speed of memory."""
    words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
    block = np.random.default_rng(_SEED + seed).integers(0, 1 << 62, 1 << 16, dtype=np.uint64)
    for number, start in enumerate(range(0, words.size, block.size)):
        part = words[start : start + block.size]
        np.add(block[: part.size], np.uint64(number), out=part)
