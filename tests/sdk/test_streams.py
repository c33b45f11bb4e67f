"""What the client keeps of the control plane between transfers, and what it never does at the price of one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import hurray_client as ht
from sdk.snapshots import make_snapshot
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
