"""Whole transfers from and to pages on a GPU, through two data planes, with the GPU's kernels built for the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.pair import Pair
from hurray_wire import cuda
from hurray_wire.checksum import MIX64, XXH3_64
from hurray_wire.destination import Destination
from hurray_wire.dtypes import BY_TAG
from hurray_wire.errors import ChecksumMismatch, GeometryMismatch, InvalidContents, InvalidSnapshot, ProtocolViolation
from hurray_wire.image import plan_image
from hurray_wire.limits import Limits
from hurray_wire.memory import HOST, is_on_device
from hurray_wire.paged import Quantized
from hurray_wire.prepare import prepare
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.source_payloads import ImageSource, SnapshotSource, StagedSource
from hurray_wire.target_payloads import ImageTarget, OwnMemory, ScatterTarget
from hurray_wire.transport.memory import Faults, MemoryFabric, MemoryTransport
from pages.cases import Tensor, snapshots
from support.fake_cuda import Device, FakeArray, fake_cuda, needs_compiler, placed

pytestmark = needs_compiler

PAGE = (4, 2, 64)
TABLES, COUNTS = [[5, 1, 7], [5], [3, 0]], [10, 3, 6]
POISON = 0x66


@pytest.fixture(autouse=True, scope="module")
def cupy() -> Iterator[Any]:
    with fake_cuda() as module:
        yield module


class World:
    """Two data planes in one process, whose transport takes memory of GPUs unless it is told not to."""

    def __init__(self) -> None:
        fabric = MemoryFabric()
        self.faults = Faults()
        self.pair = Pair(
            lambda: MemoryTransport(fabric), lambda: MemoryTransport(fabric, faults=self.faults), drain_s=0.2
        )

    def send(self, source: Any, target: Any, **options: Any) -> tuple[Any, Any]:
        """Both ends of a transfer."""
        return self.pair.begin(source, target, **{"hash_": MIX64, **options}).result()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.pair.close()


def caches(device: int, seed: int = 0) -> dict[tuple[int | None, str], Any]:
    """Pools of 8 pages of random words on a GPU."""
    rng = np.random.default_rng(seed)
    with Device(device):
        return {
            (layer, role): placed(rng.integers(1, 1 << 15, (8, *PAGE), np.uint16)).view(np.uint16).reshape(8, *PAGE)
            for layer in (0, 1)
            for role in ("key", "value")
        }


def on_host(arrays: dict[Any, Any]) -> dict[Any, np.ndarray]:
    return {key: array.get() for key, array in arrays.items()}


def snapshot_of(arrays: dict[Any, Any]) -> KVSnapshot:
    return KVSnapshot.from_paged(arrays, block_tables=TABLES, token_counts=COUNTS, element_type="float16")


def reference(arrays: dict[Any, Any]) -> tuple[Any, np.ndarray]:
    """Plan and image that a host source of the same pages gives."""
    prepared = prepare(snapshot_of(on_host(arrays)))
    plan = plan_image([tensor.descriptor for tensor in prepared.tensors], 8192, Limits())
    image = np.zeros(plan.image_bytes, np.uint8)
    source = SnapshotSource(prepared, plan)
    for chunk in plan.chunks:
        image[chunk.offset : chunk.offset + chunk.nbytes] = source.stage(
            chunk, lambda size=chunk.nbytes: np.empty(size, np.uint8)
        )
    return plan, image


def gpu_source(arrays: dict[Any, Any], device: int, *, in_host: bool = False) -> SnapshotSource:
    prepared = prepare(snapshot_of(arrays))
    plan = plan_image([tensor.descriptor for tensor in prepared.tensors], 8192, Limits())
    assert {descriptor.device_tag for descriptor in plan.descriptors} == {1}
    return SnapshotSource(prepared, plan, cuda.gpu(device), in_host=in_host)


def poisoned(place: Any) -> OwnMemory:
    def allocate(nbytes: int) -> Any:
        memory = place.take(nbytes)
        memory[...] = POISON
        return memory

    return OwnMemory(allocate)


@pytest.mark.parametrize("source_in_host", [False, True])
@pytest.mark.parametrize("target_in_host", [False, True])
@pytest.mark.parametrize("hash_", [MIX64, XXH3_64])
def test_what_leaves_one_gpu_arrives_on_another(
    world: World, source_in_host: bool, target_in_host: bool, hash_: Any
) -> None:
    pages = caches(0)
    source = gpu_source(pages, 0, in_host=source_in_host)
    place = cuda.gpu(1)
    target = ImageTarget(source.plan, COUNTS, poisoned(place), place=place, in_host=target_in_host)

    ends = world.send(source, target, hash_=hash_)

    assert [end.error for end in ends] == [None, None]
    assert isinstance(target.image, FakeArray)
    assert target.image.device.id == 1
    assert np.array_equal(target.image.get(), reference(pages)[1])
    summary = target.summary()
    assert {(item.device_tag, item.memory_class) for item in summary.descriptors} == {(1, 0)}
    assert {handle.alignment for item in summary.descriptors for handle in item.buffers} == {4096}
    assert (summary.changed_device, summary.dirty_dead_slot_count) == (False, 0)


@pytest.mark.parametrize("to_gpu", [False, True])
def test_pages_may_change_between_gpu_and_host(world: World, to_gpu: bool) -> None:
    pages = caches(0)
    plan, image = reference(pages)
    if to_gpu:
        source, place = SnapshotSource(prepare(snapshot_of(on_host(pages))), plan), cuda.gpu(1)
    else:
        source, place = gpu_source(pages, 0), HOST  # type: ignore[assignment]
    target = ImageTarget(source.plan, COUNTS, poisoned(place), place=place)

    ends = world.send(source, target)

    assert [end.error for end in ends] == [None, None]
    assert is_on_device(target.image) == to_gpu
    assert np.array_equal(target.image.get() if to_gpu else target.image, image)  # type: ignore[union-attr]
    assert target.summary().changed_device
    assert {item.device_tag for item in target.summary().descriptors} == {int(to_gpu)}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_any_gpu_are_read_by_a_thread_that_is_on_another(layout: str) -> None:
    filled = []
    arrays = caches(1)
    for source in (arrays, on_host(arrays)):
        snapshot = KVSnapshot.from_paged(
            source, block_tables=[[5, 1, 7, 0, 2]], token_counts=[9], element_type="float16", layout=layout
        )
        prepared = prepare(snapshot)
        out = np.empty((3, prepared.tensors[1].descriptor.page_bytes or 0), np.uint8)
        prepared.fill(1, 0, 3, out)
        filled.append((out.tobytes(), snapshot.tokens(1, "value", 0).tobytes()))

    assert filled[0] == filled[1]


@pytest.mark.parametrize("in_host", [False, True])
def test_a_held_image_goes_out_from_staging_never_from_where_it_is(world: World, in_host: bool) -> None:
    plan, image = reference(caches(0))
    place = cuda.gpu(0)
    held = place.take(plan.image_bytes)
    held[...] = held._sibling(image)
    sent: list[int] = []

    class Watched(ImageSource):
        def stage(self, chunk: Any, *others: Any) -> Any:
            staged = super().stage(chunk, *others)
            sent.append(staged.data.ptr if is_on_device(staged) else 0)
            return staged

    released: list[bool] = []
    source = Watched(plan, held, lambda: released.append(True), place=place, in_host=in_host)
    target = ImageTarget(plan, COUNTS, poisoned(HOST))

    ends = world.send(source, target)

    assert [end.error for end in ends] == [None, None]
    assert np.array_equal(target.image, image)
    start = held.data.ptr
    assert not any(start <= address < start + held.nbytes for address in sent)
    assert all(address == 0 for address in sent) == in_host
    assert released == [True]


@pytest.mark.parametrize("in_host", [False, True])
def test_pages_go_straight_into_caches_on_a_gpu(world: World, in_host: bool) -> None:
    pages = caches(0)
    source = gpu_source(pages, 0)
    own = caches(1, seed=9)
    before = on_host(own)
    tables = [[2, 6, 4], [2], [7, 1]]
    destination = Destination.from_paged(own, block_tables=tables, element_type="float16")
    assert destination.device == (1, 1)
    destination.check(source.plan.descriptors, np.array(COUNTS, np.uint64))
    place = cuda.gpu(1)
    target = ScatterTarget(source.plan, COUNTS, destination, HOST.take, place=place, in_host=in_host)

    ends = world.send(source, target)

    assert [end.error for end in ends] == [None, None]
    found = destination.snapshot()
    sent = snapshot_of(on_host(pages))
    for (layer, role), array in on_host(own).items():
        for seq in range(3):
            assert np.array_equal(
                found.tokens(layer, role, seq).view(np.uint16), sent.tokens(layer, role, seq).view(np.uint16)
            )
        assert np.array_equal(array[[0, 3, 5]], before[layer, role][[0, 3, 5]])
        assert not array[4, 2:].any()  # dead slots of the last page of the first sequence
    assert {item.device_tag for item in target.summary().descriptors} == {1}


def test_a_failure_clears_the_pages_on_the_gpu(world: World) -> None:
    source = gpu_source(caches(0), 0)
    own = caches(1, seed=9)
    destination = Destination.from_paged(own, block_tables=[[2, 6, 4], [2], [7, 1]], element_type="float16")
    destination.check(source.plan.descriptors, np.array(COUNTS, np.uint64))
    world.faults.corrupt(skip=len(source.plan.chunks) - 1)

    _, end = world.send(
        source, ScatterTarget(source.plan, COUNTS, destination, HOST.take, place=cuda.gpu(1), in_host=True)
    )

    assert isinstance(end.error, ChecksumMismatch)
    for array in on_host(own).values():
        assert not array[[2, 6, 4, 7, 1]].any()
        assert array[[0, 3, 5]].all()


def test_small_snapshots_are_staged_where_they_are(world: World) -> None:
    source = StagedSource(gpu_source(caches(0), 0))
    place = cuda.gpu(1)
    target = ImageTarget(source.plan, COUNTS, poisoned(place), place=place)

    ends = world.send(source, target)

    assert [end.error for end in ends] == [None, None]
    assert all(is_on_device(chunk) for chunk in source.chunks)


def test_an_index_that_is_wrong_is_refused_on_the_gpu(world: World) -> None:
    plan, image = reference(caches(0))
    image[0:4] = 0xFF  # the first page id
    place = cuda.gpu(1)
    target = ImageTarget(plan, COUNTS, poisoned(place), place=place)

    _, end = world.send(ImageSource(plan, image, lambda: None), target)

    assert isinstance(end.error, InvalidContents)
    assert (end.error.rule, end.error.details["index"]) == ("V4", "0")


def test_dirty_dead_slots_are_cleared_and_counted_on_the_gpu(world: World) -> None:
    plan, image = reference(caches(0))
    dirty = image.copy()
    offset = plan.buffer_offsets[2][0] + 2 * (plan.descriptors[2].page_bytes or 0)
    dirty[offset + (plan.descriptors[2].page_bytes or 0) - 1] = 1  # the last slot of the third page
    place = cuda.gpu(1)
    target = ImageTarget(plan, COUNTS, poisoned(place), place=place)

    ends = world.send(ImageSource(plan, dirty, lambda: None), target)

    assert [end.error for end in ends] == [None, None]
    assert np.array_equal(target.image.get(), image)  # type: ignore[union-attr]
    assert target.summary().dirty_dead_slot_count == 1


def test_staging_is_used_again(world: World) -> None:
    place = cuda.gpu(0)
    pages = caches(0)
    counts = []
    for _ in range(3):
        source = gpu_source(pages, 0)
        target = ImageTarget(source.plan, COUNTS, OwnMemory(HOST.take))
        assert [end.error for end in world.send(source, target)] == [None, None]
        counts.append(place.memory.idle_bytes)
    assert counts[1] == counts[2] > 0


def test_a_short_message_is_an_error_on_the_gpu_too(world: World) -> None:
    source = gpu_source(caches(0), 0)
    place = cuda.gpu(1)
    target = ImageTarget(source.plan, COUNTS, poisoned(place), place=place)
    stage = source.stage
    source.stage = lambda chunk, *others: stage(chunk, *others)[: chunk.nbytes - 64]  # type: ignore[method-assign]

    _, end = world.send(source, target)

    assert isinstance(end.error, ProtocolViolation)


@settings(deadline=None, max_examples=25)
@given(snapshots(whole_bytes=True), st.sampled_from((4096, 8192)))
def test_any_snapshot_comes_out_as_from_the_host(made: tuple[KVSnapshot, list[Tensor]], chunk_bytes: int) -> None:
    """Every element type and scheme, from a host source into an image on a GPU: the same bytes as on the host."""
    snapshot, _ = made
    prepared = prepare(snapshot)
    plan = plan_image([tensor.descriptor for tensor in prepared.tensors], chunk_bytes, Limits())
    source = SnapshotSource(prepared, plan)
    staged = [
        source.stage(chunk, lambda size=chunk.nbytes: np.empty(size, np.uint8)).copy()  # type: ignore[misc]
        for chunk in plan.chunks
    ]
    images = []
    for place in (HOST, cuda.gpu(1)):
        target = ImageTarget(plan, prepared.structure.token_counts, poisoned(place), place=place)
        target.reserve()
        for chunk, data in zip(plan.chunks, staged, strict=True):
            memory = target.memory(chunk)
            memory[...] = memory._sibling(data) if is_on_device(memory) else data
            target.arrived(chunk)
            if chunk.index == plan.index_chunk_count - 1:
                target.check_index()
        target.check_contents()
        images.append((target.image.get() if is_on_device(target.image) else target.image, target.summary()))  # type: ignore[union-attr]
    (host, on_host_), (device, on_device) = images
    assert np.array_equal(host, device)
    assert on_host_.dead_slot_count == on_device.dead_slot_count
    assert on_host_.dirty_dead_slot_count == on_device.dirty_dead_slot_count == 0


# --- quantized caches -------------------------------------------------------------------------------------------------

SCHEMES = {
    "per slot, float16": PerBlockAffine(PAGE[0], 3, None, 1),
    "per slot, bfloat16, zero points": PerBlockAffine(PAGE[0], 3, 4, 2),
    "per channel, zero points": PerChannelAffine(1, 3, 4, 3),
}


def quantized_caches(name: str, seed: int = 0) -> tuple[dict[Any, np.ndarray], Quantized]:
    """int8 pools of 8 pages, and one set of parameters for both, on the host."""
    rng, scheme = np.random.default_rng(seed), SCHEMES[name]
    arrays = {(None, role): rng.integers(-100, 100, (8, *PAGE), np.int8) for role in ("key", "value")}
    shape = (8, PAGE[0]) if isinstance(scheme, PerBlockAffine) else (PAGE[1],)
    dtype = BY_TAG[scheme.scale_type_tag].numpy
    parameters = [rng.uniform(0.5, 2, shape).astype(dtype)]
    if scheme.zero_point_buffer_index is not None:
        parameters.append(rng.integers(-9, 9, shape, np.int32))
    return arrays, Quantized(scheme, tuple(parameters))


def moved(arrays: dict[Any, np.ndarray], quantized: Quantized, device: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The same on a GPU, each cache with parameters of its own; bfloat16 as torch gives it out."""

    def there(array: np.ndarray) -> Any:
        words = array.dtype if array.dtype.kind in "iuf" else np.dtype(np.int16)
        return placed(array).view(words).reshape(array.shape)

    with Device(device):
        caches = {key: there(array) for key, array in arrays.items()}
        own = {key: Quantized(quantized.scheme, tuple(map(there, quantized.parameters))) for key in arrays}
    return caches, own


