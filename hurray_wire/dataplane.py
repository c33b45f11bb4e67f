"""The data plane: one thread that owns the transports, their connections, and every transfer that uses them.

It is reached through messages only. Commands come in from any thread and are carried out in order; what a transfer
wants told to its peer, and its end, goes out through the listener it was begun with. Listeners and futures are called
in the data-plane thread and must not block.

A transfer's decisions are its session machine's (`hurray_wire.session`); this module carries them out: it stages,
hashes, posts, validates, and feeds back what happened. It also keeps the time: each transfer's one budget, the time a
send may go without progress, and the time an orderly end may take.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from hurray_wire import session as s
from hurray_wire.cpus import keep_to
from hurray_wire.errors import (
    Cancelled,
    DataPlaneUnavailable,
    DeadlineExceeded,
    HurrayError,
    InternalError,
    PeerUnavailable,
)
from hurray_wire.image import Chunk, ImagePlan
from hurray_wire.log import get_logger
from hurray_wire.orders import Ended, PrepareCommit, SourceOrder, TargetOrder
from hurray_wire.payload import TargetPayload
from hurray_wire.peers import Connected, Peer, Peers
from hurray_wire.staging import Loan, Staging
from hurray_wire.transport.base import (
    TAG_CHUNK_BITS,
    Buffer,
    Endpoint,
    Transport,
    TransportParameters,
    chunk_tag,
)
from hurray_wire.view import VIEW_CHECKSUM, Shown, View

_log = get_logger("hurray.dataplane")

STALL_S: Final = 5.0
"""Sends in flight without one completing for this long: the peer's data plane is taken for dead."""

DRAIN_S: Final = 2.0
"""How long the peer of a failed transfer may take for an orderly end before the connection is closed."""

UNKNOWN_TAGS_S: Final = 1.0
"""How often messages that nobody waits for are looked for while the thread is otherwise idle."""

START_S: Final = 30.0
"""Longest time for transports to start."""

T = TypeVar("T")


@dataclass(eq=False)
class _Transfer:
    number: int
    order: SourceOrder | TargetOrder
    machine: s.SourceSession | s.TargetSession
    tag: int | None
    transport: str
    deadline: float
    began: float
    queue: deque[s.Event] = field(default_factory=deque)
    busy: bool = False
    ended: bool = False
    stages: list[tuple[str, float]] = field(default_factory=list)
    stage_began: float = 0.0
    link: Peer | None = None
    staging: dict[int, Loan] = field(default_factory=dict)
    moved_at: float = 0.0
    drain_at: float | None = None

    @property
    def plan(self) -> ImagePlan:
        return self.order.payload.plan

    @property
    def endpoint(self) -> Endpoint | None:
        """The connection it began on, while that is open: never a later one to the same peer."""
        return self.link.endpoints.get(self.transport) if self.link is not None and self.link.open else None


