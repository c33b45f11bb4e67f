"""What a transfer moves: the two ends of an image, one that yields chunks and one that takes them.

A source payload stages a chunk of a snapshot for sending; a target payload says where a chunk lands, looks at what
arrived, and ends up with a valid, scrubbed snapshot. Pure work on arrays: no transport, no clock. All methods are
called in the data-plane thread, in the order that the session machines prescribe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hurray_wire.alike import change_each
from hurray_wire.descriptor import Descriptor
from hurray_wire.destination import Destination
from hurray_wire.errors import ArenaFull
from hurray_wire.image import INDEX, Chunk, ImagePlan, Segment
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.memory import HOST, STANDARD, Place, copy_into
from hurray_wire.pages import read_index, scrub, scrub_parameters
from hurray_wire.policy import STRICT, Policy
from hurray_wire.prepare import PreparedSnapshot
from hurray_wire.sections import BufferHandle
from hurray_wire.validate import BlockStructure, Counts, check_parameters, check_pool, takes_any_bytes
from hurray_wire.view import Shown, View

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


class SnapshotSource:
    """Source payload of a caller's snapshot: pages are gathered, cleared of dead slots, and sent from staging memory;
    adjacent pages without a dead slot are sent from where they are.

    `place` is where the work is done: of pages on a GPU, that one. There chunks are staged, too, unless `in_host`."""

    def __init__(
        self, prepared: PreparedSnapshot, plan: ImagePlan, place: Place = HOST, *, in_host: bool = False
    ) -> None:
        self.plan = plan
        self._prepared = prepared
        self._place = place
        self._in_host = in_host or place is HOST

    def staging(self, nbytes: int) -> Any | None:
        """See SourcePayload."""
        return None if self._in_host else self._place.take(nbytes)

    def stage(self, chunk: Chunk, take_staging: Callable[[], Bytes], takes_parts: bool = False) -> Any:
        """See SourcePayload."""
        if self._place is HOST and takes_parts:
            parts = self._parts(chunk, take_staging)
            if parts is not None:
                return parts
        self._place.enter()
        staged = self._stage(chunk, take_staging)
        self._place.settle()  # what is sent is there, whoever reads it: the wire knows no streams
        return staged

    def _stage(self, chunk: Chunk, take_staging: Callable[[], Bytes]) -> Any:
        if len(chunk.segments) == 1:
            direct = self._direct(chunk.segments[0])
            if direct is not None:
                return direct
        staging = take_staging()[: chunk.nbytes]
        end = 0
        for segment in chunk.segments:
            staging[end : segment.chunk_offset] = 0  # the gap: staging memory held other bytes before
            end = segment.chunk_offset + segment.nbytes
            self._fill(segment, staging[segment.chunk_offset : end])
        return staging

    def settling(self) -> None:
        """Nothing to do: the pages are the caller's."""

    def release(self, *, keep: bool) -> None:
        """Nothing to do: the pages are the caller's."""

    def _parts(self, chunk: Chunk, take_staging: Callable[[], Bytes]) -> list[memoryview] | None:
        pages = self._pages(chunk.segments[0]) if len(chunk.segments) == 1 else None
        return None if pages is None else self._prepared.parts(chunk.segments[0].tensor, *pages, take_staging)

    def _direct(self, segment: Segment) -> Any | None:
        pages = self._pages(segment)
        run = None if pages is None else self._prepared.direct_run(segment.tensor, *pages)
        return None if run is None else np.frombuffer(run, np.uint8)

    def _pages(self, segment: Segment) -> tuple[int, int] | None:
        """First page and count of a segment of whole pages; None for any other."""
        if segment.tensor == INDEX or segment.buffer != 0:
            return None
        page_bytes = self.plan.descriptors[segment.tensor].page_bytes
        if page_bytes is None or segment.buffer_offset % page_bytes or segment.nbytes % page_bytes:
            return None
        return segment.buffer_offset // page_bytes, segment.nbytes // page_bytes

    def _fill(self, segment: Segment, out: Bytes) -> None:
        if segment.tensor != INDEX and segment.buffer == 0:
            self._prepared.read(segment.tensor, segment.buffer_offset, out)
        else:
            whole = self._prepared.buffer(max(segment.tensor, 0), segment.buffer)
            copy_into(out, whole[segment.buffer_offset : segment.buffer_offset + segment.nbytes])


