"""Each kernel, built as C++, against the NumPy function that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_wire import kernels
from hurray_wire.checksum import MIX64, XXH3_64
from hurray_wire.errors import HurrayError, InvalidContents
from hurray_wire.memory import on_device_of
from hurray_wire.pages import (
    check_compact,
    clear_dead,
    compact,
    gather,
    live_slots,
    read_index,
    scatter,
    scrub,
    scrub_parameters,
)
from hurray_wire.validate import BlockStructure, check_parameters, check_pool, check_structure
from pages.cases import Tensor, descriptor_of, fill, structure_of, structures, tensors
from support.fake_cuda import FakeArray, RawModule, fake_cuda, guarded, intact, needs_compiler, placed

pytestmark = needs_compiler

settings.register_profile("kernels", deadline=None, max_examples=40)
settings.load_profile("kernels")


@pytest.fixture(autouse=True, scope="module")
def cuda() -> Iterator[Any]:
    with fake_cuda() as module:
        yield module


def words(array: np.ndarray) -> FakeArray:
    """An array on the device, guarded, of its own type."""
    moved = placed(array)
    view = moved.view(array.dtype)
    view.guards = moved.guards  # type: ignore[attr-defined]
    return view


# --- pages ----------------------------------------------------------------------------------------------------------


@given(
    page_bytes=st.sampled_from((1, 3, 4, 8, 12, 16, 48, 64, 1000, 4096, 4100, 20000)),
    apart=st.sampled_from((0, 0, 1, 8, 16)),
    before=st.sampled_from((0, 0, 1, 4, 8)),
    ids=st.lists(st.integers(0, 8), max_size=9, unique=True),
)
def test_pages_are_gathered_and_put_back(page_bytes: int, apart: int, before: int, ids: list[int]) -> None:
    rng = np.random.default_rng(page_bytes)
    stride = page_bytes + apart
    pool = placed(rng.integers(0, 256, 9 * stride, np.uint8), before)
    rows = pool.reshape(9, stride)[:, :page_bytes]
    expected = rows.get()[ids] if ids else np.zeros((0, page_bytes), np.uint8)
    out = guarded(len(ids) * page_bytes, before)

    gather(rows, np.array(ids, np.uint64), out.reshape(len(ids), page_bytes))

    assert np.array_equal(out.get().reshape(expected.shape), expected)
    back = guarded(9 * stride, before)
    scatter(back.reshape(9, stride)[:, :page_bytes], np.array(ids, np.uint64), out.reshape(len(ids), page_bytes))
    left = back.get().reshape(9, stride)
    for page in range(9):
        assert np.array_equal(left[page, :page_bytes], rows.get()[page]) == (page in ids) or not page_bytes
    assert (left[:, page_bytes:] == 0x5A).all()
    assert intact(pool, out, back)


def test_long_runs_are_plain_copies_and_short_ones_are_not() -> None:
    page = 1 << 20
    pool = placed(np.arange(6 * page, dtype=np.uint32).view(np.uint8)[: 6 * page]).reshape(6, page)
    out = guarded(4 * page).reshape(4, page)

    RawModule.started.clear()
    gather(pool, np.array([1, 2, 3, 5]), out)
    assert not RawModule.started
    assert np.array_equal(out.get(), pool.get()[[1, 2, 3, 5]])

    gather(pool[:, :4096], np.array([5, 1, 2]), guarded(3 * 4096).reshape(3, 4096))
    assert RawModule.started == ["copy_pages_16"]


def test_pages_in_another_order_are_gathered_too() -> None:
    host = np.arange(4 * 3 * 2 * 5, dtype=np.uint16).reshape(4, 2, 3, 5)
    pool = words(host).reshape(4, 2, 3, 5).transpose(0, 2, 1, 3)
    out = guarded(2 * 60)

    gather(pool, np.array([3, 1]), out.reshape(2, 60))

    assert np.array_equal(out.view(np.uint16).get(), host.transpose(0, 2, 1, 3)[[3, 1]].reshape(-1))


# --- the index ------------------------------------------------------------------------------------------------------


def expected_error(structure: BlockStructure) -> HurrayError | None:
    try:
        check_structure(structure)
        check_compact(structure)
    except HurrayError as error:
        return error
    return None


def status_of(structure: BlockStructure) -> int:
    """What the kernels say of it, seq_ptr in the table's type as on the wire."""
    dtype = structure.block_table.dtype
    arrays = [words(structure.seq_ptr.astype(dtype)), words(structure.block_table), words(structure.token_counts)]
    status = kernels.index_status(*arrays, num_pages=structure.num_pages, page_size=structure.page_size)
    assert intact(*arrays)
    return status


