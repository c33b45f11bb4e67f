"""What goes wrong, where it can, and how often it did.

A row is where a transfer is: a phase of the source's or the target's machine, or `opening`, before either has begun. A
fault is thrown in while a transfer is in a row, and counted there; so every pair that can come about is met.
"""

from __future__ import annotations

import math
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hurray_client.transfer import EAGER_BYTES
from hurray_wire import session as s
from hurray_wire.errors import InvalidContents, NodeDraining
from hurray_wire.image import INDEX, Chunk
from hurray_wire.status import to_status
from hurray_wire.transport.base import chunk_tag
from hurray_wire.v1 import transfer_pb2 as pb

if TYPE_CHECKING:
    from simulation.engines import Op
    from simulation.payloads import Payloads
    from simulation.world import World

OPENING: Final = "opening"

FORGED_REASON: Final = "somebody else says so"
"""Of what is said to have failed in a peer's name."""

FORGED_RECEIPT: Final = "forged"
"""Its key."""

SOURCE_ROWS: Final = tuple(f"source {phase.name}" for phase in s.SourcePhase if phase is not s.SourcePhase.ENDED)
TARGET_ROWS: Final = tuple(f"target {phase.name}" for phase in s.TargetPhase if phase is not s.TargetPhase.ENDED)
ROWS: Final = (OPENING, *SOURCE_ROWS, *TARGET_ROWS)


def row_of(phase: s.SourcePhase | s.TargetPhase) -> str:
    """The row that a phase is."""
    return f"{'source' if isinstance(phase, s.SourcePhase) else 'target'} {phase.name}"


_SENDING = ("source OFFERED", "source SENDING")
_ARRIVING = ("target RESERVING", "target INDEX", "target CHECKING_INDEX", "target PAGES")
_FLOWING = (*_SENDING, "source DELIVERED", *_ARRIVING)
_MACHINES = (*SOURCE_ROWS, *TARGET_ROWS)


class Fault(Enum):
    """Each with the rows in which it can have an effect."""

    STREAM_RESET = ("the stream breaks", ROWS)
    STREAM_SLOW = ("the stream drips, for seconds", ROWS)
    CONNECTION_CUT = ("all streams between client and node break", ROWS)
    PARTITION = ("nothing passes between client and node, silently, for a while", ROWS)
    LINK_CUT = ("the data-plane connection breaks", ROWS)
    LINK_STALLS = ("the data plane moves nothing, silently, for a while", ROWS)
    LATE_COMPLETIONS = ("completions come late", ROWS)
    CONNECT_REFUSED = ("the next data-plane connection fails", ROWS)
    CLIENT_DIES = ("kill -9 of the client's process", ROWS)
    NODE_DIES = ("kill -9 of hurrayd", ROWS)
    MOVER_DIES = ("kill -9 of the mover", ROWS)
    CLIENT_FREEZES = ("SIGSTOP of the client's process, for a while", ROWS)
    MOVER_FREEZES = ("SIGSTOP of the mover, for a while", ROWS)
    CLIENT_CLOSES = ("the client is closed by another thread", ROWS)
    CANCEL = ("the caller cancels", ROWS)
    NODE_CANCELS = ("the node gives its transfers up", ROWS)
    BUDGET_ENDS = ("the budget of this side is spent", _MACHINES)
    DRAIN = ("hurrayd is told to stop", ROWS)
    KEY_DELETED = ("somebody deletes the key", ROWS)
    KEY_EXPIRES = ("the lease of the key ends", ROWS)
    KEY_RENEWED = ("somebody renews the key", ROWS)
    KEY_OVERWRITTEN = ("somebody else puts to the key", ROWS)
    WALL_CLOCK_JUMPS = ("the wall clock is set, by days", ROWS)
    ROGUE_TO_NODE = ("the client says something out of turn", _MACHINES)
    ROGUE_TO_CLIENT = ("the node says something out of turn", _MACHINES)
    RETRY_SAME = ("the same request comes a second time, at the same time", ROWS)
    RETRY_OTHER = ("another request comes with the same id", ROWS)
    ARENA_FULL = ("the target has no memory", (OPENING, "source OFFERED", "target RESERVING"))
    BIT_FLIP = ("a bit of a chunk flips on its way", _FLOWING)
    DIRTY_SLOTS = ("the source does not clear dead slots", (OPENING, *_SENDING))
    CHECKSUM_LIE = ("the source tells a wrong checksum", (OPENING, *_SENDING))
    SHORT_MESSAGE = ("the source sends too little", (OPENING, *_SENDING))
    LONG_MESSAGE = ("the source sends too much", (OPENING, *_SENDING))
    STAGING_FAILS = ("the source cannot stage a chunk", (OPENING, *_SENDING))
    INDEX_INVALID = ("the source sends a page id that is out of range", (OPENING, "source OFFERED"))
    CONTENTS_INVALID = ("the source sends a scale that no format allows", (OPENING,))

    def __init__(self, text: str, rows: tuple[str, ...]) -> None:
        self.text = text
        self.rows = rows

    def __repr__(self) -> str:
        return self.name


