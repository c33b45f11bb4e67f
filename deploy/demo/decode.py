"""The decode engine, a process that knows the model, a key, and the last token of each sequence: nothing else.

`python -m deploy.demo.decode NODE KEY LAST_TOKENS` gets the cache, decodes from it, and decodes twice more from copies
with one thing wrong. Writes one JSON object.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import numpy as np

import hurray_client as ht
from deploy.demo.batch import STEPS, load_model
from deploy.demo.model import RESIDUE, PagedCache, decode


def main(node: str, key: str, last_tokens_json: str) -> None:
    """Get the cache from `node` and decode from it."""
    last_tokens = json.loads(last_tokens_json)
    model = load_model()
    with ht.connect(node) as client, client.get(key, wait_s=5) as got:
        cache = adopt(got, spare_pages=len(last_tokens) * (1 + STEPS // got.structure.page_size))
        transport = got.receipt.transport
        residue_count = sum(int((tensor.page_pool.view(np.float32) == RESIDUE).sum()) for tensor in got.tensors)

    zeroed = cache.copy()
    page = zeroed.block_tables[0][0]
    zeroed.pools[0, "value"][page] = 0
    swapped = cache.copy()
    for layer in range(model.config.num_layers):
        key_pool, value_pool = swapped.pools[layer, "key"], swapped.pools[layer, "value"]
        swapped.pools[layer, "key"], swapped.pools[layer, "value"] = value_pool, key_pool

    report = {
        "transport": transport,
        "residue_count": residue_count,
        "said": decode(model, cache, last_tokens, STEPS).tokens,
        "said_zeroed": decode(model, zeroed, last_tokens, STEPS).tokens,
        "said_swapped": decode(model, swapped, last_tokens, STEPS).tokens,
    }
    json.dump(report, sys.stdout)


def adopt(got: ht.KVSnapshot, spare_pages: int) -> PagedCache:
    """The received pages in pools of the engine's own, with room to go on. Tables and aliases stay as they are."""
    structure = got.structure
    pools = {}
    for tensor in got.tensors:
        descriptor = tensor.descriptor
        shape = (structure.num_pages, structure.page_size, descriptor.num_heads, descriptor.head_dim)
        pool = np.zeros((structure.num_pages + spare_pages, *shape[1:]), dtype=np.float32)
        pool[: structure.num_pages] = tensor.page_pool.view(np.float32).reshape(shape)
        pools[tensor.layer_index, tensor.role] = pool
    ends = structure.seq_ptr.tolist()
    table = structure.block_table.tolist()
    block_tables = [table[first:end] for first, end in pairwise(ends)]
    return PagedCache(pools, block_tables, structure.token_counts.tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
