"""Fixed seeds, run as the command runs them; and that a seed is all that a run depends on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from simulation.faults import PAIRS, Fault
from simulation.judge import Violation
from simulation.main import TIMES, run, shrink
from simulation.world import World

SEEDS = (1, 2, 3)
TRANSFERS = 4_000
"""That the rarest pair is met 20 times by all seeds together."""

Hits = Counter[tuple[str, str]]


def _hits(seed: int, transfers: int) -> Hits:
    world = run(seed, transfers)
    return Counter({(row, fault.name): times for (row, fault), times in world.coverage.hits.items()})


def _end_with(parent: int) -> None:
    """Have this process end with the one that started it, whatever it is in the middle of."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, Future[Hits]]]:
    """All of them at once, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        yield {seed: pool.submit(_hits, seed, TRANSFERS) for seed in SEEDS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_breaks(seed: int, worlds: dict[int, Future[Hits]]) -> None:
    worlds[seed].result()


@pytest.mark.timeout(600)
def test_every_fault_is_met_everywhere(worlds: dict[int, Future[Hits]]) -> None:
    hits: Hits = sum((world.result() for world in worlds.values()), Counter())
    few = {(row, fault.name): hits[row, fault.name] for row, fault in PAIRS if hits[row, fault.name] < TIMES}
    assert not few


def test_a_seed_is_all_that_a_run_depends_on() -> None:
    script = "from simulation.main import run; print(run(5, 120).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert digests == {f"{run(5, 120).digest}\n"}
    assert digests != {f"{run(6, 120).digest}\n"}


def test_a_run_leaves_nothing_behind() -> None:
    import asyncio

    from hurray_client import node as client_node
    from hurray_server import node as server_node

    before = threading.active_count()
    run(7, 60)
    assert threading.active_count() == before
    assert client_node.threading is threading
    assert server_node.time.__name__ == "time"
    assert not asyncio._get_running_loop()


def test_the_shortest_failing_beginning_is_found() -> None:
    tried = []

    def attempt(_seed: int, transfers: int) -> None:
        tried.append(transfers)
        if transfers >= 357:
            raise Violation("broken")

    assert shrink(1, 10_000, attempt) == 357
    assert len(tried) < 20


def test_a_thread_that_dies_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def grace(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hurray_wire.dataplane.DataPlane._run_timers", grace)
    with pytest.raises(Violation):
        World(1, 20).run()


def test_calls_that_hang_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_client.exchange.Exchange._wait", lambda self, *, for_node: self._takers.get())
    with pytest.raises(Violation):
        World(1, 60, favoured=(Fault.STREAM_RESET,)).run()
