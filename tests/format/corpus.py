"""Valid descriptors of every type, scheme and device, from hypothesis or from a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hypothesis import strategies as st

from hurray_wire.descriptor import Descriptor, build_descriptor
from hurray_wire.dtypes import BY_TAG
from hurray_wire.policy import Policy
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine, Quantization, storage_range
from hurray_wire.sections import ExtensionType, Statistics

VECTORS = Path(__file__).parent / "vectors" / "manifest.json"

LENIENT = Policy(private_agreed=True, allow_unaligned_gpu=True)
"""Takes whatever any policy takes, resolved shapes and permissive reading aside."""

NARROW = (0x10, 0x11, 0x48, 0x49, 0x4A, 0x4B)
INTEGER = (*NARROW, 0x12, 0x13, 0x14, 0x15)
CLASSES_OF_DEVICE = {
    0: (0, 1, 2),
    1: (0, 1, 2, 3),
    2: (0, 1, 2, 3),
    3: (0, 1, 2),
    4: (0, 1, 2, 3),
    5: (0,),
    6: (0, 1, 2),
    7: (0, 1, 2, 3),
    8: (0, 1, 2),
    0xF0: (0, 0xF0, 0xFE),
    0xFE: (0, 0xF3),
}
EXTENSIONS = (
    ExtensionType(bit_width=1, packing_factor=8),
    ExtensionType(bit_width=2, packing_factor=4, is_signed=1),
    ExtensionType(bit_width=4, packing_factor=2),
    ExtensionType(
        bit_width=8, is_float=1, sign_bits=1, exponent_bits=4, mantissa_bits=3, exponent_bias=7, has_nan=1, has_inf=1
    ),
    ExtensionType(bit_width=24),
    ExtensionType(bit_width=4096, is_signed=1),
)


def vectors(section: str) -> list[dict[str, Any]]:
    """The vectors of one section of the manifest."""
    found: list[dict[str, Any]] = json.loads(VECTORS.read_bytes())[section]
    return found


class Source(Protocol):
    """Where choices come from."""

    def among(self, options: Sequence[Any]) -> Any: ...
    def integer(self, low: int, high: int) -> int: ...
    def number(self, low: float, high: float) -> float: ...


class Seeded:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def among(self, options: Sequence[Any]) -> Any:
        return self._random.choice(options)

    def integer(self, low: int, high: int) -> int:
        if high - low > 1 << 16:
            # Spread over magnitudes, not values.
            return min(high, low + self._random.getrandbits(self._random.randint(0, (high - low).bit_length())))
        return self._random.randint(low, high)

    def number(self, low: float, high: float) -> float:
        return self._random.choice((low, high, 0.0, self._random.uniform(low, high)))


class Drawn:
    """Choices of hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def among(self, options: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        drawn: int = self._draw(st.integers(low, high))
        return drawn

    def number(self, low: float, high: float) -> float:
        drawn: float = self._draw(st.floats(low, high))
        return drawn


def a_descriptor(source: Source) -> Descriptor:
    """A valid descriptor under LENIENT: any type, scheme, geometry, device and optional section."""
    scheme_tag = source.among((0, 0, 1, 2, 3))
    private = scheme_tag == 0 and source.among((False, False, True))
    extension = source.among(EXTENSIONS) if private else None
    tags = tuple(BY_TAG) if scheme_tag == 0 else NARROW if scheme_tag == 3 else INTEGER
    tag = source.integer(0xF0, 0xFE) if private else source.among(tags)
    page_size = 1 << source.integer(1, 10) if scheme_tag == 3 else source.integer(1, 300)
    index_type = source.integer(0, 1)
    num_pages = source.integer(0, (1 << 33) if index_type else 0xFFFFFFFF)
    num_seqs = source.integer(0, (1 << 32) - 1)
    total_logical_pages = source.integer(0, 1 << 32) if num_pages and num_seqs else 0
    device_tag = source.among(tuple(CLASSES_OF_DEVICE))
    return build_descriptor(
        element_type=extension.element_type(tag) if extension else BY_TAG[tag],
        page_size=page_size,
        num_pages=num_pages,
        num_heads=source.integer(0, 40),
        head_dim=source.integer(0, 130),
        total_tokens=source.integer(0, total_logical_pages * page_size),
        num_seqs=num_seqs,
        total_logical_pages=total_logical_pages,
        kv_role=source.integer(0, 2),
        layer_index=source.among((None, 0, 3, 0xFFFFFFFE)),
        block_table_index_type=index_type,
        quantization=_scheme(source, scheme_tag, tag, page_size),
        statistics=_statistics(source) if source.among((False, True)) else None,
        extension_type=extension,
        device_tag=device_tag,
        memory_class=source.among(CLASSES_OF_DEVICE[device_tag]),
        alignment=source.among((64, 4096, 1 << 31)),
        policy=LENIENT,
    )


def _scheme(source: Source, scheme_tag: int, type_tag: int, page_size: int) -> Quantization | None:
    if scheme_tag == 0:
        return None
    if scheme_tag == 1:
        low, high = storage_range(type_tag)
        scale = source.among((1.0, -0.1, 1e-38, 3e38, 0.0078125))
        return PerTensorAffine(scale, source.integer(low, min(high, (1 << 31) - 1)))
    zero_points = source.among((None, 3, 4))
    if scheme_tag == 2:
        return PerChannelAffine(source.integer(1, 2), 3, zero_points)
    return PerBlockAffine(page_size, 3, zero_points, source.integer(1, 3))


def _statistics(source: Source) -> Statistics:
    return Statistics(
        computed_mask=source.integer(0, 0x3F),
        nnz=source.integer(0, (1 << 64) - 1),
        sparsity_ratio=source.number(0.0, 1.0),
        value_min=source.number(-1e300, 1.0),
        value_max=source.among((float("inf"), float("nan"), 5.5)),
        value_abs_max=source.number(0.0, 1e9),
        value_mean=source.number(-1.0, 1.0),
        value_stddev=source.number(0.0, 1e9),
        nm_n=source.integer(0, 4),
        nm_m=source.integer(4, 255),
        has_nan=source.integer(0, 1),
        has_inf=source.integer(0, 1),
    )


@st.composite
def descriptors(draw: Any) -> Descriptor:
    """Valid descriptors under LENIENT."""
    return a_descriptor(Drawn(draw))
