"""Hand paged KV caches between LLM serving nodes: `connect`, then `put` and `get` KVSnapshots."""

from __future__ import annotations

from hurray_client.aio import AsyncClient, AsyncPutStream, aconnect
from hurray_client.client import Client, connect
from hurray_client.config import ClientConfig
from hurray_client.info import ArenaInfo, Lease, NodeInfo, SnapshotInfo, SnapshotStat
from hurray_client.plane import LocalDataPlane
from hurray_client.progress import Progress
from hurray_client.receipt import Receipt, StageTime
from hurray_client.stream import PutStream
from hurray_client.transfer import ReceivedSnapshot
from hurray_wire.credentials import Credentials
from hurray_wire.destination import Destination
from hurray_wire.errors import (
    ArenaFull,
    Cancelled,
    CapabilityMismatch,
    ChecksumMismatch,
    DataPlaneUnavailable,
    DeadlineExceeded,
    GeometryMismatch,
    HurrayError,
    InternalError,
    InvalidContents,
    InvalidDescriptor,
    InvalidRequest,
    InvalidSnapshot,
    KeyBusy,
    KeyDeleted,
    KeyExists,
    KeyExpired,
    KeyNotFound,
    KeyOverwritten,
    LimitExceeded,
    Misuse,
    NodeDraining,
    OutcomeUnknown,
    PeerUnavailable,
    PermissionDenied,
    ProtocolViolation,
    QuotaExceeded,
    RemoteError,
    RequestIdReused,
    SnapshotLost,
    Unauthenticated,
    Unsupported,
)
from hurray_wire.paged import Quantized
from hurray_wire.snapshot import KVSnapshot

__all__ = [
    "ArenaFull",
    "ArenaInfo",
    "AsyncClient",
    "AsyncPutStream",
    "Cancelled",
    "CapabilityMismatch",
    "ChecksumMismatch",
    "Client",
    "ClientConfig",
    "Credentials",
    "DataPlaneUnavailable",
    "DeadlineExceeded",
    "Destination",
    "GeometryMismatch",
    "HurrayError",
    "InternalError",
    "InvalidContents",
    "InvalidDescriptor",
    "InvalidRequest",
    "InvalidSnapshot",
    "KVSnapshot",
    "KeyBusy",
    "KeyDeleted",
    "KeyExists",
    "KeyExpired",
    "KeyNotFound",
    "KeyOverwritten",
    "Lease",
    "LimitExceeded",
    "LocalDataPlane",
    "Misuse",
    "NodeDraining",
    "NodeInfo",
    "OutcomeUnknown",
    "PeerUnavailable",
    "PermissionDenied",
    "Progress",
    "ProtocolViolation",
    "PutStream",
    "Quantized",
    "QuotaExceeded",
    "Receipt",
    "ReceivedSnapshot",
    "RemoteError",
    "RequestIdReused",
    "SnapshotInfo",
    "SnapshotLost",
    "SnapshotStat",
    "StageTime",
    "Unauthenticated",
    "Unsupported",
    "aconnect",
    "connect",
]
