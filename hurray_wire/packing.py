"""Elements in and out of their packed form (element-types.md, packing rules), as pure array functions.

In every packed type, 6-bit ones included, bit b of element k is bit `k * bits + b` of the buffer read as one
little-endian number: element k of a 4-bit type sits in byte k // 2, four 6-bit elements fill three bytes. So a range
of elements is always a range of bits, and clearing one never needs to know the width.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .dtypes import ElementType

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

E8M0_TAG: Final = 0x42
E8M0_NEUTRAL: Final = 0x7F
"""2**0. All zero bits are not a value of float8_e8m0 (V14), so a cleared element of that type holds this instead."""

_WORDS: Final[dict[int, np.dtype[Any]]] = {
    8: np.dtype("<u1"),
    16: np.dtype("<u2"),
    32: np.dtype("<u4"),
    64: np.dtype("<u8"),
}


def word_dtype(element_type: ElementType) -> np.dtype[Any]:
    """The NumPy dtype that holds one element's bits unpacked: unsigned, or raw bytes where NumPy has no such width."""
    if element_type.is_packed:
        return np.dtype("<u1")
    return _WORDS.get(element_type.bits, np.dtype(f"V{element_type.bits // 8}"))


def unpack(packed: Bytes, element_type: ElementType, count: int) -> Words:
    """The first `count` elements of a packed buffer as one word each, [count]; a view for whole-byte types.

    `packed` is uint8, one-dimensional and contiguous, of at least `element_type.packed_bytes(count)` bytes. Words
    are raw bits: `values` gives them their type.
    """
    used = packed[: element_type.packed_bytes(count)]
    bits = element_type.bits
    if not element_type.is_packed:
        return used.view(word_dtype(element_type))
    if bits == 1:
        return np.unpackbits(used, count=count, bitorder="little")
    if bits == 6:
        return _unpack_six(used)[:count]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    words = used[:, None] >> shifts
    words &= np.uint8((1 << bits) - 1)
    return words.reshape(-1)[:count]


def pack(words: Words, element_type: ElementType) -> Bytes:
    """The inverse of `unpack`: uint8 [packed_bytes(count)], unused high bits of the last byte or group zero (V13).

    Bits of a word above the element's width are dropped.
    """
    flat = np.ascontiguousarray(words).reshape(-1)
    bits = element_type.bits
    if not element_type.is_packed:
        return flat.view(np.uint8)
    if bits == 1:
        return np.packbits(flat & np.uint8(1), bitorder="little")
    group = element_type.group_elements
    padded = np.zeros(-(-flat.size // group) * group, dtype=np.uint8)
    np.bitwise_and(flat, np.uint8((1 << bits) - 1), out=padded[: flat.size])
    if bits == 6:
        return _pack_six(padded.reshape(-1, 4))
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: Bytes = np.bitwise_or.reduce(padded.reshape(-1, group) << shifts, axis=1)
    return packed


def _unpack_six(used: Bytes) -> Bytes:
    first, second, third = used[0::3], used[1::3], used[2::3]
    words = np.empty((first.size, 4), dtype=np.uint8)
    words[:, 0] = first & 0x3F
    words[:, 1] = (first >> 6) | ((second & 0x0F) << 2)
    words[:, 2] = (second >> 4) | ((third & 0x03) << 4)
    words[:, 3] = third >> 2
    return words.reshape(-1)


def _pack_six(groups: Bytes) -> Bytes:
    packed = np.empty((groups.shape[0], 3), dtype=np.uint8)
    packed[:, 0] = groups[:, 0] | (groups[:, 1] << 6)
    packed[:, 1] = (groups[:, 1] >> 2) | (groups[:, 2] << 4)
    packed[:, 2] = (groups[:, 2] >> 4) | (groups[:, 3] << 2)
    return packed.reshape(-1)


def values(words: Words, element_type: ElementType) -> npt.NDArray[Any]:
    """Words as values of their type, same shape: NumPy's or ml_dtypes' dtype, or raw words where there is none."""
    if element_type.numpy is None:
        return words
    if element_type.name == "bool":
        return words.astype(np.bool_)
    return words.view(element_type.numpy)


def clear_bits(buffer: Bytes, start: int, stop: int) -> None:
    """Zero the bits [start, stop) of a one-dimensional uint8 buffer in place, and no bit beside them."""
    if start >= stop:
        return
    first, first_bit = divmod(start, 8)
    last, last_bit = divmod(stop, 8)
    keep_low = (1 << first_bit) - 1
    keep_high = 0xFF & ~((1 << last_bit) - 1)
    if first == last:
        buffer[first] &= keep_low | keep_high
        return
    if first_bit:
        buffer[first] &= keep_low
        first += 1
    buffer[first:last] = 0
    if last_bit:
        buffer[last] &= keep_high