AT_THE_SOURCE: Final = (
    Fault.DIRTY_SLOTS,
    Fault.CHECKSUM_LIE,
    Fault.SHORT_MESSAGE,
    Fault.LONG_MESSAGE,
    Fault.STAGING_FAILS,
    Fault.INDEX_INVALID,
    Fault.CONTENTS_INVALID,
)
"""Armed: they strike at the next chunk that is staged and fits."""

PAIRS: Final = tuple((row, fault) for fault in Fault for row in fault.rows)


class Coverage:
    """How often each pair of row and fault was met."""

    def __init__(self) -> None:
        self.hits: Counter[tuple[str, Fault]] = Counter()

    def is_behind(self, row: str, times: float) -> bool:
        """Whether the pairs of a row were met less often, on average: what one was met above that counts for none."""
        pairs = [pair for pair in PAIRS if pair[0] == row]
        return sum(min(self.hits[pair], math.ceil(times)) for pair in pairs) < times * len(pairs)

    def least(self, row: str | None = None) -> int:
        """Of the pairs that can come about, in one row or all."""
        return min(self.hits[pair] for pair in PAIRS if row in (None, pair[0]))

    def missing(self, times: int) -> list[tuple[str, Fault]]:
        """Pairs that were met less often."""
        return [pair for pair in PAIRS if self.hits[pair] < times]

    def add(self, other: Coverage) -> None:
        """Sum up."""
        self.hits.update(other.hits)

    def table(self) -> str:
        """For people: a line per fault, a column per row."""
        short = {row: row.replace("source ", "s.").replace("target ", "t.") for row in ROWS}
        heads = [f"{number}" for number in range(len(ROWS))]
        lines = [f"  {number:>2} {row}" for number, row in enumerate(short.values())]
        lines.append(f"{'':18}" + "".join(f"{head:>7}" for head in heads))
        for fault in Fault:
            cells = (str(self.hits[row, fault]) if row in fault.rows else "-" for row in ROWS)
            lines.append(f"{fault.name.lower():18}" + "".join(f"{cell:>7}" for cell in cells))
        return "\n".join(lines)


