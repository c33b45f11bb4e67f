"""Ways through simulated worlds: at random with faults at random, and one by one with a fault at every step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from session.simulation import WIND_DOWN_STEPS, Fault, Setting, World

SETTINGS = (
    Setting(6, 2, 2),
    Setting(5, 3, 1, eager=frozenset({0, 1})),
    Setting(1, 1, 4, ready_chunk_count=0),
    Setting(4, 1, 4, checksummed=False, eager=frozenset({0, 3})),
    Setting(6, 1, 3, ready_chunk_count=1, eager=frozenset(range(6))),
    Setting(3, 1, 2, checksummed=False, ready_chunk_count=0),
    Setting(5, 2, 2, offered=True),
)
WIDE = Setting(45, 2, 20, eager=frozenset(range(0, 45, 3)))
"""More chunks than a batch of checksums has, and a window above what a source takes."""

BUDGET = 6000
"""Worlds that are wandered through before the machines are believed."""


def wander(world: World, pick: random.Random, fault_rate: float, faults: Sequence[Fault] = tuple(Fault)) -> World:
    """Random steps, and at each a fault with this probability; then the wind-down."""
    for _ in range(WIND_DOWN_STEPS):
        if pick.random() < fault_rate:
            world.inject(pick.choice(faults))
        steps = world.steps()
        timers = world.timers()
        if timers and pick.random() < fault_rate:
            steps = timers
        if not steps:
            break
        world.take(pick.choice(steps))
    world.wind_down()
    return world


def worlds(count: int, **kinds: Any) -> Iterator[tuple[World, random.Random, float]]:
    """Worlds to wander through, always the same ones, each with what picks in it and how often it strikes."""
    for seed in range(count):
        pick = random.Random(seed)
        yield World(pick.choice(SETTINGS), pick.choice, **kinds), pick, pick.choice((0.0, 0.02, 0.05, 0.15))


def wander_through(these: Iterable[tuple[World, random.Random, float]]) -> None:
    for world, pick, rate in these:
        wander(world, pick, rate)


def strike(world: World, *blows: tuple[int, Fault]) -> bool:
    """Faults, each after so many further steps or at the end, then the wind-down; False where the end came first."""
    reached = True
    for after, fault in blows:
        for _ in range(after):
            steps = world.steps()
            reached = reached and bool(steps)
            if steps:
                world.take(world.pick(steps))
        world.inject(fault)
    world.wind_down()
    return reached
