"""Two engines, one of which computes prompts and the other goes on from there: the tokens are those of one engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from support.vllm_engines import (
    BLOCK_SIZE,
    EngineProcess,
    Store,
    Tokens,
    Trio,
    expected,
    loading,
    random_prompts,
    replace_snapshot,
)

PROMPTS = int(os.environ.get("VLLM_TEST_PROMPTS", "200"))
BATCH = 40


def many_prompts() -> dict[str, list[int]]:
    """1 to 400 tokens: every offset in a block, both sides of every block boundary, and random lengths; half of them
    share a beginning with others, whose end has any offset, too."""
    source = random.Random(7)
    edges = [size + offset for size in range(BLOCK_SIZE, 400, BLOCK_SIZE) for offset in (-1, 0, 1)]
    lengths = [*range(1, 2 * BLOCK_SIZE + 1), *edges]
    lengths += [source.randrange(1, 401) for _ in range(max(0, PROMPTS + PROMPTS // 10 - len(lengths)))]
    source.shuffle(lengths)
    prompts: dict[str, list[int]] = {}
    for number in range(0, len(lengths), 10):
        shared = source.randrange(0, 200) if number % 20 else 0
        prompts |= random_prompts(1000 + number, lengths[number : number + 10], shared=shared)
    return prompts


def test_two_hundred_prompts_are_answered_as_by_one_engine(trio: Trio) -> None:
    before = {engine: engine.state()["free_blocks"] for engine in (trio.prefill, trio.decode)}
    prompts = many_prompts()
    names = list(prompts)
    compared = 0
    for start in range(0, len(names), BATCH):
        batch = {name: prompts[name] for name in names[start : start + BATCH]}
        wanted = expected(trio.reference, batch)
        answers = trio.decode.generate(loading(batch, trio.hand_over(batch)))
        for name, tokens in wanted.items():
            answer = answers[name]
            assert (answer["finish"], answer["tokens"]) == ("length", tokens), f"{len(batch[name])} tokens"
            assert answer["computed"] == 1, f"{answer['computed']} of {len(batch[name])} tokens computed again"
        compared += len(wanted)
    assert compared >= PROMPTS
    for engine, free in before.items():
        state = engine.state()
        assert (state["free_blocks"], state["requests"], state["forgotten"]) == (free, 0, True)


SPOILED: dict[str, Callable[[Tokens], Tokens]] = {
    "keys for values": lambda kept: {
        (layer, role): kept[layer, "value" if role == "key" else "key"] for layer, role in kept
    },
    "a layer of nothing": lambda kept: {key: 0 * rows if key[0] == 2 else rows for key, rows in kept.items()},
    "keys of a layer a slot late in the first block": lambda kept: {
        key: np.roll(rows[:BLOCK_SIZE], 1, axis=0) if key == (1, "key") else rows[:BLOCK_SIZE]
        for key, rows in kept.items()
    },
}
"""What a wrong hand-over could make of a prompt of one block, [tokens, num_heads, head_dim] by (layer, role)."""


@pytest.mark.parametrize("how", SPOILED)
def test_the_answers_depend_on_the_cache(trio: Trio, store: Store, how: str) -> None:
    """Or equal tokens would show nothing."""
    prompts = random_prompts(37, [BLOCK_SIZE] * 12)
    wanted = expected(trio.reference, prompts)
    handles = trio.hand_over(prompts)
    trio.decode.ask("reset")
    with store.client() as client:
        for handle in handles.values():
            replace_snapshot(client, handle, contents=SPOILED[how])
    answers = trio.decode.generate(loading(prompts, handles))
    trio.decode.ask("reset")  # what is in its cache is wrong
    assert {answer["finish"] for answer in answers.values()} == {"length"}
    assert sum(answers[name]["tokens"] != tokens for name, tokens in wanted.items()) > len(wanted) * 3 // 4


def test_a_beginning_that_the_decode_engine_has_is_not_loaded_again(trio: Trio) -> None:
    """Positions are explicit: what is loaded goes behind what was there."""
    first = random_prompts(31, [150], shared=100)
    others = {f"b{name}": prompt for name, prompt in random_prompts(31, [150, 101, 128, 129, 300], shared=100).items()}
    trio.decode.generate(loading(first, trio.hand_over(first)))
    wanted = expected(trio.reference, others)
    answers = trio.decode.generate(loading(others, trio.hand_over(others)))
    for name, tokens in wanted.items():
        assert answers[name]["tokens"] == tokens
        assert answers[name]["computed"] == 1


def test_vllm_reads_what_the_views_show(trio: Trio) -> None:
    """Keys and values as attention was given them, against the connector's views of vLLM's cache: equal, every slot."""
    (prompt,) = random_prompts(32, [97]).values()
    compared = trio.prefill.ask("read_back", prompt=prompt)
    assert compared == {"layers": 4, "slots": 97, "equal": True}


@pytest.mark.parametrize("sizes", [(32, 64), (64, 32)])
def test_another_block_size_is_blocked_anew(
    trio: Trio, others: dict[str, EngineProcess], sizes: tuple[int, int]
) -> None:
    """Blocks of 32 in blocks of 64 and the other way: whole and partial ones, behind a beginning that was there."""
    if sizes == (32, 64):
        flow = replace(trio, decode=others["blocks_of_64"])
    else:
        flow = replace(trio, prefill=others["blocks_of_64"])
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 200, 311, 400]
    prompts = random_prompts(330 + sizes[0], lengths, shared=66)
    wanted = expected(trio.reference, prompts)
    for _ in range(2):  # the second time the beginning is there
        answers = flow.decode.generate(loading(prompts, flow.hand_over(prompts)))
        for name, tokens in wanted.items():
            assert (answers[name]["tokens"], answers[name]["computed"]) == (tokens, 1), f"{len(prompts[name])} tokens"


def test_layers_sent_one_by_one_arrive_as_well(trio: Trio, others: dict[str, EngineProcess]) -> None:
    prompts = random_prompts(34, [1, 31, 32, 33, 64, 100, 399, 400])
    wanted = expected(trio.reference, prompts)
    layered = replace(trio, prefill=others["layerwise"])
    answers = trio.decode.generate(loading(prompts, layered.hand_over(prompts)))
    for name, tokens in wanted.items():
        assert (answers[name]["tokens"], answers[name]["computed"]) == (tokens, 1)


def test_preempted_requests_go_on_with_the_same_tokens(trio: Trio, others: dict[str, EngineProcess]) -> None:
    """An engine of 39 blocks for 12 requests that come to need 5 each: some lose what was loaded, and compute it."""
    small = others["small"]
    prompts = random_prompts(35, [90] * 12)
    wanted = expected(trio.reference, prompts, max_tokens=64)
    requests = loading(prompts, trio.hand_over(prompts), max_tokens=64)
    told = small.ask("generate", requests=requests, aborts={})
    assert told["preemptions"] > 0
    for name, tokens in wanted.items():
        assert told["answers"][name]["tokens"] == tokens
    # The same engine as the one that fills caches: what it hands over was complete when it did, whatever came after.
    again = [
        {"id": name, "prompt": prompt, "max_tokens": 64, "kv": {"do_remote_decode": True}}
        for name, prompt in prompts.items()
    ]
    told = small.ask("generate", requests=again, aborts={})
    assert told["preemptions"] > 0
    answers = trio.decode.generate(loading(prompts, {name: told["answers"][name]["kv"] for name in prompts}, 64))
    for name, tokens in wanted.items():
        assert (answers[name]["tokens"], answers[name]["computed"]) == (tokens, 1)
    assert small.state() | {"digest": ""} == {"free_blocks": 39, "requests": 0, "forgotten": True, "digest": ""}


def test_an_fp8_cache_goes_with_its_scales(others: dict[str, EngineProcess], store: Store) -> None:
    """From an engine to itself, which keeps no prefixes: what it loads is what it would have computed."""
    engine = others["cache_dtype"]
    prompts = random_prompts(36, [1, 33, 64, 200])
    wanted = expected(engine, prompts)
    ask = [
        {"id": name, "prompt": prompt, "max_tokens": 1, "kv": {"do_remote_decode": True}}
        for name, prompt in prompts.items()
    ]
    handles = {name: answer["kv"] for name, answer in engine.generate(ask).items()}
    with store.client() as client:
        kept = client.stat(handles["s36n3"]["hurray"]["snapshots"][0]["key"])
    assert {item.element_type.name for item in kept.descriptors} == {"float8_e4m3"}
    assert kept.info.annotations["k_scale.0"] == "0000803f" * 4  # 1.0 for each layer
    answers = engine.generate(loading(prompts, handles))
    for name, tokens in wanted.items():
        assert (answers[name]["tokens"], answers[name]["computed"]) == (tokens, 1)
