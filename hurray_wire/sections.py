"""The fixed-size records of a descriptor: offset tables, and the rules of handles, statistics and extension types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from .cursor import Table
from .dtypes import ElementType
from .policy import Policy, broken, not_taken

MAGIC: Final = b"HRRY"
VERSION_MAJOR, VERSION_MINOR = 1, 0
BLOCK_PAGED: Final = 0x0A
RANK: Final = 3
MAX_RANK: Final = 64
NO_LAYER: Final = 0xFFFFFFFF
"""layer_index on the wire where there is none."""

KEY, VALUE, FUSED = 0, 1, 2
KV_ROLE_NAMES: Final = ("key", "value", "fused")

PAGE_POOL, BLOCK_TABLE, SEQ_PTR = 0, 1, 2
"""Buffer indices."""

HAS_QUANTIZATION, HAS_SHARD, HAS_EXTENSION_TYPE, HAS_STATISTICS, HAS_COMPOSITE_MEMBER = 1, 2, 4, 8, 16
KNOWN_FLAGS: Final = 0x1F

HEADER: Final = Table(
    "fixed header",
    ("magic", "4s"),
    ("version_major", "B"),
    ("version_minor", "B"),
    ("descriptor_length", "I"),
    ("flags", "I"),
    ("type_tag", "B"),
    ("layout_tag", "B"),
    ("rank", "I"),
)
"""Fixed header (OFFSETS.md, 0-19). Little-endian, packed, 20 bytes.

Offset Size Type  Field                   Rule
 0     4    bytes magic                   "HRRY" (H1)
 4     1    u8    version_major           1 (H2, H3)
 5     1    u8    version_minor           0; greater: unknown bytes may follow the sections
 6     4    u32   descriptor_length       >= 20 (H4), no more than supplied (H5), the sum at minor 0 (H7)
10     4    u32   flags                   bits 0, 2, 3; bit 1 (H10), bit 4 (H11), bits 5-31 (H8) zero
14     1    u8    type_tag                an element type (H12, H13), private with flag 2 (H9, E6)
15     1    u8    layout_tag              0x0A (H14)
16     4    u32   rank                    3 (H15, H16)
"""

SHAPE: Final = Table("shape", ("shape[0]", "Q"), ("shape[1]", "Q"), ("shape[2]", "Q"), ("byte_offset", "Q"))
"""Shape and byte_offset (OFFSETS.md, 20-51). Little-endian, packed, 32 bytes.

Offset Size Type  Field                   Rule
 0     8    u64   shape[0]                total_tokens; 2^64-1 = dynamic (S1)
 8     8    u64   shape[1]                num_heads
16     8    u64   shape[2]                head_dim
24     8    u64   byte_offset             0 (O1)
"""

LAYOUT: Final = Table(
    "block-paged layout",
    ("page_size", "I"),
    ("num_pages", "Q"),
    ("paged_axis", "I"),
    ("num_seqs", "I"),
    ("kv_role", "B"),
    ("layer_index", "I"),
    ("block_table_index_type", "B"),
    ("_reserved", "6s"),
)
"""Block-paged layout fields (OFFSETS.md, 52-83). Little-endian, packed, 32 bytes.

Offset Size Type  Field                   Rule
 0     4    u32   page_size               >= 1 (L1)
 4     8    u64   num_pages               <= 0xFFFFFFFF under u32 indices (L6)
