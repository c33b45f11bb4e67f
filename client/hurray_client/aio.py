"""The SDK's asyncio client: the synchronous one in threads of its own, with cancellation that ends the transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from hurray_client.call import Call
from hurray_client.client import ChecksumName, Client, Into, connect
from hurray_client.config import ClientConfig, load_config
from hurray_client.devices import follow, follow_into
from hurray_client.info import Lease, NodeInfo, SnapshotInfo, SnapshotStat
from hurray_client.plane import LocalDataPlane
from hurray_client.progress import OnProgress, Progress
from hurray_client.receipt import Receipt
from hurray_client.stream import PutStream
from hurray_client.transfer import ReceivedSnapshot
from hurray_wire.credentials import Credentials
from hurray_wire.errors import Misuse
from hurray_wire.paged import BlockTables
from hurray_wire.snapshot import KVSnapshot

T = TypeVar("T")


def aconnect(
    target: str,
    *,
    config: ClientConfig | None = None,
    tls: Credentials | None = None,
    transports: Sequence[str] | None = None,
    data_plane: LocalDataPlane | None = None,
) -> AsyncClient:
    """`connect` for asyncio: an async context manager, which may also be used as it is and closed with `aclose`."""
    config = config if config is not None else load_config()
    client = connect(target, config=config, tls=tls, transports=transports, data_plane=data_plane)
    return AsyncClient(client, config.max_concurrency)


class AsyncClient:
    """A Client whose methods are coroutines. Arguments, results and errors are those of Client.

    Cancelling the task of a `put` or `get` cancels the transfer; CancelledError is raised once nothing refers to the
    pages any more, usually within milliseconds. Calls run in threads of this client, of which there are
    `config.max_concurrency`. `on_progress` is called in the event loop.
    """

    def __init__(self, client: Client, max_concurrency: int) -> None:
        self.client = client
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="hurray-aio")

    async def put(
        self,
        key: str,
        snapshot: KVSnapshot,
        *,
        lease_s: float | None = None,
        overwrite: bool = False,
        request_id: str | None = None,
        timeout_s: float = 60.0,
        checksum: ChecksumName | None = None,
        annotations: Mapping[str, str] | None = None,
        require_transport: str | None = None,
        via_host: bool = False,
        stream: object | None = None,
        on_progress: OnProgress | None = None,
    ) -> Receipt:
        """See Client.put."""
        follow(snapshot.device, stream)  # the stream that is current is so in this thread
        call, report = Call(timeout_s), _in_loop(on_progress)
        return await self._run(
            lambda: self.client.run_put(
                call,
                key,
                snapshot,
                lease_s=lease_s,
                overwrite=overwrite,
                request_id=request_id,
                checksum=checksum,
                annotations=annotations,
                require_transport=require_transport,
                via_host=via_host,
                on_progress=report,
            ),
            call,
        )

    def put_stream(
        self,
        key: str,
        snapshot: KVSnapshot,
        *,
        lease_s: float | None = None,
        overwrite: bool = False,
        request_id: str | None = None,
        timeout_s: float = 60.0,
        checksum: ChecksumName | None = None,
        annotations: Mapping[str, str] | None = None,
        require_transport: str | None = None,
        via_host: bool = False,
        on_progress: OnProgress | None = None,
    ) -> AsyncPutStream:
        """See Client.put_stream: `async with ... as stream`, and `await stream.ready(layer)`. Threads of its own, which
        do not count as calls of this client."""
        call, report = Call(timeout_s), _in_loop(on_progress)
        return AsyncPutStream(
            call,
            lambda: self.client.make_stream(
                call,
                key,
                snapshot,
                lease_s=lease_s,
                overwrite=overwrite,
                request_id=request_id,
                checksum=checksum,
                annotations=annotations,
                require_transport=require_transport,
                via_host=via_host,
                on_progress=report,
            ),
        )

    async def get(
        self,
        key: str,
        *,
        wait_s: float = 0.0,
        consume: bool = False,
        generation: int = 0,
        into: Into | None = None,
        block_tables: BlockTables | None = None,
        require: Mapping[str, str] | None = None,
        device: str = "cpu",
        timeout_s: float = 60.0,
        require_transport: str | None = None,
        via_host: bool = False,
        stream: object | None = None,
        on_progress: OnProgress | None = None,
    ) -> ReceivedSnapshot:
        """See Client.get."""
        follow_into(into, device, stream)
        call, report = Call(timeout_s), _in_loop(on_progress)
        return await self._run(
            lambda: self.client.run_get(
                call,
                key,
                wait_s=wait_s,
                consume=consume,
                generation=generation,
                into=into,
                block_tables=block_tables,
                require=require,
                device=device,
                require_transport=require_transport,
                via_host=via_host,
                on_progress=report,
            ),
            call,
        )

    async def stat(self, key: str, *, generation: int = 0, timeout_s: float = 60.0) -> SnapshotStat:
        """See Client.stat."""
        return await self._run(lambda: self.client.stat(key, generation=generation, timeout_s=timeout_s))

    async def list(self, prefix: str = "", *, timeout_s: float = 60.0) -> AsyncIterator[SnapshotInfo]:
        """See Client.list."""
        snapshots = self.client.list(prefix, timeout_s=timeout_s)
        while (snapshot := await self._run(lambda: next(snapshots, None))) is not None:
            yield snapshot

    async def delete(self, key: str, *, generation: int = 0, timeout_s: float = 60.0) -> int:
        """See Client.delete."""
        return await self._run(lambda: self.client.delete(key, generation=generation, timeout_s=timeout_s))

    async def renew(
        self, key: str, *, lease_s: float | None = None, generation: int = 0, timeout_s: float = 60.0
    ) -> Lease:
        """See Client.renew."""
        return await self._run(
            lambda: self.client.renew(key, lease_s=lease_s, generation=generation, timeout_s=timeout_s)
        )

    async def node(self, *, timeout_s: float = 60.0) -> NodeInfo:
        """See Client.node."""
        return await self._run(lambda: self.client.node(timeout_s=timeout_s))

    async def drain(self, *, deadline_s: float | None = None, timeout_s: float = 60.0) -> int:
        """See Client.drain."""
        return await self._run(lambda: self.client.drain(deadline_s=deadline_s, timeout_s=timeout_s))

    async def aclose(self) -> None:
        """See Client.close."""
        await asyncio.to_thread(self.client.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, work: Callable[[], T], call: Call | None = None) -> T:
        """Run `work` in a thread; a cancellation of the task cancels `call`, and waits until the thread is done."""
        try:
            future = self._threads.submit(work)
        except RuntimeError:
            raise Misuse("the client is closed") from None
        running = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if call is not None and not future.cancel():
                call.cancel()
                while not running.done():
                    try:
                        await asyncio.wait([running])
                    except asyncio.CancelledError:
                        continue  # told twice; the memory is no freer for it
            if running.done() and not running.cancelled():
                running.exception()  # seen, so that asyncio does not report it
            raise


class AsyncPutStream:
    """See AsyncClient.put_stream. An async context manager, for one task at a time."""

    def __init__(self, call: Call, make: Callable[[], PutStream]) -> None:
        self._call = call
        self._make = make
        self._stream: PutStream | None = None
        self._is_used = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hurray-aio-stream")

    @property
    def receipt(self) -> Receipt:
        """See PutStream.receipt."""
        return self._opened().receipt

    async def ready(self, layer: int | None, *, stream: object | None = None) -> None:
        """See PutStream.ready."""
        opened = self._opened()
        opened.follow(stream)
        await self._run(lambda: opened.announce(layer))

    async def __aenter__(self) -> Self:
        if self._is_used:
            raise Misuse("a stream is used once")
        self._is_used = True
        try:
            await self._run(self._enter)
        except BaseException as error:
            await self._end(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end(error)

    def _opened(self) -> PutStream:
        if self._stream is None:
            raise Misuse("the stream is not open: tensors are announced inside its async with block")
        return self._stream

    def _enter(self) -> None:
        self._stream = self._make().__enter__()

    async def _end(self, error: BaseException | None) -> None:
        stream = self._stream
        try:
            if stream is not None:
                await self._run(lambda: stream.__exit__(None if error is None else type(error), error, None))
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread, and to its end: a cancellation of the task cancels the put, and is raised then."""
        running = asyncio.wrap_future(self._thread.submit(work))
        cancelled = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                self._call.cancel()
                cancelled = error
        if cancelled is not None:
            running.exception()  # seen, so that asyncio does not report it
            raise cancelled
        return running.result()


def _in_loop(on_progress: OnProgress | None) -> OnProgress | None:
    if on_progress is None:
        return None
    loop = asyncio.get_running_loop()

    async def report(progress: Progress) -> None:
        on_progress(progress)

    return lambda progress: asyncio.run_coroutine_threadsafe(report(progress), loop).result()
