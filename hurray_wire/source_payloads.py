"""Source payloads: a caller's snapshot, one that was copied as a whole, an image that is held. See `payload`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hurray_wire.image import INDEX, Chunk, ImagePlan, Segment
from hurray_wire.memory import HOST, Place, copy_into
from hurray_wire.payload import Bytes, SourcePayload
from hurray_wire.prepare import PreparedSnapshot
from hurray_wire.view import Shown


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
