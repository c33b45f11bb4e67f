"""Connected peers: whose data plane the mover has an endpoint to, for as long as the peer's Session stream lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

import structlog

from hurray_server.mover_link import MoverLink
from hurray_server.principal import Principal
from hurray_wire.errors import (
    CapabilityMismatch,
    HurrayError,
    InvalidRequest,
    LimitExceeded,
    PeerUnavailable,
    PermissionDenied,
)
from hurray_wire.messages import PROTOCOL_VERSION, choose_transport
from hurray_wire.v1 import transfer_pb2 as pb

_log = structlog.get_logger("hurray.sessions")

_MAX_TRANSPORTS: Final = 16


@dataclass(eq=False)
class Session:
    """One peer, and the kinds of transport to it, best first. `ended` is done, with the reason, when it is over without
    the peer having asked for it."""

    principal: Principal
    incarnation: int
    ended: asyncio.Future[HurrayError] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_open: bool = False
    transports: tuple[str, ...] = ()

    def end(self, error: HurrayError) -> None:
        """It is over. Nothing happens the second time."""
        if not self.ended.done():
            self.ended.set_result(error)


class Sessions:
    """Sessions by the incarnation of the peer: one each."""

    def __init__(self, link: MoverLink, *, max_sessions: int) -> None:
        self._link = link
        self._max_sessions = max_sessions
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, principal: Principal, hello: pb.Hello) -> tuple[Session, pb.Hello]:
        """Connect to a peer; the session, and what to answer.

        Raises CapabilityMismatch (version, transports, settings), PermissionDenied, LimitExceeded, PeerUnavailable,
        DataPlaneUnavailable.
        """
        _check_hello(hello)
        mover = self._link.require_up("session")
        offered = [transport.kind for transport in hello.transports]
        choose_transport([ours.kind for ours in mover.transports], offered)
        session = self._register(principal, hello.incarnation)
        try:
            opened = await self._link.open_peer(hello.incarnation, hello.transports)
        except BaseException:
            await self.close(session, abort=True)
            raise
        session.is_open = True
        session.transports = tuple(ours.kind for ours in mover.transports if ours.kind in opened)
        _log.info(
            "session opened",
            peer=f"{hello.incarnation:016x}",
            address=principal.address,
            transports=session.transports,
        )
        return session, pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            incarnation=mover.incarnation,
            # No address for what it does not use: some hold a secret. Those that did not open it refuses by itself.
            transports=[ours for ours in mover.transports if ours.kind in offered],
        )

    def find(self, principal: Principal, incarnation: int) -> Session:
        """The open session of a peer. Raises PeerUnavailable, PermissionDenied."""
        session = self._sessions.get(incarnation)
        if session is None or not session.is_open:
            raise PeerUnavailable("this process has no open session here", stage="session", peer=f"{incarnation:016x}")
        _check_owner(session, principal)
        return session

    async def close(self, session: Session, *, abort: bool) -> None:
        """End it and its connection; one that was replaced or lost meanwhile has none."""
        if self._sessions.get(session.incarnation) is session:
            del self._sessions[session.incarnation]
            _log.info("session closed", peer=f"{session.incarnation:016x}", aborted=abort)
            closed = self._link.close_peer(session.incarnation, abort=abort)
            if not abort:
                await closed

    def lose(self, incarnation: int, error: HurrayError) -> None:
        """The mover lost the connection to a peer."""
        session = self._sessions.pop(incarnation, None)
        if session is not None:
            _log.warning("session lost", peer=f"{incarnation:016x}", error=str(error))
            session.end(error)

    def end_all(self, error: HurrayError) -> None:
        """Every session is over. Connections are closed as their streams end."""
        for session in list(self._sessions.values()):
            session.end(error)

    def lose_all(self, error: HurrayError) -> None:
        """The mover is gone, and every connection with it."""
        for incarnation in list(self._sessions):
            self.lose(incarnation, error)

    def _register(self, principal: Principal, incarnation: int) -> Session:
        known = self._sessions.get(incarnation)
        if known is not None:
            _check_owner(known, principal)
            if not known.is_open:
                raise PeerUnavailable("a session of this process is being opened", stage="session")
            known.end(PeerUnavailable("this process opened another session", stage="session"))
        elif len(self._sessions) >= self._max_sessions:
            raise LimitExceeded(
                "this node has as many sessions as it may",
                retry_after_s=1.0,
                field="max_sessions",
                offered=len(self._sessions) + 1,
                required=f"<= {self._max_sessions}",
            )
        session = self._sessions[incarnation] = Session(principal, incarnation)
        return session


def _check_hello(hello: pb.Hello) -> None:
    if hello.protocol_version != PROTOCOL_VERSION:
        raise CapabilityMismatch(
            "another version of the protocol",
            field="protocol_version",
            offered=hello.protocol_version,
            required=PROTOCOL_VERSION,
        )
    if hello.incarnation == 0:
        raise InvalidRequest("no incarnation", field="incarnation", offered=0, required="a random value")
    if len(hello.transports) > _MAX_TRANSPORTS:
        raise LimitExceeded(
            "too many transports", field="transports", offered=len(hello.transports), required=f"<= {_MAX_TRANSPORTS}"
        )


def _check_owner(session: Session, principal: Principal) -> None:
    if session.principal.tenant != principal.tenant:
        raise PermissionDenied("the session of another tenant", peer=f"{session.incarnation:016x}")
