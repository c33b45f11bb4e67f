"""Pages of an offer in a caller's own pages: compared before, placed by the caller's tables, nothing else touched."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire.destination import Destination
from hurray_wire.errors import GeometryMismatch, InvalidContents, InvalidSnapshot
from hurray_wire.paged import Quantized
from hurray_wire.prepare import PreparedSnapshot, prepare
from hurray_wire.snapshot import KVSnapshot
from pages.cases import live_set, structure_of

DEAD = 0xEE


def pool(num_pages: int = 8, page: tuple[int, int, int] = (4, 2, 8), dtype: Any = np.float16, seed: int = 0) -> Any:
    words = np.dtype(f"u{np.dtype(dtype).itemsize}")
    top = min(np.iinfo(words).max, 0x7000)
    return np.random.default_rng(seed).integers(1, top, (num_pages, *page)).astype(words).view(dtype)


def offer(tables: Any, counts: Any, caches: Any = None, **options: Any) -> PreparedSnapshot:
    caches = {(0, "key"): pool(seed=1), (0, "value"): pool(seed=2)} if caches is None else caches
    return prepare(KVSnapshot.from_paged(caches, block_tables=tables, token_counts=counts, **options))


def empty(num_pages: int = 8, **options: Any) -> dict[tuple[int | None, str], np.ndarray]:
    made = {}
    for role in ("key", "value"):
        made[0, role] = pool(num_pages, **options)
        made[0, role].view(np.uint8)[...] = DEAD
    return made


def descriptors(prepared: PreparedSnapshot) -> list[Any]:
    return [tensor.descriptor for tensor in prepared.tensors]


def deliver(prepared: PreparedSnapshot, destination: Destination, step: int = 2, writable: bool = True) -> KVSnapshot:
    """Everything a transfer does with a destination, `step` pages at a time."""
    destination.check(descriptors(prepared), prepared.structure.token_counts)
    destination.bind(prepared.structure)
    for index, tensor in enumerate(prepared.tensors):
        for first in range(0, prepared.num_pages, step):
            count = min(step, prepared.num_pages - first)
            data = np.empty(count * (tensor.descriptor.page_bytes or 0), dtype=np.uint8)
            prepared.fill(index, first, count, data)
            data.flags.writeable = writable
            destination.scatter(index, first, data)
        destination.set_parameters(index, tensor.parameters)
    destination.finish()
    return destination.snapshot()


# --- refused before anything is touched -----------------------------------------------------------------------------


def mismatch(prepared: PreparedSnapshot, caches: Any, tables: Any, **options: Any) -> GeometryMismatch:
    untouched = {key: array.copy() for key, array in caches.items()}
    destination = Destination.from_paged(caches, block_tables=tables, **options)
    with pytest.raises(GeometryMismatch) as found:
        destination.check(descriptors(prepared), prepared.structure.token_counts)
    for key, array in caches.items():
        assert array.tobytes() == untouched[key].tobytes()
    return found.value


def test_another_page_size_is_refused_with_both_values() -> None:
    page = (32, 2, 8)
    source = offer([[0, 1, 2]], [70], {(0, "fused"): pool(page=page)})

    error = mismatch(source, {(0, "fused"): pool(page=(64, 2, 8))}, [[0, 1]])

    assert (error.field, error.details["offered"], error.details["required"]) == ("page_size", "32", "64")
    assert error.details["tensor"] == "layer 0 fused"
    assert "32" in error.message
    assert "64" in error.message


@pytest.mark.parametrize(
    ("page", "dtype", "field", "offered", "required"),
    [
        ((4, 4, 8), np.float16, "num_heads", "2", "4"),
        ((4, 2, 16), np.float16, "head_dim", "8", "16"),
        ((4, 2, 8), ml_dtypes.bfloat16, "element_type", "float16", "bfloat16"),
        ((4, 2, 8), ml_dtypes.float8_e4m3fn, "element_type", "float16", "float8_e4m3"),
    ],
)
def test_another_geometry_or_type_is_refused_by_field(
    page: Any, dtype: Any, field: str, offered: str, required: str
) -> None:
    caches = {(0, "key"): pool(), (0, "value"): pool(page=page, dtype=dtype)}

    error = mismatch(offer([[0]], [4]), caches, [[0]])

    details = error.details
    assert (error.field, details["offered"], details["required"]) == (field, offered, required)
    assert details["tensor"] == "layer 0 value"


def test_other_tensors_are_refused() -> None:
    one = {(0, "fused"): pool()}
    two_layers = {(layer, role): pool(seed=layer) for layer in (0, 1) for role in ("key", "value")}

    for caches in (one, two_layers, {(1, "key"): pool(), (1, "value"): pool(seed=1)}):
        error = mismatch(offer([[0]], [4]), caches, [[0]])
        assert error.field == "tensors"
        assert error.details["offered"] == "layer 0 key, layer 0 value"


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ([[7, 9]], "num_seqs"),
        ([[7, 9], [7], []], "num_seqs"),
        ([[7], [7]], "block_tables"),
        ([[7, 9, 1], [7]], "block_tables"),
        ([[7, 9], [7, 1]], "block_tables"),
        ([[7, 9], []], "block_tables"),
    ],
)
def test_tables_hold_exactly_the_pages_that_the_tokens_need(tables: Any, field: str) -> None:
    assert mismatch(offer([[0, 1], [0]], [6, 3]), empty(10), tables).field == field


def test_quantization_must_be_the_same_scheme() -> None:
    source = offer(
        [[0]], [4], {(0, "fused"): pool(dtype=np.int8)}, quantization=Quantized.per_block(4, np.ones(32, np.float32))
    )
    caches = {(0, "fused"): pool(dtype=np.int8)}

    assert mismatch(source, caches, [[0]]).field == "quantization"
    for own in (
        Quantized.per_tensor(1.0),
        Quantized.per_block(4, np.ones(32, np.float16)),
        Quantized.per_block(4, np.ones(32, np.float32), np.zeros(32, np.int32)),
    ):
        assert mismatch(source, caches, [[0]], quantization=own).field == "quantization"


def test_one_scale_for_all_must_be_the_destinations() -> None:
    source = offer([[0]], [4], {(0, "fused"): pool(dtype=np.int8)}, quantization=Quantized.per_tensor(0.5))
    caches = {(0, "fused"): pool(dtype=np.int8)}

    error = mismatch(source, caches, [[0]], quantization=Quantized.per_tensor(0.25))

    assert "0.5" in error.details["offered"]
    Destination.from_paged(caches, block_tables=[[0]], quantization=Quantized.per_tensor(0.5)).check(
        descriptors(source), [4]
    )


def test_token_counts_of_the_offer_are_checked() -> None:
    source = offer([[0, 1], [0]], [6, 3])
    destination = Destination.from_paged(empty(), block_tables=[[0, 1], [0]])

    with pytest.raises(InvalidContents) as found:
        destination.check(descriptors(source), [6, 2])

    assert found.value.rule == "V7"


def test_two_pages_of_the_offer_into_one_are_refused() -> None:
    caches = empty()
    source = offer([[0, 1], [2]], [8, 4])
    destination = Destination.from_paged(caches, block_tables=[[3, 4], [3]])
    destination.check(descriptors(source), [8, 4])

    with pytest.raises(GeometryMismatch) as found:
        destination.bind(source.structure)

    assert (found.value.field, found.value.details["index"]) == ("block_tables", "0")
    assert "page 3" in found.value.message
    assert all((array.view(np.uint8) == DEAD).all() for array in caches.values())


@pytest.mark.parametrize("bad", ["read-only", "broadcast", "same", "out of range", "csr"])
def test_pools_and_tables_that_cannot_be_written_are_refused(bad: str) -> None:
    caches = empty()
    tables: Any = [[0]]
    if bad == "read-only":
        caches[0, "key"].flags.writeable = False
    elif bad == "broadcast":
        caches[0, "key"] = np.lib.stride_tricks.as_strided(caches[0, "key"], strides=(0, 32, 16, 2))
    elif bad == "same":
        caches[0, "value"] = caches[0, "key"]
    elif bad == "out of range":
        tables = [[8]]
    else:
        tables = (np.array([0, 3, 2]), np.array([0, 1]))

    with pytest.raises((InvalidSnapshot, InvalidContents)):
        Destination.from_paged(caches, block_tables=tables)


def test_read_only_scales_of_slots_are_refused() -> None:
    scales = np.ones(32, np.float32)
    scales.flags.writeable = False

    with pytest.raises(InvalidSnapshot):
        Destination.from_paged(
            {(0, "fused"): pool(dtype=np.int8)}, block_tables=[[0]], quantization=Quantized.per_block(4, scales)
        )


# Two caches of 8 pages [4, 2, 8], cut from memory that may be shared.
SHARED = {
    "a page further on": lambda words: (words[:8], words[1:9]),
    "the last page of one is the first of the other": lambda words: (words[:8], words[7:15]),
    "half a page further on": lambda words: (words[:8], words.reshape(-1)[32 : 32 + 512].reshape(8, 4, 2, 8)),
    "backwards": lambda words: (words[:8], words[7::-1]),
    "in turns, and one too far": lambda words: (
        words.reshape(-1)[:1024].reshape(8, 128)[:, :64].reshape(8, 4, 2, 8),
        words.reshape(-1)[63 : 63 + 1024].reshape(8, 128)[:, :64].reshape(8, 4, 2, 8),
    ),
}
APART = {
    "one after the other": lambda words: (words[:8], words[8:16]),
    "in turns": lambda words: (words[0:16:2], words[1:16:2]),
    "in turns, the second first": lambda words: (words[1:16:2], words[0:16:2]),
    "every second dimension": lambda words: (
        words[:16].reshape(8, 4, 2, 16)[..., 0::2],
        words[:16].reshape(8, 4, 2, 16)[..., 1::2],
    ),
    "backwards, one after the other": lambda words: (words[7::-1], words[15:7:-1]),
}


@pytest.mark.parametrize("kind", SHARED)
def test_caches_with_memory_in_common_are_refused(kind: str) -> None:
    key, value = SHARED[kind](np.zeros((20, 4, 2, 8), np.float16))
    assert np.shares_memory(key, value)
    with pytest.raises(InvalidSnapshot) as caught:
        Destination.from_paged({(0, "key"): key, (0, "value"): value}, block_tables=[[0]])
    assert "memory in common" in caught.value.message


@pytest.mark.parametrize("kind", APART)
def test_caches_side_by_side_in_one_block_of_memory_are_taken(kind: str) -> None:
    key, value = APART[kind](np.zeros((20, 4, 2, 8), np.float16))
    assert not np.shares_memory(key, value)
    Destination.from_paged({(0, "key"): key, (0, "value"): value}, block_tables=[[0]])


@pytest.mark.parametrize("page", [(4, 0, 8), (4, 2, 0), (0, 2, 8)])
def test_pools_without_a_byte_are_taken(page: tuple[int, int, int]) -> None:
    # NumPy gives such arrays strides of 0.
    caches = {(0, role): np.full((4, *page), 9, np.float16) for role in ("key", "value")}
    if page[0]:
        source = offer([[0]], [3], {name: np.zeros((2, *page), np.float16) for name in caches})
        got = deliver(source, Destination.from_paged(caches, block_tables=[[1]]))
        assert got.tokens(layer=0, role="key", seq=0).shape == (3, *page[1:])
    else:
        with pytest.raises(InvalidSnapshot):
            Destination.from_paged(caches, block_tables=[[1]])


@pytest.mark.parametrize("shift", [0, 1, 31, 32])
def test_scales_of_slots_are_memory_that_is_written_too(shift: int) -> None:
    scales = np.ones(64, np.float32)
    caches = {(0, role): pool(dtype=np.int8) for role in ("key", "value")}
    quantized = {
        (0, "key"): Quantized.per_block(4, scales[:32]),
        (0, "value"): Quantized.per_block(4, scales[shift : shift + 32]),
    }
    if shift == 32:
        Destination.from_paged(caches, block_tables=[[0]], quantization=quantized)
    else:
        with pytest.raises(InvalidSnapshot):
            Destination.from_paged(caches, block_tables=[[0]], quantization=quantized)


# --- placed -------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Source tables, destination tables with an aliasing of their own, and counts: every source page may go anywhere,
    also to several pages, but no destination page gets two."""
    size, tables, counts = 4, [], []
    for _ in range(draw(st.integers(0, 4))):
        table = draw(st.lists(st.integers(0, 5), max_size=3))
        tables.append(table)
        counts.append(draw(st.integers((len(table) - 1) * size + 1, len(table) * size)) if table else 0)
    free = draw(st.permutations(range(20)))
    homes: dict[int, list[int]] = {}
    target = []
    for table in tables:
        row = []
        for page in table:
            known = homes.setdefault(page, [])
            if not known or draw(st.booleans()):
                known.append(free[sum(map(len, homes.values()))])
            row.append(draw(st.sampled_from(known)))
        target.append(row)
    return tables, target, counts


