"""Bounds on everything a peer can make this side hold or do. Checked before memory is taken, in exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
"""Alignment of every buffer on the wire and in memory, and the unit of the arena."""

KEY_MAX_BYTES: Final = 512

SHM_STAGING_BYTES: Final = 8 << 20
"""What shm stages for each peer at once: far more than this does not stay in the processor's cache. Chunks beyond it
are copied once more."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a transport is fed where nobody says otherwise: bytes of a chunk, chunks in flight per transfer."""

    chunk_bytes: int
    window: int
    in_flight_max_bytes: int | None = None
    """More is slower, whatever chunks and window are."""
    scatter_window: int | None = None
    """Of targets that scatter chunks as they arrive, where another than `window` is faster."""


# Below 512 KiB throughput falls; far above 4 MiB one progress call runs long and commands wait.
_PACE: Final = Pace(chunk_bytes=4 << 20, window=4)
_PACES: Final = {
    "tcp": Pace(chunk_bytes=4 << 20, window=2, scatter_window=4),
    "shm": Pace(chunk_bytes=4 << 20, window=4, in_flight_max_bytes=SHM_STAGING_BYTES),
    "ucx": Pace(chunk_bytes=2 << 20, window=2),
}


def chunk_bytes_for(transport: str, configured: int | None = None) -> int:
    """Bytes of the chunks that a source makes for this transport."""
    return configured or _PACES.get(transport, _PACE).chunk_bytes


def window_for(transport: str, chunk_bytes: int, configured: int | None = None, *, scatters: bool = False) -> int:
    """Chunks that a target lets its source have in flight over this transport."""
    pace = _PACES.get(transport, _PACE)
    window = configured or (scatters and pace.scatter_window) or pace.window
    return window if pace.in_flight_max_bytes is None else max(1, min(window, pace.in_flight_max_bytes // chunk_bytes))


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
    max_message_bytes: int = 8 << 20
    """gRPC message size, both directions: an offer of all tensors and sequences that are allowed fits. Parsed, a
    hostile message takes up to 40 times its size."""
