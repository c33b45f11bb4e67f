"""Snapshot images to send: compact, aliased, with dead slots, from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hurray_wire.descriptor import build_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.image import ImagePlan, plan_image
from hurray_wire.limits import Limits
from hurray_wire.memory import aligned_empty
from hurray_wire.quantization import PerBlockAffine

PAGE_SIZE = 4


@dataclass
class Image:
    """A plan, the bytes it lays out, and the facts that a test compares with."""

    plan: ImagePlan
    data: npt.NDArray[np.uint8]
    token_counts: npt.NDArray[np.uint64]
    dead_slots: int

    def place(self, tensor: int, buffer: int) -> npt.NDArray[np.uint8]:
        offset = self.plan.buffer_offsets[tensor][buffer]
        return self.data[offset : offset + self.plan.descriptors[tensor].buffers[buffer].byte_size]


def make_image(
    seed: int = 0,
    *,
    layers: int = 2,
    pages: int = 40,
    dim: int = 256,
    chunk_bytes: int = 65536,
    scaled: bool = False,
    view: bool = False,
) -> Image:
    """Sequence 0 owns all pages, the last one partly; sequence 1 shares the first half; sequence 2 is empty.

    `scaled`: int8 with a scale for each slot. `view`: what follows the index is to be shown.
    """
    rng = np.random.default_rng(seed)
    half = pages // 2
    table = np.concatenate([np.arange(pages), np.arange(half)]).astype(np.uint32)
    seq_ptr = np.array([0, pages, pages + half, pages + half], dtype=np.uint32)
    counts = np.array([pages * PAGE_SIZE - 3, half * PAGE_SIZE - 2, 0], dtype=np.uint64)
    descriptors = [
        build_descriptor(
            element_type=BY_NAME["int8" if scaled else "float16"],
            quantization=PerBlockAffine(block_size=PAGE_SIZE) if scaled else None,
            page_size=PAGE_SIZE,
            num_pages=pages,
            num_heads=2,
            head_dim=dim,
            total_tokens=int(counts.sum()),
            num_seqs=3,
            total_logical_pages=table.size,
            kv_role=role,
            layer_index=layer,
        )
        for layer in range(layers)
        for role in (0, 1)
    ]
    plan = plan_image(descriptors, chunk_bytes, Limits(), view=view)
    image = Image(plan, aligned_empty(plan.image_bytes), counts, dead_slots=3 * len(descriptors))
    image.place(0, 1)[:] = table.view(np.uint8)
    image.place(0, 2)[:] = seq_ptr.view(np.uint8)
    for tensor in range(len(descriptors)):
        pool = image.place(tensor, 0)
        pool[:] = rng.integers(1, 256, pool.size, dtype=np.uint8)
        pool.reshape(pages * PAGE_SIZE, -1)[-3:] = 0
        if scaled:
            image.place(tensor, 3).view(np.float32)[:] = [*rng.uniform(0.5, 2, pages * PAGE_SIZE - 3), 1, 1, 1]
    return image