class StagedSource:
    """Source payload of a small snapshot that is copied as a whole, at once: `chunks` are its bytes. From then on
    nothing refers to the memory that they came from."""

    def __init__(self, payload: SourcePayload) -> None:
        self.plan = payload.plan
        self.chunks = [_copied(payload, chunk) for chunk in self.plan.chunks]
        self.all_staged = False
        """Whether the last chunk was staged, which is sent next: any thread may ask."""

    def staging(self, nbytes: int) -> Any | None:  # noqa: ARG002 -- SourcePayload's
        """See SourcePayload."""
        return None

    def stage(self, chunk: Chunk, take_staging: Callable[[], Bytes], takes_parts: bool = False) -> Any:  # noqa: ARG002
        """See SourcePayload."""
        self.all_staged = chunk.index + 1 == len(self.chunks)
        return self.chunks[chunk.index]

    def settling(self) -> None:
        """Nothing to do: the memory is nobody else's."""

    def release(self, *, keep: bool) -> None:
        """Nothing to do: it is freed with its last reference."""


def _copied(payload: SourcePayload, chunk: Chunk) -> Any:
    own = payload.staging(chunk.nbytes)
    memory = np.empty(chunk.nbytes, dtype=np.uint8) if own is None else own
    staged = payload.stage(chunk, lambda: memory)
    # On a GPU nothing is sent from where it lies.
    return staged if own is not None or np.may_share_memory(staged, memory) else staged.copy()


class ImageSource:
    """Source payload of a held image, which is compact and clean already: chunks are sent from where they are, or shown
    there (`shown`, of the whole image, where the plan has a view). From a GPU they are staged, on it or, `in_host`, in
    host memory: over cuda_ipc a peer may see all of the allocation that it is sent from.

    `on_release` is called once, when nothing refers to the image any more.
    """

    def __init__(
        self,
        plan: ImagePlan,
        image: Bytes,
        on_release: Callable[[], None],
        shown: Shown | None = None,
        *,
        place: Place = HOST,
        in_host: bool = False,
    ) -> None:
        assert (plan.view_chunk is None) <= (shown is None), "a view that the plan does not have"
        self.plan = plan
        self._image = image
        self._on_release = on_release
        self._shown = shown
        self._place = place
        self._in_host = in_host

    def staging(self, nbytes: int) -> Any | None:
        """See SourcePayload."""
        return None if self._in_host or self._place is HOST else self._place.take(nbytes)

    def stage(self, chunk: Chunk, take_staging: Callable[[], Bytes], takes_parts: bool = False) -> Any:  # noqa: ARG002
        """See SourcePayload."""
        if chunk.index == self.plan.view_chunk:
            return self._shown
        part = self._image[chunk.offset : chunk.offset + chunk.nbytes]
        if self._place is HOST:
            return part
        self._place.enter()
        staging = take_staging()[: chunk.nbytes]
        copy_into(staging, part)
        self._place.settle()
        return staging

    def settling(self) -> None:
        """Nothing to do: the image is not written to."""

    def release(self, *, keep: bool) -> None:  # noqa: ARG002 -- SourcePayload's
        """See SourcePayload."""
        if self._shown is not None:
            self._shown.pin.close()  # if it was not given away
        self._on_release()