KINDS = ("NHD", "HND", "side by side")


def target_caches(kind: str, num_pages: int = 20) -> tuple[dict[Any, np.ndarray], list[np.ndarray]]:
    """Caches filled with 0xEE in one of the ways engines keep them, and the memory under them."""
    if kind == "side by side":
        both = np.full((num_pages, 2, 4, 2, 8), DEAD * 257, np.uint16).view(np.float16)
        return {(0, "key"): both[:, 0], (0, "value"): both[:, 1]}, [both]
    shape = (num_pages, 2, 4, 8) if kind == "HND" else (num_pages, 4, 2, 8)
    pools = [np.full(shape, DEAD * 257, np.uint16).view(np.float16) for _ in range(2)]
    return {(0, "key"): pools[0], (0, "value"): pools[1]}, pools


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), step=st.integers(1, 4), writable=st.booleans())
def test_tokens_land_where_the_tables_say_and_nothing_else_changes(
    kind: str, batch: Any, step: int, writable: bool
) -> None:
    tables, target, counts = batch
    source = offer(tables, counts)
    caches, _ = target_caches(kind)
    layout = "HND" if kind == "HND" else "NHD"

    got = deliver(source, Destination.from_paged(caches, block_tables=target, layout=layout), step, writable)

    own = structure_of(target, counts, 4, 20)
    live, named = live_set(own), {page for row in target for page in row}
    for role in ("key", "value"):
        for seq in range(len(counts)):
            assert np.array_equal(got.tokens(0, role, seq), source.snapshot.tokens(0, role, seq))
        cache = caches[0, role].transpose(0, 2, 1, 3) if kind == "HND" else caches[0, role]
        words = np.ascontiguousarray(cache).view(np.uint16)
        for page in range(20):
            for slot in range(4):
                if page not in named:
                    assert (words[page, slot] == DEAD * 257).all()
                elif (page, slot) not in live:
                    assert not words[page, slot].any()


