"""The connection to one node: its channel, the session between the two data planes, and what is asked of it alone."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Final, TypeVar

import grpc

from hurray_client.call import Alarms, Call
from hurray_client.channel import LOOK_S, Channels
from hurray_client.config import ClientConfig
from hurray_client.info import NodeInfo
from hurray_client.plane import LocalDataPlane
from hurray_client.streams import Streams
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import (
    Cancelled,
    CapabilityMismatch,
    DataPlaneUnavailable,
    HurrayError,
    InternalError,
    InvalidRequest,
    Misuse,
    NodeDraining,
    OutcomeUnknown,
    PeerUnavailable,
    ProtocolViolation,
    Unauthenticated,
)
from hurray_wire.log import get_logger
from hurray_wire.messages import PROTOCOL_VERSION, read_transport, to_transport
from hurray_wire.status import STATUS_TRAILER, from_trailers
from hurray_wire.transport import ucx, ucx_devices
from hurray_wire.transport.base import TransportParameters
from hurray_wire.transport.tls import EXPECTED_IDENTITY
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub

_log = get_logger("hurray.client")

BYE_S: Final = 2.0
"""How long an orderly close may take."""

PROOF_S: Final = 1.0
"""How long a node of this host may take to show that shared memory reaches it; it takes about a millisecond."""

STAGING: Final = "staging"
"""The stage of a small put before its offer: what fails there is this process's, whatever its kind."""

_BEFORE_ANSWER: Final = frozenset({None, STAGING, "connect", "session", "offer", "retry", "drain"})
"""Stages of an attempt in which the node has not yet said what became of an earlier one; None: before it began; drain:
the data plane ended under it."""

UNREACHED_TRIES: Final = 3
"""Sessions in a row that reach a node's control plane and by no transport its data plane, before that is taken for what
it is. A data plane that dies in the middle of connecting looks the same, once."""

_BACKOFF_FIRST_S: Final = 0.05
_BACKOFF_MAX_S: Final = 1.0

T = TypeVar("T")


class TryAgain(Exception):
    """An attempt failed before the node had answered it: another may work."""

    def __init__(self, error: HurrayError) -> None:
        super().__init__(str(error))
        self.error = error


def rpc_error(error: grpc.RpcError, *, stage: str, peer: str) -> HurrayError:
    """The error of a call that failed. One that its caller cancelled is known before: else it is the node that went."""
    code: grpc.StatusCode = error.code()
    if code is grpc.StatusCode.CANCELLED and not has_details(error):
        return PeerUnavailable("the call was cut", stage=stage, peer=peer)
    return from_trailers(code.name, error.details() or "", _trailers(error), stage=stage, peer=peer)


def has_details(error: grpc.RpcError) -> bool:
    """Whether the node itself said what is wrong, not gRPC."""
    return any(name == STATUS_TRAILER for name, _ in _trailers(error))


def _trailers(error: grpc.RpcError) -> tuple[tuple[str, str | bytes], ...]:
    trailers: Any = error.trailing_metadata()
    return tuple(trailers or ())


class _State(Enum):
    OPENING = "opening"
    OPEN = "open"
    LOST = "lost"


