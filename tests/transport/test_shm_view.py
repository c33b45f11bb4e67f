"""Views over shared memory: what is shown is seen, by mapping it, for as long as an array over it lives."""

import errno
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hurray_wire import memfd
from hurray_wire.errors import Cancelled, Misuse, PeerUnavailable, ProtocolViolation
from hurray_wire.testing.transport_suite import (
    Outcome,
    Pair,
    all_fired,
    drive,
    pattern,
    post_receive,
    post_send,
    settle,
)
from hurray_wire.transport._sockets import open_descriptors
from hurray_wire.transport.memory import MemoryFabric, MemoryTransport
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.view import View
from support.grains import owner_of

PAGE = 4096


@pytest.fixture
def pair(tmp_path):
    path = str(tmp_path / "data.sock")
    with (
        closing(ShmTransport(ShmConfig(path=path, listens=True))) as a,
        closing(ShmTransport(ShmConfig(path=path))) as b,
    ):
        pair = Pair(a, b)
        drive([a, b], lambda: pair.to_b.proven and pair.to_a.proven)
        yield pair


def show(endpoint, tag, shown):
    outcome = Outcome()
    endpoint.send_view(tag, shown, outcome)
    outcome.allowed = True
    return outcome


def look(endpoint, tag, nbytes):
    view, outcome = View(nbytes), Outcome()
    endpoint.receive_view(tag, view, outcome)
    outcome.allowed = True
    return view, outcome


def see(pair, owner):
    """Show what `owner` has from a to b; the view."""
    shown = show(pair.to_b, 7, owner.shown)
    view, seen = look(pair.to_a, 7, owner.shown.nbytes)
    drive([pair.a, pair.b], lambda: shown.fired and seen.fired)
    assert (shown.error, seen.error) == (None, None)
    return view.memory


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("grains", [1, 2, 61, 62, 63, 124, 125, 300])
def test_all_that_is_shown_is_seen(pair, grains, posted_first):
    data = pattern(grains * PAGE)
    with owner_of(data, PAGE) as owner:
        if posted_first:
            view, seen = look(pair.to_a, 7, data.nbytes)
            shown = show(pair.to_b, 7, owner.shown)
        else:
            shown = show(pair.to_b, 7, owner.shown)
            settle(pair.a, pair.b, quiet_rounds=2)
            view, seen = look(pair.to_a, 7, data.nbytes)
        drive([pair.a, pair.b], lambda: shown.fired and seen.fired)
        assert (shown.error, seen.error) == (None, None)
        assert (view.memory == data).all()
        assert len(owner.views) == grains


def test_a_view_ends_where_it_ends(pair):
    """Not where its last grain does: the rest of that is not mapped."""
    data = pattern(5 * PAGE)
    with owner_of(data, 4 * PAGE) as owner:
        memory = see(pair, owner)
        assert (memory == data).all()
        ends = [line.split()[0].split("-") for line in owner.views]
        assert sorted(int(end, 16) - int(start, 16) for start, end in ends) == [PAGE, 4 * PAGE]


