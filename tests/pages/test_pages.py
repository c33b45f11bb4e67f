"""Liveness, compaction, gather, scatter and scrub against a model that goes slot by slot."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire.descriptor import decode_descriptor
from hurray_wire.errors import InvalidContents, LimitExceeded
from hurray_wire.pages import (
    check_compact,
    clear_dead,
    compact,
    compact_descriptor,
    compact_parameters,
    dead_ranges,
    gather,
    live_slots,
    repack,
    runs,
    scatter,
    scrub,
    scrub_parameters,
)
from hurray_wire.parameters import parameter_arrays
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.sections import Statistics
from hurray_wire.validate import BlockStructure, check_parameters, check_pool, check_structure
from pages.cases import (
    Tensor,
    cleared,
    descriptor_of,
    elements_of,
    fill,
    live_set,
    packed,
    slot_elements,
    structure_of,
    structures,
    tables_of,
    tensors,
)

EXAMPLE = structure_of([[0, 1], [0]], [6, 3], page_size=4, num_pages=5)


# --- liveness ---------------------------------------------------------------------------------------------------


def test_a_page_that_is_full_for_one_sequence_is_live_though_another_ends_in_it() -> None:
    live = live_slots(EXAMPLE)

    assert live.tolist() == [4, 2, 0, 0, 0]
    assert live.dtype == np.uint32


def test_the_longest_of_two_trailing_uses_decides_and_full_beats_both() -> None:
    structure = structure_of([[0], [0], [1, 0], [0, 1]], [1, 3, 5, 6], page_size=4, num_pages=2)

    assert live_slots(structure).tolist() == [4, 4]
    assert live_slots(structure_of([[0], [0]], [3, 1], page_size=4, num_pages=1)).tolist() == [3]


@given(structures())
def test_live_slots_are_those_that_a_token_lies_in(structure: BlockStructure) -> None:
    live = live_slots(structure)

    found = {(page, slot) for page in range(structure.num_pages) for slot in range(int(live[page]))}
    assert found == live_set(structure)


def test_pages_without_bytes_cannot_make_it_take_memory() -> None:
    with pytest.raises(LimitExceeded) as refused:
        live_slots(structure_of([[0]], [1], page_size=4, num_pages=1 << 62))

    assert refused.value.field == "num_pages"


# --- compaction -------------------------------------------------------------------------------------------------


def first_uses(structure: BlockStructure) -> list[int]:
    pages: list[int] = []
    for table, count in zip(tables_of(structure), structure.token_counts.tolist(), strict=True):
        pages += table[: -(-count // structure.page_size)]
    return list(dict.fromkeys(pages))


@given(structures())
def test_compaction_keeps_each_named_page_once_in_order_of_first_use(structure: BlockStructure) -> None:
    compaction = compact(structure)
    reduced = compaction.structure

    check_structure(reduced)
    check_compact(reduced)
    assert compaction.pages.tolist() == first_uses(structure)
    assert compaction.pages.dtype == np.uint64
    assert reduced.block_table.dtype == structure.block_table.dtype
    assert reduced.num_pages == compaction.pages.size
    assert reduced.token_counts.tolist() == structure.token_counts.tolist()
    assert np.array_equal(compaction.live, live_slots(structure)[compaction.pages.astype(int)])
    for before, after, count in zip(
        tables_of(structure), tables_of(reduced), structure.token_counts.tolist(), strict=True
    ):
        needed = -(-count // structure.page_size)
        assert [int(compaction.pages[page]) for page in after] == before[:needed]


@given(structures(), st.sampled_from([1 << 40, (1 << 64) - 1]))
def test_compaction_of_a_huge_pool_gives_the_same_and_takes_no_memory_by_pages(
    structure: BlockStructure, num_pages: int
) -> None:
    offset = np.uint64(num_pages - max(structure.num_pages, 1))
    far = BlockStructure(
        page_size=structure.page_size,
        num_pages=num_pages,
        seq_ptr=structure.seq_ptr,
        block_table=structure.block_table.astype(np.uint64) + offset,
        token_counts=structure.token_counts,
    )

    near, moved = compact(structure), compact(far)

    assert (moved.pages - offset).tolist() == near.pages.tolist()
    assert moved.structure.block_table.tolist() == near.structure.block_table.tolist()
    assert moved.live.tolist() == near.live.tolist()


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 6), st.sampled_from([np.uint32, np.uint64]))
def test_a_pool_is_compact_if_first_uses_count_through_its_pages(
    table: list[int], num_pages: int, index: type[np.unsignedinteger[Any]]
) -> None:
    structure = structure_of([table], [len(table) * 4], page_size=4, num_pages=num_pages)
    structure = dataclasses.replace(structure, block_table=structure.block_table.astype(index))
    if list(dict.fromkeys(table)) == list(range(num_pages)):
        check_compact(structure)
    else:
        with pytest.raises(InvalidContents):
            check_compact(structure)


@pytest.mark.parametrize(
    ("table", "num_pages"),
    [([1, 0], 2), ([0, 2], 3), ([0, 1], 3), ([], 1), ([0, 1], (1 << 64) - 1)],
    ids=["order", "gap", "unnamed", "empty", "huge"],
)
def test_a_pool_with_pages_out_of_order_or_unnamed_is_not_compact(table: list[int], num_pages: int) -> None:
    structure = structure_of([table], [len(table) * 4], page_size=4, num_pages=num_pages)

    with pytest.raises(InvalidContents):
        check_compact(structure)


# --- gather, scatter, runs ----------------------------------------------------------------------------------------


def sources(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A pool of 6 pages in one of the ways an engine keeps it, and its pages as NHD bytes."""
    shape = (6, 4, 2, 8)
    if kind == "rows":
        pool = rng.integers(0, 256, (6, 128), dtype=np.uint8)
        return pool, pool.copy()
    if kind == "side by side":
        both = rng.integers(0, 256, (6, 2, 128), dtype=np.uint8)
        return both[:, 1], both[:, 1].copy()
    if kind == "padded rows":
        wide = rng.integers(0, 256, (6, 150), dtype=np.uint8)
        return wide[:, :128], wide[:, :128].copy()
    if kind == "backwards":
        pool = rng.integers(0, 256, (6, 128), dtype=np.uint8)
        return pool[::-1], pool[::-1].copy()
    heads_first = rng.integers(0, 1 << 16, (6, 2, 4, 8), dtype=np.uint16)
    words = heads_first.transpose(0, 2, 1, 3)
    assert words.shape == shape
    return words, np.ascontiguousarray(words).reshape(6, -1).view(np.uint8)


