"""The asyncio client: the same results, and cancellation that leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

import hurray_client as ht
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import RunningDaemon, eventually

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 60))


def is_settled(node: ht.NodeInfo) -> bool:
    arena = node.arena
    return arena.receiving_bytes == arena.held_bytes == arena.quarantined_bytes == 0


def test_everything_once(daemon: RunningDaemon, client: ht.Client) -> None:
    async def main() -> None:
        snapshot = make_snapshot()
        seen: list[ht.Progress] = []
        async with ht.aconnect(daemon.address) as node:
            receipt = await node.put("aio/1", snapshot, on_progress=seen.append)
            assert seen[-1].done_bytes == receipt.wire_bytes
            got = await node.get("aio/1")
            assert_same_tokens(snapshot, got)
            into = await node.get("aio/1", into=make_caches(seed=3), block_tables=[[5, 6, 7], [5, 1], []])
            assert_same_tokens(snapshot, into)
            assert (await node.stat("aio/1")).info.generation == receipt.generation
            assert [info.key async for info in node.list("aio/")] == ["aio/1"]
            assert (await node.renew("aio/1", lease_s=30)).generation == receipt.generation
            assert (await node.node()).node == "test"
            assert await node.delete("aio/1") == receipt.generation
            with pytest.raises(ht.KeyDeleted):
                await node.get("aio/1")
        with pytest.raises(ht.Misuse):
            await node.node()
        assert_same_tokens(snapshot, got)

    run(main())


def test_many_at_once(daemon: RunningDaemon, client: ht.Client) -> None:
    async def one(node: ht.AsyncClient, number: int) -> None:
        snapshot = make_snapshot(make_caches(seed=number))
        key = f"aio/many/{number}"
        waiting = asyncio.create_task(node.get(key, wait_s=20, consume=True))
        await node.put(key, snapshot)
        assert_same_tokens(snapshot, await waiting)

    async def main() -> None:
        async with ht.aconnect(daemon.address) as node:
            await asyncio.gather(*(one(node, number) for number in range(16)))

    run(main())


def test_a_cancelled_wait_ends_at_once(daemon: RunningDaemon, client: ht.Client) -> None:
    async def main() -> None:
        async with ht.aconnect(daemon.address) as node:
            await node.node()
            task = asyncio.create_task(node.get("aio/never", wait_s=50))
            await asyncio.to_thread(eventually, lambda: node.client._calls, 10)
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < 1
            await node.put("aio/after", make_snapshot())

    run(main())


def test_a_cancelled_put_leaves_no_trace(daemon: RunningDaemon, client: ht.Client) -> None:
    caches = make_caches(layers=4, num_pages=128, page_size=16, heads=4, head_dim=32)
    snapshot = make_snapshot(caches, tables=[list(range(128))], counts=[2048])

    async def main() -> None:
        async with ht.aconnect(daemon.address, config=ht.ClientConfig(chunk_bytes=4096, window=1)) as node:
            moving = asyncio.Event()
            task = asyncio.create_task(node.put("aio/cancelled", snapshot, on_progress=lambda _: moving.set()))
            await moving.wait()
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < 2
            await asyncio.to_thread(eventually, lambda: is_settled(client.node()), 10)
            with pytest.raises(ht.KeyNotFound):
                await node.get("aio/cancelled")
            await node.put("aio/cancelled", snapshot)
            assert_same_tokens(snapshot, await node.get("aio/cancelled"))

    run(main())


def test_a_cancelled_task_may_not_have_begun(daemon: RunningDaemon, client: ht.Client) -> None:
    async def main() -> None:
        async with ht.aconnect(daemon.address, config=ht.ClientConfig(max_concurrency=1)) as node:
            first = asyncio.create_task(node.get("aio/never", wait_s=50))
            await asyncio.to_thread(eventually, lambda: node.client._calls, 10)
            second = asyncio.create_task(node.put("aio/queued", make_snapshot()))
            await asyncio.to_thread(eventually, node._threads._work_queue.qsize, 10)
            for task in (second, first):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            with pytest.raises(ht.KeyNotFound):
                await node.stat("aio/queued")

    run(main())


def test_what_a_progress_callback_raises_is_raised(daemon: RunningDaemon, client: ht.Client) -> None:
    def stop(_: ht.Progress) -> None:
        raise RuntimeError("stop")

    async def main() -> None:
        async with ht.aconnect(daemon.address) as node:
            with pytest.raises(RuntimeError, match="stop"):
                await node.put("aio/stopped", make_snapshot(), on_progress=stop)

    run(main())
