"""The prefill engine, a process: takes in the batch, puts its cache, and says what it would have decoded itself.

`python -m deploy.demo.prefill NODE KEY` writes one JSON object.
"""

from __future__ import annotations

import json
import sys

import hurray_client as ht
from deploy.demo.batch import NUM_PAGES, PAGE_SIZE, STEPS, load_model, load_prompts
from deploy.demo.model import PagedCache, decode, prefill


def main(node: str, key: str) -> None:
    """Put the batch's cache to `node`."""
    model = load_model()
    cache = PagedCache.empty(model.config, NUM_PAGES, PAGE_SIZE)
    last_tokens = prefill(model, cache, load_prompts())
    snapshot = ht.KVSnapshot.from_paged(cache.pools, block_tables=cache.block_tables, token_counts=cache.token_counts)
    with ht.connect(node, transports=["ucx"]) as client:
        receipt = client.put(key, snapshot, require_transport="ucx")
    said = decode(model, cache, last_tokens, STEPS)
    report = {
        "receipt": receipt.to_dict(),
        "token_counts": snapshot.token_counts.tolist(),
        "last_tokens": last_tokens,
        "said": said.tokens,
        "margin": said.margin,
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
