"""Snapshots to hand over, and what must be true of them on the other side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import hurray_client as ht

Caches = dict[tuple[int | None, str], npt.NDArray[Any]]

PAGE_SIZE, NUM_PAGES, HEADS, HEAD_DIM = 4, 8, 2, 8


def make_caches(
    layers: int = 2,
    *,
    seed: int = 1,
    num_pages: int = NUM_PAGES,
    page_size: int = PAGE_SIZE,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: Any = np.float16,
) -> Caches:
    """Every page and slot filled with values of its own."""
    rng = np.random.default_rng(seed)
    shape = (num_pages, page_size, heads, head_dim)
    return {
        (layer, role): rng.standard_normal(shape).astype(dtype) for layer in range(layers) for role in ("key", "value")
    }


def make_snapshot(
    caches: Caches | None = None,
    tables: Sequence[Sequence[int]] = ((3, 1, 6), (3, 5), ()),
    counts: Sequence[int] = (10, 7, 0),
    **options: Any,
) -> ht.KVSnapshot:
    """A ragged batch with a shared prefix and an empty sequence."""
    return ht.KVSnapshot.from_paged(
        caches if caches is not None else make_caches(),
        block_tables=[list(table) for table in tables],
        token_counts=list(counts),
        **options,
    )


def assert_same_tokens(ours: ht.KVSnapshot, theirs: ht.KVSnapshot) -> None:
    """Every token of every sequence of every tensor, bit for bit."""
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    assert ours.token_counts.tolist() == theirs.token_counts.tolist()
    for tensor in ours.tensors:
        for seq in range(ours.num_seqs):
            a = ours.tokens(tensor.layer_index, tensor.role, seq)
            b = theirs.tokens(tensor.layer_index, tensor.role, seq)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), (tensor.name, seq)


def slot_bits(snapshot: ht.KVSnapshot, number: int) -> npt.NDArray[np.uint8]:
    """The bits of a page pool, [num_pages, page_size, bits of a slot]: the format packs least significant first."""
    tensor = snapshot.tensors[number]
    descriptor = tensor.descriptor
    width = descriptor.num_heads * descriptor.head_dim * descriptor.element_type.bits
    count = descriptor.num_pages * descriptor.page_size
    data = np.ascontiguousarray(tensor.page_pool).view(np.uint8).reshape(-1)
    bits = np.unpackbits(data, bitorder="little")[: count * width]
    return bits.reshape(descriptor.num_pages, descriptor.page_size, width)


def live_map(snapshot: ht.KVSnapshot) -> npt.NDArray[np.bool_]:
    """Which slots some token lies in, [num_pages, page_size], token by token."""
    structure = snapshot.structure
    live = np.zeros((structure.num_pages, structure.page_size), np.bool_)
    for seq, count in enumerate(structure.token_counts.tolist()):
        first = int(structure.seq_ptr[seq])
        for token in range(count):
            page = int(structure.block_table[first + token // structure.page_size])
            live[page, token % structure.page_size] = True
    return live


def assert_dead_slots_clear(snapshot: ht.KVSnapshot) -> None:
    """Every dead slot of a received snapshot holds cleared elements."""
    dead = ~live_map(snapshot)
    for number, tensor in enumerate(snapshot.tensors):
        descriptor = tensor.descriptor
        clear = 0
        if descriptor.element_type.name == "float8_e8m0":
            clear = np.unpackbits(
                np.full(descriptor.num_heads * descriptor.head_dim, 0x7F, np.uint8), bitorder="little"
            )
        bits = slot_bits(snapshot, number)[dead]
        assert (bits == clear).all(), tensor.name


def tables_of(snapshot: ht.KVSnapshot) -> list[list[int]]:
    """One list of page ids per sequence."""
    structure = snapshot.structure
    ends = structure.seq_ptr.tolist()
    return [structure.block_table[a:b].tolist() for a, b in itertools.pairwise(ends)]


def distinct_in_order(tables: Sequence[Sequence[int]]) -> dict[int, int]:
    """Page id -> its number in order of first use."""
    numbers: dict[int, int] = {}
    for table in tables:
        for page in table:
            numbers.setdefault(page, len(numbers))
    return numbers


def copies(caches: Mapping[Any, npt.NDArray[Any]]) -> dict[Any, npt.NDArray[Any]]:
    """To see what changed."""
    return {key: array.copy() for key, array in caches.items()}
