"""Quantization parameter buffers as typed arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .descriptor import Descriptor
from .memory import byte_view
from .quantization import Parameter

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
"""A host buffer: contiguous, any element type, read as bytes."""


def parameter_arrays(
    descriptor: Descriptor, buffers: Sequence[Buffer | None]
) -> Iterator[tuple[Parameter, npt.NDArray[Any]]]:
    """Each parameter array of a tensor, scales first, as a view of its buffer: one-dimensional, `entries` long.

    `buffers` are all of the tensor's, by the format's index; the first three are not read and may be None. Lengths
    must have been checked (V5). A view is writable where its buffer is.
    """
    for parameter in descriptor.parameter_layout():
        buffer = buffers[parameter.buffer_index]
        assert buffer is not None
        data = byte_view(buffer)[parameter.offset : parameter.offset + parameter.size]
        yield parameter, data.view(parameter.dtype)


def neutral(parameter: Parameter) -> npt.NDArray[Any]:
    """What a parameter of a dead slot holds, one value: scale 1.0 (the format forbids zero scales), zero point 0."""
    return np.full(1, 1 if parameter.kind == "scale" else 0, dtype=parameter.dtype)
