"""Checksums of chunks: 64-bit words that the source computes over what it sends and the target over what arrived.

A kind is a function of the bytes alone, wherever they are: in GPU memory `mix64` runs there, and `xxh3_64` on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from hurray_wire import kernels
from hurray_wire.errors import CapabilityMismatch
from hurray_wire.memory import byte_view, is_on_device, to_host

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_BLOCK_WORDS: Final = 1 << 13
"""Mixed at a time: what stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Hash:
    """One kind of checksum. `number` is its value in the control plane's Checksum enum."""

    name: str
    number: int
    compute: Callable[[Sequence[Any]], int]
    """Of contiguous buffers, one behind the other."""

    @property
    def verifies(self) -> bool:
        """False for the kind that checks nothing."""
        return self.number != NONE.number

    def __call__(self, buffer: Any) -> int:
        """The checksum of a contiguous buffer, or of a list of them as if they were one."""
        return self.compute(buffer if isinstance(buffer, list) else [buffer])


def _xxh3_64(buffers: Sequence[Any]) -> int:
    if len(buffers) == 1:
        (buffer,) = buffers
        host: Any = to_host(buffer) if is_on_device(buffer) else buffer
        return xxhash.xxh3_64_intdigest(host)
    state = xxhash.xxh3_64()
    update = state.update
    for buffer in buffers:
        update(buffer)
    return state.intdigest()


def _mix64(buffers: Sequence[Any]) -> int:
    """Of bytes b[0..n): mix((sum + n) mod 2**64), the sum being that of mix(w[i] + (i + 1) * STEP) over all
    little-endian 64-bit words w of b, the last one filled up with zeros, and mix the finisher of SplitMix64.

    Which words are added in which order does not matter, so a GPU computes it at the speed of its memory. One word that
    differs is always found, as mix is a bijection; anything else is missed once in 2**64. Nobody is kept from forging
    it, as with xxh3_64.
    """
    if is_on_device(buffers[0]):
        (buffer,) = buffers
        nbytes, total = buffer.size, kernels.mix64_sum(buffer.reshape(-1))
    else:
        data = np.concatenate([byte_view(buffer) for buffer in buffers]) if len(buffers) > 1 else byte_view(buffers[0])
        nbytes, total = data.size, _mixed_sum(data)
    return _mix(total + nbytes & _MASK)


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * _FACTORS[0] & _MASK
    word = (word ^ word >> 27) * _FACTORS[1] & _MASK
    return word ^ word >> 31


def _mixed_sum(data: npt.NDArray[np.uint8]) -> int:
    whole = data.size // 8
    words = data[: 8 * whole].view("<u8")
    steps = np.arange(1, min(whole, _BLOCK_WORDS) + 1, dtype=np.uint64) * np.uint64(_STEP)
    mixed, shifted = np.empty_like(steps), np.empty_like(steps)
    total = 0
    for start in range(0, whole, _BLOCK_WORDS):
        part = words[start : start + _BLOCK_WORDS]
        word, high = mixed[: part.size], shifted[: part.size]
        np.add(part, steps[: part.size], out=word)
        word += np.uint64(start * _STEP & _MASK)
        for shift, factor in zip((30, 27, 31), (*_FACTORS, 1), strict=True):
            np.right_shift(word, np.uint64(shift), out=high)
            word ^= high
            if factor != 1:
                word *= np.uint64(factor)
        total += int(word.sum(dtype=np.uint64))
    if data.size % 8:
        total += _mix(int.from_bytes(data[8 * whole :].tobytes(), "little") + (whole + 1) * _STEP & _MASK)
    return total


NONE: Final = Hash("none", 1, lambda _: 0)
XXH3_64: Final = Hash("xxh3_64", 2, _xxh3_64)
MIX64: Final = Hash("mix64", 3, _mix64)

HASHES: Final = {hash_.name: hash_ for hash_ in (NONE, XXH3_64, MIX64)}
"""All kinds, by name."""

_BY_NUMBER: Final = {hash_.number: hash_ for hash_ in HASHES.values()}


def hash_of(number: int) -> Hash:
    """The hash with this number in the Checksum enum. Raises CapabilityMismatch for one this version lacks."""
    try:
        return _BY_NUMBER[number]
    except KeyError:
        known = ", ".join(f"{number} ({hash_.name})" for number, hash_ in _BY_NUMBER.items())
        raise CapabilityMismatch("unknown checksum", field="checksum", offered=number, required=known) from None