@st.composite
def broken_structures(draw: st.DrawFn) -> BlockStructure:
    """Compact or not, and with up to three numbers changed to what is likely to be wrong."""
    structure = draw(structures())
    if draw(st.booleans()):
        structure = compact(structure).structure
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(("seq_ptr", "block_table", "token_counts")))
        array = getattr(structure, name).copy()
        if array.size:
            top = np.iinfo(structure.block_table.dtype if name != "token_counts" else np.uint64).max
            likely = st.sampled_from((0, 1, 2, 3, structure.num_pages, structure.total_logical_pages, int(top)))
            array[draw(st.integers(0, array.size - 1))] = draw(likely)
        structure = replace(structure, **{name: array})
    return structure


@settings(max_examples=300)
@given(broken_structures())
def test_the_status_word_is_the_hosts_first_error(structure: BlockStructure) -> None:
    status, error = status_of(structure), expected_error(structure)

    if error is None:
        assert status == kernels.INTACT
        return
    rule, index = kernels.read_status(status)
    assert rule == (error.rule or "compact")
    if error.rule is not None:
        assert str(index) == error.details["index"]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_each_rule_names_its_first_index(dtype: Any) -> None:
    good = structure_of([[0, 1], [2], [], [1, 3]], [6, 4, 0, 8], 4, 4, dtype)
    most = int(np.iinfo(dtype).max)

    def changed(name: str, index: int, value: int) -> tuple[str, int]:
        array = getattr(good, name).copy()
        array[index] = value
        return kernels.read_status(status_of(replace(good, **{name: array})))

    assert status_of(good) == kernels.INTACT
    assert changed("seq_ptr", 0, 1) == ("V1", 0)
    assert changed("seq_ptr", 2, 6) == ("V3", 3)
    assert changed("seq_ptr", 4, 6) == ("V2", 4)
    assert changed("block_table", 2, 4) == ("V4", 2)
    assert changed("block_table", 4, most) == ("V4", 4)
    assert changed("token_counts", 1, 5) == ("V6", 1)
    assert changed("token_counts", 2, (1 << 64) - 1) == ("V6", 2)
    assert changed("block_table", 1, 2) == ("compact", 2)
    assert changed("block_table", 0, 2) == ("compact", 0)
    assert kernels.read_status(status_of(replace(good, num_pages=5))) == ("compact", 4)
    assert kernels.read_status(status_of(replace(good, num_pages=1 << 31)))[0] == "compact"


@given(structures())
def test_live_slots_are_the_hosts(structure: BlockStructure) -> None:
    arrays = [
        words(structure.seq_ptr.astype(structure.block_table.dtype)),
        words(structure.block_table),
        words(structure.token_counts),
    ]

    live = kernels.live_slots(*arrays, num_pages=structure.num_pages, page_size=structure.page_size)

    assert live.dtype == np.uint32
    assert np.array_equal(live.get(), live_slots(structure))
    assert intact(*arrays)


@given(structures())
def test_an_index_on_a_device_reads_as_one_on_the_host(structure: BlockStructure) -> None:
    compacted = compact(structure).structure
    descriptor = descriptor_of(compacted, "float16")
    table, pointers = (
        array.astype(descriptor.index_dtype).view(np.uint8) for array in (compacted.block_table, compacted.seq_ptr)
    )

    found, live = read_index(descriptor, placed(table), placed(pointers), compacted.token_counts)  # type: ignore[arg-type]

    assert found.same_as(compacted)
    assert np.array_equal(live.get(), live_slots(compacted))


def test_an_index_on_a_device_is_refused_in_the_hosts_words() -> None:
    structure = structure_of([[0, 1], [1]], [6, 3], 4, 2)
    descriptor = descriptor_of(structure, "float16")
    pointers = placed(structure.seq_ptr.astype(np.uint32).view(np.uint8))
    for table in ([0, 2, 1], [1, 0, 1]):
        table_bytes = np.array(table, np.uint32).view(np.uint8)
        with pytest.raises(InvalidContents) as host:
            read_index(descriptor, table_bytes, pointers.get(), [6, 3])
        with pytest.raises(InvalidContents) as device:
            read_index(descriptor, placed(table_bytes), pointers, [6, 3])  # type: ignore[arg-type]
        assert str(device.value) == str(host.value)