class DataPlane:
    """See the module. `transports`: what makes each kind, called in the thread when it is first wanted;
    `on_peer_lost(peer, error)` is called there, too. `cpus`: those that the thread is kept to, as "0-3,8";
    None: all.
    """

    def __init__(
        self,
        transports: Mapping[str, Callable[[], Transport]],
        *,
        on_peer_lost: Callable[[int, HurrayError], None] = lambda _peer, _error: None,
        stall_s: float = STALL_S,
        drain_s: float = DRAIN_S,
        cpus: str | None = None,
    ) -> None:
        self.incarnation: Final = uuid.uuid4().int >> 64
        self.unknown_tag_count = 0
        self._stall_s = stall_s
        self._drain_s = drain_s
        self._cpus = cpus
        self._numbers = itertools.count(1)
        self._commands: deque[Callable[[], None]] = deque()
        self._transfers: dict[int, _Transfer] = {}
        self._peers = Peers(
            transports,
            on_started=lambda transport: self._poll.register(transport.fileno(), select.EPOLLIN),
            fail_transfers=self._fail_for_peer,
            on_lost=on_peer_lost,
        )
        self._staging = Staging()
        self._stopping = False
        self._retiring = False
        self._poll: select.epoll
        self._next_unknown_tags = 0.0
        self._wake_lock = threading.Lock()
        self._wake_fd = -1
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name="hurray-dataplane", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------

    def start(self, kinds: Sequence[str] | None = None) -> None:
        """Start the thread, and transports of these kinds (None: of all). Raises as `start_transports` does; then
        nothing runs."""
        self._thread.start()
        try:
            self._call(self._keep_to_cpus).result(START_S)
            self.start_transports(tuple(self._peers.makers) if kinds is None else kinds)
        except HurrayError:
            self._submit(self._begin_stop)
            self._thread.join(START_S)
            raise

    def start_transports(self, kinds: Sequence[str], timeout_s: float = START_S) -> tuple[TransportParameters, ...]:
        """Start those of these transports that do not run yet; what peers need to connect to each, in this order.

        Raises what made that impossible, as a HurrayError whose details name the transport.
        """

        def start(done: Future[tuple[TransportParameters, ...]]) -> None:
            self._require_running()
            done.set_result(self._peers.start(kinds))

        try:
            return self._call(start).result(timeout_s)
        except TimeoutError:
            raise DataPlaneUnavailable(
                "the transports did not start in time", stage="start", transport=", ".join(kinds)
            ) from None

    def stop(self) -> None:
        """Fail what runs with Cancelled, close every connection, end the thread. Safe to call twice."""
        self._submit(self._begin_stop)
        if self._thread.is_alive():
            self._thread.join()

    def retire(self) -> None:
        """Stop as soon as the last connection is closed and the last transfer is over."""
        self._submit(self._begin_retire)

    @property
    def running(self) -> bool:
        """Whether the thread takes commands."""
        return self._thread.is_alive() and not self._stopping

    @property
    def worn(self) -> bool:
        """A connection was lost or cut here. Both sides may still hold remains of it, and UCX was seen to crash when
        the same two workers connect anew: connect from a fresh data plane instead, and `retire` this one."""
        return self._peers.worn

    @property
    def unusable(self) -> dict[str, str]:
        """Transports that run and make no connection any more: why, for people."""
        reasons = {kind: transport.why_unusable() for kind, transport in [*self._peers.transports.items()]}
        return {kind: why for kind, why in reasons.items() if why is not None}

    @property
    def parameters(self) -> tuple[TransportParameters, ...]:
        """What peers need to connect to this side, by each transport that runs."""
        return tuple(self._peers.parameters.values())

    def takes_device_memory(self, kind: str) -> bool:
        """Whether the transport of this kind, which runs, sends and receives memory of GPUs as it is."""
        return self._peers.transports[kind].takes_device_memory

    @property
    def transfer_count(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    @property
    def peer_count(self) -> int:
        """Connections that are open."""
        return len(self._peers.entries)

    def new_transfer(self) -> int:
        """A transfer number, never given twice in this incarnation."""
        return next(self._numbers)

    def open_peer(
        self, peer: int, parameters: Sequence[TransportParameters], *, proof_s: float | None = None
    ) -> Future[Connected]:
        """Connect to a peer by every transport that both sides have (open connections to it are cut first).

        A transport that need not reach the peer is left out where it does not. `proof_s`: wait so long for each to
        show that it does. None: do not wait, and count them all; for the side whose peer cannot yet know how to reach
        it.

        Fails with CapabilityMismatch, where they have none or one whose settings differ, PeerUnavailable, and
        DataPlaneUnavailable, where this side's are unusable."""

        def open_(done: Future[Connected]) -> None:
            self._require_running()
            self._peers.open(peer, parameters, proof_s, done)

        return self._call(open_)

    def close_peer(self, peer: int, *, abort: bool = False) -> Future[None]:
        """Close the connection to a peer, after its transfers have failed if any still run."""

        def close(done: Future[None]) -> None:
            self._peers.close(peer, abort=abort)
            done.set_result(None)

        return self._call(close)

    def leave_peer(self, peer: int) -> None:
        """The peer is being asked to close the connection: its end is no loss any more."""
        self._submit(lambda: self._peers.leave(peer))

    def begin_source(self, number: int, order: SourceOrder, *, soon: bool = True) -> None:
        """Begin a transfer as its source. Unless `soon`, the thread hears of it with the next command, or `wake`: until
        then it keeps no time for it, and is not in the way of who has to tell the offer first."""
        self._commands.append(lambda: self._begin_source(number, order))
        if soon:
            self.wake()

    def wake(self) -> None:
        """Have the commands carried out that it may not have heard of."""
        if self._commands and self._asleep:
            with self._wake_lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)

    def begin_target(self, number: int, order: TargetOrder) -> None:
        """Begin a transfer as its target; `number` becomes the upper 40 bits of its tags."""
        self._submit(lambda: self._begin_target(number, order))

    def accept(self, number: int, transfer: int, transport: str, window: int) -> None:
        """The target accepted: `transfer` is its number of it."""
        self._submit(lambda: self._accept(number, transfer, transport, window))

    def announce(self, number: int, ready_tensors: int) -> None:
        """The first `ready_tensors` tensors of a source may be sent; fewer than before changes nothing."""
        self._submit(lambda: self._announce(number, ready_tensors))

    def post(self, number: int, event: s.Event, *, soon: bool = True) -> None:
        """Feed an event to a transfer; one that is over ignores it. `soon`: see begin_source."""
        self._commands.append(lambda: self._post(number, event))
        if soon:
            self.wake()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self.wake()

    def _call(self, work: Callable[[Future[T]], None]) -> Future[T]:
        """Have `work` done in the thread. It sets the future's result, then or later, or raises its exception."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                work(future)
            except HurrayError as error:
                future.set_exception(error)

        if not self._thread.is_alive():
            future.set_exception(DataPlaneUnavailable("the data plane is stopped"))
        else:
            self._submit(command)
        return future

    def _run(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with select.epoll() as self._poll:
                self._poll.register(self._wake_fd, select.EPOLLIN)
                self._loop()
        finally:
            for transport in self._peers.transports.values():
                transport.close()
            with self._wake_lock:
                os.close(self._wake_fd)
                self._wake_fd = -1
            self._stopping = True
            self._run_commands()  # late callers get an answer

    def _loop(self) -> None:
        while True:
            worked, moved = self._run_commands(), False
            for transport in self._peers.transports.values():
                moved |= transport.progress()
            wake_at = self._run_timers(time.monotonic())
            if (self._stopping or self._retiring) and not self._transfers and not self._peers.entries:
                return
            if not (worked or moved):  # at once: to poll for more would cost others the core that they need to send it
                self._sleep(wake_at)

    def _sleep(self, wake_at: float | None) -> None:
        self._asleep = True
        # Whoever adds a command after this look sees that the thread is asleep, and wakes it.
        if not self._commands and all(transport.arm() for transport in self._peers.transports.values()):
            ready = self._poll.poll(None if wake_at is None else max(0.0, wake_at - time.monotonic()))
            if any(descriptor == self._wake_fd for descriptor, _ in ready):
                os.eventfd_read(self._wake_fd)
        self._asleep = False

    def _run_commands(self) -> bool:
        ran = False
        while self._commands:
            ran = True
            self._commands.popleft()()
        return ran

    def _run_timers(self, now: float) -> float | None:
        """Fire what is due; when the next timer is, or None."""
        wake_at = self._peers.settle(now)
        for transfer in list(self._transfers.values()):
            at = self._check_transfer(transfer, now)
            if not transfer.ended and at is not None:
                wake_at = at if wake_at is None else min(wake_at, at)
        if self._peers.entries:
            # Looked for on a timer of its own only while peers are there to send them.
            if now >= self._next_unknown_tags:
                self._next_unknown_tags = now + UNKNOWN_TAGS_S
                for transport in self._peers.transports.values():
                    self.unknown_tag_count += transport.drain_unknown(self._is_known)
            wake_at = min(wake_at or self._next_unknown_tags, self._next_unknown_tags)
        return wake_at

    def _check_transfer(self, transfer: _Transfer, now: float) -> float | None:
        machine = transfer.machine
        if transfer.drain_at is not None:
            if now < transfer.drain_at:
                return transfer.drain_at
            transfer.drain_at = now + self._drain_s
            self._feed(transfer, s.DrainExpired())
            return transfer.drain_at
        if now >= transfer.deadline:
            transfer.deadline = float("inf")
            budget_s = transfer.order.budget_s
            late = DeadlineExceeded("the budget of the transfer ran out", stage=machine.stage, budget_s=budget_s)
            self._feed(transfer, s.Failed(late))
            return transfer.drain_at
        if isinstance(machine, s.SourceSession) and machine.in_flight:
            if now >= transfer.moved_at + self._stall_s:
                transfer.moved_at = float("inf")
                stalled = PeerUnavailable(
                    f"no chunk completed for {self._stall_s:g} s", stage=machine.phase.value, peer=transfer.order.peer
                )
                self._feed(transfer, s.Failed(stalled))
                return transfer.drain_at
            return min(transfer.deadline, transfer.moved_at + self._stall_s)
        return transfer.deadline

    def _is_known(self, tag: int) -> bool:
        # Also of a failed transfer: its machine will discard what it finds out was sent.
        transfer = self._transfers.get(tag >> TAG_CHUNK_BITS)
        return (
            transfer is not None
            and isinstance(transfer.machine, s.TargetSession)
            and tag & ((1 << TAG_CHUNK_BITS) - 1) < transfer.machine.chunk_count
        )

    # --- commands -------------------------------------------------------------------------------------------------

    def _keep_to_cpus(self, done: Future[None]) -> None:
        if self._cpus is not None:
            keep_to(self._cpus)
        done.set_result(None)

    def _begin_retire(self) -> None:
        self._retiring = True

    def _begin_stop(self) -> None:
        self._stopping = True
        for transfer in list(self._transfers.values()):
            self._feed(
                transfer, s.Failed(Cancelled("this process is shutting down", stage=transfer.machine.phase.value))
            )
            self._feed(transfer, s.StreamLost())
        for peer in list(self._peers.entries):
            self._peers.close(peer, abort=False)

    def _require_running(self) -> None:
        if self._stopping:
            raise DataPlaneUnavailable("the data plane is stopping")

    def _fail_for_peer(self, numbers: Collection[int], error: HurrayError) -> None:
        for number in numbers:
            self._feed(self._transfers[number], s.PeerLost(error))

    def _begin_source(self, number: int, order: SourceOrder) -> None:
        plan = order.payload.plan
        count = len(plan.chunks)
        ready = count if order.ready_tensors is None else plan.ready_chunk_count(order.ready_tensors)
        machine = s.SourceSession(count, plan.index_chunk_count, ready, checksummed=order.hash.verifies)
        self._begin(_Transfer(number, order, machine, None, "", 0.0, 0.0))

    def _begin_target(self, number: int, order: TargetOrder) -> None:
        chunk_counts = order.chunk_counts
        if chunk_counts is None:
            chunk_counts = len(order.payload.plan.chunks), order.payload.plan.index_chunk_count
        machine = s.TargetSession(*chunk_counts, order.window, order.hash.verifies, order.checksums)
        transfer = _Transfer(number, order, machine, number, order.transport, 0.0, 0.0)
        if self._begin(transfer):
            self._carry_out_all(transfer, machine.start())
            self._feed_queued(transfer)

    def _begin(self, transfer: _Transfer) -> bool:
        now = time.monotonic()
        transfer.began = transfer.stage_began = transfer.moved_at = now
        transfer.deadline = now + transfer.order.budget_s
        self._transfers[transfer.number] = transfer
        peer = self._peers.entries.get(transfer.order.peer)
        if self._stopping:
            self._feed(transfer, s.Failed(DataPlaneUnavailable("the data plane is stopping", stage="offer")))
        elif peer is None:
            error = PeerUnavailable("no data-plane connection to this peer", stage="connect", peer=transfer.order.peer)
            self._feed(transfer, s.Failed(error))
        else:
            peer.transfers.add(transfer.number)
            transfer.link = peer
        return not transfer.ended

    def _accept(self, number: int, tag: int, transport: str, window: int) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None:
            transfer.tag, transfer.transport = tag, transport
            transfer.moved_at = time.monotonic()
            self._feed(transfer, s.Accepted(window))

    def _announce(self, number: int, ready_tensors: int) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None:
            self._feed(transfer, s.ChunksReady(transfer.plan.ready_chunk_count(ready_tensors)))

    def _post(self, number: int, event: s.Event) -> None:
        transfer = self._transfers.get(number)
        if transfer is not None:
            self._feed(transfer, event)

    # --- machine and world ------------------------------------------------------------------------------------------

    def _feed(self, transfer: _Transfer, event: s.Event) -> None:
        """Queue an event, and run the machine unless it already runs further up the stack."""
        transfer.queue.append(event)
        if not transfer.busy:
            self._feed_queued(transfer)

    def _feed_queued(self, transfer: _Transfer) -> None:
        transfer.busy = True
        try:
            while transfer.queue and not transfer.ended:
                before = transfer.machine.phase
                actions = transfer.machine.handle(transfer.queue.popleft())
                after = transfer.machine.phase
                if after is not before:
                    self._note_phase(transfer, before.value, after)
                self._carry_out_all(transfer, actions)
        finally:
            transfer.busy = False

    def _note_phase(self, transfer: _Transfer, before: str, after: s.SourcePhase | s.TargetPhase) -> None:
        now = time.monotonic()
        transfer.stages.append((before, now - transfer.stage_began))
        transfer.stage_began = now
        if after in (s.SourcePhase.SETTLING, s.SourcePhase.CANCELLING, s.TargetPhase.SETTLING):
            transfer.drain_at = now + self._drain_s
            transfer.order.payload.settling()

    def _carry_out_all(self, transfer: _Transfer, actions: list[s.Action]) -> None:
        busy, transfer.busy = transfer.busy, True
        for action in actions:
            self._carry_out(transfer, action)
        transfer.busy = busy

    def _carry_out(self, transfer: _Transfer, action: s.Action) -> None:
        match action:
            case s.TellAccept() | s.TellChecksums() | s.TellStop() | s.TellReceipt():
                transfer.order.listener(action)
            case s.SendChunk(chunk):
                self._send(transfer, transfer.plan.chunks[chunk])
            case s.PostReceive(chunk):
                self._receive(transfer, chunk)
            case s.Forget(chunk):
                self._forget(transfer, chunk)
            case s.Discard(chunk):
                self._discard(transfer, chunk)
            case s.Reserve():
                self._attempt(transfer, self._target(transfer).reserve, s.Reserved())
            case s.CheckIndex():
                self._attempt(transfer, self._target(transfer).check_index, s.IndexChecked())
            case s.CheckContents():
                self._attempt(transfer, self._target(transfer).check_contents, s.ContentsChecked())
            case s.Commit():
                self._prepare_commit(transfer)
            case s.CloseEndpoint():
                peer = transfer.order.peer
                if transfer.endpoint is not None:
                    self._peers.lose(peer, PeerUnavailable("a failed transfer was not drained", peer=peer), notify=True)
            case s.Release(keep):
                transfer.order.payload.release(keep=keep)
            case s.End(error, receipt):
                self._end(transfer, error, receipt)

    def _end(self, transfer: _Transfer, error: HurrayError | None, receipt: object) -> None:
        transfer.ended = True
        del self._transfers[transfer.number]
        if transfer.link is not None:
            transfer.link.transfers.discard(transfer.number)
        transfer.order.listener(Ended(error, receipt, tuple(transfer.stages)))

    @staticmethod
    def _target(transfer: _Transfer) -> TargetPayload:
        assert isinstance(transfer.order, TargetOrder)
        return transfer.order.payload

    def _attempt(self, transfer: _Transfer, work: Callable[[], object], then: s.Event) -> None:
        error = _attempt(work, transfer.number)
        self._feed(transfer, then if error is None else s.Failed(error))

    def _prepare_commit(self, transfer: _Transfer) -> None:
        machine = transfer.machine
        assert isinstance(machine, s.TargetSession)
        # The machine compares what stands for a view's checksum like any other.
        view_count = int(transfer.order.hash.verifies and transfer.plan.view_chunk is not None)
        transfer.order.listener(
            PrepareCommit(
                self._target(transfer).summary(), machine.verified_chunk_count - view_count, tuple(transfer.stages)
            )
        )

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _tag(self, transfer: _Transfer, chunk: int) -> int:
        assert transfer.tag is not None, "no tag before Accept"
        return chunk_tag(transfer.tag, chunk)

    def _forget(self, transfer: _Transfer, chunk: int) -> None:
        if transfer.endpoint is not None:  # a connection that is gone has completed the receive already
            transfer.endpoint.forget(self._tag(transfer, chunk))

    def _discard(self, transfer: _Transfer, chunk: int) -> None:
        done = self._receive_done(transfer, chunk, None)
        if transfer.endpoint is None:
            done(_gone(transfer))
        else:
            transfer.endpoint.discard(self._tag(transfer, chunk), done)

    def _send(self, transfer: _Transfer, chunk: Chunk) -> None:
        order, endpoint = transfer.order, transfer.endpoint
        assert isinstance(order, SourceOrder)
        if endpoint is None:
            self._feed(transfer, s.SendDone(chunk.index, _gone(transfer)))
            return
        checksum = 0

        def take_staging() -> Buffer:
            loan = self._staging.take(order.payload, transfer.plan, endpoint, chunk)
            transfer.staging[chunk.index] = loan
            return loan.buffer

        def stage() -> Buffer | list[memoryview] | Shown:
            buffer: Buffer | list[memoryview] | Shown = order.payload.stage(chunk, take_staging, endpoint.takes_parts)
            nonlocal checksum
            checksum = self._checksum(transfer, chunk, buffer)
            return buffer

        buffer, error = _outcome(stage, transfer.number)
        if error is not None:
            self._free_staging(transfer, chunk.index, sent=False)
            self._feed(transfer, s.SendDone(chunk.index, error))
            return
        transfer.moved_at = time.monotonic()
        self._feed(transfer, s.ChunkPosted(chunk.index, checksum))

        def done(error: HurrayError | None) -> None:
            transfer.moved_at = time.monotonic()
            self._free_staging(transfer, chunk.index, sent=True)
            self._feed(transfer, s.SendDone(chunk.index, error))

        tag = self._tag(transfer, chunk.index)
        if chunk.index == transfer.plan.view_chunk:
            endpoint.send_view(tag, buffer, done)
        elif isinstance(buffer, list):
            endpoint.send_parts(tag, buffer, done)
        else:
            endpoint.send(tag, buffer, done)

    def _receive(self, transfer: _Transfer, chunk: int) -> None:
        buffer, error = _outcome(lambda: self._target(transfer).memory(transfer.plan.chunks[chunk]), transfer.number)
        endpoint = transfer.endpoint
        if error is not None or endpoint is None:
            self._feed(transfer, s.ReceiveDone(chunk, error or _gone(transfer)))
            return
        done = self._receive_done(transfer, chunk, buffer)
        receive = endpoint.receive_view if chunk == transfer.plan.view_chunk else endpoint.receive
        receive(self._tag(transfer, chunk), buffer, done)

    def _receive_done(
        self, transfer: _Transfer, chunk: int, buffer: Buffer | View | None
    ) -> Callable[[HurrayError | None], None]:
        def done(error: HurrayError | None) -> None:
            checksum = 0
            failure = None
            if error is None and buffer is not None and transfer.machine.outcome is None:
                checksum = self._checksum(transfer, transfer.plan.chunks[chunk], buffer)
                payload = self._target(transfer)
                failure = _attempt(lambda: payload.arrived(transfer.plan.chunks[chunk]), transfer.number)
            self._feed(transfer, s.ReceiveDone(chunk, error, checksum))
            if failure is not None:
                self._feed(transfer, s.Failed(failure))

        return done

    @staticmethod
    def _checksum(transfer: _Transfer, chunk: Chunk, buffer: Buffer | list[memoryview] | Shown | View) -> int:
        """Of a view there is none: nothing crosses that could come out otherwise."""
        return VIEW_CHECKSUM if chunk.index == transfer.plan.view_chunk else transfer.order.hash(buffer)

    def _free_staging(self, transfer: _Transfer, chunk: int, *, sent: bool) -> None:
        loan = transfer.staging.pop(chunk, None)
        if loan is not None:
            self._staging.give_back(loan, sent=sent)


def _gone(transfer: _Transfer) -> PeerUnavailable:
    return PeerUnavailable(
        "the connection to the peer is gone", stage=transfer.machine.phase.value, peer=transfer.order.peer
    )


def _outcome(work: Callable[[], Any], transfer: int) -> tuple[Any, HurrayError | None]:
    """What `work` returned, or the error it raised: a fault of our own becomes InternalError, its cause logged."""
    try:
        return work(), None
    except HurrayError as error:
        return None, error.with_traceback(None)  # which would hold what the frames hold: memory of the transfer
    except Exception:
        log_id = uuid.uuid4().hex[:12]
        _log.exception("internal error", log_id=log_id, transfer=transfer)
        return None, InternalError("a fault of this program; its log has the cause", log_id=log_id)


def _attempt(work: Callable[[], Any], transfer: int) -> HurrayError | None:
    return _outcome(work, transfer)[1]