class Session:
    """One Session stream and the data-plane connection that lives and dies with it. Its thread opens and keeps it."""

    def __init__(self, node: Node) -> None:
        self.state = _State.OPENING
        self.error: HurrayError | None = None
        self.peer = 0
        self.info: NodeInfo
        self.plane: DataPlane
        self.transports: tuple[str, ...] = ()
        """Kinds that connect it, best first."""
        self.left_out: Mapping[str, HurrayError] = {}
        """Kinds that were tried and do not, and why."""
        self.is_passing = True
        self._node = node
        self._said_bye = False
        self._outbound: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        self._stream: Any = None
        self._stub: TransferServiceStub
        self.thread = threading.Thread(target=self._run, name=f"hurray-session-{node.target}", daemon=True)

    def end(self) -> None:
        """Close it: with Bye where it is open and the node answers, else at once."""
        if self.state is _State.OPEN:
            self.plane.leave_peer(self.peer)
            self._outbound.put(pb.SessionRequest(bye=pb.Bye()))
            self.thread.join(BYE_S)
        self._abort()

    def _abort(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def _run(self) -> None:
        with self._node.channels.use() as self._stub:
            self._run_on_channel()

    def _run_on_channel(self) -> None:
        opened = False
        try:
            self._open()
            opened = True
            self._node.settle(self, _State.OPEN, None)
            error = self._keep()
        except grpc.RpcError as failure:
            error = rpc_error(failure, stage="connect", peer=self._node.target)
        except HurrayError as failure:
            error = failure
        except TimeoutError:
            error = PeerUnavailable("the data plane did not connect in time", stage="connect", peer=self._node.target)
        except Exception:
            error = self._fault()
        self._outbound.put(None)
        if not self._said_bye:
            self._abort()
        if self.peer:
            self._node.plane.unwatch(self.peer, self._lost)
        if opened:
            self.plane.close_peer(self.peer, abort=not self._said_bye)
        unreached = isinstance(error, CapabilityMismatch) and bool(self.peer) and not opened
        if unreached and (missing := self._missing()):
            error = _cannot_use(missing)
        self.is_passing &= is_passing(error) or (unreached and self._node.count_unreached() < UNREACHED_TRIES)
        self._node.settle(self, _State.LOST, error)

    def _unusable(self) -> dict[str, str]:
        """The node's transports that cannot be used at the moment, there or from this process, and why."""
        unusable = {kind: f"at the node, {why}" for kind, why in self.info.unusable_transports.items()}
        here = ucx_devices.why_unusable(self._node.config.ucx.net_devices)
        if here is not None and ("ucx" in self.info.transports or "ucx" in unusable):
            unusable["ucx"] = here
        return unusable

    def _missing(self) -> dict[str, str]:
        """Those of them by which this client would connect."""
        unusable = self._unusable()
        wanted = _wanted(_known_kinds(self.info.transports, unusable), self._node.config)
        return {kind: why for kind, why in unusable.items() if kind in wanted}

    def _fault(self) -> HurrayError:
        """What no status explains: the channel was closed meanwhile, or a fault of ours."""
        if self._node.closed:
            return Misuse("the client is closed")
        log_id = uuid.uuid4().hex[:12]
        _log.exception("internal error", log_id=log_id, node=self._node.target)
        return InternalError("a fault of this program; its log has the cause", log_id=log_id, stage="connect")

    def _open(self) -> None:
        node, timeout_s = self._node, self._node.config.connect_timeout_s
        self.info = node.ask(timeout_s)
        kinds = _choose_transports(self.info.transports, node.config, self._unusable())
        self.is_passing = False  # what keeps this process's own data plane from starting stays
        self.plane, own = node.plane.start(kinds)
        self.is_passing = True
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            incarnation=self.plane.incarnation,
            transports=[to_transport(item) for item in own],
        )
        self._outbound.put(pb.SessionRequest(hello=hello))
        self._stream = self._stub.Session(iter(self._outbound.get, None))
        late = node.alarms.after(timeout_s, self._abort)
        try:
            welcome = self._read_welcome(next(self._stream, None))
            theirs = [_known(read_transport(item), welcome) for item in welcome.transports if item.kind in kinds]
            self.peer = welcome.incarnation
            node.plane.watch(self.peer, self._lost)
            connected = self.plane.open_peer(self.peer, theirs, proof_s=PROOF_S).result(timeout_s)
            self.transports = tuple(kind for kind in kinds if kind in connected.kinds)
            self.left_out = connected.left_out
        finally:
            late.cancel()

    def _read_welcome(self, response: pb.SessionResponse | None) -> pb.Hello:
        if response is None or response.WhichOneof("message") != "welcome":
            raise ProtocolViolation(
                "the node did not answer Hello",
                stage="connect",
                offered="nothing" if response is None else response.WhichOneof("message"),
                required="welcome",
            )
        check_version(response.welcome.protocol_version)
        return response.welcome

    def _keep(self) -> HurrayError:
        """Stay until the stream ends; why it did."""
        for response in self._stream:
            if response.WhichOneof("message") == "bye":
                self._said_bye = True
                return Misuse("the client is closed")
        return PeerUnavailable("the node ended the session", stage="connect", peer=self._node.target)

    def _lost(self, error: HurrayError) -> None:
        _log.warning("data-plane connection lost", node=self._node.target, error=str(error))
        self._abort()