def quantized_source(arrays: Any, quantized: Any, place: Any = HOST) -> SnapshotSource:
    snapshot = KVSnapshot.from_paged(arrays, block_tables=TABLES, token_counts=COUNTS, quantization=quantized)
    prepared = prepare(snapshot)
    plan = plan_image([tensor.descriptor for tensor in prepared.tensors], 8192, Limits())
    return SnapshotSource(prepared, plan, place)


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_on_the_gpu_leave_with_their_pages(world: World, name: str) -> None:
    arrays, quantized = quantized_caches(name)
    images = []
    for source in (
        quantized_source(arrays, quantized),
        quantized_source(*moved(arrays, quantized, 1), cuda.gpu(1)),
    ):
        target = ImageTarget(source.plan, COUNTS, poisoned(HOST))
        assert [end.error for end in world.send(source, target)] == [None, None]
        assert target.summary().dirty_dead_slot_count == 0
        images.append(target.image)

    assert np.array_equal(*images)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("in_host", [False, True])
def test_scales_go_straight_into_those_of_caches_on_a_gpu(world: World, name: str, in_host: bool) -> None:
    arrays, quantized = quantized_caches(name)
    per_slot = isinstance(quantized.scheme, PerBlockAffine)
    own, mine = quantized_caches(name, seed=9)
    mine = mine if per_slot else quantized
    tables = [[2, 6, 4], [2], [7, 1]]
    host = Destination.from_paged(own, block_tables=tables, quantization={key: copied(mine) for key in own})
    there, scales = moved(own, mine, 1)
    device = Destination.from_paged(there, block_tables=tables, quantization=scales)
    for destination, place in ((host, HOST), (device, cuda.gpu(1))):
        source = quantized_source(arrays, quantized)
        destination.check(source.plan.descriptors, np.array(COUNTS, np.uint64))
        target = ScatterTarget(
            source.plan, COUNTS, destination, HOST.take, place=place, in_host=in_host and place is not HOST
        )
        assert [end.error for end in world.send(source, target)] == [None, None]

    for ours, theirs in zip(device.caches, host.caches, strict=True):
        assert np.array_equal(ours.pool.array.get(), theirs.pool.array)
        assert ours.quantized is not None
        assert theirs.quantized is not None
        for on_gpu, on_cpu in zip(ours.quantized.parameters, theirs.quantized.parameters, strict=True):
            assert on_gpu.get().tobytes() == on_cpu.tobytes()
    for seq in range(3):
        found, sent = (item.snapshot().tokens(None, "key", seq, dequantize=True) for item in (device, host))
        assert np.array_equal(found, sent)

    device.clear()
    if per_slot:
        scale = scales[None, "key"].parameters[0].get()
        words = scale.view(BY_TAG[quantized.scheme.scale_type_tag].numpy)  # type: ignore[union-attr]
        assert (words[[2, 6, 4, 7, 1]] == 1).all()
        assert scale[[0, 3, 5]].tobytes() == mine.parameters[0][[0, 3, 5]].tobytes()


