"""The two sides of one transfer as state machines: no I/O, no clock, no threads.

Whoever drives a machine feeds it events and carries out the actions it returns, in order. Everything that takes time
comes back as another event. The same events always give the same actions, so a recorded list replays a transfer
(`replay`).

Source                                             Target
  OFFERED     offer told, no answer yet              RESERVING          memory asked for
  SENDING     accepted, chunks go out                INDEX              receives for block_table and seq_ptr posted
  DELIVERED   all sent, outcome with the target      CHECKING_INDEX     all arrived, contents being validated
  CANCELLING  given up after the last byte           PAGES              receives for page pools and parameters posted
  SETTLING    outcome known, sends not all complete  CHECKING_CONTENTS  all arrived and equal, being validated
  ENDED                                              COMMITTING         asked for; only the answer ends this phase
                                                     SETTLING           failed; receives not all accounted for
                                                     ENDED

What the machines guarantee, whatever is lost, repeated or late:

* `Release` comes once, and only when no posted operation is open: memory is never reused under a transfer.
* `Commit` comes only after every chunk arrived, equalled its checksum, and passed validation.
* `End` comes once, last, with the one outcome. A source that cannot know it says OutcomeUnknown.

A failing side tells the other (`TellStop`). The source's answer counts the chunks it sent, all lower indexes first, so
the target knows exactly which posted receives can still be written to (wait for them), which never will be (`Forget`),
and which messages nobody posted for (`Discard`). Without that answer the connection is closed, which ends all of them.

Two kinds of wrong event are kept apart: one from the peer fails the transfer with ProtocolViolation, one from our own
side raises Misuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final

from hurray_wire.errors import (
    Cancelled,
    ChecksumMismatch,
    HurrayError,
    Misuse,
    OutcomeUnknown,
    PeerUnavailable,
    ProtocolViolation,
)

CHECKSUM_BATCH: Final = 16
"""Checksums told in one message while pages flow."""


class State(Enum):
    """Public state of a transfer (AIP-216)."""

    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Base of what a machine is fed."""

    from_peer: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """This side gives up: deadline, stall, cancellation, an invalid index, no memory."""

    error: HurrayError


@dataclass(frozen=True, slots=True)
class StreamLost(Event):
    """The control stream ended without an outcome; nothing more can be told or heard."""


@dataclass(frozen=True, slots=True)
class PeerLost(Event):
    """The data-plane connection is gone; open operations complete with errors of their own."""

    error: HurrayError


@dataclass(frozen=True, slots=True)
class DrainExpired(Event):
    """The time for an orderly end is over: whoever still waits closes the connection."""


@dataclass(frozen=True, slots=True)
class PeerStopped(Event):
    """The peer gave up, or confirms that we did. `sent_chunk_count`: what a source has sent, 0 from a target."""

    from_peer: ClassVar[bool] = True
    error: HurrayError
    sent_chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class Accepted(Event):
    """The target accepts; up to `window` chunks may be in flight."""

    from_peer: ClassVar[bool] = True
    window: int


@dataclass(frozen=True, slots=True)
class ChunksReady(Event):
    """The first `count` chunks may be sent: prefill has finished the tensors in them."""

    count: int


@dataclass(frozen=True, slots=True)
class ChunkPosted(Event):
    """A SendChunk was carried out: the chunk is staged, hashed and handed to the transport."""

    chunk: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SendDone(Event):
    """A send completed: its buffer is ours again."""

    chunk: int
    error: HurrayError | None = None


@dataclass(frozen=True, slots=True)
class ReceiptReceived(Event):
    """The target committed."""

    from_peer: ClassVar[bool] = True
    receipt: Any


@dataclass(frozen=True, slots=True)
class Reserved(Event):
    """Memory for the snapshot is reserved."""


@dataclass(frozen=True, slots=True)
class ChecksumsReceived(Event):
    """Checksums of chunks `first` and following."""

    from_peer: ClassVar[bool] = True
    first: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiveDone(Event):
    """A receive (or discard) completed. `checksum` is that of the bytes that arrived."""

    chunk: int
    error: HurrayError | None = None
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class IndexChecked(Event):
    """block_table and seq_ptr are valid."""


