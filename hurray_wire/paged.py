"""A caller's caches and block tables, as declared: arrays of an engine become pools that the format's words fit.

Nothing is guessed. The layout of an array is what the caller says it is, its strides are its own, a packed pool says
its element type and page shape, and integers say whether they are quantized. Pools are seen, never copied.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .arrays import ArrayView, as_array
from .descriptor import Descriptor, build_descriptor
from .dtypes import BY_NAME, ElementType
from .errors import InvalidContents, InvalidSnapshot, Unsupported
from .memory import DEVICE_CPU, device_name, device_of, to_host
from .packing import word_dtype
from .quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine, Quantization
from .sections import KV_ROLE_NAMES
from .validate import Index, check_page_ids

CacheKey = tuple[int | None, str]
"""(layer_index, role): layer None for a cache without layers, role "key", "value" or "fused"."""

PageShape = tuple[int, int, int]
"""(page_size, num_heads, head_dim)."""

_AXES: Final = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}
_MAX_LAYER: Final = 0xFFFFFFFE
_MAX_UINT32_PAGES: Final = 0xFFFFFFFF
_MAX_PAGE_SIZE: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One page pool as an engine keeps it.

    `array` is uint8 [num_pages, page_bytes] where a page's bytes lie together in NHD order, else words
    [num_pages, page_size, num_heads, head_dim], unsigned and as wide as an element, with whatever strides. A view:
    writing to it writes to the caller's array.
    """

    array: Any
    element_type: ElementType
    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int
    device_tag: int = DEVICE_CPU
    device_id: int = 0
    read_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """What the integers of a cache mean: a scheme of the format and its parameter arrays.

    `parameters` are the contiguous buffers 3 and up that the scheme names, on the device of the cache's pool;
    `read_only` if one of them is. Make one with `per_tensor`, `per_channel` or `per_block`, from any kind of array.
    """

    scheme: Quantization
    parameters: tuple[Any, ...] = ()
    read_only: bool = False

    @classmethod
    def per_tensor(cls, scale: float, zero_point: int = 0) -> Quantized:
        """One scale and zero point for all (scheme 0x01)."""
        return cls(PerTensorAffine(scale, zero_point))

    @classmethod
    def per_channel(cls, axis: int, scales: object, zero_points: object | None = None) -> Quantized:
        """One scale per head (`axis` 1) or per dimension (`axis` 2), float32, and int32 zero points (scheme 0x02)."""
        buffers = _parameters(scales, zero_points)
        return cls._of(PerChannelAffine(axis, 3, _second(buffers), _scale_tag(buffers[0])), buffers)

    @classmethod
    def per_block(cls, block_size: int, scales: object, zero_points: object | None = None) -> Quantized:
        """One scale per page slot, [num_pages, page_size] or flat, and int32 zero points (scheme 0x03).

        `block_size` must equal the page_size. Scales are float16, bfloat16 or float32.
        """
        buffers = _parameters(scales, zero_points)
        return cls._of(PerBlockAffine(block_size, 3, _second(buffers), _scale_tag(buffers[0])), buffers)

    @classmethod
    def _of(cls, scheme: Quantization, buffers: Sequence[ArrayView]) -> Quantized:
        return cls(scheme, tuple(item.array for item in buffers), any(item.read_only for item in buffers))


def _second(buffers: Sequence[ArrayView]) -> int | None:
    return 4 if len(buffers) > 1 else None


def _parameters(scales: object, zero_points: object | None) -> list[ArrayView]:
    buffers = [as_array(scales)] if zero_points is None else [as_array(scales), as_array(zero_points)]
    for field, view in zip(("scales", "zero_points"), buffers, strict=False):
        if not view.array.flags.c_contiguous:
            raise InvalidSnapshot(f"{field} must be contiguous", field=field, offered=view.array.strides)
    if len(buffers) > 1 and buffers[1].array.dtype != np.int32:
        offered = buffers[1].array.dtype
        raise InvalidSnapshot("zero points are int32", field="zero_points", offered=offered, required="int32")
    return buffers


