"""The codec of descriptors: round trips, each rule on objects and bytes, bounds, and the switches of the policy."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from format.corpus import LENIENT, VECTORS, descriptors, vectors
from hurray_wire import quantization, sections
from hurray_wire.descriptor import Descriptor, build_descriptor, check_descriptor, decode_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.errors import HurrayError, InvalidDescriptor, LimitExceeded, Unsupported
from hurray_wire.limits import Limits
from hurray_wire.policy import Policy
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine
from hurray_wire.sections import DYNAMIC, BufferHandle, ExtensionType, Statistics

PRIVATE_AGREED = Policy(private_agreed=True)


def example(**changes: Any) -> Descriptor:
    """The example of the block-paged text: layer 3, key, 2 sequences, 9 tokens, float16."""
    geometry: dict[str, Any] = {
        "element_type": BY_NAME["float16"],
        "page_size": 4,
        "num_pages": 5,
        "num_heads": 2,
        "head_dim": 8,
        "total_tokens": 9,
        "num_seqs": 2,
        "total_logical_pages": 3,
        "kv_role": 0,
        "layer_index": 3,
        "alignment": 64,
    }
    return build_descriptor(**(geometry | changes))


def int8(scheme: quantization.Quantization, **changes: Any) -> Descriptor:
    return example(element_type=BY_NAME["int8"], quantization=scheme, **changes)


def with_handle(descriptor: Descriptor, index: int, **changes: Any) -> Descriptor:
    handles = list(descriptor.buffers)
    handles[index] = replace(handles[index], **changes)
    return replace(descriptor, buffers=tuple(handles))


def with_every_handle(descriptor: Descriptor, **changes: Any) -> Descriptor:
    return replace(descriptor, buffers=tuple(replace(handle, **changes) for handle in descriptor.buffers))


# --- round trips ----------------------------------------------------------------------------------------------


def test_example_has_the_bytes_of_the_format_text() -> None:
    expected = next(vector for vector in vectors("valid") if vector["id"] == "V027")
    assert example().encode().hex() == expected["hex"]


@given(descriptors(), st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_encode_and_decode_are_inverse(descriptor: Descriptor, behind: bytes) -> None:
    data = descriptor.encode(LENIENT)
    again, consumed = decode_descriptor(data + behind, LENIENT)
    assert consumed == len(data)
    assert again.encode(LENIENT) == data
    assert repr(again) == repr(descriptor)  # equality, in which a NaN equals itself


@pytest.mark.parametrize("vector", vectors("valid"), ids=lambda vector: vector["id"])
def test_canonical_vectors_encode_to_their_bytes(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    descriptor, consumed = decode_descriptor(data, LENIENT)
    encoded = descriptor.encode(LENIENT)
    if descriptor.trailing_bytes or descriptor.quantization_padding_bytes or descriptor.version_minor:
        again, _ = decode_descriptor(encoded, LENIENT)
        plain = replace(descriptor, trailing_bytes=0, quantization_padding_bytes=0, version_minor=0)
        assert again == plain
    else:
        assert encoded == data[:consumed]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(np.frombuffer(data, np.int8))])
def test_any_buffer_of_bytes_is_read(wrap: Any) -> None:
    data = int8(PerBlockAffine(4, 3, 4), statistics=Statistics()).encode()
    assert decode_descriptor(wrap(data))[0] == decode_descriptor(data)[0]


def test_signalling_nans_of_statistics_keep_their_bits() -> None:
    data = bytearray(example(statistics=Statistics()).encode())
    data[133 + 24 : 133 + 32] = bytes.fromhex("010000000000f47f")
    assert decode_descriptor(data)[0].encode() == data


def test_offset_tables_of_the_docstrings_are_those_of_the_code() -> None:
    documented = [
        (sections.HEADER, "HEADER"),
        (sections.SHAPE, "SHAPE"),
        (sections.LAYOUT, "LAYOUT"),
        (sections.BUFFER_HANDLE, "class BufferHandle"),
        (sections.STATISTICS, "class Statistics"),
        (sections.EXTENSION_TYPE, "class ExtensionType"),
        (quantization.PER_TENSOR, "class PerTensorAffine"),
        (quantization.PER_CHANNEL, "class PerChannelAffine"),
        (quantization.PER_BLOCK, "class PerBlockAffine"),
    ]
    words = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "i": "i32", "f": "f32", "d": "f64"}
    for table, where in documented:
        text = documentation(where)
        stated = re.findall(r"^ *(\d+) +(\d+) +(\w+) +([\w\[\]]+)", text, re.MULTILINE)
        assert [(int(offset), int(size), kind, name) for offset, size, kind, name in stated] == [
            (field.offset, field.size, words.get(field.code, "bytes"), field.name) for field in table.fields
        ]


def documentation(where: str) -> str:
    """The docstring of a class, or the string below a constant."""
    module = quantization if where.endswith("Affine") else sections
    if where.startswith("class "):
        text: str = getattr(module, where.removeprefix("class ")).__doc__
        return text
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    return source[source.index(f"\n{where}: Final") :].split('"""')[1]


