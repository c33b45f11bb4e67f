"""The rules on contents (RULES.md V1-V9, V11-V14): index buffers, token counts, parameters, pad bits.

Everything here reads untrusted bytes. Values are compared unsigned at full width and sums are exact: a page id of
2**64-1 is a large page id, never -1. A `BlockStructure` that left `read_structure` is safe to index with.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from .descriptor import Descriptor
from .errors import InvalidContents, LimitExceeded, Misuse
from .memory import array_module, byte_view, is_on_device, on_device_of, to_host
from .packing import E8M0_TAG
from .parameters import Buffer, parameter_arrays
from .policy import STRICT, Policy
from .quantization import storage_range

Counts = npt.NDArray[np.uint64]
Index = npt.NDArray[np.unsignedinteger[Any]]

BUFFER_NAMES: Final = ("page_pool", "block_table", "seq_ptr")

# Rows of a pool that are compared at a time: bounds the temporary memory of a check, whatever the pool's size.
_CHECK_BYTES: Final = 16 << 20

# Up to this many values Python's integers are faster than NumPy's calls.
_FEW: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class BlockStructure:
    """Which pages hold which tokens: the index buffers of one snapshot and its token counts, checked.

    `seq_ptr` is uint64 [num_seqs + 1], `block_table` uint32 or uint64 [total_logical_pages] in the type it has on
    the wire, `token_counts` uint64 [num_seqs]. Sequence s holds the pages block_table[seq_ptr[s]:seq_ptr[s + 1]].
    """

    page_size: int
    num_pages: int
    seq_ptr: Counts
    block_table: Index
    token_counts: Counts

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return int(self.token_counts.size)

    @property
    def total_logical_pages(self) -> int:
        """Number of block_table entries."""
        return int(self.block_table.size)

    @property
    def total_tokens(self) -> int:
        """Sum of the token counts, exact."""
        return exact_sum(self.token_counts)

    def same_as(self, other: BlockStructure) -> bool:
        """True if both give every token the same page and slot, in index buffers of the same type."""
        return (
            (self.page_size, self.num_pages) == (other.page_size, other.num_pages)
            and self.block_table.dtype == other.block_table.dtype
            and np.array_equal(self.seq_ptr, other.seq_ptr)
            and np.array_equal(self.block_table, other.block_table)
            and np.array_equal(self.token_counts, other.token_counts)
        )


def exact_sum(counts: Counts) -> int:
    """Sum of unsigned 64-bit values as a Python integer. Fewer than 2**32 values, so neither half can wrap."""
    if counts.size <= _FEW:
        return sum(counts.tolist())
    high, low = counts >> np.uint64(32), counts & np.uint64(0xFFFFFFFF)
    return (int(high.sum(dtype=np.uint64)) << 32) + int(low.sum(dtype=np.uint64))


def pages_needed(token_counts: Counts, page_size: int) -> Counts:
    """Pages that each sequence's tokens reach, uint64 [num_seqs]; page_size >= 1."""
    size = np.uint64(page_size)
    needed: Counts = token_counts // size + (token_counts % size != 0)
    return needed


def _refuse(rule: str, field: str, message: str, **details: Any) -> NoReturn:
    raise InvalidContents(message, rule=rule, field=field, **details)


def as_token_counts(token_counts: Sequence[int] | npt.NDArray[Any]) -> Counts:
    """Token counts from a caller or a peer as a uint64 array of our own. Raises InvalidContents (V9)."""
    counts = token_counts if isinstance(token_counts, np.ndarray) else _integer_array(token_counts)
    if counts.ndim != 1:
        _refuse(
            "V9", "token_counts", "token counts have one axis", offered=f"shape {counts.shape}", required="one axis"
        )
    if counts.size == 0:
        return np.zeros(0, dtype=np.uint64)
    if counts.dtype.kind == "i" and int(counts.min()) < 0:
        index = int(np.argmax(counts < 0))
        _refuse(
            "V9", "token_counts", "a token count is negative", index=index, offered=int(counts[index]), required=">= 0"
        )
    if counts.dtype.kind not in "iu":
        _refuse("V9", "token_counts", "token counts are integers", offered=counts.dtype, required="integers")
    return counts.astype(np.uint64)


