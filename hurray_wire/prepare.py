"""The source's side of a transfer: a snapshot reduced to what crosses the wire, and its bytes on demand.

Order at the source: compact, neutralise, validate, send. Dead slots are cleared here, before a byte leaves: at the
receiver is late. The caller's pools are read, never written, so everything with a dead slot goes through the buffer
that the transfer gives; a run of adjacent pages without any may be sent from where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .alike import change_each
from .cuda import place_of
from .descriptor import Descriptor
from .memory import copy_into, empty_beside, is_on_device, to_host
from .packing import E8M0_TAG, clear_bits
from .pages import (
    Bytes,
    Compaction,
    clear_dead,
    compact,
    compact_descriptor,
    compact_parameters,
    gather,
    repack,
    scrub_parameters,
)
from .snapshot import KVSnapshot, KVTensor
from .validate import check_parameters, check_pool, takes_any_bytes

PART_MIN_BYTES: Final = 16 << 10
"""Where parts are shorter than this on average, gathering them costs less than handling each."""

KEPT_PARTS: Final = 1 << 15
"""Parts of a tensor that are remembered for the next one: some megabytes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where the parts of a range of pages lie in a pool, in bytes; which of them is a page with dead slots, by number
    and page of the range."""

    spans: list[tuple[int, int]]
    partial: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTensor:
    """One tensor as it crosses the wire: the compact descriptor, and the parameters, compacted and neutralised.

    `packed_pool` is the whole compact pool, only where pages are no whole bytes. Both are there once they were copied.
    """

    descriptor: Descriptor
    parameters: tuple[Bytes, ...] = ()
    packed_pool: Bytes | None = None


class PreparedSnapshot:
    """What a source sends of a snapshot. Page numbers here are compact ones, 0 to num_pages - 1.

    `tensors` are in the snapshot's order. `block_table` and `seq_ptr` are the index buffers that all of them share,
    as uint8. Holds the snapshot: its pages are read by `fill` and `direct_run`, which raise Misuse once it is closed.
    """

    def __init__(self, snapshot: KVSnapshot, compaction: Compaction, descriptors: Sequence[Descriptor]) -> None:
        """Use `prepare`."""
        self.snapshot = snapshot
        self.compaction = compaction
        self.tensors = tuple(PreparedTensor(descriptor) for descriptor in descriptors)
        self._copied_count = 0
        self.structure = compaction.structure
        wire = self.tensors[0].descriptor.index_dtype
        self.block_table: Bytes = self.structure.block_table.astype(wire, copy=False).view(np.uint8)
        self.seq_ptr: Bytes = self.structure.seq_ptr.astype(wire, copy=False).view(np.uint8)
        self._all_live = bool((compaction.live == self.structure.page_size).all())
        self._page_ids = compaction.pages.view(np.intp)
        self._page_bytes = [tensor.descriptor.page_bytes for tensor in self.tensors]
        self._is_checked = [not takes_any_bytes(tensor.descriptor) for tensor in self.tensors]
        self._layouts: dict[tuple[int, int, int], _Layout] = {}
        self._kept_parts = 0

    # Differences of prefix sums say in constant time whether a run has a gap or a dead slot.

    @cached_property
    def _gaps(self) -> npt.NDArray[np.uint32]:
        return _prefix_sums(np.diff(self.compaction.pages) != 1)

    @cached_property
    def _partial(self) -> npt.NDArray[np.uint32]:
        return _prefix_sums(self.compaction.live != self.structure.page_size)

    @property
    def num_pages(self) -> int:
        """Distinct pages."""
        return self.structure.num_pages

    @property
    def nbytes(self) -> int:
        """Bytes that cross the wire: pools, parameters, and the index buffers once."""
        own = sum(sum(handle.byte_size for handle in tensor.descriptor.buffers) for tensor in self.tensors)
        index = self.block_table.nbytes + self.seq_ptr.nbytes
        return own - (len(self.tensors) - 1) * index

    def copy_small(self, tensor_count: int) -> None:
        """Copy, neutralise and validate what is not read page by page of the first `tensor_count` tensors: parameters,
        and pools whose pages are no whole bytes. Their contents are final now. Raises InvalidContents (V11, V12).
        """
        tensors = list(self.tensors)
        with place_of(self.snapshot.device).work():
            for number in range(self._copied_count, tensor_count):
                tensor, descriptor = self.snapshot.tensors[number], tensors[number].descriptor
                if descriptor.quantization is None and self._page_bytes[number] is not None:
                    continue  # pages are all it has
                parameters = compact_parameters(tensor.descriptor, tensor.buffers, self.compaction)
                buffers = (None, None, None, *parameters)
                scrub_parameters(descriptor, buffers, self.compaction.live)
                check_parameters(descriptor, buffers, self.compaction.live)
                packed = _packed_pool(tensor, descriptor, self.compaction)
                tensors[number] = PreparedTensor(descriptor, tuple(parameters), packed)
        self.tensors = tuple(tensors)
        self._copied_count = max(self._copied_count, tensor_count)

    def buffer(self, tensor_index: int, number: int) -> Bytes:
        """A whole buffer that is staged already, by the format's index: all but page pools of whole-byte pages."""
        if number in (1, 2):
            return self.block_table if number == 1 else self.seq_ptr
        tensor = self.tensors[tensor_index]
        if number:
            return tensor.parameters[number - 3]
        assert tensor.packed_pool is not None, "the pages of this pool are gathered by fill"
        return tensor.packed_pool

    def fill(self, tensor_index: int, first_page: int, page_count: int, out: Any) -> None:
        """Write compact pages [first_page, first_page + page_count) of a tensor to `out`, dead slots cleared.

        `out` is a contiguous uint8 array of page_count * page_bytes, on the device of the pool or on the host.
        Not for pools whose pages are no whole bytes: see `read`. Raises InvalidContents (V14) for a live element that
        has no value.
        """
        page_bytes = self._page_bytes[tensor_index]
        assert page_bytes is not None, "pages of this tensor are no whole bytes"
        assert 0 <= first_page <= first_page + page_count <= self.num_pages
        pool = self._pool(tensor_index)
        if is_on_device(pool) and not is_on_device(out):
            with place_of(self.snapshot.device).work():
                there = empty_beside(pool, out.nbytes)
                self.fill(tensor_index, first_page, page_count, there)
                copy_into(out.reshape(-1), there)
            return
        rows = out.reshape(page_count, page_bytes)
        gather(pool, self._page_ids[first_page : first_page + page_count], rows)
        descriptor = self.tensors[tensor_index].descriptor
        if not self._all_live:
            clear_dead(descriptor, rows, self.compaction.live, first_page)
        if self._is_checked[tensor_index]:
            check_pool(descriptor, rows, self.compaction.live, first_page)

    def read(self, tensor_index: int, offset: int, out: Any) -> None:
        """Write bytes [offset, offset + len(out)) of a tensor's compact page pool to `out` (uint8), dead slots cleared.

        For chunks that are byte ranges: of a packed pool, or of pages larger than a chunk. Whole pages inside the
        range are gathered straight into `out`.
        """
        tensor = self.tensors[tensor_index]
        target = out.reshape(-1)
        end = offset + target.size
        assert 0 <= offset <= end <= tensor.descriptor.buffers[0].byte_size
        if tensor.packed_pool is not None:
            copy_into(target, tensor.packed_pool[offset:end])
            return
        page_bytes = self._page_bytes[tensor_index]
        while offset < end:
            assert page_bytes
            page, skipped = divmod(offset, page_bytes)
            whole = (end - offset) // page_bytes
            if skipped or not whole:
                size = min(page_bytes - skipped, end - offset)
                self._fill_part(tensor_index, page, skipped, target[:size])
            else:
                size = whole * page_bytes
                self.fill(tensor_index, page, whole, target[:size])
            target = target[size:]
            offset += size

    def direct_run(self, tensor_index: int, first_page: int, page_count: int) -> memoryview | None:
        """These compact pages where they lie, or None unless they are one adjacent run there without a dead slot.

        A read-only view of the source's own host memory, page_count * page_bytes long. Nothing else is in it. Of a GPU
        there is none: whoever is sent memory there may see all of the allocation that it is in.
        """
        last = first_page + page_count - 1
        assert 0 <= first_page <= last < self.num_pages
        pool = self._host_pool(tensor_index)
        if (
            pool is None
            or self._gaps[last] != self._gaps[first_page]
            or self._partial[last + 1] != self._partial[first_page]
        ):
            return None
        start = int(self.compaction.pages[first_page])
        run = pool[start : start + page_count]
        check_pool(self.tensors[tensor_index].descriptor, run, self.compaction.live, first_page)
        return memoryview(run.reshape(-1)).toreadonly()  # type: ignore[arg-type]

    def parts(
        self, tensor_index: int, first_page: int, page_count: int, take_staging: Callable[[], Bytes]
    ) -> list[memoryview] | None:
        """These compact pages in parts, to be read one behind the other: runs without a dead slot where they lie, as
        read-only views of the source's own host memory; each other page cleared, in staging memory of page_count *
        page_bytes.

        None where the parts would be so short that gathering is less work, or where contents have to be validated.
        """
        last = first_page + page_count - 1
        assert 0 <= first_page <= last < self.num_pages
        pool, page_bytes = self._host_pool(tensor_index), self._page_bytes[tensor_index]
        if pool is None or not page_bytes or self._is_checked[tensor_index]:
            return None
        gap_count = int(self._gaps[last] - self._gaps[first_page])
        partial_count = int(self._partial[last + 1] - self._partial[first_page])
        if (gap_count + 2 * partial_count + 1) * PART_MIN_BYTES > page_count * page_bytes:
            return None
        layout = self._layout(first_page, page_count, page_bytes)
        whole = memoryview(pool.reshape(-1)).toreadonly()  # type: ignore[arg-type]
        parts = [whole[start:end] for start, end in layout.spans]
        if layout.partial:
            staging = take_staging()[: page_count * page_bytes].reshape(page_count, page_bytes)
            for part, page in layout.partial:
                self.fill(tensor_index, first_page + page, 1, staging[page : page + 1])
                parts[part] = memoryview(staging[page]).toreadonly()
        return parts

    def _layout(self, first_page: int, page_count: int, page_bytes: int) -> _Layout:
        """The same for every tensor whose pages are as large: worked out for the first, remembered for the others."""
        key = first_page, page_count, page_bytes
        known = self._layouts.get(key)
        if known is not None:
            return known
        ids = self._page_ids[first_page : first_page + page_count]
        is_partial = self.compaction.live[first_page : first_page + page_count] != self.structure.page_size
        begins = np.concatenate(([True], (ids[1:] != ids[:-1] + 1) | is_partial[1:] | is_partial[:-1]))
        starts = np.flatnonzero(begins)
        offsets = ids[starts] * page_bytes
        ends = offsets + np.diff(starts, append=page_count) * page_bytes
        partial = np.flatnonzero(is_partial[starts])
        layout = _Layout(
            list(zip(offsets.tolist(), ends.tolist(), strict=True)),
            list(zip(partial.tolist(), starts[partial].tolist(), strict=True)),
        )
        if self._kept_parts + len(layout.spans) <= KEPT_PARTS:
            self._kept_parts += len(layout.spans)
            self._layouts[key] = layout
        return layout

    def _host_pool(self, tensor_index: int) -> npt.NDArray[np.uint8] | None:
        """The pool, [num_pages, page_bytes], if its pages are whole bytes that lie in order in host memory."""
        pool = self._pool(tensor_index)
        return pool if isinstance(pool, np.ndarray) and pool.ndim == 2 and pool.flags.c_contiguous else None

    def _pool(self, tensor_index: int) -> Any:
        return self.snapshot.tensors[tensor_index].page_pool

    def _fill_part(self, tensor_index: int, page: int, skipped: int, target: Bytes) -> None:
        """Bytes of one page from `skipped` on, without gathering all of it where it is one piece."""
        descriptor = self.tensors[tensor_index].descriptor
        pool = self._pool(tensor_index)
        if descriptor.element_type.tag == E8M0_TAG or pool.ndim != 2 or not isinstance(pool, np.ndarray):
            whole = np.empty((1, descriptor.page_bytes or 0), dtype=np.uint8)
            self.fill(tensor_index, page, 1, whole)
            copy_into(target, whole[0, skipped : skipped + target.size])
            return
        source = pool[int(self.compaction.pages[page])]
        target[:] = source[skipped : skipped + target.size]
        slot_bits = descriptor.num_heads * descriptor.head_dim * descriptor.element_type.bits
        dead_from = int(self.compaction.live[page]) * slot_bits - 8 * skipped
        clear_bits(target, max(dead_from, 0), 8 * target.size)