# --- dead slots -----------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(tensors(), st.sampled_from((0, 0, 1, 4, 8)), st.booleans())
def test_pools_are_scrubbed_as_on_the_host(tensor: Tensor, before: int, partly: bool) -> None:
    descriptor, host = tensor.descriptor, tensor.buffers[0].copy()
    live = live_slots(tensor.structure)
    first = 1 if partly and descriptor.page_bytes and descriptor.num_pages > 1 else 0
    start = first * (descriptor.page_bytes or 0)
    part = placed(host[start:], before)
    quiet = placed(host[start:], before)

    dirty = scrub(descriptor, part, live, first)
    clear_dead(descriptor, quiet, on_device_of(quiet, live), first)

    assert dirty == scrub(descriptor, host[start:], live, first)
    assert np.array_equal(part.get(), host[start:])
    assert np.array_equal(quiet.get(), host[start:])
    assert intact(part, quiet)
    assert scrub(descriptor, part, live, first) == 0


@given(tensors(names=("int8", "uint4", "int2")))
def test_parameters_are_scrubbed_and_checked_as_on_the_host(tensor: Tensor) -> None:
    descriptor, live = tensor.descriptor, live_slots(tensor.structure)
    host = [buffer.copy() for buffer in tensor.buffers]
    device = [placed(buffer) for buffer in host]

    check_parameters(descriptor, device, live)  # type: ignore[arg-type]
    dirty = scrub_parameters(descriptor, device, live)  # type: ignore[arg-type]

    assert dirty == scrub_parameters(descriptor, host, live)
    for mine, theirs in zip(device, host, strict=True):
        assert np.array_equal(mine.get(), theirs)
    assert intact(*device)


@pytest.mark.parametrize("tag", [1, 2, 3])
@pytest.mark.parametrize("bits", [0, 0x7F80, 0xFFFF])
def test_bad_parameters_are_told_as_on_the_host(tag: int, bits: int) -> None:
    from hurray_wire.quantization import PerBlockAffine

    structure = structure_of([[0, 1]], [6], 4, 2)
    descriptor = descriptor_of(structure, "int8", quantization=PerBlockAffine(4, 3, 4, tag))
    buffers = fill(descriptor, structure, np.random.default_rng(0))
    width = 2 if tag < 3 else 4
    buffers[3].view(f"u{width}")[5] = bits << (16 if width == 4 else 0)
    live = live_slots(structure)

    def error(parts: Any) -> str:
        try:
            check_parameters(descriptor, parts, live)
        except InvalidContents as found:
            return str(found)
        return ""

    assert error([placed(buffer) for buffer in buffers]) == error(buffers)


@given(tensors(names=("float8_e8m0", "bool", "float6_e2m3")), st.integers(0, 255))
def test_pools_are_checked_as_on_the_host(tensor: Tensor, poison: int) -> None:
    descriptor, live = tensor.descriptor, live_slots(tensor.structure)
    host = tensor.buffers[0].copy()
    if host.size:
        host[-1] = poison

    def error(pool: Any) -> str:
        try:
            check_pool(descriptor, pool, live)
        except InvalidContents as found:
            return str(found)
        return ""

    assert error(placed(host)) == error(host)


# --- checksums ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 200_000), st.sampled_from((0, 0, 1, 8)))
def test_checksums_on_a_device_are_the_hosts(nbytes: int, before: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    device = placed(data, before)

    assert MIX64(device) == MIX64(data)
    assert XXH3_64(device) == xxhash.xxh3_64_intdigest(data)
    assert intact(device)


def model(data: bytes) -> int:
    """MIX64, word by word."""
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(word: int) -> int:
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & mask
        return word ^ word >> 31

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return mix((sum(mix((word + (i + 1) * step) & mask) for i, word in enumerate(words)) + len(data)) & mask)


@given(st.binary(max_size=200))
def test_mix64_is_what_it_says(data: bytes) -> None:
    assert MIX64(data) == model(data)


@settings(max_examples=60)
@given(st.integers(1, 40_000), st.data())
def test_mix64_sees_what_goes_wrong(nbytes: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(nbytes)
    good = rng.integers(0, 256, nbytes, np.uint8)
    bad = good.copy()
    place = st.integers(0, nbytes - 1)
    one, other = data.draw(place), data.draw(place)
    match data.draw(st.sampled_from(("flip", "flips", "swap", "cut", "zero"))):
        case "flip":
            bad[one] ^= 1 << data.draw(st.integers(0, 7))
        case "flips":  # the top bits, which sums lose
            bad[[one, other]] ^= 0x80
        case "swap":
            bad[[one, other]] = bad[[other, one]]
        case "cut":
            bad = bad[: max(one, 1)]
        case "zero":
            bad[one:] = 0

    same = bad.size == good.size and np.array_equal(bad, good)
    assert (MIX64(bad) == MIX64(good)) == same
