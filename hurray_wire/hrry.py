"""Snapshots in .hrry files, through pyhurray (the `files` extra), the format author's own implementation.

A file holds one tensor per (layer, role), named "layers.3.key" or, without layers, "key", and under the file keys
`hurray_transfer.*` what a descriptor cannot carry:

hurray_transfer.version       1
hurray_transfer.num_seqs      number of sequences
hurray_transfer.token_counts  list of tokens per sequence; absent where there is no sequence (pyhurray stores no
                              empty list)

pyhurray reads a file in this process and can abort it on a damaged one. Load files of unknown origin in a child.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .descriptor import Descriptor, decode_descriptor
from .errors import InvalidDescriptor, InvalidSnapshot, Unsupported
from .memory import aligned_empty
from .parameters import parameter_arrays
from .prepare import PreparedSnapshot, prepare
from .quantization import PerTensorAffine
from .sections import KV_ROLE_NAMES
from .snapshot import KVSnapshot
from .validate import as_token_counts

_PREFIX: Final = "hurray_transfer."
_VERSION: Final = 1


def save_hrry(path: str | os.PathLike[str], snapshot: KVSnapshot) -> None:
    """Write a snapshot as it would cross the wire: compact, dead slots cleared, pages that no sequence names left out.

    The file appears whole or not at all. Raises Unsupported without pyhurray or for counts past 2**63 - 1,
    InvalidSnapshot where the file cannot be written.
    """
    hurray = _pyhurray()
    prepared = prepare(snapshot)
    counts = [int(count) for count in prepared.structure.token_counts]
    keys: dict[str, Any] = {f"{_PREFIX}version": _VERSION, f"{_PREFIX}num_seqs": len(counts)}
    if counts:
        if max(counts) >= 1 << 63:
            raise Unsupported("the file takes signed counts", field="token_counts", offered=max(counts))
        keys[f"{_PREFIX}token_counts"] = counts
    tensors = {}
    for index, tensor in enumerate(prepared.tensors):
        descriptor = tensor.descriptor
        layer = "" if descriptor.layer_index is None else f"layers.{descriptor.layer_index}."
        tensors[layer + descriptor.kv_role_name] = _tensor(hurray, prepared, index)
    target = Path(path)
    partial = target.with_name(target.name + ".part")
    try:
        hurray.save(str(partial), tensors, kv=keys)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidSnapshot(f"the file cannot be written: {error}", field="path", offered=target) from error


def _tensor(hurray: Any, prepared: PreparedSnapshot, index: int) -> Any:
    tensor = prepared.tensors[index]
    descriptor = tensor.descriptor
    pool = aligned_empty(descriptor.page_pool_bytes)
    prepared.read(index, 0, pool)
    parameters = [array.tobytes() for _, array in parameter_arrays(descriptor, (None, None, None, *tensor.parameters))]
    return hurray.Tensor(
        pool.tobytes(),
        hurray.Dtype.from_tag(descriptor.type_tag),
        list(descriptor.shape),
        aux_buffers=[prepared.block_table.tobytes(), prepared.seq_ptr.tobytes(), *parameters],
        layout=hurray.BlockPagedLayout(
            page_size=descriptor.page_size,
            num_pages=descriptor.num_pages,
            paged_axis=0,
            num_seqs=descriptor.num_seqs,
            kv_role=KV_ROLE_NAMES[descriptor.kv_role],
            layer_index=descriptor.layer_index,
            block_table_index_type=descriptor.index_dtype.name,
        ),
        quantization=_scheme(hurray, descriptor),
        extension_type=_extension(hurray, descriptor),
    )


def _scheme(hurray: Any, descriptor: Descriptor) -> Any:
    """The scheme in pyhurray's classes. It takes no shared parameter buffer, so each array has one of its own."""
    scheme = descriptor.quantization
    if scheme is None:
        return None
    if not isinstance(scheme, PerTensorAffine):
        second = None if scheme.symmetric else 4
        scheme = dataclasses.replace(scheme, scale_buffer_index=3, zero_point_buffer_index=second)
    return hurray.decode_quantization(scheme.pack())


def _extension(hurray: Any, descriptor: Descriptor) -> Any:
    extension = descriptor.extension_type
    if extension is None:
        return None
    fields = dataclasses.asdict(extension)
    del fields["packing_factor"]
    for name in ("is_float", "is_signed", "has_nan", "has_inf"):
        fields[name] = bool(fields[name])
    return hurray.ExtensionType(**fields)


def load_hrry(path: str | os.PathLike[str], token_counts: Sequence[int] | npt.NDArray[Any] | None = None) -> KVSnapshot:
    """Read a snapshot whose tensors are all block-paged and share one block structure. Contents are checked.

    `token_counts` is required for a file without `hurray_transfer.token_counts`, and must agree with it otherwise.
    Raises InvalidSnapshot, InvalidDescriptor, InvalidContents; Unsupported without pyhurray.
    """
    hurray = _pyhurray()
    try:
        keys = hurray.load_kv(str(path))
        tensors = hurray.load(str(path))
    except OSError as error:
        raise InvalidSnapshot(f"the file cannot be read: {error}", field="path", offered=path) from error
    except (hurray.InvalidDescriptorError, hurray.BufferError, hurray.UnsupportedError) as error:
        raise InvalidDescriptor(f"pyhurray does not take the file: {error}", field="path", offered=path) from error
    counts = _token_counts(keys, token_counts)
    loaded = []
    for name in sorted(tensors):
        tensor = tensors[name]
        descriptor, _ = decode_descriptor(bytes(tensor.descriptor.encode()))
        buffers = [np.from_dlpack(tensor.buffer(index)) for index in range(len(descriptor.buffers))]
        loaded.append((descriptor, buffers))
    return KVSnapshot.from_buffers(loaded, counts)


def _token_counts(
    keys: dict[str, Any], given: Sequence[int] | npt.NDArray[Any] | None
) -> Sequence[int] | npt.NDArray[Any]:
    version = keys.get(f"{_PREFIX}version", _VERSION)
    if version != _VERSION:
        raise Unsupported(
            "the file keys have another version", field=f"{_PREFIX}version", offered=version, required=_VERSION
        )
    stored = keys.get(f"{_PREFIX}token_counts")
    if stored is None and keys.get(f"{_PREFIX}num_seqs") == 0:
        stored = []
    if stored is None and given is None:
        raise InvalidSnapshot(
            "the file does not say how many tokens each sequence has: token_counts= is required",
            field="token_counts",
        )
    if stored is not None and given is not None:
        mine, theirs = as_token_counts(given), as_token_counts(stored)
        if not np.array_equal(mine, theirs):
            raise InvalidSnapshot(
                "token_counts= differ from those in the file",
                field="token_counts",
                offered=mine.tolist(),
                required=theirs.tolist(),
            )
    return stored if stored is not None else given  # type: ignore[return-value]


def _pyhurray() -> Any:
    try:
        return importlib.import_module("hurray")
    except ImportError as error:
        raise Unsupported(".hrry files need pyhurray: install hurray-transfer[files]", field="path") from error
