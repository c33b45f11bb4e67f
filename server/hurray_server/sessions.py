"""Connected peers: whose data plane the mover has an endpoint to, for as long as the peer's Session stream lives."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from hurray_server.firewall import Address, Firewall
from hurray_server.mover_link import MoverLink
from hurray_server.principal import Principal
from hurray_server.shares import Share
from hurray_wire.errors import (
    CapabilityMismatch,
    DataPlaneUnavailable,
    HurrayError,
    InvalidRequest,
    PeerUnavailable,
)
from hurray_wire.messages import PROTOCOL_VERSION, check_transports, choose_transport
from hurray_wire.transport.tls import EXPECTED_IDENTITY
from hurray_wire.v1 import transfer_pb2 as pb

_log = structlog.get_logger("hurray.sessions")


@dataclass(eq=False)
class Session:
    """One peer, and the kinds of transport to it, best first. `ended` is done, with the reason, when it is over without
    the peer having asked for it."""

    principal: Principal
    incarnation: int
    """By which the peer names it."""
    peer: int
    """By which the mover names it: what one tenant calls its own says nothing of another's."""
    ended: asyncio.Future[HurrayError] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_open: bool = False
    transports: tuple[str, ...] = ()
    admitted: Address | None = None
    """What the firewall lets in for it."""

    def end(self, error: HurrayError) -> None:
        """It is over. Nothing happens the second time."""
        if not self.ended.done():
            self.ended.set_result(error)


class Sessions:
    """Sessions by tenant and incarnation of the peer: one each. `divided`: see Share. `data_identity`: whose the
    certificate of this node's tls data connections is. `firewall`: keeps peers without a session away from UCX."""

    def __init__(
        self,
        link: MoverLink,
        *,
        max_sessions: int,
        divided: bool = False,
        data_identity: Callable[[], str] = str,
        firewall: Firewall | None = None,
    ) -> None:
        self._link = link
        self._firewall = firewall
        self._share = Share("sessions", "max_sessions", max_sessions, divided=divided, retry_after_s=1.0)
        self._data_identity = data_identity
        self._sessions: dict[tuple[str, int], Session] = {}
        self._by_peer: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, principal: Principal, hello: pb.Hello) -> tuple[Session, pb.Hello]:
        """Connect to a peer; the session, and what to answer.

        Raises CapabilityMismatch (version, transports, settings), LimitExceeded, PeerUnavailable, DataPlaneUnavailable.
        """
        _check_hello(hello)
        mover = self._link.require_up("session")
        transports = self._link.transports
        offered = [transport.kind for transport in hello.transports]
        kinds = [ours.kind for ours in transports]
        self._require_usable(kinds, offered)
        choose_transport(kinds, offered)
        session = self._register(principal, hello.incarnation)
        try:
            if self._firewall is not None and "ucx" in kinds and "ucx" in offered:
                session.admitted = await self._firewall.admit(principal.address)
                if session.ended.done():
                    raise session.ended.result()
            opened = await self._link.open_peer(session.peer, _verified(hello.transports, principal))
        except BaseException:
            await self.close(session, abort=True)
            raise
        session.is_open = True
        session.transports = tuple(ours.kind for ours in transports if ours.kind in opened)
        if "ucx" not in opened:
            self._shut_out(session)
        _log.info(
            "session opened",
            peer=f"{session.peer:016x}",
            incarnation=f"{hello.incarnation:016x}",
            tenant=principal.tenant,
            address=principal.address,
            transports=session.transports,
        )
        return session, pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            incarnation=mover.incarnation,
            # No address for what it does not use: some hold a secret. Those that did not open it refuses by itself.
            transports=[ours for ours in transports if ours.kind in offered],
            identity=self._data_identity(),
        )

    def _require_usable(self, kinds: Sequence[str], offered: Sequence[str]) -> None:
        """Raise DataPlaneUnavailable for a peer that could connect if only this side's transport were usable."""
        unusable = self._link.usage.unusable
        if not set(kinds).intersection(offered) and (waiting := [kind for kind in offered if kind in unusable]):
            raise DataPlaneUnavailable(
                f"the node cannot use {waiting[0]} at the moment: {unusable[waiting[0]]}",
                retry_after_s=1.0,
                stage="session",
                transport=waiting[0],
            )

    def find(self, principal: Principal, incarnation: int) -> Session:
        """The open session of a peer. Raises PeerUnavailable: also where another tenant has one of that name."""
        session = self._sessions.get((principal.tenant, incarnation))
        if session is None or not session.is_open:
            raise PeerUnavailable("this process has no open session here", stage="session", peer=f"{incarnation:016x}")
        return session

    async def close(self, session: Session, *, abort: bool) -> None:
        """End it and its connection; one that was replaced or lost meanwhile has none."""
        if self._forget(session):
            _log.info("session closed", peer=f"{session.peer:016x}", tenant=session.principal.tenant, aborted=abort)
            closed = self._link.close_peer(session.peer, abort=abort)
            closed.add_done_callback(lambda _: self._shut_out(session))
            if not abort:
                await closed
        else:
            self._shut_out(session)

    def lose(self, peer: int, error: HurrayError) -> None:
        """The mover lost the connection to a peer."""
        session = self._by_peer.get(peer)
        if session is not None and self._forget(session):
            _log.warning("session lost", peer=f"{peer:016x}", tenant=session.principal.tenant, error=str(error))
            session.end(error)

    def end_all(self, error: HurrayError) -> None:
        """Every session is over. Connections are closed as their streams end."""
        for session in list(self._sessions.values()):
            session.end(error)

    def lose_all(self, error: HurrayError) -> None:
        """The mover is gone, and every connection with it."""
        for peer in list(self._by_peer):
            self.lose(peer, error)

    def _forget(self, session: Session) -> bool:
        """Whether it was the current one of its name."""
        if self._by_peer.get(session.peer) is not session:
            return False
        del self._by_peer[session.peer]
        del self._sessions[session.principal.tenant, session.incarnation]
        self._share.give_back(session.principal.tenant)
        return True

    def _shut_out(self, session: Session) -> None:
        """Nothing of its connection is left."""
        address, session.admitted = session.admitted, None
        if self._firewall is not None and address is not None:
            self._firewall.release(address)

    def _register(self, principal: Principal, incarnation: int) -> Session:
        name = principal.tenant, incarnation
        known = self._sessions.get(name)
        if known is not None:
            if not known.is_open:
                raise PeerUnavailable("a session of this process is being opened", stage="session")
            known.end(PeerUnavailable("this process opened another session", stage="session"))
        else:
            self._share.take(principal.tenant)
        peer = known.peer if known is not None else uuid.uuid4().int >> 64
        session = self._sessions[name] = self._by_peer[peer] = Session(principal, incarnation, peer)
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
    check_transports([transport.kind for transport in hello.transports])


def _verified(transports: Iterable[pb.Transport], principal: Principal) -> list[pb.Transport]:
    """Parameters of a peer, with the identity that its tls connection must show: the caller's, whatever it stated."""
    checked = []
    for transport in transports:
        verified = pb.Transport()
        verified.CopyFrom(transport)
        verified.settings.pop(EXPECTED_IDENTITY, None)
        if transport.kind == "tls" and principal.identity is not None:
            verified.settings[EXPECTED_IDENTITY] = principal.identity
        checked.append(verified)
    return checked