# --- what a descriptor says -----------------------------------------------------------------------------------


def test_derived_sizes() -> None:
    descriptor = example(block_table_index_type=1)
    assert (descriptor.total_tokens, descriptor.num_heads, descriptor.head_dim) == (9, 2, 8)
    assert descriptor.page_elements == 64
    assert descriptor.page_pool_bytes == 640
    assert descriptor.page_bytes == 128
    assert descriptor.total_logical_pages == 3
    assert descriptor.seq_ptr_bytes == 24
    assert descriptor.index_dtype == np.dtype("<u8")
    assert descriptor.element_count == 144
    assert descriptor.parameter_layout() == ()
    assert descriptor.scale_entries is None


@pytest.mark.parametrize(
    ("type_name", "head_dim", "page_bytes"),
    [
        ("int4", 2, 4),  # 8 elements of 4 bits
        ("int4", 3, 6),
        ("bool", 1, None),  # 4 bits
        ("bool", 2, 1),
        ("float6_e2m3", 1, 3),  # 4 elements of 6 bits: one group
        ("float6_e2m3", 3, 9),
        ("float128", 1, 64),
    ],
)
def test_page_bytes_only_where_pages_are_whole_groups(type_name: str, head_dim: int, page_bytes: int | None) -> None:
    assert example(element_type=BY_NAME[type_name], num_heads=1, head_dim=head_dim).page_bytes == page_bytes


def test_page_of_six_bit_elements_that_ends_within_a_group_has_no_bytes() -> None:
    # 2 * 2 * 3 elements are 72 bits: whole bytes, and whole groups of 24. 2 elements a page are 12 bits.
    descriptor = example(element_type=BY_NAME["float6_e3m2"], page_size=2, num_heads=1, head_dim=1, total_tokens=5)
    assert descriptor.page_bytes is None
    # 4 * 8 bits of a page would be whole bytes but not whole groups for no count of 6-bit elements below 4.
    assert replace(descriptor, shape=(5, 2, 3)).page_bytes == 9


def test_parameter_layout_names_each_array() -> None:
    separate = int8(PerBlockAffine(4, 3, 4, scale_type_tag=2)).parameter_layout()
    assert [(p.buffer_index, p.offset, p.kind, p.dtype, p.entries) for p in separate] == [
        (3, 0, "scale", np.dtype(ml_dtypes.bfloat16), 20),
        (4, 0, "zero_point", np.dtype("<i4"), 20),
    ]
    shared = int8(PerChannelAffine(2, 3, 3))
    assert [(p.buffer_index, p.offset, p.size) for p in shared.parameter_layout()] == [(3, 0, 32), (3, 32, 32)]
    assert shared.buffers[3].byte_size == 64
    assert shared.scale_entries == 8


