"""Ctrl-C in the middle of a call: it comes out as what it is, soon, and no memory is in use any more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hurray_client as ht
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.target_payloads import ImageTarget, ScatterTarget
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import RunningDaemon, eventually

PAGES = 64


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, and returns once it has been."""
    seen = threading.Event()

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        seen.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert seen.wait(5)

    before = signal.signal(signal.SIGINT, raise_it)
    yield interrupt
    signal.signal(signal.SIGINT, before)


def at_chunk(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, number: int, act: Callable[[], None]) -> None:
    """Have `act` called, in the data-plane thread, before the payload's method handles this chunk."""
    whole = getattr(kind, method)

    def patched(self: Any, chunk: Any, *arguments: Any) -> Any:
        if chunk.index == number:
            act()
        return whole(self, chunk, *arguments)

    monkeypatch.setattr(kind, method, patched)


def big() -> ht.KVSnapshot:
    return make_snapshot(make_caches(num_pages=PAGES, page_size=16), [list(range(PAGES))], [16 * PAGES])


@pytest.fixture
def small_chunks(daemon: RunningDaemon) -> Iterator[ht.Client]:
    with ht.connect(daemon.address, config=ht.ClientConfig(chunk_bytes=4096)) as client:
        yield client


def assert_over(client: ht.Client, began_s: float) -> None:
    assert time.monotonic() - began_s < 5
    plane = client._plane._running  # type: ignore[union-attr]
    assert plane is not None
    assert plane.transfer_count == 0
    eventually(lambda: client.node().arena.receiving_bytes == 0, 5, "the node holds nothing of it")
    eventually(lambda: client._node.streams.in_use == 0, 5, "no stream carries it")
    client.put("next", big())
    with client.get("next") as got:
        assert_same_tokens(big(), got)


@pytest.mark.parametrize("number", [0, 5, 15])
def test_an_interrupted_put_leaves_nothing(
    small_chunks: ht.Client,
    client: ht.Client,
    interrupt: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    at_chunk(monkeypatch, SnapshotSource, "stage", number, interrupt)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        small_chunks.put("interrupted", big())
    monkeypatch.undo()
    with pytest.raises(ht.KeyNotFound):
        client.stat("interrupted")
    assert_over(small_chunks, began_s)


@pytest.mark.parametrize("into", [False, True])
def test_an_interrupted_get_leaves_nothing(
    client: ht.Client, interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch, into: bool
) -> None:
    client.put("held", big())
    options: dict[str, Any] = {}
    caches = {name: np.full_like(cache, 7) for name, cache in make_caches(num_pages=PAGES, page_size=16).items()}
    if into:
        options = {"into": caches, "block_tables": [list(range(PAGES))]}
    at_chunk(monkeypatch, ScatterTarget if into else ImageTarget, "arrived", 1, interrupt)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        client.get("held", **options)
    left = {name: cache.copy() for name, cache in caches.items()}
    monkeypatch.undo()
    eventually(lambda: client.stat("held").info.reader_count == 0, 5, "the node has no reader of it")
    assert_over(client, began_s)
    assert all(np.array_equal(cache, left[name]) for name, cache in caches.items()), "nothing is written any more"


def test_a_get_that_waits_for_its_key_can_be_interrupted(client: ht.Client, interrupt: Callable[[], None]) -> None:
    client.put("warm", big())

    def once_it_waits() -> None:
        eventually(lambda: client._node.streams.in_use, 5)
        interrupt()

    began_s = time.monotonic()
    threading.Thread(target=once_it_waits, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        client.get("never", wait_s=60, timeout_s=60)
    assert_over(client, began_s)