class ImageMemory(Protocol):
    """Memory for one image: an arena's extent, or a block of its own."""

    def reserve(self, nbytes: int) -> Bytes:
        """Page-aligned memory. Raises ArenaFull."""

    def settling(self) -> None:
        """It is in quarantine: not in use, not free."""

    def release(self, *, keep: bool) -> None:
        """It is a snapshot's, or free."""


class ImageTarget:
    """Target payload that keeps the snapshot as an image: pools are scrubbed chunk by chunk as they arrive.

    `place` is where the memory is. `in_host`: what arrives for a GPU lands in host memory and is copied."""

    def __init__(
        self,
        plan: ImagePlan | None,
        token_counts: Sequence[int] | Counts,
        memory: ImageMemory,
        policy: Policy = STRICT,
        *,
        place: Place = HOST,
        in_host: bool = False,
    ) -> None:
        """`plan` None: see LateImageTarget."""
        self._place = place
        self._landing = Landing(lambda: self.plan.max_chunk_bytes) if in_host and place is not HOST else None
        self.structure: BlockStructure | None = None
        self.image: Bytes | None = None
        self._plan = plan
        self._token_counts = token_counts
        self._memory = memory
        self._policy = policy
        self._live: npt.NDArray[np.uint32] | None = None
        self._has_dead = True
        self._dirty = 0
        self._summary: TargetSummary | None = None

    @property
    def plan(self) -> ImagePlan:
        """See TargetPayload."""
        assert self._plan is not None
        return self._plan

    def reserve(self) -> None:
        """See TargetPayload."""
        self._place.enter()
        self.image = self._memory.reserve(self.plan.image_bytes)

    def memory(self, chunk: Chunk) -> Any:
        """See TargetPayload."""
        if self._landing is not None:
            return self._landing.take(chunk)
        # The peer writes there outside the order of any stream.
        self._place.settle()
        return self._part(chunk)

    def _part(self, chunk: Chunk) -> Any:
        assert self.image is not None
        return self.image[chunk.offset : chunk.offset + chunk.nbytes]

    def arrived(self, chunk: Chunk) -> None:
        """Clear the gaps and the dead slots of the whole pages in it."""
        self._place.enter()
        memory = self._part(chunk)
        if self._landing is not None:
            copy_into(memory, self._landing.landed(chunk))
            self._place.settle()
            self._landing.give_back(chunk)
        end = 0
        for segment in chunk.segments:
            memory[end : segment.chunk_offset] = 0
            end = segment.chunk_offset + segment.nbytes
            if self._has_dead and segment.tensor != INDEX and segment.buffer == 0:
                self._dirty += scrub_segment(self.plan, segment, memory[segment.chunk_offset : end], self.live)

    @property
    def live(self) -> npt.NDArray[np.uint32]:
        """Live slots per page; known once the index is checked."""
        assert self._live is not None, "pages before the index"
        return self._live

    def buffer(self, tensor: int, number: int) -> Bytes:
        """One buffer of one tensor, in the image."""
        assert self.image is not None
        offset = self.plan.buffer_offsets[tensor][number]
        return self.image[offset : offset + self.plan.descriptors[tensor].buffers[number].byte_size]

    def buffers(self, tensor: int) -> list[Bytes]:
        """All buffers of one tensor."""
        return [self.buffer(tensor, number) for number in range(len(self.plan.descriptors[tensor].buffers))]

    def parameters(self, tensor: int) -> tuple[Bytes, ...]:
        """The buffers of one tensor from 3 on."""
        return tuple([self.buffer(tensor, number) for number in range(3, len(self.plan.descriptors[tensor].buffers))])

    def check_index(self) -> None:
        """See TargetPayload."""
        # Private copies would cost little, and are not needed: nobody but the transport can write here, and it is done.
        self._place.enter()
        self.structure, self._live = read_index(
            self.plan.descriptors[0], self.buffer(0, 1), self.buffer(0, 2), self._token_counts, self._policy
        )
        self._has_dead = bool((self._live < self.structure.page_size).any())

    def check_contents(self) -> None:
        """See TargetPayload."""
        self._place.enter()
        self._dirty += finish_contents(self.plan, self.buffers, self.live)
        self._clear_gaps()
        assert self.structure is not None
        self._summary = summarise(self.plan, self.structure, self.live, self._dirty, self._place)
        self._place.settle()

    def summary(self) -> TargetSummary:
        """See TargetPayload."""
        assert self._summary is not None, "not before the contents are checked"
        return self._summary

    def settling(self) -> None:
        """See TargetPayload."""
        self._memory.settling()

    def release(self, *, keep: bool) -> None:
        """See TargetPayload."""
        if not keep:
            self.image = None
        self._memory.release(keep=keep)

    def _clear_gaps(self) -> None:
        """Gaps between chunks were never written by the peer, but may hold what the memory held before."""
        assert self.image is not None
        end = 0
        for run in self.plan.chunks.runs:
            self.image[end : run.first.offset] = 0
            end = run.first.offset + run.count * run.first.nbytes
        self.image[end:] = 0