12     4    u32   paged_axis              0 (L2)
16     4    u32   num_seqs
20     1    u8    kv_role                 0 key, 1 value, 2 fused (L3)
21     4    u32   layer_index             0xFFFFFFFF = none
25     1    u8    block_table_index_type  0 u32, 1 u64 (L4)
26     6    bytes _reserved               zero (L5)
"""

BUFFER_COUNT: Final = Table("buffer_count", ("buffer_count", "B"))
QUANTIZATION_LENGTH: Final = Table("quantization_length", ("quantization_length", "I"))

DEVICE_NAMES: Final = (
    "cpu",
    "cuda",
    "rocm",
    "metal",
    "vulkan",
    "webgpu",
    "hexagon",
    "level_zero",
    "opencl",
)
"""Name of device_tag i, 0x00 to 0x08."""

SYNC_MODE_NAMES: Final = ("producer_synced", "event", "consumer_stream")
MEMORY_CLASS_NAMES: Final = ("standard", "host_pinned", "unified", "peer")

CPU: Final = 0x00
WEBGPU: Final = 0x05
STANDARD, PEER = 0x00, 0x03
PRIVATE: Final = range(0xF0, 0xFF)
"""Private tags of devices, memory classes, element types and schemes."""

DYNAMIC: Final = (1 << 64) - 1
"""Size of a dimension that the descriptor leaves open (rule S1)."""

MIN_ALIGNMENT: Final = 64
ACCELERATOR_ALIGNMENT: Final = 4096

_PEER_DEVICES: Final = frozenset({0x01, 0x02, 0x04, 0x07})

RANGES: Final = {
    "B": range(1 << 8),
    "H": range(1 << 16),
    "I": range(1 << 32),
    "Q": range(1 << 64),
    "i": range(-(1 << 31), 1 << 31),
}
"""Values of each integer format character of the tables."""


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """Buffer handle (OFFSETS.md, 85 + 16i; buffer-protocol.md). Little-endian, packed, 16 bytes.

    Offset Size Type  Field                   Rule
     0     8    u64   byte_size               0 = empty
     8     4    u32   alignment               power of two (A1); >= 64 unless empty (A2)
    12     1    u8    device_tag              0x00-0x08, F0-FE private (D1-D3)
    13     1    u8    sync_mode               0, 1 or 2 (D4); 0 on cpu (D5) and across machines (D6)
    14     1    u8    memory_class            0x00-0x03, F0-FE private (D7-D9)
    15     1    u8    _reserved               zero (D10)
    """

    byte_size: int
    alignment: int
    device_tag: int = CPU
    sync_mode: int = 0
    memory_class: int = STANDARD

    def pack(self) -> bytes:
        """The 16 bytes of the handle."""
        return BUFFER_HANDLE.struct.pack(
            self.byte_size, self.alignment, self.device_tag, self.sync_mode, self.memory_class, 0
        )


BUFFER_HANDLE: Final = Table(
    "buffers",
    ("byte_size", "Q"),
    ("alignment", "I"),
    ("device_tag", "B"),
    ("sync_mode", "B"),
    ("memory_class", "B"),
    ("_reserved", "B"),
)


def check_buffer(index: int, handle: BufferHandle, policy: Policy) -> None:
    """Rules A1-A3 and D1-D9 on one handle. Raises InvalidDescriptor or Unsupported naming `buffers[index]`."""
    where = f"buffers[{index}]"
    alignment = handle.alignment
    if alignment <= 0 or alignment & (alignment - 1):
        raise broken("A1", f"{where}.alignment", alignment, "a power of two")
    if handle.byte_size:
        if alignment < MIN_ALIGNMENT:
            raise broken("A2", f"{where}.alignment", alignment, f">= {MIN_ALIGNMENT}")
        if (
            alignment < ACCELERATOR_ALIGNMENT
            and CPU < handle.device_tag < len(DEVICE_NAMES)
            and not policy.allow_unaligned_gpu
        ):
            raise broken("A3", f"{where}.alignment", alignment, f">= {ACCELERATOR_ALIGNMENT} off the cpu")
    _check_device(where, handle.device_tag, handle.memory_class, policy)
    sync_mode = handle.sync_mode
    if sync_mode:
        if sync_mode >= len(SYNC_MODE_NAMES):
            raise broken("D4", f"{where}.sync_mode", sync_mode, "0, 1 or 2")
        if handle.device_tag == CPU:
            raise broken("D5", f"{where}.sync_mode", sync_mode, "0 on cpu")
        if policy.cross_machine:
            raise broken("D6", f"{where}.sync_mode", sync_mode, "0 across machines")


def _check_device(where: str, device_tag: int, memory_class: int, policy: Policy) -> None:
    """Rules D1-D3 and D7-D9 on one (device_tag, memory_class) pair."""
    private_device = device_tag in PRIVATE
    if device_tag == 0xFF:
        raise broken("D1", f"{where}.device_tag", "0xFF", "0x00-0x08 or F0-FE")
    if device_tag >= len(DEVICE_NAMES) and not private_device:
        raise broken("D2", f"{where}.device_tag", f"{device_tag:#04x}", "0x00-0x08 or F0-FE")
    if private_device and not policy.private_agreed:
        raise not_taken("D3", f"{where}.device_tag", f"{device_tag:#04x}", "0x00-0x08")
    if memory_class == STANDARD:
        return
    field, offered = f"{where}.memory_class", f"{memory_class:#04x}"
    if memory_class in PRIVATE:
        if not private_device:
            raise broken("D8", field, offered, "0x00-0x03 on a device that is not private")
        return
    if memory_class >= len(MEMORY_CLASS_NAMES):
        raise broken("D7", field, offered, "0x00-0x03 or F0-FE")
    if private_device:
        raise broken("D9", field, offered, "0x00 or F0-FE on a private device")
    if device_tag == WEBGPU or (memory_class == PEER and device_tag not in _PEER_DEVICES):
        raise broken("D9", field, offered, f"one that {DEVICE_NAMES[device_tag]} has")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics section (OFFSETS.md; metadata.md). Little-endian, packed, 72 bytes. Advisory.

    A field counts only if its bit of computed_mask is set; the others are carried as they are.

    Offset Size Type  Field                   Rule
     0     4    u32   computed_mask           bits 0-5 (T1)
     4     4    u32   _reserved               zero (T2)
     8     8    u64   nnz                     bit 0
    16     8    f64   sparsity_ratio          bit 1; within [0, 1] (T6)
    24     8    f64   value_min               bit 2
    32     8    f64   value_max               bit 2
    40     8    f64   value_abs_max           bit 2
    48     8    f64   value_mean              bit 3
    56     8    f64   value_stddev            bit 3; >= 0 (T4)
    64     1    u8    nm_n                    bit 4; <= nm_m (T3)
    65     1    u8    nm_m                    bit 4
    66     1    u8    has_nan                 bit 5; 0 or 1 (T5)
    67     1    u8    has_inf                 bit 5; 0 or 1 (T5)
    68     4    bytes _reserved2              zero (T2)
    """

    computed_mask: int = 0
    nnz: int = 0
    sparsity_ratio: float = 0.0
    value_min: float = 0.0
    value_max: float = 0.0
    value_abs_max: float = 0.0
    value_mean: float = 0.0
    value_stddev: float = 0.0
    nm_n: int = 0
    nm_m: int = 0
    has_nan: int = 0
    has_inf: int = 0

    def pack(self) -> bytes:
        """The 72 bytes of the section."""
        return STATISTICS.struct.pack(
            self.computed_mask,
            0,
            self.nnz,
            self.sparsity_ratio,
            self.value_min,
            self.value_max,
            self.value_abs_max,
            self.value_mean,
            self.value_stddev,
            self.nm_n,
            self.nm_m,
            self.has_nan,
            self.has_inf,
            bytes(4),
        )


