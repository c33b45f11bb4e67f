from google.rpc import status_pb2 as _status_pb2
from hurray_wire.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoverCommand(_message.Message):
    __slots__ = ("open_peer", "close_peer", "begin_target", "begin_source", "input", "free_snapshot", "report_usage")
    OPEN_PEER_FIELD_NUMBER: _ClassVar[int]
    CLOSE_PEER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TARGET_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SOURCE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    FREE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REPORT_USAGE_FIELD_NUMBER: _ClassVar[int]
    open_peer: OpenPeer
    close_peer: ClosePeer
    begin_target: BeginTarget
    begin_source: BeginSource
    input: TransferInput
    free_snapshot: FreeSnapshot
    report_usage: ReportUsage
    def __init__(self, open_peer: _Optional[_Union[OpenPeer, _Mapping]] = ..., close_peer: _Optional[_Union[ClosePeer, _Mapping]] = ..., begin_target: _Optional[_Union[BeginTarget, _Mapping]] = ..., begin_source: _Optional[_Union[BeginSource, _Mapping]] = ..., input: _Optional[_Union[TransferInput, _Mapping]] = ..., free_snapshot: _Optional[_Union[FreeSnapshot, _Mapping]] = ..., report_usage: _Optional[_Union[ReportUsage, _Mapping]] = ...) -> None: ...

class MoverReport(_message.Message):
    __slots__ = ("started", "peer_opened", "peer_closed", "peer_lost", "output", "usage", "reader_gone")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PEER_OPENED_FIELD_NUMBER: _ClassVar[int]
    PEER_CLOSED_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    READER_GONE_FIELD_NUMBER: _ClassVar[int]
    started: MoverStarted
    peer_opened: PeerOpened
    peer_closed: PeerClosed
    peer_lost: PeerLost
    output: TransferOutput
    usage: MoverUsage
    reader_gone: ReaderGone
    def __init__(self, started: _Optional[_Union[MoverStarted, _Mapping]] = ..., peer_opened: _Optional[_Union[PeerOpened, _Mapping]] = ..., peer_closed: _Optional[_Union[PeerClosed, _Mapping]] = ..., peer_lost: _Optional[_Union[PeerLost, _Mapping]] = ..., output: _Optional[_Union[TransferOutput, _Mapping]] = ..., usage: _Optional[_Union[MoverUsage, _Mapping]] = ..., reader_gone: _Optional[_Union[ReaderGone, _Mapping]] = ...) -> None: ...

class OpenPeer(_message.Message):
    __slots__ = ("peer", "transports")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    peer: int
    transports: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.Transport]
    def __init__(self, peer: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_transfer_pb2.Transport, _Mapping]]] = ...) -> None: ...

class ClosePeer(_message.Message):
    __slots__ = ("peer", "abort")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    peer: int
    abort: bool
    def __init__(self, peer: _Optional[int] = ..., abort: _Optional[bool] = ...) -> None: ...

class BeginTarget(_message.Message):
    __slots__ = ("transfer", "peer", "offer", "transport", "window", "budget_s", "tenant", "image_bytes", "chunk_count", "index_chunk_count")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    INDEX_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    peer: int
    offer: _transfer_pb2.Offer
    transport: str
    window: int
    budget_s: float
    tenant: int
    image_bytes: int
    chunk_count: int
    index_chunk_count: int
    def __init__(self, transfer: _Optional[int] = ..., peer: _Optional[int] = ..., offer: _Optional[_Union[_transfer_pb2.Offer, _Mapping]] = ..., transport: _Optional[str] = ..., window: _Optional[int] = ..., budget_s: _Optional[float] = ..., tenant: _Optional[int] = ..., image_bytes: _Optional[int] = ..., chunk_count: _Optional[int] = ..., index_chunk_count: _Optional[int] = ...) -> None: ...

class BeginSource(_message.Message):
    __slots__ = ("transfer", "peer", "snapshot", "offer", "budget_s")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    peer: int
    snapshot: int
    offer: _transfer_pb2.Offer
    budget_s: float
    def __init__(self, transfer: _Optional[int] = ..., peer: _Optional[int] = ..., snapshot: _Optional[int] = ..., offer: _Optional[_Union[_transfer_pb2.Offer, _Mapping]] = ..., budget_s: _Optional[float] = ...) -> None: ...

