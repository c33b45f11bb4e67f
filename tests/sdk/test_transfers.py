"""Put and get through a real daemon over each transport: what arrives, what is refused, what is left behind."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import hurray_client as ht
from hurray_client import transfer
from hurray_wire.image import Chunk
from hurray_wire.messages import read_target_message
from hurray_wire.source_payloads import SnapshotSource, StagedSource
from hurray_wire.v1 import transfer_pb2 as pb
from sdk.snapshots import (
    assert_dead_slots_clear,
    assert_same_tokens,
    copies,
    make_caches,
    make_snapshot,
    tables_of,
)
from support.daemon import RunningDaemon, eventually
from support.proxy import DOWN, Proxy, cut, silence
from support.scrape import scrape, series

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp", "ucx"], indirect=True)


def test_round_trip(client: ht.Client, transport: str) -> None:
    snapshot = make_snapshot()
    receipt = client.put("a/b", snapshot, lease_s=30, annotations={"model": "tiny"})
    assert (receipt.key, receipt.generation > 0, receipt.transport, receipt.node) == ("a/b", True, transport, "test")
    assert (receipt.tensor_count, receipt.logical_page_count, receipt.distinct_page_count) == (4, 5, 4)
    # Pages 1 and 3 are full, page 6 holds 2 tokens, page 5 holds 3: three dead slots in each of four tensors.
    assert (receipt.dead_slot_count, receipt.dirty_dead_slot_count) == (12, 0)
    assert receipt.checksum == "xxh3_64"
    assert receipt.verified_chunk_count > 0
    assert receipt.volatile_memory
    assert [stage.stage for stage in receipt.stages][:2] == ["reserve", "index"]
    assert receipt.gigabytes_per_second > 0
    with client.get("a/b") as got:
        assert_same_tokens(snapshot, got)
        assert_dead_slots_clear(got)
        assert tables_of(got) == [[0, 1, 2], [0, 3], []]
        assert got.receipt.generation == receipt.generation
        assert got.receipt.wire_bytes == receipt.wire_bytes
        assert got.receipt.expire_time is None
        assert got.receipt.node == "test"
        assert got.receipt.transport == transport


def test_a_source_that_does_not_clear_dead_slots_is_found_out(
    client: ht.Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaked = series("hurray_dirty_dead_slots_total")
    before = scrape(daemon.watched, "counter")[leaked]
    with monkeypatch.context() as patch:
        patch.setattr("hurray_wire.prepare.clear_dead", lambda *_: None)
        receipt = client.put("dirty", make_snapshot())
    assert (receipt.dead_slot_count, receipt.dirty_dead_slot_count) == (12, 12)
    eventually(lambda: scrape(daemon.watched, "counter")[leaked] == before + 12, 10, "they are counted")
    with client.get("dirty") as got:
        assert_same_tokens(make_snapshot(), got)
        assert_dead_slots_clear(got)
        assert got.receipt.dirty_dead_slot_count == 0


def test_received_buffers_are_page_aligned_and_say_so(client: ht.Client) -> None:
    client.put("aligned", make_snapshot())
    got = client.get("aligned")
    for tensor in got.tensors:
        assert tensor.page_pool.ctypes.data % 4096 == 0
        assert [handle.alignment for handle in tensor.descriptor.buffers] == [4096] * 3
    for descriptor in client.stat("aligned").descriptors:
        assert all(handle.alignment >= 4096 for handle in descriptor.buffers)


def test_aliased_pages_cross_once(client: ht.Client) -> None:
    tables = [[0, 1, 2], [0, 1, 3], [0, 1]]
    receipt = client.put("alias", make_snapshot(tables=tables, counts=[12, 12, 8]))
    page_bytes = 4 * 2 * 8 * 2
    index_bytes = receipt.wire_bytes - 4 * 4 * page_bytes
    # Pools are at multiples of 4096 in the image, and what lies between two of them in one chunk crosses with them.
    assert receipt.distinct_page_count == 4
    assert index_bytes < 5 * 4096
    assert tables_of(client.get("alias")) == [[0, 1, 2], [0, 1, 3], [0, 1]]


def test_empty_batches(client: ht.Client) -> None:
    for key, tables, counts in (("none", [], []), ("empty", [[], []], [0, 0])):
        snapshot = make_snapshot(tables=tables, counts=counts)
        receipt = client.put(key, snapshot)
        assert receipt.distinct_page_count == 0
        got = client.get(key)
        assert got.num_seqs == len(counts)
        assert_same_tokens(snapshot, got)


def test_without_checksums(client: ht.Client) -> None:
    snapshot = make_snapshot()
    receipt = client.put("plain", snapshot, checksum="none")
    assert (receipt.checksum, receipt.verified_chunk_count) == ("none", 0)
    assert_same_tokens(snapshot, client.get("plain"))


def test_many_chunks(daemon: RunningDaemon, client: ht.Client) -> None:
    caches = make_caches(layers=3, num_pages=64, page_size=16, heads=4, head_dim=32)
    snapshot = make_snapshot(caches, tables=[list(range(60, 20, -1)), [60, 59, 3]], counts=[640, 40])
    config = ht.ClientConfig(chunk_bytes=8192)
    with ht.connect(daemon.address, config=config) as other:
        receipt = other.put("chunks", snapshot)
    assert receipt.verified_chunk_count > 40
    assert_same_tokens(snapshot, client.get("chunks"))


def test_waiting_for_a_key(client: ht.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "later", wait_s=20)
        snapshot = make_snapshot()
        client.put("later", snapshot)
        assert_same_tokens(snapshot, waiting.result(20))
    with pytest.raises(ht.KeyNotFound) as caught:
        client.get("never", wait_s=0.05)
    assert caught.value.stage == "wait"


def test_a_wait_ends_with_the_budget(client: ht.Client) -> None:
    began = time.monotonic()
    with pytest.raises(ht.DeadlineExceeded) as caught:
        client.get("never", wait_s=60, timeout_s=0.2)
    assert caught.value.stage == "wait"
    assert time.monotonic() - began < 2


def test_consuming(client: ht.Client) -> None:
    snapshot = make_snapshot()
    client.put("once", snapshot)
    assert_same_tokens(snapshot, client.get("once", consume=True))
    with pytest.raises(ht.KeyDeleted):
        client.get("once")
    assert client.node().arena.held_bytes == 0


def test_generations_and_overwriting(client: ht.Client) -> None:
    first, second = make_snapshot(make_caches(seed=1)), make_snapshot(make_caches(seed=2))
    old = client.put("gen", first).generation
    with pytest.raises(ht.KeyExists):
        client.put("gen", second)
    new = client.put("gen", second, overwrite=True).generation
    assert new > old
    assert_same_tokens(second, client.get("gen"))
    assert_same_tokens(second, client.get("gen", generation=new))
    with pytest.raises(ht.KeyOverwritten):
        client.get("gen", generation=old)


def test_snapshots_outlive_the_client(daemon: RunningDaemon) -> None:
    snapshot = make_snapshot()
    with ht.connect(daemon.address) as client:
        client.put("outlive", snapshot)
        got = client.get("outlive", consume=True)
    assert_same_tokens(snapshot, got)


# --- into the caller's pages ------------------------------------------------------------------------------------------


def test_into_the_callers_pages(client: ht.Client) -> None:
    snapshot = make_snapshot()
    client.put("into", snapshot)
    caches = make_caches(seed=9, num_pages=12)
    before = copies(caches)
    got = client.get("into", into=caches, block_tables=[[11, 2, 0], [11, 7], []])
    assert_same_tokens(snapshot, got)
    assert tables_of(got) == [[11, 2, 0], [11, 7], []]
    for key, array in caches.items():
        untouched = [page for page in range(12) if page not in (11, 2, 0, 7)]
        assert np.array_equal(array[untouched], before[key][untouched])
        assert not array[0, 2:].any()
        assert not array[7, 3:].any()


def test_into_other_aliasing(client: ht.Client) -> None:
    """The shared page of the source goes to two pages, each cleared by what its own sequences reach."""
    snapshot = make_snapshot(tables=[[0, 1], [0]], counts=[6, 3])
    client.put("split", snapshot)
    caches = make_caches(seed=9)
    got = client.get("split", into=caches, block_tables=[[4, 5], [6]])
    assert_same_tokens(snapshot, got)
    for array in caches.values():
        assert array[4].any()
        assert array[4, 3].any()
        assert not array[6, 3].any()


def test_into_a_destination_of_another_layout(client: ht.Client) -> None:
    snapshot = make_snapshot()
    client.put("hnd", snapshot)
    caches = {key: np.full((9, 2, 4, 8), 3, np.float16) for key in make_caches()}
    destination = ht.Destination.from_paged(caches, block_tables=[[1, 2, 3], [1, 8], []], layout="HND")
    assert_same_tokens(snapshot, client.get("hnd", into=destination))


@pytest.mark.parametrize(
    ("tables", "field"),
    [
        ([[1, 2, 3], [1, 4]], "num_seqs"),
        ([[1, 2], [1, 4], []], "block_tables"),
        ([[1, 2, 3], [1, 4, 5], []], "block_tables"),
    ],
)
def test_into_tables_that_do_not_fit_are_refused_at_the_offer(
    client: ht.Client, tables: list[list[int]], field: str
) -> None:
    client.put("misfit", make_snapshot())
    caches = make_caches(seed=9)
    before = copies(caches)
    with pytest.raises(ht.GeometryMismatch) as caught:
        client.get("misfit", into=caches, block_tables=tables)
    assert caught.value.field == field
    assert caught.value.details["offered"] != caught.value.details["required"]
    assert all(np.array_equal(caches[key], before[key]) for key in caches)
    client.get("misfit", into=caches, block_tables=[[1, 2, 3], [1, 4], []])


def test_into_one_page_for_two_is_refused_before_a_page_moves(client: ht.Client) -> None:
    client.put("clash", make_snapshot())
    caches = make_caches(seed=9)
    before = copies(caches)
    with pytest.raises(ht.GeometryMismatch):
        client.get("clash", into=caches, block_tables=[[1, 2, 3], [1, 2], []])
    assert all(np.array_equal(caches[key], before[key]) for key in caches)


def test_into_needs_tables(client: ht.Client) -> None:
    with pytest.raises(ht.InvalidRequest):
        client.get("x", into=make_caches())
    with pytest.raises(ht.InvalidRequest):
        client.get("x", block_tables=[[1]])


# --- what the node holds ----------------------------------------------------------------------------------------------


def test_stat(client: ht.Client) -> None:
    receipt = client.put("stat", make_snapshot(), lease_s=30, annotations={"model": "tiny"})
    stat = client.stat("stat")
    info = stat.info
    assert (info.key, info.generation, info.tensor_count) == ("stat", receipt.generation, 4)
    assert (info.num_seqs, info.total_tokens, info.page_size, info.num_pages) == (3, 17, 4, 4)
    assert info.annotations == {"model": "tiny"}
    assert receipt.expire_time is not None
    assert abs(info.expire_time - receipt.expire_time) < timedelta(milliseconds=100)
    assert stat.token_counts == (10, 7, 0)
    assert [(item.layer_index, item.kv_role_name) for item in stat.descriptors] == list(make_caches())
    with pytest.raises(ht.KeyNotFound):
        client.stat("nothing")


def test_list_goes_through_all_pages(client: ht.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_client.client._LIST_PAGE", 3)
    snapshot = make_snapshot()
    keys = [f"list/{number:02}" for number in range(10)]
    for key in [*keys, "other"]:
        client.put(key, snapshot)
    assert [info.key for info in client.list("list/")] == keys
    assert [info.key for info in client.list()] == [*keys, "other"]
    assert list(client.list("nothing")) == []


def test_delete(client: ht.Client) -> None:
    generation = client.put("gone", make_snapshot()).generation
    assert client.delete("gone") == generation
    for action in (client.delete, client.get, client.stat, client.renew):
        with pytest.raises(ht.KeyDeleted):
            action("gone")
    with pytest.raises(ht.KeyNotFound):
        client.delete("never was")


def test_leases(client: ht.Client) -> None:
    receipt = client.put("short", make_snapshot(), lease_s=0.5)
    assert receipt.expire_time is not None
    lease = client.renew("short", lease_s=0.6)
    assert lease.generation == receipt.generation
    assert lease.expire_time > receipt.expire_time
    with pytest.raises(ht.KeyNotFound) as caught:
        client.get("short", generation=receipt.generation + 1)
    eventually(lambda: client.node().arena.held_bytes == 0, 10)
    with pytest.raises(ht.KeyExpired):
        client.get("short")
    assert isinstance(caught.value, ht.HurrayError)


def test_node(daemon: RunningDaemon, client: ht.Client) -> None:
    info = client.node()
    assert (info.node, info.protocol_version, info.ready, info.transports) == (
        "test",
        1,
        True,
        ("shm", "tcp", "ucx"),
    )
    assert info.arena.total_bytes >= 128 << 20
    assert "UCX" in info.ucx


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"key": ""}, "key"),
        ({"key": "a\nb"}, "key"),
        ({"key": "x" * 513}, "key"),
        ({"key": "k", "lease_s": -1.0}, "lease_s"),
        ({"key": "k", "lease_s": float("nan")}, "lease_s"),
        ({"key": "k", "timeout_s": 0.0}, "timeout_s"),
        ({"key": "k", "request_id": "7"}, "request_id"),
        ({"key": "k", "checksum": "crc"}, "checksum"),
    ],
)
def test_arguments_that_make_no_sense(client: ht.Client, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ht.InvalidRequest) as caught:
        client.put(snapshot=make_snapshot(), **arguments)
    assert caught.value.field == field


def test_a_snapshot_that_the_arena_cannot_hold(client: ht.Client) -> None:
    caches = {(layer, "fused"): np.zeros((512, 16, 8, 64), np.float16) for layer in range(20)}
    with pytest.raises((ht.ArenaFull, ht.LimitExceeded)) as caught:
        client.put("huge", make_snapshot(caches, tables=[list(range(512))], counts=[8192]))
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    client.put("small", make_snapshot())


def test_require_transport(client: ht.Client, transport: str) -> None:
    assert client.put("t", make_snapshot(), require_transport=transport).transport == transport
    other = "tcp" if transport != "tcp" else "ucx"
    with pytest.raises(ht.CapabilityMismatch, match=r"connect\(transports=") as caught:
        client.put("u", make_snapshot(), require_transport=other)
    assert (caught.value.details["required"], caught.value.details["offered"]) == (other, transport)
    with pytest.raises(ht.CapabilityMismatch, match="none of the node's"):
        client.get("t", require_transport="pigeon")


def test_a_closed_snapshot_is_not_sent(client: ht.Client) -> None:
    client.put("own", make_snapshot())
    got = client.get("own")
    got.close()
    with pytest.raises(ht.Misuse):
        client.put("again", got)


# --- request ids ------------------------------------------------------------------------------------------------------


def test_a_closed_client_leaves_nothing_in_a_shared_data_plane(daemon: RunningDaemon, client: ht.Client) -> None:
    plane = ht.LocalDataPlane()
    for number in range(3):
        with ht.connect(daemon.address, data_plane=plane) as sharing:
            sharing.put(f"shared/{number}", make_snapshot())
    assert plane._watchers == {}
    assert plane._nodes == {}
    plane.close()
    assert len(list(client.list("shared/"))) == 3


def test_a_retry_gets_the_first_receipt(client: ht.Client) -> None:
    request_id = str(uuid.uuid4())
    first = client.put("retry", make_snapshot(), request_id=request_id)
    assert client.put("retry", make_snapshot(), request_id=request_id) == first
    client.delete("retry")
    assert client.put("retry", make_snapshot(), request_id=request_id) == first
    with pytest.raises(ht.RequestIdReused):
        client.put("retry/other", make_snapshot(), request_id=request_id)


@pytest.mark.parametrize("payload", [SnapshotSource, StagedSource])
def test_a_stream_cut_after_the_last_byte_yields_the_one_receipt(
    daemon: RunningDaemon,
    client: ht.Client,
    transport: str,
    payload: type[SnapshotSource | StagedSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The outcome is unknown to the source: the SDK asks again with the same id, and nothing is committed twice."""
    stage, key = payload.stage, f"unknown/{transport}/{payload.__name__}"
    with Proxy(daemon.address) as proxy, ht.connect(proxy.address) as source, ThreadPoolExecutor(1) as pool:

        def mute_at_the_last(self: Any, chunk: Chunk, *others: Any) -> Any:
            if chunk.index + 1 == len(self.plan.chunks):
                proxy.do(silence(DOWN))
            return stage(self, chunk, *others)

        monkeypatch.setattr(payload, "stage", mute_at_the_last)
        if payload is SnapshotSource:
            monkeypatch.setattr(transfer, "EAGER_BYTES", 0)
        putting = pool.submit(source.put, key, make_snapshot(), timeout_s=30)
        eventually(lambda: [info.key for info in client.list()] == [key], 10)
        monkeypatch.undo()
        assert not putting.done()
        proxy.do(cut)
        receipt = putting.result(30)
    assert receipt.generation == client.stat(key).info.generation
    assert len(daemon.logged("snapshot committed", key=key)) == 1


