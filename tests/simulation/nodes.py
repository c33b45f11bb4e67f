"""hurrayd and its mover, whole, as two processes of the simulated kernel.

Real: Daemon, Node, Service, Sessions, Store, Requests, Transfers, MoverLink and its supervision, the frames between the
two processes, Mover, Arena, DataPlane. Simulated: how a process is started and killed, the socket between them, and
gRPC. A mover's command line is not parsed; its exit is when its main thread ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from hurray_client.streams import Streams
from hurray_server.daemon import Daemon
from hurray_server.framing import FRAME_OVERHEAD_BYTES, FrameConnection, Frames
from hurray_server.mover import Mover, serve
from hurray_server.mover_link import MoverLink, Outputs
from hurray_wire.dataplane import DataPlane
from hurray_wire.v1 import mover_pb2 as mpb
from simulation.kernel import Process, Socket, Thread

if TYPE_CHECKING:
    from simulation.world import World

RESTART_S = 0.3
"""From the death of a daemon to the start of the next one."""


class SimulatedMover(Mover):
    """The world knows it by its process."""

    def __init__(self, config: Any, report: Any) -> None:
        super().__init__(config, report)
        _world().add_mover(self)


class SimulatedDataPlane(DataPlane):
    """The world knows which of its transfers belongs to what somebody asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _world().add_plane(self)

    def new_transfer(self) -> int:
        number = super().new_transfer()
        _world().note_client_transfer(self, number)
        return number


class SimulatedStreams(Streams):
    """What a stream carries is whose thread has taken it."""

    def take(self, method: str, user: Any) -> Any:
        stream: Any = super().take(method, user)
        op = stream.thread.op = _world().kernel.current.op  # type: ignore[union-attr]
        if stream.thread.call is not None:
            _world().inherit(op, stream.thread.call)
        return stream


class _MoverProcess:
    """asyncio.subprocess.Process, as far as MoverLink uses it."""

    def __init__(self, world: World, link: SimulatedMoverLink) -> None:
        kernel = world.kernel
        self.pid = kernel.random.randrange(1, 1 << 22)
        self.returncode: int | None = None
        self.process = Process(f"mover-of-{kernel.process.name}")
        self.process.link = link
        self.link = link
        self._world = world
        self._exited = asyncio.Event()
        with kernel.within(self.process):
            self.socket = Socket(kernel, self._say)
            self._thread = Thread(kernel, self._main, "main", (link._config,))
            self._thread.start()
        self.process.on_death.append(self._on_death)
        self._up_s = self._down_s = 0.0
        self.connection: FrameConnection[mpb.MoverReport] | None = None

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self._world.kernel.loop.call_soon(self._world.kernel.kill, self.process)

    def hear(self, data: bytes | None) -> None:
        """From the daemon: a command's bytes, or (None) the end of the socket."""
        self._down_s = self._after(self._down_s, self._feed, data)

    def _feed(self, data: bytes | None) -> None:
        if data is None:
            self.socket.feed_eof()
        else:
            self.socket.feed(data)

    def _say(self, data: bytes | None) -> None:
        self._up_s = self._after(self._up_s, self._report, data)

    def _report(self, data: bytes | None) -> None:
        if self.connection is None:
            return
        if data is None:
            self.connection.connection_lost(None)
        else:
            self.connection.data_received(data)

    def _after(self, last_s: float, call: Any, data: bytes | None) -> float:
        kernel = self._world.kernel
        at_s = max(last_s + 1e-7, kernel.now_s + kernel.moment())
        kernel.loop.call_at(at_s, call, data)
        return at_s

    def _main(self, config: Any) -> None:
        serve(self.socket, config)  # type: ignore[arg-type]
        self._world.kernel.loop.call_soon(self._world.kernel.kill, self.process)

    def _on_death(self) -> None:
        for transport in self._world.transports_of(self.process):
            transport.die()
        self._say(None)
        self.returncode = 0
        self._world.kernel.after(self._world.kernel.moment(), self._exited.set)


