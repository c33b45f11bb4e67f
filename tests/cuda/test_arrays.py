"""Arrays of other libraries on a GPU: seen in place, behind what was started there, and not written to unasked."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hurray_wire import cuda
from hurray_wire.arrays import as_array
from hurray_wire.destination import Destination
from hurray_wire.errors import InvalidSnapshot, Unsupported
from hurray_wire.snapshot import KVSnapshot
from support.fake_cuda import Device, Exported, FakeArray, Foreign, Stream, current_device, fake_cuda, placed


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cuda() as module:
        yield module


@pytest.fixture
def theirs(cupy: Any) -> FakeArray:
    """On another GPU than the current one."""
    with Device(1):
        return placed(np.arange(24, dtype=np.uint16)).view(np.uint16).reshape(2, 3, 4)


def test_cupys_arrays_are_taken_as_they_are(theirs: FakeArray) -> None:
    view = as_array(theirs)

    assert view.array is theirs
    assert (view.device_tag, view.device_id, view.element_type.name) == (1, 1, "uint16")  # type: ignore[union-attr]
    assert not view.read_only


def test_an_array_of_the_interface_is_seen_in_place_with_its_strides(theirs: FakeArray) -> None:
    view = as_array(Foreign(theirs.transpose(0, 2, 1)))

    assert (view.device_tag, view.device_id, view.element_type.name) == (1, 1, "uint16")  # type: ignore[union-attr]
    assert (view.array.shape, view.array.strides) == ((2, 4, 3), (24, 2, 8))
    with Device(1):
        view.array[1, 3, 2] = 7
    assert theirs.get()[1, 2, 3] == 7
    assert current_device() == 0


@pytest.mark.parametrize("stream", [None, 1, 2, 0x7F00])
def test_work_is_put_behind_the_stream_of_the_interface_by_an_event(theirs: FakeArray, stream: int | None) -> None:
    waits, settled = cuda.gpu(1).stream.waits, Stream.null.settled

    as_array(Foreign(theirs))
    assert waits == []
    as_array(Foreign(theirs, stream=stream))

    assert waits == ([] if stream is None else [stream])
    assert (cuda.gpu(1).stream.settled, Stream.null.settled) == (0, settled)


def test_an_interface_that_cannot_be_read_is_refused(theirs: FakeArray) -> None:
    with pytest.raises(InvalidSnapshot) as ambiguous:
        as_array(Foreign(theirs, stream=0))
    with pytest.raises(Unsupported, match="masked"):
        as_array(Foreign(theirs, mask=theirs))
    with pytest.raises(Unsupported, match="CuPy does not take"):
        as_array(Foreign(theirs, typestr="<u99"))
    with pytest.raises(Unsupported, match="CuPy does not take"):
        as_array(types.SimpleNamespace(__cuda_array_interface__={"shape": (1,), "data": (64, False), "typestr": "|u1"}))

    assert ambiguous.value.field == "stream"


def test_an_array_of_nothing_has_no_address(cupy: Any) -> None:
    nothing = {"shape": (0, 4), "data": (0, False), "typestr": "<f2", "version": 3, "strides": None}

    view = as_array(types.SimpleNamespace(__cuda_array_interface__=nothing))

    assert (view.array.shape, view.device_id) == ((0, 4), 0)


@pytest.mark.parametrize("version", [0, 1])
def test_dlpack_is_told_our_stream(cupy: Any, version: int) -> None:
    exported = Exported(np.arange(6, dtype=np.float16).reshape(2, 3)[:, ::2], 1, version)

    view = as_array(exported)

    assert set(exported.streams) == {cuda.gpu(1).stream.ptr}
    assert (view.array.strides, view.device_tag, view.device_id) == ((6, 4), 1, 1)
    assert not view.read_only
    assert cupy.cuda.get_current_stream() is Stream.null


def test_torch_is_told_our_stream(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.zeros(4, np.int16)

    class Tensor(Exported):
        dtype, device = "torch.bfloat16", types.SimpleNamespace(type="cuda", index=1)

        def detach(self) -> Any:
            return types.SimpleNamespace(view=lambda dtype: self if dtype == "int16" else None)

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, int16="int16"))
    tensor = Tensor(words, 1)

    view = as_array(tensor)

    assert tensor.streams == [cuda.gpu(1).stream.ptr]
    assert (view.element_type.name, view.device_tag, view.device_id) == ("bfloat16", 1, 1)  # type: ignore[union-attr]
    assert view.array.dtype == np.int16


def locked(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("kind", ["interface", "dlpack", "numpy"])
def test_what_is_read_only_is_put_and_never_written(cupy: Any, kind: str) -> None:
    words = np.zeros((3, 4, 2, 8), np.float16)
    pools = {
        "interface": lambda: Foreign(placed(words).view(np.float16).reshape(words.shape), read_only=True),
        "dlpack": lambda: Exported(locked(words.copy()), 0),
        "numpy": lambda: locked(words.copy()),
    }
    made = [pools[kind]() for _ in range(2)]
    caches = {(0, "key"): made[0], (0, "value"): made[1]}

    assert as_array(made[0]).read_only
    KVSnapshot.from_paged(caches, block_tables=[[0]], token_counts=[1])
    with pytest.raises(InvalidSnapshot, match="layer 0 key is read-only"):
        Destination.from_paged(caches, block_tables=[[0]])