def test_a_stream_cut_before_the_offer_is_answered_is_tried_again(daemon: RunningDaemon, client: ht.Client) -> None:
    with Proxy(daemon.address) as proxy, ht.connect(proxy.address) as source, ThreadPoolExecutor(1) as pool:
        source.put("warm", make_snapshot())
        proxy.do(silence(DOWN))
        putting = pool.submit(source.put, "again", make_snapshot(), timeout_s=30)
        eventually(lambda: daemon.logged("snapshot committed", key="again") or len(source._calls), 10)
        proxy.do(cut)
        putting.result(30)
    assert client.stat("again").info.key == "again"


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_told(daemon: RunningDaemon, client: ht.Client) -> None:
    seen: list[ht.Progress] = []
    caches = make_caches(num_pages=64, page_size=16)
    receipt = client.put("p", make_snapshot(caches, [list(range(64))], [1024]), on_progress=seen.append)
    assert seen[-1] == ht.Progress(receipt.wire_bytes, receipt.wire_bytes)
    assert [item.done_bytes for item in seen] == sorted(item.done_bytes for item in seen)
    seen.clear()
    client.get("p", on_progress=seen.append)
    assert seen[-1] == ht.Progress(receipt.wire_bytes, receipt.wire_bytes)


def test_what_a_progress_callback_raises_ends_the_put(client: ht.Client) -> None:
    class StopIt(Exception):
        pass

    def stop(_: ht.Progress) -> None:
        raise StopIt

    with pytest.raises(StopIt):
        client.put("stopped", make_snapshot(), on_progress=stop)