def _scale_tag(scales: ArrayView) -> int:
    item = scales.element_type
    if item is None or item.name not in ("float16", "bfloat16", "float32"):
        raise InvalidSnapshot(
            "scales have a type that no scheme takes",
            field="scales",
            offered=scales.array.dtype,
            required="float16, bfloat16 or float32",
        )
    return item.tag


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredCache:
    """One cache of a caller: which tensor it is, its pool, and its quantization if it has one."""

    layer_index: int | None
    role: str
    pool: Pool
    quantized: Quantized | None

    @property
    def kv_role(self) -> int:
        """The format's number of the role."""
        return KV_ROLE_NAMES.index(self.role)


def tensor_name(layer_index: int | None, role: str) -> str:
    """How messages name a tensor: "layer 3 key", or "key" where there are no layers."""
    return role if layer_index is None else f"layer {layer_index} {role}"


def check_roles(keys: Sequence[CacheKey]) -> None:
    """Each layer has key and value, or fused; no tensor twice; layer None only alone. Raises InvalidSnapshot."""
    if not keys:
        raise InvalidSnapshot("a snapshot has at least one tensor", field="caches", offered=0, required=">= 1")
    layers: dict[int | None, set[str]] = {}
    for layer_index, role in keys:
        if role not in KV_ROLE_NAMES:
            raise InvalidSnapshot("no such role", field="kv_role", offered=role, required="key, value or fused")
        if layer_index is not None and not 0 <= layer_index <= _MAX_LAYER:
            raise InvalidSnapshot(
                "layer_index is out of range", field="layer_index", offered=layer_index, required=f"0 to {_MAX_LAYER}"
            )
        roles = layers.setdefault(layer_index, set())
        if role in roles:
            raise InvalidSnapshot(f"{tensor_name(layer_index, role)} is there twice", field="caches", offered=role)
        roles.add(role)
    if None in layers and len(layers) > 1:
        raise InvalidSnapshot("layer_index none goes only alone", field="layer_index", offered=sorted(map(str, layers)))
    for layer_index, roles in layers.items():
        if roles not in ({"key", "value"}, {"fused"}):
            raise InvalidSnapshot(
                f"{tensor_name(layer_index, 'cache')} is incomplete or mixed",
                field="caches",
                offered=", ".join(sorted(roles)),
                required="key and value, or fused",
            )


def declare_caches(
    caches: Mapping[CacheKey, object],
    *,
    layout: str,
    element_type: str | ElementType | Mapping[CacheKey, str | ElementType] | None,
    page_shape: PageShape | Mapping[CacheKey, PageShape] | None,
    quantization: Quantized | Mapping[CacheKey, Quantized] | None,
) -> list[DeclaredCache]:
    """All caches of a caller, checked against each other, in order of layer, then key, value, fused.

    They share page_size, num_pages and device; heads, dimensions and types may differ. Raises InvalidSnapshot.
    """
    keys = [_cache_key(key) for key in caches]
    check_roles(keys)
    declared = []
    for key, source in zip(keys, caches.values(), strict=True):
        name = tensor_name(*key)
        pool = declare_pool(
            source,
            layout=layout,
            element_type=_element_type(_own(element_type, key)),
            page_shape=_own(page_shape, key),
            name=name,
        )
        quantized = _own(quantization, key)
        _check_beside(pool, quantized, name)
        declared.append(DeclaredCache(*key, pool, quantized))
    declared.sort(key=lambda item: (item.layer_index or 0, item.kv_role))
    first = declared[0].pool
    if not 1 <= first.page_size <= _MAX_PAGE_SIZE:
        raise InvalidSnapshot(
            "no such page_size",
            field="page_size",
            rule="L1",
            offered=first.page_size,
            required=f"1 to {_MAX_PAGE_SIZE}",
        )
    for item in declared:
        for field in ("page_size", "num_pages", "device_tag", "device_id"):
            offered, required = getattr(item.pool, field), getattr(first, field)
            if offered != required:
                raise InvalidSnapshot(
                    f"{tensor_name(item.layer_index, item.role)} differs from the other tensors in {field}",
                    field=field,
                    offered=offered,
                    required=required,
                )
    return declared


