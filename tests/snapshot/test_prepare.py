"""What leaves a source: compact, cleared, and nothing that no sequence names."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire import prepare as preparing
from hurray_wire.descriptor import decode_descriptor
from hurray_wire.errors import InvalidContents, Misuse
from hurray_wire.memory import is_page_aligned
from hurray_wire.paged import Quantized
from hurray_wire.pages import check_compact
from hurray_wire.parameters import parameter_arrays
from hurray_wire.prepare import PreparedSnapshot, prepare
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.validate import takes_any_bytes
from pages.cases import Tensor, cleared, live_set, slot_elements, snapshots, tables_of

POISON = 0xA5


def received(prepared: PreparedSnapshot) -> KVSnapshot:
    """What a target makes of the bytes, with nothing but them and the token counts."""
    made = []
    for index, tensor in enumerate(prepared.tensors):
        descriptor, _ = decode_descriptor(tensor.descriptor.encode())
        pool = np.full(descriptor.page_pool_bytes, POISON, dtype=np.uint8)
        prepared.read(index, 0, pool)
        buffers = [pool, *(prepared.buffer(index, number) for number in range(1, len(descriptor.buffers)))]
        made.append((descriptor, buffers))
    return KVSnapshot.from_buffers(made, prepared.structure.token_counts)


@given(snapshots())
def test_every_token_arrives_bit_for_bit_and_every_dead_slot_is_clear(made: tuple[KVSnapshot, list[Tensor]]) -> None:
    snapshot, parts = made

    prepared = prepare(snapshot)
    copy = received(prepared)

    check_compact(copy.structure)
    structure = parts[0].structure
    live = live_set(copy.structure)
    for part, tensor in zip(parts, copy.tensors, strict=True):
        for before, after, count in zip(
            tables_of(structure), tables_of(copy.structure), structure.token_counts.tolist(), strict=True
        ):
            for token in range(count):
                page, slot = divmod(token, structure.page_size)
                found = slot_elements(tensor.descriptor, tensor.page_pool, after[page], slot)
                assert found == part.slot(before[page], slot)
        for page in range(copy.structure.num_pages):
            for slot in range(structure.page_size):
                if (page, slot) not in live:
                    found = slot_elements(tensor.descriptor, tensor.page_pool, page, slot)
                    assert set(found) == {cleared(tensor.descriptor)}


@given(snapshots(names=("int8", "uint4", "int2")))
def test_dequantized_tokens_arrive_and_parameters_of_dead_slots_are_neutral(
    made: tuple[KVSnapshot, list[Tensor]],
) -> None:
    snapshot, _ = made

    copy = received(prepare(snapshot))

    live = live_set(copy.structure)
    for tensor, twin in zip(snapshot.tensors, copy.tensors, strict=True):
        for seq in range(snapshot.num_seqs):
            wanted = snapshot.tokens(tensor.layer_index, tensor.role, seq, dequantize=True)
            assert np.array_equal(copy.tokens(twin.layer_index, twin.role, seq, dequantize=True), wanted)
        if isinstance(twin.descriptor.quantization, PerBlockAffine):
            for item, array in parameter_arrays(twin.descriptor, twin.buffers):
                for entry in range(item.entries):
                    if divmod(entry, copy.structure.page_size) not in live:
                        assert array[entry] == (1 if item.kind == "scale" else 0)


@given(snapshots())
def test_contents_that_are_not_final_are_read_when_they_are(made: tuple[KVSnapshot, list[Tensor]]) -> None:
    snapshot, _ = made
    arrays = [array for tensor in snapshot.tensors for array in (tensor.page_pool, *tensor.parameters)]
    wanted, final = received(prepare(snapshot)), [array.copy() for array in arrays]
    for array in arrays:
        array.view(np.uint8)[...] = POISON

    prepared = prepare(snapshot, contents_final=False)
    sizes = [tensor.descriptor for tensor in prepared.tensors], prepared.nbytes
    for array, contents in zip(arrays, final, strict=True):
        array[...] = contents
    for count in range(len(prepared.tensors) + 1):
        prepared.copy_small(count)

    assert sizes == ([tensor.descriptor for tensor in prepare(snapshot).tensors], prepare(snapshot).nbytes)
    for ours, theirs in zip(received(prepared).tensors, wanted.tensors, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours.buffers[:1], theirs.buffers[:1], strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(ours.parameters, theirs.parameters, strict=True))


@given(snapshots(), st.data())
def test_any_byte_range_is_a_piece_of_the_whole(made: tuple[KVSnapshot, list[Tensor]], data: st.DataObject) -> None:
    prepared = prepare(made[0])
    size = prepared.tensors[0].descriptor.page_pool_bytes
    whole = np.zeros(size, dtype=np.uint8)
    prepared.read(0, 0, whole)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    part = np.full(end - start, POISON, dtype=np.uint8)

    prepared.read(0, start, part)

    assert np.array_equal(part, whole[start:end])


@st.composite
def runs_of_pages(draw: st.DrawFn, prepared: PreparedSnapshot) -> tuple[int, int]:
    """First page and count of some that follow each other."""
    first = draw(st.integers(0, prepared.num_pages - 1))
    return first, draw(st.integers(1, prepared.num_pages - first))


@given(snapshots(whole_bytes=True), st.data())
def test_runs_that_may_be_sent_directly_equal_what_fill_stages(
    made: tuple[KVSnapshot, list[Tensor]], data: st.DataObject
) -> None:
    prepared = prepare(made[0])
    if not prepared.num_pages:
        return
    first, count = data.draw(runs_of_pages(prepared))
    pages = prepared.compaction.pages[first : first + count].tolist()
    page_bytes = prepared.tensors[0].descriptor.page_bytes or 0
    staged = np.full((count, page_bytes), POISON, dtype=np.uint8)

    prepared.fill(0, first, count, staged)
    direct = prepared.direct_run(0, first, count)

    adjacent = pages == list(range(pages[0], pages[0] + count))
    live = prepared.compaction.live[first : first + count]
    assert (direct is not None) == (adjacent and bool((live == prepared.structure.page_size).all()))
    if direct is not None:
        assert direct.readonly
        assert bytes(direct) == staged.tobytes()


@given(snapshots(whole_bytes=True), st.data(), st.sampled_from([0, 3, preparing.KEPT_PARTS]))
def test_parts_equal_what_fill_stages_and_only_live_pages_are_the_engines(
    made: tuple[KVSnapshot, list[Tensor]], data: st.DataObject, kept_parts: int
) -> None:
    prepared = prepare(made[0])
    if not prepared.num_pages:
        return
    ranges = data.draw(st.lists(runs_of_pages(prepared), min_size=1, max_size=3))
    with patch.object(preparing, "PART_MIN_BYTES", 0), patch.object(preparing, "KEPT_PARTS", kept_parts):
        for first, count in ranges:
            for number in range(len(prepared.tensors)):
                check_parts(prepared, number, first, count)
    assert sum(len(layout.spans) for layout in prepared._layouts.values()) <= kept_parts


def check_parts(prepared: PreparedSnapshot, number: int, first: int, count: int) -> None:
    page_bytes = prepared.tensors[number].descriptor.page_bytes or 0
    staged = np.full((count, page_bytes), POISON, dtype=np.uint8)
    staging: list[np.ndarray] = []

    def take_staging() -> np.ndarray:
        staging.append(np.full(count * page_bytes + 1, POISON, dtype=np.uint8))
        return staging[-1]

    prepared.fill(number, first, count, staged)
    parts = prepared.parts(number, first, count, take_staging)

    if parts is None:
        assert not takes_any_bytes(prepared.tensors[number].descriptor)
        return
    pool = prepared.snapshot.tensors[number].page_pool
    live = prepared.compaction.live[first : first + count]
    is_full = (live == prepared.structure.page_size).tolist()
    own = [np.shares_memory(np.frombuffer(part, np.uint8), pool) for part in parts]
    assert all(part.readonly for part in parts)
    assert b"".join(parts) == staged.tobytes()
    assert [flag for part, flag in zip(parts, own, strict=True) for _ in range(len(part) // page_bytes)] == is_full
    assert len(staging) == (not all(is_full))
    first_pages = np.cumsum([0, *(len(part) // page_bytes for part in parts)])[1:-1]
    ids = prepared.compaction.pages[first : first + count]
    joined = [at for at in first_pages.tolist() if is_full[at - 1] and is_full[at] and ids[at] == ids[at - 1] + 1]
    assert not joined, "a run was cut"


@pytest.mark.parametrize(
    ("table", "token_count", "dim", "count"),
    [
        ([6, 2, 4], 12, 1024, 3),
        ([6, 2, 4], 12, 1023, None),
        ([2, 3, 4], 12, 8, None),
        ([2, 3, 4], 12, 342, 1),
        ([2, 3, 4], 9, 1024, 2),
        ([6, 2, 4], 9, 1024, None),
    ],
)
def test_parts_that_would_be_short_are_gathered(
    table: list[int], token_count: int, dim: int, count: int | None
) -> None:
    pool = np.ones((8, 4, 2, dim), dtype=np.float16)
    snapshot = KVSnapshot.from_paged({(0, "fused"): pool}, block_tables=[table], token_counts=[token_count])
    parts = prepare(snapshot).parts(0, 0, 3, lambda: np.empty(3 * 16 * dim, np.uint8))
    assert (parts and len(parts)) == count


# --- an engine's pools ----------------------------------------------------------------------------------------------

PAGE = (4, 2, 8)


def engine(layout: str = "NHD", dtype: Any = np.float16) -> np.ndarray:
    pool = np.arange(1, 8 * 64 + 1, dtype=np.uint16).view(dtype).reshape(8, *PAGE)
    return np.ascontiguousarray(pool.transpose(0, 2, 1, 3)) if layout == "HND" else pool


def test_the_shared_partial_page_is_kept_whole_and_crosses_once() -> None:
    pool = engine()
    snapshot = KVSnapshot.from_paged({(0, "fused"): pool}, block_tables=[[0, 1], [0]], token_counts=[6, 3])

    prepared = prepare(snapshot)
    out = np.empty((2, *PAGE), dtype=np.float16)
    prepared.fill(0, 0, 2, out.view(np.uint8))

    assert prepared.num_pages == 2
    assert prepared.structure.block_table.tolist() == [0, 1, 0]
    assert np.array_equal(out[0], pool[0])
    assert np.array_equal(out[1, :2], pool[1, :2])
    assert not out[1, 2:].view(np.uint16).any()
    assert np.array_equal(pool, engine()), "the engine's pool was written"


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_leave_in_nhd_order(layout: str) -> None:
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): engine(layout)}, block_tables=[[6, 2, 3]], token_counts=[12], layout=layout
    )

    prepared = prepare(snapshot)
    out = np.empty((3, *PAGE), dtype=np.float16)
    prepared.fill(0, 0, 3, out.view(np.uint8))

    assert np.array_equal(out, engine()[[6, 2, 3]])
    assert (prepared.direct_run(0, 1, 2) is None) == (layout == "HND")
    with patch.object(preparing, "PART_MIN_BYTES", 0):
        assert (prepared.parts(0, 0, 3, lambda: out.view(np.uint8)) is None) == (layout == "HND")


def test_pages_that_no_sequence_names_never_leave() -> None:
    pool = engine().view(np.uint16)
    pool[[0, 1, 3, 5, 7]] = 0xA5A5
    pool[4, 1:] = 0xA5A5
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): pool.view(np.float16)}, block_tables=[[2, 4, 5], [6, 7]], token_counts=[5, 4]
    )

    prepared = prepare(snapshot)

    parts = [prepared.buffer(0, 1), prepared.buffer(0, 2)]
    pages = np.empty(prepared.tensors[0].descriptor.page_pool_bytes, dtype=np.uint8)
    prepared.read(0, 0, pages)
    direct = [prepared.direct_run(0, page, 1) for page in range(prepared.num_pages)]
    sent = b"".join(bytes(part) for part in [*parts, pages, *filter(None, direct)])
    assert prepared.num_pages == 3
    assert b"\xa5\xa5" not in sent
    assert engine()[6].tobytes() in sent


def test_per_slot_scales_follow_their_pages_and_dead_ones_are_neutral() -> None:
    pool = np.arange(8 * 64, dtype=np.uint8).reshape(8, *PAGE)
    scales = (np.arange(32, dtype=np.float32) + 2).reshape(8, 4)
    scales[5, 2:] = np.nan
    points = np.full((8, 4), 3, dtype=np.int32)
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): pool},
        block_tables=[[7, 5]],
        token_counts=[6],
        quantization=Quantized.per_block(4, scales, points),
    )

    prepared = prepare(snapshot)

    scale_bytes, point_bytes = prepared.tensors[0].parameters
    assert scale_bytes.view(np.float32).tolist() == [30, 31, 32, 33, 22, 23, 1, 1]
    assert point_bytes.view(np.int32).tolist() == [3, 3, 3, 3, 3, 3, 0, 0]
    assert np.isnan(scales[5, 2])


def test_a_bad_live_scale_is_refused_before_anything_is_sent() -> None:
    scales = np.ones(32, dtype=np.float16)
    scales[5] = 0
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): np.zeros((8, *PAGE), np.int8)},
        block_tables=[[1]],
        token_counts=[2],
        quantization=Quantized.per_block(4, scales),
    )

    with pytest.raises(InvalidContents) as refused:
        prepare(snapshot)

    assert refused.value.rule == "V11"


def test_an_e8m0_value_that_is_none_is_refused_when_it_would_be_sent() -> None:
    pool = np.full((8, *PAGE), 0x7F, dtype=np.uint8)
    pool[1, 0, 0, 0], pool[2] = 0xFF, 0
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): pool}, block_tables=[[1]], token_counts=[4], element_type="float8_e8m0"
    )
    prepared = prepare(snapshot)

    for send in (
        lambda: prepared.fill(0, 0, 1, np.empty(64, np.uint8)),
        lambda: prepared.direct_run(0, 0, 1),
        lambda: prepared.read(0, 0, np.empty(3, np.uint8)),
    ):
        with pytest.raises(InvalidContents) as refused:
            send()
        assert refused.value.rule == "V14"


def test_parameters_are_page_aligned_and_index_types_are_kept() -> None:
    wide = np.array([0, 3, 0], np.uint64)
    snapshot = KVSnapshot.from_paged(
        {(0, "fused"): np.zeros((8, *PAGE), np.int8)},
        block_tables=(np.array([0, 2, 3], np.uint64), wide),
        token_counts=[6, 3],
        quantization=Quantized.per_block(4, np.ones(32, np.float32)),
    )

    prepared = prepare(snapshot)

    assert prepared.block_table.view("<u8").tolist() == [0, 1, 0]
    assert prepared.seq_ptr.view("<u8").tolist() == [0, 2, 3]
    assert is_page_aligned(prepared.buffer(0, 3))
    assert prepared.nbytes == 2 * 64 + 2 * 16 + 24 + 24


def test_a_closed_snapshot_is_read_no_more() -> None:
    snapshot = KVSnapshot.from_paged({(0, "fused"): engine()}, block_tables=[[1]], token_counts=[4])
    prepared = prepare(snapshot)
    snapshot.close()

    with pytest.raises(Misuse):
        prepared.fill(0, 0, 1, np.empty(128, np.uint8))
    with pytest.raises(Misuse):
        prepared.direct_run(0, 0, 1)
    with pytest.raises(Misuse):
        prepared.parts(0, 0, 1, lambda: np.empty(128, np.uint8))
