"""Block-paged tensor descriptors: bytes from an untrusted peer to a frozen `Descriptor`, and back.

Every rule of RULES.md that a descriptor alone can break is checked here or in the modules of its parts, once: decoding,
encoding and `check_descriptor` run the same code. Reading has two phases. The first splits the bytes by the offset
tables and fails only where they do not fit (H1-H6, Q1); the second applies the rules. All sizes are exact
integers, and nothing is allocated in proportion to a declared one.

Order of sections: fixed header, shape and byte_offset, block-paged layout, buffer table, then, each behind its flag,
quantization, statistics, extension type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from .cursor import Cursor
from .dtypes import BY_TAG, TYPE_TAG_PRIVATE, ElementType
from .errors import LimitExceeded
from .limits import PAGE_BYTES
from .policy import STRICT, Policy, broken, not_taken
from .quantization import (
    Parameter,
    Quantization,
    check_scheme,
    parameter_layout,
    read_scheme,
    scheme_from,
)
from .rules import check_rules, check_widths
from .sections import (
    BLOCK_PAGED,
    BLOCK_TABLE,
    BUFFER_COUNT,
    BUFFER_HANDLE,
    EXTENSION_TYPE,
    HAS_COMPOSITE_MEMBER,
    HAS_EXTENSION_TYPE,
    HAS_QUANTIZATION,
    HAS_SHARD,
    HAS_STATISTICS,
    HEADER,
    KNOWN_FLAGS,
    KV_ROLE_NAMES,
    LAYOUT,
    MAGIC,
    MAX_RANK,
    NO_LAYER,
    PAGE_POOL,
    QUANTIZATION_LENGTH,
    RANK,
    SEQ_PTR,
    SHAPE,
    STATISTICS,
    VERSION_MAJOR,
    VERSION_MINOR,
    BufferHandle,
    ExtensionType,
    Statistics,
    extension_type_from,
    statistics_from,
)

_INDEX_DTYPES: Final = (np.dtype("<u4"), np.dtype("<u8"))


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What one tensor of a snapshot declares about itself: the paged cache of one (kv_role, layer_index).

    `shape` is (total_tokens, num_heads, head_dim). `buffers` are page_pool, block_table, seq_ptr, then quantization
    parameters. `byte_offset` and `paged_axis` are 0 in every descriptor that the rules accept. The last three fields
    say what a decoder saw that an encoder does not write again: the minor version, unknown bytes inside
    descriptor_length, and padding after the scheme.

    An object may break rules until `check_descriptor` or `encode` sees it: `dataclasses.replace` works in steps.

    What follows from the geometry is worked out once, when it is first asked for. None of it may depend on kv_role or
    layer_index: tensors that differ in these alone share it (`alike`).
    """

    type_tag: int
    shape: tuple[int, int, int]
    page_size: int
    num_pages: int
    num_seqs: int
    kv_role: int
    layer_index: int | None
    block_table_index_type: int
    buffers: tuple[BufferHandle, ...]
    quantization: Quantization | None = None
    statistics: Statistics | None = None
    extension_type: ExtensionType | None = None
    byte_offset: int = 0
    paged_axis: int = 0
    version_minor: int = VERSION_MINOR
    trailing_bytes: int = 0
    quantization_padding_bytes: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of all sequences together: shape[0]."""
        return self.shape[0]

    @property
    def num_heads(self) -> int:
        """shape[1]."""
        return self.shape[1]

    @property
    def head_dim(self) -> int:
        """shape[2]."""
        return self.shape[2]

    @property
    def kv_role_name(self) -> str:
        """ "key", "value" or "fused"."""
        return KV_ROLE_NAMES[self.kv_role]

    @property
    def flags(self) -> int:
        """The header's flags: which optional sections are present."""
        return (
            (HAS_QUANTIZATION if self.quantization is not None else 0)
            | (HAS_EXTENSION_TYPE if self.extension_type is not None else 0)
            | (HAS_STATISTICS if self.statistics is not None else 0)
        )

    @property
    def device_tag(self) -> int:
        """Device of all buffers."""
        return self.buffers[PAGE_POOL].device_tag

    @property
    def memory_class(self) -> int:
        """Memory class of all buffers."""
        return self.buffers[PAGE_POOL].memory_class

    @cached_property
    def element_type(self) -> ElementType:
        """Storage type of page_pool. A private tag's comes from its extension section. Raises Unsupported (H13)."""
        item = BY_TAG.get(self.type_tag)
        if item is not None:
            return item
        if self.extension_type is not None and self.type_tag in TYPE_TAG_PRIVATE:
            return self.extension_type.element_type(self.type_tag)
        raise not_taken("H13", "type_tag", f"{self.type_tag:#04x}", "a tag of the format's table")

    @property
    def index_width_bytes(self) -> int:
        """Bytes of one entry of block_table and seq_ptr: 4 or 8."""
        return 8 if self.block_table_index_type else 4

    @property
    def index_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Dtype of block_table and seq_ptr: little-endian uint32 or uint64."""
        return _INDEX_DTYPES[self.block_table_index_type]

    @cached_property
    def total_logical_pages(self) -> int:
        """Entries of block_table."""
        return self.buffers[BLOCK_TABLE].byte_size // self.index_width_bytes

    @property
    def seq_ptr_bytes(self) -> int:
        """Bytes of seq_ptr: num_seqs + 1 entries."""
        return (self.num_seqs + 1) * self.index_width_bytes

    @property
    def element_count(self) -> int:
        """Elements of the logical tensor: the product of shape."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    @cached_property
    def page_elements(self) -> int:
        """Elements of one page: page_size * num_heads * head_dim."""
        return self.page_size * self.shape[1] * self.shape[2]

    @cached_property
    def page_pool_bytes(self) -> int:
        """Bytes of page_pool, packed."""
        return self.element_type.packed_bytes(self.num_pages * self.page_elements)

    @cached_property
    def page_bytes(self) -> int | None:
        """Bytes of one page, or None where pages do not start at whole bytes (6-bit types: at whole groups of 3)."""
        item = self.element_type
        bits = self.page_elements * item.bits
        return None if bits % (24 if item.bits == 6 else 8) else bits // 8

    @cached_property
    def own_buffers(self) -> tuple[tuple[int, int, int | None], ...]:
        """Number and bytes of each buffer that is this tensor's alone, and the bytes of the units that it consists of:
        page_pool of its pages, None where there are none that are whole bytes; parameters of no units."""
        sizes = [handle.byte_size for handle in self.buffers]
        parameters = [(number, nbytes, None) for number, nbytes in enumerate(sizes[SEQ_PTR + 1 :], SEQ_PTR + 1)]
        return ((PAGE_POOL, sizes[PAGE_POOL], self.page_bytes), *parameters)

    @property
    def scale_entries(self) -> int | None:
        """Entries of the scale array, or None where there is none (not quantized, or per-tensor)."""
        layout = self.parameter_layout()
        return layout[0].entries if layout else None

    def parameter_layout(self) -> tuple[Parameter, ...]:
        """What buffers 3 and up hold: the scales, then the zero points; empty without either. Offsets in bytes."""
        if self.quantization is None:
            return ()
        return parameter_layout(self.quantization, shape=self.shape, page_size=self.page_size, num_pages=self.num_pages)

    def encode(self, policy: Policy = STRICT) -> bytes:
        """The canonical bytes: version 1.0, no padding, nothing behind the sections.

        The inverse of `decode_descriptor` on canonical input. Raises what `check_descriptor` raises.
        """
        check_descriptor(self, policy)
        return self.pack()

    def pack(self) -> bytes:
        """`encode` for a descriptor that was checked, or decoded."""
        parts = [
            SHAPE.struct.pack(*self.shape, self.byte_offset),
            LAYOUT.struct.pack(
                self.page_size,
                self.num_pages,
                self.paged_axis,
                self.num_seqs,
                self.kv_role,
                NO_LAYER if self.layer_index is None else self.layer_index,
                self.block_table_index_type,
                bytes(6),
            ),
            BUFFER_COUNT.struct.pack(len(self.buffers)),
        ]
        parts += [handle.pack() for handle in self.buffers]
        if self.quantization is not None:
            payload = self.quantization.pack()
            parts += [QUANTIZATION_LENGTH.struct.pack(len(payload)), payload]
        if self.statistics is not None:
            parts.append(self.statistics.pack())
        if self.extension_type is not None:
            parts.append(self.extension_type.pack())
        body = b"".join(parts)
        length = HEADER.size + len(body)
        return (
            HEADER.struct.pack(
                MAGIC, VERSION_MAJOR, VERSION_MINOR, length, self.flags, self.type_tag, BLOCK_PAGED, RANK
            )
            + body
        )


