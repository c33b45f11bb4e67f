"""Pages as pure functions on arrays: liveness, compaction, gather, scatter, scrub (design: what crosses the wire).

A page's live slots are always a prefix of it: a sequence that names the page reaches its first n slots, and the
longest reach decides. So liveness is one number per page, `live` uint32 [num_pages], and a slot is dead only if no
sequence that names its page reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from . import kernels
from .descriptor import Descriptor, build_descriptor
from .errors import InvalidContents, LimitExceeded
from .limits import PAGE_BYTES
from .memory import DEVICE_CPU, aligned_empty, byte_view, empty_beside, is_on_device, on_device_of, to_host
from .packing import E8M0_NEUTRAL, E8M0_TAG, clear_bits, pack, unpack
from .parameters import Buffer, neutral, neutral_word, parameter_arrays
from .policy import STRICT, Policy
from .quantization import PerBlockAffine
from .validate import (
    BlockStructure,
    Index,
    check_structure,
    copy_structure,
    index_arrays,
    pages_needed,
    read_structure,
)

Bytes = npt.NDArray[np.uint8]
Live = npt.NDArray[np.uint32]
PageIds = npt.NDArray[np.uint64]

# Up to this many pages an array over all pages is cheaper than sorting the ids, however few are named.
_DIRECT_PAGES: Final = 1 << 22

_MAX_LIVE_PAGES: Final = 1 << 28

# Pages up to this size are scrubbed many at a time, if there are as many at least.
_SMALL_PAGE_BYTES: Final = 1024
_SMALL_PAGES: Final = 64
_ROWS_AT_A_TIME: Final = 8192

_RUN_BYTES: Final = 1 << 20
"""Mean length from which on a GPU copies runs one by one: starting a copy costs it what moving as much does."""


def _trailing(structure: BlockStructure) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Which block_table entries their sequence fills to the last slot, [entries], and where the partial ones are.

    Every entry that is neither has no token of its sequence (surplus, V8).
    """
    size = np.uint64(structure.page_size)
    starts = structure.seq_ptr[:-1]
    whole = structure.token_counts // size
    ends = starts + whole
    surplus = (structure.seq_ptr[1:] - ends).astype(np.intp)
    full = np.ones(structure.total_logical_pages, dtype=np.bool_)
    if surplus.size and int(surplus.max()) > 1:
        offsets = np.arange(int(surplus.sum())) - np.repeat(np.cumsum(surplus) - surplus, surplus)
        full[np.repeat(ends.astype(np.intp), surplus) + offsets] = False
    else:
        full[ends[surplus == 1].astype(np.intp)] = False
    partial = ends[structure.token_counts % size != 0].astype(np.intp)
    return full, partial


def read_index(
    descriptor: Descriptor,
    block_table: Buffer,
    seq_ptr: Buffer,
    token_counts: Sequence[int] | npt.NDArray[Any],
    policy: Policy = STRICT,
) -> tuple[BlockStructure, Any]:
    """The block structure of index buffers that arrived, checked, without a page that nobody names, and copied; and
    live slots of each page, uint32 [num_pages], where the buffers are: on the host, or on a GPU, which does the work.

    Raises InvalidContents (V1-V9), LimitExceeded, Misuse.
    """
    if not is_on_device(block_table):
        structure = read_structure(descriptor, block_table, seq_ptr, token_counts, policy)
        check_compact(structure)
        return structure, live_slots(structure)
    # What is checked is a copy here, too.
    table, pointers = (array.copy() for array in index_arrays(descriptor, block_table, seq_ptr, policy))
    structure = copy_structure(descriptor, to_host(table), to_host(pointers), token_counts)
    _check_live_pages(structure)
    counts = on_device_of(table, structure.token_counts)
    size: dict[str, int] = {"num_pages": structure.num_pages, "page_size": structure.page_size}
    if kernels.index_status(pointers, table, counts, **size) != kernels.INTACT:
        # The host sees the same, and has the words for it.
        check_structure(structure)
        check_compact(structure)
        raise AssertionError("host and GPU disagree about an index")
    return structure, kernels.live_slots(pointers, table, counts, **size)


