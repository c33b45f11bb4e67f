"""Failures that users of comparable systems have reported, end to end: each is refused by name, leaves the destination
as it was and the source free, and the next good transfer works."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hurray_client as ht
from hurray_wire.prepare import PreparedSnapshot, prepare
from sdk.snapshots import (
    assert_dead_slots_clear,
    assert_same_tokens,
    copies,
    make_caches,
    make_snapshot,
    tables_of,
)
from support.daemon import eventually, running_daemon


@pytest.fixture
def good(client: ht.Client) -> Iterator[None]:
    """What must be true after each refusal."""
    yield
    eventually(lambda: client.node().arena.receiving_bytes + client.node().arena.quarantined_bytes == 0, 10)
    snapshot = make_snapshot()
    client.put("good", snapshot)
    caches = make_caches(seed=4)
    assert_same_tokens(snapshot, client.get("good", into=caches, block_tables=[[0, 1, 2], [0, 4], []]))


@pytest.mark.usefixtures("good")
class TestGeometry:
    """Cases 1, 2 and 7: what the offer shows is refused at the offer."""

    @staticmethod
    def refused(client: ht.Client, caches: dict[Any, Any], tables: list[list[int]], **options: Any) -> ht.HurrayError:
        before = copies(caches)
        destination = ht.Destination.from_paged(caches, block_tables=tables, **options)
        moved: list[ht.Progress] = []
        with pytest.raises(ht.GeometryMismatch) as caught:
            client.get("case", into=destination, timeout_s=5, on_progress=moved.append)
        assert moved == []
        assert all(caches[key].tobytes() == before[key].tobytes() for key in caches)
        return caught.value

    def test_page_size(self, client: ht.Client) -> None:
        source = make_caches(page_size=32)
        client.put("case", make_snapshot(source, tables=[[0, 1, 2]], counts=[70]))
        error = self.refused(client, make_caches(page_size=64), [[0, 1]])
        assert (error.field, error.details["offered"], error.details["required"]) == ("page_size", "32", "64")
        assert error.details["tensor"] == "layer 0 key"

    def test_heads(self, client: ht.Client) -> None:
        client.put("case", make_snapshot(make_caches(heads=8), tables=[[0, 1]], counts=[6]))
        error = self.refused(client, make_caches(heads=4), [[0, 1]])
        assert (error.field, error.details["offered"], error.details["required"]) == ("num_heads", "8", "4")

    def test_element_type_once_and_32_times(self, client: ht.Client) -> None:
        client.put("case", make_snapshot(make_caches(dtype=ml_dtypes.bfloat16), tables=[[0, 1]], counts=[6]))

        def attempt(_: int) -> ht.HurrayError:
            return self.refused(client, make_caches(dtype=ml_dtypes.float8_e4m3fn), [[0, 1]])

        attempt(0)
        with ThreadPoolExecutor(32) as pool:
            for error in pool.map(attempt, range(32)):
                assert error.field == "element_type"
                assert (error.details["offered"], error.details["required"]) == ("bfloat16", "float8_e4m3")

    def test_layers(self, client: ht.Client) -> None:
        client.put("case", make_snapshot(make_caches(layers=2), tables=[[0, 1]], counts=[6]))
        error = self.refused(client, make_caches(layers=3), [[0, 1]])
        assert error.field == "tensors"


# --- 3 and 4: index buffers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "value"), [([0, 5], 5), ([0, 0xFFFFFFFF], 0xFFFFFFFF), ([0, -1], -1)])
def test_page_ids_out_of_range_do_not_leave_the_sdk(table: list[int], value: int) -> None:
    with pytest.raises(ht.InvalidContents) as caught:
        make_snapshot(make_caches(num_pages=5), tables=[table], counts=[6])
    assert (caught.value.rule, caught.value.details["index"], caught.value.details["offered"]) == (
        "V4",
        "1",
        str(value),
    )


@pytest.mark.parametrize("seq_ptr", [[0, 3, 2], [1, 2]])
def test_ragged_tables_that_are_wrong_do_not_leave_the_sdk(seq_ptr: list[int]) -> None:
    table = (np.array(seq_ptr, np.uint64), np.array([0, 1], np.uint32))
    with pytest.raises(ht.InvalidContents) as caught:
        ht.KVSnapshot.from_paged(make_caches(), block_tables=table, token_counts=[1] * (len(seq_ptr) - 1))
    assert caught.value.rule in ("V1", "V2", "V3")


def corrupted(change: Callable[[PreparedSnapshot], None]) -> Callable[[ht.KVSnapshot], PreparedSnapshot]:
    def prepare_and_change(snapshot: ht.KVSnapshot, **options: bool) -> PreparedSnapshot:
        prepared = prepare(snapshot, **options)
        change(prepared)
        return prepared

    return prepare_and_change


def set_entry(name: str, index: int, value: int) -> Callable[[PreparedSnapshot], None]:
    def change(prepared: PreparedSnapshot) -> None:
        getattr(prepared, name).view(np.uint32)[index] = value

    return change


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (set_entry("block_table", 1, 2), "V4"),
        (set_entry("block_table", 1, 0xFFFFFFFF), "V4"),
        (set_entry("seq_ptr", 0, 1), "V1"),
        (set_entry("seq_ptr", 1, 3), "V2"),
    ],
)
def test_a_source_that_lies_is_refused_before_a_page_moves(
    client: ht.Client, monkeypatch: pytest.MonkeyPatch, change: Callable[[PreparedSnapshot], None], rule: str
) -> None:
    """From a source that does not check: the daemon names rule, index and value."""
    page_bytes: list[int] = []
    fill = PreparedSnapshot.read

    def read(self: PreparedSnapshot, tensor_index: int, offset: int, out: Any) -> None:
        page_bytes.append(out.size)
        fill(self, tensor_index, offset, out)

    monkeypatch.setattr(PreparedSnapshot, "read", read)
    monkeypatch.setattr("hurray_client.client.prepare", corrupted(change))
    with ht.connect(client.target, config=ht.ClientConfig(chunk_bytes=4096)) as source:
        snapshot = make_snapshot(tables=[[3, 6]], counts=[7])
        with pytest.raises(ht.InvalidContents) as caught:
            source.put("lie", snapshot)
    assert caught.value.rule in (rule, "V3")
    assert "offered" in caught.value.details
    # The source may send ahead of the check, never more than its window.
    assert sum(page_bytes) <= 4 * 4096
    with pytest.raises(ht.KeyNotFound):
        client.stat("lie")
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("tables", "counts"), [([], []), ([[0, 1], [], [2]], [7, 0, 2]), ([[], [], []], [0, 0, 0]), ([[4]], [0])]
)
@pytest.mark.usefixtures("good")
def test_empty_and_ragged_batches(client: ht.Client, tables: list[list[int]], counts: list[int]) -> None:
    snapshot = make_snapshot(tables=tables, counts=counts)
    client.put("ragged", snapshot)
    assert_same_tokens(snapshot, client.get("ragged"))


# --- 5: a page that is full for one sequence and the last of another --------------------------------------------------


def test_a_shared_partial_page(client: ht.Client) -> None:
    caches = make_caches()
    snapshot = make_snapshot(caches, tables=[[0, 1], [0]], counts=[6, 3])
    receipt = client.put("shared", snapshot)
    assert (receipt.logical_page_count, receipt.distinct_page_count) == (3, 2)
    got = client.get("shared")
    assert tables_of(got) == [[0, 1], [0]]
    assert_dead_slots_clear(got)
    for tensor in got.tensors:
        pages = tensor.page_pool.view(np.float16).reshape(2, 4, 2, 8)
        source = caches[tensor.layer_index, tensor.role]
        assert np.array_equal(pages[0], source[0])
        assert np.array_equal(pages[1, :2], source[1, :2])
        assert not pages[1, 2:].any()


# --- 8: scales --------------------------------------------------------------------------------------------------------


def integer_caches() -> dict[Any, Any]:
    rng = np.random.default_rng(8)
    return {key: rng.integers(-128, 128, (8, 4, 2, 8), dtype=np.int8) for key in make_caches()}


def test_integers_without_scales_are_refused() -> None:
    with pytest.raises(ht.InvalidSnapshot) as caught:
        make_snapshot(integer_caches())
    assert caught.value.field == "quantization"


def test_scales_for_tokens_instead_of_slots_are_refused() -> None:
    with pytest.raises(ht.InvalidSnapshot) as caught:
        make_snapshot(integer_caches(), quantization=ht.Quantized.per_block(4, np.ones(17, np.float32)))
    assert (caught.value.rule, caught.value.details["offered"], caught.value.details["required"]) == ("Q27", "17", "32")


def test_blocks_that_are_no_pages_are_refused() -> None:
    with pytest.raises(ht.HurrayError) as caught:
        make_snapshot(integer_caches(), quantization=ht.Quantized.per_block(8, np.ones(32, np.float32)))
    assert (caught.value.rule, caught.value.details["offered"]) == ("Q23", "8")


def test_scales_follow_their_pages(client: ht.Client) -> None:
    """The renumbered pages have their scales, dead slots a neutral one; into= writes them beside the caller's pages."""
    caches, scales = integer_caches(), np.arange(1, 33, dtype=np.float32).reshape(8, 4)
    snapshot = make_snapshot(
        caches, tables=[[3, 6], [3]], counts=[6, 3], quantization=ht.Quantized.per_block(4, scales)
    )
    client.put("scales", snapshot)
    got = client.get("scales")
    for tensor in got.tensors:
        arrived = tensor.parameters[0].view(np.float32).reshape(2, 4)
        assert arrived.tolist() == [[13, 14, 15, 16], [25, 26, 1, 1]]
        for seq in (0, 1):
            place = (tensor.layer_index, tensor.role, seq)
            assert np.array_equal(got.tokens(*place, dequantize=True), snapshot.tokens(*place, dequantize=True))

    own = {key: np.full((9, 4, 2, 8), 7, np.int8) for key in caches}
    own_scales = {key: np.full((9, 4), 5, np.float32) for key in caches}
    quantization = {key: ht.Quantized.per_block(4, own_scales[key]) for key in caches}
    destination = ht.Destination.from_paged(own, block_tables=[[8, 1], [2]], quantization=quantization)
    into = client.get("scales", into=destination)
    for key in caches:
        assert own_scales[key][[8, 1, 2]].tolist() == [[13, 14, 15, 16], [25, 26, 1, 1], [13, 14, 15, 1]]
        assert (own_scales[key][[0, 3, 4, 5, 6, 7]] == 5).all()
        for seq in (0, 1):
            assert np.array_equal(into.tokens(*key, seq, dequantize=True), snapshot.tokens(*key, seq, dequantize=True))


