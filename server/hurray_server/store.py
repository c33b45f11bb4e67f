"""What this node holds, by key: committed snapshots, their leases, who reads them, and why those are gone that are.

Pure: no I/O, no clock (`now_s` comes in, from a clock that never steps back), no threads. A snapshot's memory is named
by a number that means nothing here; `free` is called with it once, when neither key nor reader refers to it any more.

    claim -> commit            a transfer to a key: one at a time, nothing visible before commit
          -> abandon
    find, pin -> unpin         a reader: has what it pinned, whatever becomes of the key meanwhile
    limit                      a reader that may stay long: past its time the key is unreadable, as after its lease
    renew, delete, expire      the end of a lease
    lose_all                   the memory is gone, and all snapshots with it

A snapshot that is gone leaves a tombstone, so that "expired", "deleted", "overwritten" and "lost" are told apart from
"never known" for a while.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from hurray_server.shares import Remembered
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
from hurray_wire.v1 import transfer_pb2 as pb

TOMBSTONE_S: Final = 3600.0
MAX_TOMBSTONES: Final = 100_000

_GONE: Final[Mapping[type[HurrayError], str]] = {
    KeyExpired: "the lease of this snapshot ran out, or a reader has held it for too long",
    KeyDeleted: "this snapshot was deleted or consumed",
    KeyOverwritten: "this snapshot was replaced by a newer generation",
    SnapshotLost: "this snapshot's memory was lost with the data plane that held it",
}


@dataclass(frozen=True, slots=True)
class Contents:
    """What is committed under a key. `memory` names where the bytes are; `tensors` are as they are offered."""

    memory: int
    held_bytes: int
    tensors: tuple[pb.TensorOffer, ...]
    token_counts: bytes
    total_tokens: int
    num_seqs: int
    page_size: int
    num_pages: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    viewed_by: str | None = None
    """The tenant that its key belongs to, whose readers may map it; None: it cannot be mapped."""
    index_checksum: int | None = None
    """XXH3_64 of the index, if it is one chunk of a view."""

    def counts(self) -> array[int]:
        """The token counts, which are kept as 8 bytes each."""
        return array("Q", self.token_counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed snapshot."""

    key: str
    generation: int
    contents: Contents
    created_s: float
    expires_s: float
    reader_count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """The right to commit to a key, until `commit` or `abandon`."""

    key: str
    overwrite: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A reader's hold on a snapshot, until `unpin`."""

    snapshot: Snapshot
    consume: bool


@dataclass(frozen=True, slots=True)
class Pinned:
    """Bytes of snapshots that have readers: under their key, and off it, held for those alone."""

    keyed_bytes: int
    unkeyed_bytes: int


@dataclass(frozen=True, slots=True)
class _Tombstone:
    reason: type[HurrayError]
    died_s: float


