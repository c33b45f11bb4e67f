"""The store against a model, and its edges one by one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hurray_server.node import generations_before
from hurray_server.principal import tenant_of
from hurray_server.store import Claim, Contents, Pin, Store
from hurray_wire.errors import (
    HurrayError,
    KeyBusy,
    KeyDeleted,
    KeyExists,
    KeyExpired,
    KeyNotFound,
    KeyOverwritten,
    LimitExceeded,
    Misuse,
    SnapshotLost,
)


def contents(memory: int, held_bytes: int = 4096) -> Contents:
    return Contents(
        memory=memory,
        held_bytes=held_bytes,
        tensors=(),
        token_counts=array("Q", [3, 4]).tobytes(),
        total_tokens=7,
        num_seqs=2,
        page_size=4,
        num_pages=2,
    )


class Setup:
    """A store whose clock stands still until told, and what it freed."""

    def __init__(self, **bounds: Any) -> None:
        self.freed: list[int] = []
        self.memory = 0
        self.now_s = 0.0
        self.store = Store(self.freed.append, **({"max_snapshots": 100} | bounds))

    def put(self, key: str, *, lease_s: float = 60.0, overwrite: bool = False) -> int:
        self.memory += 1
        claim = self.store.claim(key, overwrite=overwrite, now_s=self.now_s)
        return self.store.commit(claim, contents(self.memory), lease_s=lease_s, now_s=self.now_s).generation

    def reason(self, key: str, generation: int = 0) -> type[HurrayError]:
        with pytest.raises(HurrayError) as caught:
            self.store.find(key, generation, self.now_s)
        return type(caught.value)


def test_the_four_ways_to_be_gone_are_told_apart() -> None:
    setup = Setup()
    deleted, overwritten, expired = setup.put("deleted"), setup.put("overwritten"), setup.put("expired", lease_s=1)
    setup.store.delete("deleted", 0, 0.0)
    newer = setup.put("overwritten", overwrite=True)
    setup.now_s = 2.0
    setup.put("lost")
    setup.store.lose_all(setup.now_s)

    assert setup.reason("deleted") is setup.reason("deleted", deleted) is KeyDeleted
    assert setup.reason("overwritten", overwritten) is KeyOverwritten
    assert setup.reason("overwritten", newer) is setup.reason("overwritten") is SnapshotLost
    assert setup.reason("expired") is setup.reason("expired", expired) is KeyExpired
    assert setup.reason("lost") is SnapshotLost
    assert setup.reason("never") is KeyNotFound
    assert setup.reason("deleted", 99) is KeyNotFound


def test_generations_of_one_life_are_never_those_of_another() -> None:
    born = generations_before(1_800_000_000.0)
    assert generations_before(1_800_000_001.0) == born + 1000 * 4096
    assert generations_before(0.0) == 0  # a clock that nobody has set
    assert generations_before(3_900_000_000.0) < 1 << 53
    store = Store(lambda _: None, max_snapshots=1, generation=born)
    claim = store.claim("k", overwrite=False, now_s=0.0)
    assert store.commit(claim, contents(1), lease_s=9.0, now_s=0.0).generation == born + 1


def test_tombstones_end_after_their_time_and_above_their_number() -> None:
    setup = Setup(tombstone_s=10.0, max_tombstones=2)
    for key in ("a", "b", "c"):
        setup.put(key)
        setup.store.delete(key, 0, 0.0)
    assert setup.reason("a") is KeyNotFound
    assert setup.reason("b") is KeyDeleted
    setup.now_s = 10.0
    assert setup.reason("b") is setup.reason("c") is KeyNotFound


def test_no_tenant_has_the_tombstones_of_another_forgotten() -> None:
    setup = Setup(max_tombstones=2, tenant_of=tenant_of)
    setup.put("quiet/k")
    setup.store.delete("quiet/k", 0, 0.0)
    for number in range(5):
        setup.put(f"busy/{number}")
        setup.store.delete(f"busy/{number}", 0, 0.0)
    assert setup.reason("quiet/k") is setup.reason("busy/4") is KeyDeleted
    assert setup.reason("busy/3") is KeyNotFound


def test_a_reader_keeps_what_it_pinned_until_it_is_done() -> None:
    setup = Setup()
    setup.put("k", lease_s=1)
    pin = setup.store.pin("k", 0, 0.0)
    setup.now_s = 5.0
    assert [snapshot.key for snapshot in setup.store.expire(setup.now_s)] == ["k"]
    assert setup.reason("k") is KeyExpired
    assert setup.freed == []
    setup.store.unpin(pin)
    assert setup.freed == [1]
    with pytest.raises(Misuse):
        setup.store.unpin(pin)


def test_a_reader_that_stays_too_long_keeps_its_snapshot_from_others() -> None:
    setup = Setup()
    for key in ("stays", "left", "overwritten"):
        setup.put(key, lease_s=1000)
        setup.store.limit(setup.store.pin(key, 0, 0.0), 50.0)
    stays, left, _ = setup.store._limits
    setup.put("overwritten", lease_s=1000, overwrite=True)
    setup.store.unpin(left)
    assert setup.store.next_expiry_s() == 50.0
    assert setup.store.renew("stays", 0, lease_s=2000, now_s=0.0).expires_s == 2000
    setup.now_s = 50.0
    assert [snapshot.key for snapshot in setup.store.expire(setup.now_s)] == ["stays"]
    assert setup.reason("stays") is KeyExpired
    assert setup.store.find("left", 0, 50.0).reader_count == setup.store.find("overwritten", 0, 50.0).reader_count == 0
    assert setup.freed == []
    setup.store.unpin(stays)
    assert setup.freed == [1]
    assert setup.store.next_expiry_s() == 1000.0


def test_one_consumer_at_a_time_and_other_readers_beside_it() -> None:
    setup = Setup()
    setup.put("k")
    consumer = setup.store.pin("k", 0, 0.0, consume=True)
    reader = setup.store.pin("k", 0, 0.0)
    with pytest.raises(KeyBusy):
        setup.store.pin("k", 0, 0.0, consume=True)
    assert setup.store.find("k", 0, 0.0).reader_count == 2
    setup.store.unpin(consumer)  # it failed: the next one may try
    consumer = setup.store.pin("k", 0, 0.0, consume=True)
    setup.store.consume(consumer, 0.0)
    setup.store.unpin(consumer)
    assert setup.reason("k") is KeyDeleted
    assert setup.freed == []
    setup.store.unpin(reader)
    assert setup.freed == [1]


def test_a_consumer_of_an_overwritten_snapshot_deletes_nothing() -> None:
    setup = Setup()
    setup.put("k")
    consumer = setup.store.pin("k", 0, 0.0, consume=True)
    newer = setup.put("k", overwrite=True)
    setup.store.consume(consumer, 0.0)
    setup.store.unpin(consumer)
    assert setup.store.find("k", 0, 0.0).generation == newer
    assert setup.freed == [1]


def test_a_claimed_key_is_busy_and_what_it_holds_stays_until_the_commit() -> None:
    setup = Setup()
    first = setup.put("k")
    with pytest.raises(KeyExists):
        setup.store.claim("k", overwrite=False, now_s=0.0)
    claim = setup.store.claim("k", overwrite=True, now_s=0.0)
    with pytest.raises(KeyBusy):
        setup.store.claim("k", overwrite=True, now_s=0.0)
    assert setup.store.find("k", 0, 0.0).generation == first
    setup.store.abandon(claim)
    assert setup.store.find("k", 0, 0.0).generation == first
    with pytest.raises(Misuse):
        setup.store.commit(claim, contents(9), lease_s=1, now_s=0.0)


def test_a_renewal_never_shortens_a_lease() -> None:
    setup = Setup()
    setup.put("k", lease_s=100)
    assert setup.store.renew("k", 0, lease_s=10, now_s=0.0).expires_s == 100
    assert setup.store.renew("k", 0, lease_s=50, now_s=90.0).expires_s == 140
    assert setup.store.expire(100.0) == []
    assert setup.store.next_expiry_s() == 140
    assert [snapshot.key for snapshot in setup.store.expire(140.0)] == ["k"]


def test_what_is_gone_before_its_lease_ends_is_forgotten_soon() -> None:
    setup = Setup()
    kept = setup.put("kept", lease_s=10.0)
    for number in range(2000):
        setup.put("same", lease_s=3600.0, overwrite=True)
        setup.put(f"{number}", lease_s=3600.0)
        setup.store.delete(f"{number}", 0, setup.now_s)
    assert len(setup.store._leases) < 100
    assert setup.store.next_expiry_s() == 10.0
    setup.now_s = 11.0
    assert [snapshot.generation for snapshot in setup.store.expire(setup.now_s)] == [kept]
    setup.now_s = 3601.0
    assert [snapshot.key for snapshot in setup.store.expire(setup.now_s)] == ["same"]


def test_fifty_leases_of_which_one_is_renewed() -> None:
    setup = Setup()
    for number in range(50):
        setup.put(f"k{number}", lease_s=60)
    setup.store.renew("k7", 0, lease_s=60, now_s=59.0)
    assert len(setup.store.expire(60.0)) == len(setup.freed) == 49
    assert len(setup.store) == 1


def test_a_bounded_number_of_snapshots_claims_included() -> None:
    setup = Setup(max_snapshots=2)
    setup.put("a", lease_s=7)
    setup.store.claim("b", overwrite=False, now_s=0.0)
    with pytest.raises(LimitExceeded) as caught:
        setup.store.claim("c", overwrite=False, now_s=1.0)
    assert caught.value.retry_after_s == 6.0
    setup.store.claim("a", overwrite=True, now_s=1.0)


def test_a_scan_is_in_key_order_and_resumes_after_any_key() -> None:
    setup = Setup()
    for key in ("b/2", "a", "b/1", "b/3", "c", "b"):
        setup.put(key)
    keys = lambda prefix, after, limit: [s.key for s in setup.store.scan(prefix, after=after, limit=limit, now_s=0.0)]  # noqa: E731
    assert keys("", "", 10) == ["a", "b", "b/1", "b/2", "b/3", "c"]
    assert keys("b/", "", 2) == ["b/1", "b/2"]
    assert keys("b/", "b/2", 2) == ["b/3"]
    setup.store.delete("b/2", 0, 0.0)
    assert keys("b/", "b/2", 2) == ["b/3"]
    assert keys("b/", "zzz", 2) == []


def test_who_waits_for_a_key_is_called_at_its_commit_and_not_before() -> None:
    setup = Setup()
    calls: list[str] = []
    unwatch = setup.store.watch("k", lambda: calls.append("k"))
    setup.put("other")
    claim = setup.store.claim("k", overwrite=False, now_s=0.0)
    assert calls == []
    setup.store.commit(claim, contents(5), lease_s=1, now_s=0.0)
    assert calls == ["k"]
    unwatch()
    setup.put("k", overwrite=True)
    assert calls == ["k"]


@dataclass
class Held:
    """The model's idea of a committed snapshot."""

    key: str
    generation: int
    memory: int
    expires_s: float
    fate: type[HurrayError] | None = None
    pins: list[Pin] = field(default_factory=list)


