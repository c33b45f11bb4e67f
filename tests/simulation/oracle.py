"""What must be true at all times, kept beside the programs and compared with what they do.

The store is run in lockstep with a model of design section 8; arenas are added up extent by extent; every byte that is
written is held against who may write there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hurray_server.arena import Arena, ExtentState
from hurray_server.store import Claim, Contents, Pin, Snapshot, Store
from hurray_wire.errors import (
    HurrayError,
    KeyBusy,
    KeyDeleted,
    KeyExists,
    KeyExpired,
    KeyNotFound,
    KeyOverwritten,
    LimitExceeded,
    SnapshotLost,
)
from hurray_wire.transport.base import TAG_CHUNK_BITS

if TYPE_CHECKING:
    from simulation.world import World

TOMBSTONE_S = 3600.0
"""Design section 8."""


@dataclass
class Held:
    """One generation of one key."""

    key: str
    generation: int
    memory: int
    expires_s: float
    content: Any
    gone: type[HurrayError] | None = None
    gone_s: float = 0.0
    reader_count: int = 0
    freed: bool = False


class StoreModel:
    """What a store must answer."""

    def __init__(self) -> None:
        self.current: dict[str, Held] = {}
        self.all: dict[tuple[str, int], Held] = {}
        self.by_memory: dict[int, Held] = {}
        self.last_gone: dict[str, int] = {}
        self.claims: dict[str, Claim] = {}
        self.claimed_by: dict[str, str] = {}
        self.consumers: dict[int, Pin] = {}
        self.requests: dict[Pin, str] = {}
        """Which get each reader belongs to."""

    def expire(self, now_s: float) -> None:
        for held in list(self.current.values()):
            if held.expires_s <= now_s:
                self.remove(held, KeyExpired, now_s)

    def remove(self, held: Held, why: type[HurrayError], now_s: float) -> None:
        del self.current[held.key]
        held.gone, held.gone_s = why, now_s
        self.last_gone[held.key] = held.generation

    def find(self, key: str, generation: int, now_s: float) -> Held | type[HurrayError]:
        self.expire(now_s)
        held = self.current.get(key)
        if held is not None and generation in (0, held.generation):
            return held
        gone = self.all.get((key, generation or self.last_gone.get(key, 0)))
        if gone is not None and gone.gone is not None and now_s - gone.gone_s < TOMBSTONE_S:
            return gone.gone
        return KeyNotFound


class CheckedStore(Store):
    """A store that is compared with the model at every call."""

    def __init__(self, world: World, free: Callable[[int], None], **options: Any) -> None:
        super().__init__(self._on_free, **options)
        self._really_free = free
        self._world = world
        self.model = StoreModel()
        self.node: Any = None

    def _on_free(self, memory: int) -> None:
        held = self.model.by_memory.get(memory)
        if held is None or held.freed:
            self._world.fail(f"memory {memory} was freed without being held")
        elif held.reader_count:
            self._world.fail(f"the memory of {held.key} was freed under {held.reader_count} readers")
        elif held.key in self._snapshots and self._snapshots[held.key].generation == held.generation:
            self._world.fail(f"the memory of {held.key} was freed under its lease")
        else:
            held.freed = True
        self._really_free(memory)

    def _compare(self, what: str, call: Callable[[], Any], expected: Any) -> Any:
        """Run it; the class of error, or the generation, must be what the model says."""
        try:
            result = call()
        except HurrayError as error:
            if type(error) is not expected:
                self._world.fail(f"{what}: {error}, but the model says {_shown(expected)}")
            raise
        generation = getattr(result, "generation", None)
        if isinstance(expected, type) or (isinstance(expected, Held) and generation != expected.generation):
            self._world.fail(f"{what} gave generation {generation}, but the model says {_shown(expected)}")
        return result

    def claim(self, key: str, *, overwrite: bool, now_s: float) -> Claim:
        self.model.expire(now_s)
        held = self.model.current.get(key)
        expected: Any = None
        request_id = self._world.request_id()
        if key in self.model.claims:
            expected = KeyBusy
            if request_id and self.model.claimed_by.get(key) == request_id:
                self._world.fail(f"a repetition of a request to {key} was refused for the sake of the first")
        elif held is not None and not overwrite:
            expected = KeyExists
        elif held is None and len(self.model.current) + len(self.model.claims) >= self._max_snapshots:
            expected = LimitExceeded
        claim: Claim = self._compare(
            f"claim of {key}", lambda: super(CheckedStore, self).claim(key, overwrite=overwrite, now_s=now_s), expected
        )
        self.model.claims[key] = claim
        self.model.claimed_by[key] = request_id
        return claim

    def abandon(self, claim: Claim) -> None:
        self.model.claims.pop(claim.key, None)
        super().abandon(claim)

    def commit(self, claim: Claim, contents: Contents, *, lease_s: float, now_s: float) -> Snapshot:
        model = self.model
        model.expire(now_s)
        if model.claims.pop(claim.key, None) is not claim:
            self._world.fail(f"commit to {claim.key} without a claim")
        before = model.current.get(claim.key)
        if before is not None:
            if not claim.overwrite:
                self._world.fail(f"{claim.key} was overwritten unasked")
            model.remove(before, KeyOverwritten, now_s)
        content = self._world.check_commit(self.node, claim.key, contents)
        snapshot = super().commit(claim, contents, lease_s=lease_s, now_s=now_s)
        held = Held(claim.key, snapshot.generation, contents.memory, now_s + lease_s, content)
        if (held.key, held.generation) in model.all:
            self._world.fail(f"generation {held.generation} of {held.key} was given twice")
        model.current[held.key] = model.all[held.key, held.generation] = model.by_memory[held.memory] = held
        self._world.note_commit(self.node, held)
        return snapshot

    def find(self, key: str, generation: int, now_s: float) -> Snapshot:
        expected = self.model.find(key, generation, now_s)
        snapshot: Snapshot = self._compare(
            f"find of {key}/{generation}", lambda: super(CheckedStore, self).find(key, generation, now_s), expected
        )
        if isinstance(expected, Held) and snapshot.reader_count != expected.reader_count:
            self._world.fail(f"{key} has {expected.reader_count} readers, the store says {snapshot.reader_count}")
        return snapshot

    def pin(self, key: str, generation: int, now_s: float, *, consume: bool = False) -> Pin:
        expected: Any = self.model.find(key, generation, now_s)
        if isinstance(expected, Held) and consume and expected.generation in self.model.consumers:
            expected = KeyBusy
        pin: Pin = self._compare(
            f"pin of {key}/{generation}",
            lambda: super(CheckedStore, self).pin(key, generation, now_s, consume=consume),
            expected if isinstance(expected, type) else None,
        )
        held = self.model.all[key, pin.snapshot.generation]
        held.reader_count += 1
        self.model.requests[pin] = self._world.request_id()
        if consume:
            self.model.consumers[held.generation] = pin
        return pin

    def unpin(self, pin: Pin) -> None:
        held = self.model.all[pin.snapshot.key, pin.snapshot.generation]
        held.reader_count -= 1
        del self.model.requests[pin]
        if pin.consume:
            self.model.consumers.pop(held.generation, None)
        super().unpin(pin)

    def consume(self, pin: Pin, now_s: float) -> None:
        held = self.model.all[pin.snapshot.key, pin.snapshot.generation]
        self._world.check_consume(held, self.model.requests[pin])
        self.model.expire(now_s)
        if self.model.current.get(held.key) is held:
            self.model.remove(held, KeyDeleted, now_s)
        super().consume(pin, now_s)

    def renew(self, key: str, generation: int, *, lease_s: float, now_s: float) -> Snapshot:
        snapshot = super().renew(key, generation, lease_s=lease_s, now_s=now_s)
        held = self.model.all[key, snapshot.generation]
        held.expires_s = max(held.expires_s, now_s + lease_s)
        return snapshot

    def delete(self, key: str, generation: int, now_s: float) -> Snapshot:
        snapshot = super().delete(key, generation, now_s)
        self.model.remove(self.model.all[key, snapshot.generation], KeyDeleted, now_s)
        return snapshot

    def expire(self, now_s: float) -> list[Snapshot]:
        self.model.expire(now_s)
        return super().expire(now_s)

    def lose_all(self, now_s: float) -> int:
        self.model.expire(now_s)
        for held in list(self.model.current.values()):
            self.model.remove(held, SnapshotLost, now_s)
        return super().lose_all(now_s)

    def audit(self) -> None:
        """Between two calls: what has a lease can be found, and nothing else."""
        now_s = self._world.kernel.now_s
        mine = {held.key: held.generation for held in self.model.current.values() if held.expires_s > now_s}
        theirs = {item.key: item.generation for item in self._snapshots.values() if item.expires_s > now_s}
        if mine != theirs:
            self._world.fail(f"the store holds {theirs}, the model {mine}")


def _shown(expected: Any) -> str:
    if isinstance(expected, Held):
        return f"generation {expected.generation}"
    return expected.__name__ if isinstance(expected, type) else "that it works"


def audit_arena(arena: Arena) -> str | None:
    """What is wrong with the books of an arena, or None."""
    usage = arena.usage()
    parts = usage.free_bytes + usage.held_bytes + usage.receiving_bytes + usage.quarantined_bytes
    if parts != usage.total_bytes:
        return f"free + held + receiving + quarantined is {parts}, not {usage.total_bytes}: {usage}"
    pieces = [(item.offset, item.nbytes) for item in arena._extents.values()] + list(arena._free)
    end = 0
    for offset, nbytes in sorted(pieces):
        if offset != end or nbytes <= 0:
            return f"extents overlap or leave a gap at {end}: {sorted(pieces)}"
        end = offset + nbytes
    if end != arena.total_bytes:
        return f"extents end at {end}, not at {arena.total_bytes}"
    for state, counted in (
        (ExtentState.HELD, usage.held_bytes),
        (ExtentState.RECEIVING, usage.receiving_bytes),
        (ExtentState.QUARANTINED, usage.quarantined_bytes),
    ):
        real = sum(item.nbytes for item in arena._extents.values() if item.state is state)
        if real != counted:
            return f"{real} bytes are {state.value}, the arena says {counted}"
    return None


def offset_in(arena: Arena, buffer: Any) -> int | None:
    """Where in the arena a buffer begins, or None where it is no part of it."""
    offset = int(buffer.ctypes.data) - int(arena._memory.ctypes.data)
    return offset if 0 <= offset < arena.total_bytes else None


def check_write(arena: Arena, tag: int, buffer: Any) -> str | None:
    """What is wrong with bytes of this tag being written there, or None."""
    offset = offset_in(arena, buffer)
    if offset is None:
        return None
    extent = arena._extents.get(tag >> TAG_CHUNK_BITS)
    if extent is None:
        return f"transfer {tag >> TAG_CHUNK_BITS} writes to memory that is not its own any more"
    if not extent.offset <= offset <= offset + buffer.nbytes <= extent.offset + extent.nbytes:
        return f"transfer {tag >> TAG_CHUNK_BITS} writes outside its extent"
    if extent.state is ExtentState.HELD:
        return f"transfer {tag >> TAG_CHUNK_BITS} writes to a committed snapshot"
    return None


def check_read(arena: Arena, buffer: Any) -> str | None:
    """What is wrong with bytes being sent from there, or None."""
    offset = offset_in(arena, buffer)
    if offset is None:
        return None
    for extent in arena._extents.values():
        if extent.offset <= offset < extent.offset + extent.nbytes:
            if extent.state is not ExtentState.HELD or extent.reader_count == 0:
                return f"bytes are sent from memory that is {extent.state.value}, with {extent.reader_count} readers"
            return None
    return "bytes are sent from free memory"