class Injector:
    """Chooses faults for transfers as they go, those first that were met least, and throws them in."""

    def __init__(self, world: World, favoured: tuple[Fault, ...]) -> None:
        self.world = world
        self._favoured = favoured
        self.coverage = Coverage()

    def choose(self, op: Op, row: str) -> Fault | None:
        """A fault for this row, one of those that were met least there."""
        fitting = [fault for fault in Fault if row in fault.rows and self._fits(op, fault, row)]
        if not fitting:
            return None
        random = self.world.kernel.random
        favoured = [fault for fault in fitting if fault in self._favoured]
        if favoured and random.random() < 0.5:
            return random.choice(favoured)
        fewest = min(self.coverage.hits[row, fault] for fault in fitting)
        return random.choice([fault for fault in fitting if self.coverage.hits[row, fault] <= fewest + 1])

    def _fits(self, op: Op, fault: Fault, row: str) -> bool:
        if fault in (Fault.RETRY_SAME, Fault.RETRY_OTHER):
            return op.kind == "put" and op.content is not None
        small = op.kind == "put" and op.content.wire_bytes <= EAGER_BYTES
        if fault in AT_THE_SOURCE and small and row != OPENING:
            return False  # it was staged before it was offered
        if fault is Fault.DIRTY_SLOTS:
            return op.kind == "put" and bool((~op.content.shape.live).any())
        if fault is Fault.CONTENTS_INVALID:
            return op.kind == "put" and op.content.shape.quantized
        if fault is Fault.ARENA_FULL:
            return op.kind == "put"
        if fault in (Fault.BIT_FLIP, Fault.CHECKSUM_LIE):
            return op.checksum != "none"
        return True

    def throw(self, op: Op, fault: Fault, row: str, machine: Any = None) -> None:
        """Throw it in; counted for every transfer that it meets."""
        world = self.world
        op.faults.append((row, fault))
        self.coverage.hits[row, fault] += 1
        if fault in AT_THE_SOURCE:
            op.armed.append(fault)
            return
        world.note(f"{fault.name} at {op} in {row}")
        getattr(self, f"_{fault.name.lower()}")(op, machine)

    def _all(self, fault: Fault, ops: list[Op], besides: Op) -> None:
        for op in ops:
            if op is not besides and not op.over:
                op.faults.append(("", fault))
                for row in self.world.rows_of(op):
                    if row in fault.rows:
                        self.coverage.hits[row, fault] += 1

    # --- streams --------------------------------------------------------------------------------------------------

    def _stream_reset(self, op: Op, _: Any) -> None:
        for call in self.world.calls_of(op):
            call.reset()

    def _stream_slow(self, op: Op, _: Any) -> None:
        extra_s = self.world.kernel.random.choice((0.01, 0.3, 2.0))
        for call in self.world.calls_of(op):
            call.up.extra_s = call.down.extra_s = extra_s

    def _connection_cut(self, op: Op, _: Any) -> None:
        self._all(Fault.CONNECTION_CUT, self.world.ops_between(op.engine, op.host), op)
        self.world.network.cut(op.engine.process, op.host.target)

    def _partition(self, op: Op, _: Any) -> None:
        duration_s = self.world.kernel.random.choice((0.05, 1.0, 4.0, 12.0))
        self._all(Fault.PARTITION, self.world.ops_between(op.engine, op.host), op)
        self.world.network.partition(op.engine.process, op.host.target, duration_s)
        for transport in self.world.transports_between(op.engine, op.host):
            transport.stall(duration_s)

    # --- data plane -----------------------------------------------------------------------------------------------

    def _link_cut(self, op: Op, _: Any) -> None:
        self._all(Fault.LINK_CUT, self.world.ops_between(op.engine, op.host), op)
        theirs = self.world.transports_of(op.host.mover_process)
        for ours in self.world.transports_of(op.engine.process):
            for transport in theirs:
                self.world.fabric.cut(ours, transport)

    def _link_stalls(self, op: Op, _: Any) -> None:
        duration_s = self.world.kernel.random.choice((0.01, 1.0, 3.0, 8.0))
        self._all(Fault.LINK_STALLS, self.world.ops_between(op.engine, op.host), op)
        for transport in self.world.transports_between(op.engine, op.host):
            transport.stall(duration_s)

    def _late_completions(self, op: Op, _: Any) -> None:
        for transport in self.world.transports_between(op.engine, op.host):
            transport.faults.delay_completions(self.world.kernel.random.randrange(1, 6))

    def _connect_refused(self, op: Op, _: Any) -> None:
        side = self.world.kernel.random.choice((op.engine.process, op.host.mover_process))
        for transport in self.world.transports_of(side):
            transport.faults.refuse_connects()
        self._link_cut(op, _)

    def _bit_flip(self, op: Op, machine: Any) -> None:
        target = self.world.target_of(op)
        if target is None:
            op.armed.append(Fault.BIT_FLIP)  # no transfer yet: any chunk of this one, when it is sent
            return
        plane, number, chunk_count = target
        left = [chunk for chunk in range(chunk_count) if chunk not in self.world.landed(plane, number)]
        if left:
            chunk = self.world.kernel.random.choice(left)
            self.world.flip(op, plane, chunk_tag(number, chunk))

    # --- processes ------------------------------------------------------------------------------------------------

    def _client_dies(self, op: Op, _: Any) -> None:
        self._all(Fault.CLIENT_DIES, self.world.ops_of(op.engine), op)
        op.engine.kill()

    def _node_dies(self, op: Op, _: Any) -> None:
        self._all(Fault.NODE_DIES, self.world.ops_at(op.host), op)
        op.host.kill()

    def _mover_dies(self, op: Op, _: Any) -> None:
        self._all(Fault.MOVER_DIES, self.world.ops_at(op.host), op)
        process = op.host.mover_process
        if process is not None:
            self.world.kernel.kill(process)

    def _client_freezes(self, op: Op, _: Any) -> None:
        self._all(Fault.CLIENT_FREEZES, self.world.ops_of(op.engine), op)
        duration_s = self.world.kernel.random.choice((0.05, 1.0, 4.0, 12.0))
        self.world.kernel.freeze(op.engine.process, duration_s)
        if duration_s > 7.0:
            for host in self.world.hosts:
                self.world.kernel.after(7.5, self.world.network.cut, op.engine.process, host.target)

    def _mover_freezes(self, op: Op, _: Any) -> None:
        self._all(Fault.MOVER_FREEZES, self.world.ops_at(op.host), op)
        process = op.host.mover_process
        if process is not None:
            self.world.kernel.freeze(process, self.world.kernel.random.choice((0.05, 1.0, 4.0, 15.0)))

    # --- callers and nodes ----------------------------------------------------------------------------------------

    def _client_closes(self, op: Op, _: Any) -> None:
        self._all(Fault.CLIENT_CLOSES, self.world.ops_between(op.engine, op.host), op)
        op.engine.in_thread(op.engine.close_client, op.host)

    def _cancel(self, op: Op, _: Any) -> None:
        op.engine.in_thread(op.cancel)

    def _node_cancels(self, op: Op, _: Any) -> None:
        self._all(Fault.NODE_CANCELS, self.world.ops_at(op.host), op)
        node = op.host.node
        if node is not None:
            for transfer in sorted(node.transfers, key=lambda item: item.number):
                transfer.cancel(NodeDraining("the node gives it up", stage=transfer.stage))

    def _budget_ends(self, op: Op, machine: Any) -> None:
        found = self.world.transfer_of(machine)
        if found is not None:
            plane, transfer = found
            if transfer.deadline != float("inf"):
                transfer.deadline = self.world.kernel.now_s
            self.world.in_process(plane.process, plane._submit, lambda: None)  # it looks at its timers again

    def _drain(self, op: Op, _: Any) -> None:
        self._all(Fault.DRAIN, self.world.ops_at(op.host), op)
        if op.host.daemon is not None:
            op.host.daemon.ask_to_stop(self.world.kernel.random.choice((0.0, 0.01, 1.0, 8.0)))

    # --- keys -----------------------------------------------------------------------------------------------------

    def _key_deleted(self, op: Op, _: Any) -> None:
        self.world.store_call(op.host, lambda store, now_s: store.delete(op.key, 0, now_s))

    def _key_expires(self, op: Op, _: Any) -> None:
        self.world.end_lease(op.host, op.key)

    def _key_renewed(self, op: Op, _: Any) -> None:
        self.world.store_call(op.host, lambda store, now_s: store.renew(op.key, 0, lease_s=20.0, now_s=now_s))

    def _key_overwritten(self, op: Op, _: Any) -> None:
        self.world.put_beside(op, op.host)

    def _wall_clock_jumps(self, op: Op, _: Any) -> None:
        self.world.kernel.wall_offset_s += self.world.kernel.random.uniform(-3, 3) * 86400

    def _retry_same(self, op: Op, _: Any) -> None:
        self.world.repeat(op, same=True)

    def _retry_other(self, op: Op, _: Any) -> None:
        self.world.repeat(op, same=False)

    def _arena_full(self, op: Op, _: Any) -> None:
        op.armed.append(Fault.ARENA_FULL)

    # --- hostile messages -----------------------------------------------------------------------------------------

    def _rogue_to_node(self, op: Op, _: Any) -> None:
        for call in self.world.calls_of(op):
            forged = self.world.kernel.random.choice(_rogue_requests(op.kind, call))
            op.forged.append(forged)
            call.forged.append(forged)
            call.up.send(call._reach, "message", forged)

    def _rogue_to_client(self, op: Op, _: Any) -> None:
        random = self.world.kernel.random
        for call in self.world.calls_of(op):
            forged = random.choice(_rogue_answers(op.kind, random))
            op.forged.append(forged)
            call.forged.append(forged)
            call.down.send(call._deliver, forged)


