"""The arena: its books balance whatever happens, and no two extents ever share a byte."""

from __future__ import annotations

import errno
import gc
import os
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hurray_server import grains
from hurray_server.arena import Arena, Showable, TransferMemory
from hurray_wire import memfd
from hurray_wire.errors import ArenaFull, DataPlaneUnavailable
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.view import Mapping

PAGES = 64


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


def test_what_ends_an_extent_is_told() -> None:
    told: list[None] = []
    arena = Arena(PAGES * PAGE_BYTES, on_change=lambda: told.append(None))
    arena.reserve(1, 1)
    arena.hold(1)
    assert not told
    arena.free(1)
    arena.reserve(2, 1)
    arena.quarantine(2)
    arena.free(2)
    assert len(told) == 3


# --- grains ------------------------------------------------------------------------------------------------------

GRAIN = 4 * PAGE_BYTES


@pytest.fixture
def grained() -> Arena:
    return Arena(PAGES * PAGE_BYTES, grain_bytes=GRAIN)


def put(arena: Arena, owner: int, nbytes: int, value: int, tenant: int = 1) -> None:
    """A snapshot all of whose bytes are `value`."""
    arena.reserve(owner, nbytes, tenant)[:] = value
    arena.hold(owner)


def look(showable: Showable) -> npt.NDArray[np.uint8]:
    """All that a reader can see of what it was shown: whole grains, whatever it was told to map."""
    mapping = Mapping(len(showable.grains) * showable.grain_bytes, showable.grain_bytes)
    mapping.add(showable.grains)
    return mapping._memory


def show(arena: Arena, owner: int) -> npt.NDArray[np.uint8]:
    """What a hostile reader keeps, which lets go of its pin at once."""
    assert arena.pin(owner) is not None
    showable = arena.show(owner)
    assert showable is not None
    arena.unpin(owner)
    return look(showable)


