"""KVSnapshot: the paged caches of one batch, over an engine's own pools or over received memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from . import elements
from .alike import placed
from .descriptor import Descriptor
from .dtypes import ElementType
from .errors import InvalidRequest, InvalidSnapshot, Misuse
from .memory import byte_view, device_of
from .paged import (
    BlockTables,
    CacheKey,
    DeclaredCache,
    PageShape,
    Quantized,
    check_roles,
    declare_caches,
    describe,
    read_tables,
    tensor_name,
)
from .pages import live_slots
from .parameters import Buffer
from .policy import STRICT, Policy
from .validate import (
    BlockStructure,
    as_token_counts,
    check_buffer_lengths,
    check_parameters,
    check_pool,
    check_structure,
    read_structure,
)

_FITTED: Final = (
    "page_size",
    "num_pages",
    "num_seqs",
    "total_tokens",
    "total_logical_pages",
    "block_table_index_type",
    "page_pool",
)


@dataclass(frozen=True, slots=True, eq=False)
class KVTensor:
    """One tensor of a snapshot: what it is and where its bytes are.

    `page_pool` is uint8 [num_pages, page_bytes]; words [num_pages, page_size, num_heads, head_dim] where an engine
    keeps pages in another order; uint8 of one axis, all packed, where pages are no whole bytes. `parameters` are the
    quantization buffers 3 and up. The index buffers belong to the snapshot: all tensors share one structure.
    """

    descriptor: Descriptor
    page_pool: Any
    parameters: tuple[npt.NDArray[Any], ...] = ()

    @classmethod
    def over(cls, descriptor: Descriptor, page_pool: Any, parameters: tuple[npt.NDArray[Any], ...]) -> Self:
        """Over a packed pool of one axis, uint8."""
        if descriptor.page_bytes is not None:
            page_pool = page_pool.reshape(descriptor.num_pages, descriptor.page_bytes)
        return cls(descriptor, page_pool, parameters)

    @property
    def layer_index(self) -> int | None:
        """Layer, or None for a cache without layers."""
        return self.descriptor.layer_index

    @property
    def role(self) -> str:
        """ "key", "value" or "fused"."""
        return self.descriptor.kv_role_name

    @property
    def name(self) -> str:
        """How messages name it: "layer 3 key"."""
        return tensor_name(self.layer_index, self.role)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Page pool and parameters by the format's index, None for the two index buffers."""
        return (self.page_pool, None, None, *self.parameters)