KEYS = st.sampled_from(["a", "a/b", "b"])


class StoreMachine(RuleBasedStateMachine):
    claims = Bundle("claims")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.freed: list[int] = []
        self.store = Store(self.freed.append, max_snapshots=1000)
        self.all: list[Held] = []
        self.open: dict[str, Claim] = {}
        self.limits: dict[Pin, float] = {}
        self.memory = 0

    def newest(self, key: str) -> Held | None:
        return next((held for held in self.all if held.key == key and held.fate is None), None)

    def age(self) -> None:
        for held in self.all:
            limit_s = min((self.limits[pin] for pin in held.pins if pin in self.limits), default=self.now_s + 1)
            if held.fate is None and min(held.expires_s, limit_s) <= self.now_s:
                held.fate = KeyExpired

    @rule(target=claims, key=KEYS, overwrite=st.booleans())
    def claim(self, key: str, overwrite: bool) -> object:
        self.age()
        try:
            claim = self.store.claim(key, overwrite=overwrite, now_s=self.now_s)
        except KeyBusy:
            assert key in self.open
            return multiple()
        except KeyExists:
            assert self.newest(key) is not None
            assert not overwrite
            return multiple()
        assert key not in self.open
        self.open[key] = claim
        return claim

    @rule(claim=consumes(claims), lease_s=st.sampled_from([1.0, 5.0, 60.0]))
    def commit(self, claim: Claim, lease_s: float) -> None:
        self.age()
        self.memory += 1
        old = self.newest(claim.key)
        snapshot = self.store.commit(claim, contents(self.memory), lease_s=lease_s, now_s=self.now_s)
        del self.open[claim.key]
        if old is not None:
            old.fate = KeyOverwritten
        assert all(held.generation < snapshot.generation for held in self.all)
        self.all.append(Held(claim.key, snapshot.generation, self.memory, self.now_s + lease_s))

    @rule(claim=consumes(claims))
    def abandon(self, claim: Claim) -> None:
        self.store.abandon(claim)
        del self.open[claim.key]

    @rule(target=pins, key=KEYS, consume=st.booleans())
    def pin(self, key: str, consume: bool) -> object:
        self.age()
        held = self.newest(key)
        try:
            pin = self.store.pin(key, 0, self.now_s, consume=consume)
        except KeyBusy:
            assert held is not None
            assert consume
            assert any(pin.consume for pin in held.pins)
            return multiple()
        except HurrayError:
            assert held is None
            return multiple()
        assert held is not None
        assert pin.snapshot.contents.memory == held.memory
        held.pins.append(pin)
        return pin

    @rule(pin=consumes(pins), succeeded=st.booleans())
    def unpin(self, pin: Pin, succeeded: bool) -> None:
        self.age()
        held = next(held for held in self.all if pin in held.pins)
        assert held.memory not in self.freed
        if pin.consume and succeeded:
            self.store.consume(pin, self.now_s)
            held.fate = held.fate or KeyDeleted
        self.store.unpin(pin)
        held.pins.remove(pin)

    @rule(pin=pins)
    def limit(self, pin: Pin) -> None:
        """Always as far ahead, as the node does."""
        if pin not in self.limits:
            self.limits[pin] = self.now_s + 30.0
            self.store.limit(pin, self.now_s + 30.0)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.age()
        held = self.newest(key)
        try:
            self.store.delete(key, 0, self.now_s)
        except HurrayError:
            assert held is None
        else:
            assert held is not None
            held.fate = KeyDeleted

    @rule(key=KEYS, lease_s=st.sampled_from([1.0, 30.0]))
    def renew(self, key: str, lease_s: float) -> None:
        self.age()
        held = self.newest(key)
        if held is not None:
            held.expires_s = max(held.expires_s, self.now_s + lease_s)
            assert self.store.renew(key, 0, lease_s=lease_s, now_s=self.now_s).expires_s == held.expires_s

    @rule(seconds=st.sampled_from([0.5, 4.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.expire(self.now_s)
        self.age()

    @rule()
    def lose_all(self) -> None:
        self.store.lose_all(self.now_s)
        self.age()
        for held in self.all:
            held.fate = held.fate or SnapshotLost

    @invariant()
    def memory_is_freed_once_and_exactly_when_nobody_refers_to_it(self) -> None:
        gone = sorted(held.memory for held in self.all if held.fate is not None and not held.pins)
        assert sorted(self.freed) == gone

    @invariant()
    def every_key_and_generation_tells_its_fate(self) -> None:
        for held in self.all:
            fate = held.fate or (KeyExpired if held.expires_s <= self.now_s else None)
            if fate is not None:
                with pytest.raises(fate):
                    self.store.find(held.key, held.generation, self.now_s)
                continue
            found = self.store.find(held.key, held.generation, self.now_s)
            assert found.contents.memory == held.memory
            assert found.reader_count == len(held.pins)

    @invariant()
    def a_scan_shows_what_is_there(self) -> None:
        shown = [snapshot.key for snapshot in self.store.scan("", after="", limit=99, now_s=self.now_s)]
        assert shown == sorted(held.key for held in self.all if held.fate is None and held.expires_s > self.now_s)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
