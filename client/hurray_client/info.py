"""What nodes and snapshots say of themselves: the answers of the control plane as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from hurray_client.receipt import iso, read_time
from hurray_wire.descriptor import Descriptor, decode_descriptor
from hurray_wire.v1 import transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A committed snapshot."""

    key: str
    generation: int
    create_time: datetime
    expire_time: datetime
    held_bytes: int
    """Bytes of the node's arena."""

    tensor_count: int
    num_seqs: int
    total_tokens: int
    page_size: int
    num_pages: int
    reader_count: int
    """Readers that have it now."""

    annotations: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON values: times in ISO 8601."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["create_time"] = iso(self.create_time)
        values["expire_time"] = iso(self.expire_time)
        return values

    @classmethod
    def from_proto(cls, message: pb.SnapshotInfo) -> SnapshotInfo:
        """As a node sent it."""
        return cls(
            key=message.key,
            generation=message.generation,
            create_time=read_time(message.create_time),
            expire_time=read_time(message.expire_time),
            held_bytes=message.held_bytes,
            tensor_count=message.tensor_count,
            num_seqs=message.num_seqs,
            total_tokens=message.total_tokens,
            page_size=message.page_size,
            num_pages=message.num_pages,
            reader_count=message.reader_count,
            annotations=dict(message.annotations),
        )


@dataclass(frozen=True, slots=True)
class SnapshotStat:
    """A committed snapshot with its descriptors, as the node's memory is, and its token counts."""

    info: SnapshotInfo
    descriptors: tuple[Descriptor, ...]
    token_counts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            **self.info.to_dict(),
            "token_counts": list(self.token_counts),
            "tensors": [
                {
                    "layer_index": item.layer_index,
                    "kv_role": item.kv_role_name,
                    "element_type": item.element_type.name,
                    "num_heads": item.num_heads,
                    "head_dim": item.head_dim,
                    "quantization": None if item.quantization is None else item.quantization.scheme,
                    "page_pool_bytes": item.page_pool_bytes,
                }
                for item in self.descriptors
            ],
        }

    @classmethod
    def from_proto(cls, message: pb.StatResponse) -> SnapshotStat:
        """As a node sent it. Raises InvalidDescriptor, Unsupported."""
        return cls(
            info=SnapshotInfo.from_proto(message.snapshot),
            descriptors=tuple(decode_descriptor(tensor.descriptor)[0] for tensor in message.tensors),
            token_counts=tuple(message.token_counts),
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was renewed."""

    key: str
    generation: int
    expire_time: datetime

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"key": self.key, "generation": self.generation, "expire_time": iso(self.expire_time)}


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """Where the bytes of a node's arena are: free + held + receiving + quarantined = total."""

    total_bytes: int
    free_bytes: int
    held_bytes: int
    receiving_bytes: int
    quarantined_bytes: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node is and can do."""

    protocol_version: int
    incarnation: int
    version: str
    node: str
    transports: tuple[str, ...]
    """Kinds that are up, best first."""

    ready: bool
    """False while the data plane is down, or has no transport that can be used, or the node drains."""

    ucx: str
    device_tags: tuple[int, ...]
    """Of the memory that snapshots are held in: 0 the host, 1 a CUDA GPU."""

    max_snapshot_bytes: int
    max_lease_s: float
    arena: ArenaInfo
    address: str = ""
    """Host and port by which it says that peers reach it; empty: none but the one it listens at."""

    time: datetime | None = None
    """The clock of its host, UTC; None of a node that does not say."""

    unusable_transports: Mapping[str, str] = field(default_factory=dict)
    """Kinds that it has and cannot use at the moment: why, for people."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the incarnation in hex."""
        values = asdict(self)
        values["incarnation"] = f"{self.incarnation:016x}"
        values["time"] = iso(self.time)
        return values

    @classmethod
    def from_proto(cls, message: pb.GetNodeResponse) -> NodeInfo:
        """As a node sent it."""
        arena = message.arena
        lease = message.limits.max_lease
        return cls(
            protocol_version=message.protocol_version,
            incarnation=message.incarnation,
            version=message.version,
            node=message.node,
            transports=tuple(transport.kind for transport in message.transports),
            ready=message.ready,
            ucx=message.ucx,
            device_tags=tuple(message.device_tags),
            max_snapshot_bytes=message.limits.max_snapshot_bytes,
            max_lease_s=lease.seconds + lease.nanos / 1e9,
            arena=ArenaInfo(
                arena.total_bytes,
                arena.free_bytes,
                arena.held_bytes,
                arena.receiving_bytes,
                arena.quarantined_bytes,
            ),
            address=message.address,
            time=read_time(message.time) if message.HasField("time") else None,
            unusable_transports=dict(message.unusable_transports),
        )
