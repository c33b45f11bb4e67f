"""The demo's engine: pages change nothing about what is said, and every live page decides something."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deploy.demo.model import Config, Model, PagedCache, decode, forward, normalise, prefill

CONFIG = Config(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, hidden=32, intermediate=48, vocabulary=61)
STEPS = 6
_draw = np.random.default_rng(5)
LONG = _draw.integers(0, CONFIG.vocabulary, 21).tolist()
PROMPTS = [
    LONG,
    [*LONG[:9], *_draw.integers(0, CONFIG.vocabulary, 5).tolist()],  # two shared pages of 4, then its own
    LONG[:11],  # its partial last page is a full one of the first
    _draw.integers(0, CONFIG.vocabulary, 3).tolist(),
    LONG[:8],  # nothing of its own at all
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, seed=3)


def filled(model: Model, page_size: int = 4) -> tuple[PagedCache, list[int]]:
    cache = PagedCache.empty(CONFIG, num_pages=64, page_size=page_size)
    return cache, prefill(model, cache, PROMPTS)


def dense_logits(model: Model, tokens: list[int]) -> np.ndarray:
    """The same network without cache, pages or grouping, in float64: logits after the last token."""
    rows = model.embedding[tokens].astype(np.float64)
    half = CONFIG.head_dim // 2
    turn = np.exp(1j * np.arange(len(tokens))[:, None] * 10_000.0 ** (-np.arange(half) / half))[:, None]

    def rotated(heads: np.ndarray) -> np.ndarray:
        pairs = (heads[..., :half] + 1j * heads[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    for layer in model.layers:
        normed = normalise(rows)
        query = rotated((normed @ layer.query).reshape(len(tokens), CONFIG.num_heads, -1))
        key = rotated((normed @ layer.key).reshape(len(tokens), CONFIG.num_kv_heads, -1))
        value = (normed @ layer.value).reshape(len(tokens), CONFIG.num_kv_heads, -1)
        mixed = np.zeros_like(query)
        for head in range(CONFIG.num_heads):
            group = head // (CONFIG.num_heads // CONFIG.num_kv_heads)
            for position in range(len(tokens)):
                scores = key[: position + 1, group] @ query[position, head] / np.sqrt(CONFIG.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[position, head] = weights @ value[: position + 1, group] / weights.sum()
        rows = rows + mixed.reshape(len(tokens), -1) @ layer.output
        normed = normalise(rows)
        gate = normed @ layer.gate
        rows = rows + gate / (1 + np.exp(-gate)) * (normed @ layer.up) @ layer.down
    return normalise(rows) @ model.head


def dense_decode(model: Model, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(STEPS + 1):
        tokens.append(int(np.argmax(dense_logits(model, tokens)[-1])))
    return tokens[len(prompt) :]


def test_paged_logits_equal_dense_ones(model: Model) -> None:
    cache = PagedCache.empty(CONFIG, num_pages=16, page_size=4)
    seq = cache.start()
    parts = [forward(model, cache, seq, LONG[:10]), forward(model, cache, seq, LONG[10:])]
    np.testing.assert_allclose(np.concatenate(parts), dense_logits(model, LONG), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decoding_from_pages_says_what_decoding_without_pages_says(model: Model, page_size: int) -> None:
    cache, first = filled(model, page_size)
    said = decode(model, cache, first, STEPS)
    assert said.margin > 1e-3  # float32 against float64 must not be what decides
    got = [[token, *rest] for token, rest in zip(first, said.tokens, strict=True)]
    assert got == [dense_decode(model, prompt) for prompt in PROMPTS]


def test_prompts_that_begin_alike_share_pages(model: Model) -> None:
    cache, _ = filled(model)
    whole, longer, partial, alone, covered = cache.block_tables
    assert longer[:2] == whole[:2]
    assert not set(longer[2:]) & set(whole)
    assert partial == whole[:3]
    assert covered == whole[:2]
    assert not set(alone) & set(whole)
    assert cache.token_counts == [len(prompt) for prompt in PROMPTS]


def test_prefill_writes_live_slots_only(model: Model) -> None:
    cache, first = filled(model)
    live = np.zeros((cache.num_pages, cache.page_size), dtype=bool)
    for table, count in zip(cache.block_tables, cache.token_counts, strict=True):
        for token in range(count):
            live[table[token // cache.page_size], token % cache.page_size] = True
    expected = decode(model, cache.copy(), first, STEPS)
    for pool in cache.pools.values():
        assert (pool[~live] == pool[~live][0, 0, 0]).all()  # untouched residue
        pool[~live] = np.nan
    assert decode(model, cache, first, STEPS) == expected


def live_pages() -> list[int]:
    cache, _ = filled(Model(CONFIG, seed=3))
    return sorted({page for table in cache.block_tables for page in table})


@pytest.mark.parametrize("page", live_pages())
def test_a_zeroed_page_of_one_layer_changes_what_is_said(model: Model, page: int) -> None:
    assert said_after(model, lambda pools: pools[0, "value"][page].fill(0)) != said_after(model, lambda _: None)


def test_swapped_keys_and_values_change_what_is_said(model: Model) -> None:
    def swap(pools: dict) -> None:
        for layer in range(CONFIG.num_layers):
            pools[layer, "key"], pools[layer, "value"] = pools[layer, "value"], pools[layer, "key"]

    assert said_after(model, swap) != said_after(model, lambda _: None)


def said_after(model: Model, damage: Callable[[dict], None]) -> list[list[int]]:
    cache, first = filled(model)
    damage(cache.pools)
    return decode(model, cache, first, STEPS).tokens
