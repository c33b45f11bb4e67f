"""What two sides of the shm transport say to each other: one frame per packet.

Offset Size Type  Field
 0     1    u8    kind      Kind
 1     7    bytes -         zero
 8     8    u64   number    of a message that waits at its sender
16     8    u64   tag
24     8    u64   nbytes
32     8    u64   offset    in the ring of the one who speaks of it, or of the other in RELEASE; in a view, in GRAINS
40          bytes payload   of EAGER only: nbytes

Little-endian, packed; a field that a kind does not have is zero. A **message** is a send; it is **taken** when a
receive or a discard has met it. A sender never has more untaken than the limits here allow, so a receiver holds that
much for a peer and breaks with one that sends more.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from hurray_wire.errors import ProtocolViolation

PROTOCOL: Final = "2"
"""Version of the frames, the handshake and the limits below."""

EAGER_MAX_BYTES: Final = 16 << 10
"""Longest message that travels in the socket and completes without the receiver: each chunk of a small snapshot."""

EAGER_CREDIT_BYTES: Final = 1 << 20
"""How much of a sender's eager messages may be untaken, counted with `eager_cost`. Beyond it they are announced."""

EAGER_OVERHEAD_BYTES: Final = 256

MAX_ANNOUNCED: Final = 4096
"""Messages announced or staged and not yet taken."""

MAX_RING_BYTES: Final = 64 << 20

GRAINS_AT_ONCE: Final = 62
"""Descriptors of grains in one packet, beside which the pin has room."""

_FRAME: Final = struct.Struct("<B7s4Q")
_PADDING: Final = bytes(7)

FRAME_BYTES: Final = _FRAME.size
PACKET_MAX_BYTES: Final = FRAME_BYTES + EAGER_MAX_BYTES


class Kind(IntEnum):
    """Of a frame."""

    EAGER = 1
    """tag, nbytes. The message itself."""
    ANNOUNCE = 2
    """number, tag, nbytes. A message that waits at the sender; numbers count up from 0."""
    STAGED = 3
    """tag, nbytes, offset. A message that is in the ring, until RELEASE."""
    PULL = 4
    """number, nbytes. An announced message is taken; this much of its beginning is wanted, maybe nothing."""
    PIECE = 5
    """number, nbytes, offset. The next piece of a pulled message is in the ring, until RELEASE."""
    RELEASE = 6
    """offset. What was in the ring there has been copied."""
    CREDIT = 7
    """nbytes. Eager messages of this cost were taken since the last."""
    RING = 8
    """nbytes. The sender's ring: the packet carries its descriptor. Once, before the first STAGED or PIECE."""
    VIEW = 9
    """number, tag, nbytes. A view that waits at the sender as an announced message does. A PULL wants nothing, or all
    that was not shown yet, and is answered with one GRAINS; so is the next, until all is shown."""
    GRAINS = 10
    """number, nbytes, offset. The packet carries descriptors of the next grains of a pulled view, from `offset` on, of
    `nbytes` each; with the last of them, as its last descriptor, the pin."""


_FIELDS: Final = {
    Kind.EAGER: {"tag", "nbytes"},
    Kind.ANNOUNCE: {"number", "tag", "nbytes"},
    Kind.STAGED: {"tag", "nbytes", "offset"},
    Kind.PULL: {"number", "nbytes"},
    Kind.PIECE: {"number", "nbytes", "offset"},
    Kind.RELEASE: {"offset"},
    Kind.CREDIT: {"nbytes"},
    Kind.RING: {"nbytes"},
    Kind.VIEW: {"number", "tag", "nbytes"},
    Kind.GRAINS: {"number", "nbytes", "offset"},
}
_ABSENT: Final = {kind: tuple({"number", "tag", "nbytes", "offset"} - fields) for kind, fields in _FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """See the module."""

    kind: Kind
    number: int = 0
    tag: int = 0
    nbytes: int = 0
    offset: int = 0

    def encode(self) -> bytes:
        return _FRAME.pack(self.kind, _PADDING, self.number, self.tag, self.nbytes, self.offset)


def decode(packet: memoryview) -> Frame:
    """The frame at the beginning of a packet. Raises ProtocolViolation unless it and the packet's length are right."""
    if len(packet) < FRAME_BYTES:
        raise violation("packet", f"{len(packet)} bytes", f"at least {FRAME_BYTES}")
    code, padding, *fields = _FRAME.unpack_from(packet)
    try:
        kind = Kind(code)
    except ValueError:
        raise violation("kind", code, f"1 to {max(Kind)}") from None
    frame = Frame(kind, *fields)
    if padding != _PADDING or any(getattr(frame, name) for name in _ABSENT[kind]):
        raise violation("frame", f"{frame} with more than it has", f"zero in all but {sorted(_FIELDS[kind])}")
    payload_bytes = frame.nbytes if kind is Kind.EAGER else 0
    if len(packet) - FRAME_BYTES != payload_bytes:
        raise violation("packet", f"{len(packet)} bytes", f"{FRAME_BYTES + payload_bytes} for this {kind.name}")
    return frame


def grains_at_once(left_bytes: int, grain_bytes: int) -> int:
    """Grains in the next packet of a view of which so much was not shown yet."""
    return min(GRAINS_AT_ONCE, -(-left_bytes // grain_bytes))


def eager_cost(nbytes: int) -> int:
    """What an eager message counts for: its bytes, and what it takes to remember it."""
    return nbytes + EAGER_OVERHEAD_BYTES


def violation(field: str, offered: object, required: object) -> ProtocolViolation:
    """A frame that the protocol does not allow."""
    return ProtocolViolation(
        f"the peer broke the protocol of shared memory: {field} is {offered}, required is {required}",
        field=f"shm.{field}",
        offered=offered,
        required=required,
    )
