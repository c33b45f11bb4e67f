"""Gets of large snapshots over shared memory: mapped where they are, held while they are mapped, and by nobody else."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import hurray_client as ht
from hurray_client import transfer
from hurray_client.transfer import GetOrder, _check_offer
from hurray_wire.errors import ProtocolViolation
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.view import VIEW_CHECKSUM
from sdk.snapshots import (
    Caches,
    assert_dead_slots_clear,
    assert_same_tokens,
    make_caches,
    make_snapshot,
    tables_of,
)
from support.daemon import RunningDaemon, eventually, running_daemon
from support.grains import mapped_of
from support.identities import identified_daemon

pytestmark = pytest.mark.parametrize("transport", ["shm"], indirect=True)

TABLES = [list(range(90, 10, -1)), [90, 89, 3], []]
COUNTS = [80 * 16 - 3, 40, 0]
PAGES = 81


def large(seed: int = 1, **options: object) -> ht.KVSnapshot:
    """Some 10 MB, over several grains: a ragged batch with a shared prefix, a partial page, and an empty sequence."""
    caches = make_caches(layers=2, seed=seed, num_pages=96, page_size=16, heads=8, head_dim=128)
    return make_snapshot(caches, tables=TABLES, counts=COUNTS, **options)


def readers(client: ht.Client, key: str) -> int:
    return client.stat(key).info.reader_count


def fill(client: ht.Client) -> int:
    """Put until there is no room; how many."""
    snapshot = large(seed=2)
    for number in itertools.count():
        try:
            client.put(f"other/{number}", snapshot)
        except ht.ArenaFull:
            return number
    raise AssertionError


def is_free(client: ht.Client) -> bool:
    arena = client.node().arena
    return arena.free_bytes == arena.total_bytes


def test_a_large_snapshot_is_mapped_and_not_copied(daemon: RunningDaemon, client: ht.Client) -> None:
    snapshot = large()
    put = client.put("k", snapshot)
    with client.get("k") as got:
        assert_same_tokens(snapshot, got)
        assert_dead_slots_clear(got)
        assert tables_of(got)[0] == list(range(80))
        receipt = got.receipt
        assert (receipt.transport, receipt.generation) == ("shm", put.generation)
        assert receipt.mapped_bytes == got.nbytes == 4 * PAGES * 16 * 8 * 128 * 2
        assert receipt.wire_bytes < 8192
        assert receipt.verified_chunk_count == 1
        assert (receipt.dead_slot_count, receipt.dirty_dead_slot_count) == (put.dead_slot_count, 0)
        assert receipt.to_dict()["mapped_bytes"] == receipt.mapped_bytes
        assert readers(client, "k") == 1
        assert all(tensor.page_pool.ctypes.data % 4096 == 0 for tensor in got.tensors)
        assert not any(tensor.page_pool.flags.writeable for tensor in got.tensors)
        assert mapped_of(daemon.mover_pid)
    assert not mapped_of(daemon.mover_pid)
    eventually(lambda: readers(client, "k") == 0, 10, "the reader is gone")


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[pb.Offer]]:
    """What gets are offered, before they look at it."""
    seen: list[pb.Offer] = []

    def look(*args: Any) -> Any:
        seen.append(args[2])
        return _check_offer(*args)

    monkeypatch.setattr(transfer, "_check_offer", look)
    yield seen
    assert seen


@pytest.mark.parametrize("checksum", ["xxh3_64", "none"])
def test_the_checksum_of_its_index_comes_with_the_offer(
    client: ht.Client, offers: list[pb.Offer], checksum: Any
) -> None:
    client.put("k", large(), checksum=checksum)

    with client.get("k") as got:
        assert got.receipt.verified_chunk_count == 1
        structure, gap = got.structure, -4 * got.structure.total_logical_pages % 4096
        table, seq_ptr = structure.block_table.astype("<u4"), structure.seq_ptr.astype("<u4")
        index = table.tobytes() + bytes(gap) + seq_ptr.tobytes()

    assert [list(offer.checksums) for offer in offers] == [[xxhash.xxh3_64_intdigest(index), VIEW_CHECKSUM]]


def test_an_index_with_another_checksum_than_was_offered_is_refused(
    client: ht.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put("k", large())

    def spoil(order: GetOrder, opening: pb.GetOpen, offer: pb.Offer) -> Any:
        offer.checksums[0] ^= 1
        return _check_offer(order, opening, offer)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_check_offer", spoil)
        with pytest.raises(ht.ChecksumMismatch):
            client.get("k")

    eventually(lambda: readers(client, "k") == 0, 10, "the reader is gone")
    client.get("k").close()


def test_a_reader_that_takes_no_checksums_with_the_offer_is_told_them(
    client: ht.Client, offers: list[pb.Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_(*args: Any) -> pb.GetOpen:
        opening = original(*args)
        opening.takes_checksums = False
        return opening

    original = GetOrder.open
    monkeypatch.setattr(GetOrder, "open", open_)
    client.put("k", large())

    with client.get("k") as got:
        assert got.receipt.verified_chunk_count == 1

    assert [list(offer.checksums) for offer in offers] == [[]]


def test_scales_are_the_readers_own(client: ht.Client) -> None:
    rng = np.random.default_rng(1)
    shape = (96, 16, 8, 128)
    pools: Caches = {(layer, "fused"): rng.integers(-127, 128, shape, dtype=np.int8) for layer in range(6)}
    scales = {key: ht.Quantized.per_block(16, rng.uniform(0.5, 2, (96, 16)).astype(np.float32)) for key in pools}
    snapshot = make_snapshot(pools, tables=TABLES, counts=COUNTS, quantization=scales)
    client.put("k", snapshot)
    with client.get("k") as got:
        assert_same_tokens(snapshot, got)
        assert not any(tensor.page_pool.flags.writeable for tensor in got.tensors)
        assert all(array.flags.writeable for tensor in got.tensors for array in tensor.parameters)
        assert got.receipt.mapped_bytes > 0


def test_what_is_small_is_copied(client: ht.Client) -> None:
    snapshot = make_snapshot()
    client.put("k", snapshot)
    got = client.get("k")
    assert (got.receipt.mapped_bytes, readers(client, "k")) == (0, 0)
    got.tensors[0].page_pool[0] = 1


def test_into_the_callers_pages_it_is_copied(client: ht.Client) -> None:
    snapshot = large()
    client.put("k", snapshot)
    own = make_caches(layers=2, seed=9, num_pages=96, page_size=16, heads=8, head_dim=128)
    got = client.get("k", into=own, block_tables=[list(range(80)), [0, 1, 81], []])
    assert_same_tokens(snapshot, got)
    assert got.receipt.mapped_bytes == 0


def test_over_another_transport_it_is_copied(
    daemon: RunningDaemon, client: ht.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = large()
    client.put("k", snapshot)
    with ht.connect(daemon.address, transports=["tcp"]) as other:
        got = other.get("k")
    assert_same_tokens(snapshot, got)
    assert (got.receipt.transport, got.receipt.mapped_bytes) == ("tcp", 0)


def test_progress_counts_what_is_mapped(client: ht.Client) -> None:
    client.put("k", large())
    seen: list[ht.Progress] = []
    with client.get("k", on_progress=seen.append) as got:
        total = got.receipt.wire_bytes + got.receipt.mapped_bytes
    assert seen[-1] == ht.Progress(total, total)


# --- whose it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["delete", "overwrite", "expire", "consume"])
def test_a_reader_keeps_what_it_has_whatever_becomes_of_the_key(client: ht.Client, end: str) -> None:
    snapshot = large()
    generation = client.put("k", snapshot, lease_s=1.0 if end == "expire" else 60.0).generation
    got = client.get("k", consume=end == "consume")
    held_bytes = client.node().arena.held_bytes
    match end:
        case "delete":
            client.delete("k")
        case "overwrite":
            client.put("k", make_snapshot(), overwrite=True)
            client.delete("k")
        case "expire":
            eventually(lambda: not list(client.list()), 10, "the lease ends")
    reason = {"expire": ht.KeyExpired, "overwrite": ht.KeyOverwritten}.get(end, ht.KeyDeleted)
    with pytest.raises(reason):
        client.get("k", generation=generation)
    eventually(lambda: client.node().arena.held_bytes == held_bytes, 10, "held for the reader")
    assert fill(client) > 5
    assert_same_tokens(snapshot, got)
    got.close()
    client.put("k", large(seed=50))  # there is room again


def test_a_view_outlives_its_client(daemon: RunningDaemon, client: ht.Client) -> None:
    snapshot = large()
    client.put("k", snapshot)
    with ht.connect(daemon.address) as other:
        got = other.get("k")
    del other
    gc.collect()
    assert readers(client, "k") == 1
    assert_same_tokens(snapshot, got)
    del got
    eventually(lambda: readers(client, "k") == 0, 10, "the reader is gone")


def test_arrays_that_were_taken_out_stay_mapped_and_pinned(client: ht.Client) -> None:
    snapshot = large()
    client.put("k", snapshot)
    got = client.get("k")
    part = got.tensors[2].page_pool[5:7]
    expected = part.copy()
    got.close()
    with pytest.raises(ht.Misuse):
        _ = got.tensors
    assert readers(client, "k") == 1
    client.delete("k")
    assert (part == expected).all()
    assert not is_free(client)
    del part
    eventually(lambda: is_free(client), 10, "the memory is free")


def test_two_readers_see_the_same_memory(daemon: RunningDaemon, client: ht.Client) -> None:
    snapshot = large()
    client.put("k", snapshot)
    with client.get("k") as one, client.get("k") as other:
        assert readers(client, "k") == 2
        files = mapped_of(daemon.mover_pid)
        assert len(files) == 2 * len(set(files))
        one.close()
        assert_same_tokens(snapshot, other)
        eventually(lambda: readers(client, "k") == 1, 10, "one reader is gone")


READER = """
import sys
import hurray_client as ht
with ht.connect(sys.argv[1]) as client:
    got = client.get("k")
    assert got.receipt.mapped_bytes > 0
    print("mapped", flush=True)
    sys.stdin.read()
