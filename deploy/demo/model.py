"""A small grouped-query transformer over a paged KV cache, in NumPy: the engine of the demo.

RMSNorm, rotary positions, grouped-query attention through block tables, SwiGLU, greedy decoding, float32. The weights
come from a seed, so every process that knows the seed has the same model. Sequences that begin alike share pages, a
partial last page too; a shared page is copied before a sequence writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
CacheKey = tuple[int | None, str]

RESIDUE: Final = np.float32(-31337.0)
"""What fresh pages hold: the leavings of another tenant, which must never reach anyone."""

_EPSILON: Final = np.float32(1e-6)
_ROPE_BASE: Final = 10_000.0


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model. `num_heads` query heads share `num_kv_heads` key and value heads."""

    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 128
    intermediate: int = 256
    vocabulary: int = 512


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, all [inputs, outputs]."""

    query: Floats
    key: Floats
    value: Floats
    output: Floats
    gate: Floats
    up: Floats
    down: Floats


class Model:
    """The weights, drawn from `seed`."""

    def __init__(self, config: Config, seed: int) -> None:
        draw = np.random.default_rng(seed)

        def matrix(inputs: int, outputs: int, gain: float = 1.0) -> Floats:
            scale = np.float32(gain / np.sqrt(inputs))
            return draw.standard_normal((inputs, outputs), dtype=np.float32) * scale

        c = config
        wide, narrow = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.config: Final = config
        self.embedding: Final = draw.standard_normal((c.vocabulary, c.hidden), dtype=np.float32)
        self.head: Final = matrix(c.hidden, c.vocabulary, 3.0)
        # Gains above one make attention choose, so that what it reads decides what is said.
        self.layers: Final = tuple(
            Layer(
                query=matrix(c.hidden, wide, 1.5),
                key=matrix(c.hidden, narrow, 1.5),
                value=matrix(c.hidden, narrow),
                output=matrix(wide, c.hidden, 2.0),
                gate=matrix(c.hidden, c.intermediate),
                up=matrix(c.hidden, c.intermediate),
                down=matrix(c.intermediate, c.hidden),
            )
            for _ in range(c.num_layers)
        )


class PagedCache:
    """Keys and values of a batch in pages: one pool [num_pages, page_size, num_heads, head_dim] per layer and role."""

    def __init__(
        self,
        pools: Mapping[CacheKey, Floats],
        block_tables: Sequence[Sequence[int]] = (),
        token_counts: Sequence[int] = (),
    ) -> None:
        self.pools: Final = dict(pools)
        self.block_tables: Final = [list(table) for table in block_tables]
        self.token_counts: Final = list(token_counts)
        self.num_pages, self.page_size = next(iter(self.pools.values())).shape[:2]

    @classmethod
    def empty(cls, config: Config, num_pages: int, page_size: int) -> PagedCache:
        """Pools full of residue, no sequence."""
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        return cls(
            {(layer, role): np.full(shape, RESIDUE) for layer in range(config.num_layers) for role in ("key", "value")}
        )

    def copy(self) -> PagedCache:
        """A cache of its own with the same contents."""
        return PagedCache(
            {name: pool.copy() for name, pool in self.pools.items()}, self.block_tables, self.token_counts
        )

    def start(self) -> int:
        """A new sequence without tokens; its number."""
        self.block_tables.append([])
        self.token_counts.append(0)
        return len(self.block_tables) - 1

    def share(self, seq: int, token_count: int) -> int:
        """A new sequence that begins with the first `token_count` tokens of `seq`, in the same pages; its number."""
        assert token_count <= self.token_counts[seq]
        self.block_tables.append(self.block_tables[seq][: -(-token_count // self.page_size)])
        self.token_counts.append(token_count)
        return len(self.block_tables) - 1

    def extend(self, seq: int, token_count: int) -> None:
        """Make room for the tokens after the last: fresh pages, and a page of its own where the last one is shared."""
        table, first = self.block_tables[seq], self.token_counts[seq]
        if first % self.page_size and sum(table[-1] in other for other in self.block_tables) > 1:
            shared, table[-1] = table[-1], self._free_page()
            for pool in self.pools.values():
                pool[table[-1]] = pool[shared]
        while len(table) * self.page_size < first + token_count:
            table.append(self._free_page())
        self.token_counts[seq] = first + token_count

    def write(self, layer: int, role: str, seq: int, first: int, rows: Floats) -> None:
        """Store tokens `first` and following, [tokens, num_kv_heads, head_dim]."""
        pages, slots = self._places(seq, first, first + len(rows))
        self.pools[layer, role][pages, slots] = rows

    def read(self, layer: int, role: str, seq: int) -> Floats:
        """All tokens of a sequence in order, [tokens, num_kv_heads, head_dim]."""
        pages, slots = self._places(seq, 0, self.token_counts[seq])
        return self.pools[layer, role][pages, slots]

    def _places(self, seq: int, first: int, end: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        pages, slots = np.divmod(np.arange(first, end), self.page_size)
        return np.array(self.block_tables[seq], dtype=np.intp)[pages], slots

    def _free_page(self) -> int:
        # In a shuffled order: neighbours end up far apart, as in a pool that has been in use for a while.
        used = {page for table in self.block_tables for page in table}
        shuffled = np.random.default_rng(self.num_pages).permutation(self.num_pages)
        return next(int(page) for page in shuffled if int(page) not in used)


@dataclass(slots=True)
class Decoded:
    """What greedy decoding said: tokens per sequence, and its closest decision (best logit minus the second)."""

    tokens: list[list[int]]
    margin: float = field(default=float("inf"))


def forward(model: Model, cache: PagedCache, seq: int, tokens: Sequence[int]) -> Floats:
    """Append `tokens` to a sequence; the logits after each of them, [tokens, vocabulary]."""
    config, first = model.config, cache.token_counts[seq]
    positions = np.arange(first, first + len(tokens))
    cache.extend(seq, len(tokens))
    rows = model.embedding[np.asarray(tokens)]
    for index, layer in enumerate(model.layers):
        normed = normalise(rows)
        query = rotate(_heads(normed @ layer.query, config.head_dim), positions)
        cache.write(index, "key", seq, first, rotate(_heads(normed @ layer.key, config.head_dim), positions))
        cache.write(index, "value", seq, first, _heads(normed @ layer.value, config.head_dim))
        mixed = attend(query, cache.read(index, "key", seq), cache.read(index, "value", seq), positions)
        rows = rows + mixed.reshape(len(tokens), -1) @ layer.output
        normed = normalise(rows)
        gate = normed @ layer.gate
        rows = rows + (gate / (1 + np.exp(-gate)) * (normed @ layer.up)) @ layer.down
    logits: Floats = normalise(rows) @ model.head
    return logits


def prefill(model: Model, cache: PagedCache, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Take in the prompts, sharing what an earlier one already holds; the first token after each."""
    first_tokens: list[int] = []
    for prompt in prompts:
        known, shared = _longest_shared(cache, prompts[: len(first_tokens)], prompt)
        seq = cache.share(shared, known) if known else cache.start()
        if known == len(prompt):
            # Nothing is left to compute but the logits of the last token: on a copy, for its cache row is there.
            scratch = cache.copy()
            scratch.token_counts[seq] -= 1
            logits = forward(model, scratch, seq, prompt[-1:])
        else:
            logits = forward(model, cache, seq, prompt[known:])
        first_tokens.append(int(np.argmax(logits[-1])))
    return first_tokens