def live_slots(structure: BlockStructure) -> Live:
    """Live slots of each page, uint32 [num_pages]; 0 for pages that no sequence names or none reaches.

    The structure must be checked. Raises LimitExceeded past 2**28 pages: pages without bytes (no heads, say) cost a
    writer nothing, and this 4 bytes each.
    """
    _check_live_pages(structure)
    live = np.zeros(structure.num_pages, dtype=np.uint32)
    full, partial = _trailing(structure)
    table = structure.block_table
    live[table if full.all() else table[full]] = structure.page_size
    rests = structure.token_counts % np.uint64(structure.page_size)
    np.maximum.at(live, table[partial].astype(np.intp), rests[rests != 0].astype(np.uint32))
    return live


def _check_live_pages(structure: BlockStructure) -> None:
    if structure.num_pages > _MAX_LIVE_PAGES:
        raise LimitExceeded(
            "too many pages", field="num_pages", offered=structure.num_pages, required=f"<= {_MAX_LIVE_PAGES}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """A snapshot reduced to the pages it names.

    `pages` uint64 [distinct]: the source's page ids, each once, in order of first use. `structure`: the same
    sequences over page ids 0 to distinct - 1, surplus pages trimmed, index type kept. `live` uint32 [distinct].
    """

    pages: PageIds
    structure: BlockStructure
    live: Live


def compact(structure: BlockStructure) -> Compaction:
    """Distinct pages in order of first use, ids renumbered, pages past the last one a sequence needs trimmed.

    Takes memory by the number of block_table entries, not of pages, where pages are many.
    """
    table, seq_ptr = trimmed_table(structure)
    if structure.num_pages <= max(_DIRECT_PAGES, 4 * table.size):
        pages, renumbered = _distinct_direct(table, structure.num_pages)
    else:
        pages, renumbered = _distinct_sorted(table)
    reduced = BlockStructure(
        page_size=structure.page_size,
        num_pages=int(pages.size),
        seq_ptr=seq_ptr,
        block_table=renumbered.astype(structure.block_table.dtype, copy=False),
        token_counts=structure.token_counts,
    )
    return Compaction(pages=pages.astype(np.uint64), structure=reduced, live=live_slots(reduced))


def trimmed_table(structure: BlockStructure) -> tuple[Index, npt.NDArray[np.uint64]]:
    """block_table and seq_ptr without the pages past the last one a sequence's tokens need (V8)."""
    needed = pages_needed(structure.token_counts, structure.page_size)
    held = structure.seq_ptr[1:] - structure.seq_ptr[:-1]
    if np.array_equal(needed, held):
        return structure.block_table, structure.seq_ptr
    seq_ptr = np.zeros_like(structure.seq_ptr)
    np.cumsum(needed, out=seq_ptr[1:])
    kept, first = needed.astype(np.intp), structure.seq_ptr[:-1].astype(np.intp)
    shift = np.repeat(first - seq_ptr[:-1].astype(np.intp), kept)
    return structure.block_table[np.arange(int(seq_ptr[-1])) + shift], seq_ptr


def _distinct_direct(table: Index, num_pages: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    positions: npt.NDArray[Any] = np.arange(table.size, dtype=np.uint32 if table.size < 1 << 32 else np.uint64)
    # Read only where a page is named, so the rest may hold anything. Backwards: the last write is the first use.
    first_use = np.empty(num_pages, dtype=positions.dtype)
    ids = table.astype(np.intp)
    first_use[ids[::-1]] = positions[::-1]
    first_of_entry = first_use[ids]
    del ids, first_use  # each is megabytes, where sequences are many
    opens = first_of_entry == positions
    rank = np.cumsum(opens, out=positions)
    rank -= 1
    return table[opens], rank[first_of_entry]


def _distinct_sorted(table: Index) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    ids, first_use, inverse = np.unique(table, return_index=True, return_inverse=True)
    order = np.argsort(first_use)
    rank = np.empty(order.size, dtype=np.intp)
    rank[order] = np.arange(order.size)
    return ids[order], rank[inverse]


def check_compact(structure: BlockStructure) -> None:
    """Raises InvalidContents unless the pool holds exactly the pages block_table names, in order of first use.

    What a source that compacts sends. Surplus pages (V8) are pages like any other here. Takes no memory by num_pages.
    """
    # Where a page is named first, the highest id so far rises by one; nowhere else does it rise.
    highest = np.maximum.accumulate(structure.block_table)
    ends = (int(highest[0]), int(highest[-1]) + 1) if highest.size else (0, 0)
    if ends == (0, structure.num_pages) and not (np.diff(highest) > 1).any():
        return
    raise InvalidContents(
        "the snapshot is not compact: pages are named out of order, or some are not named",
        field="block_table",
        required=f"pages 0 to {structure.num_pages - 1} in order of first use",
    )


def runs(pages: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Runs of adjacent ids, uint64 [runs, 3]: (index of its first page in `pages`, its first page id, its length)."""
    ids = pages.astype(np.uint64)
    if ids.size == 0:
        return np.zeros((0, 3), dtype=np.uint64)
    starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1] + np.uint64(1)))).astype(np.uint64)
    lengths = np.diff(np.append(starts, np.uint64(ids.size)))
    return np.stack([starts, ids[starts.astype(np.intp)], lengths], axis=1)


def gather(pool: Any, pages: npt.NDArray[Any], out: Any) -> None:
    """Copy pages of `pool` to `out`, uint8 [len(pages), page_bytes] and contiguous, in NHD order. Both on one GPU, or
    both on the host; `pages` on the host.

    `pool` is uint8 [num_pages, page_bytes], whose pages may lie apart, or words [num_pages, page_size, num_heads,
    head_dim] of any strides. Every id must be below num_pages: out of bounds it is clipped, not refused (a check
    here costs 3x).
    """
    ids = pages.astype(np.intp, copy=False)
    if is_on_device(pool):
        _gather_on_device(pool, ids, out)
        return
    if pool.ndim == 4:
        out.view(pool.dtype).reshape(ids.size, *pool.shape[1:])[...] = pool[ids]
        return
    step = pool.strides[0] // max(pool.shape[1], 1)
    if step > 1 and step * pool.shape[1] == pool.strides[0]:
        # Key and value pages side by side: np.take would copy the whole pool first, were it not seen as every page
        # between its first and its last, of which only every step-th is taken.
        shape = ((pool.shape[0] - 1) * step + 1, pool.shape[1])
        pool, ids = np.lib.stride_tricks.as_strided(pool, shape, (pool.shape[1], 1), writeable=False), ids * step
    if pool.flags.c_contiguous:
        np.take(pool, ids, axis=0, out=out, mode="clip")
    else:
        out[...] = pool[ids]


def scatter(pool: Any, pages: npt.NDArray[Any], data: Any) -> None:
    """Copy `data`, as `gather` gives it, to the named pages of `pool`. Ids must be in bounds and distinct."""
    ids = pages.astype(np.intp, copy=False)
    if is_on_device(pool) and pool.ndim == 2:
        merged = _long_runs(ids, pool.shape[1])
        for start, page, count in merged:
            pool[page : page + count] = data[start : start + count]
        if not merged:
            kernels.copy_pages(data, None, pool, ids)
        return
    if is_on_device(pool):
        ids = on_device_of(pool, ids)
    pool[ids] = data if pool.ndim == 2 else data.view(pool.dtype).reshape(ids.size, *pool.shape[1:])


def _gather_on_device(pool: Any, ids: npt.NDArray[np.intp], out: Any) -> None:
    if pool.ndim == 4:
        out.view(pool.dtype).reshape(ids.size, *pool.shape[1:])[...] = pool[on_device_of(pool, ids)]
        return
    merged = _long_runs(ids, pool.shape[1])
    for start, page, count in merged:
        out[start : start + count] = pool[page : page + count]
    if not merged:
        kernels.copy_pages(pool, ids, out, None)


def _long_runs(ids: npt.NDArray[np.intp], page_bytes: int) -> list[Any]:
    """Runs of adjacent pages, where they are long enough that each is worth a copy of its own; else none."""
    if ids.size == 0 or ids[-1] - ids[0] < 0:
        return []
    found = runs(ids)
    return found.tolist() if len(found) * _RUN_BYTES <= ids.size * page_bytes else []


def repack(descriptor: Descriptor, page_pool: Bytes, pages: npt.NDArray[Any]) -> Bytes:
    """The named pages of a pool whose pages are no whole bytes, packed anew: uint8, one-dimensional, page aligned.

    `page_pool` is the whole packed pool, uint8. Unpacks all of it: slow, and several times its size.
    """
    element_type, per_page = descriptor.element_type, descriptor.page_elements
    words = unpack(page_pool.reshape(-1), element_type, descriptor.num_pages * per_page)
    taken = np.take(words.reshape(descriptor.num_pages, per_page), pages.astype(np.intp), axis=0, mode="clip")
    packed = pack(taken, element_type)
    out = aligned_empty(packed.size)
    out[:] = packed
    return out


# --- dead slots ---------------------------------------------------------------------------------------------------


def dead_ranges(live: Live, page_size: int) -> npt.NDArray[np.int64]:
    """Ranges of dead slots, int64 [ranges, 2] of (first, end) slot numbers, slot i of page p being p * page_size + i.

    A wholly dead page joins the range before it.
    """
    pages = np.flatnonzero(live < page_size)
    if pages.size == 0:
        return np.zeros((0, 2), dtype=np.int64)
    joins = (live[pages] == 0) & np.concatenate(([False], pages[1:] == pages[:-1] + 1))
    opens = np.flatnonzero(~joins)
    closes = np.append(opens[1:], pages.size) - 1
    return np.stack(
        [pages[opens] * page_size + live[pages[opens]], (pages[closes] + 1) * page_size], axis=1, dtype=np.int64
    )


def clear_dead(descriptor: Descriptor, page_pool: Any, live: Live, first_page: int = 0) -> None:
    """`scrub` without the count, for a source's own staging: several times faster."""
    pool, part, slot_bits, clear = _dead_bits(descriptor, page_pool, live, first_page)
    if is_on_device(pool):
        kernels.scrub(pool, part, page_size=descriptor.page_size, slot_bits=slot_bits, clear=clear, dirty=None)
        return
    rows = _small_pages(descriptor, pool, slot_bits)
    if rows is not None:
        for pages, words, dead in _partial_rows(rows, part):
            words[dead] = _word(clear, words)
            rows[pages] = words
        return
    for first, end in dead_ranges(part, descriptor.page_size).tolist():
        if slot_bits % 8 == 0:
            pool[first * slot_bits // 8 : end * slot_bits // 8] = clear
        else:
            clear_bits(pool, first * slot_bits, end * slot_bits)


def scrub(descriptor: Descriptor, page_pool: Any, live: Live, first_page: int = 0) -> int:
    """Clear the dead slots of a pool, or of a run of whole pages of it, in place.

    `page_pool` is uint8, writable and in one contiguous piece: the whole pool, or whole pages from `first_page` on.
    `live` is uint32 [num_pages], of all pages, on the host or the pool's GPU. Only dead bits change, bits of a byte
    that a live slot shares stay.
    A cleared element is all zero bits, and 0x7F in a float8_e8m0 pool.

    Returns the number of dead slots that were not clear.
    """
    pool, part, slot_bits, clear = _dead_bits(descriptor, page_pool, live, first_page)
    if is_on_device(pool):
        noted = kernels.DirtySlots(pool, part.size * descriptor.page_size)
        kernels.scrub(pool, part, page_size=descriptor.page_size, slot_bits=slot_bits, clear=clear, dirty=noted)
        return noted.total()
    dirty = 0
    rows = _small_pages(descriptor, pool, slot_bits)
    if rows is not None:
        for pages, words, dead in _partial_rows(rows, part):
            found = int(np.count_nonzero((words != _word(clear, words)).any(axis=2) & dead))
            if found:
                words[dead] = _word(clear, words)
                rows[pages] = words
            dirty += found
        return dirty
    for first, end in dead_ranges(part, descriptor.page_size).tolist():
        if slot_bits % 8 == 0:
            dirty += _clear_bytes(pool[first * slot_bits // 8 : end * slot_bits // 8], end - first, clear)
        else:
            dirty += _clear_slots(pool, first * slot_bits, end * slot_bits, slot_bits)
    return dirty


def _dead_bits(descriptor: Descriptor, page_pool: Any, live: Live, first_page: int) -> tuple[Any, Live, int, int]:
    """The pool as one axis, live slots of its pages, the bits of a slot, and the byte of a cleared element."""
    assert page_pool.flags.c_contiguous, "a copy would be scrubbed, not the pool"
    pool = page_pool.reshape(-1)
    element_type, page_bytes = descriptor.element_type, descriptor.page_bytes
    slot_bits = descriptor.num_heads * descriptor.head_dim * element_type.bits
    if pool.size == 0 or slot_bits == 0:
        return pool, live[:0], 8, 0
    count = live.size if page_bytes is None else pool.size // page_bytes
    clear = E8M0_NEUTRAL if element_type.tag == E8M0_TAG else 0
    return pool, live[first_page : first_page + count], slot_bits, clear


def _small_pages(descriptor: Descriptor, pool: Any, slot_bits: int) -> npt.NDArray[Any] | None:
    """A host pool of small pages as words [pages, page_size, words of a slot]: many pages at a time are cheaper than
    the dead slots of each on their own. None where they are not."""
    slot_bytes, page_bytes = slot_bits // 8, descriptor.page_bytes
    if (
        page_bytes is None
        or slot_bits % 8
        or not 0 < page_bytes <= _SMALL_PAGE_BYTES
        or pool.size < _SMALL_PAGES * page_bytes
    ):
        return None
    width = next(width for width in (8, 4, 2, 1) if slot_bytes % width == 0)
    words: npt.NDArray[Any] = pool.view(f"u{width}").reshape(-1, descriptor.page_size, slot_bytes // width)
    return words


def _partial_rows(
    rows: npt.NDArray[Any], live: Live
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    """Pages with a dead slot: which, a copy of their words, and which of their slots are dead."""
    page_size = rows.shape[1]
    slots = np.arange(page_size, dtype=np.uint32)
    partial = np.flatnonzero(live < page_size)
    for start in range(0, partial.size, _ROWS_AT_A_TIME):
        pages = partial[start : start + _ROWS_AT_A_TIME]
        yield pages, rows[pages], slots >= live[pages, None]


def _word(byte: int, words: npt.NDArray[Any]) -> Any:
    """A word of equal bytes."""
    return words.dtype.type(int.from_bytes(bytes([byte]) * words.itemsize, "little"))


def _clear_bytes(region: Any, slots: int, clear: int) -> int:
    # Nearly every range of an honest source is clear already, and to see that much is cheaper than to count slots.
    if not (region != clear).any() if clear else not np.count_nonzero(region):
        return 0
    dirty = int((region.reshape(slots, -1) != clear).any(axis=1).sum())
    region[...] = clear
    return dirty


def _clear_slots(pool: Bytes, start: int, stop: int, slot_bits: int) -> int:
    first = start // 8
    bits = np.unpackbits(pool[first : -(-stop // 8)], bitorder="little")[start - 8 * first : stop - 8 * first]
    dirty = int(bits.reshape(-1, slot_bits).any(axis=1).sum())
    if dirty:
        clear_bits(pool, start, stop)
    return dirty


def scrub_parameters(descriptor: Descriptor, buffers: Sequence[Buffer | None], live: Live) -> int:
    """Scales of dead slots become 1.0 and their zero points 0, in place; the other schemes have none per slot.

    `buffers` are all of the tensor's, by the format's index; those from 3 up must be writable.
    Returns the number of dead slots that held anything else.
    """
    if not isinstance(descriptor.quantization, PerBlockAffine):
        return 0
    if is_on_device(buffers[-1]):
        return _scrub_parameters_on_device(descriptor, buffers, live)
    dead = np.arange(descriptor.page_size, dtype=np.uint32) >= live[:, None]
    dirty = np.zeros_like(dead)
    for parameter, array in parameter_arrays(descriptor, buffers):
        slots = array.reshape(dead.shape)
        words = slots.view(f"u{parameter.dtype.itemsize}")
        clear = neutral(parameter)
        dirty |= dead & (words != clear.view(words.dtype))
        slots[dead] = clear
    return int(np.count_nonzero(dirty))


def _scrub_parameters_on_device(descriptor: Descriptor, buffers: Sequence[Any], live: Any) -> int:
    noted = kernels.DirtySlots(buffers[-1], descriptor.num_pages * descriptor.page_size)
    for parameter, array in parameter_arrays(descriptor, buffers):
        word, clear = neutral_word(parameter)
        kernels.scrub_entries(array.view(word), live, page_size=descriptor.page_size, clear=clear, dirty=noted)
    return noted.total()


def fill_dead(entries: Any, live: Live, *, page_size: int, word: int) -> None:
    """Set the entries of dead slots, uint16 or uint32 [pages * page_size], to a word; `live` is uint32 [pages]."""
    if is_on_device(entries):
        kernels.scrub_entries(entries, live, page_size=page_size, clear=word, dirty=None)
    else:
        entries.reshape(-1, page_size)[np.arange(page_size, dtype=np.uint32) >= live[:, None]] = word


# --- compaction of a tensor -----------------------------------------------------------------------------------------


def compact_descriptor(
    descriptor: Descriptor,
    compaction: Compaction,
    *,
    alignment: int = PAGE_BYTES,
    device_tag: int = DEVICE_CPU,
    memory_class: int = 0,
) -> Descriptor:
    """The descriptor of the compacted tensor: num_pages and every size anew, statistics and trailing bytes dropped.

    `alignment` (bytes), `device_tag` and `memory_class` are those of the buffers that will hold it.
    """
    extension = descriptor.extension_type
    return build_descriptor(
        element_type=descriptor.element_type,
        page_size=descriptor.page_size,
        num_pages=compaction.structure.num_pages,
        num_heads=descriptor.num_heads,
        head_dim=descriptor.head_dim,
        total_tokens=descriptor.total_tokens,
        num_seqs=descriptor.num_seqs,
        total_logical_pages=compaction.structure.total_logical_pages,
        kv_role=descriptor.kv_role,
        layer_index=descriptor.layer_index,
        block_table_index_type=descriptor.block_table_index_type,
        quantization=descriptor.quantization,
        extension_type=extension,
        device_tag=device_tag,
        memory_class=memory_class,
        alignment=alignment,
        # The private type of the source was agreed before it was decoded.
        policy=Policy(private_agreed=extension is not None),
    )


def compact_parameters(descriptor: Descriptor, buffers: Sequence[Buffer | None], compaction: Compaction) -> list[Any]:
    """Parameter buffers of the compacted tensor, 3 and up, as copies where they are: page-aligned on the host.

    Scales and zero points per slot follow their pages; those per channel are copied whole. A buffer that holds both
    keeps them end to end, split where the new sizes put it.
    """
    if not descriptor.parameter_layout():
        return []
    target = compact_descriptor(descriptor, compaction)
    beside = buffers[3]
    copies = [
        empty_beside(beside, handle.byte_size) if is_on_device(beside) else aligned_empty(handle.byte_size)
        for handle in target.buffers[3:]
    ]
    sources = parameter_arrays(descriptor, buffers)
    targets = parameter_arrays(target, [None, None, None, *copies])
    for (parameter, source), (_, out) in zip(sources, targets, strict=True):
        if isinstance(descriptor.quantization, PerBlockAffine):
            page_bytes = descriptor.page_size * parameter.dtype.itemsize
            gather(slot_rows(source, page_bytes), compaction.pages, slot_rows(out, page_bytes))
        else:
            out[...] = source
    return copies


def slot_rows(entries: Any, page_bytes: int) -> Any:
    """Entries of slots as bytes, uint8 [pages, page_bytes]."""
    return byte_view(entries).reshape(entries.nbytes // page_bytes, page_bytes)