def _check_beside(pool: Pool, quantized: Quantized | None, name: str) -> None:
    """All buffers of a tensor are on one device (D11). Raises InvalidSnapshot."""
    required = (pool.device_tag, pool.device_id)
    for field, array in zip(("scales", "zero_points"), () if quantized is None else quantized.parameters, strict=False):
        offered = device_of(array)
        if offered != required:
            raise InvalidSnapshot(
                f"{field} of {name} are on another device than its pool",
                field=field,
                tensor=name,
                rule="D11",
                offered=device_name(offered),
                required=device_name(required),
            )


def _cache_key(key: object) -> CacheKey:
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[1], str):
        raise InvalidSnapshot("caches are keyed by (layer, role)", field="caches", offered=key, required="(3, 'key')")
    layer, role = key
    try:
        return (None if layer is None else operator.index(layer)), role
    except TypeError:
        raise InvalidSnapshot("layer_index is an integer or None", field="layer_index", offered=layer) from None


def _own(declared: Any, key: CacheKey) -> Any:
    """What was declared for one tensor: its own entry of a mapping, or what holds for all."""
    return declared.get(key) if isinstance(declared, Mapping) else declared


def _element_type(declared: str | ElementType | None) -> ElementType | None:
    if declared is None or isinstance(declared, ElementType):
        return declared
    found = BY_NAME.get(declared)
    if found is None:
        raise Unsupported(
            "no such element type", field="element_type", offered=declared, required=", ".join(sorted(BY_NAME))
        )
    return found


def declare_pool(
    source: object, *, layout: str, element_type: ElementType | None, page_shape: PageShape | None, name: str
) -> Pool:
    """One cache array as a pool, without a copy. Raises InvalidSnapshot or Unsupported naming `name`.

    `layout` "NHD": [num_pages, page_size, num_heads, head_dim]; "HND": [num_pages, num_heads, page_size, head_dim].
    Packed element types: uint8 [num_pages, page_bytes] in NHD order with `page_shape`. `element_type` may also name
    what unsigned words of the same width really are (an fp8 cache kept as uint8).
    """
    axes = _AXES.get(layout)
    if axes is None:
        raise InvalidSnapshot("no such layout", field="layout", offered=layout, required="NHD or HND")
    view = as_array(source)
    if element_type is not None and element_type.is_packed:
        return _packed_pool(view, element_type, page_shape, layout, name)
    array, item = _typed(view, element_type, name)
    if array.ndim != 4:
        raise InvalidSnapshot(
            f"{name} is not an array of pages",
            field="caches",
            tensor=name,
            offered=f"shape {tuple(array.shape)}",
            required="[num_pages, page_size, num_heads, head_dim]",
        )
    words = array.transpose(axes)
    num_pages, page_size, num_heads, head_dim = (int(size) for size in words.shape)
    if page_shape is not None and tuple(page_shape) != (page_size, num_heads, head_dim):
        raise InvalidSnapshot(
            f"{name} has another page shape than declared",
            field="page_shape",
            tensor=name,
            offered=(page_size, num_heads, head_dim),
            required=tuple(page_shape),
        )
    return Pool(
        _rows(words), item, num_pages, page_size, num_heads, head_dim, view.device_tag, view.device_id, view.read_only
    )


