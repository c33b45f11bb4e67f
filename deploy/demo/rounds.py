"""The workers of the compose cluster: prefill hands over one batch after the other, decode says what comes after them.

    python -m deploy.demo.rounds prefill NODE...
    python -m deploy.demo.rounds decode NODE...

Each node keeps at most one batch, under one key: prefill goes round the nodes and fills those that are free, decode
empties them. Neither knows the other. With a batch go, as annotations, its number, the last token of each sequence, and
what prefill would have said itself: decode compares. One line of JSON per batch, on standard output. A node that fails
is passed over, and tried again in the next turn.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

import hurray_client as ht
from deploy.demo.batch import NUM_PAGES, PAGE_SIZE, load_model
from deploy.demo.decode import adopt
from deploy.demo.model import Config, Model, PagedCache, decode, prefill

KEY: Final = "prefill/handoff/batch"
STEPS: Final = 8
"""Tokens that decode says per sequence."""

BUDGET_S: Final = 10.0
WAIT_S: Final = 2.0
"""How long decode waits at one node."""

PAUSE_S: Final = 0.2
"""Between batches of prefill, and before a node that has nothing to do or fails is passed over."""

_PREFIX_TOKENS: Final = 160
"""Shared by all sequences of all batches."""


def prompts_of(number: int) -> list[list[int]]:
    """The batch of that number: ragged, all begin alike, and one is nothing but the shared beginning."""
    vocabulary = Config().vocabulary
    shared = np.random.default_rng(1).integers(0, vocabulary, _PREFIX_TOKENS).tolist()
    draw = np.random.default_rng([2, number])
    own = [draw.integers(0, vocabulary, count).tolist() for count in draw.integers(1, 60, 3)]
    return [shared + own[0], shared, shared + own[1], own[2]]


def hand_over(model: Model, client: ht.Client, number: int) -> dict[str, object]:
    """Put one batch; what there is to tell of it."""
    cache = PagedCache.empty(model.config, NUM_PAGES, PAGE_SIZE)
    last_tokens = prefill(model, cache, prompts_of(number))
    said = decode(model, cache.copy(), last_tokens, STEPS).tokens
    annotations = {"batch": str(number), "last_tokens": json.dumps(last_tokens)}
    annotations.update({f"said.{seq}": json.dumps(tokens) for seq, tokens in enumerate(said)})
    snapshot = ht.KVSnapshot.from_paged(cache.pools, block_tables=cache.block_tables, token_counts=cache.token_counts)
    receipt = client.put(KEY, snapshot, annotations=annotations, timeout_s=BUDGET_S)
    return {
        "batch": number,
        "transport": receipt.transport,
        "bytes": receipt.wire_bytes,
        "pages": receipt.logical_page_count,
        "distinct_pages": receipt.distinct_page_count,
    }


def take(model: Model, client: ht.Client) -> dict[str, object]:
    """Get one batch, decode from it, and compare."""
    with client.get(KEY, wait_s=WAIT_S, timeout_s=BUDGET_S) as got:
        generation, transport = got.receipt.generation, got.receipt.transport
        annotations = client.stat(KEY, generation=generation, timeout_s=BUDGET_S).info.annotations
        last_tokens = json.loads(annotations["last_tokens"])
        cache = adopt(got, spare_pages=2 * len(last_tokens))
    client.delete(KEY, generation=generation, timeout_s=BUDGET_S)
    said = decode(model, cache, last_tokens, STEPS).tokens
    expected = [json.loads(annotations[f"said.{seq}"]) for seq in range(len(said))]
    pairs = list(zip(itertools.chain(*expected), itertools.chain(*said), strict=True))
    equal = sum(ours == theirs for ours, theirs in pairs)
    return {
        "batch": int(annotations["batch"]),
        "transport": transport,
        "tokens": len(pairs),
        "equal_tokens": equal,
        "verdict": "equal" if equal == len(pairs) else "WRONG",
    }


def main(part: str, *nodes: str) -> int:
    """Work until told to stop; exit status 1 if a token was ever wrong."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    model, numbers, wrong = load_model(), itertools.count(int(time.time())), 0
    with ExitStack() as stack:
        clients = [stack.enter_context(ht.connect(node)) for node in nodes]
        for client in _turns(clients, stop):
            report = (
                _attempt(partial(hand_over, model, client, next(numbers)), ht.KeyExists, ht.KeyBusy)
                if part == "prefill"
                else _attempt(partial(take, model, client), ht.KeyNotFound, ht.KeyDeleted)
            )
            if report is not None:
                wrong += report.get("verdict") == "WRONG"
                print(json.dumps({"worker": part, "node": client.target, **report}), flush=True)
            if part == "prefill" or report is None or "error" in report:
                stop.wait(PAUSE_S)
    return 1 if wrong else 0


def _turns(clients: list[ht.Client], stop: threading.Event) -> Iterator[ht.Client]:
    """One after the other, until it is time to stop."""
    return itertools.takewhile(lambda _: not stop.is_set(), itertools.cycle(clients))


def _attempt(work: Callable[[], dict[str, object]], *waits: type[ht.HurrayError]) -> dict[str, object] | None:
    """What there is to tell: nothing where the node only has nothing to do."""
    try:
        return work()
    except waits:
        return None
    except ht.HurrayError as error:
        return {"error": error.reason, "stage": error.stage, "message": str(error)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
