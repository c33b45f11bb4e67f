"""One daemon for all tests of a module that only talk to it, and a raw peer of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.daemon import RunningDaemon, running_daemon
from support.raw import RawClient


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    pytest.importorskip("ucxx")
    with running_daemon() as running:
        yield running


@pytest.fixture(scope="module")
def peer(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.address) as client:
        yield client