def test_private_element_type_comes_from_its_section() -> None:
    extension = ExtensionType(bit_width=4, packing_factor=2)
    descriptor = example(element_type=extension.element_type(0xF1), extension_type=extension, policy=PRIVATE_AGREED)
    assert descriptor.element_type.bits == 4
    assert descriptor.page_pool_bytes == 160
    assert decode_descriptor(descriptor.encode(PRIVATE_AGREED), PRIVATE_AGREED)[0] == descriptor
    with pytest.raises(Unsupported) as refused:
        descriptor.encode()
    assert refused.value.rule == "E6"


def test_scale_is_rounded_to_float32() -> None:
    descriptor = int8(PerTensorAffine(0.1, -7))
    assert isinstance(descriptor.quantization, PerTensorAffine)
    assert descriptor.quantization.scale == float(np.float32(0.1))
    assert decode_descriptor(descriptor.encode())[0] == descriptor


@pytest.mark.parametrize("scale", [1e300, 1e-60, float("nan")])
def test_scale_that_float32_cannot_hold_is_refused(scale: float) -> None:
    with pytest.raises(InvalidDescriptor) as refused:
        int8(PerTensorAffine(scale))
    assert refused.value.rule == "Q10"


# --- rules ------------------------------------------------------------------------------------------------------

GPU = example(device_tag=1, alignment=4096)
QUANTIZED = int8(PerBlockAffine(4, 3, 4))
CHANNELS = int8(PerChannelAffine(1, 3, 4))
SIX_SLOTS = replace(
    example(element_type=BY_NAME["int8"], page_size=6),
    quantization=PerBlockAffine(6, 3, 4),
    buffers=(*example(element_type=BY_NAME["int8"], page_size=6).buffers, BufferHandle(120, 64), BufferHandle(120, 64)),
)
FLOAT_EXTENSION = ExtensionType(bit_width=8, is_float=1, sign_bits=1, exponent_bits=4, mantissa_bits=3)
INTEGER_EXTENSION = ExtensionType(bit_width=8, is_signed=1)
ALL_STATISTICS = Statistics(computed_mask=0x3F)


def scheme(descriptor: Descriptor, **changes: Any) -> Descriptor:
    assert descriptor.quantization is not None
    return replace(descriptor, quantization=replace(descriptor.quantization, **changes))


def statistics(**changes: Any) -> Descriptor:
    return replace(example(), statistics=replace(ALL_STATISTICS, **changes))


def extension(base: ExtensionType, **changes: Any) -> Descriptor:
    return replace(example(element_type=BY_NAME["int8"]), type_tag=0xF0, extension_type=replace(base, **changes))


