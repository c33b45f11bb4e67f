"""KVSnapshot over an engine's pools: what is taken, what is refused, and what it gives back."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hurray_wire.errors import (
    HurrayError,
    InvalidContents,
    InvalidDescriptor,
    InvalidRequest,
    InvalidSnapshot,
    Misuse,
    Unsupported,
)
from hurray_wire.paged import Quantized
from hurray_wire.snapshot import KVSnapshot

SHAPE = (8, 4, 2, 8)


def distinct(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float16, start: int = 1) -> np.ndarray:
    """Every element another value, bit for bit."""
    if dtype is np.complex128:
        return np.arange(start, int(np.prod(shape)) + start).astype(dtype).reshape(shape)
    words = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return (np.arange(int(np.prod(shape))) + start).astype(words).view(dtype).reshape(shape)


def caches(**changes: Any) -> dict[tuple[int | None, str], Any]:
    return {(0, "key"): distinct(**changes), (0, "value"): distinct(**{"start": 1000, **changes})}


def make(given: Any = None, tables: Any = None, counts: Any = None, **options: Any) -> KVSnapshot:
    return KVSnapshot.from_paged(
        caches() if given is None else given,
        block_tables=[[0, 1], [0]] if tables is None else tables,
        token_counts=[6, 3] if counts is None else counts,
        **options,
    )


def rows(pool: np.ndarray, table: list[int], count: int) -> np.ndarray:
    return np.concatenate([pool[page] for page in table])[:count]


# --- what is taken ------------------------------------------------------------------------------------------------


def test_tokens_come_back_in_order_for_every_tensor_and_sequence() -> None:
    given = caches()

    snapshot = make(given)

    assert (snapshot.num_seqs, snapshot.token_counts.tolist()) == (2, [6, 3])
    assert [tensor.name for tensor in snapshot.tensors] == ["layer 0 key", "layer 0 value"]
    assert np.array_equal(snapshot.tokens(0, "key", 0), rows(given[0, "key"], [0, 1], 6))
    assert np.array_equal(snapshot.tokens(layer=0, role="value", seq=1), rows(given[0, "value"], [0], 3))
    assert snapshot.tokens(0, "key", 0).dtype == np.float16


def test_tokens_are_a_copy_and_pools_are_not() -> None:
    given = caches()
    snapshot = make(given)

    copy = snapshot.tokens(0, "key", 1)
    given[0, "key"][0, 0] = 7

    assert (copy[0] != 7).all()
    assert (snapshot.tokens(0, "key", 1)[0] == 7).all()


def test_tensors_are_in_order_of_layer_then_role_whatever_the_order_given() -> None:
    pools = {(2, "fused"): distinct(), (1, "value"): distinct(), (0, "key"): distinct(), (1, "key"): distinct()}

    snapshot = make({**pools, (0, "value"): distinct()})

    assert [(tensor.layer_index, tensor.role) for tensor in snapshot.tensors] == [
        (0, "key"), (0, "value"), (1, "key"), (1, "value"), (2, "fused")
    ]  # fmt: skip
    assert [tensor.descriptor.kv_role for tensor in snapshot.tensors] == [0, 1, 0, 1, 2]


def test_tensors_may_differ_in_heads_dimensions_and_type() -> None:
    given = {
        (0, "key"): distinct((8, 4, 1, 16), ml_dtypes.bfloat16),
        (0, "value"): distinct((8, 4, 3, 8), np.float32),
    }

    snapshot = make(given)

    assert snapshot.tokens(0, "key", 0).shape == (6, 1, 16)
    assert snapshot.tokens(0, "key", 0).dtype == ml_dtypes.bfloat16
    assert np.array_equal(snapshot.tokens(0, "value", 1), rows(given[0, "value"], [0], 3))


def test_a_cache_without_layers_goes_alone() -> None:
    snapshot = make({(None, "fused"): distinct()})

    assert snapshot.tensors[0].layer_index is None
    assert snapshot.tokens(None, "fused", 1).shape == (3, 2, 8)


def strided(kind: str, pool: np.ndarray) -> np.ndarray:
    """The same values in other strides."""
    if kind == "key and value side by side":
        both = np.zeros((pool.shape[0], 2, *pool.shape[1:]), pool.dtype)
        both[:, 1] = pool
        return both[:, 1]
    if kind == "heads first underneath":
        return np.ascontiguousarray(pool.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if kind == "padded head_dim":
        wide = np.zeros((*pool.shape[:3], pool.shape[3] + 3), pool.dtype)
        wide[..., :-3] = pool
        return wide[..., :-3]
    assert kind == "pages last"
    return np.ascontiguousarray(pool.transpose(1, 2, 3, 0)).transpose(3, 0, 1, 2)


STRIDES = ("key and value side by side", "heads first underneath", "padded head_dim", "pages last")


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.complex128])
def test_strides_are_the_callers_and_the_axes_are_as_declared(kind: str, dtype: Any) -> None:
    pool = distinct(dtype=dtype)
    view = strided(kind, pool)
    assert not view.flags.c_contiguous

    snapshot = make({(0, "fused"): view})

    assert np.array_equal(snapshot.tokens(0, "fused", 0), rows(pool, [0, 1], 6))


def test_hnd_is_declared_and_brought_into_order() -> None:
    pool = distinct()
    heads_first = np.ascontiguousarray(pool.transpose(0, 2, 1, 3))

    snapshot = make({(0, "fused"): heads_first}, layout="HND")

    assert snapshot.tensors[0].descriptor.page_size == 4
    assert snapshot.tensors[0].descriptor.num_heads == 2
    assert np.array_equal(snapshot.tokens(0, "fused", 0), rows(pool, [0, 1], 6))


@pytest.mark.parametrize(
    "tables",
    [
        [[0, 1], [0]],
        [np.array([0, 1]), np.array([0], np.uint8)],
        [(0, 1), [np.int64(0)]],
        (np.array([0, 2, 3]), np.array([0, 1, 0])),
        (np.array([0, 2, 3], np.int32), np.array([0, 1, 0], np.int32)),
    ],
)
def test_block_tables_are_lists_or_csr_arrays(tables: Any) -> None:
    snapshot = make(tables=tables)

    assert snapshot.structure.seq_ptr.tolist() == [0, 2, 3]
    assert snapshot.structure.block_table.tolist() == [0, 1, 0]
    assert snapshot.structure.block_table.dtype == np.uint32


def test_a_csr_table_of_uint64_stays_wide() -> None:
    snapshot = make(tables=(np.array([0, 2, 3], np.uint64), np.array([0, 1, 0], np.uint64)))

    assert snapshot.structure.block_table.dtype == np.uint64
    assert snapshot.tensors[0].descriptor.block_table_index_type == 1


def test_tables_and_counts_are_copied() -> None:
    table, counts = np.array([0, 1, 0]), np.array([6, 3])
    snapshot = make(tables=(np.array([0, 2, 3]), table), counts=counts)

    table[:], counts[:] = 7, 0

    assert snapshot.structure.block_table.tolist() == [0, 1, 0]
    assert snapshot.token_counts.tolist() == [6, 3]


@pytest.mark.parametrize(
    ("tables", "counts"), [([], []), ([[]], [0]), ([[0, 1], [], [2]], [6, 0, 1]), ([[], [3]], [0, 0])]
)
def test_empty_and_ragged_batches_are_snapshots(tables: Any, counts: Any) -> None:
    snapshot = make(tables=tables, counts=counts)

    assert [snapshot.tokens(0, "key", seq).shape[0] for seq in range(len(counts))] == counts


def test_packed_pools_are_bytes_with_a_declared_shape() -> None:
    pool = distinct((8, 32), np.uint8)

    snapshot = make({(0, "fused"): pool}, element_type="float4_e2m1", page_shape=(4, 2, 8))

    found = snapshot.tokens(0, "fused", 1)
    assert (found.shape, found.dtype) == ((3, 2, 8), ml_dtypes.float4_e2m1fn)
    assert found.view(np.uint8)[0, 0, :2].tolist() == [pool[0, 0] & 15, pool[0, 0] >> 4]


def test_each_tensor_may_have_its_own_type_and_shape() -> None:
    given = {(0, "key"): distinct((8, 64), np.uint8), (0, "value"): distinct((8, 4, 2, 8), np.uint8)}

    snapshot = make(
        given,
        element_type={(0, "key"): "uint4", (0, "value"): "float8_e4m3"},
        page_shape={(0, "key"): (4, 2, 16)},
    )

    assert [tensor.descriptor.element_type.name for tensor in snapshot.tensors] == ["uint4", "float8_e4m3"]
    assert [tensor.descriptor.head_dim for tensor in snapshot.tensors] == [16, 8]


def test_words_of_another_type_are_what_they_are_declared_to_be() -> None:
    eight = make({(0, "fused"): distinct(dtype=np.uint8)}, element_type="float8_e4m3")
    sixteen = make({(0, "fused"): distinct(dtype=np.uint16)}, element_type="bfloat16")

    assert eight.tokens(0, "fused", 0).dtype == ml_dtypes.float8_e4m3fn
    assert sixteen.tokens(0, "fused", 0).dtype == ml_dtypes.bfloat16


def test_quantized_caches_dequantize() -> None:
    pool = distinct((8, 4, 1, 2), np.int8)
    scales = np.linspace(1, 2, 32, dtype=np.float32).reshape(8, 4)

    snapshot = make({(0, "fused"): pool}, quantization=Quantized.per_block(4, scales))

    assert np.array_equal(
        snapshot.tokens(0, "fused", 0, dequantize=True)[4], pool[1, 0].astype(np.float32) * scales[1, 0]
    )
    assert snapshot.tokens(0, "fused", 0).dtype == np.int8


def test_each_scheme_may_be_one_for_all_or_one_per_tensor() -> None:
    given = caches(dtype=np.int8)
    zeros = np.array([1, -1], np.int32)

    one = make(given, quantization=Quantized.per_tensor(0.5, 3))
    own = make(
        given,
        quantization={
            (0, "key"): Quantized.per_channel(1, np.array([1, 2], np.float32), zeros),
            (0, "value"): Quantized.per_tensor(0.5),
        },
    )

    assert [tensor.descriptor.quantization.scheme_tag for tensor in one.tensors] == [1, 1]
    assert [tensor.descriptor.quantization.scheme_tag for tensor in own.tensors] == [2, 1]
    assert own.tokens(0, "key", 0, True)[0, 1, 0] == 2 * (float(given[0, "key"][0, 0, 1, 0]) + 1)


def test_a_tensor_is_described_among_others_as_it_is_alone() -> None:
    shapes = [(8, 4, 1, 16), (8, 4, 2, 8), (8, 4, 1, 8), (8, 4, 16, 1)]
    kinds = [(shape, dtype) for shape in shapes for dtype in (np.float16, ml_dtypes.bfloat16, np.int8)]
    given = {(layer, "fused"): distinct(*kind) for layer, kind in enumerate(2 * kinds)}
    quantization = {
        key: Quantized.per_tensor(2.0**-layer, layer)
        for layer, (key, pool) in enumerate(given.items())
        if pool.dtype == np.int8
    }

    together = make(given, quantization=quantization)

    for key, pool in given.items():
        alone = make({key: pool}, quantization=quantization)
        assert together.tensor(*key).descriptor == alone.tensor(*key).descriptor


# --- what is refused ----------------------------------------------------------------------------------------------


def refused(kind: type[HurrayError], field: str, /, *args: Any, **options: Any) -> HurrayError:
    with pytest.raises(kind) as found:
        make(*args, **options)
    assert found.value.field == field
    return found.value


@pytest.mark.parametrize(
    ("tables", "index", "value"),
    [
        ([[0, 5], [0]], 1, 5),
        ([[0, 0xFFFFFFFF], [0]], 1, 0xFFFFFFFF),
        ([[0, -1], [0]], 1, -1),
        ([[0, 1 << 64], [0]], 1, 1 << 64),
        ((np.array([0, 2, 3]), np.array([0, -1, 0])), 1, -1),
        ([np.array([0, -1], np.int32), [0]], 1, -1),
    ],
)
def test_page_ids_out_of_range_are_refused_by_place_and_value(tables: Any, index: int, value: int) -> None:
    with pytest.raises(InvalidContents) as found:
        make(caches(shape=(5, 4, 2, 8)), tables)

    details = found.value.details
    assert (details["rule"], details["index"], details["offered"]) == ("V4", str(index), str(value))


@pytest.mark.parametrize(("seq_ptr", "rule"), [([0, 3, 2], "V3"), ([1, 2], "V1"), ([0, 2], "V2"), ([], "V1")])
def test_broken_csr_arrays_are_refused(seq_ptr: list[int], rule: str) -> None:
    with pytest.raises(InvalidContents) as found:
        make(tables=(np.array(seq_ptr, np.int64), np.array([0, 1, 0])), counts=[1] * max(len(seq_ptr) - 1, 0))

    assert found.value.rule == rule


@pytest.mark.parametrize(
    "tables",
    [
        np.array([[0, 1], [0, 0]]),
        ([0, 2, 3], [0, 1, 0]),
        (np.array([0, 2]), np.array([0, 1]), np.array([0])),
        "ab",
        None,
        [[[0, 1]], [[0]]],
    ],
)
def test_tables_of_no_clear_shape_are_refused(tables: Any) -> None:
    with pytest.raises(InvalidSnapshot):
        KVSnapshot.from_paged(caches(), block_tables=tables, token_counts=[6, 3])


@pytest.mark.parametrize("tables", [[[0.0, 1.0], [0]], [[True, True], [0]], [["0"], [0]]])
def test_page_ids_are_integers(tables: Any) -> None:
    with pytest.raises(InvalidContents):
        make(tables=tables)


def test_a_rectangle_of_tables_says_why_it_is_refused() -> None:
    error = refused(InvalidSnapshot, "block_tables", tables=np.array([[0, 1], [0, 0]]))

    assert "padded" in error.message
    assert "(2, 2)" in error.details["offered"]


@pytest.mark.parametrize(("counts", "rule"), [([9, 0], "V6"), ([6], "V9"), ([6, -1], "V9"), ([6, 2.5], "V9")])
def test_token_counts_must_fit_the_tables(counts: Any, rule: str) -> None:
    with pytest.raises(InvalidContents) as found:
        make(counts=counts)

    assert found.value.rule == rule


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [(0, "key")],
        [(0, "value")],
        [(0, "key"), (1, "value")],
        [(0, "key"), (0, "value"), (0, "fused")],
        [(0, "key"), (0, "fused")],
        [(None, "fused"), (0, "fused")],
        [(0, "keys")],
        [(-1, "fused")],
        [(0xFFFFFFFF, "fused")],
        [("0", "fused")],
        [(0.0, "fused")],
        ["key"],
        [(0, 0)],
    ],
)
def test_a_layer_has_its_key_and_its_value_or_is_fused(keys: list[Any]) -> None:
    with pytest.raises(InvalidSnapshot):
        make({key: distinct() for key in keys})


def test_integers_that_nobody_explains_are_refused() -> None:
    for dtype in (np.int8, np.uint8, np.int32):
        error = refused(InvalidSnapshot, "quantization", caches(dtype=dtype))
        assert "without scales" in error.message
    plain = make(caches(dtype=np.int8), element_type="int8")
    assert plain.tensors[0].descriptor.quantization is None


@pytest.mark.parametrize(
    ("field", "other"),
    [("page_size", (8, 2, 2, 8)), ("num_pages", (9, 4, 2, 8))],
)
def test_tensors_share_page_size_and_number_of_pages(field: str, other: tuple[int, ...]) -> None:
    error = refused(InvalidSnapshot, field, {(0, "key"): distinct(), (0, "value"): distinct(other)})

    assert error.details["offered"] != error.details["required"]


@pytest.mark.parametrize("layout", ["nhd", "NHDC", "", "DHN"])
def test_other_layouts_are_not_guessed(layout: str) -> None:
    refused(InvalidSnapshot, "layout", layout=layout)


@pytest.mark.parametrize(
    ("given", "options", "field"),
    [
        (np.zeros((8, 4, 16), np.float16), {}, "caches"),
        (np.zeros((8, 0, 2, 8), np.float16), {}, "page_size"),
        (np.zeros(SHAPE, np.bool_), {}, "element_type"),
        (np.zeros(SHAPE, ml_dtypes.int4), {}, "element_type"),
        (np.zeros(SHAPE, ">f2"), {}, "element_type"),
        (np.zeros(SHAPE, np.float16), {"element_type": "bfloat16"}, "element_type"),
        (np.zeros(SHAPE, np.int8), {"element_type": "float8_e4m3"}, "element_type"),
        (np.zeros(SHAPE, np.uint8), {"element_type": "bfloat16"}, "element_type"),
        (np.zeros(SHAPE, np.float16), {"page_shape": (4, 8, 2)}, "page_shape"),
        (np.zeros((8, 32), np.uint8), {"element_type": "int4"}, "page_shape"),
        (np.zeros((8, 33), np.uint8), {"element_type": "int4", "page_shape": (4, 2, 8)}, "caches"),
        (np.zeros((8, 32), np.int8), {"element_type": "int4", "page_shape": (4, 2, 8)}, "caches"),
        (np.zeros((8, 32), np.uint8), {"element_type": "int4", "page_shape": (4, 2, 8), "layout": "HND"}, "layout"),
        (np.zeros((8, 2), np.uint8), {"element_type": "int4", "page_shape": (1, 1, 3)}, "page_shape"),
        (np.zeros((8, 3), np.uint8), {"element_type": "float6_e2m3", "page_shape": (1, 1, 3)}, "page_shape"),
        (object(), {}, "caches"),
    ],
)
def test_arrays_that_are_not_what_is_declared_are_refused(given: Any, options: Any, field: str) -> None:
    refused(InvalidSnapshot, field, {(0, "fused"): given}, **options)


def test_an_unknown_element_type_is_unsupported() -> None:
    refused(Unsupported, "element_type", element_type="fp7")


# --- scales (the format's per-slot rule) ----------------------------------------------------------------------------


def int8_with(quantization: Any) -> KVSnapshot:
    return make({(0, "fused"): distinct(dtype=np.int8)}, quantization=quantization)


@pytest.mark.parametrize("entries", [9, 31, 33])
def test_there_is_one_scale_per_page_slot_not_per_token(entries: int) -> None:
    with pytest.raises(InvalidSnapshot) as found:
        int8_with(Quantized.per_block(4, np.ones(entries, np.float32)))

    assert (found.value.field, found.value.rule) == ("scales", "Q27")
    assert (found.value.details["offered"], found.value.details["required"]) == (str(entries), "32")


def test_the_block_of_a_scale_is_the_page() -> None:
    with pytest.raises(InvalidDescriptor) as found:
        int8_with(Quantized.per_block(8, np.ones(32, np.float32)))

    assert found.value.rule == "Q23"


@pytest.mark.parametrize(
    ("make_scheme", "field"),
    [
        (lambda: Quantized.per_block(4, np.ones(32, np.float64)), "scales"),
        (lambda: Quantized.per_block(4, np.ones(32, np.float32), np.zeros(32, np.int64)), "zero_points"),
        (lambda: Quantized.per_block(4, np.ones((32, 2), np.float32)[:, 0]), "scales"),
    ],
)
def test_parameter_arrays_have_the_types_of_the_format(make_scheme: Any, field: str) -> None:
    with pytest.raises(InvalidSnapshot) as found:
        make_scheme()

    assert found.value.field == field


@pytest.mark.parametrize(
    ("make_scheme", "rule"),
    [
        (lambda: Quantized.per_tensor(0.0), "Q10"),
        (lambda: Quantized.per_tensor(1.0, 128), "Q11"),
        (lambda: Quantized.per_channel(0, np.ones(9, np.float32)), "Q14"),
        (lambda: Quantized.per_channel(1, np.ones(2, np.float16)), "Q15"),
    ],
)
def test_schemes_that_the_format_refuses_are_refused_by_rule(make_scheme: Any, rule: str) -> None:
    with pytest.raises(InvalidDescriptor) as found:
        int8_with(make_scheme())

    assert found.value.rule == rule


def test_floats_take_no_scheme() -> None:
    with pytest.raises(InvalidDescriptor) as found:
        make(quantization=Quantized.per_tensor(1.0))

    assert found.value.rule == "Q9"


# --- access and lifetime --------------------------------------------------------------------------------------------


def test_what_is_not_there_is_refused_by_name() -> None:
    snapshot = make()

    for layer, role in ((1, "key"), (0, "fused"), (None, "key")):
        with pytest.raises(InvalidRequest):
            snapshot.tokens(layer, role, 0)
    for seq in (-1, 2):
        with pytest.raises(InvalidRequest):
            snapshot.tokens(0, "key", seq)


def test_a_closed_snapshot_gives_nothing_and_releases_once() -> None:
    released: list[int] = []
    base = make()
    snapshot = KVSnapshot(base.tensors, base.structure, release=lambda: released.append(1))

    with snapshot as same:
        assert same is snapshot
        assert "2 sequences, 9 tokens" in repr(snapshot)
    snapshot.close()

    assert released == [1]
    assert snapshot.closed
    assert "closed" in repr(snapshot)
    for access in (
        lambda: snapshot.tensors,
        lambda: snapshot.structure,
        lambda: snapshot.token_counts,
        lambda: snapshot.num_seqs,
        lambda: snapshot.nbytes,
        lambda: snapshot.tokens(0, "key", 0),
        snapshot.__enter__,
    ):
        with pytest.raises(Misuse):
            access()


def test_a_forgotten_snapshot_releases_when_it_goes() -> None:
    released: list[int] = []
    base = make()
    snapshot = KVSnapshot(base.tensors, base.structure, release=lambda: released.append(1))

    del snapshot
    gc.collect()

    assert released == [1]


def test_a_snapshot_counts_the_bytes_it_stands_on() -> None:
    assert make().nbytes == 2 * 8 * 4 * 2 * 8 * 2


# --- unchecked buffers ----------------------------------------------------------------------------------------------


def raw(snapshot: KVSnapshot) -> list[tuple[Any, list[Any]]]:
    structure = snapshot.structure
    return [
        (
            tensor.descriptor,
            [
                np.ascontiguousarray(tensor.page_pool).tobytes(),
                structure.block_table.tobytes(),
                structure.seq_ptr.astype(structure.block_table.dtype).tobytes(),
                *(array.tobytes() for array in tensor.parameters),
            ],
        )
        for tensor in snapshot.tensors
    ]


def test_buffers_that_nobody_checked_become_the_same_snapshot() -> None:
    given = caches()

    snapshot = KVSnapshot.from_buffers(raw(make(given)), [6, 3])

    assert np.array_equal(snapshot.tokens(0, "value", 0), rows(given[0, "value"], [0, 1], 6))


def test_buffers_are_checked_and_must_share_one_structure() -> None:
    tensors = raw(make())
    short = [(tensors[0][0], [tensors[0][1][0][:-1], *tensors[0][1][1:]]), tensors[1]]
    with pytest.raises(InvalidContents) as found:
        KVSnapshot.from_buffers(short, [6, 3])
    assert found.value.rule == "V5"
    with pytest.raises(InvalidContents):
        KVSnapshot.from_buffers(tensors, [6, 2])
    other = raw(make(tables=[[0, 2], [0]]))
    with pytest.raises(InvalidSnapshot) as apart:
        KVSnapshot.from_buffers([tensors[0], other[1]], [6, 3])
    assert apart.value.field == "block_table"
    with pytest.raises(InvalidSnapshot):
        KVSnapshot.from_buffers([], [])


def test_values_that_are_none_are_refused_in_buffers_that_nobody_checked() -> None:
    pool = np.full((8, 4, 1, 2), 0x7F, np.uint8)
    snapshot = make({(0, "fused"): pool}, element_type="float8_e8m0")
    pool[1, 1] = 0xFF

    with pytest.raises(InvalidContents) as found:
        KVSnapshot.from_buffers(raw(snapshot), [6, 3])

    assert found.value.rule == "V14"


def test_a_tensor_of_another_geometry_does_not_fit() -> None:
    small, large = make(caches(shape=(5, 4, 2, 8))), make()

    with pytest.raises(InvalidSnapshot) as found:
        KVSnapshot(small.tensors, large.structure)

    assert found.value.field == "num_pages"