def test_a_view_can_only_be_read(pair):
    with owner_of(pattern(3 * PAGE), PAGE) as owner:
        memory = see(pair, owner)
        with pytest.raises(ValueError, match="read-only"):
            memory[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            memory.flags.writeable = True
        address = memory.ctypes.data
        assert memfd._LIBC.mprotect(memfd.ctypes.c_void_p(address), PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == -1


def test_its_descriptors_are_not_kept(pair):
    with owner_of(pattern(200 * PAGE), PAGE) as owner:
        before = len(open_descriptors())
        memory = see(pair, owner)
        assert len(open_descriptors()) == before  # the pin came, the end that was given away went
        assert memory is not None


def test_the_pin_is_held_by_the_last_array_over_the_view(pair):
    data = pattern(100 * PAGE)
    with owner_of(data, PAGE) as owner:
        part = see(pair, owner)[70 * PAGE :][:100]
        gc.collect()
        assert owner.pinned
        assert (part == data[70 * PAGE :][:100]).all()
        del part
        assert not owner.pinned
        assert not owner.views


def test_a_view_outlives_its_connection(pair):
    data = pattern(3 * PAGE)
    with owner_of(data, PAGE) as owner:
        memory = see(pair, owner)
        pair.to_a.close()
        pair.to_b.abort()
        settle(pair.a, pair.b)
        assert owner.pinned
        assert (memory == data).all()


def test_what_nobody_looks_at_is_not_shown(pair):
    with owner_of(pattern(3 * PAGE), PAGE) as owner:
        shown, dropped = show(pair.to_b, 7, owner.shown), Outcome()
        pair.to_a.discard(7, dropped)
        dropped.allowed = True
        drive([pair.a, pair.b], lambda: shown.fired and dropped.fired)
        assert (shown.error, dropped.error) == (None, None)
        assert not owner.pinned
        assert not owner.views


def test_an_unknown_view_is_drained(pair):
    with owner_of(pattern(3 * PAGE), PAGE) as owner:
        shown = show(pair.to_b, 7, owner.shown)
        settle(pair.a, pair.b, quiet_rounds=2)
        assert not shown.fired
        assert pair.b.drain_unknown(lambda tag: False) == 1
        drive([pair.a, pair.b], lambda: shown.fired)
        assert shown.error is None
        assert not owner.pinned


def test_a_view_that_is_not_sent_can_be_forgotten(pair):
    view, seen = look(pair.to_a, 7, PAGE)
    pair.to_a.forget(7)
    drive([pair.b], lambda: seen.fired)
    assert isinstance(seen.error, Cancelled)
    assert view.memory is None


@pytest.mark.parametrize("agreed", [2 * PAGE, 4 * PAGE])
def test_a_view_of_another_size_is_refused(pair, agreed):
    with owner_of(pattern(3 * PAGE), PAGE) as owner:
        shown = show(pair.to_b, 7, owner.shown)
        view, seen = look(pair.to_a, 7, agreed)
        drive([pair.a, pair.b], lambda: shown.fired and seen.fired)
        assert isinstance(seen.error, ProtocolViolation)
        assert view.memory is None
        assert not owner.pinned


@pytest.mark.parametrize("nbytes", [100, 3 * PAGE])
def test_a_message_is_no_view_and_a_view_no_message(pair, nbytes):
    buffer = np.zeros(nbytes, np.uint8)
    with owner_of(pattern(nbytes), PAGE) as owner:
        shown, received = show(pair.to_b, 7, owner.shown), post_receive(pair.to_a, 7, buffer)
        sent, (view, seen) = post_send(pair.to_b, 8, pattern(nbytes)), look(pair.to_a, 8, nbytes)
        drive([pair.a, pair.b], lambda: all_fired([shown, received, sent, seen]))
    assert isinstance(received.error, ProtocolViolation)
    assert isinstance(seen.error, ProtocolViolation)
    assert not buffer.any()
    assert view.memory is None


@pytest.mark.parametrize("when", ["announced", "under way"])
def test_a_lost_peer_ends_a_view(pair, when):
    with owner_of(pattern(200 * PAGE), PAGE) as owner:
        shown = show(pair.to_b, 7, owner.shown)
        if when == "under way":
            view, seen = look(pair.to_a, 7, owner.shown.nbytes)
            while not owner.views:
                pair.b.progress()
                pair.a.progress()
            assert not seen.fired
        pair.to_a.abort()
        drive([pair.a, pair.b], lambda: shown.fired)
        assert isinstance(shown.error, PeerUnavailable)
        assert not owner.pinned
        if when == "under way":
            drive([pair.b], lambda: seen.fired)
            assert view.memory is None
        assert not owner.views


def test_on_a_closed_connection_nothing_is_shown(pair):
    with owner_of(pattern(PAGE), PAGE) as owner:
        pair.to_b.close()
        shown = show(pair.to_b, 7, owner.shown)
        drive([pair.a, pair.b], lambda: shown.fired)
        assert isinstance(shown.error, PeerUnavailable)
        assert not owner.pinned


def test_many_views_leave_nothing_behind(pair):
    before = len(open_descriptors())
    data = pattern(70 * PAGE)
    for _ in range(50):
        with owner_of(data, PAGE) as owner:
            assert (see(pair, owner) == data).all()
    assert len(open_descriptors()) == before
    assert not owner.views


def test_too_many_descriptors_on_their_way_end_the_connection(pair, monkeypatch):
    class Full:
        def __init__(self, real):
            self._real = real

        def sendmsg(self, parts, ancillary, flags):
            if ancillary:
                raise OSError(errno.ETOOMANYREFS, "too many references")
            return self._real.sendmsg(parts, ancillary, flags)

        def __getattr__(self, name):
            return getattr(self._real, name)

    monkeypatch.setattr(pair.to_b._link, "_socket", Full(pair.to_b._link._socket))
    with owner_of(pattern(PAGE), PAGE) as owner:
        shown, (_, seen) = show(pair.to_b, 7, owner.shown), look(pair.to_a, 7, PAGE)
        drive([pair.a, pair.b], lambda: shown.fired and seen.fired)
        assert "descriptors" in str(pair.lost_a.errors[0])
        assert isinstance(seen.error, PeerUnavailable)
        assert not owner.pinned


def test_other_transports_show_nothing():
    fabric = MemoryFabric()
    with closing(MemoryTransport(fabric)) as a, closing(MemoryTransport(fabric)) as b:
        pair = Pair(a, b)
        with owner_of(pattern(PAGE), PAGE) as owner, pytest.raises(Misuse):
            pair.to_b.send_view(7, owner.shown, Outcome())
        with pytest.raises(Misuse):
            pair.to_a.receive_view(7, View(PAGE), Outcome())


READER = """
import os, socket, sys
from hurray_wire.view import Mapping
data, descriptors, _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 100, 10)
mapping = Mapping(3 * 4096, 4096)
mapping.add(descriptors[:3])
memory = mapping.finish(descriptors[3])
for descriptor in descriptors:
    os.close(descriptor)
print(int(memory.sum()), flush=True)
sys.stdin.read()
"""


def test_a_killed_reader_lets_go_of_its_pin():
    data = pattern(3 * PAGE)
    here, there = socket.socketpair()
    with owner_of(data, PAGE) as owner, here, there:
        socket.send_fds(here, [b"x"], [*owner.grains, owner.given.fileno()])
        owner.given.close()
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        with reader:
            assert int(reader.stdout.readline()) == int(data.sum())
            assert owner.pinned
            os.kill(reader.pid, signal.SIGKILL)
        assert not owner.pinned