def _integer_array(numbers: Sequence[int]) -> npt.NDArray[Any]:
    array = np.asarray(numbers)
    if array.dtype.kind in "iu" or array.size == 0 or array.ndim != 1:
        return array
    # Python integers that no one NumPy type holds arrive as floats or objects: look at each.
    for index, number in enumerate(numbers):
        try:
            value = operator.index(number)
        except TypeError:
            value = -1
        if not 0 <= value < 1 << 64 or isinstance(number, bool):
            _refuse(
                "V9", "token_counts", "not a token count", index=index, offered=number, required="0 <= count < 2**64"
            )
    return np.array(numbers, dtype=np.uint64)


def check_token_counts(descriptor: Descriptor, token_counts: Sequence[int] | npt.NDArray[Any]) -> Counts:
    """What a descriptor and the counts alone can show, before any payload: V9, V7, and V6 over the whole batch.

    Returns the counts as uint64 [num_seqs]. Raises InvalidContents.
    """
    counts = as_token_counts(token_counts)
    _check_count_number(counts, descriptor.num_seqs)
    _check_count_sum(counts, descriptor.total_tokens)
    needed = exact_sum(pages_needed(counts, descriptor.page_size))
    if needed > descriptor.total_logical_pages:
        _refuse(
            "V6",
            "token_counts",
            f"the token counts need {needed} pages of {descriptor.page_size} tokens",
            offered=needed,
            required=f"<= {descriptor.total_logical_pages} entries of block_table",
        )
    return counts


def _check_count_number(counts: Counts, num_seqs: int) -> None:
    if counts.size != num_seqs:
        _refuse("V9", "token_counts", "one token count per sequence", offered=counts.size, required=num_seqs)


def _check_count_sum(counts: Counts, total_tokens: int) -> None:
    total = exact_sum(counts)
    if total != total_tokens:
        _refuse("V7", "token_counts", "the token counts do not sum to shape[0]", offered=total, required=total_tokens)


def check_buffer_lengths(descriptor: Descriptor, buffers: Sequence[Buffer]) -> None:
    """V5: as many buffers as the descriptor has handles, each exactly as long as its handle declares."""
    if len(buffers) != len(descriptor.buffers):
        _refuse("V5", "buffers", "number of buffers", offered=len(buffers), required=len(descriptor.buffers))
    for index in range(len(buffers)):
        _check_length(descriptor, index, byte_view(buffers[index]).size)


def _check_length(descriptor: Descriptor, index: int, size: int) -> None:
    declared = descriptor.buffers[index].byte_size
    if size != declared:
        name = BUFFER_NAMES[index] if index < len(BUFFER_NAMES) else f"buffers[{index}]"
        _refuse("V5", name, f"{name} is not as long as its handle declares", offered=size, required=declared)


def read_structure(
    descriptor: Descriptor,
    block_table: Buffer,
    seq_ptr: Buffer,
    token_counts: Sequence[int] | npt.NDArray[Any],
    policy: Policy = STRICT,
) -> BlockStructure:
    """The block structure of untrusted index buffers, checked (V1-V7, V9) and copied.

    Surplus pages (V8) are accepted. The copy is what is checked: the buffers may change afterwards. A permissive
    policy is refused, because what it would let pass must never be indexed with.

    Raises InvalidContents naming rule, index and value; LimitExceeded; Misuse.
    """
    table, pointers = index_arrays(descriptor, block_table, seq_ptr, policy)
    structure = copy_structure(descriptor, table, pointers, token_counts)
    check_structure(structure)
    return structure


def index_arrays(descriptor: Descriptor, block_table: Buffer, seq_ptr: Buffer, policy: Policy = STRICT) -> list[Any]:
    """block_table and seq_ptr of untrusted buffers, of the host or a GPU, as arrays in the type of the wire: of the
    declared lengths, within the limits. Raises InvalidContents (V5), LimitExceeded, Misuse for a permissive policy."""
    if policy.permissive:
        raise Misuse("a permissive reading gives no block structure: it may not reach lookup or gather")
    limits = policy.limits
    for field, offered, limit in (
        ("num_seqs", descriptor.num_seqs, limits.max_sequences),
        ("block_table", descriptor.total_logical_pages, limits.max_index_entries),
    ):
        if offered > limit:
            raise LimitExceeded(
                f"{field} has more entries than the limit", field=field, offered=offered, required=limit
            )
    arrays = []
    for number, buffer in ((1, block_table), (2, seq_ptr)):
        data = byte_view(buffer)
        _check_length(descriptor, number, data.size)
        arrays.append(data.view(descriptor.index_dtype))
    return arrays


