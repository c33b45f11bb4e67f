"""Element types of the Hurray format (TYPES.md, element-types.md): tags, widths and packing arithmetic.

Sizes are computed in Python integers: exact at any width, so a product past 2**64 is a large number, not a small one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

TYPE_TAG_INVALID: Final = frozenset({0x00, 0xFF})
TYPE_TAG_PRIVATE: Final = range(0xF0, 0xFF)


@dataclass(frozen=True, slots=True)
class ElementType:
    """One storage type. `bits` per element; `numpy` is the dtype of unpacked values, None where NumPy has none.

    Packing: whole bytes at 8 bits and more; LSB first in one byte at 1, 2 and 4 bits; four elements in three bytes,
    LSB first across the bytes, at 6 bits.
    """

    tag: int
    name: str
    bits: int
    numpy: np.dtype[np.generic] | None

    @property
    def group_elements(self) -> int:
        """Elements in the smallest whole-byte group: 1, or 8 / bits, or 4 for the 6-bit types."""
        return 4 if self.bits == 6 else max(1, 8 // self.bits)

    @property
    def group_bytes(self) -> int:
        """Bytes of that group: bits / 8, or 1, or 3."""
        return 3 if self.bits == 6 else max(1, self.bits // 8)

    @property
    def is_packed(self) -> bool:
        """True where several elements share bytes (1, 2, 4 and 6 bits)."""
        return self.bits < 8

    def packed_bytes(self, elements: int) -> int:
        """Bytes that `elements` elements take, exact (element-types.md § Buffer Size Calculation)."""
        return -(-elements // self.group_elements) * self.group_bytes


def _dtype(scalar: object) -> np.dtype[np.generic]:
    return np.dtype(scalar)  # type: ignore[call-overload, no-any-return]


_TYPES: Final = (
    ElementType(0x01, "float16", 16, _dtype(np.float16)),
    ElementType(0x02, "bfloat16", 16, _dtype(ml_dtypes.bfloat16)),
    ElementType(0x03, "float32", 32, _dtype(np.float32)),
    ElementType(0x04, "float64", 64, _dtype(np.float64)),
    ElementType(0x10, "int8", 8, _dtype(np.int8)),
    ElementType(0x11, "uint8", 8, _dtype(np.uint8)),
    ElementType(0x12, "int16", 16, _dtype(np.int16)),
    ElementType(0x13, "uint16", 16, _dtype(np.uint16)),
    ElementType(0x14, "int32", 32, _dtype(np.int32)),
    ElementType(0x15, "uint32", 32, _dtype(np.uint32)),
    ElementType(0x16, "int64", 64, _dtype(np.int64)),
    ElementType(0x17, "uint64", 64, _dtype(np.uint64)),
    ElementType(0x20, "bool", 1, _dtype(np.bool_)),
    ElementType(0x40, "float8_e4m3", 8, _dtype(ml_dtypes.float8_e4m3fn)),
    ElementType(0x41, "float8_e5m2", 8, _dtype(ml_dtypes.float8_e5m2)),
    ElementType(0x42, "float8_e8m0", 8, _dtype(ml_dtypes.float8_e8m0fnu)),
    ElementType(0x43, "float4_e2m1", 4, _dtype(ml_dtypes.float4_e2m1fn)),
    ElementType(0x44, "float6_e2m3", 6, _dtype(ml_dtypes.float6_e2m3fn)),
    ElementType(0x45, "float6_e3m2", 6, _dtype(ml_dtypes.float6_e3m2fn)),
    # NumPy's longdouble is not IEEE binary128 on every machine: values stay raw 16-byte words.
    ElementType(0x46, "float128", 128, None),
    ElementType(0x48, "int4", 4, _dtype(ml_dtypes.int4)),
    ElementType(0x49, "uint4", 4, _dtype(ml_dtypes.uint4)),
    ElementType(0x4A, "int2", 2, _dtype(ml_dtypes.int2)),
    ElementType(0x4B, "uint2", 2, _dtype(ml_dtypes.uint2)),
    ElementType(0x50, "complex64", 64, _dtype(np.complex64)),
    ElementType(0x51, "complex128", 128, _dtype(np.complex128)),
)

BY_TAG: Final[dict[int, ElementType]] = {item.tag: item for item in _TYPES}
BY_NAME: Final[dict[str, ElementType]] = {item.name: item for item in _TYPES}


def from_numpy(dtype: np.dtype[np.generic]) -> ElementType | None:
    """The element type whose values NumPy stores as `dtype`, or None. Packed types are never guessed from a dtype."""
    for item in _TYPES:
        if item.numpy == dtype and not item.is_packed:
            return item
    return None