@dataclass(frozen=True, slots=True)
class ContentsChecked(Event):
    """Parameters and pools are valid, dead slots are clear."""


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The snapshot is visible."""

    receipt: Any


@dataclass(frozen=True, slots=True)
class CommitRefused(Event):
    """The snapshot was not committed and never will be."""

    error: HurrayError


# --- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """Base of what a machine asks for."""


@dataclass(frozen=True, slots=True)
class SendChunk(Action):
    """Stage the chunk, hash it, hand it to the transport; then feed ChunkPosted, and SendDone on completion."""

    chunk: int


@dataclass(frozen=True, slots=True)
class TellChecksums(Action):
    """Tell the target the checksums of chunks `first` and following."""

    first: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellStop(Action):
    """Tell the peer that this side gave up, and how many chunks it has sent (source) or 0 (target)."""

    error: HurrayError
    sent_chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class Reserve(Action):
    """Reserve memory; feed Reserved, or Failed."""


@dataclass(frozen=True, slots=True)
class TellAccept(Action):
    """Tell the source to start."""


@dataclass(frozen=True, slots=True)
class PostReceive(Action):
    """Post the memory of a chunk; feed ReceiveDone on completion."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Forget(Action):
    """Withdraw a posted receive that nothing was sent for; its completion follows."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Discard(Action):
    """Take and drop a chunk that was sent and has no receive; feed ReceiveDone on completion."""

    chunk: int


@dataclass(frozen=True, slots=True)
class CheckIndex(Action):
    """Validate the index buffers; feed IndexChecked, or Failed."""


@dataclass(frozen=True, slots=True)
class CheckContents(Action):
    """Validate the rest and scrub; feed ContentsChecked, or Failed."""


@dataclass(frozen=True, slots=True)
class Commit(Action):
    """Make the snapshot visible; feed Committed, or CommitRefused."""


@dataclass(frozen=True, slots=True)
class TellReceipt(Action):
    """Tell the source that the snapshot is committed."""

    receipt: Any


@dataclass(frozen=True, slots=True)
class CloseEndpoint(Action):
    """Cut the data-plane connection: open operations then complete."""


@dataclass(frozen=True, slots=True)
class Release(Action):
    """No operation is open. Source: the staging memory and the pages are free. Target: the memory is the snapshot's
    (`keep`), or free."""

    keep: bool = False


@dataclass(frozen=True, slots=True)
class End(Action):
    """The transfer is over. `error` None: it succeeded, with this receipt."""

    error: HurrayError | None
    receipt: Any = None


# --- machines ----------------------------------------------------------------------------------------------------


class SourcePhase(Enum):
    """See the module's table; the value is the stage that errors name."""

    OFFERED = "offer"
    SENDING = "pages"
    DELIVERED = "receipt"
    CANCELLING = "cancel"
    SETTLING = "drain"
    ENDED = "ended"


class TargetPhase(Enum):
    """See the module's table; the value is the stage that errors name."""

    RESERVING = "reserve"
    INDEX = "index"
    CHECKING_INDEX = "check_index"
    PAGES = "pages"
    CHECKING_CONTENTS = "check_contents"
    COMMITTING = "commit"
    SETTLING = "drain"
    ENDED = "ended"


_S, _T = SourcePhase, TargetPhase

