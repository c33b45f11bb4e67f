"""Work on arrays of a GPU that an array module alone does too slowly: `kernels.cu`, started through CuPy.

The device module comes from the arrays, so nothing here imports it. All arrays of a call are on one GPU, contiguous,
and what is started goes to the stream that is current there; a function that returns a number has waited for it.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Final

import numpy as np

from hurray_wire.memory import array_module, on_device_of

OPTIONS: Final = ("-std=c++17",)
"""What NVRTC is told."""

INTACT: Final = (1 << 64) - 1
"""The status word of an index that breaks no rule."""

_RULE_SHIFT: Final = 56

_BLOCK_THREADS: Final = 256
_BLOCKS_MAX: Final = 2048
"""Enough to fill any GPU; what is more, threads do in turns."""

_SUM_BLOCKS: Final = 512
_LANES_MAX: Final = 8
"""Groups of threads have at most 2**8: a block."""

_WORD_BYTES: Final = (16, 8, 4, 1)


def source() -> str:
    """The CUDA C source."""
    return resources.files(__package__).joinpath("kernels.cu").read_text(encoding="utf-8")


@functools.cache
def _module(xp: Any) -> Any:
    return xp.RawModule(code=source(), options=OPTIONS)


def _start(array: Any, name: str, threads: int, *arguments: Any, blocks_max: int = _BLOCKS_MAX) -> None:
    """Start a kernel on the GPU of `array`. Numbers go as 64-bit words unless they have a type already."""
    blocks = max(1, min(-(-threads // _BLOCK_THREADS), blocks_max))
    words = tuple(np.uint64(item) if isinstance(item, int) else item for item in arguments)
    with array.device:
        _module(array_module(array)).get_function(name)((blocks,), (_BLOCK_THREADS,), words)


def _new(array: Any, make: str, *arguments: Any, **options: Any) -> Any:
    """An array of the same GPU: `make` is the array module's function."""
    with array.device:
        return getattr(array_module(array), make)(*arguments, **options)


def _word_bytes(*sizes: int) -> int:
    """The widest word that divides all of these: addresses, strides, lengths."""
    return next(width for width in _WORD_BYTES if all(size % width == 0 for size in sizes))


def _lane_bits(words: int) -> int:
    """How many threads work together on so many words: 2**this."""
    return min(_LANES_MAX, max(0, (words - 1).bit_length()))


