"""The target's side of `get(into=)`: a caller's own pages, and where the pages of an offer go in them.

Until the first `scatter` nothing of the caller's is touched; after it, no page outside the tables is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .descriptor import Descriptor
from .dtypes import ElementType
from .errors import GeometryMismatch, InvalidSnapshot
from .memory import array_module, byte_view, device_of, empty_beside, is_on_device, on_device_of, to_host
from .packing import E8M0_NEUTRAL, E8M0_TAG
from .paged import (
    BlockTables,
    CacheKey,
    DeclaredCache,
    PageShape,
    Quantized,
    declare_caches,
    describe,
    read_tables,
    tensor_name,
)
from .pages import (
    PageIds,
    clear_dead,
    compact,
    fill_dead,
    gather,
    live_slots,
    scatter,
    slot_rows,
    trimmed_table,
)
from .parameters import Buffer, neutral_word, parameter_arrays
from .quantization import Parameter, PerBlockAffine, PerTensorAffine, Quantization
from .snapshot import KVSnapshot, describe_all
from .validate import (
    BlockStructure,
    Counts,
    Index,
    check_index,
    check_pool,
    check_structure,
    check_token_counts,
    pages_needed,
)


class Destination:
    """A caller's pools and the pages of them that one incoming snapshot shall fill, one table per sequence.

    In this order: `check` an offer, `bind` its block structure, `scatter` and `set_parameters`, `finish`, `snapshot`;
    `clear` after a failure. Tensor indices and page numbers are the offer's.
    """

    def __init__(self, caches: Sequence[DeclaredCache], seq_ptr: Counts, block_table: Index) -> None:
        """Use `from_paged`."""
        self.caches = tuple(caches)
        self.seq_ptr = seq_ptr
        self.block_table = block_table
        self._descriptors: tuple[Descriptor, ...] = ()
        self._targets: tuple[DeclaredCache, ...] = ()
        self._placement: _Placement | None = None
        self._written: list[int] = []

    @classmethod
    def from_paged(
        cls,
        caches: Mapping[CacheKey, object],
        *,
        block_tables: BlockTables,
        layout: str = "NHD",
        element_type: str | ElementType | Mapping[CacheKey, str | ElementType] | None = None,
        page_shape: PageShape | Mapping[CacheKey, PageShape] | None = None,
        quantization: Quantized | Mapping[CacheKey, Quantized] | None = None,
    ) -> Self:
        """Declare pools to be written. The arguments are those of `KVSnapshot.from_paged`, and the arrays writable.

        Pages may appear in several tables (a shared prefix) where the offer shares them, too. `quantization` gives
        the caller's own parameters: per-slot arrays are written with the pages, all others must equal the offer's.

        Raises InvalidSnapshot, InvalidContents, InvalidDescriptor, Unsupported.
        """
        declared = declare_caches(
            caches, layout=layout, element_type=element_type, page_shape=page_shape, quantization=quantization
        )
        for cache in declared:
            _check_writable(cache)
            _own_layout(cache)
        _check_distinct(declared)
        num_pages = declared[0].pool.num_pages
        seq_ptr, block_table = read_tables(block_tables, num_pages)
        check_index(seq_ptr, block_table, num_pages)
        return cls(declared, seq_ptr, block_table)

    def with_tables(self, block_tables: BlockTables) -> Destination:
        """The same caches, other pages of them: for the next snapshot. Does not check the caches again.

        Raises InvalidSnapshot, InvalidContents.
        """
        num_pages = self.caches[0].pool.num_pages
        seq_ptr, block_table = read_tables(block_tables, num_pages)
        check_index(seq_ptr, block_table, num_pages)
        return Destination(self.caches, seq_ptr, block_table)

    @property
    def device(self) -> tuple[int, int]:
        """Device tag and number of the device that the pools are on."""
        return device_of(self.caches[0].pool.array)

    @property
    def num_seqs(self) -> int:
        """Number of block tables."""
        return int(self.seq_ptr.size) - 1

    @property
    def pages(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The caller's pages that are named, ascending: what a failure after the first `scatter` leaves undefined."""
        return np.unique(self.block_table)

    def check(self, descriptors: Sequence[Descriptor], token_counts: Sequence[int] | npt.NDArray[Any]) -> None:
        """Compare an offer with this destination, as far as descriptors and token counts tell. Touches nothing.

        Tensors, page shape, element type, scheme, number of sequences and pages per sequence must be equal: a
        sequence's table holds exactly the pages its tokens need.

        Raises GeometryMismatch naming tensor, field, offered and required; InvalidContents for the counts (V6-V9).
        """
        own = {(cache.layer_index, cache.kv_role): cache for cache in self.caches}
        keys = [(descriptor.layer_index, descriptor.kv_role) for descriptor in descriptors]
        if len(set(keys)) != len(keys) or set(keys) != set(own):
            raise GeometryMismatch(
                "the snapshot holds other tensors than the destination",
                field="tensors",
                offered=", ".join(tensor_name(item.layer_index, item.kv_role_name) for item in descriptors),
                required=", ".join(tensor_name(cache.layer_index, cache.role) for cache in self.caches),
            )
        for key, descriptor in zip(keys, descriptors, strict=True):
            _compare(descriptor, own[key])
        self._check_tables(descriptors[0], token_counts)
        self._descriptors = tuple(descriptors)
        self._targets = tuple(own[key] for key in keys)
        self._placement = None

    def _check_tables(self, descriptor: Descriptor, token_counts: Sequence[int] | npt.NDArray[Any]) -> None:
        if descriptor.num_seqs != self.num_seqs:
            raise GeometryMismatch(
                "the snapshot holds another number of sequences than there are block tables",
                field="num_seqs",
                offered=descriptor.num_seqs,
                required=self.num_seqs,
            )
        counts = check_token_counts(descriptor, token_counts)
        needed, held = pages_needed(counts, descriptor.page_size), np.diff(self.seq_ptr)
        if not np.array_equal(needed, held):
            seq = int(np.argmax(needed != held))
            raise GeometryMismatch(
                f"sequence {seq} has {int(counts[seq])} tokens: its block table must hold exactly the pages they need",
                field="block_tables",
                index=seq,
                offered=f"{int(needed[seq])} pages",
                required=f"{int(held[seq])} pages",
            )

    def bind(self, structure: BlockStructure) -> None:
        """Work out where each page of the checked offer goes. `structure` is the offer's, checked. Touches nothing.

        Raises GeometryMismatch where the tables name one page for two pages of the offer.
        """
        assert self._descriptors, "bind before check"
        own = BlockStructure(
            page_size=structure.page_size,
            num_pages=self.caches[0].pool.num_pages,
            seq_ptr=self.seq_ptr,
            block_table=self.block_table,
            token_counts=structure.token_counts,
        )
        check_structure(own)
        self._placement = _place(own, structure)
        self._written = [0] * len(self._descriptors)

    def scatter(self, tensor_index: int, first_page: int, data: Any) -> None:
        """Write whole pages of the offer, from `first_page` on, to wherever they go. `data` is uint8, contiguous.

        Slots that the caller's tables leave dead are cleared first, in `data` where it is writable and each of its
        pages goes to one place: a page that is shared in the offer and not here holds other sequences' tokens there.
        Raises InvalidContents (V14) before it writes.
        """
        descriptor, cache, placement = self._descriptors[tensor_index], self._targets[tensor_index], self._bound
        page_bytes = descriptor.page_bytes
        if not page_bytes:
            return
        pool = cache.pool.array
        if is_on_device(pool):
            data = on_device_of(pool, data)
        rows = data.reshape(-1, page_bytes)
        check_pool(descriptor, rows, placement.source_live, first_page)
        start, end = np.searchsorted(placement.sources, [first_page, first_page + rows.shape[0]])
        taken = placement.sources[start:end] - first_page
        if not (_is_range(taken, rows.shape[0]) and getattr(rows.flags, "writeable", True)):
            rows = rows[on_device_of(rows, taken) if is_on_device(rows) else taken]
        clear_dead(descriptor, rows, placement.live[start:end])
        scatter(pool, placement.pages[start:end], rows)
        self._written[tensor_index] += int(end - start)

    def set_parameters(self, tensor_index: int, parameters: Sequence[Buffer]) -> None:
        """Compare a tensor's parameters that hold for all pages, write those of slots. Checked already (V11, V12).

        `parameters` are the offer's buffers 3 and up, on the device of the caches. Raises GeometryMismatch.
        """
        descriptor, cache, placement = self._descriptors[tensor_index], self._targets[tensor_index], self._bound
        buffers = (None, None, None, *parameters)
        targets = () if cache.quantized is None else cache.quantized.parameters
        for (parameter, offered), target in zip(parameter_arrays(descriptor, buffers), targets, strict=True):
            if isinstance(descriptor.quantization, PerBlockAffine):
                _scatter_slots(parameter, offered, target, placement)
            elif not np.array_equal(to_host(byte_view(offered)), to_host(byte_view(target))):
                raise GeometryMismatch(
                    f"the {parameter.kind}s per channel differ from the destination's",
                    tensor=tensor_name(cache.layer_index, cache.role),
                    field=f"{parameter.kind}s",
                )

    def finish(self) -> None:
        """After the last page: every named page of every tensor was written."""
        for descriptor, written in zip(self._descriptors, self._written, strict=True):
            assert not descriptor.page_bytes or written == self._bound.pages.size, "a page was never scattered"

    def clear(self) -> None:
        """Clear every named page of every tensor, scales and zero points per slot too: after a failure."""
        ids = self.pages.astype(np.intp)
        for cache in self.caches:
            pool = cache.pool.array
            word = E8M0_NEUTRAL if cache.pool.element_type.tag == E8M0_TAG else 0
            pool[_beside(pool, ids)] = word if pool.dtype.kind == "u" else np.zeros((), dtype=pool.dtype)
            if cache.quantized is not None and isinstance(cache.quantized.scheme, PerBlockAffine):
                for parameter, array in zip(_own_layout(cache), cache.quantized.parameters, strict=True):
                    dtype, neutral = neutral_word(parameter)
                    slots = array.reshape(-1).view(dtype).reshape(-1, cache.pool.page_size)
                    slots[_beside(slots, ids)] = neutral

    def snapshot(self) -> KVSnapshot:
        """The caller's pages as a snapshot, over the caller's tables."""
        structure = self._bound.structure
        return KVSnapshot(describe_all(self.caches, structure), structure)

    @property
    def _bound(self) -> _Placement:
        assert self._placement is not None, "no block structure is bound"
        return self._placement


