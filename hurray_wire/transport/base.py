"""The seam between a transfer and what moves its bytes.

A transport is owned by one thread, the data-plane thread, where every method is called. Messages are
tagged, and a message lands in the one receive that was posted with exactly its tag, whatever the order of the two.

The contract that everything above rests on: **a completion fires exactly once, in the owning thread, and from then on
the transport touches the buffer no more**. A buffer belongs to the transport from `send` or `receive` until its
completion, also after `close` and `abort`: memory is reused only after the completion, never after a call returned.

A completed send says nothing about delivery. A receive does not report a length: both sides know it beforehand, and
another one is an error.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hurray_wire.errors import HurrayError, Misuse
from hurray_wire.view import Shown, View

Completion = Callable[[HurrayError | None], None]
"""Called once with None, or with the error that ended the operation."""

Buffer = Any
"""A contiguous one-dimensional uint8 NumPy or CuPy array; writable where it receives. Never empty."""

TAG_TRANSFER_BITS = 40
TAG_CHUNK_BITS = 24


def chunk_tag(transfer: int, chunk: int) -> int:
    """The 64-bit tag of one chunk: 40 bits of transfer, chosen by the target, above 24 bits of chunk index."""
    assert 0 <= transfer < 1 << TAG_TRANSFER_BITS, transfer
    assert 0 <= chunk < 1 << TAG_CHUNK_BITS, chunk
    return transfer << TAG_CHUNK_BITS | chunk


@dataclass(frozen=True, slots=True)
class TransportParameters:
    """What one side tells the other before they connect: how to reach it, and the settings that must agree."""

    kind: str
    address: bytes = field(repr=False)
    """May hold a secret that only this peer may know: it is in no log."""

    settings: Mapping[str, str] = field(default_factory=dict)


class Endpoint(ABC):
    """A connection to one peer, made on both sides, kept for as long as the peer lives."""

    takes_parts: ClassVar[bool] = False
    """Whether there is `send_parts`."""

    peer: int
    """Incarnation of the peer (64 bits)."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False from the moment the connection is known to be lost or closed."""

    @property
    def proven(self) -> bool:
        """Whether a transport that is `optional` has reached the peer. Until then operations only wait."""
        return True

    @abstractmethod
    def send(self, tag: int, buffer: Buffer, done: Completion) -> None:
        """Send the whole buffer. Errors, a dead endpoint among them, reach `done`: it never raises."""

    def send_parts(self, tag: int, parts: Sequence[memoryview], done: Completion) -> None:
        """Send a message whose bytes lie apart, in parts that are not empty, as `send` would send them in one piece."""
        raise NotImplementedError

    @abstractmethod
    def receive(self, tag: int, buffer: Buffer, done: Completion) -> None:
        """Post the buffer for the message with this tag. A longer message is cut, never overruns, and completes with
        ProtocolViolation; so does a shorter one, since the rest of the buffer is not the peer's (UCX: one that lacks 16
        bytes or more)."""

    @abstractmethod
    def forget(self, tag: int) -> None:
        """Withdraw a posted receive whose message the peer is known never to have sent.

        Its completion fires with Cancelled. For a message that may be under way this is not safe: close instead.
        """

    @abstractmethod
    def discard(self, tag: int, done: Completion) -> None:
        """Take a message that the peer did send and nobody posted a receive for, and drop it."""

    def send_view(self, tag: int, shown: Shown, done: Completion) -> None:  # noqa: ARG002 -- for those that can
        """Show memory to the peer, which has posted a `receive_view` with this tag, or will; errors as in `send`.
        Completed, the descriptors are the peer's too; the pin tells how long it needs them."""
        raise Misuse("this transport shows no memory")

    def receive_view(self, tag: int, view: View, done: Completion) -> None:  # noqa: ARG002 -- for those that can
        """Post a view for memory that the peer shows with this tag: of exactly its size, mapped when it completes."""
        raise Misuse("this transport shows no memory")

    def take_staging(self, nbytes: int) -> Buffer | None:  # noqa: ARG002 -- for transports that have memory of their own
        """Memory of the transport's own, uint8 [nbytes], from which a send copies no more. None: there is none (now).

        It is the caller's until it is given to `send`, whose completion ends the loan, or to `return_staging`.
        """
        return None

    def return_staging(self, buffer: Buffer) -> None:  # noqa: B027 -- nothing to do without memory of one's own
        """Give back staging memory that will not be sent."""

    @abstractmethod
    def close(self) -> None:
        """Close in an orderly way. Pending operations complete, with errors where they must; never blocks for long."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connection now. Pending operations complete with PeerUnavailable."""


class Transport(ABC):
    """One way to move bytes, with its progress engine. Not thread-safe."""

    kind: ClassVar[str]
    """Name in configuration, offers, receipts and metrics."""

    optional: ClassVar[bool] = False
    """True for one that by its nature reaches only some peers: one that it does not reach may still be there."""

    takes_device_memory: bool = False
    """Whether buffers may be CuPy arrays. A transport tells once it runs."""

    @abstractmethod
    def parameters(self) -> TransportParameters:
        """What a peer needs to connect to this side."""

    def why_unusable(self) -> str | None:
        """Why no connection can be made any more, now or ever in this process; None: they can. Any thread may ask."""
        return None

    @abstractmethod
    def check_peer(self, parameters: TransportParameters) -> None:
        """Raise CapabilityMismatch, naming the setting and both values, where the two sides cannot work together."""

    @abstractmethod
    def connect(self, peer: int, parameters: TransportParameters, on_lost: Callable[[HurrayError], None]) -> Endpoint:
        """The endpoint to a peer; returns at once, errors show later. `on_lost` fires once, in the owning thread, when
        the connection is lost without `close` or `abort` having been called here."""

    @abstractmethod
    def progress(self) -> bool:
        """Move what can move and fire completions. True if anything happened."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor to poll for reading: it becomes readable when there is something to progress after `arm`."""

    @abstractmethod
    def arm(self) -> bool:
        """Get ready to sleep on `fileno`. False: something is there already, call `progress` instead."""

    def park(self, timeout_s: float | None) -> None:
        """Sleep until there may be something to progress, or for `timeout_s` seconds (None: no limit)."""
        if self.arm():
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            poll.poll(None if timeout_s is None else timeout_s * 1000)

    @abstractmethod
    def drain_unknown(self, is_known: Callable[[int], bool]) -> int:
        """Take and drop messages that arrived with tags nobody waits for, so that a peer cannot fill memory with them.

        `is_known(tag)` tells whether a live transfer will still post a receive for it. Returns how many were dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """Abort what is open, complete everything, free all. Afterwards nothing may be called."""
