"""Ask the connector about caches of every kind that vLLM has: run by test_refusals.py in a process of its own.

Prints, by name, the field by which each is refused, or "taken"; the layouts that vLLM chooses where the connector is
asked for one; and what it says of an fp8 cache's scales.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from hurray_client.connectors.vllm import connector
from hurray_client.connectors.vllm.engine import check_supported, scales
from hurray_wire.errors import Unsupported

SIZE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZE)


def config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(**changes: Any) -> Any:
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    speculative = changes.pop("speculative_config", None)
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**parallel, **changes}), speculative_config=speculative)


ASKED: dict[str, tuple[Any, Any]] = {
    "full": (engine(), config(FULL)),
    "windows treated as full": (engine(), config(FullAttentionSpec(**SIZE, sliding_window=64))),
    "MLA": (engine(), config(MLAAttentionSpec(**{**SIZE, "num_kv_heads": 1}))),
    "windows": (engine(), config(SlidingWindowSpec(**SIZE, sliding_window=64))),
    "chunks": (engine(), config(ChunkedLocalAttentionSpec(**SIZE, attention_chunk_size=64))),
    "states": (engine(), config(MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)))),
    "hybrid": (engine(), config(FULL, SlidingWindowSpec(**SIZE, sliding_window=64))),
    "no cache": (engine(), config()),
    "scales per token": (
        engine(),
        config(FullAttentionSpec(**SIZE, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)),
    ),
    "pipeline": (engine(pipeline_parallel_size=2), config(FULL)),
    "context": (engine(decode_context_parallel_size=2), config(FULL)),
    "speculation": (engine(speculative_config=object()), config(FULL)),
}


def verdict(vllm_config: Any, kv_cache_config: Any) -> str:
    try:
        check_supported(vllm_config, kv_cache_config)
    except Unsupported as refusal:
        return str(refusal.field)
    return "taken"


def chosen(*supported: str) -> str:
    """The layout that vLLM chooses for a backend of another platform than the CPU."""
    connector.current_platform = SimpleNamespace(is_cpu=lambda: False)
    transfer = KVTransferConfig(
        kv_connector="HurrayConnector",
        kv_connector_module_path="hurray_client.connectors.vllm",
        kv_role="kv_both",
    )
    return str(resolve_kv_cache_layout(VllmConfig(kv_transfer_config=transfer), [list(supported)]).name)


def layer(key: float, value: float) -> Any:
    return SimpleNamespace(_k_scale=torch.tensor(key), _v_scale=torch.tensor(value))


if __name__ == "__main__":
    told: dict[str, Any] = {name: verdict(*asked) for name, asked in ASKED.items()}
    told["layout asked of a backend that has both"] = chosen("LBHNC", "LBNHC")
    told["layout asked of a backend that has one"] = chosen("LBHNC")
    told["scales"] = scales({1: layer(1.0, 2.0), 0: layer(0.5, 0.25)}, "fp8")
    print(json.dumps(told))