def test_a_large_snapshot_has_grains_of_its_own_and_a_small_one_has_not(grained: Arena) -> None:
    put(grained, 1, 5 * GRAIN - 5, 1)
    put(grained, 2, GRAIN // 2, 2)
    put(grained, 3, GRAIN + PAGE_BYTES, 3)  # nearly half of two grains would be unused
    assert [grained.can_show(owner) for owner in (1, 2, 3, 4)] == [True, False, False, False]
    assert grained.pin(2) is not None
    assert grained.show(2) is None
    seen = show(grained, 1)
    assert seen.nbytes == 5 * GRAIN
    assert (seen[: 5 * GRAIN - 5] == 1).all()
    assert not seen[5 * GRAIN - 5 :].any()
    assert grained.usage().held_bytes == 5 * GRAIN + GRAIN // 2 + GRAIN + PAGE_BYTES


def test_where_no_grains_are_left_a_large_snapshot_still_fits(grained: Arena) -> None:
    put(grained, 1, 15 * GRAIN, 1)
    for owner in (2, 3):
        put(grained, owner, GRAIN // 4, owner)
    grained.free(1)
    put(grained, 4, 15 * GRAIN + GRAIN // 2, 4)
    assert not grained.can_show(4)
    assert grained.usage().free_bytes == 0


def test_what_is_shown_says_how_much_of_it_counts(grained: Arena) -> None:
    put(grained, 1, 8 * GRAIN - 2 * PAGE_BYTES, 1)
    assert grained.pin(1) is not None
    showable = grained.show(1)
    assert showable is not None
    assert (len(showable.grains), showable.grain_bytes, showable.nbytes) == (8, GRAIN, 8 * GRAIN - 2 * PAGE_BYTES)
    assert grained.show(1) == showable


def test_a_tail_is_clear_before_anyone_sees_it(grained: Arena) -> None:
    """Of what others left there, and of what its own tenant did."""
    for round_ in range(2):
        put(grained, 10 + round_, PAGES * PAGE_BYTES, 255)
        grained.free(10 + round_)
        put(grained, round_, 8 * GRAIN - PAGE_BYTES, 1)
        assert not show(grained, round_)[8 * GRAIN - PAGE_BYTES :].any()
        grained.free(round_)


def test_a_grain_that_was_shown_serves_the_same_tenant_as_it_is_and_others_anew(grained: Arena) -> None:
    put(grained, 1, PAGES * PAGE_BYTES, 1)
    kept = show(grained, 1)
    grained.free(1)
    put(grained, 2, PAGES * PAGE_BYTES, 2)
    assert (kept == 2).all()  # the same tenant's
    grained.free(2)
    put(grained, 3, PAGES * PAGE_BYTES, 3, tenant=2)
    assert (kept == 2).all()
    assert (show(grained, 3) == 3).all()
    grained.free(3)
    put(grained, 4, GRAIN // 2, 4, tenant=1)
    assert not (kept == 4).any()


def test_grains_that_nobody_has_seen_come_first(grained: Arena) -> None:
    put(grained, 1, 8 * GRAIN, 1)
    kept = show(grained, 1)
    grained.free(1)
    put(grained, 2, 8 * GRAIN, 2, tenant=2)
    put(grained, 3, 3 * PAGE_BYTES, 3, tenant=1)
    put(grained, 4, 3 * PAGE_BYTES, 4, tenant=2)  # beside what its tenant has
    assert (kept == 3).any()
    assert not (kept == 4).any()


def test_beside_bytes_in_a_grain_that_was_shown_nobody_else_gets_a_place(grained: Arena) -> None:
    put(grained, 1, PAGES * PAGE_BYTES, 1)
    kept = show(grained, 1)
    grained.free(1)
    for owner in range(100, 100 + PAGES):
        put(grained, owner, PAGE_BYTES, 9)
    for owner in range(100, 100 + PAGES):
        if owner % 4 != 3:
            grained.free(owner)
    with pytest.raises(ArenaFull):
        grained.reserve(2, PAGE_BYTES, 2)
    put(grained, 3, 3 * PAGE_BYTES, 9)
    grained.free(103)
    grained.free(3)
    put(grained, 4, PAGE_BYTES, 7, tenant=2)
    assert not (kept == 7).any()


def test_where_no_fresh_memory_is_to_be_had_the_arena_is_full(grained: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    put(grained, 1, PAGES * PAGE_BYTES, 1)
    kept = show(grained, 1)
    grained.free(1)

    def fails(*_: object) -> int:
        raise OSError(errno.ENFILE, "Too many open files in system")

    with monkeypatch.context() as patch:
        patch.setattr(memfd, "create_at", fails)
        with pytest.raises(ArenaFull, match="Too many open files"):
            grained.reserve(2, GRAIN, 2)
    assert grained.usage().free_bytes == PAGES * PAGE_BYTES
    put(grained, 2, 2 * GRAIN, 2, tenant=2)
    assert (kept == 1).all()


def test_without_sealed_memory_there_is_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grains, "_can_seal", lambda: False)
    arena = Arena(PAGES * PAGE_BYTES, grain_bytes=GRAIN)
    assert not arena.shows
    put(arena, 1, 8 * GRAIN, 1)
    assert not arena.can_show(1)
    assert arena.prefault()


def grain_descriptors() -> int:
    gc.collect()  # arenas of tests before this one
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return sum("memfd:hurray-grain" in name for name in names)


def test_descriptors_of_grains_are_as_many_as_grains_and_go_with_the_arena() -> None:
    before = grain_descriptors()
    arena = Arena(PAGES * PAGE_BYTES + PAGE_BYTES, grain_bytes=GRAIN)
    assert grain_descriptors() == before + 17
    put(arena, 1, PAGES * PAGE_BYTES, 1)
    show(arena, 1)
    arena.free(1)
    put(arena, 2, PAGES * PAGE_BYTES, 2, tenant=2)
    assert grain_descriptors() == before + 17
    del arena
    assert grain_descriptors() == before


@pytest.mark.parametrize(
    ("total", "descriptors", "grain"),
    [
        (1 << 20, 1 << 20, 2 << 20),
        (128 << 20, 1 << 20, 2 << 20),
        (1 << 30, 1 << 20, 16 << 20),
        (64 << 30, 1 << 20, 64 << 20),
        (1 << 40, 1 << 20, 256 << 20),
        (1 << 40, resource.RLIM_INFINITY, 256 << 20),
        (1 << 30, 1024, 16 << 20),
        (1 << 30, 64, 64 << 20),
    ],
)
def test_grains_are_as_many_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, total: int, descriptors: int, grain: int
) -> None:
    monkeypatch.setattr(grains.resource, "getrlimit", lambda _: (1024, descriptors))
    assert grains.grain_bytes_for(total) == grain


class ArenaMachine(RuleBasedStateMachine):
    """Every byte of a snapshot says whose it is: so a reader that keeps all it was ever shown would see others'."""

    receiving = Bundle("receiving")
    held = Bundle("held")
    readers = Bundle("readers")

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(PAGES * PAGE_BYTES, grain_bytes=GRAIN)
        self.owner = 0
        self.views: dict[int, npt.NDArray[np.uint8]] = {}
        self.tenants: dict[int, int] = {}
        self.quarantined: set[int] = set()
        self.committed: set[int] = set()
        self.freed: set[int] = set()
        self.pins: dict[int, int] = {}
        self.shown: dict[int, int] = {}
        self.kept: list[tuple[int, npt.NDArray[np.uint8]]] = []

    def value(self, owner: int) -> int:
        return self.tenants[owner] * 64 + owner % 61 + 1

    def taken(self, owner: int) -> range:
        """Pages of an extent."""
        view = self.views[owner]
        unit = GRAIN if self.arena.can_show(owner) else PAGE_BYTES
        first = (view.ctypes.data - self.arena._memory.ctypes.data) // PAGE_BYTES
        return range(first, first + -(-view.nbytes // unit) * unit // PAGE_BYTES)

    def used(self) -> set[int]:
        pages = [page for owner in self.views for page in self.taken(owner)]
        assert len(set(pages)) == len(pages), "two extents overlap"
        return set(pages)

    def longest_run(self, used: set[int], tenant: int) -> int:
        """Pages in a row that this tenant may be given."""
        longest = run = 0
        for page in range(PAGES):
            grain = page // 4
            is_strange = self.shown.get(grain, tenant) != tenant
            replaceable = used.isdisjoint(range(4 * grain, 4 * grain + 4))
            run = run + 1 if page not in used and (not is_strange or replaceable) else 0
            longest = max(longest, run)
        return longest

    @rule(target=receiving, nbytes=st.integers(1, PAGES * PAGE_BYTES // 2), tenant=st.integers(0, 2))
    def reserve(self, nbytes: int, tenant: int) -> object:
        self.owner += 1
        used = self.used()
        fits = self.longest_run(used, tenant) >= -(-nbytes // PAGE_BYTES)
        try:
            view = self.arena.reserve(self.owner, nbytes, tenant)
        except ArenaFull:
            assert not fits
            return multiple()
        assert fits
        self.views[self.owner], self.tenants[self.owner] = view, tenant
        for grain in {page // 4 for page in self.taken(self.owner)}:
            if self.shown.get(grain) != tenant:
                self.shown.pop(grain, None)
        view[:] = self.value(self.owner)
        return self.owner

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

    @rule(owner=readers)
    def show(self, owner: int) -> None:
        """It stays shown to this tenant whatever becomes of the pin."""
        if not self.pins.get(owner):
            return
        showable = self.arena.show(owner)
        assert (showable is not None) == self.arena.can_show(owner)
        if showable is not None:
            seen, nbytes = look(showable), self.views[owner].nbytes
            assert (seen[:nbytes] == self.value(owner)).all()
            assert not seen[nbytes:].any()
            self.kept.append((self.tenants[owner], seen))
            self.shown.update({page // 4: self.tenants[owner] for page in self.taken(owner)})

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
        assert usage.free_bytes == (PAGES - len(self.used())) * PAGE_BYTES
        size = lambda owners: sum(len(self.taken(owner)) for owner in owners) * PAGE_BYTES  # noqa: E731
        assert usage.held_bytes == size(self.committed & self.views.keys())
        assert usage.quarantined_bytes == size(self.quarantined)
        assert usage.receiving_bytes == size(self.views.keys() - self.committed - self.quarantined)
        total = usage.free_bytes + usage.held_bytes + usage.receiving_bytes + usage.quarantined_bytes
        assert total == usage.total_bytes == PAGES * PAGE_BYTES

    @invariant()
    def nobody_else_wrote_there(self) -> None:
        for owner, view in self.views.items():
            assert (view == self.value(owner)).all()

    @invariant()
    def what_was_shown_to_one_never_shows_another(self) -> None:
        for tenant, seen in self.kept:
            values = np.unique(seen)
            assert ((values == 0) | (values // 64 == tenant)).all(), (tenant, values)


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
