"""Where vLLM keeps the keys and values of a layer, seen as the page pools that a snapshot is made of.

A layer's cache is a logical [B, H, N, C] view: blocks, KV heads, slots of a block, and C = head_size + head_size_v.
What a head's part of a block looks like inside is the attention backend's business. Each way that is known is an
Interior; which one a backend has is found by having it write, and reading that back (engine.py). The views copy
nothing: put and get bring pages into the format's order as they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hurray_wire.errors import Unsupported


class Interior(Enum):
    """What a head's part of a block looks like, [slots, C] by the logical view. D: head_size, N: slots."""

    SIDE_BY_SIDE = "side by side"
    """Each slot holds its key, then its value."""

    HALVES = "halves"
    """All keys [N, D], then all values [N, D]."""

    TRANSPOSED_KEYS = "halves, keys transposed"
    """All keys transposed, [D, N], then all values [N, D]: what the CPU's kernels read."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A view [num_pages, page_size, num_heads, head_dim] of a layer's cache; strides and offset in elements."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int


def split(shape: Sequence[int], strides: Sequence[int], head_size: int, interior: Interior) -> tuple[Strided, Strided]:
    """Keys and values of a layer whose cache has this shape [B, H, N, C] and these strides, in elements.

    Raises Unsupported where the interior does not fit them.
    """
    blocks, heads, slots, content = shape
    block_step, head_step, slot_step, step = strides
    value_size = content - head_size
    if interior is Interior.SIDE_BY_SIDE:
        order = (block_step, slot_step, head_step, step)
        keys = Strided((blocks, slots, heads, head_size), order, 0)
        return keys, Strided((blocks, slots, heads, value_size), order, head_size * step)
    if value_size != head_size or (slot_step, step) != (content, 1):
        raise Unsupported(
            f"a head's page in {interior.value} is one piece, keys and values alike",
            field="layout",
            offered=f"shape {tuple(shape)}, strides {tuple(strides)}, head_size {head_size}",
            required=f"shape [B, H, N, {2 * head_size}], strides [.., .., {2 * head_size}, 1]",
        )
    size = (blocks, slots, heads, head_size)
    values = Strided(size, (block_step, head_size, head_step, 1), slots * head_size)
    if interior is Interior.HALVES:
        return Strided(size, values.strides, 0), values
    return Strided(size, (block_step, 1, head_step, slots), 0), values
