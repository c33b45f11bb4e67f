"""The daemon is killed, paused and started again while prompts run: right tokens or an error, and no block is lost."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.vllm_engines import EngineProcess, Store, Trio, expected, loading, random_prompts

CYCLES = int(os.environ.get("VLLM_TEST_CYCLES", "4"))


@contextmanager
def disturbed(store: Store, kind: str, after_s: float) -> Iterator[None]:
    """While the block runs something happens to the daemon; at its end the daemon is well."""
    fault: dict[str, Callable[[], object]] = {
        "kill": store.kill,
        "pause": store.pause,
        "kill mover": lambda: store.daemon.kill_mover(),
        "restart": lambda: (store.kill(), store.start()),
    }
    timer = threading.Timer(after_s, fault[kind])
    timer.start()
    try:
        yield
    finally:
        timer.join()
        if kind == "pause":
            store.resume()
        elif kind == "kill":
            store.start()


def settled(engines: list[EngineProcess]) -> list[tuple[int, int, bool]]:
    states = [engine.state() for engine in engines]
    return [(state["free_blocks"], state["requests"], state["forgotten"]) for state in states]


def test_every_answer_is_right_or_an_error(trio: Trio, others: dict[str, EngineProcess], store: Store) -> None:
    source = random.Random(5)
    small = others["small"]  # it computes what was not loaded; the other one fails such requests
    before = settled([trio.prefill, trio.decode, small])
    seen: dict[str, int] = {"equal": 0, "error": 0, "not handed over": 0}
    kinds = ["kill", "pause", "kill mover", "restart"]
    for cycle in range(CYCLES):
        lengths = [source.randrange(1, 401) for _ in range(12)]
        prompts = random_prompts(500 + cycle, lengths, shared=source.randrange(0, 60))
        wanted = expected(trio.reference, prompts)
        kind, delay = kinds[cycle % len(kinds)], source.uniform(0, 0.2)
        if cycle % 2:
            with disturbed(store, kind, delay):
                handles = trio.hand_over(prompts)
        else:
            handles = trio.hand_over(prompts)
        seen["not handed over"] += sum("hurray_error" in handle for handle in handles.values())
        with disturbed(store, kind, delay):
            answers = trio.decode.generate(loading(prompts, handles))
            again = small.generate(loading(prompts, handles))
        for name, tokens in wanted.items():
            answer = answers[name]
            assert (answer["finish"], answer["tokens"]) in (("length", tokens), ("error", [])), f"{kind}: {name}"
            seen["equal" if answer["finish"] == "length" else "error"] += 1
            assert (again[name]["finish"], again[name]["tokens"]) == ("length", tokens), f"{kind}, computed: {name}"
    assert settled([trio.prefill, trio.decode, small]) == before
    assert min(seen["equal"], seen["error"]) > 0, seen  # both happened, or this shows nothing


def test_loads_of_a_silent_node_end_in_time_and_can_be_aborted(trio: Trio, store: Store) -> None:
    """And the engine answers others meanwhile."""
    prompts = random_prompts(61, [100, 200, 150])
    wanted = expected(trio.reference, prompts)
    handles: dict[str, Any] = trio.hand_over(prompts) | {"s61n2": None}
    before = settled([trio.decode])
    store.pause()
    try:
        answers = trio.decode.generate(loading(prompts, handles), aborts={"s61n0": 3})
    finally:
        store.resume()
    assert [(name, answer["finish"]) for name, answer in answers.items()] == [
        ("s61n0", "abort"),
        ("s61n2", "length"),
        ("s61n1", "error"),
    ]
    assert answers["s61n2"]["tokens"] == wanted["s61n2"]
    assert settled([trio.decode]) == before


def test_a_request_that_is_aborted_leaves_nothing(trio: Trio) -> None:
    """Before its prompt is computed, after it was put, and while it goes on from there: no block stays taken."""
    prompts = random_prompts(64, [100, 200])
    before = settled([trio.prefill, trio.decode])
    wait = [
        {"id": name, "prompt": prompt, "max_tokens": 8, "kv": {"do_remote_decode": True}}
        for name, prompt in prompts.items()
    ]
    first = trio.prefill.generate(wait, aborts={"s64n0": 0, "s64n1": 3})
    assert [answer["finish"] for answer in first.values()] == ["abort"] * 2
    handles = trio.hand_over(prompts)
    ended = trio.decode.generate(loading(prompts, handles, max_tokens=64), aborts=dict.fromkeys(prompts, 40))
    assert [answer["finish"] for answer in ended.values()] == ["abort"] * 2
    assert settled([trio.prefill, trio.decode]) == before


@pytest.mark.parametrize("kind", ["pause", "kill"])
@pytest.mark.parametrize("layered", [False, True])
def test_prompts_are_answered_when_they_cannot_be_handed_over(
    trio: Trio, others: dict[str, EngineProcess], store: Store, kind: str, layered: bool
) -> None:
    """And the decode engine, which is told so, computes them."""
    prefill = others["layerwise"] if layered else trio.prefill
    prompts = random_prompts(620 + 2 * layered + (kind == "pause"), [50, 150])
    wanted = expected(trio.reference, prompts)
    before = settled([prefill, trio.decode])
    getattr(store, kind)()
    try:
        wait: list[dict[str, Any]] = [
            {"id": name, "prompt": prompt, "max_tokens": 1, "kv": {"do_remote_decode": True}}
            for name, prompt in prompts.items()
        ]
        first = prefill.generate(wait)
    finally:
        (store.resume if kind == "pause" else store.start)()
    answers = trio.decode.generate(loading(prompts, {name: first[name]["kv"] for name in prompts}))
    for name, tokens in wanted.items():
        assert first[name]["tokens"] == tokens[:1]
        assert not first[name]["kv"]["do_remote_prefill"]
        assert first[name]["kv"]["hurray_error"]
        assert (answers[name]["tokens"], answers[name]["computed"]) == (tokens, len(prompts[name]))
    assert settled([prefill, trio.decode]) == before
