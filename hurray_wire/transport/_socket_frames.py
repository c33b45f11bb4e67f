"""What crosses a socket transport's connection once it is bound to its two peers.

Offset Size Type  Field    Rule
 0     8    u64   kind     a Kind
 8     8    u64   tag      of the message; for CLEAR and DATA the number of its announcement; for CREDIT 0
16     8    u64   length   bytes, see Kind

Little-endian. A body follows EAGER and DATA. Announcements are numbered from 0 on each connection and direction, by
both sides, in the order they are sent.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from hurray_wire.errors import ProtocolViolation

_HEADER: Final = struct.Struct("<QQQ")
HEADER_BYTES: Final = _HEADER.size

FRAMES_VERSION: Final = "1"

CREDIT_BYTES: Final = 1 << 20
"""What a sender may have on the way in EAGER messages that the receiver has not told to be taken, by `eager_cost`."""

MAX_ANNOUNCED: Final = 8192
"""Announcements that a sender may have open: neither dropped nor arrived."""

MAX_MESSAGE_BYTES: Final = 1 << 40

_EAGER_OVERHEAD_BYTES: Final = 512
"""Counted for each EAGER message beyond its bytes: what it takes to keep it."""


class Kind(IntEnum):
    """EAGER: a message whole, at most `eager_max_bytes`. ANNOUNCE: a message that waits at its sender, `length` bytes.
    CLEAR: the answer, the receiver takes the first `length` bytes of it; 0 drops it. DATA: those bytes. CREDIT:
    EAGER messages of `length` in all were taken."""

    EAGER = 1
    ANNOUNCE = 2
    CLEAR = 3
    DATA = 4
    CREDIT = 5


_KINDS: Final = {int(kind): kind for kind in Kind}


def pack(kind: Kind, tag: int, length: int) -> bytes:
    """A frame's header."""
    return _HEADER.pack(kind, tag, length)


def unpack(buffer: memoryview, offset: int) -> tuple[Kind, int, int]:
    """Kind, tag and length of the header at `offset`. Raises ProtocolViolation for a kind that is none."""
    number, tag, length = _HEADER.unpack_from(buffer, offset)
    kind = _KINDS.get(number)
    if kind is None:
        raise violation("kind", number, "1 to 5")
    return kind, tag, length


def eager_cost(nbytes: int) -> int:
    """What an EAGER message counts against CREDIT_BYTES."""
    return nbytes + _EAGER_OVERHEAD_BYTES


def violation(field: str, offered: object, required: str) -> ProtocolViolation:
    """The error for a frame that the protocol does not allow here."""
    return ProtocolViolation(
        f"the peer sent a frame whose {field} is {offered}; it must be {required}",
        field=f"frame.{field}",
        offered=offered,
        required=required,
    )