class _Transport(asyncio.Transport):
    """The daemon's end of the socket, as the event loop has it."""

    def __init__(self, process: _MoverProcess) -> None:
        super().__init__()
        self._process = process
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if not self._closing and self._process.link.process.alive:
            self._process.hear(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._process.hear(None)


class SimulatedMoverLink(MoverLink):
    """Its mover is a process of the simulated kernel."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.process = _world().kernel.process
        self.mover_process: _MoverProcess | None = None

    def new_transfer(self, outputs: Outputs) -> int:
        number = super().new_transfer(outputs)
        _world().note_node_transfer(self, number)
        return number

    def condemn(self, why: str) -> None:
        if self.process.alive:
            _world().note_condemned(self, why)
            super().condemn(why)

    async def _spawn(self) -> None:
        if not self.process.alive:
            raise OSError("a dead daemon starts nothing")
        with _world().kernel.within(self.process):
            self.mover_process = _MoverProcess(_world(), self)
        self._process = self.mover_process  # type: ignore[assignment]
        self._early = deque()
        self._came.clear()
        frames = Frames(mpb.MoverReport, self._config.limits.max_message_bytes + FRAME_OVERHEAD_BYTES)
        self._connection = self.mover_process.connection = FrameConnection(frames, self._hear)
        self._connection.connection_made(_Transport(self.mover_process))

    def _kill(self) -> None:
        if self.mover_process is not None:
            self.mover_process.kill()


class NodeHost:
    """One host: a daemon runs on it, and another one after that has ended."""

    def __init__(self, world: World, target: str, config: Any) -> None:
        self.target = target
        self.config = config
        self.world = world
        self.process = Process(target)
        self.daemon: Daemon | None = None
        self._task: asyncio.Task[None] | None = None
        self.starts = 0
        self.nodes: deque[Any] = deque(maxlen=16)
        """The last ones, the newest first."""

    @property
    def node(self) -> Any:
        """The Node of the daemon that runs, or None."""
        return None if self.daemon is None else self.daemon._node

    @property
    def mover_process(self) -> Process | None:
        """The process of the mover that runs."""
        link = None if self.node is None else self.node.link
        return None if link is None or link.mover_process is None else link.mover_process.process

    def start(self) -> None:
        """Start a daemon."""
        kernel = self.world.kernel
        self.starts += 1
        self.process = Process(f"{self.target}#{self.starts}")
        with kernel.within(self.process):
            self.daemon = Daemon(self.config)
            self.process.node = self.daemon._node
            self.world.add_node(self.daemon._node, self)
            self.nodes.appendleft(self.daemon._node)
            self._task = kernel.loop.create_task(self._run(self.daemon, self.process))

    async def _run(self, daemon: Daemon, process: Process) -> None:
        try:
            await daemon.run()
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if process.alive:
                self.world.fail(f"the daemon ended with {error!r}")
        if process.alive:
            self.kill()

    def kill(self) -> None:
        """The daemon's process is gone: sockets closed, tasks no more. The next one starts soon."""
        process, daemon, kernel = self.process, self.daemon, self.world.kernel
        if not process.alive or daemon is None:
            return
        self.daemon = None
        kernel.kill(process)
        self.world.network.lose_server(process)
        link: Any = daemon._node.link
        if link.mover_process is not None:
            link.mover_process.hear(None)
        for task in [self._task, link.supervisor, daemon._node._expirer, *self.world.tasks_of(process)]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self.world.note_node_death(daemon._node)
        kernel.after(RESTART_S, self.start)


_current: list[Any] = []


def _world() -> World:
    world: World = _current[-1]
    return world


def set_world(world: World | None) -> None:
    """The world that everything made from now on belongs to."""
    _current.clear()
    if world is not None:
        _current.append(world)