def copy_structure(
    descriptor: Descriptor,
    block_table: npt.NDArray[Any],
    seq_ptr: npt.NDArray[Any],
    token_counts: Sequence[int] | npt.NDArray[Any],
) -> BlockStructure:
    """A structure of our own of index arrays on the host, its token counts checked (V7, V9), the rest not yet."""
    # The token counts of a whole batch must sum to shape[0] before any of them is compared with its pages.
    counts = as_token_counts(token_counts)
    _check_count_number(counts, descriptor.num_seqs)
    _check_count_sum(counts, descriptor.total_tokens)
    return BlockStructure(
        page_size=descriptor.page_size,
        num_pages=descriptor.num_pages,
        seq_ptr=seq_ptr.astype(np.uint64),
        block_table=block_table.astype(descriptor.index_dtype.newbyteorder("=")),
        token_counts=counts,
    )


def check_structure(structure: BlockStructure) -> None:
    """V1-V4, V6 and V9 on arrays. Raises InvalidContents naming rule, index and value."""
    seq_ptr, counts = structure.seq_ptr, structure.token_counts
    check_index(seq_ptr, structure.block_table, structure.num_pages)
    _check_count_number(counts, seq_ptr.size - 1)
    pages = seq_ptr[1:] - seq_ptr[:-1]
    short = pages_needed(counts, structure.page_size) > pages
    if short.any():
        index = int(np.argmax(short))
        _refuse(
            "V6",
            "token_counts",
            f"sequence {index} has more tokens than its {int(pages[index])} pages hold",
            index=index,
            offered=int(counts[index]),
            required=f"<= {int(pages[index]) * structure.page_size}",
        )


def check_index(seq_ptr: Counts, table: Index, num_pages: int) -> None:
    """V1-V4 on index arrays, seq_ptr as uint64. Raises InvalidContents naming rule, index and value."""
    start = int(seq_ptr[0]) if seq_ptr.size else None
    if start != 0:
        _refuse("V1", "seq_ptr", "seq_ptr does not start at 0", index=0, offered=start, required=0)
    falls = seq_ptr[1:] < seq_ptr[:-1]
    if falls.any():
        index = int(np.argmax(falls)) + 1
        _refuse(
            "V3",
            "seq_ptr",
            "seq_ptr decreases",
            index=index,
            offered=int(seq_ptr[index]),
            required=f">= {int(seq_ptr[index - 1])}",
        )
    if int(seq_ptr[-1]) != table.size:
        _refuse(
            "V2",
            "seq_ptr",
            "seq_ptr does not end at the number of block_table entries",
            index=seq_ptr.size - 1,
            offered=int(seq_ptr[-1]),
            required=table.size,
        )
    check_page_ids(table, num_pages)


def check_page_ids(table: Index, num_pages: int) -> None:
    """V4: every page id below num_pages. Raises InvalidContents naming the first index and its value."""
    if table.size == 0 or int(table.max()) < num_pages:
        return
    # num_pages is at most the largest id here, so it fits the type of the table.
    index = int(np.argmax(table >= table.dtype.type(num_pages)))
    page = int(table[index])
    _refuse(
        "V4",
        "block_table",
        f"block_table[{index}] names page {page} of {num_pages}",
        index=index,
        offered=page,
        required=f"< {num_pages}",
    )


# --- parameters and pools ---------------------------------------------------------------------------------------