BROKEN_OBJECTS: list[tuple[str, str, Descriptor]] = [
    ("H9", "type_tag", replace(example(), type_tag=0xF0)),
    ("H9", "type_tag", replace(example(), extension_type=INTEGER_EXTENSION)),
    ("H12", "type_tag", replace(example(), type_tag=0)),
    ("H12", "type_tag", replace(example(), type_tag=0xFF)),
    ("H13", "type_tag", replace(example(), type_tag=0x47)),
    ("H13", "type_tag", replace(example(), type_tag=0xEF)),
    ("H15", "rank", replace(example(), shape=(9, 2))),  # type: ignore[arg-type]
    ("S1", "shape[0]", replace(example(), shape=(DYNAMIC, 2, 8))),
    ("S1", "shape[2]", replace(example(), shape=(9, 2, DYNAMIC))),
    ("O1", "byte_offset", replace(example(), byte_offset=1)),
    ("L1", "page_size", replace(example(), page_size=0)),
    ("L2", "paged_axis", replace(example(), paged_axis=1)),
    ("L3", "kv_role", replace(example(), kv_role=3)),
    ("L4", "block_table_index_type", replace(example(), block_table_index_type=2)),
    ("L6", "num_pages", replace(example(num_heads=0), num_pages=1 << 32)),
    ("B1", "buffer_count", replace(example(), buffers=example().buffers[:2])),
    ("B2", "buffer_count", replace(QUANTIZED, quantization=None)),
    ("B3", "buffers[3]", replace(QUANTIZED, quantization=PerTensorAffine(1.0))),
    ("B4", "buffers[0].byte_size", with_handle(example(), 0, byte_size=641)),
    ("B5", "buffers[1].byte_size", with_handle(example(), 1, byte_size=14)),
    ("B6", "buffers[2].byte_size", with_handle(example(), 2, byte_size=8)),
    ("B7", "shape[0]", replace(example(), shape=(13, 2, 8))),
    ("B8", "buffers[1].byte_size", with_handle(replace(example(), num_seqs=0), 2, byte_size=4)),
    ("B9", "buffers[1].byte_size", with_handle(replace(example(), num_pages=0), 0, byte_size=0)),
    ("A1", "buffers[2].alignment", with_handle(example(), 2, alignment=192)),
    ("A1", "buffers[0].alignment", with_handle(example(), 0, alignment=0)),
    ("A2", "buffers[0].alignment", with_handle(example(), 0, alignment=32)),
    ("A3", "buffers[1].alignment", with_handle(GPU, 1, alignment=2048)),
    ("D1", "buffers[0].device_tag", with_every_handle(example(), device_tag=0xFF)),
    ("D2", "buffers[0].device_tag", with_every_handle(example(), device_tag=0xEF)),
    ("D4", "buffers[0].sync_mode", with_every_handle(GPU, sync_mode=3)),
    ("D5", "buffers[1].sync_mode", with_handle(example(), 1, sync_mode=1)),
    ("D7", "buffers[0].memory_class", with_every_handle(GPU, memory_class=4)),
    ("D8", "buffers[0].memory_class", with_every_handle(GPU, memory_class=0xF0)),
    ("D9", "buffers[0].memory_class", with_every_handle(example(), memory_class=3)),
    ("D9", "buffers[0].memory_class", with_every_handle(GPU, device_tag=5, memory_class=1)),
    ("D9", "buffers[0].memory_class", with_every_handle(GPU, device_tag=0xF0, memory_class=2)),
    ("D11", "buffers[2].device_tag", with_handle(GPU, 2, device_tag=2)),
    ("D12", "buffers[1].memory_class", with_handle(GPU, 1, memory_class=1)),
    ("Q9", "type_tag", replace(QUANTIZED, type_tag=0x40)),
    ("Q9", "type_tag", replace(extension(INTEGER_EXTENSION), quantization=PerTensorAffine(1.0))),
    ("Q10", "quantization.scale", scheme(int8(PerTensorAffine(1.0)), scale=float("inf"))),
    ("Q11", "quantization.zero_point", scheme(int8(PerTensorAffine(1.0)), zero_point=128)),
    ("Q13", "quantization.axis", scheme(CHANNELS, axis=3)),
    ("Q13", "quantization.axis", scheme(QUANTIZED, axis=3)),
    ("Q14", "quantization.axis", scheme(CHANNELS, axis=0)),
    ("Q15", "quantization.scale_type_tag", scheme(CHANNELS, scale_type_tag=1)),
    ("Q16", "quantization.zero_point_buffer_index", scheme(CHANNELS, zero_point_buffer_index=5)),
    ("Q16", "quantization.zero_point_buffer_index", scheme(CHANNELS, zero_point_buffer_index=0xFFFFFFFF)),
    ("Q17", "quantization.scale_buffer_index", scheme(QUANTIZED, scale_buffer_index=0)),
    ("Q18", "quantization.zero_point_buffer_index", scheme(QUANTIZED, zero_point_buffer_index=1)),
    ("Q20", "buffers[3].byte_size", with_handle(CHANNELS, 3, byte_size=12)),
    ("Q21", "buffers[4].byte_size", with_handle(CHANNELS, 4, byte_size=4)),
    ("Q22", "quantization.axis", scheme(QUANTIZED, axis=1)),
    ("Q23", "quantization.block_size", scheme(QUANTIZED, block_size=2)),
    ("Q24", "quantization.block_size", SIX_SLOTS),
    ("Q26", "quantization.scale_type_tag", scheme(QUANTIZED, scale_type_tag=4)),
    ("Q27", "buffers[3].byte_size", with_handle(QUANTIZED, 3, byte_size=9 * 4)),
    ("Q28", "buffers[4].byte_size", with_handle(QUANTIZED, 4, byte_size=20)),
    ("Q29", "buffers[3].byte_size", with_handle(int8(PerChannelAffine(1, 3, 3)), 3, byte_size=8)),
    ("Q30", "shape[1]", replace(CHANNELS, shape=(9, DYNAMIC, 8))),
    ("Q30", "shape[0]", replace(QUANTIZED, shape=(DYNAMIC, 2, 8))),
    ("Q31", "buffers[3].byte_size", with_handle(int8(PerBlockAffine(4, 3, 3)), 3, byte_size=164)),
    ("T1", "statistics.computed_mask", statistics(computed_mask=0x40)),
    ("T3", "statistics.nm_n", statistics(nm_n=5, nm_m=4)),
    ("T4", "statistics.value_stddev", statistics(value_stddev=float("nan"))),
    ("T5", "statistics.has_inf", statistics(has_inf=2)),
    ("T6", "statistics.sparsity_ratio", statistics(sparsity_ratio=-0.1)),
    ("T6", "statistics.sparsity_ratio", statistics(sparsity_ratio=float("nan"))),
    ("E1", "extension_type.bit_width", extension(INTEGER_EXTENSION, bit_width=0)),
    ("E2", "extension_type.bit_width", extension(INTEGER_EXTENSION, bit_width=5)),
    ("E2", "extension_type.packing_factor", extension(INTEGER_EXTENSION, packing_factor=2)),
    ("E2", "extension_type.packing_factor", extension(INTEGER_EXTENSION, bit_width=4, packing_factor=1)),
    ("E4", "extension_type.is_signed", extension(FLOAT_EXTENSION, is_signed=1)),
    ("E4", "extension_type.sign_bits", extension(FLOAT_EXTENSION, sign_bits=2)),
    ("E4", "extension_type.is_float", extension(FLOAT_EXTENSION, is_float=2)),
    ("E4", "extension_type.exponent_bias", extension(INTEGER_EXTENSION, exponent_bias=1)),
    ("E4", "extension_type.has_nan", extension(INTEGER_EXTENSION, has_nan=1)),
    ("E5", "extension_type.bit_width", extension(INTEGER_EXTENSION, bit_width=12)),
]
BROKEN_ONLY_IN_BYTES = {
    *("H1", "H2", "H3", "H4", "H5", "H6", "H7", "H8", "H10", "H11", "H14", "H16", "L5", "D10"),
    *("Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7", "Q8", "Q12", "Q19", "Q19C", "T2", "E3"),
}
SWITCHED = {"D3", "D6", "E6"}
NOT_APPLIED = {"B10", "Q25"}


