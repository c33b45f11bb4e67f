"""A GPU that is not there: what this project uses of CuPy, over NumPy arrays, and the real kernels built as C++.

Its arrays are no NumPy arrays, nothing turns them into one by itself, and none is used with those of another device or
the host: what would fail, or copy in silence, on a GPU raises here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import pytest

from hurray_wire import kernels

_COMPILER = shutil.which("g++") or shutil.which("clang++")
_HOST_SOURCE = Path(__file__).parent.parent / "kernels" / "host.cpp"

needs_compiler = pytest.mark.skipif(
    _COMPILER is None and not os.environ.get("CI"), reason="no C++ compiler to build the kernels with: apt install g++"
)

DEVICE_COUNT = 2


class FakeCudaError(RuntimeError):
    """What CuPy raises for the runtime's errors."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


_here = threading.local()


def current_device() -> int:
    """The device that is current in this thread."""
    return getattr(_here, "device", 0)


class Device:
    """A device, and as a context the current one."""

    def __init__(self, number: int | None = None) -> None:
        self.id = current_device() if number is None else number
        self._outer: list[int] = []
        if not 0 <= self.id < DEVICE_COUNT:
            raise FakeCudaError(101, "cudaErrorInvalidDevice: invalid device ordinal")

    def use(self) -> None:
        _here.device = self.id

    def __enter__(self) -> Device:
        self._outer.append(current_device())
        _here.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        _here.device = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


class Event:
    """Orders nothing, for everything here is done at once; remembers which stream it was recorded on."""

    made: ClassVar[WeakValueDictionary[int, Event]] = WeakValueDictionary()

    def __init__(self, **_: object) -> None:
        self.recorded_on: int | None = None
        self.ptr = id(self)
        Event.made[self.ptr] = self

    def record(self, stream: Stream) -> None:
        self.recorded_on = stream.ptr


def event_record(event: int, stream: int) -> None:
    """The runtime's call, on pointers."""
    Event.made[event].recorded_on = stream


class Stream:
    """Everything is done at once; `waits` holds pointers of the streams that it was put behind."""

    null: Stream

    def __init__(self, *, non_blocking: bool = False) -> None:
        self.non_blocking = non_blocking
        self.ptr = id(self)
        self.device_id = current_device()
        self.waits: list[int | None] = []
        self.settled = 0

    def use(self) -> Stream:
        assert current_device() == self.device_id
        _here.stream = self
        return self

    def __enter__(self) -> Stream:
        _here.outer = [*getattr(_here, "outer", []), current_stream()]
        return self.use()

    def __exit__(self, *_: object) -> None:
        *_here.outer, _here.stream = _here.outer

    def wait_event(self, event: Event) -> None:
        self.waits.append(event.recorded_on)

    def synchronize(self) -> None:
        self.settled += 1


Stream.null = Stream()


def current_stream() -> Stream:
    """The stream that is current in this thread."""
    return getattr(_here, "stream", Stream.null)


@contextlib.contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer]) -> Iterator[None]:
    """In this thread."""
    outer = getattr(_here, "allocator", None)
    _here.allocator = allocator
    try:
        yield
    finally:
        _here.allocator = outer


