"""The image of a snapshot: its buffers in one range of bytes, and the chunks in which that range crosses the wire.

Both sides compute the same plan from the descriptors of the offer and its chunk size, so nothing about single chunks
is negotiated. The image is what a target keeps:

    block_table | seq_ptr | tensor 0: page_pool, parameters... | tensor 1: ... | ...

Every buffer begins at a multiple of 4096; the gaps between are zero. All tensors of a snapshot share one block
structure, so the index buffers are there once. A chunk is a contiguous range of the image: small buffers share one,
large ones are split, a page pool only between pages (a page larger than the chunk size is a chunk of its own). Index
chunks come first and hold nothing else.

A source that can show its image to the target sends the index chunks alone; all after them is one chunk, the *view*,
which does not cross the wire but is mapped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, overload

from hurray_wire.descriptor import Descriptor
from hurray_wire.errors import GeometryMismatch, InvalidRequest, LimitExceeded, Unsupported
from hurray_wire.limits import PAGE_BYTES, Limits
from hurray_wire.packing import E8M0_TAG
from hurray_wire.sections import BLOCK_TABLE, SEQ_PTR

INDEX: Final = -1
"""Tensor number of the shared index buffers."""

CHUNK_BYTES_MIN: Final = PAGE_BYTES
CHUNK_BYTES_MAX: Final = 64 << 20
CHUNK_COUNT_MAX: Final = 1 << 24

_SHARED_FIELDS: Final = (
    "page_size",
    "num_pages",
    "num_seqs",
    "total_tokens",
    "total_logical_pages",
    "block_table_index_type",
)
_shared: Final[Callable[[Descriptor], tuple[int, ...]]] = attrgetter(*_SHARED_FIELDS)


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4096."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


# Not frozen, though nobody changes one: a frozen one takes three times as long to make, and a peer waits for the plan.
@dataclass(slots=True)
class Segment:
    """Part of one buffer inside a chunk. `tensor` is INDEX for the shared index buffers; all sizes in bytes."""

    tensor: int
    buffer: int
    buffer_offset: int
    chunk_offset: int
    nbytes: int


@dataclass(slots=True)
class Chunk:
    """A contiguous range of the image: bytes [offset, offset + nbytes)."""

    index: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]

    @property
    def last_tensor(self) -> int:
        """The tensor that must be ready before this chunk can be sent."""
        return self.segments[-1].tensor


@dataclass(slots=True)
class Run:
    """`count` chunks from `first` on: one, or several of equal size, one after the other in one buffer."""

    first: Chunk
    count: int

    def chunk(self, number: int) -> Chunk:
        """The chunk `number` places after the first."""
        if number == 0:
            return self.first
        first, (segment,) = self.first, self.first.segments
        done = number * first.nbytes
        part = Segment(segment.tensor, segment.buffer, segment.buffer_offset + done, 0, first.nbytes)
        return Chunk(first.index + number, first.offset + done, first.nbytes, (part,))


class Chunks(Sequence[Chunk]):
    """The chunks of a plan, in the order in which they are sent. Takes memory in proportion to the buffers: chunks of
    which a large buffer has many are made when they are asked for."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self._starts = [run.first.index for run in self.runs]

    def __len__(self) -> int:
        return self.runs[-1].first.index + self.runs[-1].count if self.runs else 0

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        run = self.runs[bisect_right(self._starts, number) - 1]
        return run.chunk(number - run.first.index)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Where every buffer lies in the image, and its chunks.

    `buffer_offsets[t][b]`: bytes from the start of the image to buffer b of tensor t.
    """

    descriptors: tuple[Descriptor, ...]
    chunk_bytes: int
    image_bytes: int
    buffer_offsets: tuple[tuple[int, ...], ...]
    chunks: Chunks
    index_chunk_count: int
    max_chunk_bytes: int
    """Bytes of the largest chunk that crosses: what a staging buffer must hold."""
    view_chunk: int | None = None
    """Index of the chunk that is a view, always the last."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the data plane."""
        runs = self.chunks.runs if self.view_chunk is None else self.chunks.runs[:-1]
        return sum(run.count * run.first.nbytes for run in runs)

    @property
    def mapped_bytes(self) -> int:
        """Bytes that the target sees without their crossing anything."""
        return 0 if self.view_chunk is None else self.chunks[self.view_chunk].nbytes

    def ready_chunk_count(self, ready_tensors: int) -> int:
        """How many leading chunks can be sent once the first `ready_tensors` tensors are ready; below 0, none."""
        for run in self.chunks.runs:
            if run.first.last_tensor >= ready_tensors:
                return run.first.index
        return len(self.chunks)


def check_shared_structure(descriptors: Sequence[Descriptor]) -> None:
    """Raise GeometryMismatch unless all tensors share one block structure, as far as descriptors show it."""
    first = _shared(descriptors[0])
    for number, descriptor in enumerate(descriptors):
        own = _shared(descriptor)
        if own == first:
            continue
        for name, offered, required in zip(_SHARED_FIELDS, own, first, strict=True):
            if offered != required:
                raise GeometryMismatch(
                    "tensors of one snapshot share one block structure",
                    tensor=number,
                    field=name,
                    offered=offered,
                    required=required,
                )


