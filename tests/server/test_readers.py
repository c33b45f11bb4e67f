"""Who has snapshots mapped: the pins in the control process, and the mover's ends of their sockets."""

from __future__ import annotations

import os
import queue
import resource
import signal
import subprocess
import sys
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hurray_server.config import load_config
from hurray_server.node import Node
from hurray_server.pins import Pins
from hurray_server.readers import Readers
from hurray_server.store import Contents, Store

WAIT_S = 20.0


class Setup:
    """A store with one snapshot, deleted while a transfer shows it to a reader."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.store = Store(self.freed.append, max_snapshots=9)
        self.readers = Readers(self.store)
        counts = array("Q", [1]).tobytes()
        contents = Contents(5, 4096, (), counts, total_tokens=1, num_seqs=1, page_size=1, num_pages=1)
        claim = self.store.claim("k", overwrite=False, now_s=0.0)
        self.store.commit(claim, contents, lease_s=60.0, now_s=0.0)
        self.readers.begin(1, self.store.pin("k", 0, 0.0))
        assert self.store.find("k", 0, 0.0).reader_count == 1
        self.store.delete("k", 0, 0.0)


@pytest.mark.parametrize("first", ["transferred", "gone"])
def test_memory_is_held_until_both_transfer_and_reader_are_done(first: str) -> None:
    setup = Setup()
    steps = {"transferred": setup.readers.transferred, "gone": setup.readers.gone}
    steps.pop(first)(1)
    assert setup.freed == []
    assert len(setup.readers) == (first == "transferred")
    (last,) = steps.values()
    last(1)
    assert setup.freed == [5]
    assert len(setup.readers) == 0
    setup.readers.gone(1)  # what is not known is nobody's


def test_with_the_mover_all_readers_are_gone() -> None:
    setup = Setup()
    setup.readers.transferred(1)
    setup.readers.lose_all()
    assert setup.freed == [5]
    setup = Setup()
    setup.readers.lose_all()
    setup.readers.transferred(1)
    assert setup.freed == [5]


def test_a_view_is_for_readers_of_its_own_tenant_while_there_are_not_too_many() -> None:
    setup = Setup()
    node: Any = SimpleNamespace(readers=setup.readers, config=load_config(None, {"limits": {"max_readers": 2}}))
    contents = Contents(5, 4096, (), b"", total_tokens=1, num_seqs=1, page_size=1, num_pages=1, viewed_by="a")
    assert Node.may_view(node, "a", contents)
    assert not Node.may_view(node, "b", contents)
    assert not Node.may_view(node, "a", replace(contents, viewed_by=None))
    setup.readers.begin(2, setup.readers._pins[1])
    assert not Node.may_view(node, "a", contents)


def test_the_mover_knows_a_tenant_by_one_number() -> None:
    node: Any = SimpleNamespace(_tenants={})
    numbers = [Node.tenant_number(node, tenant) for tenant in ("a", "b", "a")]
    assert numbers[0] == numbers[2] != numbers[1]
    assert 0 not in numbers


def test_a_pin_lasts_until_its_end_is_closed_in_every_process() -> None:
    pins, gone = Pins(), queue.SimpleQueue[str]()
    one, other = pins.give(lambda: gone.put("one")), pins.give(lambda: gone.put("other"))
    with one:
        holder = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[one.fileno()]
        )
    with holder:
        other.close()
        assert gone.get(timeout=WAIT_S) == "other"
        assert gone.empty()
        assert len(pins) == 1
        os.kill(holder.pid, signal.SIGKILL)
    assert gone.get(timeout=WAIT_S) == "one"
    assert len(pins) == 0


def test_a_reader_that_writes_is_not_heard_and_fills_nothing() -> None:
    pins, gone = Pins(), queue.SimpleQueue[None]()
    with pins.give(lambda: gone.put(None)) as reader:
        with pytest.raises(BrokenPipeError):
            reader.send(b"x")
        assert gone.empty()
    gone.get(timeout=WAIT_S)


def test_without_descriptors_there_is_no_pin_and_nothing_is_left() -> None:
    pins = Pins()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="open files"):
            pins.give(lambda: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(pins) == 0
    assert len(os.listdir("/proc/self/fd")) == before
