"""The phases of a transfer's two sides, and every event that each may meet, as one table.

Source                                             Target
  OFFERED     offer told, no answer yet              RESERVING          memory asked for
  SENDING     accepted, chunks go out                INDEX              receives for block_table and seq_ptr posted
  DELIVERED   the target has all it needs to commit  CHECKING_INDEX     all arrived, contents being validated
  CANCELLING  given up after the last byte           PAGES              receives for page pools and parameters posted
  SETTLING    outcome known, sends not all complete  CHECKING_CONTENTS  all arrived and equal, being validated
  ENDED                                              COMMITTING         asked for; only the answer ends this phase
                                                     SETTLING           failed; receives not all accounted for
                                                     ENDED

A row says which phases an event may lead to. A pair that is not in the table is somebody's mistake: `session` says
whose, and what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from hurray_wire.session_events import (
    Accepted,
    ChecksumsReceived,
    ChunkPosted,
    ChunksReady,
    CommitRefused,
    Committed,
    ContentsChecked,
    DrainExpired,
    Event,
    Failed,
    IndexChecked,
    PeerLost,
    PeerStopped,
    ReceiptReceived,
    ReceiveDone,
    Reserved,
    SendDone,
    StreamLost,
)


class State(Enum):
    """Public state of a transfer (AIP-216)."""

    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class SourcePhase(Enum):
    """The value is the stage that errors name."""

    OFFERED = "offer"
    SENDING = "pages"
    DELIVERED = "receipt"
    CANCELLING = "cancel"
    SETTLING = "drain"
    ENDED = "ended"


class TargetPhase(Enum):
    """The value is the stage that errors name."""

    RESERVING = "reserve"
    INDEX = "index"
    CHECKING_INDEX = "check_index"
    PAGES = "pages"
    CHECKING_CONTENTS = "check_contents"
    COMMITTING = "commit"
    SETTLING = "drain"
    ENDED = "ended"


_S, _T = SourcePhase, TargetPhase

SOURCE_OVER: Final = frozenset({_S.SETTLING, _S.ENDED})
TARGET_OVER: Final = frozenset({_T.SETTLING, _T.ENDED})

SOURCE_TABLE: Final[Mapping[SourcePhase, Mapping[type[Event], frozenset[SourcePhase]]]] = {
    _S.OFFERED: {
        Accepted: frozenset({_S.SENDING, _S.DELIVERED, _S.ENDED}),
        ChunksReady: frozenset({_S.OFFERED}),
        **dict.fromkeys((ReceiptReceived, PeerStopped, StreamLost, PeerLost, Failed), frozenset({_S.ENDED})),
    },
    _S.SENDING: {
        ChunksReady: frozenset({_S.SENDING, _S.DELIVERED}),
        ChunkPosted: frozenset({_S.SENDING, _S.DELIVERED}),
        SendDone: frozenset({_S.SENDING, _S.DELIVERED}) | SOURCE_OVER,
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), SOURCE_OVER),
    },
    _S.DELIVERED: {
        SendDone: frozenset({_S.DELIVERED, _S.CANCELLING}),
        Failed: frozenset({_S.CANCELLING}),
        **dict.fromkeys((ReceiptReceived, PeerStopped, StreamLost), SOURCE_OVER),
        **dict.fromkeys((ChunksReady, ChunkPosted, PeerLost), frozenset({_S.DELIVERED})),
    },
    _S.CANCELLING: {
        **dict.fromkeys((ReceiptReceived, PeerStopped, StreamLost, DrainExpired), SOURCE_OVER),
        **dict.fromkeys((ChunksReady, ChunkPosted, SendDone, PeerLost, Failed), frozenset({_S.CANCELLING})),
    },
    _S.SETTLING: {
        SendDone: SOURCE_OVER,
        **dict.fromkeys((ChunksReady, ChunkPosted, Accepted, ReceiptReceived, PeerStopped), frozenset({_S.SETTLING})),
        **dict.fromkeys((StreamLost, PeerLost, Failed, DrainExpired), frozenset({_S.SETTLING})),
    },
    _S.ENDED: {
        **dict.fromkeys((ChunksReady, ChunkPosted, Accepted, ReceiptReceived, PeerStopped), frozenset({_S.ENDED})),
        **dict.fromkeys((StreamLost, PeerLost, Failed, DrainExpired), frozenset({_S.ENDED})),
    },
}

TARGET_TABLE: Final[Mapping[TargetPhase, Mapping[type[Event], frozenset[TargetPhase]]]] = {
    _T.RESERVING: {
        Reserved: frozenset({_T.INDEX}),
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), frozenset({_T.ENDED})),
    },
    _T.INDEX: {
        **dict.fromkeys((ReceiveDone, ChecksumsReceived), frozenset({_T.INDEX, _T.CHECKING_INDEX}) | TARGET_OVER),
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), TARGET_OVER),
    },
    _T.CHECKING_INDEX: {
        IndexChecked: frozenset({_T.PAGES, _T.CHECKING_CONTENTS}),
        ChecksumsReceived: frozenset({_T.CHECKING_INDEX}) | TARGET_OVER,
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), TARGET_OVER),
    },
    _T.PAGES: {
        **dict.fromkeys((ReceiveDone, ChecksumsReceived), frozenset({_T.PAGES, _T.CHECKING_CONTENTS}) | TARGET_OVER),
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), TARGET_OVER),
    },
    _T.CHECKING_CONTENTS: {
        ContentsChecked: frozenset({_T.COMMITTING}),
        PeerLost: frozenset({_T.CHECKING_CONTENTS}),
        **dict.fromkeys((PeerStopped, StreamLost, Failed), frozenset({_T.ENDED})),
    },
    _T.COMMITTING: {
        **dict.fromkeys((Committed, CommitRefused), frozenset({_T.ENDED})),
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), frozenset({_T.COMMITTING})),
    },
    _T.SETTLING: {
        **dict.fromkeys((ReceiveDone, PeerStopped, StreamLost, PeerLost, DrainExpired), TARGET_OVER),
        **dict.fromkeys((Failed, ChecksumsReceived, IndexChecked), frozenset({_T.SETTLING})),
    },
    _T.ENDED: {
        **dict.fromkeys((Reserved, IndexChecked, ContentsChecked, ChecksumsReceived), frozenset({_T.ENDED})),
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed, DrainExpired), frozenset({_T.ENDED})),
    },
}
