"""Host memory at page boundaries, and other programs' arrays seen without a copy.

Address matters: a destination 16 bytes past the source's offset in a page takes a gather from 8 to 1.8 GB/s, and
`np.empty` starts there. Everything this project allocates for page pools starts at a multiple of 4096.
"""

from __future__ import annotations

import importlib
import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from .dtypes import BY_NAME, ElementType, from_numpy
from .errors import InvalidSnapshot, Unsupported
from .limits import PAGE_BYTES
from .memfd import HUGE_PAGE_BYTES

DEVICE_CPU: Final = 0x00
DEVICE_CUDA: Final = 0x01
STANDARD: Final = 0x00
"""The memory class of plain memory of its device."""

# DLPack's device types (dlpack.h): memory that the host can read, and memory of a CUDA device.
_DLPACK_HOST: Final = frozenset({1, 3, 11})
_DLPACK_CUDA: Final = frozenset({2, 13})

# Torch dtypes that NumPy does not know: the format's name, and the torch dtype of equal width that NumPy does know.
_TORCH_RAW: Final = {
    "torch.bfloat16": ("bfloat16", "int16"),
    "torch.float8_e4m3fn": ("float8_e4m3", "uint8"),
    "torch.float8_e5m2": ("float8_e5m2", "uint8"),
    "torch.float8_e8m0fnu": ("float8_e8m0", "uint8"),
}


def aligned_empty(nbytes: int, *, prefault: bool = False) -> npt.NDArray[np.uint8]:
    """`nbytes` of zero bytes at an address that is a multiple of 4096, freed with the last reference to the array.

    `prefault` touches every page now: the first touch of fresh memory is far slower than any copy that follows.
    """
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if prefault:
        flags |= getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=np.uint8)


def huge_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """As `aligned_empty`, in huge pages where the system has them: their first touch is several times faster."""
    return aligned_empty(nbytes) if nbytes < HUGE_PAGE_BYTES else map_huge(nbytes)[1]


def map_huge(nbytes: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """Zero bytes in huge pages where the system has them: a mapping, and the uint8 [nbytes] of it that begin with one.

    Raises OSError where the system has no memory.
    """
    size = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return mapping, whole[start : start + nbytes]


class Place(Protocol):
    """Where a process keeps bytes: its host, or one of its GPUs. `device_tag` and `memory_class` are the format's."""

    @property
    def device_tag(self) -> int: ...
    @property
    def memory_class(self) -> int: ...

    def take(self, nbytes: int) -> Any:
        """uint8 [nbytes], page-aligned. Raises OSError or MemoryError where there is no memory."""

    def enter(self) -> None:
        """What this thread starts there from here on is done in the order in which it was started."""

    def settle(self) -> None:
        """Wait until it is done."""


class _Host:
    """The host: everything is done at once."""

    device_tag: ClassVar[int] = DEVICE_CPU
    memory_class: ClassVar[int] = STANDARD

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See Place."""
        return huge_empty(nbytes)

    def enter(self) -> None:
        """See Place."""

    def settle(self) -> None:
        """See Place."""


HOST: Final[Place] = _Host()


def device_of(array: Any) -> tuple[int, int]:
    """Device tag and number of the device that an array is on."""
    return (DEVICE_CUDA, int(array.device.id)) if is_on_device(array) else (DEVICE_CPU, 0)


def is_page_aligned(array: npt.NDArray[Any]) -> bool:
    """True if the array's first byte is at a multiple of 4096, or it has none."""
    return array.nbytes == 0 or array.ctypes.data % PAGE_BYTES == 0


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """A caller's array without a copy: shape and strides are the caller's, and writing to it writes there.

    `array` is a NumPy or CuPy array. `element_type` is the format's type of its values: known even where the
    array itself holds raw words of that width (torch bfloat16), None where the format has no such type or packs it.
    """

    array: Any
    element_type: ElementType | None
    device_tag: int = DEVICE_CPU
    device_id: int = 0


def as_array(source: object) -> ArrayView:
    """See `source` as an array, without a copy.

    Takes NumPy and CuPy arrays, torch tensors (bfloat16 and 8-bit floats too) and whatever speaks
    __cuda_array_interface__, __array_interface__, DLPack or the buffer protocol.

    Raises InvalidSnapshot for anything else, Unsupported for memory of a device or a dtype that is not taken.
    """
    if isinstance(source, np.ndarray):
        return ArrayView(source, from_numpy(source.dtype))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.Tensor):
        return _from_torch(torch, source)
    if hasattr(source, "__cuda_array_interface__"):
        cupy = _cupy()
        # CuPy would copy an array of its own from another GPU to the current one.
        return _on_cuda(source if isinstance(source, cupy.ndarray) else cupy.asarray(source))
    if hasattr(source, "__dlpack__"):
        return _from_dlpack(source)
    if hasattr(source, "__array_interface__"):
        array = np.asarray(source)
        return ArrayView(array, from_numpy(array.dtype))
    try:
        view = memoryview(source)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidSnapshot(
            "not an array: neither NumPy, CuPy, torch, DLPack nor the buffer protocol",
            field="caches",
            offered=type(source).__name__,
        ) from None
    array = np.asarray(view)
    return ArrayView(array, from_numpy(array.dtype))