def prepare(snapshot: KVSnapshot, *, contents_final: bool = True) -> PreparedSnapshot:
    """Compact and neutralise a snapshot and validate what will be sent.

    Parameters (and pools whose pages are no whole bytes) are copied now, pages when `fill` asks for them. Unless
    `contents_final`, nothing but the structure is read yet: `copy_small` is due for each tensor before it is sent.
    The descriptors name the kind of device that the pages are on.

    Raises InvalidContents (V11, V12) naming the entry.
    """
    compaction = compact(snapshot.structure)
    device_tag, _ = snapshot.device
    descriptors = list(
        change_each(
            (tensor.descriptor for tensor in snapshot.tensors),
            lambda descriptor: compact_descriptor(descriptor, compaction, device_tag=device_tag),
        )
    )
    prepared = PreparedSnapshot(snapshot, compaction, descriptors)
    if contents_final:
        prepared.copy_small(len(descriptors))
    return prepared


def _packed_pool(tensor: KVTensor, descriptor: Descriptor, compaction: Compaction) -> Bytes | None:
    if descriptor.page_bytes is not None:
        return None
    packed = repack(tensor.descriptor, to_host(tensor.page_pool), compaction.pages)
    clear_dead(descriptor, packed, compaction.live)
    check_pool(descriptor, packed, compaction.live)
    return packed


def _prefix_sums(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    sums = np.zeros(flags.size + 1, dtype=np.uint32)
    np.cumsum(flags, out=sums[1:])
    return sums