def decode_descriptor(data: bytes | bytearray | memoryview, policy: Policy = STRICT) -> tuple[Descriptor, int]:
    """Decode the descriptor that `data` begins with. Bytes after it are left alone.

    Returns the descriptor, dynamic dimensions replaced by what the policy resolves them to, and the bytes it takes,
    descriptor_length. Raises InvalidDescriptor, or Unsupported for what means something that this reader does not take,
    both with rule, field, offered and required; LimitExceeded where it is longer than the policy's
    max_descriptor_bytes. Nothing else, whatever the bytes.
    """
    view = data if isinstance(data, bytes) else memoryview(data).cast("B")
    header = _read_header(view)
    _, _, version_minor, length, flags, type_tag, _, _ = header
    if length > policy.limits.max_descriptor_bytes:
        raise LimitExceeded(
            "the descriptor is too long",
            field="descriptor_length",
            offered=length,
            required=f"<= {policy.limits.max_descriptor_bytes}",
        )
    cursor = Cursor(view, HEADER.size, length)
    shape = cursor.read(SHAPE)
    layout = cursor.read(LAYOUT)
    (buffer_count,) = cursor.read(BUFFER_COUNT)
    handles = cursor.read_each(BUFFER_HANDLE, buffer_count)
    scheme = None
    padding = 0
    if flags & HAS_QUANTIZATION:
        (scheme_length,) = cursor.read(QUANTIZATION_LENGTH)
        scheme = read_scheme(cursor.take(scheme_length, "quantization"))
    statistics = cursor.read(STATISTICS) if flags & HAS_STATISTICS else None
    extension = cursor.read(EXTENSION_TYPE) if flags & HAS_EXTENSION_TYPE else None
    trailing = length - cursor.position
    if trailing and version_minor == VERSION_MINOR:
        raise broken("H7", "descriptor_length", length, f"{cursor.position}, the sum of the sections")

    if any(layout[7]):
        raise broken("L5", "_reserved", "not zero", "zero")
    for index, handle in enumerate(handles):
        if handle[5]:
            raise broken("D10", f"buffers[{index}]._reserved", handle[5], "zero")
    quantization = None
    if scheme is not None:
        quantization = scheme_from(scheme)
        padding = scheme_length - len(quantization.pack())
    page_size, num_pages, paged_axis, num_seqs, kv_role, layer_index, index_type, _ = layout
    descriptor = Descriptor(
        type_tag=type_tag,
        shape=shape[:3],
        page_size=page_size,
        num_pages=num_pages,
        num_seqs=num_seqs,
        kv_role=kv_role,
        layer_index=None if layer_index == NO_LAYER else layer_index,
        block_table_index_type=index_type,
        buffers=tuple([BufferHandle(*handle[:5]) for handle in handles]),
        quantization=quantization,
        statistics=None if statistics is None else statistics_from(statistics),
        extension_type=None if extension is None else extension_type_from(extension),
        byte_offset=shape[3],
        paged_axis=paged_axis,
        version_minor=version_minor,
        trailing_bytes=trailing,
        quantization_padding_bytes=padding,
    )
    return check_rules(descriptor, policy), length


