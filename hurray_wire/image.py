"""The image of a snapshot: its buffers in one range of bytes, and the chunks in which that range crosses the wire.

Both sides compute the same plan from the descriptors of the offer and its chunk size, so nothing about single chunks
is negotiated. The image is what a target keeps:

    block_table | seq_ptr | tensor 0: page_pool, parameters... | tensor 1: ... | ...

Every buffer begins at a multiple of 4096; the gaps between are zero. All tensors of a snapshot share one block
structure, so the index buffers are there once. A chunk is a contiguous range of the image: small buffers share one,
large ones are split, a page pool only between pages (a page larger than the chunk size is a chunk of its own). Index
chunks come first and hold nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hurray_wire.descriptor import Descriptor
from hurray_wire.errors import GeometryMismatch, InvalidRequest, LimitExceeded
from hurray_wire.limits import PAGE_BYTES, Limits

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


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4096."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of one buffer inside a chunk. `tensor` is INDEX for the shared index buffers; all sizes in bytes."""

    tensor: int
    buffer: int
    buffer_offset: int
    chunk_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Where every buffer lies in the image, and its chunks.

    `buffer_offsets[t][b]`: bytes from the start of the image to buffer b of tensor t.
    """

    descriptors: tuple[Descriptor, ...]
    chunk_bytes: int
    image_bytes: int
    buffer_offsets: tuple[tuple[int, ...], ...]
    chunks: tuple[Chunk, ...]
    index_chunk_count: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the data plane."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def max_chunk_bytes(self) -> int:
        """Bytes of the largest chunk: what a staging buffer must hold."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    def ready_chunk_count(self, ready_tensors: int) -> int:
        """How many leading chunks can be sent once the first `ready_tensors` tensors are ready."""
        for chunk in self.chunks:
            if chunk.last_tensor >= ready_tensors:
                return chunk.index
        return len(self.chunks)


def check_shared_structure(descriptors: Sequence[Descriptor]) -> None:
    """Raise GeometryMismatch unless all tensors share one block structure, as far as descriptors show it."""
    first = descriptors[0]
    for number, descriptor in enumerate(descriptors):
        for name in _SHARED_FIELDS:
            offered, required = getattr(descriptor, name), getattr(first, name)
            if offered != required:
                raise GeometryMismatch(
                    "tensors of one snapshot share one block structure",
                    tensor=number,
                    field=name,
                    offered=offered,
                    required=required,
                )


def plan_image(descriptors: Sequence[Descriptor], chunk_bytes: int, limits: Limits) -> ImagePlan:
    """The plan of a snapshot. Raises GeometryMismatch, InvalidRequest (chunk size), LimitExceeded.

    Costs memory in proportion to the chunks, and refuses before that what has more of them than tags can number.
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
    offset, index_offsets = _place(0, [descriptors[0].buffers[1].byte_size, descriptors[0].buffers[2].byte_size])
    offsets = []
    for descriptor in descriptors:
        pool, _, _, *parameters = (buffer.byte_size for buffer in descriptor.buffers)
        offset, placed = _place(offset, [pool, *parameters])
        offsets.append((placed[0], *index_offsets, *placed[1:]))
    _check("max_snapshot_bytes", offset, limits.max_snapshot_bytes)
    _check("max_chunk_count", -(-offset // chunk_bytes) + len(descriptors), CHUNK_COUNT_MAX)
    cutter = _Cutter(chunk_bytes)
    for number in (1, 2):
        cutter.add(INDEX, number, index_offsets[number - 1], descriptors[0].buffers[number].byte_size, PAGE_BYTES)
    cutter.cut()
    index_chunk_count = len(cutter.chunks)
    for tensor, descriptor in enumerate(descriptors):
        for number, buffer in enumerate(descriptor.buffers):
            if number not in (1, 2):
                unit = (descriptor.page_bytes if number == 0 else None) or PAGE_BYTES
                cutter.add(tensor, number, offsets[tensor][number], buffer.byte_size, unit)
    cutter.cut()
    return ImagePlan(
        descriptors=tuple(descriptors),
        chunk_bytes=chunk_bytes,
        image_bytes=offset,
        buffer_offsets=tuple(offsets),
        chunks=tuple(cutter.chunks),
        index_chunk_count=index_chunk_count,
    )


def _check(name: str, offered: int, limit: int) -> None:
    if offered > limit:
        raise LimitExceeded("above the limit of this node", field=name, offered=offered, required=f"<= {limit}")


def _place(offset: int, sizes: Sequence[int]) -> tuple[int, list[int]]:
    placed = []
    for size in sizes:
        placed.append(offset)
        offset += align(size)
    return offset, placed


class _Cutter:
    """Cuts buffers, given in image order, into chunks of at most `chunk_bytes` (or of one unit, if that is more)."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunks: list[Chunk] = []
        self._offset = 0
        self._nbytes = 0
        self._segments: list[Segment] = []

    def add(self, tensor: int, buffer: int, offset: int, nbytes: int, unit: int) -> None:
        """One whole buffer, which may be split at multiples of `unit` bytes."""
        done = 0
        while done < nbytes:
            if self._segments and offset + nbytes - self._offset > self.chunk_bytes:
                self.cut()
            if not self._segments:
                self._offset = offset + done
            size = min(nbytes - done, max(unit, self.chunk_bytes // unit * unit))
            self._segments.append(Segment(tensor, buffer, done, offset + done - self._offset, size))
            self._nbytes = offset + done + size - self._offset
            done += size
            if done < nbytes:
                self.cut()

    def cut(self) -> None:
        """End the chunk that is open, if one is."""
        if self._segments:
            self.chunks.append(Chunk(len(self.chunks), self._offset, self._nbytes, tuple(self._segments)))
            self._segments = []
