"""The data plane between two real threads over the in-process transport: outcomes, faults, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from dataplane.images import PAGE_SIZE, Image, make_image
from dataplane.pair import WAIT_S, Pair
from hurray_wire import session as s
from hurray_wire.checksum import NONE, XXH3_64
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import (
    ArenaFull,
    Cancelled,
    CapabilityMismatch,
    ChecksumMismatch,
    DataPlaneUnavailable,
    DeadlineExceeded,
    InvalidContents,
    OutcomeUnknown,
    PeerUnavailable,
)
from hurray_wire.memory import aligned_empty
from hurray_wire.orders import Output
from hurray_wire.source_payloads import ImageSource
from hurray_wire.target_payloads import ImageTarget
from hurray_wire.transport.memory import Faults, MemoryFabric, MemoryTransport


class Memory:
    """Image memory that remembers what became of it, and what it held while that was undecided."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.error = error

    def reserve(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self.calls.append("reserve")
        if self.error is not None:
            raise self.error
        memory = aligned_empty(nbytes)
        memory[:] = 0xEE  # what an arena that was used before may hold
        return memory

    def settling(self) -> None:
        self.calls.append("settling")

    def release(self, *, keep: bool) -> None:
        self.calls.append("keep" if keep else "free")


class World:
    """A pair over one fabric, with its faults and shortcuts to send an image."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.target_faults = Faults()
        self.pair = Pair(
            lambda: MemoryTransport(self.fabric),
            lambda: MemoryTransport(self.fabric, faults=self.target_faults),
            stall_s=0.5,
            drain_s=0.2,
        )
        self.released = 0

    def send(self, image: Image, memory: Memory | None = None, **options: Any) -> tuple[Any, ImageTarget, Memory]:
        memory = memory or Memory()

        def on_release() -> None:
            self.released += 1

        target = ImageTarget(image.plan, image.token_counts, memory)
        return self.pair.begin(ImageSource(image.plan, image.data, on_release), target, **options), target, memory

    def must_work(self) -> None:
        """The next good transfer works: what every failure must leave behind."""
        if self.pair.source.peer_count == 0 or self.pair.target.peer_count == 0:
            self.pair.connect()
        image = make_image(99)
        transfer, target, _ = self.send(image)
        assert [end.error for end in transfer.result()] == [None, None]
        assert np.array_equal(target.image, image.data)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.pair.close()
    assert world.pair.source.transfer_count == world.pair.target.transfer_count == 0


@pytest.mark.parametrize("window", [1, 4, 64])
@pytest.mark.parametrize("chunk_bytes", [8192, 65536, 4 << 20])
def test_the_image_arrives_whole(world: World, window: int, chunk_bytes: int) -> None:
    image = make_image(chunk_bytes=chunk_bytes)
    transfer, target, memory = world.send(image, window=window)
    source, end = transfer.result()
    assert (source.error, end.error, source.receipt, end.receipt) == (None, None, "receipt", "receipt")
    assert np.array_equal(target.image, image.data)
    assert memory.calls == ["reserve", "keep"]
    assert world.released == 1
    prepared = transfer.prepared.result()
    assert prepared.verified_chunk_count == len(image.plan.chunks)
    assert prepared.summary.dead_slot_count == image.dead_slots
    assert prepared.summary.dirty_dead_slot_count == 0
    assert prepared.summary.distinct_page_count == 40
    assert prepared.summary.logical_page_count == 60
    assert [stage for stage, _ in end.stages] == [
        "reserve",
        "index",
        "check_index",
        "pages",
        "check_contents",
        "commit",
    ]


def test_dirty_dead_slots_are_cleared_and_counted(world: World) -> None:
    image = make_image()
    clean = image.data.copy()
    for tensor in (0, 3):
        image.place(tensor, 0).reshape(40 * PAGE_SIZE, -1)[-2:] = 7
    transfer, target, _ = world.send(image)
    transfer.result()
    assert transfer.prepared.result().summary.dirty_dead_slot_count == 4
    assert np.array_equal(target.image, clean)


def test_without_checksums_nothing_is_told_or_compared(world: World) -> None:
    image = make_image()
    transfer, target, _ = world.send(image, hash_=NONE)
    transfer.result()
    assert np.array_equal(target.image, image.data)
    assert transfer.prepared.result().verified_chunk_count == 0


def test_many_at_once(world: World) -> None:
    images = [make_image(seed) for seed in range(12)]
    running = [world.send(image) for image in images]
    for (transfer, target, _), image in zip(running, images, strict=True):
        assert [end.error for end in transfer.result()] == [None, None]
        assert np.array_equal(target.image, image.data)


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_a_flipped_bit_is_data_loss_and_commits_nothing(world: World, chunk: int) -> None:
    image = make_image()
    world.target_faults.corrupt(skip=chunk, count=1, offset_bytes=11, mask=1)
    transfer, _, memory = world.send(image)
    source, end = transfer.result()
    assert isinstance(source.error, ChecksumMismatch)
    assert isinstance(end.error, ChecksumMismatch)
    assert not transfer.prepared.done()
    assert memory.calls[-1] == "free"
    world.must_work()


def test_an_invalid_index_is_refused_before_any_page(world: World) -> None:
    image = make_image()
    image.place(0, 1).view(np.uint32)[5] = 40
    transfer, _, memory = world.send(image)
    source, end = transfer.result()
    assert isinstance(end.error, InvalidContents)
    assert end.error.rule == "V4"
    assert isinstance(source.error, InvalidContents)
    assert memory.calls == ["reserve", "settling", "free"]
    world.must_work()


def test_pages_that_no_sequence_names_are_refused(world: World) -> None:
    image = make_image()
    image.place(0, 1).view(np.uint32)[39] = 38
    transfer, _, memory = world.send(image)
    end = transfer.result()[1]
    assert isinstance(end.error, InvalidContents)
    assert "not compact" in end.error.message
    assert memory.calls[-1] == "free"
    world.must_work()


def test_a_full_arena_refuses(world: World) -> None:
    transfer, _, memory = world.send(make_image(), Memory(ArenaFull("full", retry_after_s=1.0)))
    source, end = transfer.result()
    assert isinstance(source.error, ArenaFull)
    assert isinstance(end.error, ArenaFull)
    assert memory.calls == ["reserve", "free"]
    world.must_work()


def test_a_refused_commit_leaves_no_trace(world: World) -> None:
    transfer, _, memory = world.send(make_image(), commit=lambda _: s.CommitRefused(Cancelled("the stream is gone")))
    source, end = transfer.result()
    assert isinstance(source.error, Cancelled)
    assert isinstance(end.error, Cancelled)
    assert memory.calls[-1] == "free"
    world.must_work()


def test_a_lost_receipt_is_an_unknown_outcome(world: World) -> None:
    def deliver(_who: str, output: Output, go: Callable[[], None]) -> None:
        if not isinstance(output, s.TellReceipt):
            go()

    transfer, target, _ = world.send(make_image(), deliver=deliver)
    assert transfer.target_ended.result(WAIT_S).error is None
    world.pair.source.post(transfer.source_number, s.StreamLost())
    source = transfer.source_ended.result(WAIT_S)
    assert isinstance(source.error, OutcomeUnknown)
    assert target.image is not None
    world.must_work()


def test_a_cut_stream_in_the_middle_frees_everything(world: World) -> None:
    world.target_faults.hold(skip=3, count=None)
    transfer, _, memory = world.send(make_image())
    _wait_for(lambda: world.target_faults.held_count > 0)
    world.pair.cut_stream(transfer)
    source, end = transfer.result()
    assert isinstance(source.error, PeerUnavailable)
    assert isinstance(end.error, PeerUnavailable)
    assert memory.calls == ["reserve", "settling", "free"]
    world.target_faults.release()
    world.must_work()


def test_a_silent_peer_is_a_deadline_with_its_stage(world: World) -> None:
    silent = lambda _who, _output, _go: None  # noqa: E731
    transfer, _, memory = world.send(make_image(), budget_s=0.3, deliver=silent)
    source, end = transfer.result()
    assert isinstance(source.error, DeadlineExceeded)
    assert source.error.stage == "offer"
    assert isinstance(end.error, DeadlineExceeded)
    assert end.error.stage == "index"
    assert memory.calls == ["reserve", "settling", "free"]
    world.must_work()


def test_sends_that_do_not_move_are_a_stall(world: World) -> None:
    world.target_faults.hold(count=None)
    transfer, _, memory = world.send(make_image())
    source, end = transfer.result()
    assert isinstance(source.error, PeerUnavailable)
    assert "no chunk completed" in source.error.message
    assert isinstance(end.error, PeerUnavailable)
    assert memory.calls[-1] == "free"
    world.target_faults.release()
    world.must_work()


def test_a_lost_connection_fails_both_and_is_reported(world: World) -> None:
    world.target_faults.cut(skip=4)
    transfer, _, memory = world.send(make_image())
    source, end = transfer.result()
    assert isinstance(source.error, PeerUnavailable)
    assert isinstance(end.error, PeerUnavailable)
    assert memory.calls == ["reserve", "settling", "free"]
    who = {world.pair.lost.get(timeout=WAIT_S)[0]}
    assert who <= {"source", "target"}
    world.must_work()


def test_cancelling_the_source_drains_both(world: World) -> None:
    world.target_faults.hold(skip=2, count=None)
    transfer, _, memory = world.send(make_image())
    _wait_for(lambda: world.target_faults.held_count > 0)
    world.pair.source.post(transfer.source_number, s.Failed(Cancelled("by the caller")))
    world.target_faults.release()
    source, end = transfer.result()
    assert isinstance(source.error, Cancelled)
    assert isinstance(end.error, Cancelled)
    assert memory.calls == ["reserve", "settling", "free"]
    assert world.pair.source.peer_count == world.pair.target.peer_count == 1, "an orderly end keeps the connection"
    world.must_work()


def test_a_disagreement_about_checksums_is_the_peers_fault(world: World) -> None:
    transfer, _, _ = world.send(make_image(), hash_=XXH3_64, target_hash=NONE)
    source, end = transfer.result()
    assert source.error is not None
    assert end.error is not None
    assert end.error.reason == "PROTOCOL_VIOLATION"
    world.must_work()


def test_tensors_are_sent_as_they_are_announced(world: World) -> None:
    image = make_image(layers=4, chunk_bytes=8192)
    transfer, target, _ = world.send(image, ready_tensors=0)
    pages_before = image.plan.chunks[image.plan.index_chunk_count].offset
    for ready in range(1, 9):
        assert not transfer.source_ended.done()
        world.pair.source.announce(transfer.source_number, ready)
    transfer.result()
    assert pages_before > 0
    assert np.array_equal(target.image, image.data)


def test_a_source_that_waits_for_announcements_is_no_stall(world: World) -> None:
    """The budget, longer than a stall may be, is what ends it; the announcement would have come too late."""
    transfer, _, memory = world.send(
        make_image(layers=4, chunk_bytes=8192), ready_tensors=1, budget_s=0.8, target_budget_s=WAIT_S
    )
    source, _ = transfer.result()
    assert isinstance(source.error, DeadlineExceeded)
    assert source.error.stage == "announce"
    world.pair.source.announce(transfer.source_number, 2)
    assert memory.calls[-1] == "free"
    world.must_work()


def test_stopping_ends_what_runs(world: World) -> None:
    world.target_faults.hold(count=None)
    transfer, _, memory = world.send(make_image())
    _wait_for(lambda: world.target_faults.held_count > 0)
    world.pair.source.stop()
    assert isinstance(transfer.source_ended.result(WAIT_S).error, Cancelled)
    world.pair.target.stop()
    transfer.target_ended.result(WAIT_S)
    assert memory.calls[-1] == "free"
    with pytest.raises(DataPlaneUnavailable):
        world.pair.source.open_peer(1, world.pair.target.parameters).result(WAIT_S)


def test_a_transfer_without_a_connection_says_so(world: World) -> None:
    world.pair.source.close_peer(world.pair.target.incarnation).result(WAIT_S)
    transfer, _, _ = world.send(make_image(), budget_s=1.0)
    source = transfer.source_ended.result(WAIT_S)
    assert isinstance(source.error, PeerUnavailable)
    assert source.error.stage == "connect"
    transfer.target_ended.result(WAIT_S)
    world.must_work()


def test_staging_and_state_do_not_grow(world: World) -> None:
    for _ in range(30):
        world.must_work()
    assert world.pair.source.transfer_count == 0
    assert len(world.pair.source._staging._spare) <= 4


def test_a_transport_that_cannot_start_is_named() -> None:
    def broken() -> MemoryTransport:
        raise CapabilityMismatch("no such device", field="net_device", offered="eth9", required="lo")

    plane = DataPlane({"memory": broken})
    with pytest.raises(CapabilityMismatch) as caught:
        plane.start()
    assert caught.value.details["transport"] == "memory"
    assert not plane.running
    plane.stop()


def _wait_for(condition: Callable[[], bool]) -> None:
    """Poll a condition that another thread brings about."""
    done: Future[None] = Future()
    tick = threading.Event()
    for _ in range(4000):
        if condition():
            done.set_result(None)
            break
        tick.wait(0.005)
    done.result(0)
