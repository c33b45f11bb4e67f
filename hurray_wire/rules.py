"""The rules of RULES.md on a whole descriptor: what its fields and its parts must satisfy together.

The parts' own rules are beside their codecs (sections.py, quantization.py); those that only bytes can break, beside
the reading of them (descriptor.py). A rule that makes a later one meaningless comes first, so that the rule
reported is always one that is broken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from .cursor import Table
from .dtypes import BY_TAG, TYPE_TAG_INVALID, TYPE_TAG_PRIVATE
from .errors import InvalidDescriptor
from .policy import Policy, broken, not_taken
from .quantization import SCHEME_TABLES, PerTensorAffine, check_parameters, check_scheme
from .sections import (
    BLOCK_TABLE,
    BUFFER_HANDLE,
    DYNAMIC,
    EXTENSION_TYPE,
    NO_LAYER,
    PAGE_POOL,
    RANGES,
    RANK,
    SEQ_PTR,
    STATISTICS,
    check_buffer,
    check_extension_type,
    check_statistics,
)

if TYPE_CHECKING:
    from .descriptor import Descriptor

MIN_BUFFERS: Final = 3
MAX_U32_PAGES: Final = 0xFFFFFFFF


def check_rules(descriptor: Descriptor, policy: Policy) -> Descriptor:
    """Apply every rule that a descriptor object can break, in exact arithmetic.

    Returns the descriptor, with dynamic dimensions replaced by the sizes that the policy resolves them to. Raises
    InvalidDescriptor or Unsupported.
    """
    _check_type(descriptor, policy)
    _check_layout(descriptor, policy)
    if DYNAMIC in descriptor.shape:
        descriptor = _resolved(descriptor, policy)
    _check_buffers(descriptor, policy)
    _check_geometry(descriptor)
    if descriptor.quantization is not None:
        check_scheme(descriptor.quantization, type_tag=descriptor.type_tag, page_size=descriptor.page_size)
        check_parameters(
            descriptor.quantization,
            shape=descriptor.shape,
            page_size=descriptor.page_size,
            num_pages=descriptor.num_pages,
            buffers=descriptor.buffers,
        )
    if descriptor.statistics is not None:
        check_statistics(descriptor.statistics)
    return descriptor


def _check_type(descriptor: Descriptor, policy: Policy) -> None:
    """Rules H9, H12, H13, E6 and those of the extension type."""
    type_tag, extension = descriptor.type_tag, descriptor.extension_type
    offered = f"{type_tag:#04x}"
    if type_tag in TYPE_TAG_INVALID:
        raise broken("H12", "type_tag", offered, "neither 0x00 nor 0xFF")
    private = type_tag in TYPE_TAG_PRIVATE
    if private != (extension is not None):
        required = "with an extension type section" if private else "F0-FE beside an extension type section"
        raise broken("H9", "type_tag", offered, required)
    if extension is None:
        if type_tag not in BY_TAG:
            raise not_taken("H13", "type_tag", offered, "a tag of the format's table")
        return
    if not policy.private_agreed:
        raise not_taken("E6", "type_tag", offered, "a tag of the format's table")
    check_extension_type(extension)


def _check_layout(descriptor: Descriptor, policy: Policy) -> None:
    """Rules O1, L1-L4 and L6."""
    if descriptor.byte_offset:
        raise broken("O1", "byte_offset", descriptor.byte_offset, "0")
    if descriptor.page_size < 1:
        raise broken("L1", "page_size", descriptor.page_size, ">= 1")
    if descriptor.paged_axis and not policy.permissive:
        raise broken("L2", "paged_axis", descriptor.paged_axis, "0")
    if descriptor.kv_role > 2:
        raise broken("L3", "kv_role", descriptor.kv_role, "0, 1 or 2")
    if descriptor.block_table_index_type > 1:
        raise broken("L4", "block_table_index_type", descriptor.block_table_index_type, "0 or 1")
    if descriptor.block_table_index_type == 0 and descriptor.num_pages > MAX_U32_PAGES:
        raise broken("L6", "num_pages", descriptor.num_pages, f"<= {MAX_U32_PAGES} under uint32 indices")


def _resolved(descriptor: Descriptor, policy: Policy) -> Descriptor:
    """The descriptor with its dynamic dimensions resolved. Rules S1 and Q30."""
    scheme = descriptor.quantization
    if scheme is not None and not isinstance(scheme, PerTensorAffine):
        axis = scheme.axis
        if axis < RANK and descriptor.shape[axis] == DYNAMIC:
            raise broken("Q30", f"shape[{axis}]", "dynamic", "static on the quantized axis")
    sizes = policy.resolved_shape or (None,) * RANK
    shape = []
    for axis, size in enumerate(descriptor.shape):
        resolved = sizes[axis] if size == DYNAMIC else size
        if resolved is None or not 0 <= resolved < DYNAMIC:
            raise broken("S1", f"shape[{axis}]", "dynamic", "static, or resolved by the caller")
        shape.append(resolved)
    return replace(descriptor, shape=(shape[0], shape[1], shape[2]))


def _check_buffers(descriptor: Descriptor, policy: Policy) -> None:
    """Rules B1, B2, D11, D12 and those of each handle."""
    buffers = descriptor.buffers
    if len(buffers) < MIN_BUFFERS:
        raise broken("B1", "buffer_count", len(buffers), f">= {MIN_BUFFERS}")
    if len(buffers) > MIN_BUFFERS and descriptor.quantization is None:
        raise broken("B2", "buffer_count", len(buffers), f"{MIN_BUFFERS} without quantization")
    for index, handle in enumerate(buffers):
        check_buffer(index, handle, policy)
    device_tag, memory_class = buffers[0].device_tag, buffers[0].memory_class
    for index, handle in enumerate(buffers):
        if handle.device_tag != device_tag:
            field, required = f"buffers[{index}].device_tag", f"{device_tag:#04x}, that of buffers[0]"
            raise broken("D11", field, f"{handle.device_tag:#04x}", required)
        if handle.memory_class != memory_class:
            field, required = f"buffers[{index}].memory_class", f"{memory_class:#04x}, that of buffers[0]"
            raise broken("D12", field, f"{handle.memory_class:#04x}", required)


def _check_geometry(descriptor: Descriptor) -> None:
    """Rules B4-B9. B10, more pages than the tokens need, is allowed: their slots are dead."""
    buffers, width = descriptor.buffers, descriptor.index_width_bytes
    table_bytes = buffers[BLOCK_TABLE].byte_size
    sizes = f"buffers[{PAGE_POOL}].byte_size", f"buffers[{BLOCK_TABLE}].byte_size", f"buffers[{SEQ_PTR}].byte_size"
    pool_bytes = descriptor.page_pool_bytes
    if buffers[PAGE_POOL].byte_size != pool_bytes:
        raise broken("B4", sizes[PAGE_POOL], buffers[PAGE_POOL].byte_size, f"{pool_bytes}")
    if table_bytes % width:
        raise broken("B5", sizes[BLOCK_TABLE], table_bytes, f"a multiple of {width}")
    if buffers[SEQ_PTR].byte_size != descriptor.seq_ptr_bytes:
        raise broken("B6", sizes[SEQ_PTR], buffers[SEQ_PTR].byte_size, f"{descriptor.seq_ptr_bytes}")
    slots = descriptor.total_logical_pages * descriptor.page_size
    if descriptor.shape[0] > slots:
        raise broken("B7", "shape[0]", descriptor.shape[0], f"<= {slots}, the slots of all logical pages")
    if table_bytes and not descriptor.num_seqs:
        raise broken("B8", sizes[BLOCK_TABLE], table_bytes, "0 without sequences")
    if table_bytes and not descriptor.num_pages:
        raise broken("B9", sizes[BLOCK_TABLE], table_bytes, "0 without pages")


def check_widths(descriptor: Descriptor) -> None:
    """Every integer fits its field on the wire: bytes cannot break this, an object can.

    Raises InvalidDescriptor, with a rule only for a shape that is not of rank 3.
    """
    if len(descriptor.shape) != RANK:
        raise broken("H15", "rank", len(descriptor.shape), f"{RANK}")
    byte, word, double = RANGES["B"], RANGES["I"], RANGES["Q"]
    widths: list[tuple[str, object, range]] = [
        ("type_tag", descriptor.type_tag, byte),
        *((f"shape[{axis}]", size, double) for axis, size in enumerate(descriptor.shape)),
        ("byte_offset", descriptor.byte_offset, double),
        ("page_size", descriptor.page_size, word),
        ("num_pages", descriptor.num_pages, double),
        ("paged_axis", descriptor.paged_axis, word),
        ("num_seqs", descriptor.num_seqs, word),
        ("kv_role", descriptor.kv_role, byte),
        ("layer_index", descriptor.layer_index, range(NO_LAYER)),
        ("block_table_index_type", descriptor.block_table_index_type, byte),
        ("buffer_count", len(descriptor.buffers), byte),
    ]
    for index, handle in enumerate(descriptor.buffers):
        widths += _widths(f"buffers[{index}].", handle, BUFFER_HANDLE)
    if descriptor.quantization is not None:
        table = SCHEME_TABLES[descriptor.quantization.scheme_tag]
        widths += _widths("quantization.", descriptor.quantization, table)
    if descriptor.statistics is not None:
        widths += _widths("statistics.", descriptor.statistics, STATISTICS)
    if descriptor.extension_type is not None:
        widths += _widths("extension_type.", descriptor.extension_type, EXTENSION_TYPE)
    optional = ("layer_index", "quantization.zero_point_buffer_index")
    for field, value, values in widths:
        if value is None and field in optional:
            continue
        if not isinstance(value, int) or value not in values:
            required = f"an integer from {values.start} to {values.stop - 1}"
            message = f"{field} is {value}, must be {required}"
            raise InvalidDescriptor(message, field=field, offered=value, required=required)


def _widths(prefix: str, part: object, table: Table) -> list[tuple[str, object, range]]:
    return [
        (prefix + field.name, getattr(part, field.name), RANGES[field.code])
        for field in table.fields
        if field.code in RANGES and hasattr(part, field.name)
    ]
