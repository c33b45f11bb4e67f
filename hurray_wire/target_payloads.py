"""Target payloads: an image to keep, a view of one, pages of the caller's. See `payload`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hurray_wire.destination import Destination
from hurray_wire.errors import ArenaFull
from hurray_wire.image import INDEX, Chunk, ImagePlan
from hurray_wire.memory import HOST, Place, copy_into
from hurray_wire.pages import read_index, scrub_parameters
from hurray_wire.payload import Bytes, TargetSummary, finish_contents, scrub_segment, summarise
from hurray_wire.policy import STRICT, Policy
from hurray_wire.validate import BlockStructure, Counts, check_parameters
from hurray_wire.view import View


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
    def index(self) -> Bytes:
        """The index chunks."""
        assert self.image is not None
        last = self.plan.chunks[self.plan.index_chunk_count - 1]
        return self.image[: last.offset + last.nbytes]

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
        count = len(self.plan.descriptors[tensor].buffers)
        return tuple([self.buffer(tensor, number) for number in range(3, count)]) if count > 3 else ()

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
        self._summary: TargetSummary | None = None

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
        count = len(self.plan.descriptors[tensor].buffers)
        return tuple([self.buffer(tensor, number) for number in range(3, count)]) if count > 3 else ()

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
        assert self.structure is not None
        self._summary = summarise(self.plan, self.structure, self._live, 0)

    def summary(self) -> TargetSummary:
        """See TargetPayload."""
        assert self._summary is not None, "not before the contents are checked"
        return self._summary

    def settling(self) -> None:
        """Nothing to do: what is mapped is the source's."""

    def release(self, *, keep: bool) -> None:
        """What is mapped stays so while an array of it lives."""
        if not keep:
            self._view.memory = None


class ScatterTarget:
    """Target payload that puts pages straight into a caller's paged caches, whatever its own tables say.

    Memory of `allocate` holds the index, and on the host all else; parameters and the chunks under way are at `place`,
    where the caches are. The caller's pages are untouched until the index is valid; from then on a failure leaves them
    undefined, and `release` clears them.
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
        beside = self._allocate if self._place is HOST else self._place.scratch
        for tensor, descriptor in enumerate(self.plan.descriptors):
            for number, handle in enumerate(descriptor.buffers[3:], 3):
                self._small[tensor, number] = _allocated(beside, handle.byte_size)

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
        self._place.enter()
        for tensor, descriptor in enumerate(self.plan.descriptors):
            parameters = [self._small[tensor, number] for number in range(3, len(descriptor.buffers))]
            buffers = (None, None, None, *parameters)
            check_parameters(descriptor, buffers, self._live)
            self._dirty += scrub_parameters(descriptor, buffers, self._live)
            self._destination.set_parameters(tensor, parameters)
        self._destination.finish()
        self._place.settle()

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
