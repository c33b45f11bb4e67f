import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Checksum(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKSUM_UNSPECIFIED: _ClassVar[Checksum]
    CHECKSUM_NONE: _ClassVar[Checksum]
    CHECKSUM_XXH3_64: _ClassVar[Checksum]
    CHECKSUM_MIX64: _ClassVar[Checksum]
CHECKSUM_UNSPECIFIED: Checksum
CHECKSUM_NONE: Checksum
CHECKSUM_XXH3_64: Checksum
CHECKSUM_MIX64: Checksum

class Transport(_message.Message):
    __slots__ = ("kind", "address", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    address: bytes
    settings: _containers.ScalarMap[str, str]
    def __init__(self, kind: _Optional[str] = ..., address: _Optional[bytes] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "version", "node", "transports", "type_tags", "scheme_tags", "device_tags", "memory_classes", "limits", "arena", "ready", "ucx", "address", "time", "unusable_transports")
    class UnusableTransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    TYPE_TAGS_FIELD_NUMBER: _ClassVar[int]
    SCHEME_TAGS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TAGS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_CLASSES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    UCX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    UNUSABLE_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: int
    version: str
    node: str
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    type_tags: _containers.RepeatedScalarFieldContainer[int]
    scheme_tags: _containers.RepeatedScalarFieldContainer[int]
    device_tags: _containers.RepeatedScalarFieldContainer[int]
    memory_classes: _containers.RepeatedScalarFieldContainer[int]
    limits: NodeLimits
    arena: ArenaUsage
    ready: bool
    ucx: str
    address: str
    time: _timestamp_pb2.Timestamp
    unusable_transports: _containers.ScalarMap[str, str]
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ..., node: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., type_tags: _Optional[_Iterable[int]] = ..., scheme_tags: _Optional[_Iterable[int]] = ..., device_tags: _Optional[_Iterable[int]] = ..., memory_classes: _Optional[_Iterable[int]] = ..., limits: _Optional[_Union[NodeLimits, _Mapping]] = ..., arena: _Optional[_Union[ArenaUsage, _Mapping]] = ..., ready: _Optional[bool] = ..., ucx: _Optional[str] = ..., address: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., unusable_transports: _Optional[_Mapping[str, str]] = ...) -> None: ...

class NodeLimits(_message.Message):
    __slots__ = ("max_tensors", "max_descriptor_bytes", "max_snapshot_bytes", "max_sequences", "max_index_entries", "max_lease")
    MAX_TENSORS_FIELD_NUMBER: _ClassVar[int]
    MAX_DESCRIPTOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_INDEX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_FIELD_NUMBER: _ClassVar[int]
    max_tensors: int
    max_descriptor_bytes: int
    max_snapshot_bytes: int
    max_sequences: int
    max_index_entries: int
    max_lease: _duration_pb2.Duration
    def __init__(self, max_tensors: _Optional[int] = ..., max_descriptor_bytes: _Optional[int] = ..., max_snapshot_bytes: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_index_entries: _Optional[int] = ..., max_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ArenaUsage(_message.Message):
    __slots__ = ("total_bytes", "free_bytes", "held_bytes", "receiving_bytes", "quarantined_bytes")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    free_bytes: int
    held_bytes: int
    receiving_bytes: int
    quarantined_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., receiving_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "bye")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    welcome: Hello
    bye: Bye
    def __init__(self, welcome: _Optional[_Union[Hello, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "transports", "identity")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: int
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    identity: str
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., identity: _Optional[str] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("source", "budget")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    source: SourceMessage
    budget: _duration_pb2.Duration
    def __init__(self, source: _Optional[_Union[SourceMessage, _Mapping]] = ..., budget: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("target", "outcome")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    target: TargetMessage
    outcome: Outcome
    def __init__(self, target: _Optional[_Union[TargetMessage, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("open", "target", "budget")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    open: GetOpen
    target: TargetMessage
    budget: _duration_pb2.Duration
    def __init__(self, open: _Optional[_Union[GetOpen, _Mapping]] = ..., target: _Optional[_Union[TargetMessage, _Mapping]] = ..., budget: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("source", "outcome")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    source: SourceMessage
    outcome: Outcome
    def __init__(self, source: _Optional[_Union[SourceMessage, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class SourceMessage(_message.Message):
    __slots__ = ("offer", "checksums", "stop")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    checksums: ChunkChecksums
    stop: Stop
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., checksums: _Optional[_Union[ChunkChecksums, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class TargetMessage(_message.Message):
    __slots__ = ("accept", "receipt", "stop")
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    accept: Accept
    receipt: Receipt
    stop: Stop
    def __init__(self, accept: _Optional[_Union[Accept, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class GetOpen(_message.Message):
    __slots__ = ("key", "generation", "wait", "consume", "incarnation", "transports", "request_id", "view", "checksum", "takes_checksums")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    CONSUME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TAKES_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    key: str
    generation: int
    wait: _duration_pb2.Duration
    consume: bool
    incarnation: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    view: bool
    checksum: Checksum
    takes_checksums: bool
    def __init__(self, key: _Optional[str] = ..., generation: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., consume: _Optional[bool] = ..., incarnation: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., view: _Optional[bool] = ..., checksum: _Optional[_Union[Checksum, str]] = ..., takes_checksums: _Optional[bool] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("request_id", "key", "lease", "overwrite", "incarnation", "tensors", "token_counts", "transports", "checksum", "chunk_bytes", "annotations", "generation", "view", "checksums", "via_host", "staged")
    class AnnotationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    VIA_HOST_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    key: str
    lease: _duration_pb2.Duration
    overwrite: bool
    incarnation: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorOffer]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    checksum: Checksum
    chunk_bytes: int
    annotations: _containers.ScalarMap[str, str]
    generation: int
    view: bool
    checksums: _containers.RepeatedScalarFieldContainer[int]
    via_host: bool
    staged: bool
    def __init__(self, request_id: _Optional[str] = ..., key: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., overwrite: _Optional[bool] = ..., incarnation: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorOffer, _Mapping]]] = ..., token_counts: _Optional[_Iterable[int]] = ..., transports: _Optional[_Iterable[str]] = ..., checksum: _Optional[_Union[Checksum, str]] = ..., chunk_bytes: _Optional[int] = ..., annotations: _Optional[_Mapping[str, str]] = ..., generation: _Optional[int] = ..., view: _Optional[bool] = ..., checksums: _Optional[_Iterable[int]] = ..., via_host: _Optional[bool] = ..., staged: _Optional[bool] = ...) -> None: ...

class TensorOffer(_message.Message):
    __slots__ = ("descriptor", "kv_scale")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    KV_SCALE_FIELD_NUMBER: _ClassVar[int]
    descriptor: bytes
    kv_scale: float
    def __init__(self, descriptor: _Optional[bytes] = ..., kv_scale: _Optional[float] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("transfer", "transport", "window")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    transport: str
    window: int
    def __init__(self, transfer: _Optional[int] = ..., transport: _Optional[str] = ..., window: _Optional[int] = ...) -> None: ...

class ChunkChecksums(_message.Message):
    __slots__ = ("first_chunk", "values")
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    first_chunk: int
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_chunk: _Optional[int] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("error", "sent_chunk_count")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SENT_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    sent_chunk_count: int
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., sent_chunk_count: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("request_id", "key", "generation", "expire_time", "wire_bytes", "tensor_count", "logical_page_count", "distinct_page_count", "dead_slot_count", "dirty_dead_slot_count", "verified_chunk_count", "checksum", "transport", "stages", "volatile_memory", "node", "mapped_bytes", "staged_bytes", "device_tag")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEAD_SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIRTY_DEAD_SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    VOLATILE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TAG_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    key: str
    generation: int
    expire_time: _timestamp_pb2.Timestamp
    wire_bytes: int
    tensor_count: int
    logical_page_count: int
    distinct_page_count: int
    dead_slot_count: int
    dirty_dead_slot_count: int
    verified_chunk_count: int
    checksum: Checksum
    transport: str
    stages: _containers.RepeatedCompositeFieldContainer[StageTime]
    volatile_memory: bool
    node: str
    mapped_bytes: int
    staged_bytes: int
    device_tag: int
    def __init__(self, request_id: _Optional[str] = ..., key: _Optional[str] = ..., generation: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., wire_bytes: _Optional[int] = ..., tensor_count: _Optional[int] = ..., logical_page_count: _Optional[int] = ..., distinct_page_count: _Optional[int] = ..., dead_slot_count: _Optional[int] = ..., dirty_dead_slot_count: _Optional[int] = ..., verified_chunk_count: _Optional[int] = ..., checksum: _Optional[_Union[Checksum, str]] = ..., transport: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., volatile_memory: _Optional[bool] = ..., node: _Optional[str] = ..., mapped_bytes: _Optional[int] = ..., staged_bytes: _Optional[int] = ..., device_tag: _Optional[int] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "duration")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    stage: str
    duration: _duration_pb2.Duration
    def __init__(self, stage: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("key", "generation", "create_time", "expire_time", "held_bytes", "tensor_count", "num_seqs", "total_tokens", "page_size", "num_pages", "reader_count", "annotations")
    class AnnotationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ANNOTATIONS_FIELD_NUMBER: _ClassVar[int]
    key: str
    generation: int
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    held_bytes: int
    tensor_count: int
    num_seqs: int
    total_tokens: int
    page_size: int
    num_pages: int
    reader_count: int
    annotations: _containers.ScalarMap[str, str]
    def __init__(self, key: _Optional[str] = ..., generation: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., held_bytes: _Optional[int] = ..., tensor_count: _Optional[int] = ..., num_seqs: _Optional[int] = ..., total_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., reader_count: _Optional[int] = ..., annotations: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("key", "generation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    generation: int
    def __init__(self, key: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("snapshot", "tensors", "token_counts")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotInfo
    tensors: _containers.RepeatedCompositeFieldContainer[TensorOffer]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, snapshot: _Optional[_Union[SnapshotInfo, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorOffer, _Mapping]]] = ..., token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("prefix", "page_size", "page_token")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    page_size: int
    page_token: str
    def __init__(self, prefix: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("snapshots", "next_page_token")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotInfo]
    next_page_token: str
    def __init__(self, snapshots: _Optional[_Iterable[_Union[SnapshotInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("key", "generation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    generation: int
    def __init__(self, key: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("key", "generation", "lease")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    key: str
    generation: int
    lease: _duration_pb2.Duration
    def __init__(self, key: _Optional[str] = ..., generation: _Optional[int] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("generation", "expire_time")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    generation: int
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, generation: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline",)
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("transfer_count",)
    TRANSFER_COUNT_FIELD_NUMBER: _ClassVar[int]
    transfer_count: int
    def __init__(self, transfer_count: _Optional[int] = ...) -> None: ...