STATISTICS: Final = Table(
    "statistics",
    ("computed_mask", "I"),
    ("_reserved", "I"),
    ("nnz", "Q"),
    ("sparsity_ratio", "d"),
    ("value_min", "d"),
    ("value_max", "d"),
    ("value_abs_max", "d"),
    ("value_mean", "d"),
    ("value_stddev", "d"),
    ("nm_n", "B"),
    ("nm_m", "B"),
    ("has_nan", "B"),
    ("has_inf", "B"),
    ("_reserved2", "4s"),
)
SPARSITY_VALID, VALUE_STATS_VALID, NM_SPARSITY_VALID, NAN_INF_VALID = 1 << 1, 1 << 3, 1 << 4, 1 << 5
_MASK_BITS: Final = 0x3F


def statistics_from(values: tuple[Any, ...]) -> Statistics:
    """The section from the values of its table. Raises InvalidDescriptor (T2)."""
    if values[1] or any(values[13]):
        name = "_reserved" if values[1] else "_reserved2"
        raise broken("T2", f"statistics.{name}", "not zero", "zero")
    return Statistics(values[0], *values[2:13])


def check_statistics(statistics: Statistics) -> None:
    """Rules T1 and T3-T6. Raises InvalidDescriptor."""
    mask = statistics.computed_mask
    if mask & ~_MASK_BITS:
        raise broken("T1", "statistics.computed_mask", f"{mask:#x}", "zero in bits 6-31")
    # Written so that a NaN fails.
    if mask & SPARSITY_VALID and not 0.0 <= statistics.sparsity_ratio <= 1.0:
        raise broken("T6", "statistics.sparsity_ratio", statistics.sparsity_ratio, "within [0, 1]")
    if mask & VALUE_STATS_VALID and not statistics.value_stddev >= 0.0:
        raise broken("T4", "statistics.value_stddev", statistics.value_stddev, ">= 0")
    if mask & NM_SPARSITY_VALID and statistics.nm_n > statistics.nm_m:
        raise broken("T3", "statistics.nm_n", statistics.nm_n, f"<= nm_m, {statistics.nm_m}")
    if mask & NAN_INF_VALID:
        for name, value in (("has_nan", statistics.has_nan), ("has_inf", statistics.has_inf)):
            if value > 1:
                raise broken("T5", f"statistics.{name}", value, "0 or 1")


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """Extension type section (OFFSETS.md; metadata.md). Little-endian, packed, 20 bytes.

    What a private element type is made of; sizes need bit_width alone.

    Offset Size Type  Field                   Rule
     0     4    u32   bit_width               > 0 (E1); 1, 2, 4 (E2) or a multiple of 8 (E5)
     4     1    u8    packing_factor          8 / bit_width below 8 bits, else 1 (E2)
     5     1    u8    is_float                0 or 1
     6     1    u8    is_signed               0 or 1; 0 on floats (E4)
     7     1    u8    sign_bits               0 or 1; 0 on integers (E4)
     8     1    u8    exponent_bits           0 on integers (E4)
     9     1    u8    mantissa_bits           0 on integers (E4)
    10     2    bytes _reserved               zero (E3)
    12     4    u32   exponent_bias           0 on integers (E4)
    16     1    u8    has_nan                 0 or 1; 0 on integers (E4)
    17     1    u8    has_inf                 0 or 1; 0 on integers (E4)
    18     2    bytes _reserved2              zero (E3)
    """

    bit_width: int
    packing_factor: int = 1
    is_float: int = 0
    is_signed: int = 0
    sign_bits: int = 0
    exponent_bits: int = 0
    mantissa_bits: int = 0
    exponent_bias: int = 0
    has_nan: int = 0
    has_inf: int = 0

    def element_type(self, tag: int) -> ElementType:
        """The element type that this section and a private `tag` make together. NumPy has no dtype for it."""
        return ElementType(tag, f"private_{tag:02x}", self.bit_width, None)

    def pack(self) -> bytes:
        """The 20 bytes of the section."""
        return EXTENSION_TYPE.struct.pack(
            self.bit_width,
            self.packing_factor,
            self.is_float,
            self.is_signed,
            self.sign_bits,
            self.exponent_bits,
            self.mantissa_bits,
            bytes(2),
            self.exponent_bias,
            self.has_nan,
            self.has_inf,
            bytes(2),
        )


