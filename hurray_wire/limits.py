"""Bounds on everything a peer can make this side hold or do. Checked before memory is taken, in exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
"""Alignment of every buffer on the wire and in memory, and the unit of the arena."""

KEY_MAX_BYTES: Final = 512

DEFAULT_CHUNK_BYTES: Final = 4 << 20
"""Below 512 KiB throughput falls; far above it one progress call runs long and commands wait."""

DEFAULT_WINDOW: Final = 4
"""Chunks in flight per transfer."""

MAX_WINDOW: Final = 16
"""Chunks that a source keeps in flight at most, whatever window a target allows: each takes staging memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one transfer may ask for. A receiver states its own in GetNode and refuses what is above."""

    max_tensors: int = 4096
    max_descriptor_bytes: int = 4096
    max_snapshot_bytes: int = 1 << 40
    max_sequences: int = 1 << 20
    max_index_entries: int = 1 << 26
    max_key_bytes: int = KEY_MAX_BYTES
    max_message_bytes: int = 8 << 20
    """gRPC message size, both directions: an offer of all tensors and sequences that are allowed fits. Parsed, a
    hostile message takes up to 40 times its size."""