def check_parameters(
    descriptor: Descriptor, buffers: Sequence[Buffer | None], live: npt.NDArray[np.uint32] | None = None
) -> None:
    """V11 and V12 on every entry: scales finite and non-zero, zero points within the storage type.

    `buffers` are all of the tensor's, by the format's index; only those from 3 up are read. Entries of dead slots
    count: a source writes 1.0 and 0 there before it sends. `live` (uint32 [num_pages]) only serves the message.

    Raises InvalidContents naming the buffer, the entry and its value.
    """
    for entry, array in parameter_arrays(descriptor, buffers):
        if entry.kind == "scale":
            bits: npt.NDArray[Any] = array.view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)
            exponent = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[entry.dtype.name]
            magnitude = bits & bits.dtype.type((1 << (8 * array.dtype.itemsize - 1)) - 1)
            bad = (magnitude == 0) | (magnitude >= exponent)
            rule, required = "V11", "finite and not zero"
        else:
            low, high = storage_range(descriptor.type_tag)
            bad = (array < low) | (array > min(high, (1 << 31) - 1))
            rule, required = "V12", f"{low} to {high}, the range of {descriptor.element_type.name}"
        if bad.any():
            index = int(bad.argmax())
            _refuse(
                rule,
                f"buffers[{entry.buffer_index}]",
                f"{entry.kind} {index} is out of range" + _slot_note(descriptor, array.size, index, live),
                index=index,
                offered=to_host(array[index : index + 1]).view(entry.dtype)[0],
                required=required,
            )


def _slot_note(descriptor: Descriptor, entries: int, index: int, live: npt.NDArray[np.uint32] | None) -> str:
    if live is None or entries != descriptor.num_pages * descriptor.page_size:
        return ""
    page, slot = divmod(index, descriptor.page_size)
    return f", page {page} slot {slot}" + (" (live)" if slot < int(live[page]) else " (dead)")


def takes_any_bytes(descriptor: Descriptor) -> bool:
    """Whether no contents of pool and parameters can break a rule (V11-V14), so that there is nothing to check."""
    return (
        descriptor.quantization is None
        and descriptor.page_bytes is not None
        and descriptor.element_type.tag != E8M0_TAG
    )


def check_pool(
    descriptor: Descriptor, page_pool: npt.NDArray[np.uint8], live: npt.NDArray[np.uint32], first_page: int = 0
) -> None:
    """V13 on the whole pool, V14 on live slots, for a pool or a run of its whole pages.

    `page_pool` is uint8 in one contiguous piece: all of it, or whole pages from `first_page` on. `live` is uint32
    [num_pages], of all pages.

    Raises InvalidContents naming page and slot.
    """
    pool = page_pool.reshape(-1)
    element_type = descriptor.element_type
    rest = descriptor.num_pages * descriptor.page_elements % element_type.group_elements
    if rest and pool.size == descriptor.page_pool_bytes:
        last = int.from_bytes(to_host(pool[-element_type.group_bytes :]).tobytes(), "little")
        pad = last >> (rest * element_type.bits)
        if pad:
            _refuse("V13", "page_pool", "unused high bits of the last group are set", offered=hex(pad), required=0)
    if element_type.tag == E8M0_TAG and descriptor.page_elements:
        _check_e8m0(descriptor, pool, live, first_page)


def _check_e8m0(
    descriptor: Descriptor, pool: npt.NDArray[np.uint8], live: npt.NDArray[np.uint32], first_page: int
) -> None:
    slots = pool.reshape(-1, descriptor.page_size, descriptor.page_elements // descriptor.page_size)
    numbers = array_module(pool).arange(descriptor.page_size)
    if is_on_device(pool):
        live = on_device_of(pool, live)
    step = max(1, _CHECK_BYTES // descriptor.page_elements)
    for start in range(0, slots.shape[0], step):
        part = slots[start : start + step]
        # 0x00 and 0xFF are the two ends: one subtraction makes them the two largest.
        bad = ((part - np.uint8(1)) >= 0xFE).any(axis=2)
        page = first_page + start
        bad &= numbers < live[page : page + part.shape[0], None]
        if bad.any():
            found, slot = divmod(int(bad.argmax()), descriptor.page_size)
            _refuse(
                "V14",
                "page_pool",
                "a float8_e8m0 element of a live slot has no value",
                page=page + found,
                slot=slot,
                offered="0x00 or 0xFF",
                required="0x01 to 0xFE",
            )
