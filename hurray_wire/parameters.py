"""Quantization parameter buffers as typed arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .descriptor import Descriptor
from .memory import byte_view, is_on_device
from .quantization import Parameter

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
"""A buffer: contiguous, any element type, read as bytes. Arrays may be a GPU's."""


def parameter_arrays(
    descriptor: Descriptor, buffers: Sequence[Buffer | None]
) -> Iterator[tuple[Parameter, npt.NDArray[Any]]]:
    """Each parameter array of a tensor, scales first, as a view of its buffer: one-dimensional, `entries` long.

    `buffers` are all of the tensor's, by the format's index; the first three are not read and may be None. Lengths
    must have been checked (V5). A view is writable where its buffer is. On a GPU bfloat16 is raw words, uint16: the
    array module there has no such type.
    """
    for parameter in descriptor.parameter_layout():
        buffer = buffers[parameter.buffer_index]
        assert buffer is not None
        data = byte_view(buffer)[parameter.offset : parameter.offset + parameter.size]
        raw = parameter.dtype.name == "bfloat16" and is_on_device(data)
        yield parameter, data.view(np.uint16 if raw else parameter.dtype)


def neutral(parameter: Parameter) -> npt.NDArray[Any]:
    """What a parameter of a dead slot holds, one value: scale 1.0 (the format forbids zero scales), zero point 0."""
    return np.full(1, 1 if parameter.kind == "scale" else 0, dtype=parameter.dtype)


def neutral_word(parameter: Parameter) -> tuple[str, int]:
    """The same as raw bits: the unsigned type of that width, and the number."""
    word = f"u{parameter.dtype.itemsize}"
    return word, int(neutral(parameter).view(word)[0])
