"""Random block structures and tensors, and the slow model that the fast functions are held against."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hurray_wire.descriptor import Descriptor, build_descriptor
from hurray_wire.dtypes import BY_NAME, ElementType
from hurray_wire.packing import E8M0_NEUTRAL
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.validate import BlockStructure

INTEGERS = ("int8", "uint8", "int4", "uint4", "int2", "uint2")
NAMES = tuple(sorted(BY_NAME))


def structure_of(
    tables: list[list[int]], token_counts: list[int], page_size: int, num_pages: int, dtype: Any = np.uint32
) -> BlockStructure:
    return BlockStructure(
        page_size=page_size,
        num_pages=num_pages,
        seq_ptr=np.cumsum([0, *map(len, tables)]).astype(np.uint64),
        block_table=np.array([page for table in tables for page in table], dtype=dtype),
        token_counts=np.array(token_counts, dtype=np.uint64),
    )


@st.composite
def structures(draw: st.DrawFn, page_sizes: tuple[int, ...] = (1, 2, 3, 4, 8)) -> BlockStructure:
    """Ragged, with empty sequences, aliasing inside and between sequences, surplus and unnamed pages."""
    page_size = draw(st.sampled_from(page_sizes))
    num_pages = draw(st.integers(0, 9))
    tables, counts = [], []
    for _ in range(draw(st.integers(0, 5))):
        pages = draw(st.lists(st.integers(0, num_pages - 1), max_size=4)) if num_pages else []
        surplus = draw(st.sampled_from((0, 0, 0, 1, 2)))
        most = max(0, len(pages) - surplus) * page_size
        counts.append(draw(st.integers(max(0, most - page_size + 1), most)) if most else 0)
        tables.append(pages)
    return structure_of(tables, counts, page_size, num_pages, draw(st.sampled_from((np.uint32, np.uint64))))


def tables_of(structure: BlockStructure) -> list[list[int]]:
    ends = [int(end) for end in structure.seq_ptr]
    return [structure.block_table[a:b].tolist() for a, b in itertools.pairwise(ends)]


def live_set(structure: BlockStructure) -> set[tuple[int, int]]:
    """Every (page, slot) that some token of some sequence lies in, token by token."""
    return {
        (table[token // structure.page_size], token % structure.page_size)
        for table, count in zip(tables_of(structure), structure.token_counts.tolist(), strict=True)
        for token in range(count)
    }


def elements_of(pool: bytes, bits: int, count: int) -> list[int]:
    """All elements of a packed pool, by reading it as one number."""
    number, mask = int.from_bytes(pool, "little"), (1 << bits) - 1
    return [(number >> (index * bits)) & mask for index in range(count)]


def packed(elements: list[int], element_type: ElementType) -> bytes:
    number = sum(element << (index * element_type.bits) for index, element in enumerate(elements))
    return number.to_bytes(element_type.packed_bytes(len(elements)), "little")


@dataclass(frozen=True)
class Tensor:
    """A random tensor: its descriptor, its buffers by the format's index, and its elements by (page, slot)."""

    descriptor: Descriptor
    structure: BlockStructure
    buffers: list[np.ndarray]

    def slot(self, page: int, slot: int) -> list[int]:
        return slot_elements(self.descriptor, self.buffers[0], page, slot)


def slot_elements(descriptor: Descriptor, pool: Any, page: int, slot: int) -> list[int]:
    """The elements of one slot, [num_heads * head_dim], by the format's lookup formula."""
    bits, width = descriptor.element_type.bits, descriptor.num_heads * descriptor.head_dim
    number = int.from_bytes(np.asarray(pool).tobytes(), "little")
    first = (page * descriptor.page_size + slot) * width
    return [(number >> ((first + index) * bits)) & ((1 << bits) - 1) for index in range(width)]


def cleared(descriptor: Descriptor) -> int:
    """The bits of a cleared element."""
    return E8M0_NEUTRAL if descriptor.element_type.name == "float8_e8m0" else 0