class Memory:
    """Plain memory of the current device. `allocated` counts what was ever taken."""

    allocated = 0
    limit_bytes = 1 << 40
    last: Memory

    def __init__(self, size: int) -> None:
        if size > Memory.limit_bytes:
            raise FakeCudaError(2, "cudaErrorMemoryAllocation: out of memory")
        Memory.allocated += size
        self.size = size
        self.device_id = current_device()
        self._bytes = np.full(size + 512, 0xA5, np.uint8)  # what was there before
        self.ptr = -(-self._bytes.ctypes.data // 512) * 512
        Memory.last = self


class UnownedMemory:
    """Memory of somebody else, kept by `owner`."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def memset(self, value: int, size: int) -> None:
        ctypes.memset(self.ptr, value, size)

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        self.memset(value, size)


class _Flags:
    def __init__(self, host: np.ndarray) -> None:
        self.c_contiguous = host.flags.c_contiguous
        self.owndata = host.flags.owndata


def _bare(value: Any) -> Any:
    """What NumPy takes for an operand."""
    if isinstance(value, FakeArray):
        assert value.device.id == current_device(), "an array of another device than the current one"
        return value._host
    assert not (isinstance(value, np.ndarray) and value.ndim), "a host array among those of a GPU"
    return value


def _bare_key(key: Any) -> Any:
    return tuple(map(_bare, key)) if isinstance(key, tuple) else _bare(key)


_devices_of_addresses: dict[int, int] = {}
"""Of every array that there ever was: what the runtime knows of a pointer."""


def pointer_attributes(address: int) -> types.SimpleNamespace:
    """The runtime's call."""
    if address not in _devices_of_addresses:
        raise FakeCudaError(1, "cudaErrorInvalidValue: invalid argument")
    return types.SimpleNamespace(device=_devices_of_addresses[address])


class FakeArray:
    """An array on a GPU. What starts work there wants the GPU to be the current one, as CuPy does."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, *arguments: Any, **options: Any) -> FakeArray:
        made = super().__new__(cls)
        if options or not isinstance(arguments[0], np.ndarray):
            made._make(*arguments, **options)
        else:
            made._host, made.device = arguments[0], Device()
        _devices_of_addresses[made._host.ctypes.data] = made.device.id
        return made

    def _make(
        self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer, strides: tuple[int, ...] | None = None
    ) -> None:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize if strides is None else memptr.mem.size
        raw = (ctypes.c_uint8 * count).from_address(memptr.ptr)
        raw.kept = memptr.mem  # type: ignore[attr-defined]
        self._host = np.ndarray(shape, dtype, raw, strides=strides)
        self.device = Device(memptr.mem.device_id)

    def _sibling(self, host: Any) -> FakeArray:
        with self.device:
            return FakeArray(np.asarray(host))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._host.__array_interface__, "version": 3}

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    @property
    def data(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(ptr=self._host.ctypes.data)

    @property
    def flags(self) -> _Flags:
        return _Flags(self._host)

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    ndim = property(lambda self: self._host.ndim)
    itemsize = property(lambda self: self._host.itemsize)

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return self._host.copy()
        out[...] = self._host
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        assert isinstance(arr, np.ndarray)
        assert arr.dtype == self.dtype
        assert arr.shape == self.shape
        assert self.flags.c_contiguous
        self._host[...] = arr

    def _started(self) -> np.ndarray:
        assert self.device.id == current_device(), "work on an array of another device than the current one"
        return self._host

    def reshape(self, *shape: Any) -> FakeArray:
        return self._sibling(self._host.reshape(*shape))

    def view(self, dtype: Any) -> FakeArray:
        if np.dtype(dtype).kind not in "iufbc":
            raise TypeError(f"Unsupported dtype {dtype}")
        return self._sibling(self._host.view(dtype))

    def transpose(self, *axes: Any) -> FakeArray:
        return self._sibling(self._host.transpose(*axes))

    def copy(self) -> FakeArray:
        return self._sibling(self._started().copy())

    def astype(self, dtype: Any) -> FakeArray:
        return self._sibling(self._started().astype(dtype))

    def sum(self, **options: Any) -> Any:
        return self._sibling(self._started().sum(**options))

    def any(self, **options: Any) -> Any:
        return self._sibling(self._started().any(**options))

    def argmax(self) -> Any:
        return self._sibling(self._started().argmax())

    def __getitem__(self, key: Any) -> FakeArray:
        if any(isinstance(part, FakeArray) for part in (key if isinstance(key, tuple) else (key,))):
            self._started()
        return self._sibling(self._host[_bare_key(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._started()[_bare_key(key)] = _bare(value)

    def __len__(self) -> int:
        return len(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)


def _operator(name: str) -> Any:
    def operate(self: FakeArray, other: Any) -> Any:
        return self._sibling(getattr(self._started(), name)(_bare(other)))

    return operate


def _in_place(name: str) -> Any:
    def operate(self: FakeArray, other: Any) -> FakeArray:
        getattr(self._started(), name)(_bare(other))
        return self

    return operate


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "sub", "add"):
    setattr(FakeArray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("and", "or"):
    setattr(FakeArray, f"__i{_name}__", _in_place(f"__i{_name}__"))


BUILT_KERNELS = "HURRAYTEST_KERNELS"
"""Environment: a library of `build_kernels`, for processes that are started here."""


def build_kernels(folder: Path) -> Path:
    """The kernels as a library for the host."""
    assert _COMPILER is not None, "no C++ compiler to build the kernels with"
    library = folder / "kernels.so"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    source = Path(kernels.__file__).parent
    subprocess.run([_COMPILER, *flags, "-I", source, _HOST_SOURCE, "-o", library], check=True, timeout=100)
    return library


@functools.cache
def host_kernels() -> ctypes.CDLL:
    """The kernels, built for the host once a process."""
    built = os.environ.get(BUILT_KERNELS)
    if built is not None:
        return ctypes.CDLL(built)
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_kernels(Path(folder))))


def _argument(value: Any) -> Any:
    if isinstance(value, FakeArray):
        assert value.device.id == current_device(), "an array of another device than the current one"
        assert value.flags.c_contiguous or value.strides[-1] == value.itemsize
        return ctypes.c_void_p(value.data.ptr)
    assert isinstance(value, (np.uint64, np.uint32)), f"{type(value)} has no width"
    return (ctypes.c_uint32 if isinstance(value, np.uint32) else ctypes.c_uint64)(int(value))


class RawModule:
    """The kernels; what is compiled is the same source, by another compiler. `started`: names, in order."""

    started: ClassVar[list[str]] = []

    def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
        assert code == kernels.source()

    def get_function(self, name: str) -> Any:
        address = ctypes.c_void_p.in_dll(host_kernels(), f"host_{name}").value
        assert address

        def start(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            RawModule.started.append(name)
            # Few threads, which do more each: here they do it one after the other.
            ctypes.CFUNCTYPE(None)(address)(
                ctypes.c_uint32(min(grid[0], 3) if name != "mix64_sums" else grid[0]),
                ctypes.c_uint32(block[0]),
                *map(_argument, arguments),
            )

        return start


def _current(make: Any) -> Any:
    def made(*arguments: Any, **options: Any) -> FakeArray:
        host = np.asarray(make(*arguments, **options))
        if getattr(_here, "allocator", None) is None:
            return FakeArray(host)
        array = FakeArray(host.shape, dtype=host.dtype, memptr=_here.allocator(host.nbytes))
        array._host[...] = host
        return array

    return made


def asarray(source: Any, dtype: Any = None) -> FakeArray:
    """On the current device; a copy where it is not there."""
    if isinstance(source, FakeArray):
        return source if source.device.id == current_device() else FakeArray(source._host.copy())
    assert not hasattr(source, "__cuda_array_interface__"), "on another device than the current one it would be copied"
    host = np.asarray(source, dtype)
    if host.dtype.kind not in "iufbc":
        raise TypeError(f"Unsupported dtype {host.dtype}")
    return FakeArray(host.copy())


class Foreign:
    """Another library's array on a GPU, which speaks the interface alone."""

    def __init__(self, wrapped: FakeArray, *, read_only: bool = False, **more: Any) -> None:
        plain = wrapped.__cuda_array_interface__
        self.wrapped = wrapped
        self.__cuda_array_interface__ = {**plain, "data": (plain["data"][0], read_only), **more}


class Exported:
    """Another library's array on a GPU, which speaks DLPack alone. `streams`: which it was asked to be ahead of."""

    def __init__(self, host: np.ndarray, device_id: int, version: int = 1) -> None:
        self.host, self.device_id, self.version = host, device_id, version
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device_id

    def __dlpack__(self, *, stream: int, **options: Any) -> Any:
        if options and not self.version:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.streams.append(stream)
        return self.host.__dlpack__(**options)


def from_dlpack(source: Any) -> FakeArray:
    """Takes no notice of read-only memory, as CuPy does not."""
    try:
        source.__dlpack__(stream=current_stream().ptr, max_version=(1, 0))
    except TypeError:
        source.__dlpack__(stream=current_stream().ptr)
    with Device(source.__dlpack_device__()[1]):
        return FakeArray(source.host)


def may_share_memory(one: FakeArray, other: FakeArray) -> bool:
    return bool(np.may_share_memory(one._host, other._host))


def _pooled(nbytes: int) -> MemoryPointer:
    return MemoryPointer(Memory(nbytes), 0)


@contextlib.contextmanager
def fake_cuda(device_count: int = DEVICE_COUNT) -> Iterator[types.ModuleType]:
    """A module `cupy`, for as long as the block lasts."""
    module = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: device_count,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        eventRecord=event_record,
        pointerGetAttributes=pointer_attributes,
        getDeviceProperties=lambda number: {"name": b"none"},
        CUDARuntimeError=FakeCudaError,
    )
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        Event=Event,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        Stream=Stream,
        UnownedMemory=UnownedMemory,
        get_elapsed_time=lambda began, ended: 1.0,
        get_current_stream=current_stream,
        using_allocator=using_allocator,
        runtime=runtime,
    )
    for name in ("zeros", "empty", "full", "arange"):
        setattr(module, name, _current(getattr(np, name)))
    module.ndarray, module.RawModule, module.asarray = FakeArray, RawModule, asarray  # type: ignore[attr-defined]
    module.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    module.get_default_memory_pool = lambda: types.SimpleNamespace(malloc=_pooled)  # type: ignore[attr-defined]
    module.shares_memory = module.may_share_memory = may_share_memory  # type: ignore[attr-defined]
    before = sys.modules.get("cupy")
    _here.device, _here.stream, _here.allocator, RawModule.started = 0, Stream.null, None, []
    sys.modules["cupy"] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before


