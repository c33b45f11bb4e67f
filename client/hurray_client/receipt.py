"""What a transfer came to: the target's receipt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from hurray_wire.checksum import hash_of
from hurray_wire.errors import CapabilityMismatch
from hurray_wire.v1 import transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time that one stage of a transfer took at the target, in seconds."""

    stage: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Receipt:
    """The target has the snapshot: committed, checked and clean."""

    request_id: str
    """The id that chooses this transfer among retries."""

    key: str
    generation: int
    """Names this snapshot together with the key; it increases with every commit on the node."""

    expire_time: datetime | None
    """When the lease ends unless it is renewed, UTC. None in the receipt of a get, whose memory has no lease."""

    wire_bytes: int
    """Bytes that crossed the data plane."""

    tensor_count: int
    logical_page_count: int
    """Entries of block_table: pages counted with their aliases."""

    distinct_page_count: int
    """Pages that crossed, per tensor, each once."""

    dead_slot_count: int
    """Slots of those pages that hold no token, over all tensors."""

    dirty_dead_slot_count: int
    """Dead slots that did not arrive clear: above 0, the source leaks."""

    verified_chunk_count: int
    """Chunks whose checksum was compared."""

    checksum: str
    """"xxh3_64", "mix64" or "none"."""

    transport: str
    """Kind of transport that moved the bytes."""

    stages: tuple[StageTime, ...]
    """Stages of the transfer at the target, in the order they were passed."""

    volatile_memory: bool
    """True: held in memory only; a stop of the node loses it."""

    node: str
    """Name of the node that holds it; in the receipt of a get, of the node that it came from."""

    mapped_bytes: int = 0
    """Bytes that were mapped instead of crossing: a view of the node's memory. No checksum was compared of them."""

    staged_bytes: int = 0
    """Bytes that were on a GPU on one side at least, and went through host memory. 0: what crossed was taken from where
    it was, and brought to where it is."""

    device_tag: int = 0
    """Of the memory that holds it: 0 the host, 1 a CUDA GPU."""

    @property
    def transfer_s(self) -> float:
        """Seconds in all stages."""
        return sum(stage.duration_s for stage in self.stages)

    @property
    def gigabytes_per_second(self) -> float:
        """10**9 bytes a second over all stages, crossed or mapped; 0 if they took no time."""
        return (self.wire_bytes + self.mapped_bytes) / self.transfer_s / 1e9 if self.transfer_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values: times in ISO 8601."""
        values = asdict(self)
        values["expire_time"] = iso(self.expire_time)
        values["gigabytes_per_second"] = self.gigabytes_per_second
        return values

    @classmethod
    def from_proto(cls, message: pb.Receipt) -> Receipt:
        """The receipt that a node sent."""
        return cls(
            request_id=message.request_id,
            key=message.key,
            generation=message.generation,
            expire_time=read_time(message.expire_time) if message.HasField("expire_time") else None,
            wire_bytes=message.wire_bytes,
            tensor_count=message.tensor_count,
            logical_page_count=message.logical_page_count,
            distinct_page_count=message.distinct_page_count,
            dead_slot_count=message.dead_slot_count,
            dirty_dead_slot_count=message.dirty_dead_slot_count,
            verified_chunk_count=message.verified_chunk_count,
            checksum=_checksum_name(message.checksum),
            transport=message.transport,
            stages=tuple(
                StageTime(item.stage, item.duration.seconds + item.duration.nanos / 1e9) for item in message.stages
            ),
            volatile_memory=message.volatile_memory,
            node=message.node,
            mapped_bytes=message.mapped_bytes,
            staged_bytes=message.staged_bytes,
            device_tag=message.device_tag,
        )


def read_time(message: Timestamp) -> datetime:
    """A point in time, UTC. One that no calendar holds becomes the nearest that one does."""
    try:
        return message.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        return datetime.max.replace(tzinfo=UTC)


def iso(time: datetime | None) -> str | None:
    """ISO 8601, or None."""
    return None if time is None else time.isoformat()


def _checksum_name(number: int) -> str:
    try:
        return hash_of(number).name
    except CapabilityMismatch:
        return str(number)
