"""What goes into a transfer's state machine and what comes out: events and actions, all plain values.

The contract with whoever drives a machine: events go in one at a time, and all actions of one event are carried out,
in order, before the next goes in. `Reserve`, `CheckIndex` and `CheckContents` are over when they have been carried out:
they touch the transfer's memory no more, and only their answers come later, as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hurray_wire.errors import HurrayError

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
    """The time for an orderly end is over: whoever still waits closes the connection.

    Fed some time after a machine has entered CANCELLING or SETTLING, unless it has ended by then. Once is enough.
    """


@dataclass(frozen=True, slots=True)
class PeerStopped(Event):
    """The peer gave up, or confirms that we did.

    `sent_chunk_count`: chunks that a source has sent, all others never will be; 0 from a target.
    """

    from_peer: ClassVar[bool] = True
    error: HurrayError
    sent_chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class Accepted(Event):
    """The target accepts; up to `window` chunks, at least one, may be in flight."""

    from_peer: ClassVar[bool] = True
    window: int


@dataclass(frozen=True, slots=True)
class ChunksReady(Event):
    """The first `count` chunks may be sent: prefill has finished the tensors in them."""

    count: int


@dataclass(frozen=True, slots=True)
class ChunkPosted(Event):
    """A SendChunk was carried out: the chunk is staged, hashed and handed to the transport. Fed in order of chunks."""

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
    """Stage the chunk, hash it, hand it to the transport; feed ChunkPosted, and SendDone on completion.

    Where it cannot be handed over, feed SendDone with the error in the place of ChunkPosted.
    """

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