def is_viewable(descriptor: Descriptor) -> bool:
    """Whether a target may take the tensor as a view: not where there is nothing to see, nor where a pool's bits can
    break rules by themselves. Such a pool is validated by whoever takes it, and memory that others can write never is.
    """
    whole_bytes = descriptor.page_bytes is not None
    return whole_bytes and descriptor.page_pool_bytes > 0 and descriptor.type_tag != E8M0_TAG


def plan_image(descriptors: Sequence[Descriptor], chunk_bytes: int, limits: Limits, *, view: bool = False) -> ImagePlan:
    """The plan of a snapshot. `view`: with all that follows the index in one chunk, which is shown.

    Raises GeometryMismatch, InvalidRequest (chunk size), LimitExceeded, and for a view Unsupported (`is_viewable`).

    Costs memory and time in proportion to the buffers, however large they are said to be.
    """
    if chunk_bytes % PAGE_BYTES or not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        raise InvalidRequest(
            "chunk size out of range",
            field="chunk_bytes",
            offered=chunk_bytes,
            required=f"a multiple of {PAGE_BYTES} from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}",
        )
    if not descriptors:
        raise InvalidRequest("a snapshot has at least one tensor", field="tensors", offered=0, required=">= 1")
    _check("max_tensors", len(descriptors), limits.max_tensors)
    check_shared_structure(descriptors)
    _check("max_sequences", descriptors[0].num_seqs, limits.max_sequences)
    _check("max_index_entries", descriptors[0].total_logical_pages, limits.max_index_entries)
    index_sizes = [descriptors[0].buffers[number].byte_size for number in (BLOCK_TABLE, SEQ_PTR)]
    index_offsets = (0, align(index_sizes[0]))
    offset = index_offsets[1] + align(index_sizes[1])
    offsets = []
    for descriptor in descriptors:
        placed = [offset, *index_offsets]
        for number, nbytes, _ in descriptor.own_buffers:
            if number:
                placed.append(offset)
            offset += align(nbytes)
        offsets.append(tuple(placed))
    _check("max_snapshot_bytes", offset, limits.max_snapshot_bytes)
    cutter = _Cutter(chunk_bytes)
    for number, nbytes in zip((BLOCK_TABLE, SEQ_PTR), index_sizes, strict=True):
        cutter.add(INDEX, number, index_offsets[number - BLOCK_TABLE], nbytes, PAGE_BYTES)
    cutter.cut()
    index_chunk_count = cutter.chunk_count
    if view:
        _check_viewable(descriptors)
        cutter.chunk_bytes = offset  # which everything fits
    for tensor, descriptor in enumerate(descriptors):
        for number, nbytes, unit in descriptor.own_buffers:
            cutter.add(tensor, number, offsets[tensor][number], nbytes, unit or PAGE_BYTES)
    cutter.cut()
    _check("max_chunk_count", cutter.chunk_count, CHUNK_COUNT_MAX)
    crossing = cutter.runs[:-1] if view else cutter.runs
    return ImagePlan(
        descriptors=tuple(descriptors),
        chunk_bytes=chunk_bytes,
        image_bytes=offset,
        buffer_offsets=tuple(offsets),
        chunks=Chunks(cutter.runs),
        index_chunk_count=index_chunk_count,
        max_chunk_bytes=max((run.first.nbytes for run in crossing), default=0),
        view_chunk=index_chunk_count if view else None,
    )


def _check_viewable(descriptors: Sequence[Descriptor]) -> None:
    for number, descriptor in enumerate(descriptors):
        if not is_viewable(descriptor):
            raise Unsupported(
                "a pool like this is never a view",
                tensor=number,
                field="view",
                offered=f"{descriptor.page_pool_bytes} bytes of {descriptor.element_type.name}",
                required="some, whole bytes in every page, and no float8_e8m0",
            )


def _check(name: str, offered: int, limit: int) -> None:
    if offered > limit:
        raise LimitExceeded("above the limit of this node", field=name, offered=offered, required=f"<= {limit}")


class _Cutter:
    """Cuts buffers, given in image order, into chunks of at most `chunk_bytes` (or of one unit, if that is more)."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.runs: list[Run] = []
        self.chunk_count = 0
        self._offset = 0
        self._nbytes = 0
        self._segments: list[Segment] = []

    def add(self, tensor: int, buffer: int, offset: int, nbytes: int, unit: int) -> None:
        """One whole buffer, which may be split at multiples of `unit` bytes; the last part stays open for more."""
        if not nbytes:
            return
        if self._segments and offset + nbytes - self._offset > self.chunk_bytes:
            self.cut()
        size = max(unit, self.chunk_bytes // unit * unit)
        whole = (nbytes - 1) // size
        assert not (whole and self._segments), "what fits beside something is not split"
        if whole:
            first = Chunk(self.chunk_count, offset, size, (Segment(tensor, buffer, 0, 0, size),))
            self._append(Run(first, whole))
        done = whole * size
        if not self._segments:
            self._offset = offset + done
        self._segments.append(Segment(tensor, buffer, done, offset + done - self._offset, nbytes - done))
        self._nbytes = offset + nbytes - self._offset

    def cut(self) -> None:
        """End the chunk that is open, if one is."""
        if self._segments:
            self._append(Run(Chunk(self.chunk_count, self._offset, self._nbytes, tuple(self._segments)), 1))
            self._segments = []

    def _append(self, run: Run) -> None:
        self.runs.append(run)
        self.chunk_count += run.count
