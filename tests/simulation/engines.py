"""Engines: client processes whose threads put, get, delete and renew through the real SDK, and judge what they hear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hurray_client.call import Call
from hurray_client.client import Client
from hurray_client.config import ClientConfig
from hurray_client.plane import LocalDataPlane
from hurray_wire.errors import HurrayError
from simulation.content import Content, Landing
from simulation.faults import Fault
from simulation.kernel import Process, Thread

if TYPE_CHECKING:
    from simulation.nodes import NodeHost
    from simulation.world import World

SLACK_S = 7.0
"""What a call may take beyond its budget or its cancellation: two drains, the settling of its stream, the way there."""

RESTART_S = 0.2


@dataclass(eq=False)
class Op:
    """One call of the SDK: what was asked, what was done to it, what came of it."""

    number: int
    kind: str
    engine: Engine
    host: NodeHost
    key: str
    budget_s: float
    content: Content | None = None
    """What a put hands over."""
    checksum: str = "xxh3_64"
    overwrite: bool = False
    lease_s: float = 10.0
    wait_s: float = 0.0
    consume: bool = False
    generation: int = 0
    landing: Landing | None = None
    request_id: str = ""
    began_s: float = 0.0
    call: Call | None = None
    over: bool = False
    died: bool = False
    result: Any = None
    error: Exception | None = None
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    armed: list[Fault] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    forged: list[bytes] = field(default_factory=list)
    """What others have said in the name of either side on its streams, also while these carried what came before."""
    soiled: list[int] = field(default_factory=list)
    """Dead slots that each attempt has sent dirty."""
    machines: list[Any] = field(default_factory=list)
    received: bool = False
    """A get's machine has committed here."""

    cancelled_s: float | None = None

    def cancel(self) -> None:
        """The caller gives up."""
        if self.call is not None:
            self.cancelled_s = self.engine.world.kernel.now_s
            self.call.cancel()

    def __repr__(self) -> str:
        return f"<{self.kind} {self.number} of {self.key} at {self.host.target} by {self.engine.name}>"


class Engine:
    """One host with a client process; another one starts after that has died."""

    def __init__(self, world: World, name: str, worker_count: int) -> None:
        self.world = world
        self.name = name
        self.worker_count = worker_count
        self.process = Process(name)
        self.starts = 0
        self.plane: LocalDataPlane
        self.clients: dict[str, Client] = {}
        self.config: ClientConfig

    def start(self) -> None:
        """Start a process."""
        kernel = self.world.kernel
        self.starts += 1
        self.process = Process(f"{self.name}#{self.starts}")
        self.process.on_death.append(self._on_death)
        self.clients = {}
        self.config = ClientConfig(
            transports=("tcp",),
            chunk_bytes=self.world.chunk_bytes,
            window=kernel.random.randrange(1, 5),
            retry_s=2.0,
            connect_timeout_s=3.0,
        )
        with kernel.within(self.process):
            self.plane = LocalDataPlane(self.config)
            for number in range(self.worker_count):
                Thread(kernel, self._work, f"worker-{number}").start()

    def kill(self) -> None:
        """kill -9; another one starts soon."""
        if self.process.alive:
            self.world.kernel.kill(self.process)

    def _on_death(self) -> None:
        world, process = self.world, self.process
        for transport in world.transports_of(process):
            transport.die()
        world.network.lose_client(process)
        world.bury(self)
        world.kernel.after(RESTART_S, self.start)

    def in_thread(self, work: Callable[..., object], *args: Any) -> None:
        """Have another thread of this process do something."""
        self.world.in_process(self.process, self._attempt, work, *args)

    @staticmethod
    def _attempt(work: Callable[..., object], *args: Any) -> None:
        try:
            work(*args)
        except HurrayError:
            return

    def client(self, host: NodeHost) -> Client:
        """The client of a node, made if there is none."""
        client = self.clients.get(host.target)
        if client is None:
            client = self.clients[host.target] = Client(host.target, self.config, self.plane)
        return client

    def close_client(self, host: NodeHost) -> None:
        """Close it; the next call makes another one."""
        client = self.clients.pop(host.target, None)
        if client is not None:
            client.close()

    def _work(self) -> None:
        while True:
            op = self.world.next_op(self)
            if op is None:
                self.world.parked.wait()
            else:
                self.run(op)

    def run(self, op: Op) -> None:
        """One call, in the current thread."""
        world, kernel = self.world, self.world.kernel
        thread = kernel.current
        assert thread is not None
        thread.op = op
        op.began_s = kernel.now_s
        frozen_s = self.process.frozen_s
        world.begin(op)
        try:
            op.result = getattr(self, f"_{op.kind}")(op, self.client(op.host))
        except HurrayError as error:
            op.error = error
        finally:
            op.over = True
            thread.op = None
            if not self.process.alive:
                op.died = True
            elif op.content is not None:
                op.content.scramble()
        took_s = kernel.now_s - op.began_s - (self.process.frozen_s - frozen_s)
        if took_s > op.budget_s + SLACK_S:
            world.fail(f"{op} took {took_s:.3f} s of {op.budget_s:.3f} s: {op.error or op.result}")
        if op.cancelled_s is not None and self.process.frozen_s == 0 and kernel.now_s > op.cancelled_s + SLACK_S:
            world.fail(f"{op} was cancelled at {op.cancelled_s:.3f} s, and returned only now")
        world.judge(op)

    def _put(self, op: Op, client: Client) -> Any:
        assert op.content is not None
        op.call = Call(op.budget_s)
        return client.run_put(
            op.call,
            op.key,
            op.content.snapshot(),
            request_id=op.request_id,
            checksum=op.checksum,  # type: ignore[arg-type]
            annotations={"put": op.request_id},
            lease_s=op.lease_s,
            overwrite=op.overwrite,
            require_transport=None,
            on_progress=None,
        )

    def _get(self, op: Op, client: Client) -> Any:
        op.call = Call(op.budget_s)
        landing = op.landing
        return client.run_get(
            op.call,
            op.key,
            into=None if landing is None else landing.caches,
            block_tables=None if landing is None else landing.tables,
            wait_s=op.wait_s,
            consume=op.consume,
            generation=op.generation,
            require_transport=None,
            on_progress=None,
        )

    def _delete(self, op: Op, client: Client) -> Any:
        return client.delete(op.key, generation=op.generation, timeout_s=op.budget_s)

    def _renew(self, op: Op, client: Client) -> Any:
        return client.renew(op.key, lease_s=op.lease_s, generation=op.generation, timeout_s=op.budget_s)

    def _stat(self, op: Op, client: Client) -> Any:
        return client.stat(op.key, generation=op.generation, timeout_s=op.budget_s)

    def _list(self, op: Op, client: Client) -> Any:
        return list(client.list("", timeout_s=op.budget_s))
