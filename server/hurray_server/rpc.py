"""How calls begin and end: who calls is found out, what a handler raises becomes a status, the audit log is told."""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn, Protocol, Self, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from structlog.contextvars import bind_contextvars

from hurray_server.audit import Audit, Decision
from hurray_server.identity import Callers
from hurray_server.shares import Share
from hurray_server.tally import Tally
from hurray_wire.errors import Cancelled, HurrayError, InternalError, ProtocolViolation
from hurray_wire.status import STATUS_TRAILER, cut_text, to_status
from hurray_wire.v1 import transfer_pb2

_log = structlog.get_logger("hurray.service")

_METHODS: Final = f"/{transfer_pb2.DESCRIPTOR.services_by_name['TransferService'].full_name}/"

LOGGED_MAX_BYTES: Final = 2048
"""Of an error, which may quote a peer."""

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class Answering(Protocol):
    """A servicer whose handlers are decorated with `answers`."""

    @property
    def callers(self) -> Callers:
        """Who calls is found out by this."""

    @property
    def audit(self) -> Audit:
        """Is told of every call."""

    @property
    def tally(self) -> Tally:
        """Counts those that come to nothing."""

    @property
    def calls(self) -> Share:
        """Those that run."""


def answers(method: Callable[..., Awaitable[Any]]) -> Callable[[Any, Any, Context], Awaitable[Any]]:
    """Find out who calls, end the call with the status of what its handler raised, and tell the audit log. A fault of
    ours is logged and told by its log id only."""
    action = method.__name__.lower()

    @functools.wraps(method)
    async def handler(self: Answering, request: object, context: Context) -> object:
        # Each call is a task of its own, and so is its logging context.
        bind_contextvars(method=method.__name__, address=context.peer())
        decision = Decision(action, context.peer())

        async def work() -> object:
            if isinstance(request, _Malformed):
                raise not_a_message()
            asked = _Requests(context) if isinstance(request, AsyncIterator) else request
            with self.calls.taken(decision.caller.tenant):
                return await method(self, asked, context, decision)

        answer, error = await judge(self, decision, context, work)
        if error is not None:
            await abort(context, error)
        return answer

    return handler


async def judge(
    servicer: Answering, decision: Decision, context: Context, work: Callable[[], Awaitable[T]]
) -> tuple[T | None, HurrayError | None]:
    """Find out who calls, do the work, tell the audit log, count a refusal: what it returned, or raised. A fault of
    ours is logged and told by its log id only."""
    ended: HurrayError | None = Cancelled("the caller went away")
    try:
        decision.principal = servicer.callers.principal(context)
        answer = await work()
        ended = None
        return answer, None
    except HurrayError as error:
        _log.info("call failed", reason=error.reason, error=cut_text(str(error), LOGGED_MAX_BYTES))
        # Without its traceback: it ends in an exception that the call keeps, in a cycle, and with it all it refers to.
        ended = error.with_traceback(None)
        _count(servicer.tally, decision, ended)
        return None, ended
    except Exception:
        log_id = uuid.uuid4().hex[:12]
        _log.exception("internal error", log_id=log_id)
        ended = InternalError("a fault of the node; its log has the cause", log_id=log_id)
        _count(servicer.tally, decision, ended)
        return None, ended
    finally:
        if ended is not None or decision.action != "getnode":  # which everyone asks, often, and who has an identity may
            # After the answer is on its way: nobody waits for a log.
            asyncio.get_running_loop().call_soon(servicer.audit.record, decision, ended)


def _count(tally: Tally, decision: Decision, error: HurrayError) -> None:
    if not decision.begun:
        tally.refuse(decision.action, error)


async def abort(context: Context, error: HurrayError) -> NoReturn:
    """End the call with this error."""
    code, status = getattr(grpc.StatusCode, error.code), to_status(error)
    await context.abort(code, status.message, ((STATUS_TRAILER, status.SerializeToString()),))
    raise AssertionError("abort raises")


class _Requests:
    """The messages of a stream. gRPC's own iterator keeps the last one in a cycle with its call, until some collection
    of garbage: a hostile offer takes hundreds of megabytes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise StopAsyncIteration
        return message


class _Malformed:
    """Stands for a request that could not be parsed."""


class MalformedRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Lets a request that cannot be parsed reach its handler, which refuses it by name: gRPC would log it as a fault of
    this program. Requests of streams are parsed where they are read."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or not handler_call_details.method.startswith(_METHODS):
            return handler

        def parse(data: bytes) -> object:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return _Malformed()

        return grpc.unary_unary_rpc_method_handler(handler.unary_unary, parse, handler.response_serializer)


class OtherServices(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Health and reflection answer whoever may call the service itself: a certificate that is a tenant's."""

    def __init__(self, callers: Callers, audit: Audit, calls: Share) -> None:
        self._callers = callers
        self._audit = audit
        self._calls = calls

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method.startswith(_METHODS):
            return handler
        requests = "stream" if handler.request_streaming else "unary"
        responses = "stream" if handler.response_streaming else "unary"
        behave = getattr(handler, f"{requests}_{responses}")

        async def answer(request: Any, context: Context) -> Any:
            async with self._admitted(method, context):
                return await behave(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._admitted(method, context):
                async for message in behave(request, context):
                    yield message

        guarded = stream if inspect.isasyncgenfunction(behave) else answer
        make = getattr(grpc, f"{requests}_{responses}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        try:
            tenant = self._callers.principal(context).tenant
            self._calls.take(tenant)
        except HurrayError as error:
            _log.info("call failed", method=method, reason=error.reason, error=str(error))
            self._audit.record(Decision(method, context.peer()), error)
            await abort(context, error)
        try:
            yield
        finally:
            self._calls.give_back(tenant)


def not_a_message() -> ProtocolViolation:
    return ProtocolViolation("not a message of this service", field="message", offered="bytes that cannot be parsed")
