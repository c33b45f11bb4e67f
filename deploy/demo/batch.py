"""What the demo's processes know beforehand: both engines the model, prefill its batch, decode only last tokens."""

from __future__ import annotations

from typing import Final

import numpy as np

from deploy.demo.model import Config, Model

PAGE_SIZE: Final = 16
NUM_PAGES: Final = 128
STEPS: Final = 24
"""Tokens that decode says per sequence."""

_SEED: Final = 7
"""Of those tried, the one whose closest decision is clearest (0.04 between two logits; float32 errs by 1e-5)."""


def load_model() -> Model:
    """The weights."""
    return Model(Config(), _SEED)


def load_prompts() -> list[list[int]]:
    """A ragged batch. Three begin with the same 200 tokens, and the third is nothing else: its last page, half full,
    is a full page of the first."""
    draw = np.random.default_rng(_SEED + 100)
    vocabulary = Config().vocabulary
    shared, *own = (draw.integers(0, vocabulary, count).tolist() for count in (200, 237, 5, 3, 350))
    return [shared + own[0], shared + own[1], shared, own[2], own[3]]
