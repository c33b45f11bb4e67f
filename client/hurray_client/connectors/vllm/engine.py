"""What the connector must know of the vLLM that it runs in: whether its cache can be handed over, where it is, and what
tells it from other engines' caches.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from hurray_client.connectors.vllm.layout import Interior, split
from hurray_wire.errors import Unsupported
from hurray_wire.paged import CacheKey

_FP8_TYPES: Final = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}
_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WHOLE_BYTES: Final = 64 << 20
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 256 << 10
_SCALES_PER_PAIR: Final = 32
"""Of eight characters each: an annotation holds 256 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineCache:
    """The KV cache of one worker. `caches` are views of it by (layer, role), [num_pages, page_size, num_heads,
    head_dim]; `fingerprint` is what a cache that comes from elsewhere must share with it."""

    caches: dict[CacheKey, Any]
    element_type: str | None
    block_size: int
    tp_rank: int
    fingerprint: dict[str, str]


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise Unsupported, naming it, for what is not handed over: caches of several groups (hybrid), MLA, windows of
    their own, states, scales per token; pipeline and context parallelism; speculative decoding."""
    parallel = vllm_config.parallel_config
    for field, offered, required in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1), 1),
        ("speculative_config", "set" if vllm_config.speculative_config is not None else None, None),
    ):
        if offered != required:
            raise Unsupported(
                f"caches are not handed over with {field}={offered}", field=field, offered=offered, required=required
            )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise Unsupported(
            "caches of several groups (hybrid models) are not handed over",
            field="kv_cache_groups",
            offered=f"{len(groups)}: {kinds}",
            required="one of FullAttentionSpec",
        )
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:  # its subclasses are other caches: MLA, sinks, states
        raise Unsupported(
            f"caches of {type(spec).__name__} are not handed over",
            field="kv_cache_spec",
            offered=type(spec).__name__,
            required="FullAttentionSpec",
        )
    for field, value, allowed in (
        ("kv_quant_mode", spec.kv_quant_mode, (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)),
        ("state_content_bytes", spec.state_content_bytes, (None,)),
        ("num_head_slots", spec.num_head_slots, (None,)),
        ("tokens_per_state", spec.tokens_per_state, (1,)),
    ):
        if value not in allowed:
            raise Unsupported(f"caches with this {field} are not handed over", field=field, offered=str(value))


def read_cache(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], revision: str | None
) -> EngineCache:
    """The cache of this worker as it is. Raises Unsupported where what vLLM writes is not read back."""
    group = kv_cache_config.kv_cache_groups[0]
    spec, names = group.kv_cache_spec, list(group.layer_names)
    layers = {extract_layer_index(name): name for name in names}
    if len(layers) != len(names):
        raise Unsupported("several caches of one layer are not handed over", field="layers", offered=", ".join(names))
    _check_memory(kv_caches[names[0]], spec.block_size)
    context = vllm_config.compilation_config.static_forward_context
    interiors = {read_back(context[name], kv_caches[name], vllm_config.model_config.dtype) for name in names}
    if len(interiors) != 1:
        raise Unsupported("layers keep their caches in different ways", field="layout", offered=str(interiors))
    interior = interiors.pop()
    caches: dict[CacheKey, Any] = {}
    for index, name in sorted(layers.items()):
        tensor = kv_caches[name]
        for role, part in zip(
            ("key", "value"), split(tensor.shape, tensor.stride(), spec.head_size, interior), strict=True
        ):
            caches[index, role] = tensor.as_strided(part.shape, part.strides, tensor.storage_offset() + part.offset)
    first, cache = context[names[0]], kv_caches[names[0]]
    group_of_ranks = get_tp_group()
    cache_type = vllm_config.cache_config.cache_dtype
    fingerprint = {
        "kv_heads": str(spec.num_kv_heads),
        "head_size": str(spec.head_size),
        "layers": ",".join(map(str, sorted(layers))),
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "cache_dtype": _FP8_TYPES.get(cache_type, str(cache.dtype).removeprefix("torch.")),
        "layout": _layout_name(first, cache, interior),
        "tp_rank": str(group_of_ranks.rank_in_group),
        "tp_size": str(group_of_ranks.world_size),
        "model": _model_name(vllm_config.model_config),
        "weights": weights_id(vllm_config, revision),
        **scales({index: context[name] for index, name in layers.items()}, cache_type),
    }
    return EngineCache(
        caches,
        _FP8_TYPES.get(cache_type),
        spec.block_size,
        group_of_ranks.rank_in_group,
        {name: value[:256] for name, value in fingerprint.items()},
    )


def _check_memory(cache: torch.Tensor, block_size: int) -> None:
    if cache.device.type != "cpu":
        raise Unsupported(
            "caches in device memory are not handed over: nothing orders a transfer after a stream yet",
            field="device",
            offered=cache.device.type,
            required="cpu",
        )
    if cache.shape[2] != block_size:
        raise Unsupported(
            "blocks that are several of the kernel's are not handed over",
            field="block_size",
            offered=block_size,
            required=int(cache.shape[2]),
        )


def read_back(layer: Any, cache: torch.Tensor, dtype: torch.dtype) -> Interior:
    """How this layer's backend keeps keys and values in a block: it writes some to a cache like the layer's, and what
    is there is compared with each way that is known. Raises Unsupported if none is it."""
    _, heads, slots, _ = cache.shape
    head_size = layer.head_size
    size = 1 + sum((length - 1) * step for length, step in zip((2, *cache.shape[1:]), cache.stride(), strict=True))
    scratch = torch.zeros(size, dtype=cache.dtype).as_strided((2, *cache.shape[1:]), cache.stride())
    random = torch.Generator().manual_seed(0)
    # Small whole numbers are exact in every type, the 8-bit ones included.
    written = torch.randint(-8, 9, (2, slots + slots // 2, heads, head_size), generator=random)
    scaled = [written[0] * float(layer._k_scale_float), written[1] * float(layer._v_scale_float)]
    keys, values = (part.to(dtype) for part in scaled)
    where = torch.arange(keys.shape[0], dtype=torch.int64)
    backend = type(layer.impl).__name__
    if not hasattr(layer.impl, "do_kv_cache_update"):
        raise Unsupported("this attention backend does not say how it writes", field="layout", offered=backend)
    with torch.inference_mode():
        layer.impl.do_kv_cache_update(layer, keys, values, scratch, where)
    stored = scratch
    if cache.dtype == torch.uint8:
        name = _FP8_TYPES[layer.kv_cache_dtype]
        stored = scratch.view(torch.float8_e5m2 if name == "float8_e5m2" else torch.float8_e4m3fn)
    for interior in Interior:
        try:
            parts = split(stored.shape, stored.stride(), head_size, interior)
        except Unsupported:
            continue
        seen = [stored.as_strided(part.shape, part.strides, part.offset) for part in parts]
        flat = [part.reshape(-1, heads, head_size)[: keys.shape[0]].float() for part in seen]
        if all(torch.equal(one, other.float()) for one, other in zip(flat, written, strict=True)):
            return interior
    raise Unsupported(
        "what this attention backend writes is in none of the ways that can be read",
        field="layout",
        offered=f"{backend} {getattr(layer, 'isa', '')}".strip(),
        required=", ".join(interior.value for interior in Interior),
    )


def _layout_name(layer: Any, cache: torch.Tensor, interior: Interior) -> str:
    """Backend and kernel, what is outer in a block, and the interior: equal only where blocks are alike."""
    outer = "HND" if cache.stride(1) > cache.stride(2) else "NHD"
    kernel = getattr(layer, "isa", None)
    name = layer.attn_backend.get_name()
    return f"{name}{'/' + kernel if kernel else ''}, {outer}, {interior.value}"


def _model_name(model_config: Any) -> str:
    served = model_config.served_model_name
    return str(served[0] if isinstance(served, list) else served)


def weights_id(vllm_config: Any, revision: str | None) -> str:
    """What tells these weights from others: what the settings say, vLLM's own commit, the seed of dummy weights, or a
    digest of the files."""
    model = vllm_config.model_config
    if revision is not None:
        return f"revision {revision}"
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    folder = Path(model.model)
    if folder.is_dir():
        return f"files {weights_digest(folder)}"
    if model.revision and re.fullmatch(r"[0-9a-f]{40}", model.revision):
        return f"revision {model.revision}"
    raise Unsupported(
        "nothing tells these weights from others: set revision in kv_connector_extra_config",
        field="revision",
        offered=f"{model.model}, {vllm_config.load_config.load_format}",
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 over names, sizes and bytes of the weight files; of files above 64 MiB, 64 samples of 256 KiB."""
    digest = hashlib.sha256()
    for path in sorted(item for item in folder.iterdir() if item.suffix in _WEIGHT_FILES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        with path.open("rb") as file:
            for offset, length in _samples(size):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def _samples(size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    step = (size - _SAMPLE_BYTES) // (_SAMPLES - 1)
    for number in range(_SAMPLES):
        yield number * step, _SAMPLE_BYTES


def scales(layers: Mapping[int, Any], cache_type: str) -> dict[str, str]:
    """The scales of an fp8 cache, exactly: what its stored values are multiplied by. Nothing for other caches."""
    if cache_type not in _FP8_TYPES:
        return {}
    pairs: dict[str, str] = {}
    for name in ("k_scale", "v_scale"):
        words = []
        for _, layer in sorted(layers.items()):
            values: Sequence[float] = getattr(layer, f"_{name}").detach().float().cpu().reshape(-1).tolist()
            words += [struct.pack("<f", value).hex() for value in values]
        for start in range(0, len(words), _SCALES_PER_PAIR):
            pairs[f"{name}.{start}"] = "".join(words[start : start + _SCALES_PER_PAIR])
    return pairs
