"""Other programs' arrays, seen without a copy: those of NumPy, CuPy and torch, and what speaks a protocol of theirs.

What another library started on a GPU comes first: its stream is waited for by this project's, with an event, as soon as
the array is seen. CuPy's own arrays have no such stream; work on them follows the one that is current (`Gpu.follow`).
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .cuda import gpu
from .dtypes import BY_NAME, ElementType, from_numpy
from .errors import InvalidSnapshot, Unsupported
from .memory import DEVICE_CPU, DEVICE_CUDA, load_cupy

# DLPack's device types (dlpack.h): memory that the host can read, and memory of a CUDA device.
_DLPACK_HOST: Final = frozenset({1, 3, 11})
_DLPACK_CUDA: Final = frozenset({2, 13})

_DLPACK_VERSIONED: Final = b"dltensor_versioned"
_DLPACK_FLAGS_OFFSET: Final = 24
"""Of the flags in DLManagedTensorVersioned: behind the version, two u32, and two pointers. Bit 0 means read-only."""

_CAPSULE: Final = (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid: Final = ctypes.PYFUNCTYPE(ctypes.c_int, *_CAPSULE)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_CAPSULE)(("PyCapsule_GetPointer", ctypes.pythonapi))

# Torch dtypes that NumPy does not know: the format's name, and the torch dtype of equal width that NumPy does know.
_TORCH_RAW: Final = {
    "torch.bfloat16": ("bfloat16", "int16"),
    "torch.float8_e4m3fn": ("float8_e4m3", "uint8"),
    "torch.float8_e5m2": ("float8_e5m2", "uint8"),
    "torch.float8_e8m0fnu": ("float8_e8m0", "uint8"),
}


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """A caller's array without a copy: shape and strides are the caller's, and writing to it writes there.

    `array` is a NumPy or CuPy array. `element_type` is the format's type of its values: known even where the
    array itself holds raw words of that width (torch bfloat16), None where the format has no such type or packs it.
    `read_only`: whoever gave it out does not want it written to. CuPy's arrays do not tell by themselves.
    """

    array: Any
    element_type: ElementType | None
    device_tag: int = DEVICE_CPU
    device_id: int = 0
    read_only: bool = False


def as_array(source: object) -> ArrayView:
    """See `source` as an array, without a copy.

    Takes NumPy and CuPy arrays, torch tensors (bfloat16 and 8-bit floats too) and whatever speaks
    __cuda_array_interface__, __array_interface__, DLPack or the buffer protocol.

    Raises InvalidSnapshot for anything else, Unsupported for memory of a device or a dtype that is not taken.
    """
    if isinstance(source, np.ndarray):
        return _on_host(source)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.Tensor):
        return _from_torch(torch, source)
    if hasattr(source, "__cuda_array_interface__"):
        return _from_cuda_interface(source)
    if hasattr(source, "__dlpack__"):
        return _from_dlpack(source)
    if hasattr(source, "__array_interface__"):
        return _on_host(np.asarray(source))
    try:
        view = memoryview(source)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidSnapshot(
            "not an array: neither NumPy, CuPy, torch, DLPack nor the buffer protocol",
            field="caches",
            offered=type(source).__name__,
        ) from None
    return _on_host(np.asarray(view))


def _on_host(array: Any) -> ArrayView:
    return ArrayView(array, from_numpy(array.dtype), read_only=not array.flags.writeable)


def _on_cuda(array: Any, *, read_only: bool = False) -> ArrayView:
    return ArrayView(array, from_numpy(np.dtype(array.dtype)), DEVICE_CUDA, int(array.device.id), read_only)


def _from_torch(torch: Any, tensor: Any) -> ArrayView:
    name = str(tensor.dtype)
    device = str(tensor.device.type)
    if device not in ("cpu", "cuda"):
        raise Unsupported("torch tensors are taken from cpu and cuda", field="device", offered=device)
    plain = tensor.detach()
    element_type = None
    if name in _TORCH_RAW:
        known, raw = _TORCH_RAW[name]
        element_type = BY_NAME[known]
        plain = plain.view(getattr(torch, raw))
    try:
        if device == "cuda":
            with gpu(int(tensor.device.index or 0)).current():
                seen = _on_cuda(load_cupy().from_dlpack(plain))
            return seen if element_type is None else ArrayView(seen.array, element_type, DEVICE_CUDA, seen.device_id)
        array = plain.numpy()
    except (TypeError, RuntimeError, BufferError, ValueError) as error:
        raise Unsupported(f"torch does not give out this tensor: {error}", field="dtype", offered=name) from error
    if element_type is None:
        return _on_host(array)
    return ArrayView(array.view(element_type.numpy), element_type)


def _from_cuda_interface(source: Any) -> ArrayView:
    """The interface's version 3: `stream` None, or left out, wants no order; 1 and 2 are CUDA's default streams."""
    cupy = load_cupy()
    if isinstance(source, cupy.ndarray):
        return _on_cuda(source)
    interface: dict[str, Any] = source.__cuda_array_interface__
    stream, shape, strides = interface.get("stream"), interface["shape"], interface.get("strides")
    if interface.get("mask") is not None:
        raise Unsupported("masked arrays are not taken", field="caches", offered=type(source).__name__)
    if stream == 0:
        raise InvalidSnapshot(
            "stream 0 of __cuda_array_interface__ may be either default stream",
            field="stream",
            offered=0,
            required="None, 1 (legacy), 2 (per thread) or a stream's pointer",
        )
    address, read_only = interface["data"]
    try:
        dtype = np.dtype(interface["typestr"])
        # Without bytes there is no address to ask about.
        nothing = 0 in shape
        device_id = cupy.cuda.Device().id if nothing else cupy.cuda.runtime.pointerGetAttributes(address).device
        place = gpu(int(device_id))
        memory = cupy.cuda.UnownedMemory(address, _reach(shape, strides, dtype.itemsize), source, place.device_id)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        with cupy.cuda.Device(place.device_id):
            array = cupy.ndarray(tuple(shape), dtype=dtype, memptr=pointer, strides=strides)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Unsupported(f"CuPy does not take this array: {error}", field="dtype") from error
    if stream is not None:
        place.follow(stream)
    return _on_cuda(array, read_only=bool(read_only))


def _reach(shape: Sequence[int], strides: Sequence[int] | None, item_bytes: int) -> int:
    """Bytes from an array's first element to the end of its farthest one."""
    if strides is None:
        return math.prod(shape) * item_bytes
    return item_bytes + sum((size - 1) * max(step, 0) for size, step in zip(shape, strides, strict=True))


