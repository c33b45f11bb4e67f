"""Small snapshots, and what must be held of them byte for byte, worked out without the code under test."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.image import INDEX, Chunk, ImagePlan
from hurray_wire.paged import Quantized
from hurray_wire.snapshot import KVSnapshot

Bytes = npt.NDArray[np.uint8]
Caches = dict[tuple[int | None, str], npt.NDArray[Any]]


@dataclass(frozen=True)
class Shape:
    """Geometry, tables and token counts. `quantized`: int8 with a float32 scale per slot."""

    name: str
    roles: tuple[tuple[int | None, str], ...]
    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int
    tables: tuple[tuple[int, ...], ...]
    token_counts: tuple[int, ...]
    quantized: bool = False
    pages: tuple[int, ...] = field(init=False)
    """The caller's pages that are named, in order of first use."""
    live: npt.NDArray[np.bool_] = field(init=False)
    """[pages, page_size]: whether some token lies there."""
    block_table: npt.NDArray[np.uint32] = field(init=False)
    seq_ptr: npt.NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        needed = [
            table[: -(-count // self.page_size)] for table, count in zip(self.tables, self.token_counts, strict=True)
        ]
        numbers: dict[int, int] = {}
        for page in itertools.chain(*needed):
            numbers.setdefault(page, len(numbers))
        live = np.zeros((len(numbers), self.page_size), np.bool_)
        for table, count in zip(needed, self.token_counts, strict=True):
            for token in range(count):
                live[numbers[table[token // self.page_size]], token % self.page_size] = True
        set_ = object.__setattr__
        set_(self, "pages", tuple(numbers))
        set_(self, "live", live)
        set_(self, "block_table", np.array([numbers[page] for page in itertools.chain(*needed)], np.uint32))
        set_(self, "seq_ptr", np.cumsum([0, *map(len, needed)]).astype(np.uint32))

    @property
    def dtype(self) -> Any:
        return np.int8 if self.quantized else np.float16

    @property
    def slot_bytes(self) -> int:
        return self.num_heads * self.head_dim * np.dtype(self.dtype).itemsize

    @property
    def needed_tables(self) -> list[list[int]]:
        """Compact page numbers of each sequence."""
        return [self.block_table[a:b].tolist() for a, b in itertools.pairwise(self.seq_ptr.tolist())]


SHAPES = (
    Shape("one page", ((None, "fused"),), 2, 4, 1, 8, ((1,),), (3,)),
    Shape("shared prefix", ((0, "key"), (0, "value")), 6, 4, 2, 8, ((3, 1), (3, 5), ()), (8, 7, 0)),
    Shape("ragged", ((3, "fused"), (7, "fused")), 8, 8, 2, 16, ((7, 0, 2), (4,), (1, 6)), (21, 8, 9)),
    Shape("all live", ((0, "key"), (0, "value")), 8, 4, 4, 32, ((2, 3, 4, 5, 6, 7),), (24,)),
    Shape("scales", ((1, "fused"),), 6, 8, 2, 16, ((5, 4, 1), (5, 2)), (18, 11), quantized=True),
    Shape("long", ((0, "key"), (0, "value")), 40, 16, 4, 32, (tuple(range(39, 9, -1)), tuple(range(39, 35, -1))),
          (473, 50)),
)  # fmt: skip


class Content:
    """What one put hands over. `caches` are the caller's; the expected bytes are this object's own."""

    def __init__(self, shape: Shape, number: int, chunk_bytes: int) -> None:
        self.shape = shape
        self.number = number
        self.chunk_bytes = chunk_bytes
        rng = np.random.default_rng(number)
        size = (shape.num_pages, shape.page_size, shape.num_heads, shape.head_dim)
        self.caches: Caches = {
            role: rng.integers(0, 256, (*size[:3], size[3] * np.dtype(shape.dtype).itemsize), np.uint8)
            .view(shape.dtype)
            .reshape(size)
            for role in shape.roles
        }
        self.scales = {
            role: rng.uniform(0.5, 2.0, size[:2]).astype(np.float32) for role in shape.roles if shape.quantized
        }
        pages = list(shape.pages)
        self.pools = [self._slots(self.caches[role])[pages] for role in shape.roles]
        """What must be held of each page pool: uint8 [pages, page_size, slot_bytes]."""
        self.parameters = [self.scales[role][pages] for role in shape.roles if shape.quantized]
        for pool in self.pools:
            pool[~shape.live] = 0
        for scales in self.parameters:
            scales[~shape.live] = 1.0

    @property
    def wire_bytes(self) -> int:
        """Of its page pools."""
        return sum(pool.nbytes for pool in self.pools)

    def _slots(self, cache: npt.NDArray[Any]) -> Bytes:
        shape = self.shape
        return cache.view(np.uint8).reshape(shape.num_pages, shape.page_size, shape.slot_bytes)

    def snapshot(self) -> KVSnapshot:
        """Over the caller's caches."""
        shape = self.shape
        options: dict[str, Any] = {}
        if shape.quantized:
            options = {"quantization": {r: Quantized.per_block(shape.page_size, s) for r, s in self.scales.items()}}
        return KVSnapshot.from_paged(
            self.caches, block_tables=[list(t) for t in shape.tables], token_counts=shape.token_counts, **options
        )

    def scramble(self) -> None:
        """The caller has its pages back, and writes to them."""
        for cache in self.caches.values():
            cache.view(np.uint8)[...] = 0xA5
        for scales in self.scales.values():
            scales[...] = 99.0

    def image(self, plan: ImagePlan) -> Bytes:
        """What a target must hold."""
        image = np.zeros(plan.image_bytes, np.uint8)

        def put(tensor: int, buffer: int, value: npt.NDArray[Any]) -> None:
            data = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            offset = plan.buffer_offsets[tensor][buffer]
            image[offset : offset + data.size] = data

        put(0, 1, self.shape.block_table)
        put(0, 2, self.shape.seq_ptr)
        for tensor, pool in enumerate(self.pools):
            put(tensor, 0, pool)
            if self.parameters:
                put(tensor, 3, self.parameters[tensor])
        return image

    def difference(self, snapshot: KVSnapshot) -> str | None:
        """How a snapshot that was got differs from what was put, or None."""
        structure = snapshot.structure
        if structure.block_table.tolist() != self.shape.block_table.tolist():
            return "another block_table"
        if structure.token_counts.tolist() != list(self.shape.token_counts):
            return "other token counts"
        for number, tensor in enumerate(snapshot.tensors):
            pool = np.asarray(tensor.page_pool).view(np.uint8).reshape(self.pools[number].shape)
            if not np.array_equal(pool, self.pools[number]):
                return f"another page_pool of {tensor.name}"
            if self.parameters:
                scales = np.asarray(tensor.parameters[0]).view(np.float32).reshape(self.parameters[number].shape)
                if not np.array_equal(scales, self.parameters[number]):
                    return f"other scales of {tensor.name}"
        return None

    def soil(self, plan: ImagePlan, chunk: Chunk, staged: Bytes) -> int:
        """Fill the dead slots in a staged chunk with a leak; how many there were."""
        shape, count = self.shape, 0
        page_bytes = shape.page_size * shape.slot_bytes
        for segment in chunk.segments:
            if segment.tensor == INDEX or segment.buffer != 0:
                continue
            for page, slot in zip(*np.nonzero(~shape.live), strict=True):
                start = int(page) * page_bytes + int(slot) * shape.slot_bytes - segment.buffer_offset
                if start >= 0 and start + shape.slot_bytes <= segment.nbytes:
                    at = segment.chunk_offset + start
                    staged[at : at + shape.slot_bytes] = 0x5E
                    count += 1
        return count


class Landing:
    """Caches of a caller that a get fills, by tables of its own."""

    FILL = 0xC3

    def __init__(self, shape: Shape, order: list[int]) -> None:
        """`order`: the destination's page for each compact page of the snapshot, all different."""
        self.shape = shape
        self.order = order
        size = (len(order) + 3, shape.page_size, shape.num_heads, shape.head_dim)
        self.caches: Caches = {role: np.full(size, 0, shape.dtype) for role in shape.roles}
        for cache in self.caches.values():
            cache.view(np.uint8)[...] = self.FILL

    @property
    def tables(self) -> list[list[int]]:
        return [[self.order[page] for page in table] for table in self.shape.needed_tables]

    def _pages(self, role: tuple[int | None, str]) -> Bytes:
        cache = self.caches[role]
        return cache.view(np.uint8).reshape(cache.shape[0], self.shape.page_size, self.shape.slot_bytes)

    def difference(self, content: Content) -> str | None:
        """How the pages differ from what was put, after a success."""
        for number, role in enumerate(self.shape.roles):
            pages = self._pages(role)
            if not np.array_equal(pages[self.order], content.pools[number]):
                return f"pages of {role} differ"
        return self._outside()

    def residue(self) -> str | None:
        """What is left that must not be, after a failure: every named page is as it was, or clear."""
        for role in self.shape.roles:
            named = self._pages(role)[self.order]
            if (named != self.FILL).any() and named.any():
                return f"bytes of a failed get are left in {role}"
        return self._outside()

    def _outside(self) -> str | None:
        others = [page for page in range(len(self.order) + 3) if page not in set(self.order)]
        for role in self.shape.roles:
            if (self._pages(role)[others] != self.FILL).any():
                return f"a page of {role} that no table names was written"
        return None