KINDS = ("rows", "side by side", "padded rows", "backwards", "heads first")


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 5), max_size=8), seed=st.integers(0, 99))
def test_gather_gives_pages_in_nhd_order_however_they_are_kept(kind: str, ids: list[int], seed: int) -> None:
    pool, expected = sources(kind, np.random.default_rng(seed))
    out = np.zeros((len(ids), 128), dtype=np.uint8)

    gather(pool, np.array(ids, dtype=np.uint64), out)

    assert np.array_equal(out, expected[np.array(ids, dtype=int)])


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 5), unique=True, max_size=6), seed=st.integers(0, 99))
def test_scatter_is_the_inverse_of_gather_and_touches_no_other_page(kind: str, ids: list[int], seed: int) -> None:
    pool, before = sources(kind, np.random.default_rng(seed))
    base_sum = int(pool.base.sum()) - int(pool.sum()) if kind in ("side by side", "padded rows") else None
    data = np.random.default_rng(seed + 1).integers(0, 256, (len(ids), 128), dtype=np.uint8)
    pages = np.array(ids, dtype=np.uint64)

    scatter(pool, pages, data)

    after = np.zeros((6, 128), dtype=np.uint8)
    gather(pool, np.arange(6), after)
    expected = before.copy()
    expected[np.array(ids, dtype=int)] = data
    assert np.array_equal(after, expected)
    if base_sum is not None:
        assert int(pool.base.sum()) - int(pool.sum()) == base_sum


@given(st.lists(st.integers(0, 12), max_size=12))
def test_runs_cover_the_ids_with_as_few_adjacent_ranges_as_possible(ids: list[int]) -> None:
    found = runs(np.array(ids, dtype=np.uint32)).tolist()

    assert [first + step for _, first, length in found for step in range(length)] == ids
    assert [start for start, _, _ in found] == np.cumsum([0, *[length for _, _, length in found]]).tolist()[:-1]
    for (_, first, length), (_, following, _) in itertools.pairwise(found):
        assert first + length != following


