"""Checksums of chunks: 64-bit words that the source computes over what it sends and the target over what arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from hurray_wire.errors import CapabilityMismatch


@dataclass(frozen=True, slots=True)
class Hash:
    """One kind of checksum. `number` is its value in the control plane's Checksum enum."""

    name: str
    number: int
    compute: Callable[[Any], int]

    @property
    def verifies(self) -> bool:
        """False for the kind that checks nothing."""
        return self.number != NONE.number

    def __call__(self, buffer: Any) -> int:
        """The checksum of a contiguous buffer."""
        return self.compute(buffer)


NONE: Final = Hash("none", 1, lambda _: 0)
XXH3_64: Final = Hash("xxh3_64", 2, xxhash.xxh3_64_intdigest)

_BY_NUMBER: Final = {hash_.number: hash_ for hash_ in (NONE, XXH3_64)}


def hash_of(number: int) -> Hash:
    """The hash with this number in the Checksum enum. Raises CapabilityMismatch for one this version lacks."""
    try:
        return _BY_NUMBER[number]
    except KeyError:
        known = ", ".join(f"{number} ({hash_.name})" for number, hash_ in _BY_NUMBER.items())
        raise CapabilityMismatch("unknown checksum", field="checksum", offered=number, required=known) from None