def copied(quantized: Quantized) -> Quantized:
    return Quantized(quantized.scheme, tuple(array.copy() for array in quantized.parameters))


def test_other_scales_of_a_channel_are_refused_on_a_gpu_too(world: World) -> None:
    arrays, quantized = quantized_caches("per channel, zero points")
    there, scales = moved(*quantized_caches("per channel, zero points", seed=9), 1)
    destination = Destination.from_paged(there, block_tables=TABLES, quantization=scales)
    source = quantized_source(arrays, quantized)
    destination.check(source.plan.descriptors, np.array(COUNTS, np.uint64))

    _, end = world.send(source, ScatterTarget(source.plan, COUNTS, destination, HOST.take, place=cuda.gpu(1)))

    assert isinstance(end.error, GeometryMismatch)
    assert end.error.field == "scales"


def test_a_wrong_scale_on_the_gpu_is_found_before_it_leaves() -> None:
    arrays, quantized = quantized_caches("per slot, float16")
    quantized.parameters[0][1, 2] = 0  # of a live slot of the second page
    there, scales = moved(arrays, quantized, 1)

    with pytest.raises(InvalidContents) as refused:
        quantized_source(there, scales, cuda.gpu(1))

    assert (refused.value.rule, refused.value.field) == ("V11", "buffers[3]")


@pytest.mark.parametrize("pool_on_gpu", [False, True])
def test_pool_and_scales_are_on_one_device(pool_on_gpu: bool) -> None:
    arrays, quantized = quantized_caches("per slot, float16")
    there, scales = moved(arrays, quantized, 1)
    caches, parameters = (there, quantized) if pool_on_gpu else (arrays, scales)

    with pytest.raises(InvalidSnapshot) as refused:
        KVSnapshot.from_paged(caches, block_tables=TABLES, token_counts=COUNTS, quantization=parameters)

    names = ("cpu", "cuda:1") if pool_on_gpu else ("cuda:1", "cpu")
    assert (refused.value.details["offered"], refused.value.details["required"]) == names
    assert (refused.value.field, refused.value.rule) == ("scales", "D11")
