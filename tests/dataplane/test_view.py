"""Snapshots taken as views, between two real data planes over shared memory: what is copied, what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.images import PAGE_SIZE, Image, make_image
from dataplane.pair import WAIT_S, Pair, Transfer
from hurray_wire.checksum import NONE, XXH3_64, Hash
from hurray_wire.errors import ChecksumMismatch, InvalidContents, PeerUnavailable
from hurray_wire.memory import aligned_empty
from hurray_wire.session import ChecksumsReceived, TellChecksums
from hurray_wire.source_payloads import ImageSource
from hurray_wire.target_payloads import ViewTarget
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from support.daemon import eventually
from support.grains import Owner, owner_of

GRAIN = 1 << 18


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    path = str(tmp_path / "data.sock")
    pair = Pair(
        lambda: ShmTransport(ShmConfig(path=path, listens=True)),
        lambda: ShmTransport(ShmConfig(path=path)),
        kind="shm",
    )
    yield pair
    pair.close()


def begin(pair: Pair, owner: Owner, image: Image, released: list[None], **options: Any) -> tuple[Transfer, ViewTarget]:
    source = ImageSource(image.plan, image.data, lambda: released.append(None), owner.shown)
    target = ViewTarget(image.plan, image.token_counts, aligned_empty)
    return pair.begin(source, target, **options), target


@pytest.mark.parametrize("hash_", [XXH3_64, NONE])
@pytest.mark.parametrize("scaled", [False, True])
def test_pages_are_seen_where_they_are_and_the_rest_is_copied(pair: Pair, hash_: Hash, scaled: bool) -> None:
    image = make_image(scaled=scaled, view=True)
    released: list[None] = []
    with owner_of(image.data, GRAIN) as owner:
        transfer, target = begin(pair, owner, image, released, hash_=hash_)
        ends = transfer.result()
        assert [end.error for end in ends] == [None, None]
        assert len(released) == 1
        for tensor, descriptor in enumerate(image.plan.descriptors):
            for number in range(len(descriptor.buffers)):
                if number not in (1, 2):
                    assert (target.buffer(tensor, number) == image.place(tensor, number)).all()
        prepared = transfer.prepared.result()
        assert prepared.verified_chunk_count == (image.plan.index_chunk_count if hash_.verifies else 0)
        assert prepared.summary.mapped_bytes == image.plan.mapped_bytes > 50 * prepared.summary.wire_bytes
        assert (prepared.summary.dead_slot_count, prepared.summary.dirty_dead_slot_count) == (image.dead_slots, 0)

        for memory in owner.memory:  # the owner could: this shows what is whose
            memory[:] = 0xAA
        assert target.structure is not None
        assert target.structure.num_pages == 40
        assert (target.buffer(0, 1) == image.place(0, 1)).all()
        assert (target.buffer(0, 0) == 0xAA).all()
        assert not target.buffer(0, 0).flags.writeable
        if scaled:
            assert (target.buffer(1, 3) == image.place(1, 3)).all()

        assert owner.pinned
        target.release(keep=False)
        eventually(lambda: not owner.pinned, 10, "the pin is held by nobody")
    assert not owner.views


def wrong_index(image: Image) -> None:
    image.place(0, 1)[:4] = 0xFF


def wrong_scale(image: Image) -> None:
    image.place(2, 3).view(np.float32)[5] = 0.0


@pytest.mark.parametrize(("damage", "rule"), [(wrong_index, "V4"), (wrong_scale, "V11")])
def test_what_is_copied_is_validated(pair: Pair, damage: Callable[[Image], None], rule: str) -> None:
    image = make_image(scaled=True, view=True)
    damage(image)
    released: list[None] = []
    with owner_of(image.data, GRAIN) as owner:
        transfer, _ = begin(pair, owner, image, released)
        source, target = transfer.result()
        assert isinstance(target.error, InvalidContents)
        assert target.error.details["rule"] == rule
        assert source.error is not None
        assert len(released) == 1
        del transfer, source, target
        eventually(lambda: not owner.pinned, 10, "the pin is held by nobody")
        assert not owner.views


def test_dead_entries_of_parameters_are_cleared_in_the_copy(pair: Pair) -> None:
    image = make_image(scaled=True, view=True)
    image.place(0, 3).view(np.float32)[-1] = 7.0
    with owner_of(image.data, GRAIN) as owner:
        transfer, target = begin(pair, owner, image, [])
        assert [end.error for end in transfer.result()] == [None, None]
        assert target.buffer(0, 3).view(np.float32)[-1] == 1.0
        assert target.buffer(0, 3).size == 4 * 40 * PAGE_SIZE


def test_a_checksum_of_a_view_is_a_misunderstanding(pair: Pair) -> None:
    image = make_image(view=True)
    begun: Future[Transfer] = Future()
    with owner_of(image.data, GRAIN) as owner:

        def deliver(who: str, output: Any, go: Callable[[], None]) -> None:
            if isinstance(output, TellChecksums) and output.first + len(output.values) == len(image.plan.chunks):
                told = ChecksumsReceived(output.first, (*output.values[:-1], 5))
                pair.target.post(begun.result(WAIT_S).target_number, told)
            else:
                go()

        transfer, _ = begin(pair, owner, image, [], deliver=deliver)
        begun.set_result(transfer)
        assert isinstance(transfer.result()[1].error, ChecksumMismatch)


def test_a_connection_that_is_cut_takes_nothing_with_it(pair: Pair) -> None:
    """A view that has come stays; one that has not leaves no pin."""
    image = make_image(view=True)
    with owner_of(image.data, GRAIN) as owner:
        transfer, target = begin(pair, owner, image, [])
        transfer.result()
        pair.source.close_peer(pair.target.incarnation, abort=True).result(10)
        assert owner.pinned
        assert (target.buffer(3, 0) == image.place(3, 0)).all()
    pair.connect()
    with owner_of(image.data, GRAIN) as owner:
        pair.source.close_peer(pair.target.incarnation, abort=True).result(10)
        transfer, _ = begin(pair, owner, image, [])
        source, _ = transfer.source_ended.result(10), pair.cut_stream(transfer)
        assert isinstance(source.error, PeerUnavailable)
        assert isinstance(transfer.target_ended.result(10).error, PeerUnavailable)
        eventually(lambda: not owner.pinned, 10, "the pin is held by nobody")
