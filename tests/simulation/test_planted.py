"""A simulator that finds nothing may be blind: it has to find every mistake that is planted, and soon."""

from __future__ import annotations

import pytest

from simulation.faults import Fault
from simulation.judge import Violation
from simulation.planted import PLANTED, Plant
from simulation.world import World

SEEDS = range(1, 13)
TRANSFERS = 120


@pytest.mark.parametrize(("plant", "favoured"), PLANTED, ids=lambda value: getattr(value, "__name__", "-"))
def test_mistake_is_found(plant: Plant, favoured: tuple[Fault, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch.setattr)
    with pytest.raises(Violation):
        _search(favoured)


def _search(favoured: tuple[Fault, ...]) -> None:
    for seed in SEEDS:
        World(seed, TRANSFERS, favoured=favoured).run()