def decode(model: Model, cache: PagedCache, last_tokens: Sequence[int], steps: int) -> Decoded:
    """Say `steps` more tokens after the last token of each sequence, greedily. Writes to the cache."""
    said = Decoded([[token] for token in last_tokens])
    for _ in range(steps):
        for seq, tokens in enumerate(said.tokens):
            logits = forward(model, cache, seq, tokens[-1:])[-1]
            second, best = np.partition(logits, -2)[-2:]
            said.margin = min(said.margin, float(best - second))
            tokens.append(int(np.argmax(logits)))
    return Decoded([tokens[1:] for tokens in said.tokens], said.margin)


def normalise(rows: Floats) -> Floats:
    """RMSNorm without a weight, over the last axis."""
    scale: Floats = 1 / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + _EPSILON)
    return rows * scale


def rotate(heads: Floats, positions: npt.NDArray[np.int_]) -> Floats:
    """Rotary position embedding of [tokens, heads, head_dim]; the two halves of a head are the pairs."""
    half = heads.shape[-1] // 2
    angles = positions[:, None] * _ROPE_BASE ** (-np.arange(half) / half)
    cos, sin = (np.asarray(turn, dtype=np.float32)[:, None, :] for turn in (np.cos(angles), np.sin(angles)))
    left, right = heads[..., :half], heads[..., half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attend(query: Floats, key: Floats, value: Floats, positions: npt.NDArray[np.int_]) -> Floats:
    """Causal grouped-query attention: query [tokens, num_heads, head_dim] over key and value [all, num_kv_heads, ...].

    `positions` are those of the query's tokens.
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.reshape(tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ key.transpose(1, 2, 0)[:, None] * np.float32(head_dim**-0.5)
    scores = np.where(np.arange(len(key)) <= positions[:, None], scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Floats = weights @ value.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(tokens, num_heads, head_dim)


def _heads(rows: Floats, head_dim: int) -> Floats:
    return rows.reshape(len(rows), -1, head_dim)


def _longest_shared(cache: PagedCache, earlier: Sequence[Sequence[int]], prompt: Sequence[int]) -> tuple[int, int]:
    """How many leading tokens of `prompt` lie in pages of an earlier prompt that it can share, and which prompt's.

    Whole pages, or all of `prompt`: a last page that it fills only partly is shared if all it has in it is there.
    """
    longest, owner = 0, 0
    for seq, other in enumerate(earlier):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other, strict=False)))
        known = same if same == len(prompt) else same - same % cache.page_size
        if known > longest:
            longest, owner = known, seq
    return longest, owner