def let_ucx_take_it(patch: Callable[[Any, str, Any], object]) -> None:
    """Let UCX seem to take memory of GPUs. It does take this one's, which it knows for what it is."""
    from hurray_wire.transport import ucx

    real = ucx._transports_of
    patch(ucx, "_transports_of", lambda context: real(context) | {"cuda_ipc"})


def placed(memory: np.ndarray, before: int = 0, width: int = 16) -> FakeArray:
    """Bytes on the current device at an address that lies `before` bytes past a multiple of `width`, guarded."""
    array = guarded(memory.nbytes, before, width)
    array._host[...] = np.frombuffer(memory.tobytes(), np.uint8)
    return array


_GUARD = 64


def guarded(nbytes: int, before: int = 0, width: int = 16) -> FakeArray:
    """Memory between two guards, which `intact` looks at."""
    whole = np.full(nbytes + 2 * _GUARD + width, 0x5A, np.uint8)
    start = _GUARD + (before - whole.ctypes.data - _GUARD) % width
    array = FakeArray(whole[start : start + nbytes])
    array.guards = (whole[:start], whole[start + nbytes :])  # type: ignore[attr-defined]
    return array


def intact(*arrays: Any) -> bool:
    """Whether nothing was written beside these."""
    return all((guard == 0x5A).all() for array in arrays for guard in array.guards)