class TransferInput(_message.Message):
    __slots__ = ("transfer", "source", "target", "stream_lost", "commit", "cancel")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STREAM_LOST_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    source: _transfer_pb2.SourceMessage
    target: _transfer_pb2.TargetMessage
    stream_lost: StreamLost
    commit: CommitResult
    cancel: _status_pb2.Status
    def __init__(self, transfer: _Optional[int] = ..., source: _Optional[_Union[_transfer_pb2.SourceMessage, _Mapping]] = ..., target: _Optional[_Union[_transfer_pb2.TargetMessage, _Mapping]] = ..., stream_lost: _Optional[_Union[StreamLost, _Mapping]] = ..., commit: _Optional[_Union[CommitResult, _Mapping]] = ..., cancel: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class StreamLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitResult(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class TransferOutput(_message.Message):
    __slots__ = ("transfer", "source", "target", "prepared", "ended", "arena")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    source: _transfer_pb2.SourceMessage
    target: _transfer_pb2.TargetMessage
    prepared: Prepared
    ended: TransferEnded
    arena: _transfer_pb2.ArenaUsage
    def __init__(self, transfer: _Optional[int] = ..., source: _Optional[_Union[_transfer_pb2.SourceMessage, _Mapping]] = ..., target: _Optional[_Union[_transfer_pb2.TargetMessage, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., ended: _Optional[_Union[TransferEnded, _Mapping]] = ..., arena: _Optional[_Union[_transfer_pb2.ArenaUsage, _Mapping]] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("receipt", "viewable", "index_checksum")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    VIEWABLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    receipt: _transfer_pb2.Receipt
    viewable: bool
    index_checksum: int
    def __init__(self, receipt: _Optional[_Union[_transfer_pb2.Receipt, _Mapping]] = ..., viewable: _Optional[bool] = ..., index_checksum: _Optional[int] = ...) -> None: ...

class TransferEnded(_message.Message):
    __slots__ = ("error", "source")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    source: SourceSummary
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., source: _Optional[_Union[SourceSummary, _Mapping]] = ...) -> None: ...

class SourceSummary(_message.Message):
    __slots__ = ("wire_bytes", "mapped_bytes", "stages")
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    wire_bytes: int
    mapped_bytes: int
    stages: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.StageTime]
    def __init__(self, wire_bytes: _Optional[int] = ..., mapped_bytes: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[_transfer_pb2.StageTime, _Mapping]]] = ...) -> None: ...

class ReaderGone(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class FreeSnapshot(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    def __init__(self, snapshot: _Optional[int] = ...) -> None: ...

class ReportUsage(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoverStarted(_message.Message):
    __slots__ = ("incarnation", "transports", "arena", "ucx", "error", "left_out", "staging")
    class LeftOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    UCX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    transports: _containers.RepeatedCompositeFieldContainer[_transfer_pb2.Transport]
    arena: _transfer_pb2.ArenaUsage
    ucx: str
    error: _status_pb2.Status
    left_out: _containers.ScalarMap[str, str]
    staging: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_transfer_pb2.Transport, _Mapping]]] = ..., arena: _Optional[_Union[_transfer_pb2.ArenaUsage, _Mapping]] = ..., ucx: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., left_out: _Optional[_Mapping[str, str]] = ..., staging: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerOpened(_message.Message):
    __slots__ = ("peer", "error", "transports")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    peer: int
    error: _status_pb2.Status
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerClosed(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: int
    def __init__(self, peer: _Optional[int] = ...) -> None: ...

class PeerLost(_message.Message):
    __slots__ = ("peer", "error")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    peer: int
    error: _status_pb2.Status
    def __init__(self, peer: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class MoverUsage(_message.Message):
    __slots__ = ("arena", "unknown_tag_count", "peer_count", "transfer_count", "unusable")
    class UnusableEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARENA_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_TAG_COUNT_FIELD_NUMBER: _ClassVar[int]
    PEER_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_FIELD_NUMBER: _ClassVar[int]
    arena: _transfer_pb2.ArenaUsage
    unknown_tag_count: int
    peer_count: int
    transfer_count: int
    unusable: _containers.ScalarMap[str, str]
    def __init__(self, arena: _Optional[_Union[_transfer_pb2.ArenaUsage, _Mapping]] = ..., unknown_tag_count: _Optional[int] = ..., peer_count: _Optional[int] = ..., transfer_count: _Optional[int] = ..., unusable: _Optional[_Mapping[str, str]] = ...) -> None: ...
