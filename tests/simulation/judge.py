"""The judge: what a run must never show, looked for after every step that could show it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hurray_wire import session as s
from hurray_wire.errors import (
    ArenaFull,
    Cancelled,
    ChecksumMismatch,
    DataPlaneUnavailable,
    DeadlineExceeded,
    GeometryMismatch,
    HurrayError,
    InternalError,
    InvalidContents,
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
    ProtocolViolation,
    RemoteError,
    RequestIdReused,
    SnapshotLost,
)
from hurray_wire.transport.base import TAG_CHUNK_BITS
from hurray_wire.transport.memory import _Message, _Operation
from simulation.content import Content
from simulation.engines import Op
from simulation.faults import FORGED_REASON, FORGED_RECEIPT, Fault
from simulation.kernel import Process
from simulation.oracle import Held, audit_arena, check_read, check_write
from simulation.payloads import Payloads
from simulation.transport import SimulatedTransport

if TYPE_CHECKING:
    from simulation.nodes import NodeHost, SimulatedMoverLink

UNAVAILABLE = (PeerUnavailable, DataPlaneUnavailable, NodeDraining, DeadlineExceeded, Cancelled, Misuse)
GONE = (KeyNotFound, KeyExpired, KeyDeleted, KeyOverwritten, SnapshotLost)
EXPECTED: dict[str, tuple[type[HurrayError], ...]] = {
    "put": (*UNAVAILABLE, KeyExists, KeyBusy, ArenaFull, LimitExceeded, OutcomeUnknown),
    "get": (*UNAVAILABLE, *GONE, KeyBusy, LimitExceeded),
    "delete": (*UNAVAILABLE, *GONE),
    "renew": (*UNAVAILABLE, *GONE),
    "stat": (*UNAVAILABLE, *GONE),
    "list": UNAVAILABLE,
}
"""What a call may come to without a fault that explains more."""

DRAIN_LIMIT_S = 3.0
"""A drain and some time to notice."""

_EXPLAINS: dict[type[HurrayError], set[Fault]] = {
    ChecksumMismatch: {Fault.BIT_FLIP, Fault.CHECKSUM_LIE},
    InvalidContents: {Fault.INDEX_INVALID, Fault.CONTENTS_INVALID, Fault.STAGING_FAILS},
    ProtocolViolation: {Fault.SHORT_MESSAGE, Fault.LONG_MESSAGE},
    InternalError: {Fault.STAGING_FAILS},
    RequestIdReused: {Fault.RETRY_OTHER},
}


def _forged(op: Op, error: HurrayError) -> bool:
    """Whether this is what comes of messages that were forged: nonsense, or that the other side said it had failed."""
    nonsense = isinstance(error, ProtocolViolation | ChecksumMismatch) and bool(op.forged)
    return nonsense or (error.message == FORGED_REASON and _told_of_failure(op))


def _told_of_failure(op: Op) -> bool:
    """Whether somebody has told one side in the other's name that it had failed."""
    return any(FORGED_REASON.encode() in message for message in op.forged)


class Violation(Exception):
    """Something that must not be."""