# --- 13: start order --------------------------------------------------------------------------------------------------


def test_the_client_dials_before_the_daemon_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    snapshot = make_snapshot()
    with ht.connect(f"127.0.0.1:{port}", config=ht.ClientConfig(retry_s=30)) as client, ThreadPoolExecutor(2) as pool:
        putting = pool.submit(client.put, "early", snapshot)
        getting = pool.submit(client.get, "early", wait_s=30)
        eventually(lambda: len(client._calls) == 2, 10)
        with running_daemon(f'listen = "127.0.0.1:{port}"'):
            assert putting.result(30).transport == "ucx"
            assert_same_tokens(snapshot, getting.result(30))


def test_the_daemon_listens_before_its_data_plane_is_up() -> None:
    with running_daemon() as daemon, ht.connect(daemon.address) as client:
        client.put("before", make_snapshot())
        daemon.kill_mover()
        eventually(lambda: not client.node().ready, 10)
        snapshot = make_snapshot(make_caches(seed=6))
        client.put("after", snapshot, timeout_s=20)
        assert client.node().ready
        assert_same_tokens(snapshot, client.get("after"))


def test_a_draining_daemon_ends_waits_and_stops() -> None:
    with running_daemon() as other, ht.connect(other.address, config=ht.ClientConfig(retry_s=0.5)) as client:
        client.put("held", make_snapshot())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.get, "never", wait_s=30)
            eventually(lambda: client._calls, 10)
            assert client.drain(deadline_s=5) >= 0
            with pytest.raises(ht.HurrayError) as caught:
                waiting.result(20)
        assert caught.value.code == "UNAVAILABLE"
        assert other.wait() == 0
