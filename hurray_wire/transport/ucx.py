"""The transport over UCX, through its Python binding ucxx: TAG messages between hosts and between GPUs.

All of a UcxTransport lives in one thread, destructors included: ucxx cancels a request when its last reference goes,
and UCX's callbacks run inside `progress`. Nothing of ours runs inside such a callback; it only leaves a mark.

Five facts about UCX shape this module:

- A request holds no reference to its memory. (request, array, buffer) stay together until `completed`.
- There is no cancel that tells whether it worked. `forget` therefore completes a receive instead of cancelling it, with
  one byte that the worker sends to itself: if a message had been matched meanwhile, the receive is still pending and
  its buffer still taken, as it must be.
- With error handling on, closing is abrupt: pending requests are cancelled, matched ones run to their end. Only
  `completed` tells when memory is free.
- ucxx does not tell how long a message was. A receive is therefore sealed: its last bytes are random until a message
  has overwritten them. If they are still there it was shorter, and the rest is what the memory held before.
- What arrives unexpected is kept without bound, and destroying a worker reads it with lengths that the peer chose.
  `drain_unknown` and `close` take it with receives of 64 bytes that cut whatever is longer.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from hurray_wire.errors import Cancelled, DataPlaneUnavailable, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.memory import array_module, copy_into, is_on_device, to_host
from hurray_wire.transport import _sockets, ucx_devices
from hurray_wire.transport.base import Buffer, Completion, Endpoint, Transport, TransportParameters
from hurray_wire.transport.settings import check_settings
from hurray_wire.transport.ucx_config import UcxConfig, context_options, no_free_port

_SCRATCH_BYTES = 64
"""Size of a receive that takes a message only to drop it."""

_SEAL_BYTES = 16

_MAX_ADDRESS_BYTES = 4096
_MAX_PORTS = 16

_CLOSE_DEADLINE_S = 5.0
"""How long `close` waits for requests that UCX does not end, before it gives the worker up."""

_CUT_EVERY_S = 0.01
"""How often the sockets of aborted connections are looked at."""

_CUT_GRACE_S = 3.0
"""How much longer than the user timeout an aborted connection may take to fail, while there are others."""

_CUT_ALONE_S = 0.25
"""How long it may take when it is the only one."""

_TAG_BITS = 64

_MAX_PROBES = 1 << 14
"""Bounds one call of `drain_unknown`; it goes through 64 probes for each known message that waits."""

_OK, _TRUNCATED = 0, -9
"""ucs_status_t (ucs/type/status.h)."""

_FABRICS = ("rc", "dc", "ud", "cuda", "gdr", "rocm", "ze")
"""How the names of UCX's transports begin that are more than sockets and the memory of one host."""

_RDMA = ("rc", "dc", "ud")

_ENVIRONMENT_AT_LOAD = {
    "UCX_DEBUG_SIGNO": "0",  # else UCX takes SIGHUP
    "UCX_HANDLE_ERRORS": "none",  # else it may take SIGSEGV and the like, which are faulthandler's
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "error",
    "UCX_MEMTYPE_CACHE": "n",  # a GPU buffer that is freed and allocated anew would be taken for host memory
}
"""Read by UCX once, while it is loaded; everything else is given to the context as a mapping."""


def why_no_ucx() -> str | None:
    """Why this process cannot load UCX; None: it can, and has."""
    try:
        _load_ucxx()
    except DataPlaneUnavailable as error:
        return error.message
    return None


def is_installed() -> bool:
    """Whether ucxx is there to be loaded. Loads nothing."""
    try:
        return importlib.util.find_spec("ucxx") is not None
    except ImportError:
        return False


def has_fabric(config: UcxConfig) -> bool:
    """Whether UCX, set up like this, has more than sockets: RDMA, or a way between GPUs. Raises DataPlaneUnavailable
    where UCX cannot be loaded."""
    ucxx = _load_ucxx()
    context = ucxx.lib.UCXContext(context_options(config), (ucxx.lib.Feature.TAG, ucxx.lib.Feature.WAKEUP))
    return any(name.startswith(_FABRICS) for name in _transports_of(context))


