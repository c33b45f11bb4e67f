"""`make vllm-example`: a daemon, a prefill engine, a decode engine, a router, and requests that pass through them all.

Beside them an engine without a connector answers the same prompts: exit status 0 only if every token is the same. With
--ttft it prints how long the decode engine takes to its first token, handed the cache and computing it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hurray_client as ht
from deploy.demo.processes import daemon, socket_of
from deploy.examples.vllm.engines import connector, serving
from deploy.examples.vllm.model import TINY, VOCABULARY, WIDE, Shape, write_model
from deploy.examples.vllm.router import ask, one_token, running_router

GENERATE = "/inference/v1/generate"
REQUESTS = 8
REPETITIONS = 7
LONGEST = 2047


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.examples.vllm", description=__doc__)
    parser.add_argument("--ttft", action="store_true", help="measure the time to the first token, for two models")
    console = Console(highlight=False)
    if parser.parse_args().ttft:
        return ttft(console)
    return example(console)


@contextmanager
def cluster(shape: Shape, *, reference: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """The node's address, and base URLs of the engines by name."""
    with tempfile.TemporaryDirectory(prefix="hurray-vllm-") as name:
        folder = Path(name)
        model = write_model(folder / "model", seed=1, shape=shape)
        with daemon("store", folder, arena_bytes=1 << 30) as address:
            roles: dict[str, dict[str, Any] | None] = {
                "prefill": connector("kv_producer", address),
                "decode": connector("kv_consumer", address),
            }
            if reference:
                roles["alone"] = None
            with serving(folder, model, roles, {"HURRAY_SHM__PATH": socket_of("store", folder)}) as urls:
                yield address, urls


def request(length: int, source: random.Random, max_tokens: int = 8) -> dict[str, Any]:
    """A prompt of random tokens, answered greedily."""
    tokens = [source.randrange(3, VOCABULARY) for _ in range(length)]
    return {
        "model": "tiny",
        "token_ids": tokens,
        "sampling_params": {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "detokenize": False},
    }


def example(console: Console) -> int:
    """Requests through the router, and the same to an engine that does all itself."""
    console.print("Starting a daemon and three engines: about a minute")
    source = random.Random(1)
    wrong = 0
    with (
        cluster(TINY, reference=True) as (address, urls),
        running_router(urls["prefill"], urls["decode"]) as router,
        ht.connect(address) as client,
    ):
        table = Table("prompt", "through the router", "by one engine", "loaded, equal")
        for _ in range(REQUESTS):
            body = request(source.randrange(1, 400), source)
            handed, alone = (ask(url + GENERATE, body)["choices"][0] for url in (router.url, urls["alone"]))
            equal = handed["token_ids"] == alone["token_ids"] and was_loaded(client, router.handed[-1])
            wrong += not equal
            shown = [" ".join(map(str, choice["token_ids"] or [])) for choice in (handed, alone)]
            table.add_row(f"{len(body['token_ids'])} tokens", *shown, "yes" if equal else "NO")
        console.print(table)
    return 1 if wrong else 0


def was_loaded(client: ht.Client, params: dict[str, Any] | None) -> bool:
    """Whether a cache was handed over: the load deletes it from the node."""
    if params is None or not params["do_remote_prefill"]:
        return False
    snapshot = params["hurray"]["snapshots"][0]
    try:
        client.stat(snapshot["key"], generation=snapshot["generation"])
    except ht.KeyDeleted:
        return True
    return False


def ttft(console: Console) -> int:
    """Time to first token at the decode engine, medians of interleaved repetitions."""
    table = Table("model", "prompt", "cache", "computed", "handed over", "ratio", title="time to first token, decode")
    for name, shape in (("tiny", TINY), ("wide", WIDE)):
        console.print(f"Starting engines of the {name} model: about a minute")
        source = random.Random(1)
        with cluster(shape, reference=False) as (_, urls):
            times: dict[str, list[float]] = {"computed": [], "handed over": []}
            for repetition in range(REPETITIONS + 1):
                fresh, given = (one_token(request(LONGEST, source)) for _ in range(2))
                first = ask(urls["prefill"] + GENERATE, {**given, "kv_transfer_params": {"do_remote_decode": True}})
                given["kv_transfer_params"] = first["kv_transfer_params"]
                for kind, body in (("computed", fresh), ("handed over", given)):
                    began = time.perf_counter()
                    finish = ask(urls["decode"] + GENERATE, body)["choices"][0]["finish_reason"]
                    if finish != "length" or "hurray_error" in first["kv_transfer_params"]:
                        raise RuntimeError(f"{kind}: {finish}, {first['kv_transfer_params']}")
                    if repetition:  # the first one connects
                        times[kind].append(time.perf_counter() - began)
        cache_bytes = LONGEST * shape.layers * shape.kv_heads * shape.head_dim * 2 * 4
        computed, handed = (statistics.median(times[kind]) for kind in ("computed", "handed over"))
        table.add_row(
            name,
            f"{LONGEST} tokens",
            f"{cache_bytes / 1e6:.1f} MB",
            f"{computed * 1e3:.0f} ms",
            f"{handed * 1e3:.0f} ms",
            f"{computed / handed:.1f}",
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
