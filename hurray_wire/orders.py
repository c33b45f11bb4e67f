"""What a data plane is told to do with a transfer, and what it says of it: the messages at its edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hurray_wire import session as s
from hurray_wire.checksum import Hash
from hurray_wire.errors import HurrayError
from hurray_wire.payload import SourcePayload, TargetPayload, TargetSummary


@dataclass(frozen=True, slots=True)
class PrepareCommit:
    """Output of a target: the snapshot is complete, valid and clean; answer with Committed or CommitRefused."""

    summary: TargetSummary
    verified_chunk_count: int
    stages: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Last output of a transfer. `stages`: seconds in each, in order."""

    error: HurrayError | None
    receipt: Any
    stages: tuple[tuple[str, float], ...]


Output = s.TellAccept | s.TellChecksums | s.TellStop | s.TellReceipt | PrepareCommit | Ended


class Listener(Protocol):
    """Where the outputs of one transfer go."""

    def __call__(self, output: Output) -> None:
        """Called in the data-plane thread; must not block or raise."""


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """Begin to send. The offer has been told, or is about to be; the answer comes through `accept`."""

    peer: int
    payload: SourcePayload
    hash: Hash
    budget_s: float
    listener: Listener
    ready_tensors: int | None = None
    """Tensors that may be sent at the start; None: all; below 0: not even the index."""


@dataclass(frozen=True, slots=True)
class TargetOrder:
    """Begin to receive what was offered."""

    peer: int
    transport: str
    payload: TargetPayload
    hash: Hash
    budget_s: float
    window: int
    listener: Listener
    checksums: tuple[int, ...] = ()
    """Those of the first chunks, where they came with the offer."""
    chunk_counts: tuple[int, int] | None = None
    """Of all chunks, and of those of the index, where the payload's plan is to be looked at as late as possible."""
