"""The peers of a data plane: its transports, and the connections to each peer by each of them.

Belongs to the data-plane thread. One transport lost to a peer is the whole peer lost: what is half connected is slow in
silence. Only one that has never reached the peer, and need not, is left out alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from hurray_wire.errors import CapabilityMismatch, DataPlaneUnavailable, HurrayError, PeerUnavailable
from hurray_wire.log import get_logger
from hurray_wire.transport.base import Endpoint, Transport, TransportParameters

_log = get_logger("hurray.dataplane")


@dataclass(frozen=True, slots=True)
class Connected:
    """How a peer is connected: by these kinds of transport, and why not by the others that both sides have."""

    kinds: tuple[str, ...]
    left_out: Mapping[str, HurrayError]


@dataclass(eq=False)
class Peer:
    """One peer, from `Peers.open` until it is closed or lost. `transfers`: numbers of those that use it."""

    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    left_out: dict[str, HurrayError] = field(default_factory=dict)
    transfers: set[int] = field(default_factory=set)
    open: bool = True
    leaving: bool = False
    opening: Future[Connected] | None = None
    """Pending while proofs are waited for, which is until `opening_until`."""
    opening_until: float = 0.0

    def connected(self) -> Connected:
        """As it is now."""
        kinds = tuple(kind for kind in self.endpoints if kind not in self.left_out)
        return Connected(kinds, dict(self.left_out))

    def settle(self) -> None:
        """Nothing more is waited for."""
        connected = self.connected()
        if self.opening is not None and connected.kinds:
            self.opening.set_result(connected)
            self.opening = None

    def end(self, error: HurrayError) -> None:
        """It is no longer connected."""
        self.open = False
        if self.opening is not None:
            self.opening.set_exception(error)
            self.opening = None


class Peers:
    """See the module.

    `makers`: what makes each kind of transport. `on_started(transport)`: it runs. `fail_transfers(numbers, error)`:
    those that use a connection which is about to be cut. `on_lost(peer, error)`: it was, and nobody here asked for it.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Transport]],
        *,
        on_started: Callable[[Transport], None],
        fail_transfers: Callable[[Collection[int], HurrayError], None],
        on_lost: Callable[[int, HurrayError], None],
    ) -> None:
        self.makers: Final = dict(makers)
        self.entries: Final[dict[int, Peer]] = {}
        self.transports: Final[dict[str, Transport]] = {}
        self.parameters: Final[dict[str, TransportParameters]] = {}
        """What peers need to connect to this side, by each transport that runs."""
        self.worn = False
        """A connection was lost or cut."""
        self._on_started = on_started
        self._fail_transfers = fail_transfers
        self._on_lost = on_lost

    def start(self, kinds: Sequence[str]) -> tuple[TransportParameters, ...]:
        """Start those of these transports that do not run yet. Raises HurrayError whose details name the transport."""
        for kind in kinds:
            if kind not in self.transports:
                try:
                    transport = self.makers[kind]()
                    own = transport.parameters()
                except HurrayError as error:
                    error.details.setdefault("transport", kind)
                    raise
                except Exception as error:  # whatever else it raises is why it cannot be had
                    raise DataPlaneUnavailable(
                        f"the transport did not start: {error}", stage="start", transport=kind
                    ) from error
                assert transport.kind == kind, kind
                self.transports[kind] = transport
                self.parameters[kind] = own
                self._on_started(transport)
        return tuple(self.parameters[kind] for kind in kinds)

    def open(
        self,
        peer: int,
        parameters: Sequence[TransportParameters],
        proof_s: float | None,
        opening: Future[Connected],
    ) -> None:
        """Connect; `opening` is answered now (`proof_s` None) or by `settle`. Raises CapabilityMismatch,
        DataPlaneUnavailable."""
        theirs = {item.kind: item for item in parameters if item.kind in self.transports}
        if not theirs:
            raise CapabilityMismatch(
                "no transport in common",
                field="transports",
                offered=", ".join(item.kind for item in parameters),
                required="one of " + ", ".join(self.transports),
            )
        entry = Peer()
        for kind, item in theirs.items():
            why = self.transports[kind].why_unusable()
            if why is not None:
                entry.left_out[kind] = DataPlaneUnavailable(
                    f"{kind} cannot be used here: {why}", retry_after_s=1.0, stage="connect", transport=kind
                )
                continue
            try:
                self.transports[kind].check_peer(item)
            except CapabilityMismatch as error:
                if not self.transports[kind].optional:
                    raise
                entry.left_out[kind] = error
        if len(entry.left_out) == len(theirs):
            raise [*entry.left_out.values()][-1]
        if peer in self.entries:
            self.lose(peer, PeerUnavailable("the peer connects anew", peer=peer), notify=False)
        self.entries[peer] = entry
        for kind, item in theirs.items():
            if kind not in entry.left_out:
                lost = partial(self._endpoint_lost, peer, entry, kind)
                entry.endpoints[kind] = self.transports[kind].connect(peer, item, lost)
        if proof_s is None:
            opening.set_result(entry.connected())
        else:
            entry.opening, entry.opening_until = opening, time.monotonic() + proof_s

    def settle(self, now: float) -> float | None:
        """Answer for each peer whose transports all have reached it, or whose time is over; when the next one's is."""
        wake_at = None
        for peer, entry in [(peer, entry) for peer, entry in self.entries.items() if entry.opening is not None]:
            late = [kind for kind, endpoint in entry.endpoints.items() if not endpoint.proven]
            if late and now < entry.opening_until:
                wake_at = entry.opening_until if wake_at is None else min(wake_at, entry.opening_until)
                continue
            # Not cut: the peer may take it for proven, and would lose all of the connection with it.
            for kind in late:
                entry.left_out[kind] = PeerUnavailable("the peer did not answer in time", peer=peer, transport=kind)
            entry.settle()
            if not entry.connected().kinds:
                self.lose(peer, entry.left_out[late[0]], notify=False)
        return wake_at

    def leave(self, peer: int) -> None:
        """The peer is being asked to close the connection."""
        entry = self.entries.get(peer)
        if entry is not None:
            entry.leaving = True

    def close(self, peer: int, *, abort: bool) -> None:
        """Close the connection; one that transfers use is lost."""
        entry = self.entries.get(peer)
        if entry is None:
            return
        if abort or entry.transfers:
            self.lose(peer, PeerUnavailable("the connection is being closed", peer=peer), notify=False)
        else:
            del self.entries[peer]
            entry.end(PeerUnavailable("the connection was closed", peer=peer))
            for endpoint in entry.endpoints.values():
                endpoint.close()

    def lose(self, peer: int, error: HurrayError, *, notify: bool) -> None:
        """Fail what uses the connection, and cut it."""
        entry = self.entries.pop(peer, None)
        if entry is None:
            return
        # Whoever waits for it to open is told by that.
        notify = notify and entry.opening is None
        entry.end(error)
        self.worn = True
        self._fail_transfers(list(entry.transfers), error)
        for endpoint in entry.endpoints.values():
            endpoint.abort()
        if notify:
            _log.warning("peer lost", peer=f"{peer:016x}", error=str(error))
            self._on_lost(peer, error)

    def _endpoint_lost(self, peer: int, entry: Peer, kind: str, error: HurrayError) -> None:
        if not entry.open:  # an old connection's end must not touch the one that replaced it
            return
        if entry.leaving and not entry.transfers:
            self.worn = True
            self.close(peer, abort=False)
            return
        if entry.endpoints[kind].proven:
            self.lose(peer, error, notify=True)
            return
        del entry.endpoints[kind]
        entry.left_out[kind] = error
        _log.info("peer not reached", peer=f"{peer:016x}", transport=kind, error=str(error))
        if not entry.endpoints:
            nothing = CapabilityMismatch(
                f"no transport reaches the peer: {error.message}",
                stage="connect",
                field="transports",
                offered=kind,
                peer=f"{peer:016x}",
            )
            self.lose(peer, nothing, notify=True)
