from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import hurray_client as ht
from sdk.ports import WIDE_PORTS
from support.daemon import RunningDaemon, eventually, running_daemon

# Before the test modules are imported: some have settings of their own, made from these.
for _name in [name for name in os.environ if name.startswith("HURRAY_")]:
    del os.environ[_name]
os.environ.update(WIDE_PORTS)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only one that clients of a test use: UCX, or what the test is parametrized with (indirectly)."""
    kind: str = getattr(request, "param", "ucx")
    if kind == "ucx":
        pytest.importorskip("ucxx")
    monkeypatch.setenv("HURRAY_TRANSPORTS", kind)
    monkeypatch.setenv("HURRAY_SHM__PATH", daemon.shm_path)
    return kind


@pytest.fixture(scope="package")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for all tests that leave it as they found it."""
    with running_daemon(arena_bytes=128 << 20) as daemon:
        yield daemon
        assert not daemon.logged("internal error")


@pytest.fixture(scope="package")
def shared_clients() -> Iterator[dict[str, ht.Client]]:
    """One for each transport that was asked for."""
    clients: dict[str, ht.Client] = {}
    yield clients
    for client in clients.values():
        client.close()


@pytest.fixture
def client(daemon: RunningDaemon, shared_clients: dict[str, ht.Client], transport: str) -> Iterator[ht.Client]:
    """A client of the shared daemon; whatever a test leaves there is deleted, and its arena must be whole then."""
    if transport not in shared_clients:
        shared_clients[transport] = ht.connect(daemon.address)
    shared_client = shared_clients[transport]
    yield shared_client
    for info in shared_client.list():
        shared_client.delete(info.key)
    # The memory comes back a little after the deletion.
    eventually(lambda: shared_client.node().arena.free_bytes == shared_client.node().arena.total_bytes, 10, "the arena")
