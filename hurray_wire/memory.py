"""Places: host memory at page boundaries, what a GPU's is to the rest of the project, and bytes of either kind.

Address matters: a destination 16 bytes past the source's offset in a page takes a gather from 8 to 1.8 GB/s, and
`np.empty` starts there. Everything this project allocates for page pools starts at a multiple of 4096.
"""

from __future__ import annotations

import importlib
import mmap
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from .errors import Unsupported
from .limits import PAGE_BYTES
from .memfd import HUGE_PAGE_BYTES

DEVICE_CPU: Final = 0x00
DEVICE_CUDA: Final = 0x01
STANDARD: Final = 0x00
"""The memory class of plain memory of its device."""


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

    def scratch(self, nbytes: int) -> Any:
        """uint8 [nbytes] for work in between, which no transport may be given. Raises OSError or MemoryError."""

    def enter(self) -> None:
        """What this thread, one of our own, starts there from here on is done in the order in which it was started."""

    def settle(self) -> None:
        """Wait until it is done."""

    def work(self) -> AbstractContextManager[None]:
        """The same for any thread: what it starts inside is done there, in order, and over when the block ends. What
        was current in the thread before is so again then."""


class _Host:
    """The host: everything is done at once."""

    device_tag: ClassVar[int] = DEVICE_CPU
    memory_class: ClassVar[int] = STANDARD

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See Place."""
        return huge_empty(nbytes)

    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See Place."""
        return aligned_empty(nbytes)

    def enter(self) -> None:
        """See Place."""

    def settle(self) -> None:
        """See Place."""

    def work(self) -> AbstractContextManager[None]:
        """See Place."""
        return nullcontext()


HOST: Final[Place] = _Host()


def device_of(array: Any) -> tuple[int, int]:
    """Device tag and number of the device that an array is on."""
    return (DEVICE_CUDA, int(array.device.id)) if is_on_device(array) else (DEVICE_CPU, 0)


def device_name(device: tuple[int, int]) -> str:
    """As callers name it: "cpu", "cuda:1"."""
    return f"cuda:{device[1]}" if device[0] == DEVICE_CUDA else "cpu"


def is_page_aligned(array: npt.NDArray[Any]) -> bool:
    """True if the array's first byte is at a multiple of 4096, or it has none."""
    return array.nbytes == 0 or array.ctypes.data % PAGE_BYTES == 0


def array_module(array: object) -> Any:
    """The module whose functions take this array: numpy, or cupy for an array of its own."""
    return np if isinstance(array, np.ndarray) else load_cupy()


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
            if isinstance(source, np.ndarray):
                target.set(source)
            else:
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


def load_cupy() -> Any:
    """CuPy, by name, when an array of a CUDA device arrives: nothing on this level depends on CUDA. Raises Unsupported
    where it cannot be loaded."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise Unsupported(
            "arrays of a CUDA device need cupy: install hurray-transfer[cuda12] or [cuda13]",
            field="device",
            offered="cuda",
        ) from error