def loaded_ucx() -> dict[str, str]:
    """Which UCX this process really runs: `version`, `path` of the library, `transports` that it can use here.

    Raises DataPlaneUnavailable where ucxx or UCX cannot be loaded. Opens and closes every device once.
    """
    ucxx = _load_ucxx()
    context = ucxx.lib.UCXContext({"TLS": "all"}, (ucxx.lib.Feature.TAG, ucxx.lib.Feature.WAKEUP))
    return {"version": ucxx.version, "path": ucxx.path, "transports": ",".join(sorted(_transports_of(context)))}


def reaches_gpus(transports: Collection[str], net_devices: Sequence[str]) -> bool:
    """Whether UCX moves memory of GPUs by these transports, over these devices, without the host's: within a host by
    cuda_ipc, between hosts by RDMA. Where it has but sockets between hosts it takes such memory, too, and stages it by
    itself: nobody would hear of it."""
    if not any(name.startswith("cuda") for name in transports):
        return False
    within_host = "cuda_ipc" in transports and all(device == "lo" for device in net_devices)
    return within_host or any(name.startswith(_RDMA) for name in transports)


def _transports_of(context: Any) -> set[str]:
    """Transports that a context of UCX can use here."""
    resources = re.findall(r"resource \d+ .*-- (\S+)", context.info)
    return {resource.partition("/")[0] for resource in resources}


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undo what importing ucxx does to the environment and to the logger `ucx`."""
    logger = logging.getLogger("ucx")
    handlers, filters = [*logger.handlers], [*logger.filters]
    level, propagate = logger.level, logger.propagate
    environment = dict(os.environ)
    os.environ.update(_ENVIRONMENT_AT_LOAD)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.setLevel(level)
        logger.propagate = propagate


@functools.cache
def _load_ucxx() -> SimpleNamespace:
    try:
        with _process_state_kept():
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
    except (ImportError, OSError) as error:
        raise DataPlaneUnavailable(f"UCX cannot be loaded: {error}", stage="start") from error
    return SimpleNamespace(
        lib=libucxx,
        array=Array,
        tag=libucxx.UCXXTag,
        mask=libucxx.UCXXTagMask,
        error=libucxx.UCXError,
        version=".".join(map(str, libucxx.get_ucx_version())),
        path=_mapped_library("libucp."),
        unlink_cancelled=_find_unlink_cancelled(),
    )


def _mapped_library(name: str) -> str:
    """Path of the library of this name that is loaded in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.rpartition("/")[2].startswith(name):
            return path
    raise DataPlaneUnavailable(f"{name}so is not loaded", stage="start")


def _find_unlink_cancelled() -> Callable[[int], object]:
    """A function of the address of a ucxx Endpoint that lets go of its requests which completed after a close.

    ucxx 0.52 keeps a send that was pending at `close_blocking` in a list of the endpoint, and with it, through a cycle
    of references, the endpoint and the worker with its sockets and its port. Its only way out is this C++ method.
    """
    try:
        unlink = ctypes.CDLL(_mapped_library("libucxx.so"))["_ZNK4ucxx8Endpoint16getCancelingSizeEv"]
    except AttributeError:
        return lambda _address: None
    unlink.argtypes, unlink.restype = [ctypes.c_void_p], ctypes.c_size_t
    return unlink


class _Seal:
    """Random bytes at the end of a buffer that a message is received into (see the module)."""

    def __init__(self, buffer: Buffer) -> None:
        self._end = buffer[-_SEAL_BYTES:]
        self._covered = to_host(self._end).copy()
        self._seal = np.frombuffer(os.urandom(self._end.size), np.uint8)
        _write(self._end, self._seal)

    def break_off(self) -> bool:
        """Whether it is still there; the bytes that it covered are put back in its place."""
        if not np.array_equal(to_host(self._end), self._seal):
            return False
        _write(self._end, self._covered)
        return True


def _write(end: Buffer, data: Buffer) -> None:
    """Write to memory that UCX may write to next, which on a GPU waits for no stream."""
    copy_into(end, data)
    if is_on_device(end):
        with end.device:
            array_module(end).cuda.get_current_stream().synchronize()


