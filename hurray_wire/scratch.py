"""What work on a GPU needs for itself, and no transport is ever given: of RMM where that is installed, else of CuPy.

RMM's memory is ordered by streams and shared with whatever else of the process uses RMM. It is asked for in our own
threads and blocks alone: nobody's settings change.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Allocator = Callable[[int], Any]
"""As CuPy wants it: so many bytes of the current device, for the current stream, as a MemoryPointer."""


def rmm_allocator(cupy: Any) -> Allocator | None:
    """None where this process cannot load RMM."""
    try:
        rmm, streams = importlib.import_module("rmm"), importlib.import_module("rmm.pylibrmm.stream")
    except Exception:  # whatever its libraries raise: CuPy's memory will do
        return None
    return _RmmScratch(cupy, rmm, streams.Stream)


class _RmmScratch:
    """What RMM gives out on a device: from the resource that the process has set there. RMM's first one takes and frees
    memory by cudaMalloc and cudaFree, which waits for the whole device each time: it is left alone for one of our own,
    ordered by streams. Where the driver has no such, CuPy's pool."""

    def __init__(self, cupy: Any, rmm: Any, make_stream: Callable[[Any], Any]) -> None:
        self._cupy = cupy
        self._rmm = rmm
        self._make_stream = make_stream
        self._own: dict[int, Any] = {}

    def __call__(self, nbytes: int) -> Any:
        cuda = self._cupy.cuda
        device_id = cuda.Device().id
        resource = self._resource(device_id)
        if resource is None:
            return self._cupy.get_default_memory_pool().malloc(nbytes)
        stream = self._make_stream(cuda.get_current_stream())
        buffer = self._rmm.DeviceBuffer(size=nbytes, stream=stream, mr=resource)
        return cuda.MemoryPointer(cuda.UnownedMemory(buffer.ptr, nbytes, buffer, device_id), 0)

    def _resource(self, device_id: int) -> Any | None:
        found = self._rmm.mr.get_per_device_resource(device_id)
        if not isinstance(found, self._rmm.mr.CudaMemoryResource):
            return found
        if device_id not in self._own:
            try:
                self._own[device_id] = self._rmm.mr.CudaAsyncMemoryResource()
            except (RuntimeError, MemoryError):
                self._own[device_id] = None
        return self._own[device_id]
