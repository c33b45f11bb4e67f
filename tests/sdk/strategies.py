"""Random snapshots of every kind, poisoned wherever no token lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import hurray_client as ht
from hurray_wire.descriptor import Descriptor, build_descriptor
from hurray_wire.dtypes import BY_NAME, ElementType
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine, Quantization

_NARROW = ("int8", "uint8", "int4", "uint4", "int2", "uint2")
_ROLES = {"key": 0, "value": 1, "fused": 2}


@dataclass(frozen=True)
class Case:
    """A snapshot, its tables as lists, and how many tokens each has."""

    snapshot: ht.KVSnapshot
    tables: list[list[int]]
    token_counts: list[int]
    poison: bytes
    """Repeated over every slot that no token reaches, where a slot's bits are whole bytes and few types forbid it."""

    @property
    def page_size(self) -> int:
        return self.snapshot.structure.page_size

    @property
    def needed_tables(self) -> list[list[int]]:
        """Without the pages past the last one that the tokens need."""
        return [
            table[: -(-count // self.page_size)] for table, count in zip(self.tables, self.token_counts, strict=True)
        ]


@st.composite
def cases(draw: st.DrawFn, *, poison: bytes, whole_pages: bool = False) -> Case:
    """Types, schemes, aliasing, ragged and empty sequences, both index widths, surplus and unnamed pages, 1 to 64
    tensors. `whole_pages`: only pools that an engine can have as an array of pages."""
    page_size = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    num_pages = draw(st.integers(1, 10))
    tables, counts = draw(_sequences(num_pages, page_size))
    index = draw(st.sampled_from((np.uint32, np.uint64)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tensors = [
        draw(_tensors(layer, role, page_size, num_pages, tables, counts, index, poison, rng, whole_pages))
        for layer, role in draw(_roles())
    ]
    return Case(ht.KVSnapshot.from_buffers(tensors, counts), tables, counts, poison)


@st.composite
def _sequences(draw: st.DrawFn, num_pages: int, page_size: int) -> tuple[list[list[int]], list[int]]:
    tables, counts = [], []
    for _ in range(draw(st.integers(0, 5))):
        table = draw(st.lists(st.integers(0, num_pages - 1), max_size=4))
        if tables and draw(st.booleans()):
            table = tables[-1][: draw(st.integers(0, 3))] + table  # a shared prefix
        surplus = draw(st.sampled_from((0, 0, 0, 1, 2)))
        most = max(0, len(table) - surplus) * page_size
        tables.append(table)
        counts.append(draw(st.integers(max(0, most - page_size + 1), most)))
    return tables, counts


@st.composite
def _roles(draw: st.DrawFn) -> list[tuple[int | None, str]]:
    kind = draw(st.sampled_from(("alone", "pairs", "pairs", "fused", "many")))
    if kind == "alone":
        return [(None, "fused")]
    most = 32 if kind == "many" else 3
    layers = sorted(draw(st.sets(st.integers(0, 500), min_size=most if kind == "many" else 1, max_size=most)))
    roles = ("fused",) if kind == "fused" else ("key", "value")
    return [(layer, role) for layer in layers for role in roles]


@st.composite
def _tensors(
    draw: st.DrawFn,
    layer: int | None,
    role: str,
    page_size: int,
    num_pages: int,
    tables: list[list[int]],
    counts: list[int],
    index: Any,
    poison: bytes,
    rng: np.random.Generator,
    whole_pages: bool,
) -> tuple[Descriptor, list[npt.NDArray[np.uint8]]]:
    names = [name for name, item in sorted(BY_NAME.items()) if item.numpy is not None or not whole_pages]
    element_type = BY_NAME[draw(st.sampled_from(names))]
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from((1, 4, 8, 20)))
    if whole_pages and (page_size * heads * dim) % element_type.group_elements:
        dim = 8
    scheme = draw(_schemes(element_type, page_size))
    seq_ptr = np.cumsum([0, *map(len, tables)]).astype(index)
    table = np.array([page for table in tables for page in table], index)
    descriptor = build_descriptor(
        element_type=element_type,
        page_size=page_size,
        num_pages=num_pages,
        num_heads=heads,
        head_dim=dim,
        total_tokens=sum(counts),
        num_seqs=len(counts),
        total_logical_pages=table.size,
        kv_role=_ROLES[role],
        layer_index=layer,
        block_table_index_type=int(index is np.uint64),
        quantization=scheme,
    )
    live = _live(tables, counts, page_size, num_pages)
    pool = _pool(element_type, live, heads * dim, poison, rng)
    parameters = [np.zeros(handle.byte_size, np.uint8) for handle in descriptor.buffers[3:]]
    for parameter in descriptor.parameter_layout():
        values: npt.NDArray[Any] = rng.integers(1, 4, parameter.entries).astype(parameter.dtype)
        if parameter.kind == "zero_point":
            values = rng.integers(0, 2, parameter.entries).astype(parameter.dtype)
        start = parameter.offset
        parameters[parameter.buffer_index - 3][start : start + parameter.size] = values.view(np.uint8)
    return descriptor, [pool, table.view(np.uint8), seq_ptr.view(np.uint8), *parameters]


@st.composite
def _schemes(draw: st.DrawFn, element_type: ElementType, page_size: int) -> Quantization | None:
    if element_type.name not in _NARROW:
        return None
    kinds = ["none", "tensor", "channel", "channel_shared"]
    if page_size >= 2 and page_size & (page_size - 1) == 0:
        kinds += ["block", "block_zero", "block_shared"]
    match draw(st.sampled_from(kinds)):
        case "tensor":
            return PerTensorAffine(draw(st.sampled_from((0.5, -2.0, 1e-3))), draw(st.integers(0, 1)))
        case "channel":
            return PerChannelAffine(draw(st.sampled_from((1, 2))))
        case "channel_shared":
            return PerChannelAffine(1, 3, 3)
        case "block":
            return PerBlockAffine(page_size, scale_type_tag=draw(st.sampled_from((1, 2, 3))))
        case "block_zero":
            return PerBlockAffine(page_size, 3, 4)
        case "block_shared":
            return PerBlockAffine(page_size, 3, 3)
        case _:
            return None


def _live(
    tables: Sequence[Sequence[int]], counts: Sequence[int], page_size: int, num_pages: int
) -> npt.NDArray[np.bool_]:
    live = np.zeros((num_pages, page_size), np.bool_)
    for table, count in zip(tables, counts, strict=True):
        for token in range(count):
            live[table[token // page_size], token % page_size] = True
    return live


def _pool(
    element_type: ElementType, live: npt.NDArray[np.bool_], slot_elements: int, poison: bytes, rng: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Random bits where a token lies, the poison everywhere else, pad bits clear."""
    width = slot_elements * element_type.bits
    tile = np.unpackbits(np.frombuffer(poison, np.uint8), bitorder="little")
    bits = np.resize(tile, (live.size, width)) if live.size else np.zeros((0, width), np.uint8)
    count = int(live.sum())
    if element_type.name == "float8_e8m0":  # 0x00 and 0xFF are no values where a token lies
        words = rng.integers(1, 255, (count, slot_elements), dtype=np.uint8)
        fresh = np.unpackbits(words, axis=1, bitorder="little")
    else:
        fresh = rng.integers(0, 2, (count, width), dtype=np.uint8)
    bits[live.reshape(-1)] = fresh
    padded = np.zeros(element_type.packed_bytes(live.size * slot_elements) * 8, np.uint8)
    padded[: bits.size] = bits.reshape(-1)
    return np.packbits(padded, bitorder="little")