def _typed(view: ArrayView, declared: ElementType | None, name: str) -> tuple[Any, ElementType]:
    """The array as words, and its element type: its own, or the declared one where its values are only words."""
    array, own = view.array, view.element_type
    item = own if declared is None else declared
    if item is None:
        raise InvalidSnapshot(
            f"{name} has a dtype that names no element type: declare element_type=",
            field="element_type",
            tensor=name,
            offered=array.dtype,
        )
    only_words = array.dtype.kind in "uV" and (own is None or own.numpy == array.dtype)
    if item is not own and not (only_words and array.dtype.itemsize * 8 == item.bits):
        raise InvalidSnapshot(
            f"{name} does not hold {item.name}",
            field="element_type",
            tensor=name,
            offered=own.name if own is not None else array.dtype,
            required=f"{item.name}, or unsigned words of {item.bits} bits",
        )
    return array.view(word_dtype(item)), item


def _packed_pool(
    view: ArrayView, element_type: ElementType, page_shape: PageShape | None, layout: str, name: str
) -> Pool:
    array = view.array
    if page_shape is None:
        raise InvalidSnapshot(
            f"{name} is packed: its pages need page_shape=(page_size, num_heads, head_dim)",
            field="page_shape",
            tensor=name,
            offered=None,
        )
    if layout != "NHD":
        raise InvalidSnapshot("packed pools are taken in NHD order", field="layout", tensor=name, offered=layout)
    page_size, num_heads, head_dim = (operator.index(size) for size in page_shape)
    elements = page_size * num_heads * head_dim
    if elements % element_type.group_elements:
        raise InvalidSnapshot(
            f"a page of {name} is no whole number of bytes",
            field="page_shape",
            tensor=name,
            offered=f"{elements} elements of {element_type.bits} bits",
            required=f"a multiple of {element_type.group_elements} elements",
        )
    page_bytes = element_type.packed_bytes(elements)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != page_bytes:
        raise InvalidSnapshot(
            f"{name} is not a packed pool",
            field="caches",
            tensor=name,
            offered=f"{array.dtype} {tuple(array.shape)}",
            required=f"uint8 [num_pages, {page_bytes}]",
        )
    return Pool(
        array,
        element_type,
        int(array.shape[0]),
        page_size,
        num_heads,
        head_dim,
        view.device_tag,
        view.device_id,
        view.read_only,
    )


