"""GPUs of this process: whether there are any, memory of theirs that UCX can share, and the order of work on them.

CuPy is loaded by name when a GPU is first wanted, never before. What UCX sends and receives is plain cudaMalloc memory:
cuda_ipc is lost, in silence, for memory of pools and of expandable segments. It is taken in blocks and used again. What
kernels need for themselves is `scratch`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import numpy as np

from hurray_wire.errors import InvalidRequest, Unsupported
from hurray_wire.memory import DEVICE_CUDA, HOST, STANDARD, Place
from hurray_wire.pool import Block, MemoryPool
from hurray_wire.scratch import Allocator, rmm_allocator

ALIGNMENT: Final = 64 << 10
"""Blocks begin at a multiple of this."""

CHUNK_BYTES: Final = 64 << 20
"""What a chunk between GPUs has where nobody says otherwise: each costs more to start than it takes to move as much as
hosts send at once."""

_BLOCK_BYTES: Final = 2 << 20
"""Blocks are multiples of this: cudaMalloc takes no less."""

_INSUFFICIENT_DRIVER: Final = 35
_NO_DEVICE: Final = 100


def why_no_cuda() -> str | None:
    """Why this process has no GPU, in words for people; None: it has one. Loads CuPy, and starts CUDA."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError:
        return "cupy is not installed: install hurray-transfer[cuda12] or [cuda13]"
    except Exception as error:  # CuPy raises whatever its libraries do
        return f"cupy cannot be loaded: {error}"
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return _explain(runtime, error)
    return None if count else _explain(runtime, None)


def in_use() -> bool:
    """Whether this process has loaded CuPy already, and it has a GPU. Loads nothing."""
    return "cupy" in sys.modules and why_no_cuda() is None


def _explain(runtime: Any, error: Any) -> str:
    status = _NO_DEVICE if error is None else getattr(error, "status", None)
    driver = int(runtime.driverGetVersion())
    if not driver:
        return "this host has no NVIDIA driver (libcuda.so.1), or the container was started without it"
    if status == _INSUFFICIENT_DRIVER:
        needed = int(runtime.runtimeGetVersion())
        return (
            f"the NVIDIA driver is for CUDA {_version(driver)}, cupy for {_version(needed)}: update the driver, or"
            f" install hurray-transfer[cuda{driver // 1000}]"
        )
    if status == _NO_DEVICE:
        return "the NVIDIA driver shows no GPU: is CUDA_VISIBLE_DEVICES empty, or the container started without one?"
    return f"CUDA does not start: {error}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def gpu(device_id: int = 0) -> Gpu:
    """The GPU with this number; one object a process. Raises Unsupported, with the reason, where there is none."""
    why = why_no_cuda()
    if why is not None:
        raise Unsupported(f"there is no GPU: {why}", field="device", offered=f"cuda:{device_id}")
    cupy = importlib.import_module("cupy")
    count = int(cupy.cuda.runtime.getDeviceCount())
    if not 0 <= device_id < count:
        raise Unsupported(
            "there is no such GPU", field="device", offered=f"cuda:{device_id}", required=f"cuda:0 to cuda:{count - 1}"
        )
    return _gpu(cupy, device_id)


@functools.cache
def _gpu(cupy: Any, device_id: int) -> Gpu:
    return Gpu(cupy, device_id, _scratch(cupy))


@functools.cache
def _scratch(cupy: Any) -> Allocator | None:
    return rmm_allocator(cupy)


def place_of(device: tuple[int, int]) -> Place:
    """Where arrays of this device (tag, number) are worked on. Raises Unsupported where there is no such GPU."""
    return gpu(device[1]) if device[0] == DEVICE_CUDA else HOST


def read_device(name: str) -> int | None:
    """The GPU's number of "cuda:1" or "cuda"; None for "cpu". Raises InvalidRequest for anything else."""
    kind, _, number = name.partition(":")
    if kind == "cuda" and (number.isdecimal() or name == "cuda") and len(number) <= 4:
        return int(number or 0)
    if name == "cpu":
        return None
    raise InvalidRequest("no such device", field="device", offered=name[:32], required='"cpu", "cuda" or "cuda:N"')


_entered = threading.local()
"""Which allocator `Gpu.enter` has set in a thread, and the context that keeps it set."""


