"""Element lookup and whole sequences against the format's formula on one big number."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from hurray_wire.dtypes import BY_NAME
from hurray_wire.elements import lookup, tokens
from hurray_wire.errors import InvalidRequest, Unsupported
from hurray_wire.packing import word_dtype
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine
from pages.cases import Tensor, descriptor_of, structure_of, tables_of, tensors


def bits_of(array: np.ndarray, name: str) -> list[int]:
    """Every element's bits; a boolean array has one byte for its one bit."""
    mask = (1 << BY_NAME[name].bits) - 1
    return [int.from_bytes(item.tobytes(), "little") & mask for item in array.reshape(-1)]


@given(tensors())
def test_tokens_and_lookup_read_what_the_formula_says(tensor: Tensor) -> None:
    descriptor, size = tensor.descriptor, tensor.descriptor.page_size
    for seq, (table, count) in enumerate(
        zip(tables_of(tensor.structure), tensor.structure.token_counts.tolist(), strict=True)
    ):
        found = tokens(descriptor, tensor.structure, tensor.buffers, seq)

        assert found.shape == (count, descriptor.num_heads, descriptor.head_dim)
        assert found.dtype == (descriptor.element_type.numpy or word_dtype(descriptor.element_type))
        expected = [item for token in range(count) for item in tensor.slot(table[token // size], token % size)]
        assert bits_of(found, descriptor.element_type.name) == expected
        if count:
            token, head, dim = count - 1, descriptor.num_heads - 1, descriptor.head_dim - 1
            one = lookup(descriptor, tensor.structure, tensor.buffers, seq, token, head, dim)
            assert one.raw == expected[-1]
            assert (one.page, one.slot) == (table[token // size], token % size)


@given(tensors(names=("int8", "uint8", "int4", "uint4", "int2", "uint2")))
def test_dequantized_tokens_are_the_dequantized_elements(tensor: Tensor) -> None:
    descriptor = tensor.descriptor
    for seq, count in enumerate(tensor.structure.token_counts.tolist()):
        real = tokens(descriptor, tensor.structure, tensor.buffers, seq, dequantize=True)
        stored = tokens(descriptor, tensor.structure, tensor.buffers, seq)

        assert real.dtype == np.float32
        for token in range(count):
            for head in range(descriptor.num_heads):
                for dim in range(descriptor.head_dim):
                    one = lookup(descriptor, tensor.structure, tensor.buffers, seq, token, head, dim)
                    wanted = float(stored[token, head, dim]) if descriptor.quantization is None else one.real
                    assert real[token, head, dim] == wanted


def test_each_scheme_by_hand() -> None:
    structure = structure_of([[1]], [2], page_size=2, num_pages=2)
    pool = np.array([0, 0, 0, 0, 3, 256 - 4, 5, 6], dtype=np.uint8)
    scales, points = np.array([0.5, 2], dtype=np.float32), np.array([1, -1], dtype=np.int32)

    def real(scheme: object, *parameters: np.ndarray) -> list[list[float]]:
        descriptor = descriptor_of(structure, "int8", 1, 2, quantization=scheme)
        buffers = (pool, None, None, *parameters)
        return tokens(descriptor, structure, buffers, 0, dequantize=True)[:, 0].tolist()

    assert real(PerTensorAffine(0.5, 1)) == [[1.0, -2.5], [2.0, 2.5]]
    assert real(PerChannelAffine(2, 3, 4), scales, points) == [[1.0, -6.0], [2.0, 14.0]]
    assert real(PerChannelAffine(1), scales[:1]) == [[1.5, -2.0], [2.5, 3.0]]
    by_slot = np.array([9, 9, 0.5, 2], dtype=ml_dtypes.bfloat16)
    assert real(PerBlockAffine(2, scale_type_tag=2), by_slot) == [[1.5, -2.0], [10.0, 12.0]]
    assert real(PerBlockAffine(2, 3, 4, 2), by_slot, np.array([0, 0, 1, -1], np.int32)) == [[1.0, -2.5], [12.0, 14.0]]


def test_large_storage_integers_do_not_wrap_in_the_subtraction() -> None:
    structure = structure_of([[0]], [1], page_size=1, num_pages=1)
    descriptor = descriptor_of(structure, "uint32", 1, 1, quantization=PerTensorAffine(1.0, 1))
    pool = np.array([0xFFFFFFFF], dtype=np.uint32).view(np.uint8)

    assert tokens(descriptor, structure, (pool,), 0, dequantize=True).item() == np.float32(0xFFFFFFFE)
    assert lookup(descriptor, structure, (pool,), 0, 0, 0, 0).stored == 0xFFFFFFFF


@pytest.mark.parametrize("field", ["s", "t", "h", "d"])
@pytest.mark.parametrize("side", ["end", "negative"])
def test_nothing_is_read_outside_a_sequence(field: str, side: str) -> None:
    structure = structure_of([[0], []], [2, 0], page_size=4, num_pages=1)
    descriptor = descriptor_of(structure, "float16", 2, 3)
    pool = np.zeros(descriptor.page_pool_bytes, dtype=np.uint8)
    place = {"s": 0, "t": 0, "h": 0, "d": 0}
    lookup(descriptor, structure, (pool,), **place)
    place[field] = -1 if side == "negative" else {"s": 2, "t": 2, "h": 2, "d": 3}[field]

    with pytest.raises(InvalidRequest) as refused:
        lookup(descriptor, structure, (pool,), **place)

    assert (refused.value.rule, refused.value.field) == ("V10", field)


def test_pools_kept_as_words_and_as_rows_are_read_alike() -> None:
    structure = structure_of([[2, 0]], [7], page_size=4, num_pages=3)
    descriptor = descriptor_of(structure, "bfloat16", 2, 8)
    heads_first = np.random.default_rng(1).integers(0, 1 << 16, (3, 2, 4, 8), dtype=np.uint16)
    words = heads_first.transpose(0, 2, 1, 3)
    rows = np.ascontiguousarray(words).reshape(3, -1).view(np.uint8)

    assert np.array_equal(
        tokens(descriptor, structure, (words,), 0).view(np.uint16),
        tokens(descriptor, structure, (rows,), 0).view(np.uint16),
    )
    assert lookup(descriptor, structure, (words,), 0, 5, 1, 3) == lookup(descriptor, structure, (rows,), 0, 5, 1, 3)


@pytest.mark.parametrize("name", ["float128", "complex64", "complex128"])
def test_types_without_a_float32_form_say_so(name: str) -> None:
    structure = structure_of([[0]], [1], page_size=1, num_pages=1)
    descriptor = descriptor_of(structure, name, 1, 1)
    pool = np.zeros(descriptor.page_pool_bytes, dtype=np.uint8)

    assert tokens(descriptor, structure, (pool,), 0).shape == (1, 1, 1)
    with pytest.raises(Unsupported):
        tokens(descriptor, structure, (pool,), 0, dequantize=True)


@pytest.mark.parametrize(
    "name", ["float4_e2m1", "float6_e2m3", "float8_e4m3", "float8_e8m0", "bfloat16", "bool", "int4"]
)
def test_types_without_a_scheme_are_widened(name: str) -> None:
    structure = structure_of([[0]], [1], page_size=1, num_pages=1)
    descriptor = descriptor_of(structure, name, 1, 8)
    pool = np.full(descriptor.page_pool_bytes, 0x01, dtype=np.uint8)

    wide = tokens(descriptor, structure, (pool,), 0, dequantize=True)

    assert wide.dtype == np.float32
    assert np.array_equal(wide, tokens(descriptor, structure, (pool,), 0).astype(np.float32))