class KVSnapshot:
    """The tensors of one batch, one block structure, one token count per sequence. A context manager.

    Over an engine's pools (`from_paged`) it is a view: the pages it names must not be written while it is put. Over
    received memory it owns what `release` gives back; `close`, leaving the `with` block, or the last reference going
    away calls that once, and afterwards every access raises Misuse. Arrays taken out before must not be used after.
    """

    def __init__(
        self,
        tensors: Sequence[KVTensor],
        structure: BlockStructure,
        *,
        release: Callable[[], object] | None = None,
    ) -> None:
        """`structure` is checked already; the tensors must fit it and each other.

        Raises InvalidSnapshot for a layer that lacks a role or a tensor that does not fit. `release` must not refer
        to the snapshot.
        """
        check_roles([(tensor.layer_index, tensor.role) for tensor in tensors])
        _check_fit(tensors, structure)
        self._tensors = tuple(
            sorted(tensors, key=lambda item: (item.descriptor.layer_index or 0, item.descriptor.kv_role))
        )
        self._structure = structure
        self._closed = False
        self._release = None if release is None else weakref.finalize(self, release)
        if self._release is not None:
            # A process that ends gives everything back anyway, and what `release` needs may be gone by then.
            self._release.atexit = False

    @classmethod
    def from_paged(
        cls,
        caches: Mapping[CacheKey, object],
        *,
        block_tables: BlockTables,
        token_counts: Sequence[int] | npt.NDArray[Any],
        layout: str = "NHD",
        element_type: str | ElementType | Mapping[CacheKey, str | ElementType] | None = None,
        page_shape: PageShape | Mapping[CacheKey, PageShape] | None = None,
        quantization: Quantized | Mapping[CacheKey, Quantized] | None = None,
    ) -> Self:
        """A snapshot over an engine's pools, without copying them.

        `caches`: {(layer, role): array}, role "key", "value" or "fused", arrays [num_pages, page_size, num_heads,
        head_dim] ("HND": [num_pages, num_heads, page_size, head_dim]) of any strides: numpy, cupy, torch, DLPack,
        buffers. All share page_size and num_pages. Pages are brought into NHD order as they are sent.
        `block_tables`: a list with one table of page ids per sequence, or (seq_ptr, block_table) arrays; copied.
        `token_counts`: one per sequence, zero allowed; copied. Pages past the last one needed stay behind.
        `element_type`: what unsigned words hold (fp8 kept as uint8), and for packed types, whose pools are uint8
        [num_pages, page_bytes], together with `page_shape` (page_size, num_heads, head_dim). An integer cache needs
        `quantization`, or an `element_type` that says it is plain integers. These three are one for all tensors, or
        a mapping with one per cache.

        Raises InvalidSnapshot, InvalidContents (rule, index and value), InvalidDescriptor, Unsupported.
        """
        declared = declare_caches(
            caches, layout=layout, element_type=element_type, page_shape=page_shape, quantization=quantization
        )
        for cache in declared:
            _check_meaning(cache, element_type)
        pool = declared[0].pool
        seq_ptr, block_table = read_tables(block_tables, pool.num_pages)
        structure = BlockStructure(
            page_size=pool.page_size,
            num_pages=pool.num_pages,
            seq_ptr=seq_ptr,
            block_table=block_table,
            token_counts=as_token_counts(token_counts),
        )
        check_structure(structure)
        return cls(describe_all(declared, structure), structure)

    @classmethod
    def from_buffers(
        cls,
        tensors: Sequence[tuple[Descriptor, Sequence[Buffer]]],
        token_counts: Sequence[int] | npt.NDArray[Any],
        *,
        policy: Policy = STRICT,
        release: Callable[[], object] | None = None,
    ) -> Self:
        """A snapshot over buffers that nobody has checked: each tensor's descriptor and all its buffers, in order.

        Contents are checked by V1-V9 and V11-V14; dead slots are left as they are. Only the index buffers are copied.
        Raises InvalidContents, and InvalidSnapshot where the tensors do not share one block structure.
        """
        if not tensors:
            check_roles([])
        structure = None
        for descriptor, buffers in tensors:
            check_buffer_lengths(descriptor, buffers)
            own = read_structure(descriptor, buffers[1], buffers[2], token_counts, policy)
            if structure is not None and not own.same_as(structure):
                raise InvalidSnapshot(
                    f"{tensor_name(descriptor.layer_index, descriptor.kv_role_name)} has a block structure of its own",
                    field="block_table",
                    required="one structure for all tensors",
                )
            structure = structure or own
        assert structure is not None
        kept = [
            KVTensor.over(descriptor, byte_view(buffers[0]), tuple(map(byte_view, buffers[3:])))
            for descriptor, buffers in tensors
        ]
        live = live_slots(structure)
        for tensor in kept:
            check_parameters(tensor.descriptor, tensor.buffers, live)
            check_pool(tensor.descriptor, tensor.page_pool, live)
        return cls(kept, structure, release=release)

    # --- what it holds ------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> tuple[KVTensor, ...]:
        """All tensors, by layer, then key, value, fused."""
        self._check_open()
        return self._tensors

    @property
    def structure(self) -> BlockStructure:
        """The block structure that all tensors share."""
        self._check_open()
        return self._structure

    @property
    def token_counts(self) -> npt.NDArray[np.uint64]:
        """Tokens of each sequence, uint64 [num_seqs]."""
        return self.structure.token_counts

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return self.structure.num_seqs

    @property
    def device(self) -> tuple[int, int]:
        """Device tag and number of the device that the page pools are on."""
        return device_of(self.tensors[0].page_pool)

    @property
    def nbytes(self) -> int:
        """Bytes of the page pools and parameters as they are kept here, pages that no sequence names included."""
        return sum(
            tensor.page_pool.nbytes + sum(array.nbytes for array in tensor.parameters) for tensor in self.tensors
        )

    def tensor(self, layer: int | None, role: str) -> KVTensor:
        """The tensor of one layer and role. Raises InvalidRequest if there is none."""
        for item in self.tensors:
            if (item.layer_index, item.role) == (layer, role):
                return item
        raise InvalidRequest(
            f"the snapshot has no {tensor_name(layer, role)}", field="layer", offered=tensor_name(layer, role)
        )

    def tokens(self, layer: int | None, role: str, seq: int, dequantize: bool = False) -> npt.NDArray[Any]:
        """All tokens of sequence `seq` in order, a copy: [tokens, num_heads, head_dim].

        Stored values in NumPy's or ml_dtypes' own dtype of the element type; float32 with `dequantize`.
        Raises InvalidRequest for a tensor or sequence that is not there, Unsupported, Misuse after `close`.
        """
        tensor = self.tensor(layer, role)
        return elements.tokens(tensor.descriptor, self.structure, tensor.buffers, seq, dequantize=dequantize)

    # --- lifetime -----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Give the memory back. Safe to call again."""
        self._closed = True
        self._tensors = ()
        if self._release is not None:
            self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise Misuse("the snapshot is closed: its memory was given back")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<KVSnapshot closed>"
        structure = self._structure
        types = "/".join(sorted({tensor.descriptor.element_type.name for tensor in self._tensors}))
        return (
            f"<KVSnapshot {len(self._tensors)} tensors of {types}, {structure.num_seqs} sequences,"
            f" {structure.total_tokens} tokens, {structure.total_logical_pages} pages of {structure.page_size}>"
        )