class LateImageTarget(ImageTarget):
    """An image target that reads the offer when it is asked for its plan, which is after the source was told to begin:
    until then the size of the image is enough. For offers that somebody else has checked."""

    def __init__(
        self,
        image_bytes: int,
        read: Callable[[], tuple[ImagePlan, Counts]],
        memory: ImageMemory,
        *,
        place: Place = HOST,
        in_host: bool = False,
    ) -> None:
        super().__init__(None, (), memory, place=place, in_host=in_host)
        self._image_bytes = image_bytes
        self._read = read

    @property
    def plan(self) -> ImagePlan:
        """See TargetPayload."""
        if self._plan is None:
            self._plan, self._token_counts = self._read()
            assert self._plan.image_bytes == self._image_bytes
        return self._plan

    def reserve(self) -> None:
        """See TargetPayload."""
        self._place.enter()
        self.image = self._memory.reserve(self._image_bytes)


class Landing:
    """Host memory that chunks land in on their way elsewhere, used again and again: `nbytes` tells what the largest
    takes."""

    def __init__(self, nbytes: Callable[[], int], allocate: Callable[[int], Bytes] = HOST.take) -> None:
        self._nbytes = nbytes
        self._allocate = allocate
        self._spare: list[Bytes] = []
        self._taken: dict[int, Bytes] = {}

    def take(self, chunk: Chunk) -> Bytes:
        """Where a chunk lands."""
        buffer = self._spare.pop() if self._spare else _allocated(self._allocate, self._nbytes())
        self._taken[chunk.index] = buffer
        return buffer[: chunk.nbytes]

    def landed(self, chunk: Chunk) -> Bytes:
        """What has arrived."""
        return self._taken[chunk.index][: chunk.nbytes]

    def give_back(self, chunk: Chunk) -> None:
        """Nobody needs it any more."""
        self._spare.append(self._taken.pop(chunk.index))


class OwnMemory:
    """Image memory of its own, outside any arena: what a client's get keeps."""

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        self._allocate = allocate

    def reserve(self, nbytes: int) -> Bytes:
        """See ImageMemory."""
        return _allocated(self._allocate, nbytes)

    def settling(self) -> None:
        """Nothing to do: it is freed with its last reference."""

    def release(self, *, keep: bool) -> None:
        """Nothing to do: it is freed with its last reference."""


