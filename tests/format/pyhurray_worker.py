"""The format author's binding in a process of its own, because it can abort. Run as a script, fed over pipes.

A request is a mode byte, a u32 count, and that many descriptors, each with its u32 length. The answer to mode `v` is
one byte per descriptor, written as soon as it is known: 1 if pyhurray accepts it, else 0. The answer to mode `f` is a
line of JSON per descriptor: the fields that it decodes, or null.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, BinaryIO

KIND_OF_CLASS = {
    "PerTensorAffine": "per_tensor_affine",
    "PerChannelAffine": "per_channel_affine",
    "PerBlockAffine": "per_block_affine",
}
STATISTICS = {
    "nnz": 0,
    "sparsity_ratio": 1,
    "value_min": 2,
    "value_max": 2,
    "value_abs_max": 2,
    "value_mean": 3,
    "value_stddev": 3,
    "nm_n": 4,
    "nm_m": 4,
    "has_nan": 5,
    "has_inf": 5,
}
EXTENSION = (
    *("bit_width", "packing_factor", "is_float", "is_signed", "sign_bits", "exponent_bits", "mantissa_bits"),
    *("exponent_bias", "has_nan", "has_inf"),
)


def decode(data: bytes) -> Any:
    """The descriptor, after everything that pyhurray itself can check in it. Raises what pyhurray raises."""
    import hurray

    descriptor = hurray.Descriptor.decode(data)
    layout, scheme = descriptor.layout, descriptor.quantization
    if isinstance(layout, hurray.BlockPagedLayout):
        # It takes no dimension past int64, which says nothing about the descriptor.
        if max(descriptor.shape) < 1 << 63:
            layout.validate_against_shape(descriptor.shape)
        if scheme is not None:
            layout.validate_quantization_compatibility(scheme)
    return descriptor


def accepts(data: bytes) -> bool:
    try:
        decode(data)
    except Exception:
        return False
    return True


def fields(data: bytes) -> dict[str, Any] | None:
    try:
        descriptor = decode(data)
    except Exception:
        return None
    layout, device, scheme = descriptor.layout, descriptor.device, descriptor.quantization
    statistics, extension = descriptor.statistics, descriptor.extension_type
    return {
        "version": list(descriptor.version),
        "type_tag": descriptor.dtype.tag,
        "shape": list(descriptor.shape),
        "byte_offset": descriptor.byte_offset,
        "page_size": layout.page_size,
        "num_pages": layout.num_pages,
        "paged_axis": layout.paged_axis,
        "num_seqs": layout.num_seqs,
        "kv_role": layout.kv_role,
        "layer_index": layout.layer_index,
        "block_table_index_type": layout.block_table_index_type,
        "device_tag": device.tag,
        "memory_class": device.memory_class_tag,
        "buffers": [[handle.byte_size, handle.alignment, handle.sync_mode] for handle in descriptor.buffer_handles],
        "quantization": None if scheme is None else [KIND_OF_CLASS[type(scheme).__name__], scheme.encode().hex()],
        "statistics": None
        if statistics is None
        else {"computed_mask": statistics.computed_mask}
        | {name: _exact(getattr(statistics, name)) for name in STATISTICS},
        "extension_type": None if extension is None else [int(getattr(extension, name)) for name in EXTENSION],
        "encoded": descriptor.encode().hex(),
    }


def _exact(value: Any) -> Any:
    """A float as its bits: JSON has no NaN, and two of them differ."""
    return struct.pack("<d", value).hex() if isinstance(value, float) else value


def read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        sys.exit(0)
    return data


def main() -> None:
    requests = sys.stdin.buffer
    while True:
        mode, count = struct.unpack("<cI", read(requests, 5))
        lengths = [struct.unpack("<I", read(requests, 4))[0] for _ in range(count)]
        body = memoryview(read(requests, sum(lengths)))
        position = 0
        for length in lengths:
            data = bytes(body[position : position + length])
            position += length
            if mode == b"v":
                os.write(1, b"\1" if accepts(data) else b"\0")
            else:
                os.write(1, json.dumps(fields(data)).encode() + b"\n")


if __name__ == "__main__":
    main()
