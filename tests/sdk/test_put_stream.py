"""Layer-wise puts: a layer goes when it is announced, nothing of it before, and nothing stays of what was given up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import hurray_client as ht
from hurray_client.stream import ReadyTensors
from hurray_wire.transport.ucx_config import UcxConfig
from sdk.capture import Capture
from sdk.snapshots import Caches, assert_same_tokens, make_caches, make_snapshot
from sdk.test_node import free_port
from support.daemon import RunningDaemon, eventually, running_daemon
from support.proxy import Proxy, cut

LAYERS, PAGES = 4, 32
TABLES, COUNTS = [list(range(PAGES))], [16 * PAGES - 3]
POISON = 0xA5

every_transport = pytest.mark.parametrize("transport", ["shm", "tcp", "ucx"], indirect=True)


def small_chunks(**settings: Any) -> ht.ClientConfig:
    """With what the environment says at the time."""
    return ht.ClientConfig(chunk_bytes=4096, **settings)


def poisoned() -> Caches:
    """Caches of which nothing is written yet, 32 KiB each."""
    caches = make_caches(layers=LAYERS, num_pages=PAGES, page_size=16, heads=2, head_dim=16)
    for cache in caches.values():
        cache.view(np.uint8)[:] = POISON
    return caches


def snapshot_of(caches: Caches) -> ht.KVSnapshot:
    return make_snapshot(caches, TABLES, COUNTS)


def write(caches: Caches, layer: int) -> None:
    """What prefill does."""
    rng = np.random.default_rng(layer)
    for role in ("key", "value"):
        cache = caches[layer, role]
        cache[:] = rng.standard_normal(cache.shape).astype(cache.dtype)


class Sent:
    """How much was handed to the transport."""

    def __init__(self) -> None:
        self.last = ht.Progress(0, 0)

    def __call__(self, progress: ht.Progress) -> None:
        self.last = progress

    def wait(self, least_bytes: int) -> None:
        eventually(lambda: self.last.done_bytes >= least_bytes, 10, f"{least_bytes} bytes sent, {self.last}")


@pytest.fixture
def source(daemon: RunningDaemon, transport: str) -> Iterator[ht.Client]:
    """A client that sends small chunks."""
    with ht.connect(daemon.address, config=small_chunks()) as client:
        yield client


def assert_no_trace(client: ht.Client, key: str) -> None:
    def is_settled() -> bool:
        arena = client.node().arena
        return arena.receiving_bytes == arena.held_bytes == arena.quarantined_bytes == 0

    eventually(is_settled, 10, "the node holds nothing of it")
    with pytest.raises(ht.KeyNotFound):
        client.stat(key)


def running(client: ht.Client) -> int:
    """Transfers whose memory may be in use."""
    plane = client._plane._running  # type: ignore[union-attr]
    return 0 if plane is None else plane.transfer_count


@every_transport
def test_each_layer_goes_when_it_is_announced(client: ht.Client, source: ht.Client, transport: str) -> None:
    key, caches, sent = f"layers/{transport}", poisoned(), Sent()
    layer_bytes = sum(caches[0, role].nbytes for role in ("key", "value"))
    with source.put_stream(key, snapshot_of(caches), on_progress=sent) as stream:
        for layer in range(LAYERS):
            write(caches, layer)
            stream.ready(layer)
            # The last chunk waits for the end of the block.
            sent.wait((layer + 1) * layer_bytes - (caches[0, "value"].nbytes if layer == LAYERS - 1 else 0))
            assert sent.last.done_bytes < (layer + 1) * layer_bytes + 2 * 4096
        with pytest.raises(ht.KeyNotFound):
            client.stat(key)
        with pytest.raises(ht.Misuse):
            _ = stream.receipt
    assert stream.receipt.transport == transport
    assert stream.receipt.generation == client.stat(key).info.generation
    assert stream.receipt.verified_chunk_count > LAYERS * 16
    assert_same_tokens(snapshot_of(caches), client.get(key))


def test_leaving_the_block_announces_the_rest(client: ht.Client) -> None:
    caches = poisoned()
    with client.put_stream("rest", snapshot_of(caches), lease_s=30, annotations={"a": "b"}) as stream:
        write(caches, 0)
        write(caches, 1)
        stream.ready(layer=1)
        write(caches, 2)
        write(caches, 3)
    assert_same_tokens(snapshot_of(caches), client.get("rest"))
    assert client.stat("rest").info.annotations == {"a": "b"}


@every_transport
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("announced", [0, 2, LAYERS])
def test_an_exception_in_the_block_leaves_no_trace(
    client: ht.Client, source: ht.Client, announced: int, error: type[BaseException]
) -> None:
    caches, sent = poisoned(), Sent()
    stream = source.put_stream("given up", snapshot_of(caches), on_progress=sent)

    def give_up() -> None:
        with stream:
            for layer in range(announced):
                write(caches, layer)
                stream.ready(layer)
            sent.wait(announced * 60_000 - (30_000 if announced == LAYERS else 0))
            raise error

    with pytest.raises(error):
        give_up()
    assert not running(source)
    assert_no_trace(client, "given up")
    with pytest.raises(ht.Misuse):
        _ = stream.receipt


@pytest.mark.parametrize("tables", [[], [[], []]])
def test_nothing_at_all_waits_for_the_end_of_the_block(client: ht.Client, tables: list[list[int]]) -> None:
    snapshot = make_snapshot(tables=tables, counts=[0] * len(tables))
    key = f"empty/{len(tables)}"
    with client.put_stream(key, snapshot) as stream:
        stream.ready(1)
        for _ in range(3):  # each a round trip
            with pytest.raises(ht.KeyNotFound):
                client.stat(key)
    assert client.get(key).num_seqs == len(tables)


def test_scales_are_read_when_they_are_announced(client: ht.Client) -> None:
    pools = {(layer, role): np.full((6, 32), POISON, np.uint8) for layer in (3, 5) for role in ("key", "value")}
    scales = {name: np.zeros((6, 4), np.float32) for name in pools}
    snapshot = ht.KVSnapshot.from_paged(
        pools,
        block_tables=[[4, 1], [2]],
        token_counts=[6, 3],
        element_type="int4",
        page_shape=(4, 2, 8),
        quantization={name: ht.Quantized.per_block(4, array) for name, array in scales.items()},
    )
    with client.put_stream("quantized", snapshot) as stream:
        for layer in (3, 5):
            with pytest.raises(ht.InvalidContents) as caught:  # not written yet: zero
                stream.ready(layer)
            assert caught.value.field == "buffers[3]"
            for role in ("key", "value"):
                pools[layer, role][:] = np.random.default_rng(layer).integers(0, 256, (6, 32))
                scales[layer, role][:] = layer
            stream.ready(layer)
            for role in ("key", "value"):
                scales[layer, role][:] = 1  # a copy was taken
    got = client.get("quantized")
    assert_same_tokens(snapshot, got)
    for layer in (3, 5):
        ours = snapshot.tokens(layer, "key", 0, dequantize=True)
        assert np.array_equal(got.tokens(layer, "key", 0, dequantize=True), layer * ours)


def test_layers_are_announced_in_order_and_once(client: ht.Client) -> None:
    caches = poisoned()
    stream = client.put_stream("order", snapshot_of(caches))
    with pytest.raises(ht.Misuse):
        stream.ready(0)
    with stream:
        stream.ready(2)
        for layer in (1, 2):
            with pytest.raises(ht.Misuse) as caught:
                stream.ready(layer)
            assert (caught.value.details["offered"], caught.value.details["announced"]) == (str(layer), "2")
        with pytest.raises(ht.InvalidRequest) as unknown:
            stream.ready(LAYERS)
        assert unknown.value.field == "layer"
        stream.ready(3)
    for use in (lambda: stream.ready(3), stream.__enter__):
        with pytest.raises(ht.Misuse):
            use()


def test_a_cache_without_layers(client: ht.Client) -> None:
    snapshot = make_snapshot({(None, "fused"): make_caches()[0, "key"]})
    with client.put_stream("alone", snapshot) as stream:
        stream.ready(None)
    assert_same_tokens(snapshot, client.get("alone"))


def ready_once_over(stream: ht.PutStream, *layers: int) -> None:
    """The last one when the put has ended."""
    for layer in layers[:-1]:
        stream.ready(layer)
    eventually(lambda: stream._outcome, 10)
    stream.ready(layers[-1])


def test_a_refusal_is_raised_in_the_block(client: ht.Client) -> None:
    client.put("taken", make_snapshot())
    with pytest.raises(ht.KeyExists), client.put_stream("taken", make_snapshot()) as stream:
        ready_once_over(stream, 0)
    with pytest.raises(ht.KeyExists), client.put_stream("taken", make_snapshot()):
        pass
    with pytest.raises(ht.InvalidRequest):
        client.put_stream("", make_snapshot())


def test_the_budget_counts_what_the_block_takes(client: ht.Client) -> None:
    client.put("warm", make_snapshot())
    with (
        pytest.raises(ht.DeadlineExceeded) as caught,
        client.put_stream("late", snapshot_of(poisoned()), timeout_s=4) as stream,
    ):
        ready_once_over(stream, 0, LAYERS - 1)
    assert caught.value.stage == "announce"
    with pytest.raises(ht.KeyNotFound):
        client.stat("late")


def test_a_client_that_is_closed_ends_its_streams(daemon: RunningDaemon, client: ht.Client) -> None:
    with ht.connect(daemon.address) as other:
        with pytest.raises(ht.Cancelled), other.put_stream("closed", snapshot_of(poisoned())):
            other.close()
        with pytest.raises(ht.Misuse):
            other.put_stream("closed", snapshot_of(poisoned()))
    assert_no_trace(client, "closed")


# --- what breaks ------------------------------------------------------------------------------------------------------


def put_through(
    client: ht.Client, key: str, break_it: Callable[[], object], *, timeout_s: float = 60
) -> tuple[Caches, ht.PutStream]:
    """A put that something happens to after half of its layers were sent."""
    caches, sent = poisoned(), Sent()
    with client.put_stream(key, snapshot_of(caches), on_progress=sent, timeout_s=timeout_s) as stream:
        for layer in range(LAYERS):
            write(caches, layer)
            stream.ready(layer)
            if layer == 1:
                sent.wait(120_000)
                break_it()
    return caches, stream


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[ReadyTensors]:
    """Grows with every attempt that begins."""
    begun: list[ReadyTensors] = []
    follow = ReadyTensors.follow

    def followed(self: ReadyTensors, *arguments: Any) -> None:
        begun.append(self)
        follow(self, *arguments)

    monkeypatch.setattr(ReadyTensors, "follow", followed)
    return begun


@every_transport
def test_a_stream_that_breaks_is_begun_anew(
    daemon: RunningDaemon, client: ht.Client, attempts: list[ReadyTensors]
) -> None:
    with Proxy(daemon.address) as proxy, ht.connect(proxy.address, config=small_chunks()) as other:

        def break_it() -> None:
            proxy.do(cut)
            eventually(lambda: len(attempts) == 2, 30, "another attempt")

        caches, stream = put_through(other, "cut", break_it)
    assert stream.receipt.generation == client.stat("cut").info.generation
    assert_same_tokens(snapshot_of(caches), client.get("cut"))


def test_another_node_in_its_place_gets_all_of_it(attempts: list[ReadyTensors]) -> None:
    listen = f'listen = "127.0.0.1:{free_port()}"'
    with running_daemon(listen) as first, ht.connect(first.address, config=small_chunks(retry_s=60)) as client:
        with pytest.raises(ht.KeyNotFound):
            client.stat("moved")
        successor = running_daemon(listen)

        def replace() -> None:
            first.kill()
            successor.__enter__()
            eventually(lambda: len(attempts) > 1, 30, "another attempt")

        try:
            caches, _ = put_through(client, "moved", replace)
            assert_same_tokens(snapshot_of(caches), client.get("moved"))
        finally:
            client.close()
            successor.__exit__(None, None, None)


def test_a_node_that_does_not_come_back_is_unavailable() -> None:
    with (
        running_daemon() as daemon,
        ht.connect(daemon.address, config=small_chunks(retry_s=0.3)) as client,
    ):

        def kill() -> None:
            daemon.kill()
            # Before the last byte is sent: afterwards the outcome would be unknown, and worth the whole budget.
            eventually(lambda: not running(client), 30, "the end of the attempt")

        with pytest.raises(ht.PeerUnavailable):
            put_through(client, "dead", kill)


def test_nothing_of_a_layer_crosses_before_it_is_announced() -> None:
    """As a third party sees it: what was announced crosses, and of the rest not a byte, given up or not."""
    ports = range(20800, 20900)
    try:
        capture = Capture(ports)
    except PermissionError:
        pytest.skip("no raw sockets")
    marker, secret = os.urandom(16), os.urandom(16)
    caches, sent = poisoned(), Sent()
    for (layer, _), cache in caches.items():
        cache.view(np.uint8).reshape(-1)[:] = np.frombuffer((marker if layer < 2 else secret) * 2048, np.uint8)
    config = small_chunks(ucx=UcxConfig(first_port=20850, last_port=20899))
    with running_daemon("[ucx]\nfirst_port = 20800\nlast_port = 20849") as daemon:
        capture.start()
        with ht.connect(daemon.address, config=config) as client:
            stream = client.put_stream("seen", snapshot_of(caches), on_progress=sent, require_transport="ucx")
            with suppress(ZeroDivisionError), stream:
                stream.ready(1)
                sent.wait(120_000)
                raise ZeroDivisionError
    assert capture.stop() == 0, "the capture missed packets and proves nothing"
    streams = capture.streams()
    assert any(marker in stream for stream in streams)
    assert not any(secret in stream for stream in streams)


# --- asyncio ----------------------------------------------------------------------------------------------------------


def test_aio(daemon: RunningDaemon, client: ht.Client) -> None:
    async def main() -> None:
        caches = poisoned()
        async with ht.aconnect(daemon.address) as node:
            seen: list[ht.Progress] = []
            async with node.put_stream("aio", snapshot_of(caches), on_progress=seen.append) as stream:
                for layer in range(LAYERS):
                    write(caches, layer)
                    await stream.ready(layer)
            assert stream.receipt.wire_bytes == seen[-1].done_bytes
            assert_same_tokens(snapshot_of(caches), await node.get("aio"))
            with pytest.raises(ht.Misuse):
                await stream.__aenter__()
            with pytest.raises(ht.InvalidRequest):
                async with node.put_stream("", snapshot_of(caches)):
                    pass
            with pytest.raises(ht.KeyExists):
                async with node.put_stream("aio", snapshot_of(caches)):
                    pass

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "at its end"])
def test_a_cancelled_task_leaves_no_trace(
    daemon: RunningDaemon, client: ht.Client, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    key = f"aio/{inside}"
    if not inside:  # the end of the block waits for the node, which waits for ever
        monkeypatch.setattr("hurray_client.stream.ReadyTensors.release", lambda _: None)

    async def main() -> None:
        reached = asyncio.Event()

        async def put(node: ht.AsyncClient) -> None:
            async with node.put_stream(key, snapshot_of(poisoned()), timeout_s=600) as stream:
                await stream.ready(0)
                reached.set()
                if inside:
                    await asyncio.Event().wait()

        async with ht.aconnect(daemon.address, config=small_chunks()) as node:
            task = asyncio.create_task(put(node))
            await reached.wait()
            if not inside:
                await asyncio.to_thread(eventually, lambda: not is_open(streams), 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not [thread for thread in threading.enumerate() if thread.name == "hurray-put-stream"]

    streams: list[Any] = []
    whole = ht.PutStream.__enter__

    def entered(self: ht.PutStream) -> ht.PutStream:
        streams.append(self)
        return whole(self)

    monkeypatch.setattr(ht.PutStream, "__enter__", entered)
    asyncio.run(asyncio.wait_for(main(), 60))
    assert_no_trace(client, key)


def is_open(streams: list[ht.PutStream]) -> bool:
    return all(stream._is_open for stream in streams)
