"""The image plan: every byte of every buffer is in exactly one chunk, at the place the plan says."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire.descriptor import Descriptor, build_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.errors import GeometryMismatch, InvalidRequest, LimitExceeded, Unsupported
from hurray_wire.image import INDEX, is_viewable, plan_image
from hurray_wire.limits import Limits
from hurray_wire.quantization import PerBlockAffine

LIMITS = Limits()


def descriptor(num_pages: int = 3, *, page_size: int = 4, heads: int = 2, dim: int = 8, **fields: object) -> Descriptor:
    values: dict[str, object] = {
        "element_type": BY_NAME["float16"],
        "total_tokens": num_pages * page_size,
        "num_seqs": 1,
        "total_logical_pages": num_pages,
        "kv_role": 0,
        "layer_index": 0,
    }
    values.update(fields)
    return build_descriptor(page_size=page_size, num_pages=num_pages, num_heads=heads, head_dim=dim, **values)  # type: ignore[arg-type]


SHAPES = st.tuples(
    st.integers(0, 60),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 64]),
    st.sampled_from(["float16", "int8", "int4", "float6_e2m3", "bool"]),
    st.integers(1, 4),
    st.sampled_from([4096, 8192, 65536]),
)


@given(SHAPES)
def test_every_byte_is_in_exactly_one_chunk(shape: tuple[int, int, int, int, str, int, int]) -> None:
    num_pages, page_size, heads, dim, name, tensors, chunk_bytes = shape
    descriptors = [
        descriptor(num_pages, page_size=page_size, heads=heads, dim=dim, element_type=BY_NAME[name], layer_index=layer)
        for layer in range(tensors)
    ]
    plan = plan_image(descriptors, chunk_bytes, LIMITS)
    covered: dict[tuple[int, int], int] = {}
    end = 0
    for number, chunk in enumerate(plan.chunks):
        assert chunk.index == number
        assert chunk.offset >= end
        assert chunk.offset % 4096 == 0 or chunk.segments[0].buffer_offset > 0
        end = chunk.offset + chunk.nbytes
        page_bytes = descriptors[0].page_bytes or 0
        assert 0 < chunk.nbytes <= max(chunk_bytes, page_bytes)
        assert all((s.tensor == INDEX) == (number < plan.index_chunk_count) for s in chunk.segments)
        for segment in chunk.segments:
            key = (segment.tensor, segment.buffer)
            assert covered.get(key, 0) == segment.buffer_offset, "buffers are sent from front to back"
            covered[key] = segment.buffer_offset + segment.nbytes
            offset = plan.buffer_offsets[max(segment.tensor, 0)][segment.buffer]
            assert chunk.offset + segment.chunk_offset == offset + segment.buffer_offset
            if segment.buffer == 0 and page_bytes:
                assert segment.buffer_offset % page_bytes == 0
                assert segment.nbytes % page_bytes == 0
    for tensor, item in enumerate(descriptors):
        for number, handle in enumerate(item.buffers):
            key = (INDEX if number in (1, 2) else tensor, number)
            assert covered.get(key, 0) == handle.byte_size
            assert plan.buffer_offsets[tensor][number] % 4096 == 0
    assert end <= plan.image_bytes
    assert plan.image_bytes % 4096 == 0


def test_small_tensors_share_chunks() -> None:
    plan = plan_image([descriptor(layer_index=layer) for layer in range(160)], 4 << 20, LIMITS)
    assert len(plan.chunks) == 2
    assert plan.index_chunk_count == 1


def test_ready_tensors_give_the_chunks_that_need_no_other() -> None:
    plan = plan_image([descriptor(64, dim=64, layer_index=layer) for layer in range(4)], 65536, LIMITS)
    assert plan.ready_chunk_count(0) == plan.index_chunk_count
    assert plan.ready_chunk_count(4) == len(plan.chunks)
    counts = [plan.ready_chunk_count(ready) for ready in range(5)]
    assert counts == sorted(counts)
    assert all(chunk.last_tensor < 2 for chunk in plan.chunks[: counts[2]])


def test_scales_travel_after_their_pool() -> None:
    quantized = descriptor(
        3,
        element_type=BY_NAME["int8"],
        quantization=PerBlockAffine(block_size=4, scale_buffer_index=3, scale_type_tag=3),
    )
    plan = plan_image([quantized], 4 << 20, LIMITS)
    assert [(s.tensor, s.buffer) for c in plan.chunks for s in c.segments] == [(INDEX, 1), (INDEX, 2), (0, 0), (0, 3)]


@given(SHAPES)
def test_a_view_is_all_that_follows_the_index(shape: tuple[int, int, int, int, str, int, int]) -> None:
    num_pages, page_size, heads, dim, name, tensors, chunk_bytes = shape
    descriptors = [
        descriptor(num_pages, page_size=page_size, heads=heads, dim=dim, element_type=BY_NAME[name], layer_index=layer)
        for layer in range(tensors)
    ]
    if not all(map(is_viewable, descriptors)):
        with pytest.raises(Unsupported):
            plan_image(descriptors, chunk_bytes, LIMITS, view=True)
        return
    whole, plan = (plan_image(descriptors, chunk_bytes, LIMITS, view=view) for view in (False, True))
    assert plan.buffer_offsets == whole.buffer_offsets
    assert plan.image_bytes == whole.image_bytes
    assert plan.index_chunk_count == whole.index_chunk_count == plan.view_chunk
    assert plan.chunks[: plan.view_chunk] == whole.chunks[: plan.view_chunk]
    *_, view = plan.chunks
    assert view.index == plan.view_chunk == len(plan.chunks) - 1
    assert [(s.tensor, s.buffer, s.buffer_offset) for s in view.segments] == [(t, 0, 0) for t in range(tensors)]
    assert all(s.chunk_offset + view.offset == plan.buffer_offsets[s.tensor][0] for s in view.segments)
    index_bytes = sum(handle.byte_size for handle in descriptors[0].buffers[1:3])
    assert plan.wire_bytes - index_bytes in range(4096)
    assert plan.mapped_bytes == view.nbytes == whole.chunks[-1].offset + whole.chunks[-1].nbytes - view.offset
    assert plan.max_chunk_bytes <= whole.max_chunk_bytes
    assert whole.mapped_bytes == 0


@pytest.mark.parametrize(("name", "num_pages"), [("float8_e8m0", 3), ("float16", 0), ("int4", 3)])
def test_what_must_be_validated_by_who_takes_it_is_no_view(name: str, num_pages: int) -> None:
    odd = descriptor(num_pages, element_type=BY_NAME[name], page_size=1, heads=1, dim=3)
    assert not is_viewable(odd)


@pytest.mark.parametrize("chunk_bytes", [0, 4095, 4097, 128 << 20])
def test_a_bad_chunk_size_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_image([descriptor()], chunk_bytes, LIMITS)
    assert caught.value.field == "chunk_bytes"


def test_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        plan_image([], 4096, LIMITS)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (descriptor(page_size=8, total_tokens=12), "page_size"),
        (descriptor(num_pages=4, total_tokens=12, total_logical_pages=3), "num_pages"),
        (descriptor(total_tokens=11), "total_tokens"),
        (descriptor(num_seqs=2), "num_seqs"),
        (descriptor(total_logical_pages=5), "total_logical_pages"),
        (descriptor(block_table_index_type=1), "block_table_index_type"),
    ],
)
def test_tensors_of_different_structure_are_refused(other: Descriptor, field: str) -> None:
    with pytest.raises(GeometryMismatch) as caught:
        plan_image([descriptor(), other], 4096, LIMITS)
    assert caught.value.field == field
    assert caught.value.details["tensor"] == "1"
    assert caught.value.details["offered"] != caught.value.details["required"]


def test_a_plan_costs_nothing_for_the_size_that_is_declared() -> None:
    # 64 GiB in chunks of 4096 bytes, which is what a descriptor of 300 bytes can ask of any node with such an arena.
    huge = descriptor((1 << 24) - 100, heads=16, dim=32, total_tokens=4, total_logical_pages=1)
    assert huge.page_pool_bytes > (63 << 30)
    tracemalloc.start()
    plan = plan_image([huge], 4096, LIMITS)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000
    assert len(plan.chunks) == plan.index_chunk_count + (1 << 24) - 100
    last = plan.chunks[-1]
    assert (last.index, last.offset + last.nbytes) == (len(plan.chunks) - 1, plan.image_bytes)
    assert plan.wire_bytes == sum(handle.byte_size for handle in huge.buffers)


@pytest.mark.parametrize(("heads", "pages"), [(16, 1 << 24), (9, (1 << 24) - 1)])
def test_more_chunks_than_tags_can_number_are_refused(heads: int, pages: int) -> None:
    # Pages of 9 heads are a chunk each and fill little more than half of it: the chunks count, not the bytes.
    with pytest.raises(LimitExceeded) as caught:
        plan_image([descriptor(pages, heads=heads, dim=32, total_tokens=4, total_logical_pages=1)], 4096, LIMITS)
    assert caught.value.field == "max_chunk_count"


def test_limits_are_checked_in_exact_arithmetic_before_anything_is_planned() -> None:
    huge = descriptor(1 << 40, total_tokens=0, total_logical_pages=0, num_seqs=0, block_table_index_type=1)
    with pytest.raises(LimitExceeded) as caught:
        plan_image([huge], 4096, LIMITS)
    assert caught.value.field == "max_snapshot_bytes"
    with pytest.raises(LimitExceeded) as caught:
        plan_image([descriptor(1 << 20)], 4096, Limits(max_index_entries=1000))
    assert caught.value.field == "max_index_entries"
    with pytest.raises(LimitExceeded) as caught:
        plan_image([descriptor()] * 5, 4096, Limits(max_tensors=4))
    assert caught.value.field == "max_tensors"