@pytest.mark.parametrize(("rule", "field", "descriptor"), BROKEN_OBJECTS, ids=lambda value: str(value)[:12])
def test_object_that_breaks_a_rule_is_neither_encoded_nor_decoded(
    rule: str, field: str, descriptor: Descriptor
) -> None:
    with pytest.raises(HurrayError) as refused:
        descriptor.encode(PRIVATE_AGREED)
    assert (refused.value.rule, refused.value.field) == (rule, field)
    assert {"offered", "required"} <= set(refused.value.details)
    if len(descriptor.shape) != 3:
        return
    with pytest.raises(HurrayError) as unread:
        decode_descriptor(unchecked_bytes(descriptor), PRIVATE_AGREED)
    assert (unread.value.rule, unread.value.field) == (rule, field)


@pytest.mark.parametrize("vector", vectors("invalid"), ids=lambda vector: vector["id"])
def test_invalid_vectors_are_refused_by_a_rule_they_break(vector: dict[str, Any]) -> None:
    policy = Policy(
        private_agreed="private_agreed" in vector["context"], cross_machine="transport" in vector["context"]
    )
    with pytest.raises(HurrayError) as refused:
        decode_descriptor(bytes.fromhex(vector["hex"]), policy)
    assert refused.value.rule in vector["rules_broken"]


