"""Snapshots from pools on a GPU through a real daemon: into its arena on the GPU, into the host's, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hurray_client as ht
from hurray_wire.destination import Destination
from hurray_wire.errors import CapabilityMismatch
from hurray_wire.snapshot import KVSnapshot
from support.daemon import UCX_PORTS, RunningDaemon, running_daemon

pytestmark = pytest.mark.gpu

PAGES, PAGE = 96, (16, 8, 128)
TABLES = [[5, 9, 3, 70], [5, 9], [], [95, 0, 17]]
COUNTS = [50, 32, 0, 33]
POISON = 0x9A9A  # no random word
ARENA_BYTES = 1 << 30
LARGE_PAGES = 2000
"""Pages of each of eight pools of 32 KiB pages: 500 MiB, in many chunks."""
PORTS = {"HURRAY_UCX__FIRST_PORT": str(UCX_PORTS[0]), "HURRAY_UCX__LAST_PORT": str(UCX_PORTS[1])}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (PORTS | {"HURRAY_UCX__TLS": "tcp,cuda"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[RunningDaemon]:
    with running_daemon(arena_bytes=ARENA_BYTES, env={"HURRAY_ARENA__DEVICE": "cuda:0"}, noise="") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def on_host() -> Iterator[RunningDaemon]:
    with running_daemon(arena_bytes=ARENA_BYTES, env={"HURRAY_UCX__TLS": "tcp,cuda"}, noise="") as daemon:
        yield daemon


def pools(place: Any, fill: int | None = None) -> dict[tuple[int | None, str], Any]:
    """Random words, or all the same, in the engine's own memory."""
    import cupy

    rng = np.random.default_rng()
    made: dict[tuple[int | None, str], Any] = {}
    for layer in range(4):
        for role in ("key", "value"):
            words = rng.integers(1, 1 << 15, (PAGES, *PAGE), np.uint16)
            made[layer, role] = cupy.asarray(words if fill is None else np.full_like(words, fill)).view(np.float16)
    return made


def snapshot_of(caches: Any) -> KVSnapshot:
    return KVSnapshot.from_paged(caches, block_tables=TABLES, token_counts=COUNTS)


def same_tokens(got: KVSnapshot, sent: KVSnapshot) -> None:
    for tensor in sent.tensors:
        for seq in range(len(COUNTS)):
            mine = got.tokens(tensor.layer_index, tensor.role, seq).view(np.uint16)
            assert np.array_equal(mine, sent.tokens(tensor.layer_index, tensor.role, seq).view(np.uint16))


@pytest.mark.parametrize("checksum", [None, "xxh3_64", "none"])
def test_from_gpu_to_gpu_and_back_into_pages(gpu: Any, on_gpu: RunningDaemon, checksum: Any) -> None:
    sent, own = snapshot_of(pools(gpu)), pools(gpu, POISON)
    with ht.connect(on_gpu.address, transports=["ucx"]) as client:
        receipt = client.put("a", sent, checksum=checksum)
        back = client.get("a", into=own, block_tables=[[8, 7, 6, 4], [8, 7], [], [1, 2, 3]])
        again = client.get("a", device="cuda:0")
        with pytest.raises(CapabilityMismatch) as refused:
            client.get("a")
        host = client.get("a", via_host=True)
        client.delete("a")

    assert (receipt.staged_bytes, receipt.device_tag, receipt.checksum) == (0, 1, checksum or "mix64")
    assert (receipt.dirty_dead_slot_count, back.receipt.staged_bytes, back.receipt.checksum) == (0, 0, "mix64")
    assert refused.value.field == "buffers[0].device_tag"
    assert host.receipt.staged_bytes == host.receipt.wire_bytes
    for got in (back, again, host):
        same_tokens(got, sent)
    assert (again.device, host.device) == ((1, 0), (0, 0))
    for pool in own.values():
        left = pool.get().view(np.uint16)
        assert (left[[0, 5, *range(9, PAGES)]] == POISON).all()
        assert not left[4, 2:].any()  # dead slots are clear
        assert not (left[[8, 7, 6, 1, 2]] == POISON).any()