class ViewTarget:
    """Target payload that keeps the snapshot where it is: the pages are mapped, everything else is copied.

    Nothing that the source can still write is validated: index and parameters are validated as private copies, by the
    rules that every target holds. Pages are neither validated nor scrubbed again; the source has done both before it
    committed them and stays their authority (pools that break rules by themselves are no views, `is_viewable`).
    """

    def __init__(
        self,
        plan: ImagePlan,
        token_counts: Sequence[int] | Counts,
        allocate: Callable[[int], Bytes],
        policy: Policy = STRICT,
    ) -> None:
        assert plan.view_chunk is not None
        self.plan = plan
        self.structure: BlockStructure | None = None
        self._token_counts = token_counts
        self._allocate = allocate
        self._policy = policy
        self._view = View(plan.image_bytes)
        self._index_bytes = plan.chunks[plan.view_chunk].offset
        self._index: Bytes | None = None
        self._parameters: dict[tuple[int, int], Bytes] = {}
        self._live: npt.NDArray[np.uint32] | None = None

    def reserve(self) -> None:
        """See TargetPayload: the index; parameters are copied when they are there."""
        self._index = _allocated(self._allocate, self._index_bytes)

    def memory(self, chunk: Chunk) -> Any:
        """See TargetPayload."""
        if chunk.index == self.plan.view_chunk:
            return self._view
        assert self._index is not None
        return self._index[chunk.offset : chunk.offset + chunk.nbytes]

    def arrived(self, chunk: Chunk) -> None:
        """Nothing to do."""

    def buffer(self, tensor: int, number: int) -> Bytes:
        """One buffer of one tensor: a page pool in the view, read-only; any other private."""
        if (tensor, number) in self._parameters:
            return self._parameters[tensor, number]
        memory = self._view.memory if number == 0 else self._index
        assert memory is not None, "not there yet"
        offset = self.plan.buffer_offsets[tensor][number]
        return memory[offset : offset + self.plan.descriptors[tensor].buffers[number].byte_size]

    def buffers(self, tensor: int) -> list[Bytes]:
        """All buffers of one tensor."""
        return [self.buffer(tensor, number) for number in range(len(self.plan.descriptors[tensor].buffers))]

    def parameters(self, tensor: int) -> tuple[Bytes, ...]:
        """The buffers of one tensor from 3 on."""
        return tuple([self.buffer(tensor, number) for number in range(3, len(self.plan.descriptors[tensor].buffers))])

    def check_index(self) -> None:
        """See TargetPayload."""
        self.structure, self._live = read_index(
            self.plan.descriptors[0], self.buffer(0, 1), self.buffer(0, 2), self._token_counts, self._policy
        )

    def check_contents(self) -> None:
        """Copy the parameters and validate them. See TargetPayload."""
        assert self._live is not None
        assert self._view.memory is not None
        for tensor, descriptor in enumerate(self.plan.descriptors):
            if len(descriptor.buffers) == 3:
                continue
            for number, handle in enumerate(descriptor.buffers[3:], 3):
                offset = self.plan.buffer_offsets[tensor][number]
                copy = _allocated(self._allocate, handle.byte_size)
                copy[:] = self._view.memory[offset : offset + handle.byte_size]
                self._parameters[tensor, number] = copy
            buffers = self.buffers(tensor)
            check_parameters(descriptor, buffers, self._live)
            scrub_parameters(descriptor, buffers, self._live)

    def summary(self) -> TargetSummary:
        """See TargetPayload."""
        assert self.structure is not None
        assert self._live is not None
        return summarise(self.plan, self.structure, self._live, 0)

    def settling(self) -> None:
        """Nothing to do: what is mapped is the source's."""

    def release(self, *, keep: bool) -> None:
        """What is mapped stays so while an array of it lives."""
        if not keep:
            self._view.memory = None