def _read_header(data: bytes | memoryview) -> tuple[Any, ...]:
    """The values of the fixed header. Rules H1-H5, H8, H10, H11 and H14-H16: past them the sections can be found."""
    supplied = len(data)
    if supplied >= 4 and data[:4] != MAGIC:
        raise broken("H1", "magic", bytes(data[:4]).hex(), MAGIC.hex())
    if supplied < 10:
        raise broken("H5", "descriptor_length", "not there", f"within the {supplied} bytes supplied")
    version_major = data[4]
    length = int.from_bytes(data[6:10], "little")
    if version_major > VERSION_MAJOR:
        raise not_taken("H2", "version_major", version_major, f"{VERSION_MAJOR}")
    if version_major < VERSION_MAJOR:
        raise broken("H3", "version_major", version_major, f"{VERSION_MAJOR}")
    if length < HEADER.size:
        raise broken("H4", "descriptor_length", length, f">= {HEADER.size}")
    if length > supplied:
        raise broken("H5", "descriptor_length", length, f"<= {supplied}, the bytes supplied")
    header = HEADER.struct.unpack_from(data)
    _, _, _, _, flags, _, layout_tag, rank = header
    if flags & ~KNOWN_FLAGS:
        raise broken("H8", "flags", f"{flags:#x}", "zero in bits 5-31")
    if flags & HAS_SHARD:
        raise broken("H10", "flags", f"{flags:#x}", "without a shard section")
    if flags & HAS_COMPOSITE_MEMBER:
        raise broken("H11", "flags", f"{flags:#x}", "without a composite-member section")
    if layout_tag != BLOCK_PAGED:
        refusal = broken if layout_tag in (0x00, 0xFF) else not_taken
        raise refusal("H14", "layout_tag", f"{layout_tag:#04x}", f"{BLOCK_PAGED:#04x}")
    if rank > MAX_RANK:
        raise broken("H16", "rank", rank, f"<= {MAX_RANK}")
    if rank != RANK:
        raise broken("H15", "rank", rank, f"{RANK}")
    return header


