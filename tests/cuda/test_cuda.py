"""GPUs as places: why there are none, memory that UCX may share, the order of streams, and short messages."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hurray_wire import cuda
from hurray_wire.errors import InvalidRequest, Unsupported
from hurray_wire.memory import copy_into, device_of
from hurray_wire.transport.ucx import _Seal, reaches_gpus
from hurray_wire.transport.ucx_config import UcxConfig, with_cuda
from support.fake_cuda import (
    Device,
    FakeArray,
    FakeCudaError,
    Memory,
    Stream,
    fake_cuda,
    guarded,
    placed,
)


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cuda() as module:
        yield module


# --- why there is none ------------------------------------------------------------------------------------------------


def refusing(module: Any, status: int, *, driver: int) -> None:
    def count() -> int:
        raise FakeCudaError(status, "cudaError: so it is")

    module.cuda.runtime.getDeviceCount = count
    module.cuda.runtime.driverGetVersion = lambda: driver


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    assert "hurray-transfer[cuda12]" in str(cuda.why_no_cuda())
    assert not cuda.in_use()
    with pytest.raises(Unsupported) as refused:
        cuda.gpu()
    assert (refused.value.field, refused.value.details["offered"]) == ("device", "cuda:0")


@pytest.mark.parametrize(
    ("status", "driver", "why"),
    [
        (35, 0, "no NVIDIA driver"),
        (35, 12020, "driver is for CUDA 12.2, cupy for 13.0: update the driver, or install hurray-transfer[cuda12]"),
        (100, 13000, "shows no GPU"),
        (999, 13000, "cudaError: so it is"),
    ],
)
def test_a_host_without_a_gpu_says_why(cupy: Any, status: int, driver: int, why: str) -> None:
    refusing(cupy, status, driver=driver)

    assert why in str(cuda.why_no_cuda())
    with pytest.raises(Unsupported) as refused:
        cuda.gpu()
    assert why in refused.value.message


def test_a_gpu_that_is_there_needs_no_reason(cupy: Any) -> None:
    assert cuda.why_no_cuda() is None
    assert cuda.in_use()
    assert cuda.gpu(1) is cuda.gpu(1)
    with pytest.raises(Unsupported) as refused:
        cuda.gpu(2)
    assert refused.value.details["required"] == "cuda:0 to cuda:1"
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    assert "shows no GPU" in str(cuda.why_no_cuda())


@pytest.mark.parametrize(("name", "number"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:13", 13)])
def test_devices_have_names(name: str, number: int | None) -> None:
    assert cuda.read_device(name) == number


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:12345", "cpu:0", "CUDA:0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        cuda.read_device(name)


def test_ucx_is_told_of_gpus_once() -> None:
    assert with_cuda(UcxConfig()).tls == ("tcp", "cuda")
    assert with_cuda(UcxConfig(tls=("tcp", "cuda_ipc"))).tls == ("tcp", "cuda_ipc")


@pytest.mark.parametrize(
    ("transports", "devices", "reaches"),
    [
        ("tcp cma self", ["lo"], False),
        ("tcp cuda_copy", ["lo"], False),
        ("tcp cuda_copy cuda_ipc", ["lo"], True),
        ("tcp cuda_copy cuda_ipc", ["eth0"], False),  # UCX would go through the host, and not say so
        ("tcp cuda_copy cuda_ipc", ["lo", "eth0"], False),
        ("tcp cuda_copy cuda_ipc rc_mlx5", ["mlx5_0:1"], True),
        ("tcp rc_mlx5", ["mlx5_0:1"], False),
    ],
)
def test_ucx_is_given_memory_of_gpus_where_it_goes_without_the_host(
    transports: str, devices: list[str], reaches: bool
) -> None:
    assert reaches_gpus(transports.split(), devices) == reaches


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_plain_aligned_and_clear_when_it_is_new(cupy: Any) -> None:
    taken = cuda.gpu(1).take(1_000_000)

    assert (taken.size, taken.dtype, taken.device.id) == (1_000_000, np.uint8, 1)
    assert taken.data.ptr % cuda.ALIGNMENT == 0
    assert not Memory.last._bytes[Memory.last.ptr - Memory.last._bytes.ctypes.data :][: Memory.last.size].any()


def test_memory_is_used_again_once_nobody_has_it(cupy: Any) -> None:
    place = cuda.gpu()
    taken = place.take(5 << 20)
    taken[0] = 7
    part, address = taken[10:20], taken.data.ptr
    allocated = Memory.allocated

    del taken
    assert place.take(5 << 20).data.ptr != address
    del part
    gc.collect()

    assert place.take(5 << 20).data.ptr == address
    assert Memory.allocated > allocated
    place.memory.close()


def test_memory_that_is_not_there_is_a_memory_error(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "limit_bytes", 1 << 20)

    with pytest.raises(MemoryError):
        cuda.gpu().take(2 << 20)


def test_bytes_go_from_anywhere_to_anywhere(cupy: Any) -> None:
    host = np.arange(100, dtype=np.uint8)
    with Device(1):
        there = guarded(100)
    here = guarded(100)

    copy_into(there, host)
    copy_into(here, there)
    back = np.zeros(100, np.uint8)
    copy_into(back, here)

    assert np.array_equal(back, host)
    assert (device_of(there), device_of(here), device_of(back)) == ((1, 1), (1, 0), (0, 0))


# --- streams ----------------------------------------------------------------------------------------------------------


def test_work_follows_the_callers_stream_whoever_made_it(cupy: Any) -> None:
    place = cuda.gpu(1)
    before = len(place.stream.waits)

    place.follow(0x77)
    place.follow(types.SimpleNamespace(ptr=0x78))
    place.follow(types.SimpleNamespace(cuda_stream=0x79))
    place.follow(types.SimpleNamespace(__cuda_stream__=lambda: (0, 0x7A)))

    assert place.stream.waits[before:] == [0x77, 0x78, 0x79, 0x7A]
    assert place.stream.non_blocking
    for wrong in ("0", True, object()):
        with pytest.raises(InvalidRequest):
            place.follow(wrong)


def test_work_follows_the_streams_that_are_current(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_initialized=lambda: True, current_stream=lambda number: types.SimpleNamespace(cuda_stream=0x500 + number)
        )
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    place = cuda.gpu(1)

    place.follow()

    assert place.stream.waits[-2:] == [Stream.null.ptr, 0x501]


# --- short messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [True, False])
def test_a_message_that_is_shorter_leaves_the_seal(cupy: Any, on_device: bool) -> None:
    before = np.arange(64, dtype=np.uint8)
    buffer: Any = placed(before) if on_device else before.copy()
    seal = _Seal(buffer)

    buffer[:48] = 1
    assert seal.break_off()
    after = buffer.get() if on_device else buffer
    assert np.array_equal(after[48:], before[48:])
    assert isinstance(buffer, FakeArray) == on_device


@pytest.mark.parametrize("on_device", [True, False])
def test_a_whole_message_breaks_the_seal(cupy: Any, on_device: bool) -> None:
    buffer: Any = guarded(64) if on_device else np.zeros(64, np.uint8)
    seal = _Seal(buffer)

    buffer[:] = 3

    assert not seal.break_off()
    assert ((buffer.get() if on_device else buffer) == 3).all()