def copy_pages(source_rows: Any, source_ids: Any, target_rows: Any, target_ids: Any) -> None:
    """Copy rows of bytes, uint8 [.., page_bytes] on a GPU: row source_ids[i] to row target_ids[i].

    Ids are int64 [pages] on the host or there; None: every row, in order. Rows may lie apart, and are one piece each.
    Ids must be in bounds, those of the target distinct.
    """
    count = (source_rows if source_ids is None else source_ids).shape[0]
    page_bytes = source_rows.shape[1]
    if not count or not page_bytes:
        return
    width = _word_bytes(
        source_rows.data.ptr, target_rows.data.ptr, source_rows.strides[0], target_rows.strides[0], page_bytes
    )
    words = page_bytes // width
    lane_bits = _lane_bits(-(-words // 4))
    ids = [np.uint64(0) if item is None else on_device_of(source_rows, item) for item in (source_ids, target_ids)]
    _start(
        source_rows,
        f"copy_pages_{width}",
        count * max(1 << lane_bits, -(-words // 4)),
        source_rows,
        source_rows.strides[0],
        ids[0],
        target_rows,
        target_rows.strides[0],
        ids[1],
        count,
        words,
        np.uint32(lane_bits),
    )


# --- the index ------------------------------------------------------------------------------------------------------


def index_status(seq_ptr: Any, block_table: Any, token_counts: Any, *, num_pages: int, page_size: int) -> int:
    """What `validate.index_status` returns, of index buffers on a GPU: seq_ptr and block_table of one type, uint32 or
    uint64, token_counts uint64."""
    status = _new(seq_ptr, "full", 1, np.uint64(INTACT), dtype=np.uint64)
    width, entries, num_seqs = seq_ptr.dtype.itemsize, block_table.size, token_counts.size
    _start(
        seq_ptr,
        f"check_index_{width}",
        max(entries, num_seqs + 1),
        seq_ptr,
        token_counts,
        num_seqs,
        block_table,
        entries,
        num_pages,
        page_size,
        status,
    )
    found = int(status[0])
    if found != INTACT:
        return found
    # Of bounds that hold: each page by its first entry.
    if num_pages > entries:
        return status_word("compact", entries)
    first = _new(seq_ptr, "full", num_pages, np.uint32(0xFFFFFFFF), dtype=np.uint32)
    _start(seq_ptr, f"first_use_{width}", entries, block_table, entries, first)
    _start(seq_ptr, "check_compact", num_pages, first, num_pages, status)
    return int(status[0])


INDEX_RULES: Final = ("V1", "V3", "V2", "V4", "V6", "compact")
"""In the order in which they are looked at, which decides what a status word tells of several violations."""


def status_word(rule: str, index: int) -> int:
    """A violation as a status word; the least of several is the one that counts."""
    return INDEX_RULES.index(rule) << _RULE_SHIFT | index


def read_status(status: int) -> tuple[str, int]:
    """Rule and first index of a status word that is not INTACT."""
    return INDEX_RULES[status >> _RULE_SHIFT], status & ((1 << _RULE_SHIFT) - 1)


def live_slots(seq_ptr: Any, block_table: Any, token_counts: Any, *, num_pages: int, page_size: int) -> Any:
    """What `pages.live_slots` returns, on the GPU, of index buffers there that were checked."""
    live = _new(seq_ptr, "zeros", num_pages, dtype=np.uint32)
    if block_table.size:
        _start(
            seq_ptr,
            f"live_slots_{seq_ptr.dtype.itemsize}",
            block_table.size,
            seq_ptr,
            token_counts,
            token_counts.size,
            block_table,
            block_table.size,
            page_size,
            live,
        )
    return live


# --- dead slots -----------------------------------------------------------------------------------------------------


class DirtySlots:
    """Counts slots that were not clear, each once, whatever arrays of it are scrubbed."""

    def __init__(self, array: Any, slot_count: int) -> None:
        self.seen = _new(array, "zeros", max(1, -(-slot_count // 32)), dtype=np.uint32)
        self.count = _new(array, "zeros", 1, dtype=np.uint64)

    def total(self) -> int:
        """How many there were."""
        return int(self.count[0])


def scrub(pool: Any, live: Any, *, page_size: int, slot_bits: int, clear: int, dirty: DirtySlots | None) -> None:
    """Clear the dead slots of a pool, uint8 of one axis, from a page's beginning on: `live` uint32 [pages], of its
    pages alone. `clear`: the byte of a cleared element, 0 where slots are no whole bytes. See `pages.scrub`."""
    pages = live.size
    counted = (np.uint64(0), np.uint64(0)) if dirty is None else (dirty.seen, dirty.count)
    live = on_device_of(pool, live)
    if slot_bits % 8:
        assert not clear
        slots = pages * page_size
        threads = -(-slots * slot_bits // 8)
        _start(pool, "scrub_bits", threads, pool, live, slots, page_size, slot_bits, *counted)
        return
    width = _word_bytes(pool.data.ptr, slot_bits // 8)
    words = slot_bits // 8 // width
    lane_bits = min(5, _lane_bits(page_size * words))
    _start(
        pool,
        f"scrub_slots_{width}",
        pages << lane_bits,
        pool,
        live,
        pages,
        page_size,
        words,
        np.uint32(clear),
        np.uint32(lane_bits),
        *counted,
    )


def scrub_entries(entries: Any, live: Any, *, page_size: int, clear: int, dirty: DirtySlots | None) -> None:
    """Set the entries of dead slots, uint16 or uint32 [slots], to the word `clear`. See `pages.scrub_parameters`."""
    if not entries.size:
        return
    counted = (np.uint64(0), np.uint64(0)) if dirty is None else (dirty.seen, dirty.count)
    name = f"scrub_entries_{entries.dtype.itemsize}"
    clear_word = np.uint32(clear)
    live = on_device_of(entries, live)
    _start(entries, name, entries.size, entries, live, entries.size, page_size, clear_word, *counted)


# --- checksums ------------------------------------------------------------------------------------------------------


def mix64_sum(data: Any) -> int:
    """The sum of all mixed words of `checksum.MIX64`, of uint8 [n] on a GPU."""
    if data.data.ptr % 16:
        with data.device:
            data = data.copy()
    threads = max(1, data.size // 16)
    blocks = min(-(-threads // _BLOCK_THREADS), _SUM_BLOCKS)
    sums = _new(data, "zeros", blocks * _BLOCK_THREADS, dtype=np.uint64)
    _start(data, "mix64_sums", threads, data, data.size, sums, blocks_max=_SUM_BLOCKS)
    with data.device:
        return int(sums.sum())
