"""Engines of two tensor-parallel ranks: each rank hands over its own part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.vllm_engines import (
    Store,
    Trio,
    client_env,
    connector,
    engines,
    expected,
    loading,
    options,
    random_prompts,
    refused,
    up,
)

RANKS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" wants a NUMA node for each rank
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the embedding of a rank would be compiled with the first prompt
}


@pytest.fixture(scope="module")
def pair(folder: Path, model: Path, nodes: dict[str, str], trio: Trio) -> Iterator[Trio]:
    """The same model over two ranks on both sides."""
    prefill = connector("kv_producer", nodes, node="store")
    decode = connector("kv_consumer", nodes)
    with engines(
        folder,
        client_env() | RANKS,
        prefill=options(model, kv_transfer_config=prefill, tensor_parallel_size=2),
        decode=options(model, kv_transfer_config=decode, tensor_parallel_size=2),
    ) as started:
        yield replace(trio, **up(started))


def test_two_ranks_hand_over_to_two(pair: Trio, store: Store) -> None:
    prompts = random_prompts(71, [1, 31, 32, 33, 64, 65, 128, 150, 200, 399, 400], shared=40)
    wanted = expected(pair.reference, prompts)
    handles = pair.hand_over(prompts)
    with store.client() as client:
        kept = [client.stat(snapshot["key"]) for snapshot in handles["s71n10"]["hurray"]["snapshots"]]
    assert [item.info.annotations["tp_rank"] for item in kept] == ["0", "1"]
    assert {descriptor.num_heads for item in kept for descriptor in item.descriptors} == {1}
    for _ in range(2):  # the second time the beginning is there
        answers = pair.decode.generate(loading(prompts, handles))
        for name, tokens in wanted.items():
            assert (answers[name]["tokens"], answers[name].get("computed")) == (tokens, 1), len(prompts[name])
        handles = pair.hand_over(prompts)


def test_another_number_of_ranks_is_refused(pair: Trio, trio: Trio, store: Store) -> None:
    prompts = random_prompts(72, [70])
    refused(trio.decode, store.daemon, prompts, pair.hand_over(prompts), "field=tp_size, offered=2, required=1")
    refused(pair.decode, store.daemon, prompts, trio.hand_over(prompts), "field=tp_size, offered=1, required=2")


def test_a_part_that_is_missing_fails_the_whole(pair: Trio, store: Store) -> None:
    prompts = random_prompts(73, [70])
    handles = pair.hand_over(prompts)
    before = pair.decode.state()
    with store.client() as client:
        client.delete(handles["s73n0"]["hurray"]["snapshots"][1]["key"])
    answers = pair.decode.generate(loading(prompts, handles))
    assert (answers["s73n0"]["finish"], answers["s73n0"]["tokens"]) == ("error", [])
    assert pair.decode.state() == before
