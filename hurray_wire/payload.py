"""What a transfer moves: the two ends of an image, one that yields chunks and one that takes them.

A source payload stages a chunk of a snapshot for sending; a target payload says where a chunk lands, looks at what
arrived, and ends up with a valid, scrubbed snapshot. Pure work on arrays: no transport, no clock. All methods are
called in the data-plane thread, in the order that the session machines prescribe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hurray_wire.alike import change_each
from hurray_wire.descriptor import Descriptor
from hurray_wire.image import Chunk, ImagePlan, Segment
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.memory import HOST, STANDARD, Place
from hurray_wire.pages import scrub, scrub_parameters
from hurray_wire.sections import BufferHandle
from hurray_wire.validate import BlockStructure, check_parameters, check_pool, takes_any_bytes

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TargetSummary:
    """What a target knows of a snapshot that is complete: for the receipt and the store."""

    descriptors: tuple[Descriptor, ...]
    logical_page_count: int
    distinct_page_count: int
    dead_slot_count: int
    dirty_dead_slot_count: int
    wire_bytes: int
    mapped_bytes: int
    changed_device: bool
    """Whether it lies on another kind of device than it was offered on."""


class SourcePayload(Protocol):
    """The end that yields chunks."""

    plan: ImagePlan

    def staging(self, nbytes: int) -> Any | None:
        """Memory to stage a chunk in that no host memory can stand for. None: any of the host's will do."""

    def stage(self, chunk: Chunk, take_staging: Callable[[], Bytes], takes_parts: bool = False) -> Any:
        """The bytes of a chunk, uint8 [chunk.nbytes]: in memory got from `take_staging`, or where they already are if
        all of them may leave as they are. They stay unchanged until the send completes. Of a view: a Shown.
        `takes_parts`: a list of memoryviews will do, which lie apart."""

    def settling(self) -> None:
        """The transfer has failed and is being drained."""

    def release(self, *, keep: bool) -> None:
        """The transfer is over and nothing refers to the memory any more."""


class TargetPayload(Protocol):
    """The end that takes chunks. Nothing of it is visible to anyone before the transfer commits."""

    @property
    def plan(self) -> ImagePlan:
        """What it takes."""

    def reserve(self) -> None:
        """Take the memory. Raises ArenaFull."""

    def memory(self, chunk: Chunk) -> Any:
        """Where a chunk lands: writable uint8 [chunk.nbytes]. Of a view: a View."""

    def arrived(self, chunk: Chunk) -> None:
        """A chunk is in its memory; its checksum has been computed, not yet compared."""

    def check_index(self) -> None:
        """Validate block_table and seq_ptr, and that no page is sent for nothing. Raises InvalidContents (V1-V9)."""

    def check_contents(self) -> None:
        """Validate parameters and pools, clear what is left to clear. Raises InvalidContents (V11-V14)."""

    def summary(self) -> TargetSummary:
        """After check_contents."""

    def settling(self) -> None:
        """The transfer has failed; the peer may still write: the memory is in quarantine until `release`."""

    def release(self, *, keep: bool) -> None:
        """Nothing writes any more. `keep`: the memory is the snapshot's now; else it is free."""


def scrub_segment(plan: ImagePlan, segment: Segment, memory: Bytes, live: npt.NDArray[np.uint32]) -> int:
    """Clear the dead slots of the pages in a segment; pools whose pages are not whole bytes wait for their end."""
    page_bytes = plan.descriptors[segment.tensor].page_bytes
    if page_bytes is None:
        return 0
    return scrub(plan.descriptors[segment.tensor], memory, live, segment.buffer_offset // page_bytes)


def finish_contents(plan: ImagePlan, buffers: Callable[[int], list[Bytes]], live: npt.NDArray[np.uint32]) -> int:
    """Validate all parameters and pools, then clear what is not clear; how many dirty dead slots that found."""
    dirty = 0
    checked = [
        (descriptor, buffers(tensor))
        for tensor, descriptor in enumerate(plan.descriptors)
        if not takes_any_bytes(descriptor)
    ]
    for descriptor, parts in checked:
        check_parameters(descriptor, parts, live)
        check_pool(descriptor, parts[0], live)
    for descriptor, parts in checked:
        if descriptor.page_bytes is None:
            dirty += scrub(descriptor, parts[0], live)
        dirty += scrub_parameters(descriptor, parts, live)
    return dirty


def summarise(
    plan: ImagePlan, structure: BlockStructure, live: npt.NDArray[np.uint32], dirty: int, place: Place = HOST
) -> TargetSummary:
    """The summary of a complete snapshot; descriptors as the memory it lies in really is."""
    dead = structure.num_pages * structure.page_size - int(live.sum(dtype=np.uint64))
    return TargetSummary(
        descriptors=tuple(
            change_each(
                plan.descriptors, partial(held_in, device_tag=place.device_tag, memory_class=place.memory_class)
            )
        ),
        logical_page_count=structure.total_logical_pages,
        distinct_page_count=structure.num_pages,
        dead_slot_count=dead * len(plan.descriptors),
        dirty_dead_slot_count=dirty,
        wire_bytes=plan.wire_bytes,
        mapped_bytes=plan.mapped_bytes,
        changed_device=any(descriptor.device_tag != place.device_tag for descriptor in plan.descriptors),
    )


def held_in(descriptor: Descriptor, *, device_tag: int, memory_class: int = STANDARD) -> Descriptor:
    """The descriptor with handles of page-aligned memory of this kind, all work on it done."""
    handles = tuple(
        [BufferHandle(item.byte_size, PAGE_BYTES, device_tag, 0, memory_class) for item in descriptor.buffers]
    )
    return descriptor if handles == descriptor.buffers else replace(descriptor, buffers=handles)
