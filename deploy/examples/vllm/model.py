"""A Llama of random weights, small enough to run anywhere, written as a model directory that vLLM loads.

Its weights are larger than those of vLLM's own dummy weights, so that what it answers depends on all of its cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 512


@dataclass(frozen=True)
class Shape:
    """How large a model is."""

    hidden: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    positions: int = 2048


TINY = Shape()
WIDE = Shape(hidden=512, layers=8, heads=16, kv_heads=8, head_dim=64, intermediate=1536)


def write_model(folder: Path, seed: int, shape: Shape = TINY) -> Path:
    """Write config.json and model.safetensors; equal seeds give equal weights. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_safetensors(folder / "model.safetensors", dict(_weights(seed, shape)))
    return folder


def _weights(seed: int, shape: Shape) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(
            "f4"
        )
        return values

    one = np.ones(shape.hidden, dtype=np.float32)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", matrix(VOCABULARY, shape.hidden, np.sqrt(shape.hidden))
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        # Sharp attention: what a token sees depends on single others, not on their mean.
        yield f"{name}.self_attn.q_proj.weight", matrix(queries, shape.hidden, 2.0)
        yield f"{name}.self_attn.k_proj.weight", matrix(keys, shape.hidden, 2.0)
        yield f"{name}.self_attn.v_proj.weight", matrix(keys, shape.hidden)
        yield f"{name}.self_attn.o_proj.weight", matrix(shape.hidden, queries)
        yield f"{name}.mlp.gate_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield f"{name}.mlp.up_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield f"{name}.mlp.down_proj.weight", matrix(shape.hidden, shape.intermediate)
        yield f"{name}.input_layernorm.weight", one
        yield f"{name}.post_attention_layernorm.weight", one
    yield "model.norm.weight", one
    yield "lm_head.weight", matrix(VOCABULARY, shape.hidden, 4.0)


def _write_safetensors(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in tensors.values():
            file.write(array.tobytes())
