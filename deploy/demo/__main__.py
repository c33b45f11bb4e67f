"""`make demo`: two daemons, a prefill engine and a decode engine, each a process of its own, on loopback.

Exit status 0 only if every check holds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Final
from unittest.mock import patch

import numpy as np

import hurray_client as ht
from deploy.demo.batch import PAGE_SIZE
from deploy.demo.model import CacheKey, Config, PagedCache
from deploy.demo.processes import daemon, run_engine, socket_of
from deploy.demo.report import Report, receipt_table
from hurray_wire.prepare import PreparedSnapshot, prepare

KEY: Final = "demo/batch-42"
POISON: Final = 0xFFFFFFFF


def main() -> int:
    """Run all of it; the exit status."""
    began = time.monotonic()
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hurray-demo-")))
        report.heading("Two daemons on loopback")
        nodes = [stack.enter_context(daemon(name, folder)) for name in ("A", "B")]
        with ht.connect(nodes[0]) as a, ht.connect(nodes[1]) as b:
            for name, client in (("A", a), ("B", b)):
                info = client.node()
                report.say(f"{name} at {client.target} by {', '.join(info.transports)}; {info.ucx}")
            hand_over(report, b, socket_of("B", folder))
            refuse(report, a, b)
    failed = len(report.failed_checks)
    verdict = f"[bold red]{failed} checks failed[/]" if failed else "[bold green]All checks hold[/]"
    report.console.print(f"\n{verdict} ({time.monotonic() - began:.1f} s)")
    return 1 if failed else 0


def hand_over(report: Report, b: ht.Client, socket: str) -> None:
    """From prefill in one process to decode in another, by way of B."""
    report.heading("Prefill: one process, which puts its cache to B")
    prefill = run_engine("prefill", b.target, KEY, socket=socket)
    receipt = prefill["receipt"]
    report.say(
        f"{len(prefill['token_counts'])} sequences of {', '.join(map(str, prefill['token_counts']))} tokens in"
        f" {receipt['logical_page_count']} pages of {PAGE_SIZE}, of which {receipt['distinct_page_count']} are distinct"
    )
    report.console.print(receipt_table(receipt))
    report.check(receipt["transport"] == "ucx", "UCX moved the bytes")
    report.check(receipt["verified_chunk_count"] > 0, "every chunk's checksum was compared before the commit")
    report.check(receipt["logical_page_count"] > receipt["distinct_page_count"], "shared pages crossed once")
    report.check(
        receipt["dead_slot_count"] > 0 and receipt["dirty_dead_slot_count"] == 0,
        "slots that hold no token, full of residue at the source, arrived clear",
    )

    report.heading("Decode: another process, which has the key, the weights and five last tokens")
    decode = run_engine("decode", b.target, KEY, json.dumps(prefill["last_tokens"]), socket=socket)
    report.check(decode["transport"] == "shm", "shared memory moved the bytes, as between any processes of one host")
    for seq, (expected, said) in enumerate(zip(prefill["said"], decode["said"], strict=True)):
        report.say(f"sequence {seq}: {' '.join(map(str, said[:12]))} ...", "" if said == expected else "red")
    count = sum(map(len, prefill["said"]))
    report.check(decode["said"] == prefill["said"], f"all {count} tokens are those of decoding without a handoff")
    report.say(f"the closest decision: {prefill['margin']:.3f} between the best two logits")
    report.check(decode["residue_count"] == 0, "nothing of the residue reached the target")
    for name, text in (("zeroed", "one live page of one layer zeroed"), ("swapped", "keys and values swapped")):
        pairs = zip(chain(*prefill["said"]), chain(*decode[f"said_{name}"]), strict=True)
        wrong = sum(expected != said for expected, said in pairs)
        report.check(wrong > 0, f"with {text}, {wrong} of {count} tokens differ")


def refuse(report: Report, a: ht.Client, b: ht.Client) -> None:
    """What must not go through, and what it leaves behind: nothing."""
    report.heading("A poisoned block table: the second page is one that nobody has")
    pools: dict[CacheKey, object] = {(0, role): np.ones((8, PAGE_SIZE, 2, 64), np.float16) for role in ("key", "value")}
    named = {"rule": "V4", "field": "block_table", "index": "1", "offered": str(POISON)}
    error = refusal_of(lambda: ht.KVSnapshot.from_paged(pools, block_tables=[[5, POISON]], token_counts=[20]))
    report.refusal("the SDK refuses it", error, ht.InvalidContents, named)

    snapshot = ht.KVSnapshot.from_paged(pools, block_tables=[[5, 3]], token_counts=[20])
    with patch("hurray_client.client.prepare", lying_prepare):
        error = refusal_of(lambda: a.put("demo/poisoned", snapshot))
    report.refusal("A refuses it from a source that lies", error, ht.InvalidContents, named)
    report.check(not list(a.list()) and a.node().arena.held_bytes == 0, "A holds nothing of it")
    report.check(a.put("demo/poisoned", snapshot).generation > 0, "the next put to A works")

    report.heading("A wrong page size")
    config, page_size = Config(), 2 * PAGE_SIZE
    wide = PagedCache.empty(config, num_pages=64, page_size=page_size)
    before = wide.copy()
    error = refusal_of(
        lambda: b.get(KEY, into=wide.pools, block_tables=[list(range(12 * seq, 12 * seq + 12)) for seq in range(5)])
    )
    named = {"field": "page_size", "offered": str(PAGE_SIZE), "required": str(page_size)}
    text = f"B's pages of {PAGE_SIZE} do not go into pages of {page_size}"
    report.refusal(text, error, ht.GeometryMismatch, named)
    untouched = all(np.array_equal(pool, before.pools[name]) for name, pool in wide.pools.items())
    report.check(untouched, "the pages they would have gone to are untouched")


def lying_prepare(snapshot: ht.KVSnapshot, *, contents_final: bool) -> PreparedSnapshot:
    """What a source sends whose memory went bad after its own checks."""
    prepared = prepare(snapshot, contents_final=contents_final)
    prepared.block_table.view(np.uint32)[1] = POISON
    return prepared


def refusal_of(attempt: Callable[[], object]) -> ht.HurrayError:
    """The error that the attempt must end with."""
    try:
        attempt()
    except ht.HurrayError as error:
        return error
    return ht.InternalError("nothing was refused")


if __name__ == "__main__":
    sys.exit(main())