_SOURCE_TABLE: Final[Mapping[SourcePhase, Mapping[type[Event], frozenset[SourcePhase]]]] = {
    _S.OFFERED: {
        Accepted: frozenset({_S.SENDING}),
        ChunksReady: frozenset({_S.OFFERED}),
        ReceiptReceived: frozenset({_S.ENDED}),
        PeerStopped: frozenset({_S.ENDED}),
        StreamLost: frozenset({_S.ENDED}),
        PeerLost: frozenset({_S.ENDED}),
        Failed: frozenset({_S.ENDED}),
    },
    _S.SENDING: {
        ChunksReady: frozenset({_S.SENDING}),
        ChunkPosted: frozenset({_S.SENDING, _S.DELIVERED}),
        SendDone: frozenset({_S.SENDING, _S.SETTLING, _S.ENDED}),
        PeerStopped: frozenset({_S.SETTLING, _S.ENDED}),
        StreamLost: frozenset({_S.SETTLING, _S.ENDED}),
        PeerLost: frozenset({_S.SETTLING, _S.ENDED}),
        Failed: frozenset({_S.SETTLING, _S.ENDED}),
    },
    _S.DELIVERED: {
        SendDone: frozenset({_S.DELIVERED}),
        ReceiptReceived: frozenset({_S.SETTLING, _S.ENDED}),
        PeerStopped: frozenset({_S.SETTLING, _S.ENDED}),
        StreamLost: frozenset({_S.SETTLING, _S.ENDED}),
        PeerLost: frozenset({_S.DELIVERED}),
        Failed: frozenset({_S.CANCELLING}),
    },
    _S.CANCELLING: {
        SendDone: frozenset({_S.CANCELLING}),
        ReceiptReceived: frozenset({_S.SETTLING, _S.ENDED}),
        PeerStopped: frozenset({_S.SETTLING, _S.ENDED}),
        StreamLost: frozenset({_S.SETTLING, _S.ENDED}),
        PeerLost: frozenset({_S.CANCELLING}),
        Failed: frozenset({_S.CANCELLING}),
        DrainExpired: frozenset({_S.SETTLING, _S.ENDED}),
    },
    _S.SETTLING: {
        ChunkPosted: frozenset({_S.SETTLING}),
        SendDone: frozenset({_S.SETTLING, _S.ENDED}),
        **{late: frozenset({_S.SETTLING}) for late in (ChunksReady, Accepted, ReceiptReceived, PeerStopped)},
        **{late: frozenset({_S.SETTLING}) for late in (StreamLost, PeerLost, Failed, DrainExpired)},
    },
    _S.ENDED: {
        late: frozenset({_S.ENDED})
        for late in (
            ChunksReady,
            Accepted,
            ReceiptReceived,
            PeerStopped,
            StreamLost,
            PeerLost,
            Failed,
            DrainExpired,
        )
    },
}

_TARGET_RUNNING: Final = frozenset({_T.SETTLING, _T.ENDED})

_TARGET_TABLE: Final[Mapping[TargetPhase, Mapping[type[Event], frozenset[TargetPhase]]]] = {
    _T.RESERVING: {
        Reserved: frozenset({_T.INDEX}),
        **{lost: frozenset({_T.ENDED}) for lost in (PeerStopped, StreamLost, PeerLost, Failed)},
    },
    _T.INDEX: {
        ReceiveDone: frozenset({_T.INDEX, _T.CHECKING_INDEX}) | _TARGET_RUNNING,
        ChecksumsReceived: frozenset({_T.INDEX, _T.CHECKING_INDEX}) | _TARGET_RUNNING,
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), _TARGET_RUNNING),
    },
    _T.CHECKING_INDEX: {
        IndexChecked: frozenset({_T.PAGES, _T.CHECKING_CONTENTS}),
        ChecksumsReceived: frozenset({_T.CHECKING_INDEX}) | _TARGET_RUNNING,
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), _TARGET_RUNNING),
    },
    _T.PAGES: {
        ReceiveDone: frozenset({_T.PAGES, _T.CHECKING_CONTENTS}) | _TARGET_RUNNING,
        ChecksumsReceived: frozenset({_T.PAGES, _T.CHECKING_CONTENTS}) | _TARGET_RUNNING,
        **dict.fromkeys((PeerStopped, StreamLost, PeerLost, Failed), _TARGET_RUNNING),
    },
    _T.CHECKING_CONTENTS: {
        ContentsChecked: frozenset({_T.COMMITTING}),
        **{lost: frozenset({_T.ENDED}) for lost in (PeerStopped, StreamLost, Failed)},
        PeerLost: frozenset({_T.CHECKING_CONTENTS}),
    },
    _T.COMMITTING: {
        Committed: frozenset({_T.ENDED}),
        CommitRefused: frozenset({_T.ENDED}),
        **{noted: frozenset({_T.COMMITTING}) for noted in (PeerStopped, StreamLost, PeerLost, Failed)},
    },
    _T.SETTLING: {
        ReceiveDone: _TARGET_RUNNING,
        PeerStopped: _TARGET_RUNNING,
        **{
            late: frozenset({_T.SETTLING})
            for late in (StreamLost, PeerLost, DrainExpired, Failed, ChecksumsReceived, IndexChecked)
        },
    },
    _T.ENDED: {
        late: frozenset({_T.ENDED})
        for late in (
            Reserved,
            PeerStopped,
            StreamLost,
            PeerLost,
            Failed,
            DrainExpired,
            ChecksumsReceived,
            IndexChecked,
            ContentsChecked,
        )
    },
}


