"""The control plane's network: gRPC as the client and the daemon see it, with streams that are slow, silent or broken.

Messages of one direction of a stream keep their order, as in gRPC; between streams there is none. Every message is
really serialised and parsed. A stream that breaks loses what is under way, or some of it; a server's handler is then
cancelled, as grpc.aio does it, and a client meets UNAVAILABLE without details.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

import grpc

from simulation.kernel import Kernel, Process, Thread, Waiters

KEEPALIVE_S = 7.0
"""A peer that is silent for this long is lost: the daemon's ping interval and timeout."""


class RpcError(grpc.RpcError):
    """What a client's call raises."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, bytes], ...]) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailers


class BrokenStream(Exception):
    """What grpc.aio raises in a handler that writes to a stream that broke (ExecuteBatchError)."""


class Pipe:
    """One direction of a stream: in order, each message after a delay of its own."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._last_s = 0.0
        self._held: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._signals: list[Callable[[], object]] = []
        self.is_open = True
        self.held = False
        self.extra_s = 0.0
        self.count = 0

    def send(self, deliver: Callable[..., object], *args: Any) -> None:
        """Have `deliver(*args)` called later."""
        self.count += 1
        delay_s = self._kernel.moment() * 4 + self.extra_s
        self._last_s = max(self._last_s + 1e-7, self._kernel.now_s + delay_s)
        self._kernel.loop.call_at(self._last_s, self._arrive, deliver, args)

    def _arrive(self, deliver: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.is_open:
            return
        if self.held or self._held:
            self._held.append((deliver, args))
        else:
            deliver(*args)

    def signal(self, notice: Callable[[], object]) -> None:
        """The end of the stream, which no lost message keeps back, but a partition does."""
        if self.held:
            self._signals.append(notice)
        else:
            self._kernel.after(self.extra_s + self._kernel.moment() * 4, notice)

    def hold(self) -> None:
        """Nothing arrives until `release`."""
        self.held = True

    def release(self) -> None:
        """What was held arrives, in order."""
        self.held = False
        while self._held and self.is_open and not self.held:
            deliver, args = self._held.popleft()
            deliver(*args)
        signals, self._signals = self._signals, []
        for notice in signals:
            notice()


class Call:
    """One call, both ends of it. The client's end is a gRPC call object; the server's end is `context`."""

    def __init__(self, channel: Channel, method: str, serialize: Any, parse: Any, timeout_s: float | None) -> None:
        kernel = channel.kernel
        self.kernel = kernel
        self.channel = channel
        self.method = method.rpartition("/")[2]
        self.up, self.down = Pipe(kernel), Pipe(kernel)
        self._thread = kernel.current
        if self._thread is not None:
            self._thread.call = self
        self._op = None if self._thread is None else self._thread.op
        self.process = kernel.process
        self.forged: list[bytes] = []
        """What neither side has said: what comes next on the stream may meet it, or what it has led to."""
        self.told: list[Any] = []
        """What the client said, as it said it."""
        self.heard: list[Any] = []
        self.deadline_s = None if timeout_s is None else kernel.now_s + timeout_s
        self._serialize, self._parse = serialize, parse
        self._messages: deque[bytes] = deque()
        self._waiters = Waiters(kernel)
        self._status: RpcError | bool | None = None
        self._cancelled_here = False
        self.context: Context | None = None
        self._timer = None if timeout_s is None else kernel.after(timeout_s, self._expire)
        channel.network.begin(self)

    # --- the client's end -----------------------------------------------------------------------------------------

    def pump(self, requests: Iterable[Any]) -> None:
        """Send all requests, then end this side: gRPC does it in a thread of its own."""
        for request in requests:
            if not self.active:
                return
            self.say(request)
        self.half_close()

    def say(self, request: Any) -> None:
        """Send one request."""
        data = self._serialize(request)
        self.told.append(request)
        if self.process.alive:
            self.up.send(self._reach, "message", data)

    def half_close(self) -> None:
        """Nothing more will be sent."""
        if self.process.alive and self.active:
            self.up.send(self._reach, "end", b"")

    def _reach(self, kind: str, data: bytes) -> None:
        if self.context is not None:
            self.context._take(kind, data)

    @property
    def op(self) -> Any:
        """What somebody asked for that it carries: a stream of transfers now one, now the other."""
        return self._thread.op if self.method in ("Put", "Get") and self._thread is not None else self._op

    @property
    def active(self) -> bool:
        """Whether the client's end has no status yet."""
        return self._status is None

    def is_active(self) -> bool:
        return self.active

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while True:
            if self._messages and not self._cancelled_here:
                message = self._parse(self._messages.popleft())
                self.heard.append(message)
                return message
            if self._status is True:
                raise StopIteration
            if isinstance(self._status, RpcError):
                raise self._status
            self._waiters.wait()

    def cancel(self) -> None:
        """The client gives it up."""
        if self.active:
            self._cancelled_here = True
            self._end(RpcError(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
            self._reset_server()

    def _expire(self) -> None:
        if self.active:
            self._end(RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))
            self._reset_server()

    def _end(self, status: RpcError | bool) -> None:
        if self._status is None:
            self._status = status
            self._waiters.wake()
            if self._timer is not None:
                self._timer.cancel()
            self.channel.network.drop(self)

    # --- what happens to it ---------------------------------------------------------------------------------------

    def reset(self, why: str = "the stream broke") -> None:
        """Break it: both ends notice, each in its own time; what is under way is lost, or some of it arrives."""
        random = self.kernel.random
        for pipe, notice in ((self.up, self._reach_end), (self.down, lambda: self._lose(why))):
            if random.random() < 0.5:
                pipe.is_open = False
            pipe.signal(notice)

    def _reset_server(self) -> None:
        self.up.signal(self._reach_end)

    def _reach_end(self) -> None:
        self.up.is_open = False
        if self.context is not None:
            self.context._break()

    def _lose(self, why: str) -> None:
        self.down.is_open = False
        self._end(RpcError(grpc.StatusCode.UNAVAILABLE, why, ()))

    # --- from the server's end ------------------------------------------------------------------------------------

    def _deliver(self, data: bytes) -> None:
        if self.active:
            self._messages.append(data)
            self._waiters.wake()

    def _deliver_status(self, status: RpcError | bool) -> None:
        self._end(status)


class Future:
    """A unary call under way."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    def result(self) -> Any:
        try:
            for answer in self._call:
                return answer
        except RpcError:
            if self._cancelled:
                raise grpc.FutureCancelledError from None
            raise
        raise AssertionError("a unary call ends with an answer or an error")


class _Multicallable:
    def __init__(self, channel: Channel, method: str, serialize: Any, parse: Any) -> None:
        self._channel, self._method, self._serialize, self._parse = channel, method, serialize, parse

    def _begin(self, timeout: float | None) -> Call:
        if self._channel.closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        return Call(self._channel, self._method, self._serialize, self._parse, timeout)


class UnaryUnary(_Multicallable):
    def future(self, request: Any, timeout: float | None = None) -> Future:
        call = self._begin(timeout)
        call.say(request)
        call.half_close()
        return Future(call)

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        return self.future(request, timeout).result()


class StreamStream(_Multicallable):
    def __call__(self, requests: Iterable[Any], timeout: float | None = None) -> Call:
        call = self._begin(timeout)
        Thread(self._channel.kernel, call.pump, "grpc", (requests,)).start()
        return call


class Channel:
    """grpc.Channel."""

    def __init__(self, network: Network, target: str) -> None:
        self.network = network
        self.kernel = network.kernel
        self.target = target
        self.process = network.kernel.process
        self.closed = False

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> UnaryUnary:
        return UnaryUnary(self, method, request_serializer, response_deserializer)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> StreamStream:
        return StreamStream(self, method, request_serializer, response_deserializer)

    def close(self) -> None:
        self.closed = True
        for call in list(self.network.calls):
            if call.channel is self:
                call.cancel()


class Context:
    """grpc.aio.ServicerContext: the server's end of a call."""

    def __init__(self, call: Call, server: Server, handler: Any) -> None:
        self._call = call
        self.method = call.method
        self._heard: tuple[Any, float] | None = None
        self.request_id = ""
        """Of the last offer or order that was read: a client that was lied to may be about another transfer already."""
        self._handler = handler
        self._kernel = call.kernel
        self._server = server
        self._inbox: deque[bytes | None] = deque()
        self._more = asyncio.Event()
        self._broken = False
        self.broken_s: float | None = None
        """When the stream broke, if it did."""
        self._over = False
        self.task: asyncio.Task[None] | None = None

    @property
    def op(self) -> Any:
        """See Call."""
        return self._call.op

    @property
    def heard_s(self) -> float | None:
        """When the offer of what it carries was read, until something is said to it."""
        return self._heard[1] if self._heard is not None and self._heard[0] is self.op else None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40312"

    def time_remaining(self) -> float | None:
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._kernel.now_s)

    async def read(self) -> Any:
        while not self._inbox:
            self._more.clear()
            await self._more.wait()
        data = self._inbox[0]
        if data is None:
            return grpc.aio.EOF  # type: ignore[attr-defined]
        self._inbox.popleft()
        message = self._handler.request_deserializer(data)
        if self.method == "Put" and message.source.HasField("offer"):
            self._heard = self.op, self._kernel.now_s
            self.request_id = message.source.offer.request_id
        elif self.method == "Get" and message.HasField("open"):
            self.request_id = message.open.request_id
        return message

    async def write(self, message: Any) -> None:
        data = self._handler.response_serializer(message)
        if self._kernel.random.random() < 0.1:
            await asyncio.sleep(self._kernel.moment())  # flow control
        if self._broken or self._server.process.alive is False:
            raise BrokenStream("the stream broke")
        self._heard = None
        self._server.network.watch(self._call, message)
        self._call.down.send(self._call._deliver, data)

    async def abort(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, bytes], ...]) -> None:
        self._finish(RpcError(code, details, trailers))
        raise grpc.aio.AbortError

    def _take(self, kind: str, data: bytes) -> None:
        if not self._broken:
            self._inbox.append(data if kind == "message" else None)
            self._more.set()

    def _finish(self, status: RpcError | bool) -> None:
        if not self._over:
            self._over = True
            if self._server.process.alive and not self._broken:
                self._call.down.send(self._call._deliver_status, status)

    def _break(self) -> None:
        """The client is gone: a pending read ends, and the handler is cancelled, in either order."""
        if self._broken or self._over:
            return
        self._broken = True
        self.broken_s = self._kernel.now_s
        if self._kernel.random.random() < 0.5:
            self._inbox.append(None)
            self._more.set()
        assert self.task is not None
        self._kernel.after(self._kernel.moment(), self.task.cancel)

    async def run(self) -> None:
        """The call, from its beginning to its end."""
        handler = self._handler
        try:
            if handler.request_streaming:
                await handler.stream_stream(_Requests(), self)
                self._finish(True)
            else:
                request = await self.read()
                if request is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return  # given up before it was asked
                await self.write(await handler.unary_unary(request, self))
                self._finish(True)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._finish(RpcError(grpc.StatusCode.CANCELLED, "the handler was cancelled", ()))
        except BrokenStream:
            pass
        except Exception as error:
            self._server.network.faults.append(f"{self._call.method} raised {error!r}")
            self._finish(RpcError(grpc.StatusCode.UNKNOWN, repr(error), ()))
        finally:
            self._over = True
            self._server.contexts.pop(self, None)
            self._server.network.drop(self._call)


