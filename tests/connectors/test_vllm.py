"""The parts of vLLM's connector that need no vLLM: views of its blocks, handles, the scheduler's side."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hurray_client as ht
from hurray_client.connectors.vllm.handle import Handle, prompt_digest
from hurray_client.connectors.vllm.layout import Interior, Strided, split
from hurray_client.connectors.vllm.puts import PutOutcome
from hurray_client.connectors.vllm.requests import Requests
from hurray_client.connectors.vllm.settings import read_settings

Array = np.ndarray[Any, Any]


def view(memory: Array, part: Strided) -> Array:
    strides = tuple(step * memory.itemsize for step in part.strides)
    return np.lib.stride_tricks.as_strided(memory[part.offset :], part.shape, strides)


def block_of(keys: Array, values: Array, interior: Interior) -> Array:
    """One block [H, N, C] as an engine with that interior writes it; keys and values are [N, H, D]."""
    heads = []
    for head in range(keys.shape[1]):
        key, value = keys[:, head], values[:, head]
        if interior is Interior.SIDE_BY_SIDE:
            heads.append(np.concatenate([key, value], axis=1))
        else:
            first = key.T if interior is Interior.TRANSPOSED_KEYS else key
            heads.append(np.concatenate([first.reshape(-1), value.reshape(-1)]).reshape(keys.shape[0], -1))
    return np.stack(heads)


@given(
    interior=st.sampled_from(Interior),
    blocks=st.integers(1, 5),
    heads=st.integers(1, 4),
    slots=st.integers(1, 8),
    size=st.integers(1, 6),
    outer=st.sampled_from(["HND", "NHD"]),
    seed=st.integers(0, 99),
)
def test_views_show_what_was_written_and_write_to_it(
    interior: Interior, blocks: int, heads: int, slots: int, size: int, outer: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    keys, values = random.integers(0, 1 << 30, (2, blocks, slots, heads, size)).astype(np.uint32)
    if outer == "NHD" and interior is not Interior.SIDE_BY_SIDE:
        outer = "HND"  # a head's page is one piece there
    logical = np.stack([block_of(keys[block], values[block], interior) for block in range(blocks)])
    memory = logical if outer == "HND" else np.ascontiguousarray(logical.swapaxes(1, 2)).swapaxes(1, 2)
    flat = memory.reshape(-1) if outer == "HND" else memory.swapaxes(1, 2).reshape(-1)
    strides = tuple(step // memory.itemsize for step in memory.strides)
    parts = split(memory.shape, strides, size, interior)
    for part, written in zip(parts, (keys, values), strict=True):
        assert (view(flat, part) == written).all()
        view(flat, part)[...] = written + 1
        assert (view(flat, part) == written + 1).all()
    # Together they are all of it, and share nothing.
    assert np.array_equal(np.sort(flat), np.sort(np.concatenate([keys.reshape(-1), values.reshape(-1)]) + 1))


def test_a_snapshot_of_such_views_goes_into_such_views() -> None:
    """What the SDK does with them: NHD in between, the same tokens, and nothing written beside."""
    shape, size = (6, 2, 32, 64), 32
    strides = (4096, 2048, 64, 1)
    source = np.arange(6 * 4096, dtype=np.float32)
    target = np.zeros_like(source)
    parts = dict(zip(("key", "value"), split(shape, strides, size, Interior.TRANSPOSED_KEYS), strict=True))
    caches = {(0, role): view(source, part) for role, part in parts.items()}
    snapshot = ht.KVSnapshot.from_paged(caches, block_tables=[[4, 1]], token_counts=[40])
    for role, part in parts.items():
        tokens = snapshot.tokens(0, role, 0)
        assert (tokens[:32] == view(source, part)[4]).all()
        view(target, part)[[2, 5]] = 0
        view(target, part)[2] = tokens[:32]
        view(target, part)[5, :8] = tokens[32:]
    assert not target.reshape(6, -1)[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("strides", [(4096, 64, 128, 1), (4096, 2048, 64, 2)])
def test_pages_that_are_not_one_piece_have_no_halves(strides: tuple[int, ...]) -> None:
    with pytest.raises(ht.Unsupported):
        split((4, 2, 32, 64), strides, 32, Interior.TRANSPOSED_KEYS)


def test_the_package_is_imported_without_vllm() -> None:
    script = (
        "import sys, hurray_client, hurray_client.connectors.vllm as c\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
        "try: c.Other\nexcept AttributeError: pass\nelse: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- handles ----------------------------------------------------------------------------------------------------------

HANDLE = Handle("store", 32, 70, (("k-tp0of2", 5), ("k-tp1of2", 6)))


def test_a_handle_survives_its_way() -> None:
    assert Handle.from_params(HANDLE.to_params(), tp_size=2, token_count=70) == HANDLE


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    st.sampled_from(["hurray", "node", "block_size", "tokens", "snapshots", "key", "generation"]),
)
def test_whatever_comes_for_a_handle_is_read_or_refused(value: Any, name: str) -> None:
    params = HANDLE.to_params()
    places = {"hurray": params, "key": params["hurray"]["snapshots"][0], "generation": params["hurray"]["snapshots"][1]}
    places.get(name, params["hurray"])[name] = value
    with suppress(ht.InvalidRequest):  # and nothing else
        assert len(Handle.from_params(params, tp_size=2, token_count=70).snapshots) == 2


@pytest.mark.parametrize(("tp_size", "tokens", "field"), [(1, 70, "tp_size"), (4, 70, "tp_size"), (2, 71, "tokens")])
def test_handles_of_other_engines_and_prompts_are_refused_by_field(tp_size: int, tokens: int, field: str) -> None:
    with pytest.raises(ht.InvalidRequest) as caught:
        Handle.from_params(HANDLE.to_params(), tp_size=tp_size, token_count=tokens)
    assert caught.value.field == field


def test_prompts_differ_by_tokens_and_by_all_else_that_their_cache_depends_on() -> None:
    digests = {
        prompt_digest([1, 2]),
        prompt_digest([2, 1]),
        prompt_digest([1, 2], "lora a"),
        prompt_digest([1, 2], "salt a"),
        prompt_digest([1]),
        prompt_digest([1, 2], "a", "b"),
        prompt_digest([1, 2], "a\0b"[:1], "c"),
    }
    assert len(digests) == 7


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "nodes"),
        ({"nodes": {}}, "nodes"),
        ({"nodes": {"a": "h:1"}}, "node"),
        ({"nodes": {"a": "h:1"}, "node": "b"}, "node"),
        ({"nodes": {"a": "h:1"}, "node": "a", "lease_s": 0}, "lease_s"),
        ({"nodes": {"a": "h:1"}, "node": "a", "lease": 5}, "lease"),
    ],
)
def test_settings_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ht.InvalidRequest) as caught:
        read_settings(config, produces=True)
    assert caught.value.field == field


# --- the scheduler's side ---------------------------------------------------------------------------------------------


@dataclass
class Request:
    """What is read of vLLM's."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    prompt_embeds: object = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def scheduling(node: str | None = "store", tp_size: int = 1) -> Requests:
    return Requests(node=node, key_prefix="p/", block_size=32, tp_size=tp_size)