def _rogue_requests(kind: str, call: Any) -> list[bytes]:
    stop = pb.Stop(error=to_status(InvalidContents(FORGED_REASON)), sent_chunk_count=1 << 60)
    if kind == "put":
        messages = [
            pb.SourceMessage(checksums=pb.ChunkChecksums(first_chunk=7, values=[1, 2])),
            pb.SourceMessage(checksums=pb.ChunkChecksums(first_chunk=0, values=[1] * 40)),
            pb.SourceMessage(stop=stop),
            pb.SourceMessage(stop=pb.Stop(error=to_status(InvalidContents(FORGED_REASON)))),
            pb.SourceMessage(),
        ]
        again = call.told[:1]
        return [pb.PutRequest(source=message).SerializeToString() for message in messages] + [
            b"\xff\xff",
            *(message.SerializeToString() for message in again),
        ]
    targets = [
        pb.TargetMessage(receipt=pb.Receipt(key=FORGED_RECEIPT)),
        pb.TargetMessage(accept=pb.Accept(transfer=1 << 39, transport="tcp", window=4)),
        pb.TargetMessage(accept=pb.Accept(transfer=1 << 50, transport="tcp", window=4)),
        pb.TargetMessage(accept=pb.Accept(transfer=1, transport="none", window=4)),
        pb.TargetMessage(stop=stop),
        pb.TargetMessage(),
    ]
    return [pb.GetRequest(target=message).SerializeToString() for message in targets] + [
        b"\xff\xff",
        pb.GetRequest(open=pb.GetOpen(key="again")).SerializeToString(),
    ]