# --- many at once -----------------------------------------------------------------------------------------------------


def test_sixteen_threads_share_a_client(daemon: RunningDaemon) -> None:
    barrier = threading.Barrier(16)

    def work(number: int) -> None:
        snapshot = make_snapshot(make_caches(seed=number))
        barrier.wait(20)
        for turn in range(3):
            key = f"threads/{number}/{turn}"
            client.put(key, snapshot)
            assert_same_tokens(snapshot, client.get(key, consume=True))

    with ht.connect(daemon.address) as client, ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
        opened = len(daemon.logged("session opened"))
        list(pool.map(work, range(16)))
        assert len(daemon.logged("session opened")) == opened


def test_clients_that_share_a_data_plane_share_the_session(daemon: RunningDaemon) -> None:
    plane = ht.LocalDataPlane()
    one, two = ht.connect(daemon.address, data_plane=plane), ht.connect(daemon.address, data_plane=plane)
    one.put("shared", make_snapshot())
    two.get("shared")
    one.close()
    two.get("shared", consume=True)
    two.close()
    plane.close()
    with pytest.raises(ht.Misuse):
        ht.connect(daemon.address, data_plane=plane)


@pytest.mark.parametrize("annotations", [{"model": 7}, {"model": "\ud800"}, {3: "x"}])
def test_annotations_that_are_no_text_are_refused(client: ht.Client, annotations: dict[str, str]) -> None:
    with pytest.raises(ht.InvalidRequest) as caught:
        client.put("annotated", make_snapshot(), annotations=annotations)
    assert caught.value.field == "annotations"