@dataclass
class SourceSession:
    """The side that has the pages.

    `chunk_count`: chunks of the plan, index chunks first, of which there are `index_chunk_count`.
    `ready_chunk_count`: how many may be sent at the start (all, unless tensors are announced one by one).
    """

    chunk_count: int
    index_chunk_count: int
    ready_chunk_count: int
    checksummed: bool = True
    phase: SourcePhase = field(default=SourcePhase.OFFERED, init=False)
    outcome: HurrayError | None = field(default=None, init=False)
    receipt: Any = field(default=None, init=False)
    in_flight: set[int] = field(default_factory=set, init=False)
    sent_chunk_count: int = field(default=0, init=False)
    _window: int = field(default=0, init=False)
    _untold: list[int] = field(default_factory=list, init=False)
    _told: int = field(default=0, init=False)
    _stream_open: bool = field(default=True, init=False)
    _stop_told: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    _actions: list[Action] = field(default_factory=list, init=False)

    @property
    def state(self) -> State:
        """Public state."""
        return _state(
            self.phase is _S.OFFERED,
            self.phase is _S.ENDED,
            self.outcome,
        )

    def handle(self, event: Event) -> list[Action]:
        """Feed one event; the actions to carry out, in order.

        Raises Misuse for an event of our own side that the phase does not allow.
        """
        self._actions = []
        allowed = _SOURCE_TABLE[self.phase].get(type(event))
        if allowed is None:
            if not event.from_peer:
                raise Misuse("event not allowed", event=type(event).__name__, phase=self.phase.name)
            self._fail(ProtocolViolation("unexpected message", offered=type(event).__name__, stage=self.phase.value))
            return self._actions
        getattr(self, f"_on_{type(event).__name__}")(event)
        assert self.phase in allowed, (event, self.phase)
        return self._actions

    def _on_Accepted(self, event: Accepted) -> None:  # noqa: N802 -- named after its event
        if self.phase is _S.OFFERED:
            self.phase = _S.SENDING
            self._window = max(1, event.window)
            self._fill_window()

    def _on_ChunksReady(self, event: ChunksReady) -> None:  # noqa: N802
        self.ready_chunk_count = max(self.ready_chunk_count, min(event.count, self.chunk_count))
        if self.phase is _S.SENDING:
            self._fill_window()

    def _on_ChunkPosted(self, event: ChunkPosted) -> None:  # noqa: N802
        if self.phase is not _S.SENDING:
            return
        self._untold.append(event.checksum)
        is_last = event.chunk + 1 == self.chunk_count
        burst_over = event.chunk + 1 == self.sent_chunk_count
        if is_last or (burst_over and (self._told < self.index_chunk_count or len(self._untold) >= CHECKSUM_BATCH)):
            if self.checksummed:
                self._actions.append(TellChecksums(self._told, tuple(self._untold)))
            self._told += len(self._untold)
            self._untold.clear()
        if is_last:
            self.phase = _S.DELIVERED

    def _on_SendDone(self, event: SendDone) -> None:  # noqa: N802
        self.in_flight.discard(event.chunk)
        if self.phase is _S.SENDING:
            if event.error is not None:
                self._fail(event.error)
            else:
                self._fill_window()
        elif self.phase is _S.SETTLING:
            self._settle()

    def _on_ReceiptReceived(self, event: ReceiptReceived) -> None:  # noqa: N802
        if self.phase in (_S.OFFERED, _S.DELIVERED, _S.CANCELLING):
            self.receipt = event.receipt
            self.outcome = None
            self._settle()

    def _on_PeerStopped(self, event: PeerStopped) -> None:  # noqa: N802
        if self.phase is _S.CANCELLING:
            self._settle()  # the target confirms; the outcome is why we gave up
        elif self.phase not in (_S.SETTLING, _S.ENDED):
            self._fail(event.error)

    def _on_StreamLost(self, _: StreamLost) -> None:  # noqa: N802
        self._stream_open = False
        match self.phase:
            case _S.OFFERED | _S.SENDING:
                self._fail(PeerUnavailable("the stream to the target broke", stage=self.phase.value))
            case _S.DELIVERED | _S.CANCELLING:
                self._give_up_unknown()

    def _on_PeerLost(self, event: PeerLost) -> None:  # noqa: N802
        # After the last byte the target may have it all: the stream will tell.
        if self.phase in (_S.OFFERED, _S.SENDING):
            self._fail(event.error)

    def _on_Failed(self, event: Failed) -> None:  # noqa: N802
        if self.phase is _S.DELIVERED:
            self.outcome = event.error
            self._tell_stop(event.error)
            self.phase = _S.CANCELLING
        elif self.phase in (_S.OFFERED, _S.SENDING):
            self._fail(event.error)

    def _on_DrainExpired(self, _: DrainExpired) -> None:  # noqa: N802
        if self.phase is _S.CANCELLING:
            self._give_up_unknown()
        elif self.phase is _S.SETTLING:
            self._close()

    def _fill_window(self) -> None:
        limit = min(self.chunk_count, self.ready_chunk_count)
        while self.sent_chunk_count < limit and len(self.in_flight) < self._window:
            self.in_flight.add(self.sent_chunk_count)
            self._actions.append(SendChunk(self.sent_chunk_count))
            self.sent_chunk_count += 1

    def _fail(self, error: HurrayError) -> None:
        self.outcome = error
        self._tell_stop(error)
        self._settle()

    def _give_up_unknown(self) -> None:
        cause = self.outcome
        self.outcome = OutcomeUnknown(
            "the target was lost after the last byte; retry with the same request id to learn the outcome",
            stage=self.phase.value,
            cause=cause.reason if cause is not None else None,
        )
        self._settle()

    def _tell_stop(self, error: HurrayError) -> None:
        if self._stream_open and not self._stop_told:
            self._stop_told = True
            self._actions.append(TellStop(error, self.sent_chunk_count))

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._actions.append(CloseEndpoint())

    def _settle(self) -> None:
        self.phase = _S.SETTLING
        if self.in_flight:
            if self.outcome is not None and not self._stream_open:
                self._close()
            return
        self.phase = _S.ENDED
        self._actions += [Release(), End(self.outcome, self.receipt)]


