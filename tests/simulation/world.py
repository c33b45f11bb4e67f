"""One run: two nodes, three client processes, everything between them, and everything that must hold.

Time passes in epochs. In each a number of transfers is made in a storm of faults; then the faults end, everything has
to come to rest by itself, the books are audited, and transfers that nobody disturbs have to succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hurray_server.config import ArenaConfig, Config, LeaseConfig, LimitsConfig, MetricsConfig, TransferConfig
from hurray_wire import session as s
from hurray_wire.errors import ArenaFull
from simulation.content import SHAPES
from simulation.engines import Engine, Op
from simulation.faults import OPENING, Coverage, Fault, Injector, row_of
from simulation.judge import Violation
from simulation.kernel import Waiters
from simulation.nodes import NodeHost
from simulation.oracle import CheckedStore
from simulation.patches import Patches
from simulation.workload import Workload

EPOCH = 60
"""Transfers in one storm."""

STORM_LIMIT_S = 300.0
REST_S = 14.0
"""How long everything may take to come to rest: no call runs any more, so only drains and supervision are left."""

HITS_PER_TRANSFER = 27 / 9000
"""Of each pair: what is aimed at."""

CHANCE_BEHIND, CHANCE_AHEAD = 0.95, 0.02
"""That a fault is thrown in where a transfer is, in rows that are behind that, and in others."""

CALM_SHARE = 0.2
"""Transfers of a storm that nothing is aimed at."""

FORGET_S = 3700.0
"""No store knows a snapshot any more that has been gone for so long."""


class World(Workload):
    """See the module. `transfers`: puts and gets made in storms. `favoured`: faults that are thrown in more often."""

    def __init__(
        self,
        seed: int,
        transfers: int,
        *,
        trace: Callable[[str], None] | None = None,
        favoured: tuple[Fault, ...] = (),
    ) -> None:
        super().__init__(seed, trace)
        self.transfers = transfers
        self.injector = Injector(self, favoured)
        self.parked = Waiters(self.kernel)
        self.hosts = [NodeHost(self, f"127.0.0.1:{port}", self._config(port)) for port in (7411, 7412)]
        self.engines = [Engine(self, f"engine-{number}", 3) for number in range(3)]

    @staticmethod
    def _config(port: int) -> Config:
        return Config(
            listen=f"127.0.0.1:{port}",
            node=f"node-{port}",
            transports=("tcp",),
            drain_s=1.0,
            arena=ArenaConfig(bytes=1 << 20, prefault=False),  # type: ignore[arg-type]
            leases=LeaseConfig(default_s=5.0, max_s=60.0),
            limits=LimitsConfig(max_snapshots=9, max_transfers=24, max_sessions=16),
            transfers=TransferConfig(window=3, chunk_bytes=8192, max_budget_s=60.0),
            metrics=MetricsConfig(enabled=False),
        )

    @property
    def coverage(self) -> Coverage:
        """How often each pair of row and fault was met."""
        return self.injector.coverage

    def run(self) -> None:
        """Run it to its end. Raises Violation."""
        loop = self.kernel.loop
        loop.set_exception_handler(self._on_loop_error)
        with Patches(self):
            try:
                loop.run_until_complete(self._main())
            except Violation as violation:
                self.violation = self.violation or str(violation)
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
            await self._until(lambda: not self.running and self.begun >= self.quota, STORM_LIMIT_S, "calls hang")
            await self._rest()
            await self._calm()
            self.forget()

    async def _until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        until_s = self.kernel.now_s + timeout_s
        while not done():
            self.check()
            if self.kernel.now_s > until_s:
                running = ", ".join(map(str, self.running))
                raise Violation(f"{what}: {running}")
            await asyncio.sleep(0.02)
        self.check()

    def _is_up(self, host: NodeHost) -> bool:
        return host.node is not None and host.node.link.up and host.target in self.network.servers

    def _begin_storm(self) -> None:
        self.calm = False
        self.quota = min(self.transfers, self.quota + EPOCH)
        self.parked.wake()

    async def _rest(self) -> None:
        """No more faults: everything comes to rest by itself."""
        self.calm = True
        for call in list(self.network.calls):
            call.up.extra_s = call.down.extra_s = 0.0
            if call.forged:
                call.reset()
        for transport in self.transports:
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
                self.network.drop(call)
        await asyncio.sleep(REST_S)
        await self._until(lambda: all(self._is_up(host) for host in self.hosts), 30.0, "a node does not come back")
        await asyncio.sleep(1.0)
        for host in self.hosts:
            self.check_rest(host)
        for engine in self.engines:
            streams = [stream for client in engine.clients.values() for stream in client._node.streams._all]
            if any(stream._user is not None for stream in streams):
                self.fail(f"a stream of {engine.name} is in use, and no call runs")
        for plane in self.planes:
            if plane.running and plane.transfer_count:
                self.fail(f"a data plane still has {plane.transfer_count} transfers, and no call runs")
        self.check()

    async def _calm(self) -> None:
        """What nobody disturbs succeeds: from every engine to every node, there and back."""
        done: list[bool] = []
        for engine in self.engines:
            for host in self.hosts:
                engine.in_thread(self._there_and_back, engine, host, done)
        await self._until(lambda: len(done) == len(self.engines) * len(self.hosts), 40.0, "calm calls hang")

    def _there_and_back(self, engine: Engine, host: NodeHost, done: list[bool]) -> None:
        key = f"calm/{engine.name}"
        put = self.new_op(engine, host, "put", key)
        put.budget_s, put.overwrite, put.lease_s, put.checksum = 10.0, True, 3.0, "xxh3_64"
        put.content = self.new_content(self.random.choice(SHAPES[:-1]))
        engine.run(put)
        if put.error is None:
            get = self.new_op(engine, host, "get", key)
            get.budget_s = 10.0
            engine.run(get)
            if get.error is not None:
                self.fail(f"undisturbed: {get}: {get.error!r}")
        elif not isinstance(put.error, ArenaFull) and put.error.details.get("field") != "max_snapshots":
            # What the storm has left may have leases for longer than the rest took.
            self.fail(f"undisturbed: {put}: {put.error!r}")
        done.append(True)

    def _bury_all(self) -> None:
        """Leave nothing behind: no thread, no task, no descriptor."""
        processes = [engine.process for engine in self.engines]
        for engine in self.engines:
            engine.process.on_death.clear()
        for host in self.hosts:
            processes += [host.process, *([host.mover_process] if host.mover_process is not None else [])]
        processes += list(self.movers)
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

    def begin(self, op: Op) -> None:
        """A call begins."""
        self.running[op] = None
        self.note(f"begin {op}")
        if not self.calm and self.random.random() > CALM_SHARE:
            if op.kind in ("put", "get"):
                self._maybe_throw(op, OPENING, None)
        else:
            op.armed.clear()

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

    def entered_first(self, machine: Any) -> None:
        """A source has been made."""
        if machine.phase is s.SourcePhase.OFFERED:
            self.entered(machine)

    def entered(self, machine: Any) -> None:
        """A machine has entered a phase: before it acts on it, something may go wrong."""
        op = self.identify(machine)
        if op is not None and machine.phase is s.TargetPhase.ENDED:
            self.ended_s[op.request_id] = self.kernel.now_s
        if op is None or machine.phase.name == "ENDED":
            return
        self.note(f"{row_of(machine.phase)} {op}")
        if self.calm or (op.number % 10) < CALM_SHARE * 10:
            return
        self._maybe_throw(op, row_of(machine.phase), machine)

    def _maybe_throw(self, op: Op, row: str, machine: Any) -> None:
        behind = self.coverage.is_behind(row, self.begun * HITS_PER_TRANSFER)
        if self.random.random() > (CHANCE_BEHIND if behind else CHANCE_AHEAD):
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

    def store(self, free: Callable[[int], None], **options: Any) -> CheckedStore:
        """Stands for Store."""
        return CheckedStore(self, free, **options)

    def note_node_death(self, node: Any) -> None:
        """A daemon is gone, and all that it held."""
        node.dead = True

    def forget(self) -> None:
        super().forget()
        alive = {host.mover_process for host in self.hosts}
        self.movers = {process: mover for process, mover in self.movers.items() if process in alive}
        for host in self.hosts:
            model = host.node.store.model
            gone = [item for item in model.all.values() if item.gone and self.kernel.now_s - item.gone_s > FORGET_S]
            for item in gone:
                del model.all[item.key, item.generation]
                model.by_memory.pop(item.memory, None)

    def bury(self, engine: Engine) -> None:
        """An engine's process died, and its calls with it."""
        for op in list(self.running):
            if op.engine is engine:
                op.over = op.died = True
                del self.running[op]
                self.outcomes[f"{op.kind}: the process died"] += 1