@dataclass(eq=False, slots=True)
class _Operation:
    """A request with all it needs to stay alive: UCX refers to the memory, and nothing else does."""

    request: Any
    array: Any
    buffer: Buffer
    tag: int
    endpoint: UcxEndpoint | None
    done: Completion | None
    receives: bool = False
    forgotten: bool = False
    may_be_cut: bool = False
    seal: _Seal | None = None

    def outcome(self) -> HurrayError | None:
        """What the completion is called with, once the request has completed."""
        status = self.request.status
        assert self.endpoint is not None
        is_short = self.seal is not None and self.seal.break_off()
        if self.forgotten:
            return Cancelled("the receive was withdrawn")
        if status == _OK and is_short:
            return ProtocolViolation("a message was shorter than agreed", tag=f"{self.tag:#x}")
        if status == _OK or (status == _TRUNCATED and self.may_be_cut):
            return None
        if status == _TRUNCATED:
            return ProtocolViolation("a message was longer than agreed", tag=f"{self.tag:#x}")
        return self.endpoint._ended_by or self.endpoint._gone(f"UCX ended the operation with status {status}")


class UcxEndpoint(Endpoint):
    """A connection of a UcxTransport. Made by `UcxTransport.connect`."""

    def __init__(
        self,
        transport: UcxTransport,
        peer: int,
        handle: Any,
        ports: frozenset[int],
        on_lost: Callable[[HurrayError], None],
    ) -> None:
        self.peer = peer
        self._ports = ports
        self._failed = False
        self._transport = transport
        self._handle = handle
        self._on_lost = on_lost
        self._ended_by: HurrayError | None = None
        self._operation_count = 0
        if handle is not None:
            handle.set_close_callback(self._mark_lost)
        else:
            self._mark_lost()

    @property
    def alive(self) -> bool:
        return self._ended_by is None

    def send(self, tag: int, buffer: Buffer, done: Completion) -> None:
        self._post(tag, buffer, done, receives=False)

    def receive(self, tag: int, buffer: Buffer, done: Completion) -> None:
        self._post(tag, buffer, done, receives=True)

    def forget(self, tag: int) -> None:
        self._transport._complete_with_own_byte(tag)

    def discard(self, tag: int, done: Completion) -> None:
        self._post(tag, np.empty(_SCRATCH_BYTES, np.uint8), done, receives=True, may_be_cut=True)

    def close(self) -> None:
        self._end(Cancelled("the connection was closed here"))

    def abort(self) -> None:
        if self._ended_by is None and self._transport._has_blocked_socket(self._ports):
            self._ended_by = self._gone("the connection was aborted here")
            self._transport._cut_later(self)
        else:
            self._end(self._gone("the connection was aborted here"))

    def __repr__(self) -> str:
        return f"<UcxEndpoint peer={self.peer:#x} {'open' if self.alive else 'closed'}>"

    def _post(self, tag: int, buffer: Buffer, done: Completion, *, receives: bool, may_be_cut: bool = False) -> None:
        assert buffer.nbytes > 0
        transport = self._transport
        if not self.alive:
            transport._fail(done, self._gone("the connection is closed"))
            return
        ucxx = transport._ucxx
        array = ucxx.array(buffer)
        seal = _Seal(buffer) if receives and not may_be_cut and _can_be_sealed(buffer) else None
        try:
            post = self._handle.tag_recv if receives else self._handle.tag_send
            request = post(array, ucxx.tag(tag))
        except (ucxx.error, ValueError) as error:  # ValueError: GPU memory where UCX has no transport for it
            transport._fail(done, self._gone(f"UCX refused the operation: {error}"))
            return
        operation = _Operation(request, array, buffer, tag, self, done, receives=receives, may_be_cut=may_be_cut)
        operation.seal = seal
        transport._track(operation)

    def _gone(self, why: str) -> PeerUnavailable:
        return PeerUnavailable(why, stage="data_plane", peer=f"{self.peer:#x}")

    def _mark_lost(self) -> None:
        """UCX calls this from inside progress, also for a close of our own."""
        self._failed = True
        if self._ended_by is None:
            self._ended_by = self._gone("the connection was lost")
            self._transport._lost.append(self)

    def _end(self, error: HurrayError) -> None:
        if self._ended_by is None:
            self._ended_by = error
            self._release()

    def _release(self) -> None:
        """Close UCX's endpoint: cancels what can be cancelled; the rest completes in later calls of progress."""
        del self._transport._endpoints[self]
        if self._handle is not None:
            self._handle.close_blocking()
            self._transport._closing.append(self)


