"""Single elements and whole sequences out of a snapshot, stored or dequantized (block-paged.txt, Element Lookup).

Reference quality: written to be read beside the format's formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .descriptor import Descriptor
from .dtypes import ElementType
from .errors import InvalidRequest, Unsupported
from .memory import byte_view, is_on_device, on_device_of, to_host
from .packing import unpack, values, word_dtype
from .parameters import Buffer, parameter_arrays
from .quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine
from .validate import BlockStructure


@dataclass(frozen=True, slots=True)
class Lookup:
    """One element: where it lies and what it is.

    `flat` counts elements from the start of page_pool; `raw` is its bits as an unsigned integer. The last four are
    None where the tensor is not quantized: the stored integer, its scale and zero point, and `real` in float32.
    """

    page: int
    slot: int
    flat: int
    raw: int
    stored: int | None = None
    scale: float | None = None
    zero_point: int | None = None
    real: float | None = None


def lookup(  # noqa: PLR0917 - the four coordinates of an element
    descriptor: Descriptor, structure: BlockStructure, buffers: Sequence[Any], s: int, t: int, h: int, d: int
) -> Lookup:
    """The element of token `t` of sequence `s`, head `h`, dimension `d`.

    `buffers` are the tensor's, by the format's index: page_pool as uint8 (the whole pool or [num_pages, page_bytes])
    or as words [num_pages, page_size, num_heads, head_dim], and the parameters from 3 up. The structure is checked.

    Raises InvalidRequest (V10) for a token the sequence does not have, or an s, h or d out of range.
    """
    _check_range("s", s, structure.num_seqs)
    _check_range("t", t, int(structure.token_counts[s]))
    _check_range("h", h, descriptor.num_heads)
    _check_range("d", d, descriptor.head_dim)
    page_in_seq, slot = divmod(t, structure.page_size)
    page = int(structure.block_table[int(structure.seq_ptr[s]) + page_in_seq])
    flat = ((page * structure.page_size + slot) * descriptor.num_heads + h) * descriptor.head_dim + d
    raw = _raw(descriptor.element_type, buffers[0], flat, (page, slot, h, d))
    scheme = descriptor.quantization
    if scheme is None:
        return Lookup(page, slot, flat, raw)
    stored = _stored(descriptor.element_type, raw)
    if isinstance(scheme, PerTensorAffine):
        scale, zero_point = scheme.scale, scheme.zero_point
    else:
        entry = page * structure.page_size + slot if isinstance(scheme, PerBlockAffine) else (h, d)[scheme.axis - 1]
        found = {
            item.kind: to_host(array).view(item.dtype)[entry] for item, array in parameter_arrays(descriptor, buffers)
        }
        scale, zero_point = float(found["scale"]), int(found.get("zero_point", 0))
    real = float(np.float32(scale) * np.float32(stored - zero_point))
    return Lookup(page, slot, flat, raw, stored, scale, zero_point, real)


def _check_range(field: str, index: int, end: int) -> None:
    if not 0 <= index < end:
        raise InvalidRequest(
            "no such element", rule="V10", field=field, offered=index, required=f"0 <= {field} < {end}"
        )


def _raw(element_type: ElementType, page_pool: Any, flat: int, place: tuple[int, int, int, int]) -> int:
    if page_pool.ndim == 4:
        return int.from_bytes(to_host(page_pool[place]).tobytes(), "little")
    first_bit = flat * element_type.bits
    end_bit = first_bit + element_type.bits
    used = to_host(page_pool.reshape(-1)[first_bit // 8 : -(-end_bit // 8)])
    return (int.from_bytes(used.tobytes(), "little") >> (first_bit % 8)) & ((1 << element_type.bits) - 1)


def _stored(element_type: ElementType, raw: int) -> int:
    sign = 1 << (element_type.bits - 1)
    return raw - 2 * sign if element_type.name.startswith("int") and raw & sign else raw


def tokens(
    descriptor: Descriptor, structure: BlockStructure, buffers: Sequence[Any], seq: int, *, dequantize: bool = False
) -> npt.NDArray[Any]:
    """All tokens of sequence `seq` in order, a copy: [tokens, num_heads, head_dim] of the stored values.

    The dtype is NumPy's or ml_dtypes' own of the element type (raw bytes where there is none); float32 with
    `dequantize`, which on a tensor without a scheme only widens. `buffers` as in `lookup`. A pool whose pages are no
    whole bytes is unpacked as a whole.

    Raises InvalidRequest for a sequence that is not there; Unsupported for a type with no float32 form.
    """
    _check_range("seq", seq, structure.num_seqs)
    first, end = int(structure.seq_ptr[seq]), int(structure.seq_ptr[seq + 1])
    count = int(structure.token_counts[seq])
    needed = -(-count // structure.page_size)
    pages = structure.block_table[first:end][:needed]
    words = _page_words(descriptor, buffers[0], pages)[:count]
    stored = values(words, descriptor.element_type)
    return _dequantize(descriptor, buffers, stored, pages) if dequantize else stored


def _page_words(descriptor: Descriptor, page_pool: Any, pages: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The named pages as words, [pages * page_size, num_heads, head_dim], a copy."""
    element_type = descriptor.element_type
    shape = (pages.size * descriptor.page_size, descriptor.num_heads, descriptor.head_dim)
    if descriptor.page_elements == 0:
        return np.empty(shape, dtype=word_dtype(element_type))
    ids = pages.astype(np.intp)
    if page_pool.ndim == 4:
        return to_host(_taken(page_pool, ids)).reshape(shape)
    if descriptor.page_bytes is None:
        words = unpack(to_host(page_pool.reshape(-1)), element_type, descriptor.num_pages * descriptor.page_elements)
        return words.reshape(descriptor.num_pages, descriptor.page_elements)[ids].reshape(shape)
    rows = to_host(_taken(page_pool.reshape(descriptor.num_pages, descriptor.page_bytes), ids))
    return unpack(rows.reshape(-1), element_type, ids.size * descriptor.page_elements).reshape(shape)