@dataclass(frozen=True, slots=True, eq=False)
class _Placement:
    """Where the pages of one offer go.

    `sources` int64 [named pages], ascending: the offer's page that goes to the caller's page `pages[i]`, whose live
    slots by the caller's tables are `live[i]`; a page of the offer may go to several. `structure` is the caller's,
    `source_live` are the live slots of the offer's pages.
    """

    structure: BlockStructure
    source_live: npt.NDArray[np.uint32]
    sources: npt.NDArray[np.int64]
    pages: PageIds
    live: npt.NDArray[np.uint32]


def _place(own: BlockStructure, offer: BlockStructure) -> _Placement:
    named = compact(own)
    table = trimmed_table(offer)[0].astype(np.int64)
    positions = named.structure.block_table.astype(np.intp)
    source_of = np.zeros(named.pages.size, dtype=np.int64)
    source_of[positions] = table
    clash = source_of[positions] != table
    if clash.any():
        entry = int(np.argmax(clash))
        position = positions[entry]
        raise GeometryMismatch(
            f"the block tables name page {int(named.pages[position])} for two different pages of the snapshot",
            field="block_tables",
            index=entry,
            offered=f"pages {int(table[entry])} and {int(source_of[position])} of the snapshot",
            required="one page for each",
        )
    order = np.argsort(source_of, kind="stable")
    return _Placement(own, live_slots(offer), source_of[order], named.pages[order], named.live[order])


