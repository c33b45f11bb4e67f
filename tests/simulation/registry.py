"""Who belongs to whom: which process has which transports, which machine works on what somebody asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hurray_wire import session as s
from hurray_wire.transport.memory import MemoryFabric, _Message, _Operation
from simulation.faults import OPENING, row_of
from simulation.kernel import Kernel, Process, Thread
from simulation.network import Context, Network
from simulation.transport import SimulatedTransport

if TYPE_CHECKING:
    from simulation.engines import Engine, Op
    from simulation.nodes import NodeHost, SimulatedMoverLink


class Registry:
    """See the module. `seed` decides everything."""

    def __init__(self, seed: int) -> None:
        self.kernel = Kernel(f"seed {seed}")
        self.random = self.kernel.random
        self.network = Network(self.kernel)
        self.fabric = MemoryFabric()
        self.eager_max_bytes = self.random.choice((0, 1000, 2000, 4095))
        self.transports: list[SimulatedTransport] = []
        self.movers: dict[Process, Any] = {}
        self.planes: list[Any] = []
        self.ops: dict[str, list[Op]] = {}
        """By request id: a repetition has the same."""
        self.running: dict[Op, None] = {}
        self.client_transfers: dict[tuple[int, int], Op] = {}
        self.node_transfers: dict[tuple[SimulatedMoverLink, int], Op] = {}
        self.contexts: dict[tuple[SimulatedMoverLink, int], Context] = {}
        """The handler of a transfer at its node."""
        self.landed_chunks: dict[tuple[Process, int], set[int]] = {}

    def on_land(self, transport: SimulatedTransport, message: _Message, receive: _Operation) -> None:
        """A message is about to be written to its receive."""
        raise NotImplementedError

    def forget(self) -> None:
        """What no later epoch asks for."""
        self.ops.clear()
        self.client_transfers.clear()
        self.node_transfers.clear()
        self.contexts.clear()
        self.landed_chunks.clear()
        self.transports = [item for item in self.transports if not item._crashed and not item._closed]
        self.planes = [plane for plane in self.planes if plane.running]

    def make_transport(self) -> SimulatedTransport:
        """A transport of the process whose code runs."""
        transport = SimulatedTransport(self.kernel, self.fabric, self.on_land, self.eager_max_bytes)
        self.transports.append(transport)
        return transport

    def transports_of(self, process: Process | None) -> list[SimulatedTransport]:
        """Those of a process that are open."""
        return [item for item in self.transports if item.process is process and not item._closed]

    def transports_between(self, engine: Engine, host: NodeHost) -> list[SimulatedTransport]:
        """Those of both sides."""
        return self.transports_of(engine.process) + self.transports_of(host.mover_process)

    def in_process(self, process: Process, work: Callable[..., object], *args: Any) -> None:
        """Have a thread of its own in that process do something."""
        with self.kernel.within(process):
            Thread(self.kernel, work, "aside", args).start()

    def add_mover(self, mover: Any) -> None:
        """A mover starts."""
        self.movers[self.kernel.process] = mover

    def add_plane(self, plane: Any) -> None:
        """A data plane is made."""
        plane.process = self.kernel.process
        self.planes.append(plane)

    def add_node(self, node: Any, host: NodeHost) -> None:
        """A daemon is made."""
        node.store.node = node
        node.host = host

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
            self.client_transfers[plane.incarnation, number] = thread.op

    def note_node_transfer(self, link: SimulatedMoverLink, number: int) -> None:
        """A daemon has a number for a transfer, whose handler is the current task."""
        context = self.current_context()
        if context is not None and context.op is not None:
            self.node_transfers[link, number] = context.op
            self.contexts[link, number] = context

    def current_context(self) -> Context | None:
        """The handler whose task runs."""
        task = asyncio.current_task()
        for server in self.network.servers.values():
            for context in server.contexts:
                if context.task is task:
                    return context
        return None

    def inherit(self, op: Op, call: Any) -> None:
        """A stream on which somebody has lied carries another transfer."""
        op.forged += call.forged

    def note_request(self, op: Op) -> None:
        """The SDK has drawn a request id."""
        self.ops.setdefault(op.request_id, []).append(op)

    def transfer_of(self, machine: Any) -> tuple[Any, Any] | None:
        """The data plane and its transfer that a machine belongs to."""
        for plane in self.planes:
            for transfer in plane._transfers.values():
                if transfer.machine is machine:
                    return plane, transfer
        return None

    def identify(self, machine: Any) -> Op | None:
        """What somebody asked for that a machine works on."""
        if machine.sim_op is None:
            found = self.transfer_of(machine)
            if found is None:
                return None
            plane, transfer = found
            op = self.client_transfers.get((plane.incarnation, transfer.number))
            if op is None:
                op = self.node_transfers.get((plane.process.link, transfer.number))
            if op is not None:
                machine.sim_op = op
                op.machines.append(machine)
        found_op: Op | None = machine.sim_op
        return found_op

    def rows_of(self, op: Op) -> list[str]:
        """Where a call is now."""
        rows = [row_of(machine.phase) for machine in op.machines if machine.phase.name != "ENDED"]
        return rows or ([] if op.machines else [OPENING])

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
        return self.landed_chunks.get((plane.process, number), set())

    def op_of_payload(self, payload: Any) -> Op | None:
        """Whose transfer a payload is."""
        for plane in self.planes:
            for transfer in plane._transfers.values():
                if transfer.order.payload is payload:
                    return self.identify(transfer.machine)
        return None

    def calls_of(self, op: Op) -> list[Any]:
        """The streams of a transfer that are open."""
        return [call for call in self.network.calls if call.op is op and call.active and call.method in ("Put", "Get")]

    def ops_of(self, engine: Engine) -> list[Op]:
        """Calls that run in an engine."""
        return [op for op in self.running if op.engine is engine]

    def ops_at(self, host: NodeHost) -> list[Op]:
        """Calls that run to a node."""
        return [op for op in self.running if op.host is host]

    def ops_between(self, engine: Engine, host: NodeHost) -> list[Op]:
        """Calls that run from one to the other."""
        return [op for op in self.running if op.host is host and op.engine is engine]