@st.composite
def tensors(
    draw: st.DrawFn,
    structure: BlockStructure | None = None,
    kv_role: int = 0,
    layer_index: int | None = 3,
    names: tuple[str, ...] = NAMES,
    whole_bytes: bool = False,
) -> Tensor:
    structure = draw(structures()) if structure is None else structure
    element_type = BY_NAME[draw(st.sampled_from(names))]
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if whole_bytes:
        dim *= element_type.group_elements
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scheme = draw(st.sampled_from(schemes(element_type, structure.page_size)))
    descriptor = descriptor_of(
        structure,
        element_type.name,
        heads,
        dim,
        kv_role=kv_role,
        layer_index=layer_index,
        quantization=scheme,
    )
    return Tensor(descriptor, structure, fill(descriptor, structure, rng))


def descriptor_of(
    structure: BlockStructure, name: str, num_heads: int = 2, head_dim: int = 8, **fields: Any
) -> Descriptor:
    return build_descriptor(
        element_type=BY_NAME[name],
        page_size=structure.page_size,
        num_pages=structure.num_pages,
        num_heads=num_heads,
        head_dim=head_dim,
        total_tokens=structure.total_tokens,
        num_seqs=structure.num_seqs,
        total_logical_pages=structure.total_logical_pages,
        block_table_index_type=int(structure.block_table.dtype == np.uint64),
        **{"kv_role": 0, **fields},
    )


def schemes(element_type: ElementType, page_size: int) -> list[Any]:
    if element_type.name not in INTEGERS:
        return [None]
    found: list[Any] = [
        PerTensorAffine(0.25, 1),
        PerChannelAffine(1),
        PerChannelAffine(2, 4, 3),
        PerChannelAffine(2, 3, 3),
    ]
    if page_size >= 2 and page_size & (page_size - 1) == 0:
        found += [PerBlockAffine(page_size, scale_type_tag=tag) for tag in (1, 2, 3)]
        found += [PerBlockAffine(page_size, 3, 3, 1), PerBlockAffine(page_size, 4, 3, 3)]
    return found


def fill(descriptor: Descriptor, structure: BlockStructure, rng: np.random.Generator) -> list[np.ndarray]:
    """Random contents that keep every rule. No element is all zero bits, so a cleared one shows."""
    count = descriptor.num_pages * descriptor.page_elements
    bits = descriptor.element_type.bits
    top = 254 if descriptor.element_type.name == "float8_e8m0" else (1 << min(bits, 60)) - 1
    elements = [int(element) for element in rng.integers(1, top, count, endpoint=True)]
    pool = packed(elements, descriptor.element_type)
    buffers = [
        pool,
        structure.block_table.astype(descriptor.index_dtype).tobytes(),
        structure.seq_ptr.astype(descriptor.index_dtype).tobytes(),
        *(bytes(handle.byte_size) for handle in descriptor.buffers[3:]),
    ]
    arrays = [np.frombuffer(bytearray(buffer), dtype=np.uint8) for buffer in buffers]
    for item in descriptor.parameter_layout():
        view = arrays[item.buffer_index][item.offset : item.offset + item.size].view(item.dtype)
        if item.kind == "scale":
            view[...] = (rng.integers(2, 64, item.entries) / 16).astype(item.dtype)
        else:
            view[...] = rng.integers(0, 2, item.entries)
    return arrays


@st.composite
def snapshots(draw: st.DrawFn, names: tuple[str, ...] = NAMES, **options: Any) -> tuple[KVSnapshot, list[Tensor]]:
    """A snapshot of one or two layers over unchecked buffers, and the tensors it was made of."""
    structure = draw(structures())
    roles = draw(st.sampled_from([[(3, 2)], [(0, 0), (0, 1)], [(None, 2)], [(1, 2), (4, 0), (4, 1)]]))
    parts = [
        draw(tensors(structure=structure, layer_index=layer, kv_role=role, names=names, **options))
        for layer, role in roles
    ]
    snapshot = KVSnapshot.from_buffers(
        [(part.descriptor, part.buffers) for part in parts], structure.token_counts.tolist()
    )
    return snapshot, parts