def test_a_prompt_is_put_once_with_the_step_that_finishes_it() -> None:
    requests = scheduling(tp_size=2)
    request = Request("r", list(range(70)), {"do_remote_decode": True})
    requests.add(request)
    assert requests.puts({"r": 64}, lambda _: (1, 2, 3)) == []
    (order,) = requests.puts({"r": 70, "other": 5}, lambda _: (1, 2, 3, 4))
    assert (order.token_count, order.block_ids, order.key.startswith("p/vllm-")) == (70, (1, 2, 3), True)
    assert requests.puts({"r": 71}, lambda _: (1, 2, 3, 4)) == []
    params = requests.finish(request)
    assert params is not None
    assert not params["do_remote_prefill"]  # vLLM has them now; the outcome comes with the same step
    requests.put_ended("r", {0: PutOutcome("k0", 5), 1: PutOutcome("k1", 6)})
    assert Handle.from_params(params, tp_size=2, token_count=70).snapshots == (("k0", 5), ("k1", 6))
    assert requests.is_empty


@pytest.mark.parametrize(
    "outcomes", [{0: PutOutcome("k0", 5), 1: PutOutcome(error="ARENA_FULL: x")}, {0: PutOutcome("k", 5)}]
)
def test_a_put_that_failed_at_one_rank_leaves_no_handle(outcomes: dict[int, PutOutcome]) -> None:
    requests = scheduling(tp_size=2)
    request = Request("r", [1, 2], {"do_remote_decode": True})
    requests.add(request)
    requests.puts({"r": 2}, lambda _: (1,))
    requests.put_ended("r", outcomes)
    params = requests.finish(request)
    assert params is not None
    assert set(params) == {"do_remote_prefill", "do_remote_decode", "hurray_error"}
    assert not params["do_remote_prefill"]
    assert requests.is_empty


def test_a_request_that_ends_before_its_prompt_is_computed_leaves_nothing() -> None:
    requests = scheduling()
    request = Request("r", [1, 2], {"do_remote_decode": True})
    requests.add(request)
    params = requests.finish(request)
    assert params is not None
    assert params["hurray_error"].startswith("NOT_PUT")
    assert requests.is_empty


def test_positions_behind_the_local_beginning_are_loaded_once() -> None:
    requests = scheduling()
    request = Request("r", list(range(70)), Handle("store", 32, 70, (("k", 5),)).to_params())
    assert requests.matched(request, 64) == 6
    assert requests.matched(request, 32) == 38  # asked again, after others took blocks
    requests.allocated(request, (7, 8, 9), 38)
    requests.allocated(request, (7, 8, 9, 10), 0)
    (plan,), cancels = requests.take_loads()
    assert (plan.start, plan.end, plan.block_ids, plan.error, cancels) == (32, 70, (7, 8, 9), None, [])
    assert requests.matched(request, 0) == 0  # a load that failed, or a preemption: computed here
    requests.finish(request)
    assert requests.take_loads() == ([], ["r"])
    assert requests.is_empty


@pytest.mark.parametrize("computed", [69, 70])
def test_the_last_token_alone_is_not_loaded(computed: int) -> None:
    request = Request("r", list(range(70)), HANDLE.to_params())
    assert scheduling().matched(request, computed) == 0


def test_a_handle_that_is_no_good_becomes_a_load_that_fails() -> None:
    requests = scheduling(None)
    request = Request("r", list(range(70)), {"do_remote_prefill": True, "hurray": 5})
    requests.add(request)
    requests.allocated(request, (1, 2, 3), requests.matched(request, 0))
    (plan,), _ = requests.take_loads()
    assert plan.handle is None
    assert plan.error
    assert "field=hurray" in plan.error