class Gpu:
    """One GPU as a place (`hurray_wire.memory.Place`): memory of its own kind, and a stream that orders what is done
    there. Thread-safe, but for what a stream cannot be."""

    device_tag: Final = DEVICE_CUDA
    memory_class: Final = STANDARD

    def __init__(self, cupy: Any, device_id: int, scratch: Allocator | None) -> None:
        """Use `gpu`."""
        self.device_id: Final = device_id
        self._cupy = cupy
        self._scratch = scratch
        with cupy.cuda.Device(device_id):
            self.stream: Final = cupy.cuda.Stream(non_blocking=True)
        self.memory: Final = MemoryPool(block=lambda nbytes: _GpuBlock(cupy, device_id, nbytes))

    def take(self, nbytes: int) -> Any:
        """uint8 [nbytes] at a multiple of 64 KiB, holding whatever this process left there. It is used again once the
        last array over it is gone: nothing that was started on it may run then. Raises MemoryError."""
        return self.memory.take(-(-max(nbytes, 1) // _BLOCK_BYTES) * _BLOCK_BYTES)[:nbytes]

    def scratch(self, nbytes: int) -> Any:
        """uint8 [nbytes] for work in between, which no transport may be given: memory of a pool, or of RMM's."""
        with self.current():
            try:
                return self._cupy.empty(nbytes, dtype=np.uint8)
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise MemoryError(str(error)) from None

    def enter(self) -> None:
        """What this thread, one of our own, starts from here on, on this GPU or any that it does not name, goes to this
        one's stream, and what it needs for that is scratch."""
        self._cupy.cuda.Device(self.device_id).use()
        self.stream.use()
        if self._scratch is not None and getattr(_entered, "scratch", None) is not self._scratch:
            _entered.scratch, _entered.context = self._scratch, self._allocating()
            _entered.context.__enter__()

    def settle(self) -> None:
        """Wait until what was started here is done, and for nothing else."""
        self.stream.synchronize()

    @contextmanager
    def current(self) -> Iterator[int]:
        """`enter`, for a block in anybody's thread, whose own device, stream and allocator are current again after it.
        Yields the stream's pointer."""
        with self._cupy.cuda.Device(self.device_id), self.stream, self._allocating():
            before = getattr(_entered, "scratch", None)
            _entered.scratch = self._scratch
            try:
                yield int(self.stream.ptr)
            finally:
                _entered.scratch = before

    @contextmanager
    def work(self) -> Iterator[None]:
        """See Place."""
        with self.current():
            try:
                yield
            finally:
                self.settle()

    def _allocating(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._scratch is None else self._cupy.cuda.using_allocator(self._scratch)

    def follow(self, stream: object | None = None) -> None:
        """Do what is started here from now on after all that was started on a stream of the caller's: CuPy's, torch's
        or any other's that tells its pointer (1 and 2 are CUDA's default streams: legacy, and this thread's). None:
        after the streams that are current in this thread."""
        cuda = self._cupy.cuda
        with cuda.Device(self.device_id):
            for pointer in _current_streams(self._cupy, self.device_id) if stream is None else [stream_pointer(stream)]:
                event = cuda.Event(disable_timing=True)
                cuda.runtime.eventRecord(event.ptr, pointer)
                self.stream.wait_event(event)


def stream_pointer(stream: object) -> int:
    """The pointer of a stream: CuPy's `ptr`, torch's `cuda_stream`, `__cuda_stream__`, or itself if it is a number.
    Raises InvalidRequest."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("ptr", "cuda_stream"):
        pointer = getattr(stream, name, None)
        if isinstance(pointer, int):
            return pointer
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise InvalidRequest(
        "not a CUDA stream", field="stream", offered=type(stream).__name__, required="CuPy's, torch's, or a pointer"
    )


def _current_streams(cupy: Any, device_id: int) -> Iterator[int]:
    yield int(cupy.cuda.get_current_stream().ptr)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield int(torch.cuda.current_stream(device_id).cuda_stream)


class _Owner:
    """What the arrays over a lent block keep."""

    __slots__ = ("__weakref__",)


class _GpuBlock(Block):
    """Plain memory of a GPU, zero when it is new: with cuda_ipc a peer sees all of an allocation."""

    def __init__(self, cupy: Any, device_id: int, nbytes: int) -> None:
        self._cupy, self._device_id, self.nbytes = cupy, device_id, nbytes
        cuda = cupy.cuda
        with cuda.Device(device_id):
            try:
                self._memory = cuda.Memory(nbytes + ALIGNMENT)
            except cuda.runtime.CUDARuntimeError as error:
                raise MemoryError(str(error)) from None
            cuda.MemoryPointer(self._memory, 0).memset(0, nbytes + ALIGNMENT)
        self._pointer = self._memory.ptr + -self._memory.ptr % ALIGNMENT

    def lend(self, give_back: Callable[[], None]) -> Any:
        """See Block."""
        owner, cuda = _Owner(), self._cupy.cuda
        weakref.finalize(owner, give_back).atexit = False
        lent = cuda.UnownedMemory(self._pointer, self.nbytes, owner, self._device_id)
        with cuda.Device(self._device_id):
            return self._cupy.ndarray((self.nbytes,), dtype=np.uint8, memptr=cuda.MemoryPointer(lent, 0))
