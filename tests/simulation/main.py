"""The command: one world of a seed, or many of random ones, until something breaks; then the way back to it."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from simulation.faults import PAIRS, Coverage
from simulation.judge import Violation
from simulation.world import World

TIMES = 20
"""How often each pair of row and fault has to be met."""


def run(seed: int, transfers: int, *, trace: Callable[[str], None] | None = None) -> World:
    """A world, run to its end. Raises Violation."""
    world = World(seed, transfers, trace=trace)
    world.run()
    return world


def shrink(seed: int, transfers: int, attempt: Callable[[int, int], object] = run) -> int:
    """The smallest number of transfers with which the seed still fails: a world with fewer is the beginning of one
    with more, up to its last storm."""
    least, most = 0, transfers
    while most - least > 1:
        middle = (least + most) // 2
        try:
            attempt(seed, middle)
        except Violation:
            most = middle
        else:
            least = middle
    return most


def command(seed: int, transfers: int) -> str:
    """How to see it again."""
    return f"make simulate ARGS='--seed {seed} --transfers {transfers} --trace'"


def main() -> NoReturn:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="the seed; random unless given")
    parser.add_argument("--transfers", type=int, default=10_000, help="puts and gets in storms (10000)")
    parser.add_argument("--batch", type=int, default=10_000, help="transfers of one world, a seed each (10000)")
    parser.add_argument("--trace", action="store_true", help="print what happens, step by step")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    sys.exit(_run_all(seed, options.transfers, options.batch, print if options.trace else None))


def _run_all(seed: int, transfers: int, batch: int, trace: Callable[[str], None] | None) -> int:
    coverage, outcomes, began = Coverage(), {}, time.monotonic()
    done = 0
    while done < transfers:
        count = min(batch, transfers - done)
        try:
            world = run(seed, count, trace=trace)
        except Violation as violation:
            print(f"seed {seed} breaks: {violation}", flush=True)
            if trace is None:
                count = shrink(seed, count)
            print(f"again: {command(seed, count)}")
            return 1
        coverage.add(world.coverage)
        for name, times in world.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + times
        done += count
        seconds = time.monotonic() - began
        print(
            f"seed {seed}: {count} transfers, nothing broken; {done} in all, {done / seconds:.0f} per second",
            flush=True,
        )
        seed += 1
    print(f"\nfaults by the place of the transfer that they met, {sum(coverage.hits.values())} in all:")
    print(coverage.table())
    print("\nwhat calls came to:")
    for name, times in sorted(outcomes.items()):
        print(f"{times:9}  {name}")
    few = coverage.missing(TIMES)
    least = coverage.least()
    print(f"\n{len(PAIRS)} pairs of place and fault, the rarest met {least} times; {len(few)} fewer than {TIMES}")
    for row, fault in few[:20]:
        print(f"  {coverage.hits[row, fault]:3} {row}, {fault.name.lower()}")
    return 0
