"""The rules on contents, each at its edge."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from hurray_wire.descriptor import Descriptor
from hurray_wire.errors import InvalidContents, LimitExceeded, Misuse
from hurray_wire.limits import Limits
from hurray_wire.pages import live_slots
from hurray_wire.policy import Policy
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine
from hurray_wire.validate import (
    BlockStructure,
    as_token_counts,
    check_buffer_lengths,
    check_parameters,
    check_pool,
    check_structure,
    check_token_counts,
    exact_sum,
    read_structure,
)
from pages.cases import Tensor, descriptor_of, structure_of, structures, tables_of, tensors


def descriptor_with(num_pages: int, num_seqs: int, entries: int, tokens: int, wide: bool = False) -> Descriptor:
    structure = structure_of([[0] * entries], [0], 4, num_pages, np.uint64 if wide else np.uint32)
    descriptor = descriptor_of(structure, "float16", 1, 0)
    return dataclasses.replace(
        descriptor,
        shape=(tokens, 1, 0),
        num_seqs=num_seqs,
        buffers=(
            *descriptor.buffers[:2],
            dataclasses.replace(descriptor.buffers[2], byte_size=(num_seqs + 1) * (8 if wide else 4)),
        ),
    )


def read(
    table: list[int], seq_ptr: list[int], counts: list[int], num_pages: int = 5, wide: bool = False
) -> BlockStructure:
    dtype = np.uint64 if wide else np.uint32
    descriptor = descriptor_with(num_pages, len(seq_ptr) - 1, len(table), sum(counts), wide)
    return read_structure(descriptor, np.array(table, dtype).tobytes(), np.array(seq_ptr, dtype).tobytes(), counts)


@given(tensors(names=("float16",)))
def test_a_structure_survives_its_index_buffers(tensor: Tensor) -> None:
    structure = read_structure(
        tensor.descriptor, tensor.buffers[1], tensor.buffers[2], tensor.structure.token_counts.tolist()
    )

    assert structure.same_as(tensor.structure)
    assert tables_of(structure) == tables_of(tensor.structure)
    assert structure.total_tokens == tensor.descriptor.total_tokens


def test_what_was_read_no_longer_follows_the_buffers() -> None:
    descriptor = descriptor_with(5, 1, 2, 8)
    table, seq_ptr = np.array([0, 1], np.uint32), np.array([0, 2], np.uint32)
    counts = np.array([8], np.uint64)

    structure = read_structure(descriptor, table, seq_ptr, counts)
    table[:], seq_ptr[:], counts[:] = 7, 7, 7

    check_structure(structure)
    assert structure.block_table.tolist() == [0, 1]


@pytest.mark.parametrize("seq_ptr", [[0], [0, 2, 2, 3]])
def test_empty_and_ragged_batches_are_fine(seq_ptr: list[int]) -> None:
    counts = [0] * (len(seq_ptr) - 1)

    assert read(list(range(seq_ptr[-1])), seq_ptr, counts).num_seqs == len(counts)


@pytest.mark.parametrize(
    ("rule", "index", "offered", "table", "seq_ptr", "counts"),
    [
        ("V1", 0, 1, [0, 1], [1, 2], [4]),
        ("V2", 1, 1, [0, 1], [0, 1], [4]),
        ("V3", 2, 2, [0, 1], [0, 3, 2], [4, 4]),
        ("V4", 1, 5, [0, 5, 9], [0, 3], [4]),
        ("V4", 0, 0xFFFFFFFF, [0xFFFFFFFF], [0, 1], [0]),
        ("V6", 1, 5, [0, 1], [0, 1, 2], [4, 5]),
        ("V6", 0, 1, [0], [0, 0, 1], [1, 0]),
    ],
)
def test_a_broken_index_is_refused_by_rule_place_and_value(
    rule: str, index: int, offered: int, table: list[int], seq_ptr: list[int], counts: list[int]
) -> None:
    with pytest.raises(InvalidContents) as refused:
        read(table, seq_ptr, counts)

    assert refused.value.rule == rule
    assert refused.value.details["index"] == str(index)
    assert refused.value.details["offered"] == str(offered)


@pytest.mark.parametrize("page", [(1 << 64) - 1, (1 << 58) + 1, 1 << 32, 1 << 63, 5])
def test_wide_page_ids_are_compared_whole(page: int) -> None:
    with pytest.raises(InvalidContents) as refused:
        read([0, page], [0, 2], [4], wide=True)

    assert (refused.value.rule, refused.value.details["offered"]) == ("V4", str(page))


def test_a_pool_of_all_64_bits_takes_every_smaller_id() -> None:
    assert read([(1 << 64) - 2], [0, 1], [4], num_pages=(1 << 64) - 1, wide=True).block_table[0] == (1 << 64) - 2
    with pytest.raises(InvalidContents):
        read([(1 << 64) - 1], [0, 1], [4], num_pages=(1 << 64) - 1, wide=True)


def test_pages_past_the_last_token_are_accepted() -> None:
    assert live_slots(read([0, 1], [0, 1, 2], [3, 0])).tolist() == [3, 0, 0, 0, 0]


def test_a_permissive_reading_gives_no_structure() -> None:
    with pytest.raises(Misuse):
        read_structure(descriptor_with(5, 0, 0, 0), b"", bytes(4), [], Policy(permissive=True))


@pytest.mark.parametrize(
    ("limits", "field"), [(Limits(max_sequences=1), "num_seqs"), (Limits(max_index_entries=2), "block_table")]
)
def test_limits_are_checked_before_anything_is_read(limits: Limits, field: str) -> None:
    with pytest.raises(LimitExceeded) as refused:
        read_structure(descriptor_with(5, 2, 3, 9), b"", b"", [], Policy(limits=limits))

    assert refused.value.field == field


# --- token counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "rule"),
    [
        ([6], "V9"),
        ([6, 3, 0], "V9"),
        ([10, -1], "V9"),
        (np.array([10, -1]), "V9"),
        ([6.0, 3.0], "V9"),
        (np.array([6.0, 3.0]), "V9"),
        ([True, 8], None),
        ([[6, 3]], "V9"),
        (["6", "3"], "V9"),
        ([1 << 64, 9], "V9"),
        ([6, 2], "V7"),
        ([(1 << 64) - 1, 10], "V7"),
        ([1 << 63, (1 << 63) + 9], "V7"),
    ],
)
def test_token_counts_are_one_per_sequence_whole_and_sum_to_the_shape(counts: object, rule: str | None) -> None:
    descriptor = descriptor_with(5, 2, 3, 9)
    if rule is None:
        assert check_token_counts(descriptor, counts).tolist() == [1, 8]  # type: ignore[arg-type]
        return

    with pytest.raises(InvalidContents) as refused:
        check_token_counts(descriptor, counts)  # type: ignore[arg-type]

    assert refused.value.rule == rule


def test_counts_that_need_more_pages_than_the_table_has_are_refused_before_any_index() -> None:
    assert check_token_counts(descriptor_with(5, 3, 3, 9), [1, 4, 4]).tolist() == [1, 4, 4]

    with pytest.raises(InvalidContents) as refused:
        check_token_counts(descriptor_with(5, 3, 3, 9), [1, 7, 1])

    assert (refused.value.rule, refused.value.details["offered"]) == ("V6", "4")


def test_counts_of_any_integer_type_are_taken_and_copied() -> None:
    mine = np.array([1, 2], dtype=np.uint64)

    taken = as_token_counts(mine)
    mine[:] = 0

    assert taken.tolist() == [1, 2]
    assert as_token_counts(np.array([1, 2], dtype=np.int8)).dtype == np.uint64
    assert as_token_counts([]).shape == (0,)
    assert as_token_counts([(1 << 64) - 1, 0]).tolist() == [(1 << 64) - 1, 0]


def test_sums_do_not_wrap() -> None:
    assert exact_sum(np.full(3, (1 << 64) - 1, dtype=np.uint64)) == 3 * ((1 << 64) - 1)


# --- buffers, parameters, pools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("change", [-1, 1])
def test_a_buffer_of_another_length_is_refused(index: int, change: int) -> None:
    structure = structure_of([[0, 1]], [7], 4, 2)
    descriptor = descriptor_of(structure, "int8", 1, 4, quantization=PerBlockAffine(4, 3, 4))
    sizes = [handle.byte_size for handle in descriptor.buffers]
    check_buffer_lengths(descriptor, [bytes(size) for size in sizes])
    sizes[index] += change

    with pytest.raises(InvalidContents) as refused:
        check_buffer_lengths(descriptor, [bytes(size) for size in sizes])

    assert refused.value.rule == "V5"
    with pytest.raises(InvalidContents):
        check_buffer_lengths(descriptor, [bytes(size) for size in sizes[:-1]])


@given(tensors())
def test_valid_contents_are_accepted(tensor: Tensor) -> None:
    live = live_slots(tensor.structure)

    check_buffer_lengths(tensor.descriptor, tensor.buffers)
    check_parameters(tensor.descriptor, tensor.buffers, live)
    check_pool(tensor.descriptor, tensor.buffers[0], live)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("bad", [0.0, -0.0, float("inf"), float("-inf"), float("nan")])
def test_every_scale_is_finite_and_not_zero_on_dead_slots_too(dtype: type, bad: float) -> None:
    structure = structure_of([[0]], [1], 2, 2)
    tag = {np.float16: 1, ml_dtypes.bfloat16: 2, np.float32: 3}[dtype]
    descriptor = descriptor_of(structure, "uint8", 1, 1, quantization=PerBlockAffine(2, scale_type_tag=tag))
    scales = np.array([1, -2, 0.5, 4], dtype=dtype)
    check_parameters(descriptor, (None, None, None, scales))
    scales[3] = bad

    with pytest.raises(InvalidContents) as refused:
        check_parameters(descriptor, (None, None, None, scales), live_slots(structure))

    assert (refused.value.rule, refused.value.details["index"]) == ("V11", "3")
    assert "page 1 slot 1 (dead)" in refused.value.message


def test_a_subnormal_scale_is_a_scale() -> None:
    structure = structure_of([[0]], [2], 2, 1)
    descriptor = descriptor_of(structure, "int8", 2, 1, quantization=PerChannelAffine(1))

    check_parameters(descriptor, (None, None, None, np.array([1e-45, -1e-45], dtype=np.float32)))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("int8", -128, 127),
        ("uint8", 0, 255),
        ("int4", -8, 7),
        ("uint4", 0, 15),
        ("int2", -2, 1),
        ("uint2", 0, 3),
        ("int16", -(1 << 15), (1 << 15) - 1),
        ("uint16", 0, (1 << 16) - 1),
        ("uint32", 0, (1 << 31) - 1),
        ("int32", -(1 << 31), (1 << 31) - 1),
    ],
)
def test_zero_points_fit_the_storage_type(name: str, low: int, high: int) -> None:
    descriptor = descriptor_of(structure_of([], [], 4, 0), name, 2, 4, quantization=PerChannelAffine(1, 3, 4))
    scales = np.ones(2, dtype=np.float32)
    check_parameters(descriptor, (None, None, None, scales, np.array([low, high], dtype=np.int32)))

    for index, bad in ((0, low - 1), (1, high + 1)):
        if -(1 << 31) <= bad < 1 << 31:
            points = np.array([low, high], dtype=np.int32)
            points[index] = bad
            with pytest.raises(InvalidContents) as refused:
                check_parameters(descriptor, (None, None, None, scales, points))
            assert (refused.value.rule, refused.value.details["index"]) == ("V12", str(index))


@pytest.mark.parametrize("name", ["int4", "int2", "bool", "float6_e3m2"])
def test_pad_bits_of_the_last_group_are_zero(name: str) -> None:
    structure = structure_of([[0, 1, 2]], [3], 1, 3)
    descriptor = descriptor_of(structure, name, 1, 3)
    full = (1 << 9 * descriptor.element_type.bits) - 1
    live = live_slots(structure)

    def pool(number: int) -> np.ndarray:
        return np.frombuffer(number.to_bytes(descriptor.page_pool_bytes, "little"), dtype=np.uint8)

    check_pool(descriptor, pool(full), live)
    for bit in (9 * descriptor.element_type.bits, 8 * descriptor.page_pool_bytes - 1):
        with pytest.raises(InvalidContents) as refused:
            check_pool(descriptor, pool(full | 1 << bit), live)
        assert refused.value.rule == "V13"


@pytest.mark.parametrize("bad", [0x00, 0xFF])
def test_live_e8m0_elements_have_values_and_dead_ones_need_none(bad: int) -> None:
    structure = structure_of([[1, 0]], [5], 4, 3)
    descriptor = descriptor_of(structure, "float8_e8m0", 1, 2)
    live = live_slots(structure)
    pool = np.full((3, 4, 2), 0x7F, dtype=np.uint8)
    pool[0, 1:], pool[2] = bad, bad
    check_pool(descriptor, pool, live)
    check_pool(descriptor, pool[1:], live, first_page=1)
    pool[0, 0, 1] = bad

    with pytest.raises(InvalidContents) as refused:
        check_pool(descriptor, pool, live)

    assert (refused.value.rule, refused.value.details["page"], refused.value.details["slot"]) == ("V14", "0", "0")
    check_pool(descriptor, pool[1:], live, first_page=1)


def test_a_large_e8m0_pool_is_looked_at_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.validate._CHECK_BYTES", 20)
    structure = structure_of([list(range(9))], [36], 4, 9)
    descriptor = descriptor_of(structure, "float8_e8m0", 1, 2)
    pool = np.full((9, 4, 2), 0x7F, dtype=np.uint8)
    pool[8, 2, 1] = 0

    with pytest.raises(InvalidContents) as refused:
        check_pool(descriptor, pool, live_slots(structure))

    assert (refused.value.details["page"], refused.value.details["slot"]) == ("8", "2")


@given(structures())
def test_every_random_structure_is_valid(structure: BlockStructure) -> None:
    check_structure(structure)
