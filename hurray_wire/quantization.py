"""Quantization schemes 0x01-0x03 as block-paged tensors carry them: codec, rules, what each parameter buffer holds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np

from .cursor import Cursor, Table
from .dtypes import BY_TAG
from .errors import HurrayError
from .policy import broken, not_taken
from .sections import PRIVATE, RANK, BufferHandle

NO_BUFFER: Final = 0xFFFFFFFF
"""zero_point_buffer_index of a symmetric scheme."""

FIRST_PARAMETER_BUFFER: Final = 3
"""Buffers 0 to 2 are page_pool, block_table and seq_ptr."""

SCHEME_VERSION: Final = 1
SYMMETRIC: Final = 1
FLOAT32_TAG: Final = 0x03
_INTEGER_TAGS: Final = frozenset({0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x48, 0x49, 0x4A, 0x4B})
_NARROW_TAGS: Final = frozenset({0x10, 0x11, 0x48, 0x49, 0x4A, 0x4B})
_SCALE_TAGS: Final = (0x01, 0x02, 0x03)
_SIZE_RULES: Final = {(2, "scale"): "Q20", (2, "zero_point"): "Q21", (3, "scale"): "Q27", (3, "zero_point"): "Q28"}
_UNCOMPOSED: Final = {0x04: "NF4", 0x05: "MXFP"}

SCHEME_HEADER: Final = Table("quantization", ("scheme_tag", "B"), ("scheme_version", "B"), ("flags", "H"))
"""First four bytes of every scheme. scheme_version is 1 (Q6, Q7); unknown flag bits are zero (Q8)."""


@dataclass(frozen=True, slots=True)
class PerTensorAffine:
    """Scheme 0x01 (OFFSETS.md; per-tensor-affine.md). Little-endian, packed, 16 bytes.

    Offset Size Type  Field                   Rule
     0     1    u8    scheme_tag              0x01 (Q2-Q5)
     1     1    u8    scheme_version          1 (Q6, Q7)
     2     2    u16   flags                   zero (Q8)
     4     4    f32   scale                   finite, not zero (Q10)
     8     4    i32   zero_point              a value of the storage type (Q11)
    12     4    bytes _reserved               zero (Q12)

    `scale` is rounded to float32 when the object is made; what overflows becomes infinite, and is refused.
    """

    scheme_tag: ClassVar[int] = 0x01
    scheme: ClassVar[str] = "per_tensor_affine"
    scale: float
    zero_point: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", ctypes.c_float(self.scale).value)

    @property
    def flags(self) -> int:
        """Scheme flags: none are defined."""
        return 0

    def pack(self) -> bytes:
        """The 16 bytes of the scheme."""
        return PER_TENSOR.struct.pack(0x01, SCHEME_VERSION, 0, self.scale, self.zero_point, bytes(4))


PER_TENSOR: Final = Table(
    "quantization",
    ("scheme_tag", "B"),
    ("scheme_version", "B"),
    ("flags", "H"),
    ("scale", "f"),
    ("zero_point", "i"),
    ("_reserved", "4s"),
)


@dataclass(frozen=True, slots=True)
class PerChannelAffine:
    """Scheme 0x02 (OFFSETS.md; per-channel-affine.md). Little-endian, packed, 20 bytes.

    Offset Size Type  Field                   Rule
     0     1    u8    scheme_tag              0x02 (Q2-Q5)
     1     1    u8    scheme_version          1 (Q6, Q7)
     2     2    u16   flags                   bit 0 SYMMETRIC (Q8)
     4     4    u32   axis                    1 or 2 (Q13, Q14)
     8     4    u32   scale_buffer_index      3 <= index < buffer_count (Q16-Q18)
    12     4    u32   zero_point_buffer_index the same; 0xFFFFFFFF if SYMMETRIC (Q19), here None
    16     1    u8    scale_type_tag          0x03 (Q15)
    17     3    bytes _reserved               zero (Q12)

    Parameters: shape[axis] scales, and as many int32 zero points unless symmetric.
    """

    scheme_tag: ClassVar[int] = 0x02
    scheme: ClassVar[str] = "per_channel_affine"
    axis: int
    scale_buffer_index: int = 3
    zero_point_buffer_index: int | None = None
    scale_type_tag: int = FLOAT32_TAG

    @property
    def symmetric(self) -> bool:
        """True where there are no zero points: all are 0."""
        return self.zero_point_buffer_index is None

    @property
    def flags(self) -> int:
        """Scheme flags."""
        return SYMMETRIC if self.symmetric else 0

    def pack(self) -> bytes:
        """The 20 bytes of the scheme."""
        return PER_CHANNEL.struct.pack(
            0x02,
            SCHEME_VERSION,
            self.flags,
            self.axis,
            self.scale_buffer_index,
            NO_BUFFER if self.zero_point_buffer_index is None else self.zero_point_buffer_index,
            self.scale_type_tag,
            bytes(3),
        )


PER_CHANNEL: Final = Table(
    "quantization",
    ("scheme_tag", "B"),
    ("scheme_version", "B"),
    ("flags", "H"),
    ("axis", "I"),
    ("scale_buffer_index", "I"),
    ("zero_point_buffer_index", "I"),
    ("scale_type_tag", "B"),
    ("_reserved", "3s"),
)


@dataclass(frozen=True, slots=True)
class PerBlockAffine:
    """Scheme 0x03 (OFFSETS.md; per-block-affine.md). Little-endian, packed, 24 bytes.

    Offset Size Type  Field                   Rule
     0     1    u8    scheme_tag              0x03 (Q2-Q5)
     1     1    u8    scheme_version          1 (Q6, Q7)
     2     2    u16   flags                   bit 0 SYMMETRIC (Q8)
     4     4    u32   axis                    0 (Q22)
     8     4    u32   block_size              page_size (Q23), a power of two >= 2 (Q24)
    12     4    u32   scale_buffer_index      3 <= index < buffer_count (Q16-Q18)
    16     4    u32   zero_point_buffer_index the same; 0xFFFFFFFF if SYMMETRIC (Q19C), here None
    20     1    u8    scale_type_tag          0x01, 0x02 or 0x03 (Q26)
    21     3    bytes _reserved               zero (Q12)

    Parameters: num_pages * page_size scales, one per page slot, and as many int32 zero points unless symmetric.
    """

    scheme_tag: ClassVar[int] = 0x03
    scheme: ClassVar[str] = "per_block_affine"
    block_size: int
    scale_buffer_index: int = 3
    zero_point_buffer_index: int | None = None
    scale_type_tag: int = FLOAT32_TAG
    axis: int = 0

    @property
    def symmetric(self) -> bool:
        """True where there are no zero points: all are 0."""
        return self.zero_point_buffer_index is None

    @property
    def flags(self) -> int:
        """Scheme flags."""
        return SYMMETRIC if self.symmetric else 0

    def pack(self) -> bytes:
        """The 24 bytes of the scheme."""
        return PER_BLOCK.struct.pack(
            0x03,
            SCHEME_VERSION,
            self.flags,
            self.axis,
            self.block_size,
            self.scale_buffer_index,
            NO_BUFFER if self.zero_point_buffer_index is None else self.zero_point_buffer_index,
            self.scale_type_tag,
            bytes(3),
        )


PER_BLOCK: Final = Table(
    "quantization",
    ("scheme_tag", "B"),
    ("scheme_version", "B"),
    ("flags", "H"),
    ("axis", "I"),
    ("block_size", "I"),
    ("scale_buffer_index", "I"),
    ("zero_point_buffer_index", "I"),
    ("scale_type_tag", "B"),
    ("_reserved", "3s"),
)

SCHEME_TABLES: Final = {0x01: PER_TENSOR, 0x02: PER_CHANNEL, 0x03: PER_BLOCK}

Quantization = PerTensorAffine | PerChannelAffine | PerBlockAffine


@dataclass(frozen=True, slots=True)
class Parameter:
    """One array of quantization parameters: `entries` values of `dtype`, `offset` bytes into buffer `buffer_index`."""

    buffer_index: int
    offset: int
    kind: Literal["scale", "zero_point"]
    dtype: np.dtype[np.generic]
    entries: int

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return self.entries * self.dtype.itemsize


_INT32: Final[np.dtype[np.generic]] = np.dtype("<i4")


def parameter_layout(
    scheme: Quantization, *, shape: Sequence[int], page_size: int, num_pages: int
) -> tuple[Parameter, ...]:
    """What the parameter buffers hold, scales first. Empty for per-tensor.

    Where both arrays name one buffer it holds them end to end, [scales | zero_points] (quantization.md § Buffer
    Table Placement Rules 3). The scheme's axis and scale_type_tag must be valid.
    """
    if isinstance(scheme, PerTensorAffine):
        return ()
    entries = shape[scheme.axis] if isinstance(scheme, PerChannelAffine) else num_pages * page_size
    scale_dtype = BY_TAG[scheme.scale_type_tag].numpy
    assert scale_dtype is not None
    scales = Parameter(scheme.scale_buffer_index, 0, "scale", scale_dtype, entries)
    if scheme.zero_point_buffer_index is None:
        return (scales,)
    offset = scales.size if scheme.zero_point_buffer_index == scheme.scale_buffer_index else 0
    return scales, Parameter(scheme.zero_point_buffer_index, offset, "zero_point", _INT32, entries)


def storage_range(type_tag: int) -> tuple[int, int]:
    """Smallest and largest value of an integer element type: the range of its zero points (Q11, V12)."""
    item = BY_TAG[type_tag]
    assert type_tag in _INTEGER_TAGS, f"{item.name} stores no quantized values"
    if item.name.startswith("u"):
        return 0, (1 << item.bits) - 1
    return -(1 << item.bits - 1), (1 << item.bits - 1) - 1


def read_scheme(payload: bytes | memoryview) -> tuple[Any, ...]:
    """The values of the scheme's table, as they are on the wire, or of its header alone where the scheme is not taken.

    Raises InvalidDescriptor (Q1) where quantization_length is too short for the scheme.
    """
    length = len(payload)
    if length < SCHEME_HEADER.size:
        raise broken("Q1", "quantization_length", length, f">= {SCHEME_HEADER.size}")
    table = SCHEME_TABLES.get(payload[0], SCHEME_HEADER)
    if length < table.size:
        raise broken("Q1", "quantization_length", length, f">= {table.size} for scheme {payload[0]:#04x}")
    return Cursor(payload, 0, length).read(table)


def scheme_from(values: tuple[Any, ...]) -> Quantization:
    """The scheme from the values of its table. Raises InvalidDescriptor or Unsupported (Q2-Q8, Q12, Q19, Q19C)."""
    scheme_tag, scheme_version, flags = values[:3]
    if scheme_tag not in SCHEME_TABLES:
        raise _refused_scheme(scheme_tag)
    if scheme_version > SCHEME_VERSION:
        raise not_taken("Q6", "quantization.scheme_version", scheme_version, f"{SCHEME_VERSION}")
    if scheme_version < SCHEME_VERSION:
        raise broken("Q7", "quantization.scheme_version", scheme_version, f"{SCHEME_VERSION}")
    if flags & ~(0 if scheme_tag == PerTensorAffine.scheme_tag else SYMMETRIC):
        raise broken("Q8", "quantization.flags", f"{flags:#06x}", "zero in reserved bits")
    if any(values[-1]):
        raise broken("Q12", "quantization._reserved", "not zero", "zero")
    if scheme_tag == PerTensorAffine.scheme_tag:
        return PerTensorAffine(values[3], values[4])
    zero_point_index = values[-3]
    if flags & SYMMETRIC:
        if zero_point_index != NO_BUFFER:
            rule = "Q19" if scheme_tag == PerChannelAffine.scheme_tag else "Q19C"
            field = "quantization.zero_point_buffer_index"
            raise broken(rule, field, zero_point_index, "0xFFFFFFFF under SYMMETRIC")
        zero_point_index = None
    if scheme_tag == PerChannelAffine.scheme_tag:
        return PerChannelAffine(values[3], values[4], zero_point_index, values[6])
    return PerBlockAffine(values[4], values[5], zero_point_index, values[7], values[3])


def _refused_scheme(scheme_tag: int) -> HurrayError:
    field, offered, taken = "quantization.scheme_tag", f"{scheme_tag:#04x}", "0x01, 0x02 and 0x03"
    if scheme_tag in (0x00, 0xFF):
        return broken("Q2", field, offered, "neither 0x00 nor 0xFF")
    if scheme_tag in PRIVATE:
        return not_taken("Q4", field, offered, taken)
    if scheme_tag in _UNCOMPOSED:
        return not_taken("Q5", field, f"{offered} ({_UNCOMPOSED[scheme_tag]})", taken)
    return not_taken("Q3", field, offered, taken)


def check_scheme(scheme: Quantization, *, type_tag: int, page_size: int) -> None:
    """Rules Q9-Q11, Q13-Q15, Q22-Q24 and Q26: the scheme beside its storage type and page_size, without its buffers.

    Raises InvalidDescriptor. Q25 (block_size <= shape[0]) is not applied: block-paged replaces the block geometry by
    page slots.
    """
    taken = _NARROW_TAGS if isinstance(scheme, PerBlockAffine) else _INTEGER_TAGS
    if type_tag not in taken:
        name = BY_TAG[type_tag].name if type_tag in BY_TAG else f"{type_tag:#04x}"
        raise broken("Q9", "type_tag", name, f"a storage type of {scheme.scheme}")
    if isinstance(scheme, PerTensorAffine):
        _check_per_tensor(scheme, type_tag)
    elif scheme.axis >= RANK:
        raise broken("Q13", "quantization.axis", scheme.axis, f"< rank, {RANK}")
    elif isinstance(scheme, PerChannelAffine):
        _check_per_channel(scheme)
    else:
        _check_per_block(scheme, page_size)


def check_parameters(
    scheme: Quantization,
    *,
    shape: Sequence[int],
    page_size: int,
    num_pages: int,
    buffers: Sequence[BufferHandle],
) -> None:
    """Rules Q16-Q18, Q20, Q21, Q27-Q29, Q31 and B3: the buffers of a scheme that `check_scheme` took.

    Raises InvalidDescriptor.
    """
    named: set[int | None] = set()
    if not isinstance(scheme, PerTensorAffine):
        _check_indices(scheme, len(buffers))
        layout = parameter_layout(scheme, shape=shape, page_size=page_size, num_pages=num_pages)
        _check_sizes(scheme, layout, buffers)
        named = {scheme.scale_buffer_index, scheme.zero_point_buffer_index}
    for index in range(FIRST_PARAMETER_BUFFER, len(buffers)):
        if index not in named:
            raise broken("B3", f"buffers[{index}]", "in no field of the scheme", "named by the scheme")


def _check_per_tensor(scheme: PerTensorAffine, type_tag: int) -> None:
    if scheme.scale == 0.0 or not math.isfinite(scheme.scale):
        raise broken("Q10", "quantization.scale", scheme.scale, "finite and not zero")
    low, high = storage_range(type_tag)
    if not low <= scheme.zero_point <= high:
        required = f"within [{low}, {high}] of {BY_TAG[type_tag].name}"
        raise broken("Q11", "quantization.zero_point", scheme.zero_point, required)


def _check_per_channel(scheme: PerChannelAffine) -> None:
    if scheme.axis == 0:
        raise broken("Q14", "quantization.axis", 0, "1 or 2")
    if scheme.scale_type_tag != FLOAT32_TAG:
        raise broken("Q15", "quantization.scale_type_tag", scheme.scale_type_tag, "3 (float32)")


def _check_per_block(scheme: PerBlockAffine, page_size: int) -> None:
    block_size = scheme.block_size
    if scheme.axis != 0:
        raise broken("Q22", "quantization.axis", scheme.axis, "0")
    if block_size != page_size:
        raise broken("Q23", "quantization.block_size", block_size, f"page_size, {page_size}")
    if block_size < 2 or block_size & (block_size - 1):
        raise broken("Q24", "quantization.block_size", block_size, "a power of two >= 2")
    if scheme.scale_type_tag not in _SCALE_TAGS:
        raise broken("Q26", "quantization.scale_type_tag", scheme.scale_type_tag, "1, 2 or 3")


def _check_indices(scheme: PerChannelAffine | PerBlockAffine, buffer_count: int) -> None:
    """Rules Q16-Q18 on both indices."""
    for name in ("scale_buffer_index", "zero_point_buffer_index"):
        index = getattr(scheme, name)
        if index is None:
            continue
        field = f"quantization.{name}"
        if index >= buffer_count:
            raise broken("Q16", field, index, f"< buffer_count, {buffer_count}")
        if index == 0:
            raise broken("Q17", field, 0, "not the page_pool")
        if index < FIRST_PARAMETER_BUFFER:
            raise broken("Q18", field, index, f">= {FIRST_PARAMETER_BUFFER}")


def _check_sizes(
    scheme: PerChannelAffine | PerBlockAffine, layout: tuple[Parameter, ...], buffers: Sequence[BufferHandle]
) -> None:
    """Rules Q20, Q21, Q27, Q28, and Q29, Q31 where one buffer holds both arrays. Exact arithmetic."""
    if len(layout) == 2 and layout[0].buffer_index == layout[1].buffer_index:
        index, size = layout[0].buffer_index, layout[0].size + layout[1].size
        offered = buffers[index].byte_size
        if offered != size:
            rule = "Q29" if offered < size else "Q31"
            raise broken(rule, f"buffers[{index}].byte_size", offered, f"{size}, scales then zero points")
        return
    for parameter in layout:
        index, size = parameter.buffer_index, parameter.size
        offered = buffers[index].byte_size
        if offered != size:
            rule = _SIZE_RULES[scheme.scheme_tag, parameter.kind]
            required = f"{size}, {parameter.entries} {parameter.kind}s of {parameter.dtype.itemsize} bytes"
            raise broken(rule, f"buffers[{index}].byte_size", offered, required)