def array_module(array: object) -> Any:
    """The module whose functions take this array: numpy, or cupy for an array of its own."""
    return np if isinstance(array, np.ndarray) else _cupy()


def is_on_device(buffer: object) -> bool:
    """Whether this is an array of a CUDA device; host buffers of any kind are not."""
    return hasattr(buffer, "__cuda_array_interface__")


def to_host(array: Any) -> npt.NDArray[Any]:
    """A NumPy array of the same values: the array itself, or a copy of one on a device."""
    return array if isinstance(array, (np.ndarray, np.generic)) else array.get()  # type: ignore[return-value]


def on_device_of(array: Any, host: Any) -> Any:
    """A host array on the GPU of `array`; one that is there already stays."""
    with array.device:
        return array_module(array).asarray(host)


def empty_beside(array: Any, nbytes: int) -> Any:
    """uint8 [nbytes] on the GPU of `array`, for work in between."""
    with array.device:
        return array_module(array).empty(nbytes, dtype=np.uint8)


def copy_into(target: Any, source: Any) -> None:
    """Copy contiguous bytes, uint8 [n], to others, whichever of the two are on a GPU."""
    if is_on_device(target):
        with target.device:
            target[...] = on_device_of(target, source)
    else:
        target[...] = to_host(source)


def byte_view(buffer: Any) -> npt.NDArray[np.uint8]:
    """Any contiguous buffer (bytes, bytearray, memoryview, an array of the host or a GPU) as one-dimensional uint8,
    without a copy. Writable where the buffer is.
    """
    if isinstance(buffer, np.ndarray) or is_on_device(buffer):
        assert buffer.flags.c_contiguous
        flat: npt.NDArray[np.uint8] = buffer.reshape(-1).view(np.uint8)
        return flat
    view = memoryview(buffer)
    return np.frombuffer(view.cast("B") if view.nbytes else b"", dtype=np.uint8)


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
        array = plain.numpy() if device == "cpu" else _cupy().from_dlpack(plain)
    except (TypeError, RuntimeError, BufferError) as error:
        raise Unsupported(f"torch does not give out this tensor: {error}", field="dtype", offered=name) from error
    if element_type is None:
        element_type = from_numpy(np.dtype(array.dtype))
    elif device == "cpu":
        array = array.view(element_type.numpy)
    if device == "cuda":
        return ArrayView(array, element_type, DEVICE_CUDA, int(tensor.device.index or 0))
    return ArrayView(array, element_type)


def _from_dlpack(source: Any) -> ArrayView:
    device_type, device_id = (int(part) for part in source.__dlpack_device__())
    if device_type in _DLPACK_CUDA:
        return _on_cuda(_cupy().from_dlpack(source))
    if device_type not in _DLPACK_HOST:
        raise Unsupported(
            "memory of this DLPack device is not taken",
            field="device",
            offered=f"{device_type}:{device_id}",
            required="host (1, 3) or cuda (2, 13)",
        )
    try:
        array = np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as error:
        raise Unsupported(f"NumPy does not take this array: {error}", field="dtype") from error
    return ArrayView(array, from_numpy(array.dtype))


def _on_cuda(array: Any) -> ArrayView:
    return ArrayView(array, from_numpy(np.dtype(array.dtype)), DEVICE_CUDA, int(array.device.id))


def _cupy() -> Any:
    # By name, when an array of a CUDA device arrives: nothing on this level depends on CUDA.
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise Unsupported(
            "arrays of a CUDA device need cupy: install hurray-transfer[cuda12] or [cuda13]",
            field="device",
            offered="cuda",
        ) from error