def describe_all(declared: Sequence[DeclaredCache], structure: BlockStructure) -> list[KVTensor]:
    """A caller's caches as tensors of one structure. Raises what `describe` raises."""
    tensors = []
    plain: dict[tuple[object, ...], Descriptor] = {}
    for cache in declared:
        pool, quantized = cache.pool, cache.quantized
        key = (pool.element_type, pool.num_heads, pool.head_dim)  # all else is the same for all of them
        if quantized is None and key in plain:
            descriptor = placed(plain[key], cache.kv_role, cache.layer_index)
        else:
            descriptor = describe(
                cache,
                num_seqs=structure.num_seqs,
                total_tokens=structure.total_tokens,
                total_logical_pages=structure.total_logical_pages,
                block_table_index_type=int(structure.block_table.dtype.itemsize == 8),
            )
            if quantized is None:
                plain[key] = descriptor
        tensors.append(KVTensor(descriptor, pool.array, () if quantized is None else quantized.parameters))
    return tensors


def _check_meaning(cache: DeclaredCache, element_type: object) -> None:
    """Refuse integers that nobody said anything about: without scales their values mean nothing."""
    item = cache.pool.element_type
    if element_type is None and cache.quantized is None and item.name.lstrip("u").startswith("int"):
        name = tensor_name(cache.layer_index, cache.role)
        raise InvalidSnapshot(
            f"{name} holds integers without scales: give quantization=, or element_type= if they are plain numbers"
            " or the words of another type",
            field="quantization",
            tensor=name,
            offered=item.name,
        )


def _check_fit(tensors: Sequence[KVTensor], structure: BlockStructure) -> None:
    required = (
        structure.page_size,
        structure.num_pages,
        structure.num_seqs,
        structure.total_tokens,
        structure.total_logical_pages,
        structure.block_table.dtype.itemsize,
    )
    for tensor in tensors:
        descriptor = tensor.descriptor
        offered = (
            descriptor.page_size,
            descriptor.num_pages,
            descriptor.num_seqs,
            descriptor.total_tokens,
            descriptor.total_logical_pages,
            descriptor.index_width_bytes,
        )
        if offered != required or tensor.page_pool.nbytes != descriptor.page_pool_bytes:
            _refuse_misfit(tensor, (*offered, tensor.page_pool.nbytes), (*required, descriptor.page_pool_bytes))


def _refuse_misfit(tensor: KVTensor, offered: Sequence[int], required: Sequence[int]) -> NoReturn:
    field = next(number for number, pair in enumerate(zip(offered, required, strict=True)) if pair[0] != pair[1])
    raise InvalidSnapshot(
        f"{tensor.name} does not fit the block structure",
        field=_FITTED[field],
        tensor=tensor.name,
        offered=offered[field],
        required=required[field],
    )