@pytest.mark.parametrize(
    ("symmetric", "offset", "rule"), [(PerChannelAffine(2), 12, "Q19"), (PerBlockAffine(4), 16, "Q19C")]
)
def test_symmetric_scheme_names_no_zero_points(symmetric: quantization.Quantization, offset: int, rule: str) -> None:
    data = bytearray(int8(symmetric).encode())
    start = 85 + 4 * 16 + 4 + offset
    assert data[start : start + 4] == b"\xff\xff\xff\xff"
    data[start : start + 4] = (3).to_bytes(4, "little")
    with pytest.raises(InvalidDescriptor) as refused:
        decode_descriptor(data)
    assert (refused.value.rule, refused.value.field) == (rule, "quantization.zero_point_buffer_index")


def unchecked_bytes(descriptor: Descriptor) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hurray_wire.descriptor.check_descriptor", lambda *_: None)
        return descriptor.encode()


def test_every_rule_on_descriptors_is_broken_somewhere() -> None:
    rules = json.loads(VECTORS.read_bytes())["rules"]
    shown = {rule for rule, _, _ in BROKEN_OBJECTS} | BROKEN_ONLY_IN_BYTES | SWITCHED | NOT_APPLIED
    assert shown == {rule for rule in rules if not rule.startswith("V")}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"page_size": 1 << 32}, "page_size"),
        ({"num_seqs": -1}, "num_seqs"),
        ({"num_pages": 2.5}, "num_pages"),
        ({"layer_index": 0xFFFFFFFF}, "layer_index"),
        ({"shape": (9, -2, 8)}, "shape[1]"),
        ({"kv_role": None}, "kv_role"),
        ({"buffers": (BufferHandle(1 << 64, 64),) * 3}, "buffers[0].byte_size"),
        ({"buffers": (BufferHandle(0, 64),) * 256}, "buffer_count"),
        ({"quantization": PerChannelAffine(-1)}, "quantization.axis"),
        ({"quantization": PerTensorAffine(1.0, 1 << 31)}, "quantization.zero_point"),
        ({"statistics": Statistics(nm_m=256)}, "statistics.nm_m"),
        ({"extension_type": ExtensionType(1 << 32)}, "extension_type.bit_width"),
    ],
)
def test_object_whose_field_does_not_fit_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDescriptor) as refused:
        check_descriptor(replace(example(), **changes))
    assert refused.value.field == field
    assert refused.value.rule is None


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        *((rule, Unsupported) for rule in ("H2", "H13", "H14", "D3", "E6", "Q3", "Q4", "Q5", "Q6")),
        *((rule, InvalidDescriptor) for rule in ("H1", "B4", "D2", "Q2")),
    ],
)
def test_what_may_mean_something_elsewhere_is_unimplemented(rule: str, kind: type[HurrayError]) -> None:
    vector = next(
        v for v in vectors("invalid") if v["rule"] == rule and not (rule == "H14" and v["hex"][30:32] == "ff")
    )
    with pytest.raises(kind) as refused:
        decode_descriptor(bytes.fromhex(vector["hex"]))
    assert refused.value.rule == rule


# --- policy -------------------------------------------------------------------------------------------------------


def test_permissive_takes_a_wrong_paged_axis_and_nothing_else() -> None:
    permissive = Policy(permissive=True, private_agreed=True)
    taken = {
        vector["rule"]
        for vector in vectors("invalid")
        if accepts(bytes.fromhex(vector["hex"]), permissive) and not vector["context"]
    }
    assert taken == {"L2", "D3", "E6"}
    descriptor, _ = decode_descriptor(replace(example(), paged_axis=2).encode(permissive), permissive)
    assert descriptor.paged_axis == 2


def accepts(data: bytes, policy: Policy) -> bool:
    try:
        decode_descriptor(data, policy)
    except HurrayError:
        return False
    return True


def test_cross_machine_wants_every_buffer_producer_synced() -> None:
    data = with_handle(GPU, 2, sync_mode=2).encode()
    with pytest.raises(InvalidDescriptor) as refused:
        decode_descriptor(data, Policy(cross_machine=True))
    assert (refused.value.rule, refused.value.field) == ("D6", "buffers[2].sync_mode")