def test_a_page_shared_at_the_source_alone_shows_no_other_sequence() -> None:
    source = offer([[0, 1], [0]], [6, 3])
    caches = empty(10)

    got = deliver(source, Destination.from_paged(caches, block_tables=[[7, 9], [2]]))

    assert np.array_equal(got.tokens(0, "key", 1), source.snapshot.tokens(0, "key", 1))
    assert caches[0, "key"][7, 3].any()
    assert not caches[0, "key"][2, 3].any()


def test_scales_of_slots_are_written_with_their_pages_and_no_others() -> None:
    mine = np.arange(32, dtype=np.float32).reshape(8, 4) + 2
    source = offer(
        [[5, 3]],
        [6],
        {(0, "fused"): pool(dtype=np.int8)},
        quantization=Quantized.per_block(4, mine, np.full((8, 4), 2, np.int32)),
    )
    scales, points = np.full((8, 4), -1, np.float32), np.full((8, 4), -1, np.int32)
    caches = {(0, "fused"): pool(dtype=np.int8, seed=9)}

    got = deliver(
        source,
        Destination.from_paged(caches, block_tables=[[0, 6]], quantization=Quantized.per_block(4, scales, points)),
    )

    assert scales[0].tolist() == mine[5].tolist()
    assert scales[6].tolist() == [*mine[3, :2], 1, 1]
    assert points[6].tolist() == [2, 2, 0, 0]
    assert (scales[[1, 2, 3, 4, 5, 7]] == -1).all()
    assert np.array_equal(
        got.tokens(0, "fused", 0, dequantize=True), source.snapshot.tokens(0, "fused", 0, dequantize=True)
    )