"""


def test_a_killed_reader_is_gone(daemon: RunningDaemon, client: ht.Client) -> None:
    client.put("k", large())
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, daemon.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    with reader:
        assert reader.stdout.readline() == "mapped\n"
        assert readers(client, "k") == 1
        client.delete("k")
        assert not is_free(client)
        os.kill(reader.pid, signal.SIGKILL)
    eventually(lambda: is_free(client), 10, "the memory is free")


def test_nothing_is_left_of_many_gets(daemon: RunningDaemon, client: ht.Client) -> None:
    client.put("k", large())

    def descriptors(pid: int | None) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    client.get("k").close()
    eventually(lambda: readers(client, "k") == 0, 10, "the reader is gone")
    ours, theirs = descriptors(os.getpid()), descriptors(daemon.mover_pid)
    for _ in range(200):
        client.get("k").close()
    eventually(lambda: readers(client, "k") == 0, 10, "the readers are gone")
    assert descriptors(os.getpid()) <= ours + 2
    assert descriptors(daemon.mover_pid) <= theirs + 2
    assert not mapped_of(daemon.mover_pid)
    assert not [path for path in Path("/dev/shm").iterdir() if "hurray" in path.name]


# --- nodes of their own --------------------------------------------------------------------------------------------


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    with running_daemon("[leases]\nmax_pin_s = 1.5\n[limits]\nmax_readers = 1") as daemon:
        monkeypatch.setenv("HURRAY_SHM__PATH", daemon.shm_path)
        yield daemon


def test_past_its_time_a_reader_keeps_the_snapshot_and_the_key_is_gone(node: RunningDaemon) -> None:
    with ht.connect(node.address) as client:
        snapshot = large()
        generation = client.put("k", snapshot).generation
        with client.get("k") as got:
            began = time.monotonic()
            assert client.get("k").receipt.mapped_bytes == 0  # no more readers than one: this is a copy
            eventually(lambda: not list(client.list()), 10, "the key is unreadable")
            assert time.monotonic() - began > 1
            with pytest.raises(ht.KeyExpired):
                client.get("k", generation=generation)
            assert_same_tokens(snapshot, got)
            assert client.node().arena.held_bytes > got.nbytes
        eventually(lambda: is_free(client), 10, "the memory is free")


def test_a_new_mover_does_not_take_memory_from_a_reader(node: RunningDaemon) -> None:
    with ht.connect(node.address) as client:
        snapshot = large()
        client.put("k", snapshot)
        with client.get("k") as got:
            old = node.kill_mover()
            eventually(lambda: node.mover_pid not in (None, old) and client.node().ready, 20, "the next mover")
            assert is_free(client)
            with pytest.raises(ht.SnapshotLost):
                client.get("k")
            other = large(seed=2)
            client.put("k", other)
            assert_same_tokens(snapshot, got)
            with client.get("k") as again:
                assert again.receipt.mapped_bytes > 0  # who read before is no reader of the new one
                assert_same_tokens(other, again)


def test_a_view_is_for_the_tenant_that_the_key_belongs_to_and_on_the_account_of_who_put_it(tmp_path: Path) -> None:
    def connect(tenant: str) -> ht.Client:
        config = ht.ClientConfig(shm={"path": node.daemon.shm_path}, transports=("shm",))  # type: ignore[arg-type]
        return ht.connect(node.address, tls=node.tenant(tenant), config=config)

    snapshot = large()
    quotas = "[quotas]\ndefault = { snapshots = 1 }\n"
    with identified_daemon(tmp_path, quotas) as node, connect("a") as a, connect("b") as b:
        a.put("a/shared/k", snapshot)
        with a.get("a/shared/k") as own, b.get("a/shared/k") as granted:
            assert own.receipt.mapped_bytes > 0
            assert granted.receipt.mapped_bytes == 0
            assert_same_tokens(own, granted)
        a.delete("a/shared/k")
        eventually(lambda: node.arena().held_bytes == 0, 10, "the memory is free")

        a.put("b/inbox/k", snapshot)
        got = b.get("b/inbox/k", consume=True)
        assert got.receipt.mapped_bytes > 0
        with pytest.raises(ht.QuotaExceeded):
            a.put("b/inbox/next", snapshot)
        assert_same_tokens(snapshot, got)
        got.close()
        eventually(lambda: node.arena().held_bytes == 0, 10, "the memory is free")
        a.put("b/inbox/next", snapshot)


def test_a_view_that_was_not_asked_for_is_refused(transport: str) -> None:
    order = GetOrder("k", "b8a6f0c2-6d5c-4a5c-9a0e-1f3f6c1d2e3f")
    with pytest.raises(ProtocolViolation) as caught:
        _check_offer(order, pb.GetOpen(view=False), pb.Offer(key="k", view=True))
    assert caught.value.field == "view"