def test_the_receipt_of_another_request_is_nobodys_success(client: ht.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def confused(message: pb.TargetMessage) -> object:
        if message.HasField("receipt"):
            message.receipt.request_id = str(uuid.uuid4())
        return read_target_message(message)

    with monkeypatch.context() as patch:
        patch.setattr("hurray_client.transfer.read_target_message", confused)
        with pytest.raises(ht.HurrayError) as caught:
            client.put("mine", make_snapshot(), timeout_s=5)
    assert caught.value.field == "request_id" or isinstance(caught.value, ht.OutcomeUnknown)
    client.delete("mine")


def test_annotations_that_are_required_and_differ_refuse_before_a_byte_moves(client: ht.Client, transport: str) -> None:
    snapshot = make_snapshot()
    client.put("noted", snapshot, annotations={"model": "tiny", "dtype": "float32"})
    caches = {key: np.full_like(pool, 7) for key, pool in make_caches().items()}
    with pytest.raises(ht.GeometryMismatch) as caught:
        client.get(
            "noted",
            into=caches,
            block_tables=tables_of(snapshot),
            consume=True,
            require={"model": "tiny", "dtype": "bfloat16", "layout": "NHD"},
        )
    assert (caught.value.field, caught.value.details["offered"], caught.value.details["required"]) == (
        "dtype",
        "float32",
        "bfloat16",
    )
    assert "layout" in caught.value.message
    assert all((pool == 7).all() for pool in caches.values())
    with client.get("noted", require={"model": "tiny"}, consume=True) as got:
        assert_same_tokens(snapshot, got)
