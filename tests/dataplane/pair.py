"""Two data planes, connected, and a transfer between them: what a client and a daemon do, without the gRPC between."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hurray_wire import session as s
from hurray_wire.checksum import XXH3_64, Hash
from hurray_wire.dataplane import DataPlane
from hurray_wire.orders import Ended, Output, PrepareCommit, SourceOrder, TargetOrder
from hurray_wire.payload import SourcePayload, TargetPayload
from hurray_wire.transport.base import Transport

WAIT_S = 20.0


@dataclass
class Transfer:
    """One running transfer: its numbers on both sides, and how each side ended."""

    source_number: int
    target_number: int
    source_ended: Future[Ended] = field(default_factory=Future)
    target_ended: Future[Ended] = field(default_factory=Future)
    prepared: Future[PrepareCommit] = field(default_factory=Future)
    told: queue.SimpleQueue[tuple[str, Output]] = field(default_factory=queue.SimpleQueue)

    def result(self) -> tuple[Ended, Ended]:
        """Both ends, once both have ended."""
        return self.source_ended.result(WAIT_S), self.target_ended.result(WAIT_S)


class Pair:
    """`deliver` decides what becomes of each message between the two sides: it is given the sender's name, the output
    and the function that delivers it."""

    def __init__(
        self,
        make_source: Callable[[], Transport],
        make_target: Callable[[], Transport],
        *,
        kind: str = "memory",
        **timers: float,
    ) -> None:
        self.lost: queue.SimpleQueue[tuple[str, int, Exception]] = queue.SimpleQueue()
        self.source = DataPlane(
            {kind: make_source}, on_peer_lost=lambda p, e: self.lost.put(("source", p, e)), **timers
        )
        self.target = DataPlane(
            {kind: make_target}, on_peer_lost=lambda p, e: self.lost.put(("target", p, e)), **timers
        )
        self.source.start()
        self.target.start()
        self.kind = kind
        self.connect()

    def connect(self) -> None:
        """Connect both, as a new Session does: after both sides have let go of what was before."""
        self.source.close_peer(self.target.incarnation, abort=True).result(WAIT_S)
        self.target.close_peer(self.source.incarnation, abort=True).result(WAIT_S)
        opened = [
            self.source.open_peer(self.target.incarnation, self.target.parameters),
            self.target.open_peer(self.source.incarnation, self.source.parameters),
        ]
        for future in opened:
            future.result(WAIT_S)

    def close(self) -> None:
        self.source.stop()
        self.target.stop()

    def begin(
        self,
        source: SourcePayload,
        target: TargetPayload,
        *,
        hash_: Hash = XXH3_64,
        target_hash: Hash | None = None,
        budget_s: float = WAIT_S,
        target_budget_s: float | None = None,
        window: int = 4,
        ready_tensors: int | None = None,
        deliver: Callable[[str, Output, Callable[[], None]], None] = lambda _who, _output, go: go(),
        commit: Callable[[PrepareCommit], s.Event] = lambda _: s.Committed("receipt"),
    ) -> Transfer:
        """Begin a transfer; control messages go straight across unless `deliver` decides otherwise."""
        transfer = Transfer(self.source.new_transfer(), self.target.new_transfer())

        def from_source(output: Output) -> None:
            transfer.told.put(("source", output))
            match output:
                case s.TellChecksums(first, values):
                    event: Any = s.ChecksumsReceived(first, values)
                case s.TellStop(error, sent):
                    event = s.PeerStopped(error, sent)
                case Ended():
                    transfer.source_ended.set_result(output)
                    return
            deliver("source", output, lambda: self.target.post(transfer.target_number, event))

        def from_target(output: Output) -> None:
            transfer.told.put(("target", output))
            number = transfer.source_number
            match output:
                case s.TellAccept():
                    kind = self.kind
                    go = lambda: self.source.accept(number, transfer.target_number, kind, window)  # noqa: E731
                case s.TellReceipt(receipt):
                    go = lambda: self.source.post(number, s.ReceiptReceived(receipt))  # noqa: E731
                case s.TellStop(error):
                    go = lambda: self.source.post(number, s.PeerStopped(error))  # noqa: E731
                case PrepareCommit():
                    transfer.prepared.set_result(output)
                    self.target.post(transfer.target_number, commit(output))
                    return
                case Ended():
                    transfer.target_ended.set_result(output)
                    return
            deliver("target", output, go)

        self.source.begin_source(
            transfer.source_number,
            SourceOrder(self.target.incarnation, source, hash_, budget_s, from_source, ready_tensors),
        )
        self.target.begin_target(
            transfer.target_number,
            TargetOrder(
                self.source.incarnation,
                self.kind,
                target,
                target_hash or hash_,
                target_budget_s or budget_s,
                window,
                from_target,
            ),
        )
        return transfer

    def cut_stream(self, transfer: Transfer) -> None:
        """What both sides hear when their gRPC stream breaks."""
        self.source.post(transfer.source_number, s.StreamLost())
        self.target.post(transfer.target_number, s.StreamLost())
