"""The data plane over real UCX: the outcomes that matter most, between two workers of one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.images import make_image
from dataplane.pair import WAIT_S, Pair
from hurray_wire import session as s
from hurray_wire.errors import Cancelled, HurrayError, InvalidContents, OutcomeUnknown, PeerUnavailable
from hurray_wire.memory import aligned_empty, is_page_aligned
from hurray_wire.source_payloads import ImageSource
from hurray_wire.target_payloads import ImageTarget, OwnMemory
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import UcxConfig

pytestmark = pytest.mark.ucx


@pytest.fixture
def pair() -> Iterator[Pair]:
    pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    made = Pair(lambda: UcxTransport(UcxConfig()), lambda: UcxTransport(UcxConfig()), kind="ucx", drain_s=0.5)
    yield made
    made.close()
    assert made.source.transfer_count == made.target.transfer_count == 0


def transfer_once(pair: Pair, seed: int, **shape: int) -> tuple[HurrayError | None, HurrayError | None]:
    image = make_image(seed, **shape)
    target = ImageTarget(image.plan, image.token_counts, OwnMemory(aligned_empty))
    transfer = pair.begin(ImageSource(image.plan, image.data, lambda: None), target)
    source, end = transfer.result()
    if end.error is None:
        assert np.array_equal(target.image, image.data)
        assert all(is_page_aligned(part) for tensor in range(4) for part in target.buffers(tensor))
    return source.error, end.error


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20, 4 << 20])
def test_images_arrive_whole(pair: Pair, chunk_bytes: int) -> None:
    for seed in range(5):
        assert transfer_once(pair, seed, chunk_bytes=chunk_bytes) == (None, None)


def test_a_refused_index_leaves_the_connection_usable(pair: Pair) -> None:
    image = make_image(chunk_bytes=8192)
    image.place(0, 2).view(np.uint32)[1] = 1 << 31
    target = ImageTarget(image.plan, image.token_counts, OwnMemory(aligned_empty))
    source, end = pair.begin(ImageSource(image.plan, image.data, lambda: None), target).result()
    assert isinstance(source.error, InvalidContents)
    assert isinstance(end.error, InvalidContents)
    assert pair.source.peer_count == pair.target.peer_count == 1, "drained in order, not cut"
    assert transfer_once(pair, 1) == (None, None)


def test_cancelling_in_the_middle_drains_in_order(pair: Pair) -> None:
    image = make_image(pages=4000, chunk_bytes=65536)
    target = ImageTarget(image.plan, image.token_counts, OwnMemory(aligned_empty))
    transfer = pair.begin(
        ImageSource(image.plan, image.data, lambda: None),
        target,
        commit=lambda _: s.CommitRefused(Cancelled("too late to matter")),
    )
    while transfer.told.get(timeout=WAIT_S)[0] != "source":
        pass
    pair.source.post(transfer.source_number, s.Failed(Cancelled("by the caller")))
    source, end = transfer.result()
    assert isinstance(source.error, Cancelled)
    assert isinstance(end.error, Cancelled)
    assert pair.source.peer_count == pair.target.peer_count == 1
    assert transfer_once(pair, 2) == (None, None)


def test_a_cut_stream_closes_and_a_new_connection_works(pair: Pair) -> None:
    image = make_image(pages=4000, chunk_bytes=65536)
    target = ImageTarget(image.plan, image.token_counts, OwnMemory(aligned_empty))
    transfer = pair.begin(
        ImageSource(image.plan, image.data, lambda: None),
        target,
        commit=lambda _: s.CommitRefused(Cancelled("the stream is gone")),
    )
    while transfer.told.get(timeout=WAIT_S)[0] != "source":
        pass
    pair.cut_stream(transfer)
    source, end = transfer.result()
    assert isinstance(source.error, PeerUnavailable | OutcomeUnknown), "the last chunk may have been on its way"
    assert isinstance(end.error, PeerUnavailable | Cancelled)
    pair.connect()
    assert transfer_once(pair, 3) == (None, None)