@dataclass(frozen=True, slots=True)
class _Cut:
    """An aborted connection that is not closed yet, and when it will be whatever its socket does."""

    endpoint: UcxEndpoint
    deadline: float


class UcxTransport(Transport):
    """UCX's context, worker and endpoints, for one thread."""

    kind: ClassVar[str] = "ucx"

    def __init__(self, config: UcxConfig) -> None:
        why = ucx_devices.why_unusable(config.net_devices)
        if why is not None:
            raise DataPlaneUnavailable(f"UCX does not start: {why}", stage="start", field="ucx.net_devices")
        config.check_trusted()
        self._config = config
        self._ucxx = _load_ucxx()
        self._closed = False
        self._endpoints: dict[UcxEndpoint, None] = {}
        self._operations: list[_Operation] = []
        self._receives: dict[int, _Operation] = {}
        self._due: deque[Callable[[], None]] = deque()
        self._lost: deque[UcxEndpoint] = deque()
        self._closing: list[UcxEndpoint] = []
        self._cutting: list[_Cut] = []
        self._next_cut = 0.0
        self._loopback: Any = None
        self._stirred = False
        opened_before = _sockets.open_sockets()
        self._context, self._worker = self._start()
        self.takes_device_memory = reaches_gpus(_transports_of(self._context), config.net_devices)
        self._ports = _sockets.listening_ports(config.first_port, config.last_port, opened_before=opened_before)
        self._guard_sockets((), opened_before)

    def _start(self) -> tuple[Any, Any]:
        """UCX's context and worker, at a free port. Given the whole range, UCX tries ports in it for ever."""
        config, lib = self._config, self._ucxx.lib
        options = context_options(config)
        for port in _sockets.free_ports(config.first_port, config.last_port):
            options["TCP_PORT_RANGE"] = f"{port}-{port}"
            try:
                context = lib.UCXContext(options, (lib.Feature.TAG, lib.Feature.WAKEUP))
                worker = lib.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
                worker.init_blocking_progress_mode()
            except lib.UCXBusyError:
                continue
            except self._ucxx.error as error:
                where = f"{options['NET_DEVICES']}, port {port}"
                raise DataPlaneUnavailable(f"UCX does not start on {where}: {error}", stage="start") from error
            return context, worker
        raise no_free_port(config)

    def parameters(self) -> TransportParameters:
        config = self._config
        return TransportParameters(
            self.kind,
            _pack_address(self._ports, bytes(self._worker.address)),
            {
                "ucx_version": self._ucxx.version,
                "tcp_tx_seg_size": str(config.tcp_tx_seg_size_bytes),
                "tcp_rx_seg_size": str(config.tcp_rx_seg_size_bytes),
                "rndv_thresh": str(config.rndv_thresh_bytes),
            },
        )

    def why_unusable(self) -> str | None:
        return ucx_devices.why_unusable(self._config.net_devices)

    def check_peer(self, parameters: TransportParameters) -> None:
        check_settings(self.parameters(), parameters)
        _unpack_address(parameters.address)

    def connect(
        self, peer: int, parameters: TransportParameters, on_lost: Callable[[HurrayError], None]
    ) -> UcxEndpoint:
        assert not self._closed
        ports, worker_address = _unpack_address(parameters.address)
        opened_before = _sockets.open_sockets()
        ucx_devices.remember()
        try:
            address = self._ucxx.lib.UCXAddress.create_from_buffer(worker_address)
            handle = self._worker.create_endpoint_from_worker_address(address, True)
        except self._ucxx.error:
            handle = None
        endpoint = UcxEndpoint(self, peer, handle, ports, on_lost)
        self._endpoints[endpoint] = None
        self._guard_sockets(ports, opened_before)
        return endpoint

    def progress(self) -> bool:
        assert not self._closed
        moved: bool = self._worker.progress_once()
        if moved:
            self._worker.progress()  # all there is, and the cancelling that a lost endpoint left to do
        if self._cutting:
            self._cut()
        self._collect()
        return self._fire() or moved

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def arm(self) -> bool:
        if self._stirred or self._due or self._lost:
            return False
        return not self._worker.progress_once() and bool(self._worker.arm())

    def drain_unknown(self, is_known: Callable[[int], bool]) -> int:
        """A probe shows one message out of all whose tags agree in the bits of a mask. Where that one is known, every
        other tag differs from it in some first bit: one smaller space to probe for each bit, and so on."""
        ucxx, count = self._ucxx, 0
        spaces = [(0, _TAG_BITS)]
        for _ in range(_MAX_PROBES):
            if not spaces:
                break
            bits, free_bits = spaces.pop()
            found = self._worker.tag_probe(ucxx.tag(bits), ucxx.mask(_high_bits(free_bits)))
            if not found.matched:
                continue
            tag = found.sender_tag.value
            if is_known(tag):
                spaces += [((tag ^ 1 << bit) & _high_bits(bit), bit) for bit in range(free_bits)]
            else:
                self._drop(tag)
                count += 1
                spaces.append((bits, free_bits))
        return count

    def close(self) -> None:
        if self._closed:
            return
        for endpoint in [*self._endpoints]:
            endpoint.abort()
        if self._loopback is not None:
            self._loopback.close_blocking()
            self._loopback = None
        deadline = time.monotonic() + _CLOSE_DEADLINE_S
        while time.monotonic() < deadline:
            dropped = self.drain_unknown(lambda _: False)
            moved = self.progress()
            if not (self._operations or self._due or self._lost or self._cutting or dropped or moved):
                break
            self.park(_CUT_EVERY_S)
        self._give_up()
        self._closed = True
        self._worker = self._context = None

    def _give_up(self) -> None:
        """End what UCX did not end. Nothing calls UCX's progress from here on, so nothing lands any more."""
        abandoned, self._operations = self._operations, []
        self._receives.clear()
        for operation in abandoned:
            if operation.done is not None:
                operation.done(PeerUnavailable("the transport was closed", stage="data_plane"))

    def _track(self, operation: _Operation) -> None:
        if operation.receives:
            assert operation.tag not in self._receives, f"tag {operation.tag:#x} has a receive already"
            self._receives[operation.tag] = operation
        if operation.endpoint is not None:
            operation.endpoint._operation_count += 1
        self._operations.append(operation)
        self._stirred = True

    def _fail(self, done: Completion, error: HurrayError) -> None:
        self._due.append(partial(done, error))

    def _collect(self) -> None:
        """Move what has completed from the operations to the completions due."""
        self._stirred = False
        pending: list[_Operation] = []
        for operation in self._operations:
            if not operation.request.completed:
                pending.append(operation)
                continue
            if operation.receives:
                del self._receives[operation.tag]
            if operation.endpoint is not None and operation.done is not None:
                operation.endpoint._operation_count -= 1
                self._due.append(partial(operation.done, operation.outcome()))
        self._operations = pending
        while self._lost:
            endpoint = self._lost.popleft()
            assert endpoint._ended_by is not None
            endpoint._release()
            self._due.append(partial(endpoint._on_lost, endpoint._ended_by))
        self._let_go()

    def _let_go(self) -> None:
        """Drop UCX's endpoints that are closed and whose last operation has completed."""
        closing: list[UcxEndpoint] = []
        for endpoint in self._closing:
            if endpoint._operation_count:
                closing.append(endpoint)
            else:
                self._ucxx.unlink_cancelled(endpoint._handle.ucxx_ptr)
                endpoint._handle = None
        self._closing = closing

    def _cut_later(self, endpoint: UcxEndpoint) -> None:
        alone = len(self._endpoints) == 1  # then the blocked socket is this one's, and need not be waited for
        grace_s = _CUT_ALONE_S if alone else self._config.user_timeout_s + _CUT_GRACE_S
        self._cutting.append(_Cut(endpoint, time.monotonic() + grace_s))

    def _has_blocked_socket(self, peer_ports: frozenset[int], *, shut: bool = False) -> bool:
        return _sockets.any_blocked(local_ports=self._ports, remote_ports=peer_ports, shut=shut)

    def _cut(self) -> None:
        """Close UCX's endpoints of aborted connections, each once nothing blocks its socket any more.

        UCX frees what a forced close leaves of an endpoint when its socket fails, from inside the handler of that
        very event; if the socket was blocked the event says writable as well, and the handler goes on with memory
        that is freed: seen as a crash when a stopped peer came back. So wait for the socket to drain or to fail; the
        operations stay open until then. The user timeout bounds that, and where it does not a shutdown: of every
        socket that is blocked then, since nothing tells whose an accepted one is.
        """
        now, waiting = time.monotonic(), []
        if now < self._next_cut:
            return
        self._next_cut = now + _CUT_EVERY_S
        for cut in self._cutting:
            if cut.endpoint._failed or not self._has_blocked_socket(cut.endpoint._ports, shut=now >= cut.deadline):
                cut.endpoint._release()
            else:
                waiting.append(cut)
        self._cutting = waiting

    def _fire(self) -> bool:
        count = len(self._due)
        for _ in range(count):
            self._due.popleft()()
        return count > 0

    def _drop(self, tag: int) -> None:
        scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        array = self._ucxx.array(scratch)
        request = self._worker.tag_recv(array, self._ucxx.tag(tag))
        self._track(_Operation(request, array, scratch, tag, None, None))

    def _complete_with_own_byte(self, tag: int) -> None:
        receive = self._receives.get(tag)
        if receive is None or receive.forgotten:
            return
        receive.forgotten = True
        if receive.request.completed:
            return
        byte = np.zeros(1, np.uint8)
        array = self._ucxx.array(byte)
        try:
            if self._loopback is None or not self._loopback.alive:
                self._loopback = self._worker.create_endpoint_from_worker_address(self._worker.address, True)
            request = self._loopback.tag_send(array, self._ucxx.tag(tag))
        except self._ucxx.error:
            return  # the receive stays pending, and its buffer taken, until its connection is closed
        self._track(_Operation(request, array, byte, tag, None, None))

    def _guard_sockets(self, peer_ports: Collection[int], opened_before: frozenset[str]) -> None:
        _sockets.guard(
            self._config.user_timeout_s,
            local_ports=self._ports,
            remote_ports=peer_ports,
            opened_before=opened_before,
        )


def _can_be_sealed(buffer: Buffer) -> bool:
    # What is shorter may end in any bytes by chance.
    return int(buffer.nbytes) >= _SEAL_BYTES


def _high_bits(free_bits: int) -> int:
    """A mask of all bits of a tag but the lowest `free_bits`."""
    return (1 << _TAG_BITS) - (1 << free_bits)


def _pack_address(ports: Collection[int], worker_address: bytes) -> bytes:
    """Count of TCP ports (u8), the ports (u16 each), UCX's worker address to the end. Little-endian."""
    return struct.pack(f"<B{len(ports)}H", len(ports), *sorted(ports)) + worker_address


def _unpack_address(address: bytes) -> tuple[frozenset[int], bytes]:
    port_count = address[0] if address else 0
    start = 1 + 2 * port_count
    if port_count > _MAX_PORTS or not start < len(address) <= _MAX_ADDRESS_BYTES:
        raise ProtocolViolation(
            "the peer's ucx address is malformed",
            field="ucx.address",
            offered=f"{len(address)} bytes",
            required=f"up to {_MAX_PORTS} ports and a worker address, at most {_MAX_ADDRESS_BYTES} bytes",
        )
    return frozenset(struct.unpack_from(f"<{port_count}H", address, 1)), address[start:]