def _scatter_slots(parameter: Parameter, offered: Any, target: Any, placement: _Placement) -> None:
    """Write the entries of a parameter with one per slot, in the caller's array; those of dead slots are neutral."""
    page_size = placement.structure.page_size
    page_bytes = page_size * parameter.dtype.itemsize
    dtype, neutral = neutral_word(parameter)
    nbytes = placement.sources.size * page_bytes
    taken = empty_beside(offered, nbytes) if is_on_device(offered) else np.empty(nbytes, dtype=np.uint8)
    gather(slot_rows(offered, page_bytes), placement.sources.view(np.uint64), slot_rows(taken, page_bytes))
    fill_dead(taken.view(dtype), placement.live, page_size=page_size, word=neutral)
    scatter(slot_rows(target, page_bytes), placement.pages, slot_rows(taken, page_bytes))


def _own_layout(cache: DeclaredCache) -> tuple[Parameter, ...]:
    """What a caller's own parameter arrays hold. Raises what `describe` raises."""
    empty = describe(cache, num_seqs=0, total_tokens=0, total_logical_pages=0, block_table_index_type=0)
    return empty.parameter_layout()


def _beside(array: Any, ids: npt.NDArray[np.intp]) -> Any:
    return on_device_of(array, ids) if is_on_device(array) else ids


