"""What work on a GPU needs for itself: of RMM where that is installed, and nothing of it where a transport is given."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hurray_wire import cuda
from hurray_wire.memory import on_device_of
from support.fake_cuda import Device, FakeArray, Memory, Stream, fake_cuda


class Resource:
    """Memory of RMM's."""


class CudaMemoryResource(Resource):
    """What RMM begins with."""


class CudaAsyncMemoryResource(Resource):
    """One that streams order."""

    fails = False

    def __init__(self) -> None:
        if self.fails:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")


class Rmm:
    """What this project uses of RMM. `given`: (resource, stream, device) of each buffer."""

    def __init__(self) -> None:
        self.resources: dict[int, Resource] = {}
        self.given: list[tuple[Any, int, int]] = []
        self.streams = types.SimpleNamespace(Stream=lambda stream: stream)
        self.mr = types.SimpleNamespace(
            CudaMemoryResource=CudaMemoryResource,
            CudaAsyncMemoryResource=CudaAsyncMemoryResource,
            get_per_device_resource=lambda device_id: self.resources.get(device_id, CudaMemoryResource()),
        )

    def DeviceBuffer(self, *, size: int, stream: Stream, mr: Resource) -> Any:
        memory = Memory(size)
        self.given.append((mr, stream.ptr, memory.device_id))
        return memory


@pytest.fixture
def rmm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rmm]:
    fake = Rmm()
    monkeypatch.setitem(sys.modules, "rmm", fake)
    monkeypatch.setitem(sys.modules, "rmm.pylibrmm.stream", fake.streams)
    monkeypatch.setattr(CudaAsyncMemoryResource, "fails", False)
    with fake_cuda() as module:
        fake.cupy = module  # type: ignore[attr-defined]
        yield fake


def test_scratch_is_rmms_in_the_order_of_our_stream(rmm: Rmm) -> None:
    place = cuda.gpu(1)

    scratch = place.scratch(1000)
    again = place.scratch(10)

    assert (scratch.size, scratch.dtype, scratch.device.id) == (1000, np.uint8, 1)
    (first, stream, device), (second, _, _) = rmm.given
    assert isinstance(first, CudaAsyncMemoryResource)
    assert first is second
    assert (stream, device) == (place.stream.ptr, 1)
    assert again is not None


def test_a_resource_that_the_process_has_set_is_used(rmm: Rmm) -> None:
    rmm.resources[1] = Resource()

    scratch = [cuda.gpu(number).scratch(10) for number in (0, 1)]

    assert len(scratch) == 2
    assert isinstance(rmm.given[0][0], CudaAsyncMemoryResource)
    assert rmm.given[1][0] is rmm.resources[1]


def test_where_streams_order_no_memory_cupys_pool_does(rmm: Rmm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaAsyncMemoryResource, "fails", True)

    assert isinstance(cuda.gpu().scratch(10), FakeArray)
    assert rmm.given == []


def test_without_rmm_it_is_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rmm", None)
    with fake_cuda() as module, cuda.gpu(1).work():
        module.cuda.using_allocator = None
        assert cuda.gpu(1).scratch(10).device.id == 1


def test_what_a_transport_is_given_is_never_rmms(rmm: Rmm) -> None:
    place = cuda.gpu()

    with place.work():
        given = place.take(3 << 20)

    assert isinstance(given, FakeArray)
    assert rmm.given == []


def test_all_work_inside_takes_scratch_and_nothing_else_does(rmm: Rmm) -> None:
    place, host = cuda.gpu(1), np.arange(10)
    with Device(1):
        array = rmm.cupy.zeros(3)  # type: ignore[attr-defined]
    assert rmm.given == []

    with place.work():
        assert rmm.cupy.cuda.get_current_stream() is place.stream  # type: ignore[attr-defined]
        rmm.cupy.zeros(3)  # type: ignore[attr-defined]
        place.enter()  # as payloads do
        settled = place.stream.settled

    assert len(rmm.given) == 1
    assert place.stream.settled == settled + 1
    assert rmm.cupy.cuda.Device().id == 0  # type: ignore[attr-defined]
    assert rmm.cupy.cuda.get_current_stream() is Stream.null  # type: ignore[attr-defined]
    on_device_of(array, host)
    rmm.cupy.zeros(3)  # type: ignore[attr-defined]
    assert len(rmm.given) == 1


def test_a_thread_of_ours_takes_scratch_of_whichever_gpu_it_is_on(rmm: Rmm) -> None:
    def run() -> None:
        for number in (0, 1, 0):
            cuda.gpu(number).enter()
            rmm.cupy.zeros(3)  # type: ignore[attr-defined]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert [device for _, _, device in rmm.given] == [0, 1, 0]
    rmm.cupy.zeros(3)  # type: ignore[attr-defined]
    assert len(rmm.given) == 3