def _rogue_answers(kind: str, random: Any) -> list[bytes]:
    stop = pb.Stop(error=to_status(InvalidContents(FORGED_REASON)), sent_chunk_count=random.choice((0, 1, 1 << 60)))
    if kind == "put":
        targets = [
            pb.TargetMessage(receipt=pb.Receipt(key=FORGED_RECEIPT)),
            pb.TargetMessage(accept=pb.Accept(transfer=(1 << 39) + 1, transport="tcp", window=0)),
            pb.TargetMessage(accept=pb.Accept(transfer=(1 << 39) + 2, transport="tcp", window=3)),
            pb.TargetMessage(accept=pb.Accept(transfer=1, transport="none", window=4)),
            pb.TargetMessage(stop=stop),
            pb.TargetMessage(),
        ]
        outcomes = [pb.PutResponse(outcome=pb.Outcome()), pb.PutResponse(outcome=pb.Outcome(error=stop.error))]
        return [
            item.SerializeToString() for item in (*(pb.PutResponse(target=message) for message in targets), *outcomes)
        ]
    sources = [
        pb.SourceMessage(offer=pb.Offer(key="again")),
        pb.SourceMessage(checksums=pb.ChunkChecksums(first_chunk=7, values=[1, 2])),
        pb.SourceMessage(checksums=pb.ChunkChecksums(first_chunk=0, values=[1] * 40)),
        pb.SourceMessage(stop=stop),
        pb.SourceMessage(),
    ]
    outcomes = [pb.GetResponse(outcome=pb.Outcome()), pb.GetResponse(outcome=pb.Outcome(error=stop.error))]
    return [item.SerializeToString() for item in (*(pb.GetResponse(source=message) for message in sources), *outcomes)]


def spoil(op: Op, plan: Any, chunk: Chunk, staged: Any, world: Payloads) -> Any:
    """What a faulty source makes of a chunk that it has staged: the bytes to send."""
    for fault in dict.fromkeys(op.armed):
        match fault:
            case Fault.STAGING_FAILS:
                op.armed.remove(fault)
                op.struck.append(fault)
                world.lie = False
                current = world.kernel.current
                if current is not None and current.name == "hurray-dataplane" and world.kernel.random.random() < 0.5:
                    raise OSError("bad memory")
                raise InvalidContents("no value", rule="V14")
            case Fault.CHECKSUM_LIE:
                op.armed.remove(fault)
                op.struck.append(fault)
                world.lie = True
            case Fault.BIT_FLIP if world.target_of(op) is not None:
                plane, number, _ = world.target_of(op)  # type: ignore[misc]
                op.armed.remove(fault)
                world.flip(op, plane, chunk_tag(number, chunk.index))
            case Fault.SHORT_MESSAGE if staged.nbytes > 1:
                op.armed.remove(fault)
                op.struck.append(fault)
                staged = np.array(staged[: world.kernel.random.randrange(1, staged.nbytes)])
            case Fault.LONG_MESSAGE:
                op.armed.remove(fault)
                op.struck.append(fault)
                staged = np.concatenate([staged, np.full(world.kernel.random.randrange(1, 64), 7, np.uint8)])
            case Fault.DIRTY_SLOTS if chunk.segments[0].tensor != INDEX:
                staged = np.array(staged)
                op.soiled[-1] += op.content.soil(plan, chunk, staged)
            case Fault.INDEX_INVALID if chunk.segments[0].tensor == INDEX and chunk.segments[0].buffer == 1:
                op.armed.remove(fault)
                op.struck.append(fault)
                staged = np.array(staged)
                staged[:4] = 0xFF
            case Fault.CONTENTS_INVALID:
                segment = next((item for item in chunk.segments if item.buffer == 3), None)
                if segment is not None and segment.buffer_offset == 0:
                    op.armed.remove(fault)
                    op.struck.append(fault)
                    staged = np.array(staged)
                    staged[segment.chunk_offset : segment.chunk_offset + 4] = 0
    return staged