def test_private_devices_need_agreement() -> None:
    data = with_every_handle(example(), device_tag=0xF5, memory_class=0xF6).encode(PRIVATE_AGREED)
    with pytest.raises(Unsupported) as refused:
        decode_descriptor(data)
    assert refused.value.rule == "D3"
    assert decode_descriptor(data, PRIVATE_AGREED)[0].memory_class == 0xF6


def test_unaligned_buffers_of_accelerators_need_a_switch() -> None:
    lenient = Policy(allow_unaligned_gpu=True)
    data = example(device_tag=1, alignment=64, policy=lenient).encode(lenient)
    assert decode_descriptor(data, lenient)[0].device_tag == 1
    with pytest.raises(InvalidDescriptor) as refused:
        decode_descriptor(data)
    assert refused.value.rule == "A3"


def test_dynamic_dimensions_take_the_size_that_the_caller_resolved() -> None:
    data = unchecked_bytes(replace(example(), shape=(DYNAMIC, 2, DYNAMIC)))
    resolved, _ = decode_descriptor(data, Policy(resolved_shape=(9, 77, 8)))
    assert resolved == example()
    for sizes, rule in [((9, None, None), "S1"), ((13, None, 8), "B7"), ((9, None, 9), "B4"), ((9, 2, -1), "S1")]:
        with pytest.raises(InvalidDescriptor) as refused:
            decode_descriptor(data, Policy(resolved_shape=sizes))
        assert refused.value.rule == rule


def test_quantized_axis_stays_static_even_where_it_is_resolved() -> None:
    data = unchecked_bytes(replace(CHANNELS, shape=(9, DYNAMIC, 8)))
    with pytest.raises(InvalidDescriptor) as refused:
        decode_descriptor(data, Policy(resolved_shape=(None, 2, None)))
    assert refused.value.rule == "Q30"


# --- bounds -----------------------------------------------------------------------------------------------------


def test_declared_sizes_cost_no_memory() -> None:
    huge = example(element_type=BY_NAME["int8"], page_size=1 << 30, num_pages=1 << 28, num_heads=4, head_dim=4)
    data = huge.encode()
    assert huge.page_pool_bytes == 1 << 62
    tracemalloc.start()
    try:
        assert decode_descriptor(data)[0] == huge
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_products_past_64_bits_are_exact() -> None:
    descriptor = replace(example(), page_size=1 << 31, num_pages=1 << 31, shape=(9, 4, 1))
    with pytest.raises(InvalidDescriptor) as refused:
        check_descriptor(with_handle(descriptor, 0, byte_size=0))
    assert refused.value.details["required"] == str(1 << 65)


def test_longer_descriptor_than_the_limit_is_refused() -> None:
    data = int8(PerBlockAffine(4)).encode()
    limited = Policy(limits=Limits(max_descriptor_bytes=len(data) - 1))
    with pytest.raises(LimitExceeded) as refused:
        decode_descriptor(data, limited)
    assert refused.value.field == "descriptor_length"


@pytest.mark.parametrize("vector", vectors("valid"), ids=lambda vector: vector["id"])
def test_every_prefix_is_refused(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])[: vector["consumed"]]
    # Unknown bytes of a newer minor mean nothing, so a descriptor may end within them.
    needed = len(data) - vector["decoded"]["trailing_bytes_inside"]
    for size in range(len(data)):
        with pytest.raises(InvalidDescriptor) as refused:
            decode_descriptor(data[:size], LENIENT)
        assert refused.value.rule == "H5"
        if 20 <= size < needed:
            with pytest.raises(InvalidDescriptor) as cut:
                decode_descriptor(data[:6] + size.to_bytes(4, "little") + data[10:size], LENIENT)
            assert cut.value.rule == "H6"


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_bytes_raise_nothing_but_our_errors(data: bytes, headed: bool) -> None:
    # After a good fixed header the rest is read, too.
    header = example().encode()[:20]
    accepts(header[:6] + (20 + len(data)).to_bytes(4, "little") + header[10:] + data if headed else data, LENIENT)