@given(tensors())
def test_repack_takes_pages_out_of_any_packed_pool(tensor: Tensor) -> None:
    descriptor, per_page = tensor.descriptor, tensor.descriptor.page_elements
    ids = np.arange(descriptor.num_pages, dtype=np.uint64)[::-2]
    elements = elements_of(tensor.buffers[0].tobytes(), descriptor.element_type.bits, descriptor.num_pages * per_page)
    expected = [item for page in ids.tolist() for item in elements[page * per_page : (page + 1) * per_page]]

    out = repack(descriptor, tensor.buffers[0], ids)

    assert out.tobytes() == packed(expected, descriptor.element_type)


# --- scrub ------------------------------------------------------------------------------------------------------


@given(structures())
def test_dead_ranges_are_the_slots_that_are_not_live(structure: BlockStructure) -> None:
    live, size = live_slots(structure), structure.page_size

    ranges = dead_ranges(live, size).tolist()

    dead = {divmod(slot, size) for first, end in ranges for slot in range(first, end)}
    assert dead == {(p, s) for p in range(structure.num_pages) for s in range(size)} - live_set(structure)
    assert sum(end - first for first, end in ranges) == len(dead)


def check_scrubbed(tensor: Tensor, pool: np.ndarray, pages: range) -> int:
    """Compare every slot of `pages` in a scrubbed pool with the model; returns the dead ones."""
    live, dead = live_set(tensor.structure), 0
    for page in pages:
        for slot in range(tensor.descriptor.page_size):
            found = slot_elements(tensor.descriptor, pool, page, slot)
            if (page, slot) in live:
                assert found == tensor.slot(page, slot)
            else:
                assert set(found) == {cleared(tensor.descriptor)}
                dead += 1
    return dead


@given(tensors())
def test_scrub_clears_dead_slots_counts_the_dirty_and_keeps_live_ones_bit_for_bit(tensor: Tensor) -> None:
    live, pool = live_slots(tensor.structure), tensor.buffers[0].copy()

    dirty = scrub(tensor.descriptor, pool, live)

    dead = check_scrubbed(tensor, pool, range(tensor.descriptor.num_pages))
    if cleared(tensor.descriptor) == 0:
        assert dirty == dead
    check_pool(tensor.descriptor, pool, live)
    once = pool.copy()
    assert scrub(tensor.descriptor, pool, live) == 0
    clear_dead(tensor.descriptor, tensor.buffers[0], live)
    assert np.array_equal(once, pool)
    assert np.array_equal(once, tensor.buffers[0])


@pytest.mark.parametrize("name", ["float8_e8m0", "int4", "float6_e2m3", "bool", "float128"])
@given(data=st.data())
def test_scrub_knows_what_clear_means_for_each_width(name: str, data: st.DataObject) -> None:
    tensor = data.draw(tensors(structure=EXAMPLE, names=(name,)))
    live, pool = live_slots(EXAMPLE), tensor.buffers[0].copy()

    dirty = scrub(tensor.descriptor, pool, live)
    clear_dead(tensor.descriptor, tensor.buffers[0], live)

    neutral = 0x7F if name == "float8_e8m0" else 0
    assert set(slot_elements(tensor.descriptor, pool, 1, 2)) == {neutral}
    assert set(slot_elements(tensor.descriptor, pool, 4, 0)) == {neutral}
    assert np.array_equal(pool, tensor.buffers[0])
    assert 0 < dirty <= 14


@given(tensors(whole_bytes=True), st.data())
def test_scrub_of_a_run_of_pages_touches_that_run_alone(tensor: Tensor, data: st.DataObject) -> None:
    descriptor = tensor.descriptor
    first = data.draw(st.integers(0, descriptor.num_pages))
    end = data.draw(st.integers(first, descriptor.num_pages))
    pool = tensor.buffers[0].copy().reshape(descriptor.num_pages, descriptor.page_bytes)

    scrub(descriptor, pool[first:end], live_slots(tensor.structure), first)

    check_scrubbed(tensor, pool, range(first, end))
    untouched = tensor.buffers[0].reshape(pool.shape)
    assert np.array_equal(pool[:first], untouched[:first])
    assert np.array_equal(pool[end:], untouched[end:])


