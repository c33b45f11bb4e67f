"""The kernels on a real GPU against the NumPy functions: fresh random inputs, outputs poisoned before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hurray_wire import kernels
from hurray_wire.checksum import MIX64, XXH3_64
from hurray_wire.memory import on_device_of
from hurray_wire.pages import clear_dead, compact, gather, live_slots, scatter, scrub, scrub_parameters
from hurray_wire.quantization import PerBlockAffine
from pages.cases import descriptor_of, fill, structure_of

pytestmark = pytest.mark.gpu

POISON = 0xA7
SIZES = [pytest.param(7, id="small"), pytest.param(600, id="large")]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


def up(place: Any, array: np.ndarray) -> Any:
    """Bytes in memory that held something else before."""
    data = array.reshape(-1).view(np.uint8)
    memory = place.take(data.size)[: data.size]
    memory[...] = POISON
    memory[...] = on_device_of(memory, data)
    return memory


def random_structure(rng: np.random.Generator, seqs: int, dtype: Any = np.uint32) -> Any:
    """Ragged, aliased, with dead slots; compact."""
    page_size, pages = 16, 8 * seqs
    tables = [rng.integers(0, pages, rng.integers(0, 12)).tolist() for _ in range(seqs)]
    counts = [int(rng.integers(max(0, len(table) * page_size - 15), len(table) * page_size + 1)) for table in tables]
    return compact(structure_of(tables, counts, page_size, pages, dtype)).structure


@pytest.mark.parametrize("seqs", SIZES)
@pytest.mark.parametrize("page_bytes", [32768, 4096, 100, 3])
def test_gather_and_scatter(gpu: Any, rng: np.random.Generator, seqs: int, page_bytes: int) -> None:
    host = rng.integers(0, 256, (seqs, page_bytes), np.uint8)
    order = rng.permutation(seqs)[: seqs - 2]
    pool, out = up(gpu, host).reshape(seqs, page_bytes), up(gpu, np.zeros((seqs - 2, page_bytes), np.uint8))
    out[...] = POISON

    gather(pool, order, out.reshape(seqs - 2, page_bytes))
    assert np.array_equal(out.get().reshape(seqs - 2, page_bytes), host[order])

    back = up(gpu, np.full((seqs, page_bytes), POISON, np.uint8)).reshape(seqs, page_bytes)
    scatter(back, order, out.reshape(seqs - 2, page_bytes))
    expected = np.full_like(host, POISON)
    expected[order] = host[order]
    assert np.array_equal(back.get(), expected)


@pytest.mark.parametrize("seqs", SIZES)
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_index_and_liveness(gpu: Any, rng: np.random.Generator, seqs: int, dtype: Any) -> None:
    structure = random_structure(rng, seqs, dtype)
    pointers = up(gpu, structure.seq_ptr.astype(dtype)).view(dtype)
    table, counts = up(gpu, structure.block_table).view(dtype), up(gpu, structure.token_counts).view(np.uint64)
    size = {"num_pages": structure.num_pages, "page_size": structure.page_size}

    assert kernels.index_status(pointers, table, counts, **size) == kernels.INTACT
    assert np.array_equal(kernels.live_slots(pointers, table, counts, **size).get(), live_slots(structure))

    entry = int(rng.integers(structure.block_table.size))
    table[entry] = structure.num_pages
    assert kernels.read_status(kernels.index_status(pointers, table, counts, **size)) == ("V4", entry)


@pytest.mark.parametrize("seqs", SIZES)
@pytest.mark.parametrize(
    ("name", "heads", "dim"),
    [("float16", 8, 128), ("float8_e8m0", 2, 8), ("int4", 1, 6), ("bool", 1, 3), ("float6_e2m3", 2, 2)],
)
def test_scrub(gpu: Any, rng: np.random.Generator, seqs: int, name: str, heads: int, dim: int) -> None:
    structure = random_structure(rng, min(seqs, 60))
    descriptor = descriptor_of(structure, name, heads, dim)
    host = rng.integers(1, 255, descriptor.page_pool_bytes, np.uint8)
    live = live_slots(structure)
    pool, quiet = up(gpu, host), up(gpu, host)

    dirty = scrub(descriptor, pool, live)
    clear_dead(descriptor, quiet, live)

    assert dirty == scrub(descriptor, host, live)
    assert np.array_equal(pool.get(), host)
    assert np.array_equal(quiet.get(), host)


@pytest.mark.parametrize("tag", [1, 2, 3])
def test_small_parameters(gpu: Any, rng: np.random.Generator, tag: int) -> None:
    structure = random_structure(rng, 20)
    descriptor = descriptor_of(structure, "int8", quantization=PerBlockAffine(16, 3, 4, tag))
    host = fill(descriptor, structure, rng)
    live = live_slots(structure)
    device = [up(gpu, buffer) for buffer in host]

    assert scrub_parameters(descriptor, device, live) == scrub_parameters(descriptor, host, live)
    for mine, theirs in zip(device, host, strict=True):
        assert np.array_equal(mine.get(), theirs)


@pytest.mark.parametrize("nbytes", [1, 4096, 100_003, pytest.param(64 << 20, id="chunk")])
def test_small_checksums(gpu: Any, rng: np.random.Generator, nbytes: int) -> None:
    host = rng.integers(0, 256, nbytes, np.uint8)
    device = up(gpu, host)

    assert MIX64(device) == MIX64(host)
    assert XXH3_64(device) == XXH3_64(host)