class ScatterTarget:
    """Target payload that puts pages straight into a caller's paged caches, whatever its own tables say.

    `memory` holds index and parameters, and the chunks under way. The caller's pages are untouched until the index is
    valid; from then on a failure leaves them undefined, and `release` clears them.
    """

    def __init__(
        self,
        plan: ImagePlan,
        token_counts: Sequence[int] | Counts,
        destination: Destination,
        allocate: Callable[[int], Bytes],
        policy: Policy = STRICT,
        *,
        place: Place = HOST,
        in_host: bool = False,
    ) -> None:
        self.plan = plan
        self.structure: BlockStructure | None = None
        self._token_counts = token_counts
        self._destination = destination
        self._allocate = allocate
        self._policy = policy
        self._place = place
        self._live: npt.NDArray[np.uint32] | None = None
        self._landing = Landing(lambda: plan.max_chunk_bytes, allocate if in_host or place is HOST else place.take)
        self._small: dict[tuple[int, int], Bytes] = {}
        self._dirty = 0
        self._touched = False

    def reserve(self) -> None:
        """See TargetPayload: index and parameters; landing memory is taken as chunks are posted."""
        for number, handle in enumerate(self.plan.descriptors[0].buffers[1:3], 1):
            self._small[INDEX, number] = _allocated(self._allocate, handle.byte_size)
        for tensor, descriptor in enumerate(self.plan.descriptors):
            for number, handle in enumerate(descriptor.buffers[3:], 3):
                self._small[tensor, number] = _allocated(self._allocate, handle.byte_size)

    def memory(self, chunk: Chunk) -> Any:
        """See TargetPayload."""
        return self._landing.take(chunk)

    def arrived(self, chunk: Chunk) -> None:
        """Scatter its pages, keep its parameters."""
        self._place.enter()
        landed = self._landing.landed(chunk)
        for segment in chunk.segments:
            part = landed[segment.chunk_offset : segment.chunk_offset + segment.nbytes]
            if segment.tensor != INDEX and segment.buffer == 0:
                assert self._live is not None, "pages before the index"
                self._touched = True
                self._dirty += scrub_segment(self.plan, segment, part, self._live)
                page_bytes = self.plan.descriptors[segment.tensor].page_bytes
                assert page_bytes is not None, "the destination refused such pages"
                self._destination.scatter(segment.tensor, segment.buffer_offset // page_bytes, part)
            else:
                kept = self._small[segment.tensor, segment.buffer]
                copy_into(kept[segment.buffer_offset : segment.buffer_offset + segment.nbytes], part)
        self._place.settle()  # before the next chunk lands there
        self._landing.give_back(chunk)

    def check_index(self) -> None:
        """See TargetPayload."""
        self.structure, self._live = read_index(
            self.plan.descriptors[0], self._small[INDEX, 1], self._small[INDEX, 2], self._token_counts, self._policy
        )
        self._destination.bind(self.structure)

    def check_contents(self) -> None:
        """See TargetPayload."""
        assert self._live is not None
        for tensor, descriptor in enumerate(self.plan.descriptors):
            parameters = [self._small[tensor, number] for number in range(3, len(descriptor.buffers))]
            buffers = (None, None, None, *parameters)
            check_parameters(descriptor, buffers, self._live)
            self._dirty += scrub_parameters(descriptor, buffers, self._live)
            self._destination.set_parameters(tensor, parameters)
        self._destination.finish()

    def summary(self) -> TargetSummary:
        """See TargetPayload."""
        assert self.structure is not None
        assert self._live is not None
        return summarise(self.plan, self.structure, self._live, self._dirty, self._place)

    def settling(self) -> None:
        """Nothing to do: landing memory is freed with its last reference, and the pages are the caller's."""

    @property
    def touched_pages(self) -> npt.NDArray[np.unsignedinteger[Any]] | None:
        """The caller's pages that a failure leaves cleared, whatever they held; None while none was written to."""
        return self._destination.pages if self._touched else None

    def release(self, *, keep: bool) -> None:
        """Clear the named pages if the transfer failed after it had touched any."""
        if not keep and self._touched:
            self._place.enter()
            self._destination.clear()
            self._place.settle()


def _allocated(allocate: Callable[[int], Bytes], nbytes: int) -> Bytes:
    """Memory of this process. Raises ArenaFull where there is none."""
    try:
        return allocate(nbytes)
    except (OSError, MemoryError) as error:
        raise ArenaFull(f"this process cannot have memory for the snapshot: {error}", offered=nbytes) from None


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
