from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import hurray_client as ht
from sdk.ports import WIDE_PORTS
from support.daemon import RunningDaemon, running_daemon


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> None:
    for name in [name for name in os.environ if name.startswith("HURRAY_")]:
        del os.environ[name]
    os.environ.update(WIDE_PORTS)


@pytest.fixture(scope="session")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for all tests that leave it as they found it."""
    with running_daemon(arena_bytes=128 << 20) as daemon:
        yield daemon
        assert not daemon.logged("internal error")


@pytest.fixture(scope="session")
def shared_client(daemon: RunningDaemon) -> Iterator[ht.Client]:
    with ht.connect(daemon.address) as client:
        yield client


@pytest.fixture
def client(shared_client: ht.Client) -> Iterator[ht.Client]:
    """A client of the shared daemon; whatever a test leaves there is deleted, and its arena must be whole then."""
    yield shared_client
    for info in shared_client.list():
        shared_client.delete(info.key)
    arena = shared_client.node().arena
    assert (arena.held_bytes, arena.receiving_bytes) == (0, 0)
