"""Aligned memory, and arrays of other libraries seen without a copy."""

from __future__ import annotations

import array
import gc
import sys
import types
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hurray_wire.arrays import as_array
from hurray_wire.errors import InvalidSnapshot, Unsupported
from hurray_wire.memory import aligned_empty, byte_view, is_page_aligned


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("prefault", [False, True])
def test_memory_starts_at_a_page_and_is_zero_and_writable(nbytes: int, prefault: bool) -> None:
    memory = aligned_empty(nbytes, prefault=prefault)

    assert (memory.shape, memory.dtype) == ((nbytes,), np.uint8)
    assert is_page_aligned(memory)
    assert not memory.any()
    memory[:] = 7


def test_memory_is_freed_with_the_last_view_of_it() -> None:
    memory = aligned_empty(1 << 16)
    mapping = weakref.ref(memory.base.obj if isinstance(memory.base, memoryview) else memory.base)
    part = memory[100:200]
    del memory
    gc.collect()
    assert mapping() is not None

    del part
    gc.collect()
    assert mapping() is None


def test_a_shifted_view_is_not_page_aligned() -> None:
    assert not is_page_aligned(aligned_empty(8192)[16:])
    assert is_page_aligned(aligned_empty(8192)[4096:])


# --- other programs' arrays ---------------------------------------------------------------------------------------


class Interface:
    def __init__(self, wrapped: np.ndarray) -> None:
        self.__array_interface__ = wrapped.__array_interface__
        self.wrapped = wrapped


class DLPack:
    def __init__(self, wrapped: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.wrapped, self.device = wrapped, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.wrapped.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("wrap", [lambda a: a, Interface, DLPack, memoryview])
def test_arrays_of_every_protocol_are_seen_in_place(wrap: Any) -> None:
    mine = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    view = as_array(wrap(mine))

    assert (view.element_type.name, view.device_tag) == ("float32", 0)
    assert np.array_equal(view.array, mine)
    mine[1, 2, 3] = -1
    assert view.array[1, 2, 3] == -1
    assert np.shares_memory(view.array, mine)


def test_strides_stay_the_callers() -> None:
    mine = np.zeros((4, 3, 2), dtype=np.float16)

    assert as_array(Interface(mine.transpose(0, 2, 1))).array.strides == (12, 2, 4)
    assert as_array(DLPack(mine[::2])).array.strides == (24, 4, 2)


def test_a_plain_buffer_is_an_array() -> None:
    view = as_array(array.array("H", [1, 2, 3]))

    assert view.array.tolist() == [1, 2, 3]
    assert view.element_type.name == "uint16"


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(InvalidSnapshot):
        as_array(object())


def test_types_that_are_packed_or_unknown_have_no_name() -> None:
    assert as_array(np.zeros(1, dtype=ml_dtypes.int4)).element_type is None
    assert as_array(np.zeros(1, dtype=np.bool_)).element_type is None
    assert as_array(np.zeros(1, dtype=">f4")).element_type is None
    assert as_array(np.zeros(1, dtype=ml_dtypes.bfloat16)).element_type.name == "bfloat16"


def test_memory_of_unknown_devices_is_refused() -> None:
    with pytest.raises(Unsupported) as refused:
        as_array(DLPack(np.zeros(1), device=(8, 2)))

    assert refused.value.details["offered"] == "8:2"


@pytest.mark.parametrize("kind", ["interface", "dlpack"])
def test_cuda_arrays_need_cupy(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    source = DLPack(np.zeros(1), device=(2, 0))
    if kind == "interface":
        source = types.SimpleNamespace(__cuda_array_interface__={})

    with pytest.raises(Unsupported) as refused:
        as_array(source)

    assert "cupy" in refused.value.message


# --- torch: its documented interface, without it -------------------------------------------------------------------


class FakeTensor:
    """What this project uses of torch.Tensor, over a NumPy array of raw words."""

    def __init__(self, words: np.ndarray, dtype: str, device: str = "cpu", requires_grad: bool = False) -> None:
        self.words, self.dtype, self.requires_grad = words, dtype, requires_grad
        self.device = types.SimpleNamespace(type=device, index=None if device == "cpu" else 1)

    def detach(self) -> FakeTensor:
        return FakeTensor(self.words, self.dtype, self.device.type)

    def view(self, dtype: str) -> FakeTensor:
        return FakeTensor(self.words.view(dtype.removeprefix("torch.")), dtype, self.device.type)

    def numpy(self) -> np.ndarray:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if not hasattr(np, self.dtype.removeprefix("torch.")):
            raise TypeError(f"Got unsupported ScalarType {self.dtype}")
        return self.words

    def __array__(self) -> np.ndarray:
        raise AssertionError("a copy")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.SimpleNamespace(Tensor=FakeTensor, int16="torch.int16", uint8="torch.uint8")
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.mark.parametrize(
    ("dtype", "name", "words"),
    [
        ("torch.float16", "float16", np.float16),
        ("torch.int8", "int8", np.int8),
        ("torch.bfloat16", "bfloat16", np.int16),
        ("torch.float8_e4m3fn", "float8_e4m3", np.uint8),
        ("torch.float8_e5m2", "float8_e5m2", np.uint8),
        ("torch.float8_e8m0fnu", "float8_e8m0", np.uint8),
    ],
)
@pytest.mark.usefixtures("torch")
def test_torch_tensors_are_seen_in_place_with_their_type(dtype: str, name: str, words: Any) -> None:
    mine = np.zeros((3, 4), dtype=words)

    view = as_array(FakeTensor(mine, dtype, requires_grad=True))

    assert view.element_type.name == name
    assert view.array.dtype == view.element_type.numpy
    view.array.view(words)[1, 2] = 1
    assert mine[1, 2] == 1


@pytest.mark.usefixtures("torch")
def test_torch_tensors_that_numpy_cannot_hold_are_refused_by_dtype() -> None:
    with pytest.raises(Unsupported) as refused:
        as_array(FakeTensor(np.zeros(1), "torch.qint8"))
    assert refused.value.details["offered"] == "torch.qint8"
    with pytest.raises(Unsupported) as elsewhere:
        as_array(FakeTensor(np.zeros(1), "torch.float16", device="mps"))
    assert elsewhere.value.details["offered"] == "mps"


def test_real_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    mine = torch.zeros((2, 3), dtype=torch.bfloat16)

    view = as_array(mine.transpose(0, 1))

    assert (view.element_type.name, view.array.shape) == ("bfloat16", (3, 2))
    view.array[2, 1] = 1
    assert float(mine[1, 2]) == 1


# --- byte views -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buffer",
    [
        b"\x01\x02",
        bytearray(b"\x01\x02"),
        memoryview(b"\x01\x02"),
        np.array([[0x0201]], "<u2"),
        array.array("B", [1, 2]),
    ],
)
def test_any_contiguous_buffer_is_bytes(buffer: Any) -> None:
    assert byte_view(buffer).tolist() == [1, 2]


@pytest.mark.parametrize("buffer", [b"", bytearray(), np.zeros((0, 3), np.float32), memoryview(b"")])
def test_an_empty_buffer_is_no_bytes(buffer: Any) -> None:
    assert byte_view(buffer).shape == (0,)


def test_byte_views_write_through() -> None:
    scales = np.ones(2, dtype=ml_dtypes.bfloat16)

    byte_view(scales)[:] = 0

    assert scales.tolist() == [0, 0]
