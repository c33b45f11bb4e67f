"""What of the programs' surroundings is replaced while a world runs: one table, name by name.

Nothing else is: a program that comes to use another clock, lock or socket meets the real one, and the run stands still
or differs between two runs of one seed, which a test notices.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, Self

import grpc
import structlog

from hurray_wire import session
from hurray_wire.checksum import XXH3_64
from simulation import kernel as k
from simulation import modules as m
from simulation import nodes
from simulation.network import Channel, Server

if TYPE_CHECKING:
    from simulation.world import World


class _Grpc:
    """The module grpc, with channels and servers of the simulated network."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.aio = _GrpcAio(world)

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc, name)

    def insecure_channel(self, target: str, _options: Any = None) -> Channel:
        return Channel(self._world.network, target)


class _GrpcAio:
    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc.aio, name)

    def server(self, interceptors: Any = (), **_: Any) -> Server:
        return Server(self._world.network, list(interceptors))


class _NotedUuid(m.Uuid):
    """A get's request id is drawn by the SDK: whoever asked has to learn it."""

    def uuid4(self) -> Any:
        value = super().uuid4()
        op = self._kernel.current.op if self._kernel.current is not None else None
        if op is not None and not op.request_id:
            op.request_id = str(value)
            op.engine.world.note_request(op)
        return value


class _Nothing:
    """A module whose functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: None


def table(world: World) -> list[tuple[str, str, Any]]:
    """(module, name, what stands there)."""
    kernel = world.kernel
    time, threading, select = m.Time(kernel), m.Threading(kernel), m.Select(kernel)
    uuid, random = m.Uuid(kernel), m.Random(kernel)
    grpc_ = _Grpc(world)

    def queue() -> k.SimpleQueue:
        return k.SimpleQueue(kernel)

    rows: list[tuple[str, dict[str, Any]]] = [
        (
            "hurray_wire.dataplane",
            {
                "time": time,
                "threading": threading,
                "select": select,
                "os": m.Os(kernel, preempts=True),
                "uuid": uuid,
                "Future": lambda: k.Future(kernel),
            },
        ),
        ("hurray_wire.peers", {"time": time}),
        ("hurray_wire.transport.memory", {"os": m.Os(kernel, preempts=False)}),
        (
            "hurray_server.mover",
            {
                "threading": threading,
                "gc": _Nothing(),
                "TcpTransport": lambda _config: world.make_transport(),
                "Mover": nodes.SimulatedMover,
                "DataPlane": nodes.SimulatedDataPlane,
                "TransferMemory": world.transfer_memory,
                "ImageSource": world.image_source,
            },
        ),
        ("hurray_server.pins", {"threading": threading, "select": select}),
        ("hurray_server.sessions", {"uuid": uuid}),
        ("hurray_server.rpc", {"uuid": uuid}),
        ("hurray_server.framing", {"threading": threading, "select": select}),
        (
            "hurray_server.node",
            {
                "time": time,
                "uuid": uuid,
                "set": m.OrderedSet,
                "MoverLink": nodes.SimulatedMoverLink,
                "Store": world.store,
            },
        ),
        ("hurray_server.transfers", {"time": time}),
        ("hurray_server.service", {"version": lambda _name: "0"}),  # it reads the installation
        (
            "hurray_server.daemon",
            {"grpc": grpc_, "Audit": lambda _path: _Nothing(), "print": lambda *_args, **_options: None},
        ),
        (
            "hurray_client.client",
            {"threading": threading, "time": time, "uuid": _NotedUuid(kernel), "set": m.OrderedSet},
        ),
        (
            "hurray_client.node",
            {
                "threading": threading,
                "time": time,
                "uuid": uuid,
                "random": random,
                "grpc": grpc_,
                "SimpleQueue": queue,
                "Streams": nodes.SimulatedStreams,
            },
        ),
        ("hurray_client.channel", {"threading": threading, "time": time, "grpc": grpc_}),
        ("hurray_client.call", {"threading": threading, "time": time}),
        ("hurray_client.stream", {"threading": threading, "SimpleQueue": queue}),
        ("hurray_client.exchange", {"uuid": uuid, "SimpleQueue": queue}),
        (
            "hurray_client.streams",
            {"threading": threading, "time": time, "SimpleQueue": queue, "set": m.OrderedSet},
        ),
        (
            "hurray_client.transfer",
            {"SnapshotSource": world.snapshot_source},
        ),
        (
            "hurray_client.plane",
            {
                "threading": threading,
                "atexit": _Nothing(),
                "DataPlane": nodes.SimulatedDataPlane,
                "TcpTransport": lambda _config: world.make_transport(),
            },
        ),
        ("hurray_client.progress", {"threading": threading}),
    ]
    return [(module, name, value) for module, names in rows for name, value in names.items()]


class Patches:
    """The table in force, from entering to leaving; and what the programs log as errors goes to the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        nodes.set_world(self._world)
        for module_name, name, value in table(self._world):
            self._set(importlib.import_module(module_name), name, value)
        self._set(session, "SourceSession", self._world.watched(session.SourceSession))
        self._set(session, "TargetSession", self._world.watched(session.TargetSession))
        compute = XXH3_64.compute

        def hash_(buffer: Any) -> int:
            return compute(buffer) ^ self._world.take_lie()

        object.__setattr__(XXH3_64, "compute", hash_)
        self._compute = compute
        self._structlog = structlog.get_config()
        structlog.configure(processors=[self._log], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        self._handler = _Handler(self._world)
        self._logger = logging.getLogger("hurray")
        self._logger.addHandler(self._handler)
        self._logger_state = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.ERROR)
        self._logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)
        object.__setattr__(XXH3_64, "compute", self._compute)
        structlog.configure(**self._structlog)
        self._logger.removeHandler(self._handler)
        level, propagate = self._logger_state
        self._logger.setLevel(level)
        self._logger.propagate = propagate
        nodes.set_world(None)

    def _set(self, module: Any, name: str, value: Any) -> None:
        self._before.append((module, name, module.__dict__.get(name, _ABSENT)))
        setattr(module, name, value)

    def _log(self, _logger: Any, _method: str, event: Any) -> Any:
        self._world.note_log(str(event.get("event")), event)
        raise structlog.DropEvent


_ABSENT = object()


class _Handler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note_log(record.getMessage(), {"exc_info": record.exc_info})