class Judge(Payloads):
    """See the module. `trace` is told, line by line, what happens."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None) -> None:
        super().__init__(seed)
        self.violation: str | None = None
        self.outcomes: Counter[str] = Counter()
        self.digest = 0
        """Of all that happened: equal for two runs of one seed."""
        self._trace = trace
        self._commits: dict[str, list[tuple[Any, Held, Process]]] = {}
        self._handles: set[tuple[str, str, int]] = set()
        self._said: dict[Any, list[str]] = {}
        self.ended_s: dict[str, float] = {}
        """When the last attempt of a request was over at its target."""
        self.network.watchers.append(self._watch_stream)

    def forget(self) -> None:
        super().forget()
        self._commits.clear()
        self._said.clear()
        self.ended_s.clear()

    def check(self) -> None:
        """Raises the first Violation that was noticed."""
        for thread, error in self.kernel.crashes:
            self.fail(f"thread {thread.name} of {thread.process.name} died of {error!r}")
        for text in self.network.faults:
            self.fail(text)
        if self.violation is not None:
            raise Violation(self.violation)

    def fail(self, text: str) -> None:
        """Note a violation: the first one counts."""
        if self.violation is None:
            self.violation = f"at {self.kernel.now_s:.6f} s: {text}"
            self.note(f"VIOLATION {text}")

    def note(self, text: str) -> None:
        """For whoever looks into one run, and for the digest of it."""
        line = f"{self.kernel.now_s:.6f} {text}"
        self.digest = (self.digest * 1_000_003 + sum(line.encode()) * len(line)) & (1 << 61) - 1
        if self._trace is not None:
            self._trace(line)

    def note_log(self, event: str, fields: Any) -> None:
        """A program logs an error."""
        self.note(f"log: {event}")
        if event.startswith("internal error") or "fails" in event:
            error = fields.get("exc_info")
            error = error[1] if isinstance(error, tuple) else error
            if error is True:
                error = sys.exc_info()[1]
            if not (isinstance(error, OSError) and "bad memory" in str(error)):
                self.fail(f"a program logs {event!r}: {error!r}")

    def note_condemned(self, link: SimulatedMoverLink, why: str) -> None:
        """A daemon kills its mover: right only where the mover was stopped."""
        process = None if link.mover_process is None else link.mover_process.process
        if process is not None and not process.frozen and process.frozen_s == 0.0:
            self.fail(f"a mover that nobody stopped was condemned: {why}")

    def note_machine_commit(self, machine: Any) -> None:
        """A target's machine has committed."""
        op = machine.sim_op
        if op.kind == "get" and self._is_client_machine(machine, op):
            op.received = True

    @staticmethod
    def _is_client_machine(machine: Any, op: Op) -> bool:
        return isinstance(machine, s.TargetSession) == (op.kind == "get")

    def on_land(self, transport: SimulatedTransport, message: _Message, receive: _Operation) -> None:
        if message.corruption is not None:
            op = self.flips.get((transport, message.tag))
            if op is not None and not receive.may_be_cut:
                op.struck.append(Fault.BIT_FLIP)
        number, chunk = message.tag >> TAG_CHUNK_BITS, message.tag & ((1 << TAG_CHUNK_BITS) - 1)
        self.landed_chunks.setdefault((transport.process, number), set()).add(chunk)
        wrong = None
        mover = self.movers.get(transport.process)
        if mover is not None and not receive.may_be_cut:
            wrong = check_write(mover._arena, message.tag, receive.buffer)
        source = self.movers.get(message.send.endpoint._transport.process)  # type: ignore[attr-defined]
        if source is not None and message.payload is None:
            wrong = wrong or check_read(source._arena, message.send.buffer)
        if wrong is not None:
            self.fail(wrong)

    def audit(self) -> None:
        """The books of every arena."""
        for process, mover in self.movers.items():
            if not process.alive:
                continue
            wrong = audit_arena(mover._arena)
            if wrong is not None:
                self.fail(wrong)
            for number, transfer in mover._plane._transfers.items():
                extent = mover._arena._extents.get(number)
                settling = transfer.machine.phase is s.TargetPhase.SETTLING and transfer.drain_at is not None
                if settling and extent is not None and extent.state.value != "quarantined":
                    self.fail(f"transfer {number} has failed and is not drained, but its memory is {extent.state}")

    def check_times(self) -> None:
        """Every stage has its end: budgets, drains, and streams that broke."""
        now_s = self.kernel.now_s
        for plane in self.planes:
            process, mover = plane.process, plane.process.link
            orphan = mover is not None and not mover.process.alive  # it has 3 s to end by itself
            if process.frozen or process.frozen_s or not process.alive or orphan:
                continue
            for number, transfer in plane._transfers.items():
                phase, who = transfer.machine.phase, f"transfer {number} of {plane.process.name}"
                if transfer.drain_at is not None:
                    if now_s > transfer.stage_began + DRAIN_LIMIT_S:
                        self.fail(f"{who} is in {phase.name} since {transfer.stage_began:.3f}")
                elif now_s > transfer.began + transfer.order.budget_s + 0.5 and phase.name != "COMMITTING":
                    self.fail(f"{who} is in {phase.name}, {now_s - transfer.began:.3f} s after it began")
                context = self.contexts.get((mover, number)) if mover is not None else None
                broken_s = None if context is None else context.broken_s
                if transfer.drain_at is None and broken_s is not None and now_s > broken_s + 0.5:
                    self.fail(f"{who} is in {phase.name}, its stream broke at {broken_s:.3f}")

        for server in self.network.servers.values():
            for context in server.contexts:
                self._check_wait(server, context)

    def _check_wait(self, server: Any, context: Any) -> None:
        """Who waits for another attempt of its request waits no longer than that runs."""
        op, heard_s = context.op, context.heard_s
        ended_s = None if op is None else self.ended_s.get(op.request_id)
        if context.method != "Put" or ended_s is None or heard_s is None or not heard_s < ended_s or op.over:
            return
        requests = server.process.node.requests
        began = context in self.contexts.values() or ("local", op.request_id) in requests._running
        if not began and self.kernel.now_s > ended_s + 1.0:
            self.fail(f"{op} waits for an attempt that was over at {ended_s:.3f}")

    def request_id(self) -> str:
        """Of the call whose handler runs."""
        context = self.current_context()
        return "" if context is None else context.request_id

    def check_rest(self, host: NodeHost) -> None:
        node, mover = host.node, self.movers[host.mover_process]
        store, link = node.store, node.link
        for what, left in (
            ("transfers", node.transfers),
            ("running requests", node.requests._running),
            ("claims", store._claims),
            ("readers", store._readers),
            ("consumers", store._consumers),
            ("waiters", store._waiters),
            ("transfers of the link", link._transfers),
            ("opens under way", link._opening),
            ("closes under way", link._closing),
            ("transfers of the mover", mover._running),
        ):
            if left:
                self.fail(f"{host.target} at rest still has {what}: {left}")
        streams = [item for item in self.network.servers[host.target].contexts if item.method in ("Put", "Get")]
        if len(node._drain_listeners) > len(streams):
            self.fail(f"{host.target} at rest has {len(streams)} streams, and {node._drain_listeners} wait for a drain")
        self.audit()
        store.audit()
        usage = mover._arena.usage()
        if usage.receiving_bytes or usage.quarantined_bytes:
            self.fail(f"{host.target} at rest: {usage}")
        owners = sorted(mover._arena._extents)
        held = sorted(item.contents.memory for item in store._snapshots.values())
        if owners != held:
            self.fail(f"{host.target} at rest holds memory {owners}, its snapshots are {held}")
        if any(extent.reader_count for extent in mover._arena._extents.values()):
            self.fail(f"{host.target} at rest has readers in its arena")
        sessions = {session.peer for session in node.sessions._sessions.values() if session.is_open}
        peers = set(mover._plane._peers.entries)
        if sessions != peers:
            self.fail(f"{host.target} at rest has sessions {sessions}, its mover peers {peers}")

    def check_commit(self, node: Any, key: str, contents: Any) -> Content | None:
        """At the commit: the snapshot is complete, and byte for byte what was put. Returns which put it was."""
        op = self.node_transfers.get((node.link, contents.memory))
        if op is None or op.kind != "put" or op.key != key or op.content is None:
            self.fail(f"a commit to {key} that nobody asked for")
            return None
        mover = self.movers.get(node.link.mover_process.process)
        extent = mover._arena._extents.get(contents.memory)
        if extent is None or extent.state.value != "receiving":
            self.fail(f"{key} is committed, but its memory is {extent}")
            return None
        image = mover._arena._memory[extent.offset : extent.offset + contents.held_bytes]
        transfer = next(item for item in node.transfers if item.number == contents.memory)
        plan = transfer._offered.plan
        if plan.image_bytes != image.nbytes or not np.array_equal(image, op.content.image(plan)):
            self.fail(f"{key} is committed with bytes that are not those of {op}, after {op.faults}")
        return op.content

    def note_commit(self, node: Any, held: Held) -> None:
        """A snapshot became visible."""
        request_id = self.node_transfers[node.link, held.memory].request_id
        self.note(f"commit {held.key}/{held.generation}")
        commits = self._commits.setdefault(request_id, [])
        if any(before_node is node and mover.alive for before_node, _, mover in commits):
            self.fail(f"{held.key}: request {request_id} was committed twice")
        handle = node.host.target, held.key, held.generation
        if handle in self._handles:
            self.fail(f"{handle} names a second snapshot")
        self._handles.add(handle)
        commits.append((node, held, node.link.mover_process.process))
        self.audit()

    def check_consume(self, held: Held, request_id: str) -> None:
        """A node deletes what a reader has consumed: this request's has it, unless somebody has said so in its name."""
        for op in self.ops.get(request_id, []):
            lied = any(FORGED_RECEIPT.encode() in message for message in op.forged)
            if op.consume and op.key == held.key and (op.received or lied):
                return
        self.fail(f"{held.key} was consumed, but who asked for it has not received it")

    def _watch_stream(self, call: Any, message: Any) -> None:
        """What a node says on the stream of a transfer: one Accept, then one Receipt or Stop, then nothing."""
        if call.method not in ("Put", "Get"):
            return
        part = message.target if call.method == "Put" else message.source
        kind = part.WhichOneof("message")
        said = self._said.setdefault(call, [])
        if kind in ("accept", "offer", "receipt", "stop") and kind in said:
            self.fail(f"the node says {kind} twice to {call.op}")
        if kind is not None and ("receipt" in said or ("stop" in said and kind != "stop")):
            self.fail(f"the node says {kind} after {said} to {call.op}")
        if kind is not None:
            said.append(kind)
        if message.HasField("outcome"):
            said.clear()  # the next transfer's

    def judge(self, op: Op) -> None:
        """A call has returned."""
        self.running.pop(op, None)
        self.audit()
        self.check_times()
        error = op.error
        name = "ok" if error is None else getattr(error, "reason", type(error).__name__)
        self.outcomes[f"{op.kind}: {name}"] += 1
        self.note(f"end {op}: {name}")
        if error is not None:
            self._judge_error(op, error)
        if op.kind == "put":
            self._judge_put(op)
        elif op.kind == "get":
            self._judge_get(op)

    def _judge_put(self, op: Op) -> None:
        commits = self._commits.get(op.request_id, [])
        if op.error is None:
            mine = [held for _, held, _ in commits if held.generation == op.result.generation and held.key == op.key]
            if not mine:
                self.fail(f"{op} returned generation {op.result.generation}, which was never committed")
                return
            contents = {held.content.number for held in mine if held.content is not None}
            if contents and op.content is not None and op.content.number not in contents:
                self.fail(f"{op} got the receipt of another content")
            alone = len(self.ops[op.request_id]) == 1
            if alone and op.result.dirty_dead_slot_count not in op.soiled:
                self.fail(f"{op} sent {op.soiled} dirty dead slots, its receipt says {op.result.dirty_dead_slot_count}")
        elif not isinstance(op.error, OutcomeUnknown) and len(self.ops[op.request_id]) == 1:
            # What a mover held went with it: nothing is left of such a commit.
            kept = [held for node, held, mover in commits if mover.alive and node.link.process.alive]
            if kept and not _told_of_failure(op):
                self.fail(f"{op} failed with {op.error!r}, but was committed as generation {kept[0].generation}")

    def _judge_get(self, op: Op) -> None:
        landing = op.landing
        if op.error is not None:
            residue = None if landing is None else landing.residue()
            if residue is not None:
                self.fail(f"{op} failed with {op.error!r}: {residue}")
            return
        held = None
        for node in self._nodes_of(op):
            held = held or node.store.model.all.get((op.key, op.result.receipt.generation))
        if held is None:
            self.fail(f"{op} got generation {op.result.receipt.generation}, which was never committed")
            return
        if op.generation not in (0, held.generation):
            self.fail(f"{op} asked for generation {op.generation} and got {held.generation}")
        if held.content is None:
            return
        wrong = landing.difference(held.content) if landing is not None else held.content.difference(op.result)
        if wrong is not None:
            self.fail(f"{op} got {wrong}")

    def _nodes_of(self, op: Op) -> list[Any]:
        return [node for node in op.host.nodes if node is not None]

    def _judge_error(self, op: Op, error: Exception) -> None:
        """Only what can have happened is reported, and it says in which stage."""
        assert isinstance(error, HurrayError)
        kind = type(error)
        if kind is ArenaFull and int(error.details["offered"]) <= 1 << 20 and error.retry_after_s is None:
            self.fail(f"{op}: {error} without a time after which to try again")
        staged = isinstance(error, DeadlineExceeded | OutcomeUnknown)
        if op.kind in ("put", "get") and staged and error.stage is None:
            self.fail(f"{op}: {error} names no stage")
        if kind in EXPECTED[op.kind] or (kind is GeometryMismatch and op.landing is not None):
            return  # the key holds another snapshot by now than the caches were made for
        if _forged(op, error):
            return
        # A repetition waits for the outcome of what runs, or runs on with it: what met one has met them all.
        alike = [op, *self.ops.get(op.request_id, [])]
        met = {fault for other in alike for _, fault in other.faults} | {
            item for other in alike for item in other.struck
        }
        if kind is RemoteError or not met & _EXPLAINS.get(kind, set()):
            self.fail(f"{op} failed with {error!r}, which nothing explains: {op.faults}")