class _Requests:
    """Stands for grpc.aio's own iterator of requests, which the service does not use."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        raise AssertionError("the service reads by itself")


class Server:
    """grpc.aio.Server."""

    def __init__(self, network: Network, interceptors: list[Any]) -> None:
        self.network = network
        self.process: Process = network.kernel.process
        self.contexts: dict[Context, None] = {}
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._target = ""
        network.all_servers.append(self)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            self._handlers |= {
                name.rpartition("/")[2]: item
                for name, item in handler._method_handlers.items()
                if name.startswith("/hurray_wire.")  # health and reflection are nobody's here
            }

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """They are the generic ones again."""

    def add_insecure_port(self, target: str) -> int:
        self._target = target
        return int(target.rpartition(":")[2])

    async def start(self) -> None:
        for interceptor in self._interceptors:
            for method, handler in self._handlers.items():
                details = _Details(f"/hurray_wire.v1.TransferService/{method}")

                async def continuation(_: Any, handler: Any = handler) -> Any:
                    return handler

                self._handlers[method] = await interceptor.intercept_service(continuation, details)
        self.network.servers[self._target] = self

    async def stop(self, grace_s: float) -> None:
        if self.network.servers.get(self._target) is self:
            del self.network.servers[self._target]
        tasks = [context.task for context in self.contexts if context.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for context in list(self.contexts):
            context._call._lose("the server stops")
            context._break()

    def take(self, call: Call) -> None:
        """A call begins."""
        kernel = self.network.kernel
        context = Context(call, self, self._handlers[call.method])
        call.context = context
        self.contexts[context] = None
        with kernel.within(self.process):
            context.task = kernel.loop.create_task(context.run())
        if call.deadline_s is not None:
            kernel.after(max(0.0, call.deadline_s - kernel.now_s) + kernel.moment(), context._break)


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method


class Network:
    """Who can be reached where, and every call that runs."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.servers: dict[str, Server] = {}
        self.all_servers: list[Server] = []
        self.calls: dict[Call, None] = {}
        self.faults: list[str] = []
        self.watchers: list[Callable[[Call, Any], None]] = []
        self.partitions: dict[tuple[Process, str], float] = {}

    def begin(self, call: Call) -> None:
        """A client begins a call: it reaches a server, or ends as gRPC ends it where nobody listens."""
        self.calls[call] = None
        if (call.channel.process, call.channel.target) in self.partitions:
            call.up.hold()
            call.down.hold()
        call.up.send(self._connect, call)

    def _connect(self, call: Call) -> None:
        server = self.servers.get(call.channel.target)
        if server is None or not server.process.alive:
            call._lose("failed to connect to all addresses; Connection refused")
        elif call.active:
            server.take(call)

    def drop(self, call: Call) -> None:
        """Forget a call that is over at both ends, and of which nothing is under way in a partition."""
        served = call.context is not None and not call.context._over
        if not call.active and not served and not call.up.held:
            self.calls.pop(call, None)

    def watch(self, call: Call, message: Any) -> None:
        """A server says something."""
        for watcher in self.watchers:
            watcher(call, message)

    def between(self, process: Process, target: str) -> list[Call]:
        """The calls of a client process to a server."""
        return [call for call in self.calls if call.process is process and call.channel.target == target]

    def cut(self, process: Process, target: str, why: str = "Connection reset by peer") -> None:
        """The connection breaks, and every stream with it."""
        for call in self.between(process, target):
            call.reset(why)

    def partition(self, process: Process, target: str, duration_s: float) -> None:
        """Nothing passes, and nobody is told; after the keepalive both sides notice."""
        pair = (process, target)
        if pair in self.partitions:
            return
        self.partitions[pair] = self.kernel.now_s + duration_s
        for call in self.between(process, target):
            call.up.hold()
            call.down.hold()
        self.kernel.after(duration_s, self._heal, pair)
        if duration_s > KEEPALIVE_S:
            self.kernel.after(KEEPALIVE_S + self.kernel.random.random(), self._notice, process, target)

    def _notice(self, process: Process, target: str) -> None:
        for call in self.between(process, target):
            call.down.is_open = False
            call.up.held = False
            call._reach_end()
            call._lose("keepalive watchdog timeout")

    def _heal(self, pair: tuple[Process, str]) -> None:
        del self.partitions[pair]
        for call in self.between(*pair):
            call.up.release()
            call.down.release()
            self.drop(call)

    def lose_client(self, process: Process) -> None:
        """A client process died: its sockets are closed."""
        for call in list(self.calls):
            if call.process is process:
                call._end(RpcError(grpc.StatusCode.CANCELLED, "the client died", ()))
                call._reset_server()

    def lose_server(self, process: Process) -> None:
        """A server process died."""
        for target, server in list(self.servers.items()):
            if server.process is process:
                del self.servers[target]
        for call in list(self.calls):
            if call.context is not None and call.context._server.process is process:
                self.kernel.after(self.kernel.moment(), call._lose, "Socket closed")
