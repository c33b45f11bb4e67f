"""Both machines against each other: faults at every step, in every phase, singly and together."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hurray_wire import session as s
from hurray_wire.session_phases import SOURCE_TABLE, TARGET_TABLE
from session.simulation import Fault, Setting, World
from session.walks import BUDGET, SETTINGS, WIDE, strike, wander, worlds

ANSWERED_AT_ONCE = (s.SourcePhase.OFFERED, s.ReceiptReceived)
"""The one pair that needs a target of another kind, one that remembers: test_table has it."""


@pytest.fixture(scope="module")
def seen() -> Counter[tuple[Any, Any]]:
    """How often each (phase, event) and (phase, fault) was met in all the worlds below."""
    met: Counter[tuple[Any, Any]] = Counter()
    for setting in (*SETTINGS, WIDE):
        unharmed = World(setting, random.Random(0).choice, seen=met)
        unharmed.wind_down()
        assert unharmed.committed
    for setting in SETTINGS:
        for fault in Fault:
            at = 0
            while strike(World(setting, random.Random(at).choice, seen=met), (at, fault)):
                at += 1
        strike_while_cancelling(setting, met)
    for world, pick, rate in worlds(BUDGET, seen=met):
        wander(world, pick, rate).check_replay()
    return met


def strike_while_cancelling(setting: Setting, met: Counter[tuple[Any, Any]]) -> None:
    """CANCELLING is short and comes late, so that chance rarely finds it."""
    for seed, fault in itertools.product(range(12), Fault):
        for after in range(4):
            world = World(setting, random.Random(seed).choice, seen=met)
            while world.source.machine.phase is not s.SourcePhase.DELIVERED:
                world.take(world.pick(world.steps()))
            strike(world, (seed % 3, Fault.SOURCE_FAILS), (after, fault))


def test_every_pair_of_the_table_is_met(seen: Counter[tuple[Any, Any]]) -> None:
    pairs = {(phase, event) for table in (SOURCE_TABLE, TARGET_TABLE) for phase, row in table.items() for event in row}
    assert pairs - set(seen) == {ANSWERED_AT_ONCE}


def test_every_fault_strikes_in_every_phase(seen: Counter[tuple[Any, Any]]) -> None:
    pairs = {(phase, fault) for phase in (*s.SourcePhase, *s.TargetPhase) for fault in Fault}
    assert pairs <= set(seen)


def test_many_chunks_and_a_wide_window() -> None:
    for seed in range(40):
        pick = random.Random(seed)
        wander(World(WIDE, pick.choice), pick, 0.01).check_replay()


def shapes() -> st.SearchStrategy[Setting]:
    return st.integers(1, 7).flatmap(
        lambda count: st.builds(
            Setting,
            st.just(count),
            st.integers(1, count),
            st.integers(1, 4),
            checksummed=st.booleans(),
            ready_chunk_count=st.integers(0, count),
            eager=st.frozensets(st.integers(0, count - 1)),
            offered=st.booleans(),
        )
    )


class TransferMachine(RuleBasedStateMachine):
    """What can happen is World's; hypothesis picks."""

    world: World

    @initialize(setting=shapes())
    def begin(self, setting: Setting) -> None:
        self.number = 0
        self.world = World(setting, lambda options: options[self.number % len(options)])

    @precondition(lambda self: self.world.steps())
    @rule(number=st.integers(0, 31))
    def step(self, number: int) -> None:
        self.number = number
        self.world.take(self.world.pick(self.world.steps()))

    @precondition(lambda self: self.world.steps())
    @rule(number=st.integers(0, 31))
    def two_steps(self, number: int) -> None:
        self.step(number % 8)
        if self.world.steps():
            self.step(number // 8)

    @rule(fault=st.sampled_from(Fault), number=st.integers(0, 7))
    def fault(self, fault: Fault, number: int) -> None:
        self.number = number
        self.world.inject(fault)

    @precondition(lambda self: self.world.timers())
    @rule(number=st.integers(0, 1))
    def timer(self, number: int) -> None:
        self.number = number
        self.world.take(self.world.pick(self.world.timers()))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_down()
            self.world.check_replay()


TestTransfer = TransferMachine.TestCase
TestTransfer.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