def test_scales_go_with_their_pages(gpu: Any, on_gpu: RunningDaemon) -> None:
    import cupy

    rng = np.random.default_rng()
    shape = (PAGES, *PAGE)

    def made(fill: int | None) -> tuple[dict[Any, Any], dict[Any, ht.Quantized]]:
        caches, quantized = {}, {}
        for key in ((None, "key"), (None, "value")):
            words = rng.integers(-99, 99, shape, np.int8) if fill is None else np.full(shape, fill, np.int8)
            scales = rng.uniform(0.5, 2, shape[:2]) if fill is None else np.full(shape[:2], fill)
            zeros = rng.integers(-9, 9, shape[:2], np.int32) if fill is None else np.full(shape[:2], fill, np.int32)
            caches[key] = cupy.asarray(words)
            quantized[key] = ht.Quantized.per_block(
                PAGE[0], cupy.asarray(scales.astype(np.float16)), cupy.asarray(zeros)
            )
        return caches, quantized

    source, source_scales = made(None)
    sent = KVSnapshot.from_paged(source, block_tables=TABLES, token_counts=COUNTS, quantization=source_scales)
    own, scales = made(100)
    into = Destination.from_paged(own, block_tables=[[8, 7, 6, 4], [8, 7], [], [1, 2, 3]], quantization=scales)
    with ht.connect(on_gpu.address, transports=["ucx"]) as client:
        receipt = client.put("q", sent)
        back = client.get("q", into=into)
        client.delete("q")

    assert (receipt.staged_bytes, receipt.dirty_dead_slot_count) == (0, 0)
    for seq in range(len(COUNTS)):
        mine, theirs = (item.tokens(None, "key", seq, dequantize=True) for item in (back, sent))
        assert np.array_equal(mine, theirs)
    for scale, zero in (item.parameters for item in scales.values()):
        assert (scale.get()[[0, 5, *range(9, PAGES)]] == 100).all()
        assert (scale.get()[4, 2:] == 1).all()
        assert not zero.get()[4, 2:].any()


def test_a_large_snapshot_in_many_chunks(gpu: Any, on_gpu: RunningDaemon) -> None:
    import cupy

    rng = np.random.default_rng()
    pages = LARGE_PAGES
    with gpu.work():
        caches: dict[Any, Any] = {
            (layer, role): cupy.asarray(rng.integers(1, 1 << 15, (pages, *PAGE), np.uint16)).view(np.float16)
            for layer in range(4)
            for role in ("key", "value")
        }
        own = {key: cupy.full((pages, *PAGE), POISON, dtype=np.uint16).view(np.float16) for key in caches}
    order, places = rng.permutation(pages), rng.permutation(pages)
    sent = KVSnapshot.from_paged(caches, block_tables=[order[:-1]], token_counts=[(pages - 1) * PAGE[0]])
    with ht.connect(on_gpu.address, transports=["ucx"]) as client:
        receipt = client.put("large", sent)
        client.get("large", into=own, block_tables=[places[:-1]])
        client.delete("large")

    assert receipt.staged_bytes == 0
    for key, pool in own.items():
        found, wanted = pool.get().view(np.uint16), caches[key].get().view(np.uint16)
        assert np.array_equal(found[places[:-1]], wanted[order[:-1]])
        assert (found[places[-1]] == POISON).all()


def test_between_gpu_and_host_only_on_request(gpu: Any, on_host: RunningDaemon) -> None:
    sent, own = snapshot_of(pools(gpu)), pools(gpu, POISON)
    with ht.connect(on_host.address, transports=["ucx"]) as client:
        with pytest.raises(CapabilityMismatch) as refused:
            client.put("b", sent)
        receipt = client.put("b", sent, via_host=True)
        back = client.get("b", into=own, block_tables=[[8, 7, 6, 4], [8, 7], [], [1, 2, 3]], via_host=True)
        client.delete("b")

    assert (refused.value.field, refused.value.details["required"]) == ("buffers[0].device_tag", "0x00 (cpu)")
    assert (receipt.staged_bytes, receipt.device_tag) == (receipt.wire_bytes, 0)
    same_tokens(back, sent)


def test_a_transport_without_gpus_is_told_by_the_receipt(gpu: Any, on_gpu: RunningDaemon) -> None:
    sent = snapshot_of(pools(gpu))
    with ht.connect(on_gpu.address, transports=["tcp"]) as client:
        receipt = client.put("c", sent)
        got = client.get("c", device="cuda:0")
        client.delete("c")

    assert (receipt.transport, receipt.staged_bytes) == ("tcp", receipt.wire_bytes)
    same_tokens(got, sent)


def test_a_put_follows_the_stream_that_fills_the_pages(gpu: Any, on_gpu: RunningDaemon) -> None:
    import cupy

    caches = pools(gpu, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with ht.connect(on_gpu.address, transports=["ucx"]) as client:
        for number in range(1, 6):
            with stream:
                for pool in caches.values():
                    for _ in range(50):  # work that is still queued when put is called
                        pool.view(np.uint16)[...] = 0
                    pool.view(np.uint16)[...] = number
            client.put("d", snapshot_of(caches), overwrite=True, stream=stream)
            with client.get("d", via_host=True) as got:
                assert (got.tokens(0, "key", 0).view(np.uint16) == number).all()
        client.delete("d")


def test_the_callers_stream_and_device_stay_current(gpu: Any, on_gpu: RunningDaemon) -> None:
    import cupy

    caches, own = pools(gpu), pools(gpu, POISON)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, ht.connect(on_gpu.address, transports=["ucx"]) as client:
        client.put("e", snapshot_of(caches))
        client.get("e", into=own, block_tables=TABLES)
        client.delete("e")

        assert cupy.cuda.get_current_stream() == stream
        assert cupy.cuda.Device().id == gpu.device_id