def _rows(words: Any) -> Any:
    """Words [num_pages, ...] as uint8 [num_pages, page_bytes] where each page is one piece, else as they are."""
    inner = words.dtype.itemsize
    for size, stride in zip(reversed(words.shape[1:]), reversed(words.strides[1:]), strict=True):
        if size > 1 and stride != inner:
            return words
        inner *= size
    # The axes of a page are adjacent, so this merges them without a copy.
    return words.reshape(words.shape[0], inner // words.dtype.itemsize).view(np.uint8)


def describe(
    cache: DeclaredCache, *, num_seqs: int, total_tokens: int, total_logical_pages: int, block_table_index_type: int
) -> Descriptor:
    """The descriptor of a caller's tensor over its own pool, every rule of the format checked.

    It states what the bytes are, not where they lie: alignment is the format's least. Raises InvalidDescriptor where
    the scheme does not fit the pool, InvalidSnapshot where a parameter array has another number of entries.
    """
    pool = cache.pool
    descriptor = build_descriptor(
        element_type=pool.element_type,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        num_heads=pool.num_heads,
        head_dim=pool.head_dim,
        total_tokens=total_tokens,
        num_seqs=num_seqs,
        total_logical_pages=total_logical_pages,
        kv_role=cache.kv_role,
        layer_index=cache.layer_index,
        block_table_index_type=block_table_index_type,
        quantization=None if cache.quantized is None else cache.quantized.scheme,
    )
    arrays = () if cache.quantized is None else cache.quantized.parameters
    for parameter, array in zip(descriptor.parameter_layout(), arrays, strict=True):
        if array.size != parameter.entries:
            raise InvalidSnapshot(
                f"{tensor_name(cache.layer_index, cache.role)} has another number of {parameter.kind}s",
                field=f"{parameter.kind}s",
                tensor=tensor_name(cache.layer_index, cache.role),
                rule={PerBlockAffine: "Q27", PerChannelAffine: "Q20"}.get(type(descriptor.quantization)),
                offered=array.size,
                required=parameter.entries,
            )
    return descriptor


# --- block tables -------------------------------------------------------------------------------------------------

BlockTables = Sequence[Sequence[int] | npt.NDArray[Any]] | tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""A list with one table of page ids per sequence, or the tuple of arrays (seq_ptr, block_table)."""


def read_tables(block_tables: BlockTables, num_pages: int) -> tuple[npt.NDArray[np.uint64], Index]:
    """seq_ptr uint64 [num_seqs + 1] and block_table of a caller, copied; ids checked against num_pages (V4).

    A list holds one table per sequence, a tuple of two arrays is CSR (seq_ptr, block_table): the container's type
    decides, nothing is guessed from lengths. A two-dimensional array is refused: how it is padded is not known.
    Entries are uint64 where num_pages needs it or a CSR block_table already is, else uint32.

    Raises InvalidSnapshot, or InvalidContents naming index and value.
    """
    if isinstance(block_tables, tuple):
        return _read_csr(block_tables, num_pages)
    if not isinstance(block_tables, Sequence) or isinstance(block_tables, (str, bytes)):
        shape = getattr(block_tables, "shape", None)
        raise InvalidSnapshot(
            "block_tables are a list of tables or (seq_ptr, block_table): a padded rectangle does not say where"
            " a sequence's pages end",
            field="block_tables",
            offered=type(block_tables).__name__ if shape is None else f"array of shape {tuple(shape)}",
            required="a list with one table per sequence, or a tuple of two arrays",
        )
    tables = [_page_ids(table, f"block_tables[{index}]") for index, table in enumerate(block_tables)]
    seq_ptr = np.zeros(len(tables) + 1, dtype=np.uint64)
    np.cumsum([table.size for table in tables], out=seq_ptr[1:])
    joined = np.concatenate(tables) if tables else np.zeros(0, dtype=np.uint64)
    return seq_ptr, _index_table(joined, num_pages, wide=False)


def _read_csr(arrays: tuple[Any, ...], num_pages: int) -> tuple[npt.NDArray[np.uint64], Index]:
    if len(arrays) != 2 or not all(hasattr(array, "dtype") for array in arrays):
        raise InvalidSnapshot(
            "a tuple of block_tables is CSR: two arrays. Tables of sequences go in a list",
            field="block_tables",
            offered=f"tuple of {', '.join(type(array).__name__ for array in arrays)}",
            required="(seq_ptr, block_table)",
        )
    seq_ptr = _page_ids(arrays[0], "seq_ptr")
    table = to_host(as_array(arrays[1]).array)
    return seq_ptr, _index_table(_page_ids(table, "block_table"), num_pages, wide=table.dtype == np.uint64)


def _page_ids(table: Any, field: str) -> npt.NDArray[np.uint64]:
    """One table as uint64, copied. Raises InvalidContents (V4) for what can be no page id."""
    array = np.asarray(table) if isinstance(table, (list, tuple)) else to_host(as_array(table).array)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, dtype=np.uint64)
    if array.ndim != 1:
        raise InvalidSnapshot(f"{field} has one axis", field=field, offered=f"shape {array.shape}")
    if array.dtype.kind == "u" or (array.dtype.kind == "i" and int(array.min()) >= 0):
        return array.astype(np.uint64)
    for index, page in enumerate(array.tolist() if array.dtype.kind in "iu" else table):
        if isinstance(page, bool) or not isinstance(page, (int, np.integer)) or not 0 <= int(page) < 1 << 64:
            raise InvalidContents(
                f"{field}[{index}] is no page id", rule="V4", field=field, index=index, offered=page, required=">= 0"
            )
    return np.array(table, dtype=np.uint64)


def _index_table(ids: npt.NDArray[np.uint64], num_pages: int, *, wide: bool) -> Index:
    check_page_ids(ids, num_pages)
    return ids if wide or num_pages > _MAX_UINT32_PAGES else ids.astype(np.uint32)
