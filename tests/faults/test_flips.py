"""A bit changes between the arrival of a chunk and its checksum: the data is lost, by name, and nothing comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import hurray_client as ht
from faults.flipping import flip
from faults.harness import clean, next_works, settings, snapshot
from hurray_wire.checksum import Hash
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import RunningDaemon, running_daemon
from support.identities import Identified, identified_daemon

pytestmark = pytest.mark.ucx

TESTS = Path(__file__).parents[1]
TO_NODE, TO_CLIENT = b"flip me at node!", b"flip me at home!"
PAGES = 64


VARIABLES = {"PYTHONPATH": f"{TESTS / 'faults/flips'}:{TESTS}", "HURRAYTEST_FLIP": TO_NODE.decode()}
CONFIG = "[transfers]\nchunk_bytes = 4096"

Connect = Callable[[str], ht.Client]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Its mover flips."""
    with running_daemon(CONFIG, env=VARIABLES) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identified]:
    """As does this one's, which asks for certificates."""
    with identified_daemon(tmp_path_factory.mktemp("tls"), CONFIG, env=VARIABLES) as node:
        yield node


@pytest.fixture
def connect(daemon: RunningDaemon, node: Identified) -> Connect:
    """By one kind of transport."""

    def connect(transport: str) -> ht.Client:
        identified = {"tls": node.tenant("a")} if transport == "tls" else {}
        target = node.daemon if transport == "tls" else daemon
        return ht.connect(target.address, config=settings(target, transport, chunk_bytes=4096, **identified))

    return connect


def marked(marker: bytes, page: int) -> ht.KVSnapshot:
    caches = make_caches(num_pages=PAGES, page_size=8)
    caches[1, "key"][page].reshape(-1).view(np.uint8)[: len(marker)] = np.frombuffer(marker, np.uint8)
    return make_snapshot(caches, [list(range(PAGES))], [8 * PAGES])


@pytest.mark.parametrize("page", [0, 40, PAGES - 1])
@pytest.mark.parametrize("transport", ["shm", "tcp", "tls", "ucx"])
def test_of_a_put(connect: Connect, transport: str, page: int) -> None:
    with connect(transport) as client:
        with pytest.raises(ht.ChecksumMismatch) as caught:
            client.put("flipped", marked(TO_NODE, page))
        assert (caught.value.code, caught.value.stage) == ("DATA_LOSS", "pages")
        with pytest.raises(ht.KeyNotFound):
            client.stat("flipped")
        next_works(client, "next", snapshot(1, PAGES))
        clean(client)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("transport", ["shm", "tcp", "tls", "ucx"])
def test_of_a_get(connect: Connect, monkeypatch: pytest.MonkeyPatch, transport: str, into: bool) -> None:
    with connect(transport) as client:
        value = marked(TO_CLIENT, 40)
        client.put("held", value)
        caches = {name: np.full_like(cache, 7) for name, cache in make_caches(num_pages=PAGES, page_size=8).items()}
        options = {"into": caches, "block_tables": [list(range(PAGES))]} if into else {}
        with monkeypatch.context() as patch:
            patch.setattr(Hash, "__call__", Hash.__call__)  # so that it is put back
            flip(TO_CLIENT)
            with pytest.raises(ht.ChecksumMismatch) as caught:
                client.get("held", **options)
        assert (caught.value.code, caught.value.stage) == ("DATA_LOSS", "pages")
        if into:
            assert caught.value.details["cleared_pages"] == f"0-{PAGES - 1}"
            assert not any(cache.any() for cache in caches.values())
        with client.get("held") as got:
            assert_same_tokens(value, got)
        clean(client)