def _from_dlpack(source: Any) -> ArrayView:
    device_type, device_id = (int(part) for part in source.__dlpack_device__())
    if device_type not in _DLPACK_HOST | _DLPACK_CUDA:
        raise Unsupported(
            "memory of this DLPack device is not taken",
            field="device",
            offered=f"{device_type}:{device_id}",
            required="host (1, 3) or cuda (2, 13)",
        )
    try:
        if device_type in _DLPACK_HOST:
            return _on_host(np.from_dlpack(source))
        with gpu(device_id).current() as stream:
            # CuPy gives the exporter the stream that is current, for it to be behind what has been started there.
            array = load_cupy().from_dlpack(source)
            return _on_cuda(array, read_only=_dlpack_is_read_only(source, stream))
    except (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise Unsupported(f"this DLPack array is not taken: {error}", field="dtype") from error


def _dlpack_is_read_only(source: Any, stream: int) -> bool:
    """What an exporter of DLPack 1.0 says; CuPy does not look. Older ones cannot say it."""
    try:
        capsule = source.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        return False
    if not _capsule_is_valid(capsule, _DLPACK_VERSIONED):
        return False
    tensor = _capsule_pointer(capsule, _DLPACK_VERSIONED)
    return bool(ctypes.c_uint64.from_address(tensor + _DLPACK_FLAGS_OFFSET).value & 1)