@given(tensors(whole_bytes=True))
def test_many_small_pages_at_a_time_come_to_the_same(tensor: Tensor) -> None:
    live, pools = live_slots(tensor.structure), [tensor.buffers[0].copy() for _ in range(4)]

    one_by_one = scrub(tensor.descriptor, pools[0], live)
    clear_dead(tensor.descriptor, pools[1], live)
    with patch("hurray_wire.pages._SMALL_PAGES", 0), patch("hurray_wire.pages._ROWS_AT_A_TIME", 3):
        at_a_time = scrub(tensor.descriptor, pools[2], live)
        clear_dead(tensor.descriptor, pools[3], live)

    assert at_a_time == one_by_one
    assert all(np.array_equal(pool, pools[0]) for pool in pools)


def test_one_dirty_slot_of_many_dead_ones_is_counted_once() -> None:
    descriptor = descriptor_of(EXAMPLE, "float16")
    pool = fill(descriptor, EXAMPLE, np.random.default_rng(0))[0]
    live = live_slots(EXAMPLE)
    scrub(descriptor, pool, live)
    pool.reshape(20, 32)[7, 5] = 1
    pool.reshape(20, 32)[12, :] = 9

    assert scrub(descriptor, pool, live) == 2


# --- parameters -------------------------------------------------------------------------------------------------


@given(tensors(names=("int8", "uint8", "int4", "uint2")))
def test_parameters_of_dead_slots_become_neutral_and_all_others_stay(tensor: Tensor) -> None:
    descriptor, live = tensor.descriptor, live_set(tensor.structure)
    before = [array.copy() for _, array in parameter_arrays(descriptor, tensor.buffers)]

    scrub_parameters(descriptor, tensor.buffers, live_slots(tensor.structure))

    per_slot = isinstance(descriptor.quantization, PerBlockAffine)
    for (item, after), old in zip(parameter_arrays(descriptor, tensor.buffers), before, strict=True):
        for entry in range(item.entries):
            if per_slot and divmod(entry, descriptor.page_size) not in live:
                assert after[entry] == (1 if item.kind == "scale" else 0)
            else:
                assert after[entry] == old[entry]
    assert scrub_parameters(descriptor, tensor.buffers, live_slots(tensor.structure)) == 0


def test_neutralised_slots_are_counted_once_however_many_parameters_they_have() -> None:
    structure = structure_of([[0]], [1], page_size=2, num_pages=2)
    descriptor = descriptor_of(structure, "int8", 1, 1, quantization=PerBlockAffine(2, 3, 4))
    scales = np.array([np.nan, 0.0, 1.0, np.inf], dtype=np.float32)
    zero_points = np.array([5, 5, 0, 5], dtype=np.int32)

    dirty = scrub_parameters(descriptor, (None, None, None, scales, zero_points), live_slots(structure))

    assert dirty == 2
    assert np.isnan(scales[0])
    assert scales[1:].tolist() == [1, 1, 1]
    assert zero_points.tolist() == [5, 0, 0, 0]


@given(tensors(names=("int8", "uint8", "int4", "uint2")))
def test_parameters_follow_their_pages_through_compaction(tensor: Tensor) -> None:
    descriptor, compaction = tensor.descriptor, compact(tensor.structure)
    reduced = compact_descriptor(descriptor, compaction)

    copies = compact_parameters(descriptor, tensor.buffers, compaction)

    buffers = (None, None, None, *copies)
    assert [copy.size for copy in copies] == [handle.byte_size for handle in reduced.buffers[3:]]
    check_parameters(reduced, buffers)
    before = [array for _, array in parameter_arrays(descriptor, tensor.buffers)]
    for (_, after), old in zip(parameter_arrays(reduced, buffers), before, strict=True):
        if isinstance(descriptor.quantization, PerBlockAffine):
            paged = old.reshape(descriptor.num_pages, descriptor.page_size)[compaction.pages.astype(int)]
            assert np.array_equal(after, paged.reshape(-1))
        else:
            assert np.array_equal(after, old)


def test_a_compacted_descriptor_says_page_aligned_and_drops_statistics() -> None:
    descriptor = dataclasses.replace(
        descriptor_of(EXAMPLE, "float16", kv_role=1, layer_index=7, alignment=64),
        statistics=Statistics(computed_mask=1, nnz=3),
        trailing_bytes=5,
        version_minor=2,
    )

    reduced = compact_descriptor(descriptor, compact(EXAMPLE))

    assert (reduced.num_pages, reduced.kv_role, reduced.layer_index) == (2, 1, 7)
    assert reduced.shape == descriptor.shape
    assert {handle.alignment for handle in reduced.buffers} == {4096}
    assert decode_descriptor(reduced.encode())[0] == reduced
    assert reduced.statistics is None