def _known(parameters: TransportParameters, welcome: pb.Hello) -> TransportParameters:
    """With the identity that the node's data plane must show on its tls connection: the node itself, which gRPC has
    verified, has just said it. Raises ProtocolViolation where it did not."""
    if parameters.kind != "tls":
        return parameters
    if not welcome.identity:
        raise ProtocolViolation("the node does not say who its data plane is", field="identity", offered="nothing")
    return replace(parameters, settings={**parameters.settings, EXPECTED_IDENTITY: welcome.identity})


def _wanted(known: Sequence[str], config: ClientConfig) -> tuple[str, ...]:
    """By which of the node's transports, best first, this client connects."""
    if config.transports is not None:
        return tuple(kind for kind in config.transports if kind in known)
    # One way over the network is enough, and UCX is loaded into no process that can do without. With certificates
    # nothing is used unasked that would do without them.
    usable = {"tcp"} if config.tls is None else {"tls"}
    if (config.tls is None or config.ucx.trusted) and "ucx" in known and ucx.is_installed():
        usable.add("ucx")
    network = next((kind for kind in known if kind in usable), None)
    return tuple(kind for kind in known if kind in ("shm", network))


def _choose_transports(
    offered: Sequence[str], config: ClientConfig, unusable: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """By which transports to connect, best first. `unusable`: those of the node that cannot be used, and why. Raises
    CapabilityMismatch, DataPlaneUnavailable."""
    known = _known_kinds(offered, unusable)
    if not known:
        raise DataPlaneUnavailable("the data plane of the node is not up", retry_after_s=1.0, stage="connect")
    wanted = _wanted(known, config)
    chosen = tuple(kind for kind in wanted if kind not in unusable)
    if wanted and not chosen:
        raise _cannot_use({kind: unusable[kind] for kind in wanted})
    if not chosen:
        raise CapabilityMismatch(
            "no transport in common",
            field="transports",
            offered=", ".join(known),
            required="one of " + ", ".join(config.transports or ("shm", "tcp" if config.tls is None else "tls")),
        )
    return chosen


def _known_kinds(offered: Sequence[str], unusable: Mapping[str, str]) -> list[str]:
    """All of the node's transports, those last that cannot be used."""
    return [*(kind for kind in offered if kind not in unusable), *unusable]


def _cannot_use(unusable: Mapping[str, str]) -> DataPlaneUnavailable:
    reasons = "; ".join(f"{kind} cannot be used: {why}" for kind, why in unusable.items())
    return DataPlaneUnavailable(reasons, retry_after_s=1.0, stage="connect")


def check_version(version: int) -> None:
    """Raise CapabilityMismatch unless the node speaks this client's version of the protocol."""
    if version != PROTOCOL_VERSION:
        raise CapabilityMismatch(
            "the node speaks another version of the protocol",
            field="protocol_version",
            offered=version,
            required=PROTOCOL_VERSION,
        )


class Node:
    """See the module. Any number of threads may use it."""

    def __init__(self, target: str, config: ClientConfig, plane: LocalDataPlane) -> None:
        if not target or any(character.isspace() for character in target):
            raise InvalidRequest("not an address of a node", field="target", offered=repr(target), required="host:port")
        self.target: Final = target
        self.config: Final = config
        self.plane: Final = plane
        self.alarms: Final = Alarms()
        self.channels: Final = Channels(target, config)
        self.streams: Final = Streams(self.channels, self.alarms)
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._version_checked = False
        self._unreached_count = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def session(self, call: Call) -> Session:
        """The open session, opened now if there is none.

        Raises TryAgain where another attempt may work, DeadlineExceeded and Cancelled of the call (stage "connect"),
        and what makes the two sides incompatible.
        """
        session = self._session
        if session is not None and session.state is _State.OPEN:
            call.left_s("connect")
            return session
        with self._changed:
            if self._closed:
                raise Misuse("the client is closed")
            session = self._session
            if session is None or session.state is _State.LOST:
                session = self._session = Session(self)
                session.thread.start()
        with call.on_cancel(self._wake), self._changed:
            while session.state is _State.OPENING:
                self._changed.wait(call.left_s("connect"))
            if session.state is _State.OPEN:
                call.left_s("connect")
                return session
        assert session.error is not None
        raise TryAgain(session.error) if session.is_passing else _again(session.error)

    def check(self, call: Call) -> None:
        """Make sure, once, that the node speaks this client's version of the protocol. Raises as `ask` does."""
        if not self._version_checked:
            self.ask(call.left_s("connect"), call)

    def unary(self, call: Call, stage: str, method: str, request: object) -> Any:
        """The answer to one unary call. Raises the node's error, or TryAgain where gRPC found no node."""
        with self.channels.use() as stub:
            future = getattr(stub, method).future(request, timeout=call.left_s(stage))
            with call.on_cancel(future.cancel):
                try:
                    return future.result()
                except grpc.FutureCancelledError:
                    raise Cancelled("the call was cancelled", stage=stage) from None
                except grpc.RpcError as error:
                    raise self._failure(error, call, stage) from None

    def ask(self, timeout_s: float, call: Call | None = None) -> NodeInfo:
        """What the node is. Raises CapabilityMismatch for a version of the protocol that this client does not speak,
        TryAgain for a node that cannot be reached."""
        try:
            with self.channels.use() as stub:
                answer: pb.GetNodeResponse = stub.GetNode(pb.GetNodeRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error, call, "connect") from None
        check_version(answer.protocol_version)
        self._version_checked = True
        return NodeInfo.from_proto(answer)

    def _failure(self, error: grpc.RpcError, call: Call | None, stage: str) -> Exception:
        if call is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not has_details(error):
            return call.late(stage)
        failure = rpc_error(error, stage=stage, peer=self.target)
        has_time = call is None or call.can_wait(LOOK_S)
        if failure.code == "UNAVAILABLE" and not has_details(error) and has_time:
            why = self.channels.why_no_connection()
            if why is not None:
                return Unauthenticated(why, stage=stage, peer=self.target)
        return TryAgain(failure) if call is not None and is_passing(failure) else failure

    def close(self) -> None:
        """End the session in an orderly way, then the channel. Transfers have ended before. Safe to call twice."""
        with self._changed:
            self._closed = True
            session, self._session = self._session, None
        self.streams.close()
        if session is not None:
            session.end()
        self.alarms.close()
        self.channels.close()
        if session is not None:
            session.thread.join()

    def settle(self, session: Session, state: _State, error: HurrayError | None) -> None:
        """The session's thread says what became of it."""
        with self._changed:
            session.state, session.error = state, error
            if state is _State.OPEN:
                self._unreached_count = 0
            self._changed.notify_all()

    def count_unreached(self) -> int:
        """One more session reached the control plane only; how many in a row."""
        with self._changed:
            self._unreached_count += 1
            return self._unreached_count

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def is_passing(error: HurrayError) -> bool:
    """Whether the same may work a little later."""
    return error.code == "UNAVAILABLE" and not isinstance(error, NodeDraining)


def _again(error: HurrayError) -> HurrayError:
    """The error anew: one that many threads raise must not gather the traceback of all of them."""
    copy = type(error)(error.message, retry_after_s=error.retry_after_s)
    copy.details.update(error.details)
    return copy


def retrying(call: Call, retry_s: float, attempt: Callable[[], T]) -> T:
    """What `attempt` returns; while it raises TryAgain it is run again, for `retry_s` within the budget of the call.

    An outcome that is not known is worth the whole budget: only another attempt with the same request id tells. Where
    none comes far enough to tell, it stays unknown: OutcomeUnknown is raised, not what kept the last one.
    """
    unknown: OutcomeUnknown | None = None
    give_up_at: float | None = None
    delay_s = _BACKOFF_FIRST_S
    while True:
        try:
            return attempt()
        except OutcomeUnknown as error:
            unknown = error
            failure: HurrayError = error
        except TryAgain as again:
            failure = unknown or _again(again.error)
        except HurrayError as error:
            ended_here = (
                error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
                or isinstance(error, Misuse)
                or error.stage == STAGING
            )
            told_nothing = ended_here and error.stage in _BEFORE_ANSWER
            # Nor does nonsense tell, whenever it comes.
            if unknown is None or not (told_nothing or isinstance(error, ProtocolViolation)):
                raise
            raise unknown from None
        pause_s = max(failure.retry_after_s or 0.0, delay_s * random.uniform(0.5, 1.0))  # noqa: S311 -- no secret
        if give_up_at is None:
            give_up_at = time.monotonic() + retry_s
        if call.cancelled and unknown is None:
            call.left_s(failure.stage or "connect")
        if (unknown is None and time.monotonic() + pause_s > give_up_at) or not call.can_wait(pause_s):
            raise failure
        call.pause(pause_s)
        delay_s = min(2 * delay_s, _BACKOFF_MAX_S)