def check_descriptor(descriptor: Descriptor, policy: Policy = STRICT) -> None:
    """Check a descriptor object against every rule that `decode_descriptor` checks on bytes.

    Raises what decoding raises; a field that its width on the wire cannot hold is InvalidDescriptor without a rule.
    """
    check_widths(descriptor)
    check_rules(descriptor, policy)


def build_descriptor(
    *,
    element_type: ElementType,
    page_size: int,
    num_pages: int,
    num_heads: int,
    head_dim: int,
    total_tokens: int,
    num_seqs: int,
    total_logical_pages: int,
    kv_role: int,
    layer_index: int | None = None,
    block_table_index_type: int = 0,
    quantization: Quantization | None = None,
    statistics: Statistics | None = None,
    extension_type: ExtensionType | None = None,
    device_tag: int = 0,
    memory_class: int = 0,
    alignment: int = PAGE_BYTES,
    policy: Policy = STRICT,
) -> Descriptor:
    """A checked descriptor whose buffer sizes follow from its geometry.

    `quantization` names its parameter buffers itself, 3 and 4 or both 3, and they are sized for it. `alignment` is
    declared for every buffer. Raises what `check_descriptor` raises.
    """
    width = 8 if block_table_index_type else 4
    sizes = [
        element_type.packed_bytes(num_pages * page_size * num_heads * head_dim),
        total_logical_pages * width,
        (num_seqs + 1) * width,
    ]
    shape = (total_tokens, num_heads, head_dim)
    draft = Descriptor(
        type_tag=element_type.tag,
        shape=shape,
        page_size=page_size,
        num_pages=num_pages,
        num_seqs=num_seqs,
        kv_role=kv_role,
        layer_index=layer_index,
        block_table_index_type=block_table_index_type,
        buffers=(),
        quantization=quantization,
        statistics=statistics,
        extension_type=extension_type,
    )
    if quantization is not None:
        check_scheme(quantization, type_tag=element_type.tag, page_size=page_size)
        parameters: dict[int, int] = {}
        for parameter in draft.parameter_layout():
            index = parameter.buffer_index
            parameters[index] = parameters.get(index, 0) + parameter.size
        sizes += [parameters[index] for index in sorted(parameters)]
    handles = [BufferHandle(size, alignment, device_tag, 0, memory_class) for size in sizes]
    descriptor = replace(draft, buffers=tuple(handles))
    check_descriptor(descriptor, policy)
    return descriptor
