"""What the client keeps of the control plane between transfers, and what it never does at the price of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import hurray_client as ht
from hurray_client import transfer
from hurray_client.call import Alarms
from hurray_client.streams import Streams
from hurray_wire.dataplane import DataPlane
from hurray_wire.image import plan_image
from hurray_wire.limits import PAGE_BYTES, Limits
from hurray_wire.prepare import prepare
from hurray_wire.session_events import Event, ReceiptReceived
from hurray_wire.source_payloads import SnapshotSource, StagedSource
from sdk.snapshots import make_caches, make_snapshot
from support.daemon import RunningDaemon, eventually


def threads() -> int:
    return sum(thread.name.startswith("hurray-stream") for thread in threading.enumerate())


def test_transfers_in_turn_share_a_stream_of_each_kind(daemon: RunningDaemon) -> None:
    before = threads()
    with ht.connect(daemon.address) as client:
        for number in range(4):
            client.put(f"turn/{number}", make_snapshot())
            client.get(f"turn/{number}", consume=True).close()
        assert threads() == before + 2
    assert threads() == before


def test_transfers_at_once_have_a_stream_each(daemon: RunningDaemon) -> None:
    before = threads()
    with ht.connect(daemon.address) as client, ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(client.get, f"at-once/{number}", wait_s=20) for number in range(4)]
        eventually(lambda: threads() == before + 4, 10, "all wait")
        for number in range(4):
            client.put(f"at-once/{number}", make_snapshot())
        for number, wait in enumerate(waits):
            wait.result(20).close()
            client.delete(f"at-once/{number}")
    assert threads() == before


def test_a_client_closed_right_after_a_put_takes_nothing_back(daemon: RunningDaemon, client: ht.Client) -> None:
    for number in range(10):
        with ht.connect(daemon.address) as other:
            receipt = other.put(f"closed/{number}", make_snapshot())
        assert client.stat(f"closed/{number}").info.generation == receipt.generation


def test_a_transfer_that_failed_leaves_no_stream_behind(daemon: RunningDaemon) -> None:
    before = threads()
    with ht.connect(daemon.address) as client:
        client.put("left", make_snapshot())
        with pytest.raises(ht.KeyExists):
            client.put("left", make_snapshot())
        with pytest.raises(ht.KeyNotFound):
            client.get("never")
        eventually(lambda: threads() == before, 10, "both have ended")
        client.put("left", make_snapshot(), overwrite=True)
        assert threads() == before + 1
        client.delete("left")


@pytest.mark.parametrize("small", [True, False])
def test_only_a_put_whose_pages_were_copied_returns_before_its_machine_has_ended(
    client: ht.Client, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Callable[[], None]] = []
    post = DataPlane.post

    def hold_receipts(self: DataPlane, number: int, event: Event, *, soon: bool = True) -> None:
        if isinstance(event, ReceiptReceived):
            held.append(lambda: post(self, number, event))
        else:
            post(self, number, event, soon=soon)

    if not small:
        monkeypatch.setattr(transfer, "EAGER_BYTES", 0)
    monkeypatch.setattr(DataPlane, "post", hold_receipts)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(client.put, f"early/{small}", make_snapshot(), timeout_s=20)
        if small:
            putting.result(20)
        eventually(lambda: held, 10)
        assert putting.done() == small
        held[0]()
        putting.result(20)


def test_a_staged_source_is_done_with_the_pages_it_was_made_of() -> None:
    caches = make_caches(layers=1)
    prepared = prepare(make_snapshot(caches, [list(range(8))], [32]))
    plan = plan_image([tensor.descriptor for tensor in prepared.tensors], PAGE_BYTES, Limits())
    staged = StagedSource(SnapshotSource(prepared, plan))
    before = [chunk.tobytes() for chunk in staged.chunks]
    for pool in caches.values():
        pool[...] = 0
    assert [chunk.tobytes() for chunk in staged.chunks] == before
    assert len(plan.chunks) > 1
    for chunk in plan.chunks:
        assert not staged.all_staged
        staged.stage(chunk, lambda: np.empty(0, np.uint8))
    assert staged.all_staged


class Ear:
    """Of gRPC what a stream needs: a stub whose call takes all that is told, and answers nothing."""

    def __init__(self) -> None:
        self.stub, self.told = self, list[object]()

    @contextmanager
    def use(self) -> Iterator[Ear]:
        yield self

    def Put(self, requests: Iterator[object]) -> Iterator[object]:
        self.told.extend(requests)
        return iter(())


class Nobody:
    def heard(self, response: object) -> None:
        raise AssertionError(response)

    def lost(self, failure: Exception | None) -> None:
        assert failure is None


def test_a_transfer_that_has_left_its_stream_tells_the_next_one_nothing() -> None:
    """The machine of a small put may end after its receipt: what it says then is nobody's business."""
    ear, first, second = Ear(), Nobody(), Nobody()
    stream = Streams(ear, Alarms()).take("Put", first)  # type: ignore[arg-type]
    stream.tell(first, "offer")
    stream.leave()
    stream.tell(first, "stop, nobody's")
    assert stream.take(second)
    stream.tell(first, "stop, of the first")
    stream.tell(second, "another offer")
    stream.finish()
    stream.thread.join(10)
    assert ear.told == ["offer", "another offer"]
