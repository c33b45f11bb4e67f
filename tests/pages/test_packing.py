"""Packed elements against one big number, the definition of every packing rule."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire.dtypes import BY_NAME
from hurray_wire.packing import clear_bits, pack, unpack, values, word_dtype
from pages.cases import NAMES, elements_of, packed


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(0, 37), seed=st.integers(0, 2**32 - 1))
def test_unpack_reads_what_one_number_holds_and_pack_is_its_inverse(name: str, count: int, seed: int) -> None:
    element_type = BY_NAME[name]
    data = np.random.default_rng(seed).integers(0, 256, element_type.packed_bytes(count), dtype=np.uint8)
    expected = elements_of(data.tobytes(), element_type.bits, count)

    words = unpack(data, element_type, count)

    assert words.shape == (count,)
    assert words.dtype == word_dtype(element_type)
    assert [int.from_bytes(word.tobytes(), "little") for word in words] == expected
    assert pack(words, element_type).tobytes() == packed(expected, element_type)


@pytest.mark.parametrize(("name", "count"), [("int4", 3), ("int2", 5), ("bool", 9), ("float6_e2m3", 5), ("uint8", 3)])
def test_pack_leaves_unused_high_bits_zero_and_ignores_bits_above_the_width(name: str, count: int) -> None:
    element_type = BY_NAME[name]
    full = np.full(count, 0xFF, dtype=np.uint8)

    number = int.from_bytes(pack(full, element_type).tobytes(), "little")

    assert number == (1 << (count * element_type.bits)) - 1


def test_unpack_takes_a_prefix_of_a_longer_buffer() -> None:
    assert unpack(np.array([0x21, 0x43, 0x65], dtype=np.uint8), BY_NAME["uint4"], 3).tolist() == [1, 2, 3]


def test_values_have_the_type_of_the_format() -> None:
    words = np.array([0, 1, 7, 8, 15], dtype=np.uint8)

    assert values(words, BY_NAME["int4"]).dtype == ml_dtypes.int4
    assert values(words, BY_NAME["int4"]).astype(int).tolist() == [0, 1, 7, -8, -1]
    assert values(words[:2], BY_NAME["bool"]).tolist() == [False, True]
    assert values(np.zeros(2, dtype="V16"), BY_NAME["float128"]).dtype == np.dtype("V16")


@given(size=st.integers(1, 9), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_clear_bits_clears_its_range_and_nothing_else(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 8 * size))
    stop = data.draw(st.integers(0, 8 * size))
    buffer = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    number = int.from_bytes(buffer.tobytes(), "little")
    mask = ((1 << stop) - 1) & ~((1 << start) - 1)

    clear_bits(buffer, start, stop)

    assert int.from_bytes(buffer.tobytes(), "little") == number & ~mask
