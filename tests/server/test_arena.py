"""The arena: its books balance whatever happens, and no two extents ever share a byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hurray_server.arena import Arena, TransferMemory
from hurray_wire.errors import ArenaFull, DataPlaneUnavailable
from hurray_wire.limits import PAGE_BYTES

PAGES = 32


@pytest.fixture
def arena() -> Arena:
    return Arena(PAGES * PAGE_BYTES)


def test_extents_begin_at_pages_and_are_as_long_as_asked(arena: Arena) -> None:
    first, second = arena.reserve(1, 5), arena.reserve(2, 2 * PAGE_BYTES)
    assert (first.nbytes, second.nbytes) == (5, 2 * PAGE_BYTES)
    assert first.ctypes.data % PAGE_BYTES == second.ctypes.data % PAGE_BYTES == 0
    assert arena.usage().receiving_bytes == 3 * PAGE_BYTES


def test_neighbours_that_are_free_become_one_extent_again(arena: Arena) -> None:
    for owner in range(4):
        arena.reserve(owner, PAGES // 4 * PAGE_BYTES)
    for owner in (0, 2, 1, 3):
        arena.free(owner)
    assert arena.reserve(9, PAGES * PAGE_BYTES).nbytes == PAGES * PAGE_BYTES


def test_a_full_arena_says_how_full_and_when_to_ask_again(arena: Arena) -> None:
    arena.reserve(1, (PAGES - 2) * PAGE_BYTES)
    with pytest.raises(ArenaFull) as caught:
        arena.reserve(2, 3 * PAGE_BYTES)
    assert caught.value.retry_after_s is not None
    assert caught.value.details["free"] == str(2 * PAGE_BYTES)
    with pytest.raises(ArenaFull) as caught:
        arena.reserve(2, 2**62)
    assert caught.value.retry_after_s is None
    assert arena.usage().receiving_bytes == (PAGES - 2) * PAGE_BYTES


def test_what_is_larger_than_the_host_is_refused_by_name() -> None:
    with pytest.raises(DataPlaneUnavailable) as caught:
        Arena(1 << 50)
    assert caught.value.field == "arena.bytes"


def test_a_failed_transfer_is_in_quarantine_until_it_is_released(arena: Arena) -> None:
    memory = TransferMemory(arena, 1)
    memory.reserve(PAGE_BYTES)
    memory.settling()
    assert arena.usage().quarantined_bytes == PAGE_BYTES
    assert arena.usage().free_bytes == (PAGES - 1) * PAGE_BYTES
    memory.release(keep=False)
    assert arena.usage().free_bytes == PAGES * PAGE_BYTES


def test_what_never_was_reserved_can_be_settled_and_released(arena: Arena) -> None:
    memory = TransferMemory(arena, 1)
    memory.settling()
    memory.release(keep=False)
    assert arena.usage().free_bytes == PAGES * PAGE_BYTES


def test_a_committed_snapshot_may_be_deleted_before_its_transfer_hears_of_the_commit(arena: Arena) -> None:
    memory = TransferMemory(arena, 1)
    memory.reserve(PAGE_BYTES)
    arena.hold(1)
    arena.free(1)
    memory.release(keep=True)
    assert arena.usage().free_bytes == PAGES * PAGE_BYTES


def test_a_reader_keeps_the_bytes_of_a_freed_snapshot(arena: Arena) -> None:
    arena.reserve(1, PAGE_BYTES)[:] = 7
    assert arena.pin(1) is None  # not committed
    arena.hold(1)
    view = arena.pin(1)
    assert view is not None
    arena.free(1)
    assert arena.pin(1) is None
    arena.reserve(2, (PAGES - 1) * PAGE_BYTES)[:] = 9
    assert (view == 7).all()
    assert arena.usage().held_bytes == PAGE_BYTES
    arena.unpin(1)
    assert arena.usage().free_bytes == PAGE_BYTES


def test_touching_all_of_it_changes_nothing(arena: Arena) -> None:
    view = arena.reserve(1, 3 * PAGE_BYTES)
    view[:] = 5
    arena.prefault()
    assert (view == 5).all()


def test_every_change_is_told() -> None:
    told: list[None] = []
    arena = Arena(PAGES * PAGE_BYTES, on_change=lambda: told.append(None))
    arena.reserve(1, 1)
    arena.hold(1)
    arena.free(1)
    assert len(told) == 3


class ArenaMachine(RuleBasedStateMachine):
    receiving = Bundle("receiving")
    held = Bundle("held")
    readers = Bundle("readers")

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(PAGES * PAGE_BYTES)
        self.owner = 0
        self.views: dict[int, np.ndarray] = {}
        self.quarantined: set[int] = set()
        self.committed: set[int] = set()
        self.freed: set[int] = set()
        self.pins: dict[int, int] = {}

    @rule(target=receiving, nbytes=st.integers(1, PAGES * PAGE_BYTES // 2))
    def reserve(self, nbytes: int) -> object:
        self.owner += 1
        try:
            view = self.arena.reserve(self.owner, nbytes)
        except ArenaFull:
            size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            assert max(self.gaps(), default=0) < size
            return multiple()
        view[:] = self.owner % 251
        self.views[self.owner] = view
        return self.owner

    def gaps(self) -> list[int]:
        """Free runs, worked out from the extents that are out."""
        base = self.arena._memory.ctypes.data
        spans = sorted((v.ctypes.data - base, -(-v.nbytes // PAGE_BYTES) * PAGE_BYTES) for v in self.views.values())
        runs, end = [], 0
        for offset, nbytes in [*spans, (PAGES * PAGE_BYTES, 0)]:
            assert offset >= end, "two extents overlap"
            if offset > end:
                runs.append(offset - end)
            end = offset + nbytes
        return runs

    @rule(target=held, owner=consumes(receiving))
    def commit(self, owner: int) -> int:
        self.arena.hold(owner)
        self.committed.add(owner)
        return owner

    @rule(owner=consumes(receiving), settled_first=st.booleans())
    def fail(self, owner: int, settled_first: bool) -> None:
        if settled_first:
            self.arena.quarantine(owner)
            self.quarantined.add(owner)
            self.balance()
        self.arena.free(owner)
        self.quarantined.discard(owner)
        self.gone(owner)

    @rule(target=readers, owner=held)
    def pin(self, owner: int) -> object:
        view = self.arena.pin(owner)
        if owner in self.freed:
            assert view is None
            return multiple()
        assert view is not None
        self.pins[owner] = self.pins.get(owner, 0) + 1
        return owner

    @rule(owner=consumes(readers))
    def unpin(self, owner: int) -> None:
        self.arena.unpin(owner)
        self.pins[owner] -= 1
        self.gone(owner)

    @rule(owner=held)
    def free(self, owner: int) -> None:
        self.arena.free(owner)
        self.freed.add(owner)
        self.gone(owner)

    def gone(self, owner: int) -> None:
        wanted = owner in self.committed and owner not in self.freed
        if not wanted and not self.pins.get(owner):
            self.views.pop(owner, None)

    @invariant()
    def balance(self) -> None:
        usage = self.arena.usage()
        assert usage.free_bytes == sum(self.gaps())
        size = lambda owners: sum(-(-self.views[o].nbytes // PAGE_BYTES) * PAGE_BYTES for o in owners)  # noqa: E731
        assert usage.held_bytes == size(self.committed & self.views.keys())
        assert usage.quarantined_bytes == size(self.quarantined)
        assert usage.receiving_bytes == size(self.views.keys() - self.committed - self.quarantined)
        total = usage.free_bytes + usage.held_bytes + usage.receiving_bytes + usage.quarantined_bytes
        assert total == usage.total_bytes == PAGES * PAGE_BYTES

    @invariant()
    def nobody_else_wrote_there(self) -> None:
        for owner, view in self.views.items():
            assert (view == owner % 251).all()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