def _is_range(taken: npt.NDArray[np.int64], count: int) -> bool:
    return taken.size == count and bool((taken == np.arange(count)).all())


def _check_writable(cache: DeclaredCache) -> None:
    name = tensor_name(cache.layer_index, cache.role)
    arrays, read_only = [cache.pool.array], cache.pool.read_only
    if cache.quantized is not None and isinstance(cache.quantized.scheme, PerBlockAffine):
        arrays += cache.quantized.parameters
        read_only |= cache.quantized.read_only
    if read_only:
        raise InvalidSnapshot(f"{name} is read-only", field="into", tensor=name, required="writable arrays")
    for array in arrays:
        repeats = any(stride == 0 and size > 1 for size, stride in zip(array.shape, array.strides, strict=True))
        if repeats and array.nbytes:
            raise InvalidSnapshot(
                f"{name} shows one element at several places", field="into", tensor=name, offered=array.strides
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Where an array that is written to lies: bytes [low, high), its first axis `step` apart, `reach` bytes each."""

    name: str
    array: Any
    low: int
    high: int
    step: int
    reach: int

    @classmethod
    def of(cls, name: str, array: Any) -> _Extent:
        address = array.ctypes.data if isinstance(array, np.ndarray) else int(array.data.ptr)
        spans = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        low = address + sum(span for span in spans if span < 0)
        high = address + sum(span for span in spans if span > 0) + array.itemsize
        return cls(name, array, low, high, array.strides[0], high - low - abs(spans[0]))

    def meets(self, other: _Extent) -> bool:
        """Whether they have a byte in common."""
        if self.high <= other.low or other.high <= self.low:
            return False
        if self.step == other.step > 0:  # pages of several caches in turns, as engines lay them out
            apart = (other.low - self.low) % self.step
            if self.reach <= apart and apart + other.reach <= self.step:
                return False
        return bool(array_module(self.array).shares_memory(self.array, other.array))


def _check_distinct(declared: Sequence[DeclaredCache]) -> None:
    devices: dict[tuple[int, int], list[_Extent]] = {}
    for cache in declared:
        name = tensor_name(cache.layer_index, cache.role)
        extents = devices.setdefault((cache.pool.device_tag, cache.pool.device_id), [])
        written = [(name, cache.pool.array)]
        if cache.quantized is not None and isinstance(cache.quantized.scheme, PerBlockAffine):
            written += [(f"a parameter of {name}", array) for array in cache.quantized.parameters]
        extents += [_Extent.of(part, array) for part, array in written if array.nbytes]
    for extents in devices.values():
        extents.sort(key=lambda extent: extent.low)
        for number, extent in enumerate(extents):
            for other in extents[number + 1 :]:
                if other.low >= extent.high:
                    break
                if extent.meets(other):
                    raise InvalidSnapshot(
                        f"{extent.name} and {other.name} have memory in common", field="into", tensor=other.name
                    )


def _compare(descriptor: Descriptor, cache: DeclaredCache) -> None:
    pool = cache.pool
    own = None if cache.quantized is None else cache.quantized.scheme
    for field, offered, required in (
        ("page_size", descriptor.page_size, pool.page_size),
        ("num_heads", descriptor.num_heads, pool.num_heads),
        ("head_dim", descriptor.head_dim, pool.head_dim),
        ("element_type", descriptor.element_type.name, pool.element_type.name),
        ("quantization", _scheme_text(descriptor.quantization), _scheme_text(own)),
    ):
        if offered != required:
            name = tensor_name(cache.layer_index, cache.role)
            raise GeometryMismatch(
                f"{name}: {field} is {offered} in the snapshot and {required} in the destination",
                tensor=name,
                field=field,
                offered=offered,
                required=required,
            )


def _scheme_text(scheme: Quantization | None) -> str:
    """A scheme in words, equal only for schemes whose parameters can stand for each other."""
    if scheme is None:
        return "none"
    if isinstance(scheme, PerTensorAffine):
        return f"{scheme.scheme}, scale {scheme.scale!r}, zero_point {scheme.zero_point}"
    zero_points = "" if scheme.symmetric else ", zero points"
    return f"{scheme.scheme}, axis {scheme.axis}, scale_type_tag {scheme.scale_type_tag}{zero_points}"