def test_scales_of_a_page_that_is_shared_at_the_source_alone_are_neutral_where_it_is_dead() -> None:
    source = offer(
        [[1], [1]],
        [4, 2],
        {(0, "fused"): pool(dtype=np.int8)},
        quantization=Quantized.per_block(4, np.full(32, 7, np.float16)),
    )
    scales = np.full((8, 4), -1, np.float16)

    deliver(
        source,
        Destination.from_paged(
            {(0, "fused"): pool(dtype=np.int8, seed=9)},
            block_tables=[[3], [5]],
            quantization=Quantized.per_block(4, scales),
        ),
    )

    assert scales[[3, 5]].tolist() == [[7, 7, 7, 7], [7, 7, 1, 1]]


def test_scales_of_channels_belong_to_the_destination() -> None:
    def cache(values: list[float]) -> dict[str, Any]:
        return {"quantization": Quantized.per_channel(1, np.array(values, np.float32))}

    source = offer([[1]], [3], {(0, "fused"): pool(dtype=np.int8)}, **cache([1, 2]))
    caches = {(0, "fused"): pool(dtype=np.int8, seed=5)}

    deliver(source, Destination.from_paged(caches, block_tables=[[0]], **cache([1, 2])))
    with pytest.raises(GeometryMismatch) as found:
        deliver(source, Destination.from_paged(caches, block_tables=[[0]], **cache([1, 3])))

    assert found.value.field == "scales"