@dataclass
class TargetSession:
    """The side that receives the pages. Begin with `start()`.

    `chunk_count`, `index_chunk_count`: of the plan, index chunks first. `window`: receives posted at once.
    """

    chunk_count: int
    index_chunk_count: int
    window: int
    checksummed: bool = True
    phase: TargetPhase = field(default=TargetPhase.RESERVING, init=False)
    outcome: HurrayError | None = field(default=None, init=False)
    receipt: Any = field(default=None, init=False)
    in_flight: set[int] = field(default_factory=set, init=False)
    posted_chunk_count: int = field(default=0, init=False)
    verified_chunk_count: int = field(default=0, init=False)
    _arrived: dict[int, int] = field(default_factory=dict, init=False)
    _told: dict[int, int] = field(default_factory=dict, init=False)
    _told_count: int = field(default=0, init=False)
    _stream_open: bool = field(default=True, init=False)
    _stop_told: bool = field(default=False, init=False)
    _peer_sent: int | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _actions: list[Action] = field(default_factory=list, init=False)

    @property
    def state(self) -> State:
        """Public state."""
        return _state(self.phase is _T.RESERVING, self.phase is _T.ENDED, self.outcome)

    def start(self) -> list[Action]:
        """The first action."""
        return [Reserve()]

    def handle(self, event: Event) -> list[Action]:
        """Feed one event; the actions to carry out, in order.

        Raises Misuse for an event of our own side that the phase does not allow.
        """
        self._actions = []
        allowed = _TARGET_TABLE[self.phase].get(type(event))
        if allowed is None:
            if not event.from_peer:
                raise Misuse("event not allowed", event=type(event).__name__, phase=self.phase.name)
            if self.phase is not _T.COMMITTING:  # once asked for, only the answer ends a commit
                self._fail(
                    ProtocolViolation("unexpected message", offered=type(event).__name__, stage=self.phase.value)
                )
            return self._actions
        getattr(self, f"_on_{type(event).__name__}")(event)
        assert self.phase in allowed, (event, self.phase)
        return self._actions

    def _on_Reserved(self, _: Reserved) -> None:  # noqa: N802 -- named after its event
        if self.phase is _T.ENDED:
            return
        self.phase = _T.INDEX
        self._actions.append(TellAccept())
        self._post()

    def _on_ChecksumsReceived(self, event: ChecksumsReceived) -> None:  # noqa: N802
        if self.phase in (_T.SETTLING, _T.ENDED):
            return
        end = event.first + len(event.values)
        if not self.checksummed or event.first != self._told_count or end > self.chunk_count:
            self._fail(
                ProtocolViolation(
                    "checksums out of order",
                    field="first_chunk",
                    offered=f"{event.first}+{len(event.values)}",
                    required=f"{self._told_count}, at most {self.chunk_count}",
                    stage=self.phase.value,
                )
            )
            return
        self._told_count = end
        self._told.update(zip(range(event.first, end), event.values, strict=True))
        self._advance()

    def _on_ReceiveDone(self, event: ReceiveDone) -> None:  # noqa: N802
        self.in_flight.discard(event.chunk)
        if self.phase is _T.SETTLING:
            self._settle()
        elif event.error is not None:
            self._fail(event.error)
        else:
            self._arrived[event.chunk] = event.checksum
            self._advance()

    def _on_IndexChecked(self, _: IndexChecked) -> None:  # noqa: N802
        if self.phase is not _T.CHECKING_INDEX:
            return
        self.phase = _T.PAGES
        self._post()
        self._advance()

    def _on_ContentsChecked(self, _: ContentsChecked) -> None:  # noqa: N802
        if self.phase is _T.CHECKING_CONTENTS:
            self.phase = _T.COMMITTING
            self._actions.append(Commit())

    def _on_Committed(self, event: Committed) -> None:  # noqa: N802
        self.receipt = event.receipt
        self.phase = _T.ENDED
        self._actions.append(Release(keep=True))
        if self._stream_open:
            self._actions.append(TellReceipt(event.receipt))
        self._actions.append(End(None, event.receipt))

    def _on_CommitRefused(self, event: CommitRefused) -> None:  # noqa: N802
        self._fail(event.error)

    def _on_PeerStopped(self, event: PeerStopped) -> None:  # noqa: N802
        if self.phase in (_T.COMMITTING, _T.ENDED):
            return
        self._peer_sent = min(event.sent_chunk_count, self.chunk_count)
        if self.phase is _T.SETTLING:
            self._settle()
        else:
            self._fail(event.error)

    def _on_StreamLost(self, _: StreamLost) -> None:  # noqa: N802
        self._stream_open = False
        if self.phase is _T.SETTLING:
            self._settle()
        elif self.phase not in (_T.COMMITTING, _T.ENDED):
            self._fail(PeerUnavailable("the stream to the source broke", stage=self.phase.value))

    def _on_PeerLost(self, event: PeerLost) -> None:  # noqa: N802
        if self.phase is _T.SETTLING:
            self._close()
        elif self.phase not in (_T.CHECKING_CONTENTS, _T.COMMITTING, _T.ENDED):
            self._fail(event.error)

    def _on_Failed(self, event: Failed) -> None:  # noqa: N802
        if self.phase not in (_T.COMMITTING, _T.SETTLING, _T.ENDED):
            self._fail(event.error)

    def _on_DrainExpired(self, _: DrainExpired) -> None:  # noqa: N802
        if self.phase is _T.SETTLING:
            self._close()

    def _post(self) -> None:
        limit = self.index_chunk_count if self.phase is _T.INDEX else self.chunk_count
        while self.posted_chunk_count < limit and len(self.in_flight) < self.window:
            self.in_flight.add(self.posted_chunk_count)
            self._actions.append(PostReceive(self.posted_chunk_count))
            self.posted_chunk_count += 1

    def _advance(self) -> None:
        """Compare what can be compared, post what the window allows, and move on when a phase is complete."""
        if self.checksummed:
            for chunk in self._arrived.keys() & self._told.keys():
                arrived, told = self._arrived.pop(chunk), self._told.pop(chunk)
                if arrived != told:
                    self._fail(
                        ChecksumMismatch(
                            "bytes that arrived are not those that were sent",
                            chunk=chunk,
                            offered=f"{arrived:#018x}",
                            required=f"{told:#018x}",
                            stage=self.phase.value,
                        )
                    )
                    return
                self.verified_chunk_count += 1
        if self.phase in (_T.INDEX, _T.PAGES):
            self._post()
        complete = self.verified_chunk_count if self.checksummed else len(self._arrived)
        if self.phase is _T.INDEX and complete >= self.index_chunk_count and not self.in_flight:
            self.phase = _T.CHECKING_INDEX
            self._actions.append(CheckIndex())
        elif self.phase is _T.PAGES and complete == self.chunk_count and not self.in_flight:
            self.phase = _T.CHECKING_CONTENTS
            self._actions.append(CheckContents())

    def _fail(self, error: HurrayError) -> None:
        self.outcome = error
        if self._stream_open and not self._stop_told:
            self._stop_told = True
            self._actions.append(TellStop(error))
        self._settle()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._actions.append(CloseEndpoint())

    def _settle(self) -> None:
        """End when no receive is open and no further message of this transfer can arrive; else see to it."""
        self.phase = _T.SETTLING
        all_arrived = self.posted_chunk_count == self.chunk_count and not self.in_flight
        if not self._closed and not all_arrived and self.posted_chunk_count > 0:
            if self._peer_sent is not None:
                for chunk in sorted(chunk for chunk in self.in_flight if chunk >= self._peer_sent):
                    self._actions.append(Forget(chunk))
                for chunk in range(self.posted_chunk_count, self._peer_sent):
                    self.in_flight.add(chunk)
                    self._actions.append(Discard(chunk))
                self.posted_chunk_count = self.chunk_count
            elif not self._stream_open:
                self._close()
            else:
                return
        if not self.in_flight:
            self.phase = _T.ENDED
            self._actions += [Release(), End(self.outcome)]


def _state(preparing: bool, ended: bool, outcome: HurrayError | None) -> State:
    if not ended:
        return State.PREPARING if preparing else State.RUNNING
    if outcome is None:
        return State.SUCCEEDED
    return State.CANCELLED if isinstance(outcome, Cancelled) else State.FAILED


def replay(
    machine: SourceSession | TargetSession,
    events: Iterable[Event],
    carry_out: Callable[[Action], None] = lambda _: None,
) -> Sequence[Action]:
    """Feed recorded events to a fresh machine; every action it asks for, in order, each also given to `carry_out`."""
    actions = machine.start() if isinstance(machine, TargetSession) else []
    for event in events:
        actions += machine.handle(event)
    for action in actions:
        carry_out(action)
    return actions
