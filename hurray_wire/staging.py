"""Memory that a source stages chunks in, before they are sent: on loan, and used again. One thread's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hurray_wire.image import Chunk, ImagePlan
from hurray_wire.memory import huge_empty
from hurray_wire.payload import SourcePayload
from hurray_wire.transport.base import Buffer, Endpoint

KEEP_BYTES: Final = 64 << 20
"""Kept for the next transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Where a chunk is staged: memory of `Staging`, of the connection that it goes out by (`owner`), or of the payload
    (`keeps` False), which sees to it by itself."""

    buffer: Buffer
    owner: Endpoint | None = None
    keeps: bool = True


class Staging:
    """Staging memory of all transfers of a data plane."""

    def __init__(self) -> None:
        self._spare: list[Buffer] = []

    def take(self, payload: SourcePayload, plan: ImagePlan, endpoint: Endpoint, chunk: Chunk) -> Loan:
        """For one chunk: where the payload wants it, else where the connection does, else here."""
        elsewhere = payload.staging(plan.max_chunk_bytes)
        if elsewhere is not None:
            return Loan(elsewhere, keeps=False)
        own = endpoint.take_staging(chunk.nbytes)
        if own is not None:
            return Loan(own, endpoint)
        size = plan.max_chunk_bytes
        # What was free last is what the processor's cache still holds.
        fitting = (number for number in reversed(range(len(self._spare))) if self._spare[number].nbytes >= size)
        number = next(fitting, None)
        return Loan(self._spare.pop(number) if number is not None else huge_empty(max(size, plan.chunk_bytes)))

    def give_back(self, loan: Loan, *, sent: bool) -> None:
        """The chunk has left, or will not."""
        if loan.owner is not None:
            if not sent:
                loan.owner.return_staging(loan.buffer)
        elif loan.keeps and sum(buffer.nbytes for buffer in self._spare) + loan.buffer.nbytes <= KEEP_BYTES:
            self._spare.append(loan.buffer)
