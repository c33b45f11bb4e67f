"""One run: two nodes, three client processes, everything between them, and everything that must hold.

Time passes in epochs. In each a number of transfers is made in a storm of faults; then the faults end, everything has
to come to rest by itself, the books are audited, and transfers that nobody disturbs have to succeed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hurray_server.arena import TransferMemory
from hurray_server.config import ArenaConfig, Config, LeaseConfig, LimitsConfig, TransferConfig
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
from hurray_wire.image import ImagePlan
from hurray_wire.payload import ImageSource, SnapshotSource
from hurray_wire.transport.base import TAG_CHUNK_BITS
from hurray_wire.transport.memory import MemoryFabric, _Message, _Operation
from simulation.content import SHAPES, Content, Landing
from simulation.engines import Engine, Op
from simulation.faults import OPENING, Coverage, Fault, Injector, row_of, spoil
from simulation.kernel import Kernel, Process, Thread, Waiters
from simulation.network import Network
from simulation.nodes import NodeHost, SimulatedMoverLink
from simulation.oracle import CheckedStore, Held, audit_arena, check_read, check_write
from simulation.patches import Patches
from simulation.transport import SimulatedTransport

EPOCH = 60
"""Transfers in one storm."""

STORM_LIMIT_S = 300.0
REST_S = 14.0
"""How long everything may take to come to rest: no call runs any more, so only drains and supervision are left."""

KEYS = tuple(f"k/{number}" for number in range(10))

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

CHANCE = {
    OPENING: 0.12,
    "source CANCELLING": 0.6,
    "source SETTLING": 0.5,
    "source DELIVERED": 0.15,
    "target SETTLING": 0.5,
}
CHANCE_ELSE = 0.12
CALM_SHARE = 0.2
"""Transfers of a storm that nothing is aimed at."""


@dataclass(frozen=True)
class Violation(Exception):
    """Something that must not be."""

    text: str

    def __str__(self) -> str:
        return self.text


class World:
    """See the module. `transfers`: how many puts and gets are made in storms."""

    def __init__(self, seed: int, transfers: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.transfers = transfers
        self.kernel = Kernel(f"seed {seed}")
        self.random = self.kernel.random
        self.network = Network(self.kernel)
        self.network.watchers.append(self._watch_stream)
        self.fabric = MemoryFabric()
        self.injector = Injector(self)
        self.parked = Waiters(self.kernel)
        self.violation: str | None = None
        self.calm = True
        self.lie = False
        self.begun = 0
        self.outcomes: Counter[str] = Counter()
        self.retries = 0
        self.digest = 0
        self.chunk_bytes = self.random.choice((4096, 8192))
        self._eager_max_bytes = self.random.choice((0, 1000, 4096, 8191))
        self._trace = trace
        self._quota = 0
        self._op_count = 0
        self._transports: list[SimulatedTransport] = []
        self._movers: dict[Process, Any] = {}
        self._planes: list[Any] = []
        self._ops: dict[str, list[Op]] = {}
        self._running: dict[Op, None] = {}
        self._client_transfers: dict[tuple[int, int], Op] = {}
        self._node_transfers: dict[tuple[SimulatedMoverLink, int], Op] = {}
        self._commits: dict[str, list[tuple[Any, Held, Process]]] = {}
        self._handles: set[tuple[str, str, int]] = set()
        self._flips: dict[tuple[SimulatedTransport, int], Op] = {}
        self._landed: dict[tuple[Process, int], set[int]] = {}
        self._said: dict[Any, list[str]] = {}
        self.hosts = [NodeHost(self, f"127.0.0.1:{port}", self._config(port)) for port in (7411, 7412)]
        self.engines = [Engine(self, f"engine-{number}", 3) for number in range(3)]

    @staticmethod
    def _config(port: int) -> Config:
        return Config(
            listen=f"127.0.0.1:{port}",
            node=f"node-{port}",
            drain_s=1.0,
            arena=ArenaConfig(bytes=1 << 20, prefault=False),  # type: ignore[arg-type]
            leases=LeaseConfig(default_s=5.0, max_s=60.0),
            limits=LimitsConfig(max_snapshots=12, max_transfers=24, max_sessions=16),
            transfers=TransferConfig(window=3, chunk_bytes=8192, max_budget_s=60.0),
        )

    @property
    def coverage(self) -> Coverage:
        """How often each pair of row and fault was met."""
        return self.injector.coverage

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run it to its end. Raises Violation."""
        loop = self.kernel.loop
        loop.set_exception_handler(self._on_loop_error)
        with Patches(self):
            try:
                loop.run_until_complete(self._main())
            except Violation as violation:
                self.violation = self.violation or violation.text
            except AssertionError as error:
                self.violation = self.violation or f"{type(error).__name__}: {error}"
            finally:
                self._bury_all()
        if self.violation is not None:
            raise Violation(self.violation)

    def _on_loop_error(self, _loop: Any, context: dict[str, Any]) -> None:
        self.fail(f"in the event loop: {context.get('message')}: {context.get('exception')!r}")

    async def _main(self) -> None:
        for host in self.hosts:
            host.start()
        await self._until(lambda: all(self._is_up(host) for host in self.hosts), 10.0, "the nodes do not come up")
        for engine in self.engines:
            engine.start()
        while self.begun < self.transfers:
            self._begin_storm()
            await self._until(lambda: not self._running and self.begun >= self._quota, STORM_LIMIT_S, "calls hang")
            await self._rest()
            await self._calm()
            self._forget()

    async def _until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        until_s = self.kernel.now_s + timeout_s
        while not done():
            self.check()
            if self.kernel.now_s > until_s:
                running = ", ".join(map(str, self._running))
                raise Violation(f"{what}: {running}")
            await asyncio.sleep(0.02)
        self.check()

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

    def storm(self) -> None:
        """A fault was thrown in."""

    def _is_up(self, host: NodeHost) -> bool:
        return host.node is not None and host.node.link.up and host.target in self.network.servers

    # --- epochs ---------------------------------------------------------------------------------------------------

    def _begin_storm(self) -> None:
        self.calm = False
        self._quota = min(self.transfers, self._quota + EPOCH)
        self.parked.wake()

    async def _rest(self) -> None:
        """No more faults: everything comes to rest by itself."""
        self.calm = True
        for transport in self._transports:
            transport.flow()
            transport.faults.delay_completions(0)
            transport.faults.refuse_connects(0)
        for process in [engine.process for engine in self.engines] + [host.mover_process for host in self.hosts]:
            if process is not None:
                self.kernel.thaw(process)
        for pair in list(self.network.partitions):
            for call in self.network.between(*pair):
                call.up.release()
                call.down.release()
        await asyncio.sleep(REST_S)
        await self._until(lambda: all(self._is_up(host) for host in self.hosts), 30.0, "a node does not come back")
        await asyncio.sleep(1.0)
        for host in self.hosts:
            self._check_rest(host)
        for engine in self.engines:
            left = [thread.name for thread in engine.process.threads if thread.name.startswith("hurray-stream")]
            if left:
                self.fail(f"threads are left in {engine.name}: {left}")
        for plane in self._planes:
            if plane.running and plane.transfer_count:
                self.fail(f"a data plane still has {plane.transfer_count} transfers, and no call runs")
        self.check()

    def _check_rest(self, host: NodeHost) -> None:
        node, mover = host.node, self._movers[host.mover_process]
        store, link = node.store, node.link
        for what, left in (
            ("transfers", node.transfers),
            ("running requests", node.requests._running),
            ("claims", store._claims),
            ("readers", store._readers),
            ("consumers", store._consumers),
            ("waiters", store._waiters),
            ("waits for a drain", node._drain_listeners),
            ("transfers of the link", link._transfers),
            ("opens under way", link._opening),
            ("closes under way", link._closing),
            ("transfers of the mover", mover._running),
        ):
            if left:
                self.fail(f"{host.target} at rest still has {what}: {left}")
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
        sessions = {session.incarnation for session in node.sessions._sessions.values() if session.is_open}
        if sessions != set(mover._plane._peers):
            self.fail(f"{host.target} at rest has sessions {sessions}, its mover peers {set(mover._plane._peers)}")

    async def _calm(self) -> None:
        """What nobody disturbs succeeds: from every engine to every node, there and back."""
        done: list[bool] = []
        for engine in self.engines:
            for host in self.hosts:
                engine.in_thread(self._there_and_back, engine, host, done)
        await self._until(lambda: len(done) == len(self.engines) * len(self.hosts), 40.0, "calm calls hang")

    def _there_and_back(self, engine: Engine, host: NodeHost, done: list[bool]) -> None:
        key = f"calm/{engine.name}"
        put = self._op(engine, host, "put", key)
        put.budget_s, put.overwrite, put.lease_s, put.checksum = 10.0, True, 3.0, "xxh3_64"
        put.content = self._content(self.random.choice(SHAPES[:-1]))
        engine.run(put)
        if put.error is None:
            get = self._op(engine, host, "get", key)
            get.budget_s = 10.0
            engine.run(get)
            if get.error is not None:
                self.fail(f"undisturbed: {get}: {get.error!r}")
        elif not isinstance(put.error, ArenaFull):
            self.fail(f"undisturbed: {put}: {put.error!r}")
        done.append(True)

    def _forget(self) -> None:
        """What no later epoch asks for."""
        self._ops.clear()
        self._client_transfers.clear()
        self._node_transfers.clear()
        self._commits.clear()
        self._flips.clear()
        self._landed.clear()
        self._said.clear()
        self._transports = [item for item in self._transports if not item._crashed and not item._closed]
        self._planes = [plane for plane in self._planes if plane.running]
        alive = {host.mover_process for host in self.hosts}
        self._movers = {process: mover for process, mover in self._movers.items() if process in alive}
        for host in self.hosts:
            model = host.node.store.model
            now_s = self.kernel.now_s
            gone = [item for item in model.all.values() if item.gone is not None and now_s - item.gone_s > 3700]
            for item in gone:
                del model.all[item.key, item.generation]
                model.by_memory.pop(item.memory, None)

    def _bury_all(self) -> None:
        """Leave nothing behind: no thread, no task, no descriptor."""
        processes = [engine.process for engine in self.engines]
        for engine in self.engines:
            engine.process.on_death.clear()
        for host in self.hosts:
            processes += [host.process, *([host.mover_process] if host.mover_process is not None else [])]
        processes += list(self._movers)
        for process in processes:
            process.on_death.clear()
            self.kernel.kill(process)
        loop = self.kernel.loop
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.set_exception_handler(lambda *_: None)
        self.hosts_stop()
        loop.call_soon(loop.stop)
        loop.run_forever()
        for _ in range(20):
            pending = asyncio.all_tasks(loop)
            if not pending:
                break
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.wait(pending, timeout=10.0))
        loop.close()

    def hosts_stop(self) -> None:
        """No daemon is started any more."""
        for host in self.hosts:
            host.start = lambda: None  # type: ignore[method-assign]

    # --- what is asked --------------------------------------------------------------------------------------------

    def _op(self, engine: Engine, host: NodeHost, kind: str, key: str) -> Op:
        self._op_count += 1
        op = Op(self._op_count, kind, engine, host, key, self._budget_s())
        if kind == "put":
            op.request_id = str(self.kernel.uuid4())
            self._ops.setdefault(op.request_id, []).append(op)
        return op

    def _budget_s(self) -> float:
        random = self.random
        return random.choice((3.0, 8.0, 20.0)) if random.random() < 0.9 else random.choice((0.001, 0.01, 0.2))

    def _content(self, shape: Any) -> Content:
        return Content(shape, self.random.getrandbits(40), 4096)

    def next_op(self, engine: Engine) -> Op | None:
        """What a worker does next; None: nothing now."""
        if self.calm or self.begun >= self._quota:
            return None
        random = self.random
        host, key = random.choice(self.hosts), random.choice(KEYS)
        kind = random.choices(("put", "get", "delete", "renew", "stat", "list"), (50, 34, 4, 5, 4, 3))[0]
        op = self._op(engine, host, kind, key)
        if kind in ("put", "get"):
            self.begun += 1
        if kind == "put":
            self._fill_put(op)
        elif kind == "get":
            op.wait_s = random.choice((0.0, 0.0, 0.5, 2.0))
            op.consume = random.random() < 0.2
            self._fill_get(op)
        elif kind in ("delete", "renew", "stat"):
            op.generation = random.choice((0, 0, self._some_generation(op)))
        return op

    def _fill_put(self, op: Op) -> None:
        random = self.random
        op.content = self._content(random.choices(SHAPES, (3, 3, 3, 2, 3, 1))[0])
        op.overwrite = random.random() < 0.5
        op.lease_s = random.choice((0.05, 1.0, 6.0, 30.0))
        op.checksum = "none" if random.random() < 0.08 else "xxh3_64"

    def _fill_get(self, op: Op) -> None:
        """Sometimes a certain generation; sometimes into caches of the caller, which fit what is there now."""
        random = self.random
        op.generation = random.choice((0, 0, 0, self._some_generation(op)))
        held = self._held_now(op)
        if held is not None and random.random() < 0.35 and not held.content.shape.quantized:
            shape = held.content.shape
            order = random.sample(range(len(shape.pages) + 3), len(shape.pages))
            op.landing = Landing(shape, order)

    def _some_generation(self, op: Op) -> int:
        node = op.host.node
        if node is None:
            return 0
        known = sorted(generation for key, generation in node.store.model.all if key == op.key)
        return self.random.choice([*known[-3:], 1 << 40])

    def _held_now(self, op: Op) -> Held | None:
        return None if op.host.node is None else op.host.node.store.model.current.get(op.key)

    def begin(self, op: Op) -> None:
        """A call begins."""
        self._running[op] = None
        self.note(f"begin {op}")
        if not self.calm and self.random.random() > CALM_SHARE:
            if op.kind in ("put", "get"):
                self._maybe_throw(op, OPENING, None)
        else:
            op.armed.clear()

    def repeat(self, op: Op, *, same: bool) -> None:
        """The request of a put comes again, from any engine, while it runs or soon after."""
        engine = self.random.choice(self.engines)
        again = self._op(engine, op.host, "put", op.key)
        self._ops.pop(again.request_id)
        again.request_id = op.request_id
        again.overwrite, again.lease_s, again.checksum = op.overwrite, op.lease_s, op.checksum
        assert op.content is not None
        shape = op.content.shape
        if same:
            again.content = Content(shape, op.content.number, 4096)
        else:
            again.content = self._content(shape)
            again.lease_s = op.lease_s + 1.0
        self._ops[op.request_id].append(again)
        self.retries += 1
        self.kernel.after(self.random.choice((0.0, 0.01, 1.0)), engine.in_thread, engine.run, again)

    def put_beside(self, op: Op, host: NodeHost) -> None:
        """Another put to the same key."""
        other = self._op(self.random.choice(self.engines), host, "put", op.key)
        self._fill_put(other)
        other.overwrite = True
        other.engine.in_thread(other.engine.run, other)

    def store_call(self, host: NodeHost, call: Callable[[Any, float], object]) -> None:
        """Somebody asks the store for something, as the handlers do: in one step."""
        if host.node is not None:
            try:
                call(host.node.store, self.kernel.now_s)
            except HurrayError:
                return

    def end_lease(self, host: NodeHost, key: str) -> None:
        """The lease of a key ends now."""
        node = host.node
        held = None if node is None else node.store.model.current.get(key)
        if held is None:
            return
        from dataclasses import replace

        snapshot = node.store._snapshots.get(key)
        if snapshot is not None:
            held.expires_s = self.kernel.now_s
            node.store._snapshots[key] = replace(snapshot, expires_s=self.kernel.now_s)
            node.store._add_lease(node.store._snapshots[key])
            node.leases_changed()

    # --- what machines do -----------------------------------------------------------------------------------------

    def watched(self, base: type[Any]) -> type[Any]:
        """A machine that tells the world of its phases."""
        world = self
        initial = s.SourcePhase.OFFERED if base is s.SourceSession else None

        class Watched(base):  # type: ignore[misc]
            sim_op: Op | None = None

            def __post_init__(self) -> None:
                super().__post_init__()
                if initial is not None:
                    world.kernel.after(0.0, world.entered_first, self)

            def start(self) -> Any:
                actions = super().start()
                world.entered(self)
                return actions

            def handle(self, event: s.Event) -> Any:
                before = self.phase
                actions = super().handle(event)
                if type(event) is s.Committed and self.sim_op is not None:
                    world.note_machine_commit(self)
                if self.phase is not before:
                    world.entered(self)
                return actions

        Watched.__name__ = base.__name__
        return Watched

    def transfer_of(self, machine: Any) -> tuple[Any, Any] | None:
        """The data plane and its transfer that a machine belongs to."""
        for plane in self._planes:
            for transfer in plane._transfers.values():
                if transfer.machine is machine:
                    return plane, transfer
        return None

    def _identify(self, machine: Any) -> Op | None:
        if machine.sim_op is None:
            found = self.transfer_of(machine)
            if found is None:
                return None
            plane, transfer = found
            op = self._client_transfers.get((plane.incarnation, transfer.number))
            if op is None:
                op = self._node_transfers.get((plane.process.link, transfer.number))
            if op is not None:
                machine.sim_op = op
                op.machines.append(machine)
        found_op: Op | None = machine.sim_op
        return found_op

    def entered_first(self, machine: Any) -> None:
        """A source has been made."""
        if machine.phase is s.SourcePhase.OFFERED:
            self.entered(machine)

    def entered(self, machine: Any) -> None:
        """A machine has entered a phase: before it acts on it, something may go wrong."""
        op = self._identify(machine)
        if op is None or machine.phase.name == "ENDED":
            return
        self.note(f"{row_of(machine.phase)} {op}")
        if self.calm or (op.number % 10) < CALM_SHARE * 10:
            return
        self._maybe_throw(op, row_of(machine.phase), machine)

    def _maybe_throw(self, op: Op, row: str, machine: Any) -> None:
        if self.random.random() > CHANCE.get(row, CHANCE_ELSE):
            return
        fault = self.injector.choose(op, row)
        if fault is None:
            return
        delay_s = 0.0 if self.random.random() < 0.6 else self.kernel.moment() * 5

        def throw() -> None:
            now_row = row if machine is None else row_of(machine.phase) if machine.phase.name != "ENDED" else None
            if now_row in fault.rows and not self.calm and (machine is not None or not op.machines) and not op.over:
                self.injector.throw(op, fault, now_row, machine)

        self.kernel.after(delay_s, throw)
        if delay_s == 0.0 and self.kernel.current is not None:
            # The thread is interrupted between the decision and the deed.
            self.kernel.block(2e-6)

    def rows_of(self, op: Op) -> list[str]:
        """Where a call is now."""
        rows = [row_of(machine.phase) for machine in op.machines if machine.phase.name != "ENDED"]
        return rows or ([] if op.machines else [OPENING])

    def note_machine_commit(self, machine: Any) -> None:
        """A target's machine has committed."""
        op = machine.sim_op
        if op.kind == "get" and self._is_client_machine(machine, op):
            op.received = True

    @staticmethod
    def _is_client_machine(machine: Any, op: Op) -> bool:
        return isinstance(machine, s.TargetSession) == (op.kind == "get")

    # --- who belongs to whom --------------------------------------------------------------------------------------

    def make_transport(self) -> SimulatedTransport:
        """A transport of the process whose code runs."""
        transport = SimulatedTransport(self.kernel, self.fabric, self._on_land, self._eager_max_bytes)
        self._transports.append(transport)
        return transport

    def transports_of(self, process: Process | None) -> list[SimulatedTransport]:
        """Those of a process that are open."""
        return [item for item in self._transports if item.process is process and not item._closed]

    def transports_between(self, engine: Engine, host: NodeHost) -> list[SimulatedTransport]:
        """Those of both sides."""
        return self.transports_of(engine.process) + self.transports_of(host.mover_process)

    def in_process(self, process: Process, work: Callable[..., object], *args: Any) -> None:
        """Have a thread of its own in that process do something."""
        with self.kernel.within(process):
            Thread(self.kernel, work, "aside", args).start()

    def add_mover(self, mover: Any) -> None:
        """A mover starts."""
        self._movers[self.kernel.process] = mover

    def add_plane(self, plane: Any) -> None:
        """A data plane is made."""
        plane.process = self.kernel.process
        self._planes.append(plane)

    def add_node(self, node: Any, host: NodeHost) -> None:
        """A daemon is made."""
        node.store.node = node
        node.host = host

    def store(self, free: Callable[[int], None], **options: Any) -> CheckedStore:
        """Stands for Store."""
        return CheckedStore(self, free, **options)

    def tasks_of(self, process: Process) -> list[Any]:
        """Handlers that run in a daemon."""
        return [
            context.task
            for server in self.network.all_servers
            if server.process is process
            for context in server.contexts
        ]

    def note_client_transfer(self, plane: Any, number: int) -> None:
        """The SDK has a number for a transfer."""
        thread = self.kernel.current
        if thread is not None and thread.op is not None:
            self._client_transfers[plane.incarnation, number] = thread.op

    def note_node_transfer(self, link: SimulatedMoverLink, number: int) -> None:
        """A daemon has a number for a transfer, whose handler is the current task."""
        task = asyncio.current_task()
        for server in self.network.all_servers:
            for context in server.contexts:
                if context.task is task and context._call.op is not None:
                    self._node_transfers[link, number] = context._call.op

    def note_request(self, op: Op) -> None:
        """The SDK has drawn a request id."""
        self._ops.setdefault(op.request_id, []).append(op)

    def note_condemned(self, link: SimulatedMoverLink, why: str) -> None:
        """A daemon kills its mover: right only where the mover was stopped."""
        process = None if link.mover_process is None else link.mover_process.process
        if process is not None and not process.frozen and process.frozen_s == 0.0:
            self.fail(f"a mover that nobody stopped was condemned: {why}")

    def note_node_death(self, node: Any) -> None:
        """A daemon is gone, and all that it held."""
        node.dead = True

    def note_log(self, event: str, fields: Any) -> None:
        """A program logs an error."""
        self.note(f"log: {event}")
        if event.startswith("internal error") or "fails" in event:
            error = fields.get("exc_info")
            error = error[1] if isinstance(error, tuple) else error
            if error is True:
                import sys

                error = sys.exc_info()[1]
            if not (isinstance(error, OSError) and "bad memory" in str(error)):
                self.fail(f"a program logs {event!r}: {error!r}")

    def bury(self, engine: Engine) -> None:
        """An engine's process died, and its calls with it."""
        for op in list(self._running):
            if op.engine is engine:
                op.over = op.died = True
                del self._running[op]
                self.outcomes[f"{op.kind}: the process died"] += 1

    def calls_of(self, op: Op) -> list[Any]:
        """The streams of a transfer that are open."""
        return [call for call in self.network.calls if call.op is op and call.method in ("Put", "Get")]

    def ops_of(self, engine: Engine) -> list[Op]:
        """Calls that run in an engine."""
        return [op for op in self._running if op.engine is engine]

    def ops_at(self, host: NodeHost) -> list[Op]:
        """Calls that run to a node."""
        return [op for op in self._running if op.host is host]

    def ops_between(self, engine: Engine, host: NodeHost) -> list[Op]:
        """Calls that run from one to the other."""
        return [op for op in self._running if op.host is host and op.engine is engine]

    # --- bytes ----------------------------------------------------------------------------------------------------

    def snapshot_source(self, prepared: Any, plan: ImagePlan) -> SnapshotSource:
        """Stands for SnapshotSource: one that a fault may spoil."""
        world, op = self, self.kernel.current.op if self.kernel.current is not None else None

        class Spoiled(SnapshotSource):
            def stage(self, chunk: Any, take_staging: Any) -> Any:
                staged = super().stage(chunk, take_staging)
                return staged if op is None else spoil(op, plan, chunk, staged, world)

        if op is not None:
            op.soiled.append(0)
        return Spoiled(prepared, plan)

    def image_source(self, plan: ImagePlan, image: Any, on_release: Callable[[], None]) -> ImageSource:
        """Stands for ImageSource: one that a fault may spoil."""
        world = self

        class Spoiled(ImageSource):
            def stage(self, chunk: Any, take_staging: Any) -> Any:
                staged = super().stage(chunk, take_staging)
                op = world.op_of_payload(self)
                return staged if op is None else spoil(op, plan, chunk, staged, world)

        return Spoiled(plan, image, on_release)

    def op_of_payload(self, payload: Any) -> Op | None:
        """Whose transfer a payload is."""
        for plane in self._planes:
            for transfer in plane._transfers.values():
                if transfer.order.payload is payload:
                    return self._identify(transfer.machine)
        return None

    def transfer_memory(self, arena: Any, number: int) -> TransferMemory:
        """Stands for TransferMemory: one that may find the arena full."""
        world = self
        link = self.kernel.process.link  # type: ignore[attr-defined]

        class Memory(TransferMemory):
            def reserve(self, nbytes: int) -> Any:
                op = world._node_transfers.get((link, number))
                if op is not None and Fault.ARENA_FULL in op.armed:
                    op.armed.remove(Fault.ARENA_FULL)
                    raise arena._full(nbytes)
                return super().reserve(nbytes)

        return Memory(arena, number)

    def take_lie(self) -> int:
        """What is wrong with the checksum that is computed now."""
        lie, self.lie = self.lie, False
        return int(lie)

    def target_of(self, op: Op) -> tuple[Any, int, int] | None:
        """Data plane, transfer number and chunk count of the target of a transfer that runs."""
        for machine in reversed(op.machines):
            if isinstance(machine, s.TargetSession):
                found = self.transfer_of(machine)
                if found is not None:
                    return found[0], found[1].number, machine.chunk_count
        return None

    def landed(self, plane: Any, number: int) -> set[int]:
        """Chunks that have arrived."""
        return self._landed.get((plane.process, number), set())

    def flip(self, op: Op, plane: Any, tag: int) -> None:
        """Flip a bit of this chunk when it arrives."""
        for transport in self.transports_of(plane.process):
            transport.faults.corrupt(
                tag=tag, offset_bytes=self.random.randrange(4096), mask=1 << self.random.randrange(8)
            )
            self._flips[transport, tag] = op

    def _on_land(self, transport: SimulatedTransport, message: _Message, receive: _Operation) -> None:
        if message.corruption is not None:
            op = self._flips.get((transport, message.tag))
            if op is not None and not receive.may_be_cut:
                op.struck.append(Fault.BIT_FLIP)
        number, chunk = message.tag >> TAG_CHUNK_BITS, message.tag & ((1 << TAG_CHUNK_BITS) - 1)
        self._landed.setdefault((transport.process, number), set()).add(chunk)
        wrong = None
        mover = self._movers.get(transport.process)
        if mover is not None and not receive.may_be_cut:
            wrong = check_write(mover._arena, message.tag, receive.buffer)
        source = self._movers.get(message.send.endpoint._transport.process)  # type: ignore[attr-defined]
        if source is not None and message.payload is None:
            wrong = wrong or check_read(source._arena, message.send.buffer)
        if wrong is not None:
            self.fail(wrong)

    # --- judging --------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """The books of every arena."""
        for process, mover in self._movers.items():
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

    def check_commit(self, node: Any, key: str, contents: Any) -> Content | None:
        """At the commit: the snapshot is complete, and byte for byte what was put. Returns which put it was."""
        op = self._node_transfers.get((node.link, contents.memory))
        if op is None or op.kind != "put" or op.key != key or op.content is None:
            self.fail(f"a commit to {key} that nobody asked for")
            return None
        mover = self._movers.get(node.link.mover_process.process)
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
        request_id = self._node_transfers[node.link, held.memory].request_id
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

    def check_consume(self, node: Any, held: Held) -> None:
        """A node deletes what a reader has consumed: the reader must have it."""
        ops = [op for ops in self._ops.values() for op in ops if op.consume and op.key == held.key]
        if not any(op.received or "node" in op.tampered for op in ops):
            self.fail(f"{held.key} was consumed, but nobody received it")

    def _watch_stream(self, call: Any, message: Any) -> None:
        """What a node says on the stream of a transfer: one Accept, then one Receipt or Stop, then nothing."""
        if call.method not in ("Put", "Get"):
            return
        part = message.target if call.method == "Put" else message.source
        kind = part.WhichOneof("message")
        said = self._said.setdefault(call, [])
        if kind in ("accept", "offer", "receipt", "stop") and kind in said:
            self.fail(f"the node says {kind} twice to {call.op}")
        if "receipt" in said or ("stop" in said and kind != "stop"):
            self.fail(f"the node says {kind} after {said} to {call.op}")
        said.append(kind)

    def judge(self, op: Op) -> None:
        """A call has returned."""
        self._running.pop(op, None)
        self.audit()
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
            if "client" in op.tampered and not mine:
                return
            if not mine:
                self.fail(f"{op} returned generation {op.result.generation}, which was never committed")
                return
            if mine[0].content is not None and op.content is not None and mine[0].content.number != op.content.number:
                self.fail(f"{op} got the receipt of another content")
            alone = len(self._ops[op.request_id]) == 1
            if alone and op.result.dirty_dead_slot_count not in op.soiled:
                self.fail(f"{op} sent {op.soiled} dirty dead slots, its receipt says {op.result.dirty_dead_slot_count}")
        elif not isinstance(op.error, OutcomeUnknown) and len(self._ops[op.request_id]) == 1:
            # What a mover held went with it: nothing is left of such a commit.
            kept = [held for node, held, mover in commits if mover.alive and node.link.process.alive]
            if kept and "client" not in op.tampered:
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
            if "client" not in op.tampered:
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
        # A repetition waits for the outcome of what runs, or runs on with it: what met one has met them all.
        alike = [op, *self._ops.get(op.request_id, [])]
        met = {fault for other in alike for _, fault in other.faults} | {
            item for other in alike for item in other.struck
        }
        explained = {
            ChecksumMismatch: met & {Fault.BIT_FLIP, Fault.CHECKSUM_LIE, Fault.ROGUE_TO_NODE, Fault.ROGUE_TO_CLIENT},
            InvalidContents: met
            & {
                Fault.INDEX_INVALID,
                Fault.CONTENTS_INVALID,
                Fault.STAGING_FAILS,
                Fault.ROGUE_TO_NODE,
                Fault.ROGUE_TO_CLIENT,
                Fault.BIT_FLIP,
            },
            ProtocolViolation: met
            & {Fault.SHORT_MESSAGE, Fault.LONG_MESSAGE, Fault.ROGUE_TO_NODE, Fault.ROGUE_TO_CLIENT},
            InternalError: met & {Fault.STAGING_FAILS},
            RequestIdReused: met & {Fault.RETRY_OTHER},
            KeyNotFound: met & {Fault.ROGUE_TO_CLIENT},
        }
        if kind is RemoteError or not explained.get(kind):
            self.fail(f"{op} failed with {error!r}, which nothing explains: {op.faults}")