def _taken(pages: Any, ids: npt.NDArray[np.intp]) -> Any:
    if not is_on_device(pages):
        return pages[ids]
    with pages.device:
        return pages[on_device_of(pages, ids)]


def _dequantize(
    descriptor: Descriptor, buffers: Sequence[Any], stored: npt.NDArray[Any], pages: npt.NDArray[Any]
) -> npt.NDArray[np.float32]:
    scheme = descriptor.quantization
    if scheme is None:
        if stored.dtype.kind in "cV" and descriptor.element_type.numpy in (None, np.complex64, np.complex128):
            name = descriptor.element_type.name
            raise Unsupported("values of this type have no float32 form", field="dequantize", offered=name)
        return stored.astype(np.float32)
    scale: Any = np.float32(scheme.scale) if isinstance(scheme, PerTensorAffine) else None
    zero_point: Any = scheme.zero_point if isinstance(scheme, PerTensorAffine) else 0
    for parameter, stored_array in parameter_arrays(descriptor, buffers):
        array = to_host(stored_array).view(parameter.dtype)
        if isinstance(scheme, PerChannelAffine):
            entries = array[:, None] if scheme.axis == 1 else array
        else:
            paged = array.reshape(descriptor.num_pages, descriptor.page_size)[pages.astype(np.intp)]
            entries = paged.reshape(-1)[: stored.shape[0], None, None]
        if parameter.kind == "scale":
            scale = entries.astype(np.float32)
        else:
            zero_point = entries.astype(np.int64)
    shifted = stored.astype(np.int64) - zero_point
    dequantized: npt.NDArray[np.float32] = scale * shifted.astype(np.float32)
    return dequantized


def as_buffers(descriptor: Descriptor, buffers: Sequence[Buffer]) -> list[npt.NDArray[np.uint8]]:
    """Buffers of any kind, by the format's index, as the uint8 arrays that the functions here take, without a copy."""
    assert len(buffers) == len(descriptor.buffers)
    return [byte_view(buffer) for buffer in buffers]