def test_packed_pools_are_written_whole_pages_at_a_time() -> None:
    options: dict[str, Any] = {"element_type": "int4", "page_shape": (4, 1, 6)}
    source_pool = np.random.default_rng(3).integers(0, 256, (8, 12), dtype=np.uint8)
    source = offer([[4, 1], [4]], [5, 3], {(0, "fused"): source_pool}, **options)
    mine = np.full((8, 12), DEAD, np.uint8)

    got = deliver(source, Destination.from_paged({(0, "fused"): mine}, block_tables=[[0, 2], [6]], **options))

    for seq in range(2):
        assert np.array_equal(got.tokens(0, "fused", seq), source.snapshot.tokens(0, "fused", seq))
    assert not mine[6, 9:].any()
    assert (mine[[1, 3, 4, 5, 7]] == DEAD).all()


@pytest.mark.parametrize("kind", KINDS)
def test_clear_clears_the_named_pages_alone(kind: str) -> None:
    caches, _ = target_caches(kind)
    layout = "HND" if kind == "HND" else "NHD"
    destination = Destination.from_paged(caches, block_tables=[[7, 9], [7]], layout=layout)

    destination.clear()

    assert destination.pages.tolist() == [7, 9]
    for cache in caches.values():
        words = np.ascontiguousarray(cache).view(np.uint16)
        assert not words[[7, 9]].any()
        assert (np.delete(words, [7, 9], axis=0) == DEAD * 257).all()


def test_clear_gives_cleared_e8m0_values_and_neutral_scales() -> None:
    exponents = np.full((4, 2, 1, 2), DEAD, np.uint8)
    Destination.from_paged({(0, "fused"): exponents}, block_tables=[[1]], element_type="float8_e8m0").clear()
    assert np.unique(exponents[1]).tolist() == [0x7F]
    scales, points = np.full((4, 2), 9, np.float32), np.full((4, 2), 9, np.int32)

    Destination.from_paged(
        {(0, "fused"): np.full((4, 2, 1, 2), 5, np.int8)},
        block_tables=[[1]],
        quantization=Quantized.per_block(2, scales, points),
    ).clear()

    assert scales.tolist() == [[9, 9], [1, 1], [9, 9], [9, 9]]
    assert points.tolist() == [[9, 9], [0, 0], [9, 9], [9, 9]]


def test_a_transfer_that_left_a_page_out_is_a_fault_of_ours() -> None:
    source = offer([[0, 1]], [8])
    destination = Destination.from_paged(empty(), block_tables=[[0, 1]])
    destination.check(descriptors(source), [8])
    destination.bind(source.structure)

    with pytest.raises(AssertionError):
        destination.finish()