EXTENSION_TYPE: Final = Table(
    "extension_type",
    ("bit_width", "I"),
    ("packing_factor", "B"),
    ("is_float", "B"),
    ("is_signed", "B"),
    ("sign_bits", "B"),
    ("exponent_bits", "B"),
    ("mantissa_bits", "B"),
    ("_reserved", "2s"),
    ("exponent_bias", "I"),
    ("has_nan", "B"),
    ("has_inf", "B"),
    ("_reserved2", "2s"),
)


def extension_type_from(values: tuple[Any, ...]) -> ExtensionType:
    """The section from the values of its table. Raises InvalidDescriptor (E3)."""
    if any(values[7]) or any(values[11]):
        name = "_reserved" if any(values[7]) else "_reserved2"
        raise broken("E3", f"extension_type.{name}", "not zero", "zero")
    return ExtensionType(*values[:7], *values[8:11])


def check_extension_type(extension: ExtensionType) -> None:
    """Rules E1, E2, E4 and E5. Raises InvalidDescriptor.

    A flag byte above 1 breaks E4: it leaves open which of the two groups of fields must be zero.
    """
    bits = extension.bit_width
    if bits < 1:
        raise broken("E1", "extension_type.bit_width", bits, "> 0")
    if bits < 8 and bits not in (1, 2, 4):
        raise broken("E2", "extension_type.bit_width", bits, "1, 2, 4 or >= 8")
    factor = 8 // bits if bits < 8 else 1
    if extension.packing_factor != factor:
        raise broken("E2", "extension_type.packing_factor", extension.packing_factor, f"{factor} at {bits} bits")
    if bits > 8 and bits % 8:
        raise broken("E5", "extension_type.bit_width", bits, "a multiple of 8 above 8")
    for name in ("is_float", "is_signed", "sign_bits", "has_nan", "has_inf"):
        if (value := getattr(extension, name)) > 1:
            raise broken("E4", f"extension_type.{name}", value, "0 or 1")
    if extension.is_float:
        if extension.is_signed:
            raise broken("E4", "extension_type.is_signed", extension.is_signed, "0 on a float")
        return
    for name in ("sign_bits", "exponent_bits", "mantissa_bits", "exponent_bias", "has_nan", "has_inf"):
        if value := getattr(extension, name):
            raise broken("E4", f"extension_type.{name}", value, "0 on an integer")