class Store:
    """See the module. `generation`: the last one that was given before, by whoever held these keys until now.
    `on_removed(snapshot, reason)`: it was taken off its key. `tenant_of`: whose a key is."""

    def __init__(
        self,
        free: Callable[[int], None],
        *,
        max_snapshots: int,
        generation: int = 0,
        on_removed: Callable[[Snapshot, type[HurrayError]], None] = lambda _snapshot, _reason: None,
        tombstone_s: float = TOMBSTONE_S,
        max_tombstones: int = MAX_TOMBSTONES,
        tenant_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._free = free
        self._on_removed = on_removed
        self._max_snapshots = max_snapshots
        self._tombstone_s = tombstone_s
        self._tenant_of = tenant_of
        self._generation = generation
        self._snapshots: dict[str, Snapshot] = {}
        self._keys: list[str] = []
        self._claims: dict[str, Claim] = {}
        self._readers: dict[int, set[Pin]] = {}
        self._consumers: dict[int, Pin] = {}
        self._leases: list[tuple[float, str, int]] = []
        self._limits: OrderedDict[Pin, float] = OrderedDict()
        """When readers will have stayed too long, in that order."""
        self._tombstones: Remembered[tuple[str, int], _Tombstone] = Remembered(max_tombstones)
        self._last_dead: dict[str, int] = {}
        self._waiters: dict[str, dict[object, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._snapshots)

    # --- to a key -------------------------------------------------------------------------------------------------

    def claim(self, key: str, *, overwrite: bool, now_s: float) -> Claim:
        """Let a transfer to this key begin. Raises KeyBusy, KeyExists, LimitExceeded."""
        self.expire(now_s)
        if key in self._claims:
            raise KeyBusy("another transfer to this key is running", key=key)
        held = self._snapshots.get(key)
        if held is not None and not overwrite:
            raise KeyExists("the key is held; overwriting was not asked for", key=key, generation=held.generation)
        if held is None and len(self._snapshots) + len(self._claims) >= self._max_snapshots:
            raise LimitExceeded(
                "this node holds as many snapshots as it may",
                retry_after_s=self._until_next_expiry(now_s),
                field="max_snapshots",
                offered=len(self._snapshots) + len(self._claims) + 1,
                required=f"<= {self._max_snapshots}",
            )
        claim = self._claims[key] = Claim(key, overwrite)
        return claim

    def commit(self, claim: Claim, contents: Contents, *, lease_s: float, now_s: float) -> Snapshot:
        """Make a snapshot visible, in one step with the end of the one it replaces."""
        self._end_claim(claim)
        self.expire(now_s)
        if claim.key in self._snapshots:
            assert claim.overwrite, "nobody else could commit to a claimed key"
            self._remove(claim.key, KeyOverwritten, now_s)
        self._generation += 1
        snapshot = Snapshot(claim.key, self._generation, contents, now_s, now_s + lease_s)
        self._snapshots[claim.key] = snapshot
        insort(self._keys, claim.key)
        self._add_lease(snapshot)
        for notify in list(self._waiters.get(claim.key, {}).values()):
            notify()
        return snapshot

    def _add_lease(self, snapshot: Snapshot) -> None:
        """Note when it ends. Entries of snapshots that are gone before that are dropped when they are the majority."""
        heapq.heappush(self._leases, (snapshot.expires_s, snapshot.key, snapshot.generation))
        if len(self._leases) > 2 * len(self._snapshots) + 64:
            self._leases = [(item.expires_s, item.key, item.generation) for item in self._snapshots.values()]
            heapq.heapify(self._leases)

    def abandon(self, claim: Claim) -> None:
        """The transfer to this key failed: no trace is left of it."""
        self._end_claim(claim)

    def _end_claim(self, claim: Claim) -> None:
        if self._claims.get(claim.key) is not claim:
            raise Misuse("this claim has ended", key=claim.key)
        del self._claims[claim.key]

    # --- from a key -------------------------------------------------------------------------------------------------

    def find(self, key: str, generation: int, now_s: float) -> Snapshot:
        """The snapshot of a key, of this generation or (0) the newest.

        Raises KeyExpired, KeyDeleted, KeyOverwritten, SnapshotLost while a tombstone lasts, else KeyNotFound.
        """
        self.expire(now_s)
        snapshot = self._snapshots.get(key)
        if snapshot is not None and generation in (0, snapshot.generation):
            return replace(snapshot, reader_count=len(self._readers.get(snapshot.generation, ())))
        self._drop_tombstones(now_s)
        dead = generation or self._last_dead.get(key, 0)
        tombstone = self._tombstones.get((key, dead))
        if tombstone is not None:
            raise tombstone.reason(_GONE[tombstone.reason], key=key, generation=dead)
        raise KeyNotFound("no snapshot has this key", key=key, generation=generation or None)

    def pin(self, key: str, generation: int, now_s: float, *, consume: bool = False) -> Pin:
        """Begin to read. `consume`: the reader deletes it afterwards; one such at a time, others meet KeyBusy.

        Raises as `find`.
        """
        snapshot = self.find(key, generation, now_s)
        if consume and snapshot.generation in self._consumers:
            raise KeyBusy("another reader is about to consume this snapshot", key=key, generation=snapshot.generation)
        pin = Pin(snapshot, consume)
        self._readers.setdefault(snapshot.generation, set()).add(pin)
        if consume:
            self._consumers[snapshot.generation] = pin
        return pin

    def limit(self, pin: Pin, until_s: float) -> None:
        """If this reader is there still at this moment, the snapshot is taken off its key then; the reader keeps it.
        Moments never come before those of calls before."""
        self._limits[pin] = until_s

    def unpin(self, pin: Pin) -> None:
        """The reader is done."""
        self._limits.pop(pin, None)
        generation = pin.snapshot.generation
        readers = self._readers.get(generation, set())
        if pin not in readers:
            raise Misuse("this pin has ended", key=pin.snapshot.key)
        readers.remove(pin)
        if pin.consume:
            del self._consumers[generation]
        if not readers:
            del self._readers[generation]
            held = self._snapshots.get(pin.snapshot.key)
            if held is None or held.generation != generation:
                self._free(pin.snapshot.contents.memory)

    def consume(self, pin: Pin, now_s: float) -> None:
        """The reader has it: delete it, unless something else has taken it off its key already."""
        snapshot = self._snapshots.get(pin.snapshot.key)
        if snapshot is not None and snapshot.generation == pin.snapshot.generation:
            self._remove(snapshot.key, KeyDeleted, now_s)

    def renew(self, key: str, generation: int, *, lease_s: float, now_s: float) -> Snapshot:
        """Let the lease end `lease_s` from now; never sooner than it would have. Raises as `find`."""
        snapshot = self.find(key, generation, now_s)
        renewed = replace(snapshot, expires_s=max(snapshot.expires_s, now_s + lease_s))
        self._snapshots[key] = renewed
        return renewed

    def delete(self, key: str, generation: int, now_s: float) -> Snapshot:
        """Take the snapshot off its key. Raises as `find`."""
        snapshot = self.find(key, generation, now_s)
        self._remove(key, KeyDeleted, now_s)
        return snapshot

    def scan(self, prefix: str, *, after: str, limit: int, now_s: float) -> list[Snapshot]:
        """At most `limit` snapshots whose keys begin with `prefix` and come after `after`, in key order."""
        self.expire(now_s)
        position = bisect_left(self._keys, max(prefix, after))
        found: list[Snapshot] = []
        while position < len(self._keys) and len(found) < limit:
            key = self._keys[position]
            if not key.startswith(prefix):
                break
            if key != after:
                found.append(self.find(key, 0, now_s))
            position += 1
        return found

    def watch(self, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        """Have `notify` called at every commit to this key, until the function that this returns is called."""
        token = object()
        self._waiters.setdefault(key, {})[token] = notify

        def unwatch() -> None:
            waiters = self._waiters.get(key, {})
            waiters.pop(token, None)
            if not waiters:
                self._waiters.pop(key, None)

        return unwatch

    def pinned(self) -> Pinned:
        """What readers have now."""
        keyed_bytes = unkeyed_bytes = 0
        for generation, pins in self._readers.items():
            snapshot = next(iter(pins)).snapshot
            held = self._snapshots.get(snapshot.key)
            if held is not None and held.generation == generation:
                keyed_bytes += snapshot.contents.held_bytes
            else:
                unkeyed_bytes += snapshot.contents.held_bytes
        return Pinned(keyed_bytes, unkeyed_bytes)

    # --- time and loss ------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> list[Snapshot]:
        """Take off their keys all snapshots whose lease ran out, or whose reader stays too long; which they are."""
        expired = []
        while self._limits and self._first_limit_s() <= now_s:
            pin, _ = self._limits.popitem(last=False)
            snapshot = self._snapshots.get(pin.snapshot.key)
            if snapshot is not None and snapshot.generation == pin.snapshot.generation:
                self._remove(snapshot.key, KeyExpired, now_s)
                expired.append(snapshot)
        while self._leases and self._leases[0][0] <= now_s:
            _, key, generation = heapq.heappop(self._leases)
            snapshot = self._snapshots.get(key)
            if snapshot is None or snapshot.generation != generation:
                continue
            if snapshot.expires_s > now_s:
                heapq.heappush(self._leases, (snapshot.expires_s, key, generation))
                continue
            self._remove(key, KeyExpired, now_s)
            expired.append(snapshot)
        return expired

    def next_expiry_s(self) -> float | None:
        """When `expire` may have something to do, or None."""
        first_lease_s = self._leases[0][0] if self._leases else None
        if not self._limits:
            return first_lease_s
        return self._first_limit_s() if first_lease_s is None else min(first_lease_s, self._first_limit_s())

    def _first_limit_s(self) -> float:
        return next(iter(self._limits.values()))

    def lose_all(self, now_s: float) -> int:
        """The memory of every snapshot is gone. How many had a key."""
        count = len(self._snapshots)
        for key in list(self._snapshots):
            self._remove(key, SnapshotLost, now_s)
        self._leases.clear()
        return count

    def _remove(self, key: str, reason: type[HurrayError], now_s: float) -> None:
        snapshot = self._snapshots.pop(key)
        del self._keys[bisect_left(self._keys, key)]
        self._last_dead[key] = snapshot.generation
        self._drop_tombstones(now_s)
        self._on_removed(snapshot, reason)
        forgotten = self._tombstones.add(self._tenant_of(key), (key, snapshot.generation), _Tombstone(reason, now_s))
        if forgotten is not None:
            self._forget_dead(*forgotten)
        if snapshot.generation not in self._readers:
            self._free(snapshot.contents.memory)

    def _drop_tombstones(self, now_s: float) -> None:
        for name in self._tombstones.drop_oldest(lambda item: item.died_s + self._tombstone_s <= now_s):
            self._forget_dead(*name)

    def _forget_dead(self, key: str, generation: int) -> None:
        if self._last_dead.get(key) == generation:
            del self._last_dead[key]

    def _until_next_expiry(self, now_s: float) -> float | None:
        at = self.next_expiry_s()
        return None if at is None else max(0.0, at - now_s)
