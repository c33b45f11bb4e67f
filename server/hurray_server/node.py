"""The state of one node and what connects its parts: store, requests, sessions, transfers, the mover.

Lives in one event loop; nothing here knows gRPC.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from hurray_server.config import Config
from hurray_server.firewall import Firewall
from hurray_server.mover_config import MoverConfig
from hurray_server.mover_link import MoverLink
from hurray_server.principal import tenant_of
from hurray_server.quotas import Charge, Quotas
from hurray_server.readers import Readers
from hurray_server.requests import Requests
from hurray_server.sessions import Sessions
from hurray_server.shares import Share
from hurray_server.store import Contents, Snapshot, Store
from hurray_server.tally import Tally
from hurray_server.transfers import Transfer
from hurray_server.trust_config import read_quotas
from hurray_wire.credentials import WatchedCredentials
from hurray_wire.cuda import CHUNK_BYTES
from hurray_wire.errors import HurrayError, KeyExpired, NodeDraining
from hurray_wire.limits import chunk_bytes_for
from hurray_wire.memory import DEVICE_CPU, DEVICE_CUDA
from hurray_wire.v1 import mover_pb2 as mpb

_log = structlog.get_logger("hurray.node")

_GENERATIONS_PER_MS: Final = 1 << 12
_YEAR_2025_S: Final = 1_735_689_600


def generations_before(unix_s: float) -> int:
    """A generation that no store has reached before this moment: a handle from before a restart of the node must never
    name a snapshot from after it. Below 2**53 until the year 2094, for those who read JSON numbers as floats."""
    return max(0, int((unix_s - _YEAR_2025_S) * 1000)) * _GENERATIONS_PER_MS


class Node:
    """See the module. `on_ready(ready)` is called when the node becomes able, or unable, to take transfers."""

    def __init__(self, config: Config, *, on_ready: Callable[[bool], None]) -> None:
        self.config: Final = config
        self.incarnation: Final = uuid.uuid4().int >> 64
        firewall = None
        if config.has_firewall:
            firewall = Firewall(f"hurrayd_{self.incarnation:016x}", on_failed=self._unguarded)
        self._firewall = firewall
        self.link: Final = MoverLink(
            MoverConfig(
                arena_bytes=config.arena.bytes,
                prefault=config.arena.prefault,
                transports=config.transports_config,
                limits=config.wire_limits,
                log_level=config.log.level,
                log_format=config.log.format,
                gpu=config.arena.gpu,
                cpus=config.transfers.cpus,
            ),
            on_up=self._mover_up,
            on_down=self._mover_down,
            on_peer_lost=self._peer_lost,
            on_reader_gone=self._reader_gone,
            on_unusable=self._unusable,
            firewall=firewall,
        )
        self.limits: Final = config.wire_limits
        self.sessions: Final = Sessions(
            self.link,
            max_sessions=config.limits.max_sessions,
            divided=config.has_tenants,
            data_identity=_data_identity(config),
            firewall=firewall,
        )
        self.quotas: Final = Quotas(*read_quotas(config.quotas))
        self._charges: dict[int, Charge] = {}
        self.tally: Final = Tally()
        self.store: Final = Store(
            self._free,
            max_snapshots=config.limits.max_snapshots,
            generation=generations_before(time.time()),
            on_removed=self._removed,
            tenant_of=tenant_of if config.has_tenants else lambda _: "",
        )
        self.readers: Final = Readers(self.store)
        self.requests: Final = Requests()
        self.calls: Final = Share(
            "calls", "max_calls", config.limits.max_calls, divided=config.has_tenants, retry_after_s=1.0
        )
        self.transfers: set[Transfer[Any]] = set()
        """Those whose outcome is open: what limits count."""
        self._share: Final = Share(
            "transfers", "max_transfers", config.limits.max_transfers, divided=config.has_tenants, retry_after_s=0.2
        )
        self._unended: set[Transfer[Any]] = set()
        self.idle: Final = asyncio.Event()
        """Set while the mover has no transfer that has not ended."""
        self.idle.set()
        self.draining = False
        self._on_ready = on_ready
        self._drain_listeners: set[Callable[[], None]] = set()
        self._tenants: dict[str, int] = {}
        self._leases_changed = asyncio.Event()
        self._looks_at_s = float("inf")
        """When leases are looked at next."""
        self._expirer: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the mover and wait until it is ready. Raises what keeps it from coming up."""
        await self.link.start()
        self._expirer = asyncio.create_task(self._expire())

    def begin_drain(self) -> None:
        """Take no new transfers, and end every wait for one."""
        if not self.draining:
            self.draining = True
            _log.info("draining", transfers=len(self.transfers))
            for notify in list(self._drain_listeners):
                notify()
            self._on_ready(False)

    def cancel_transfers(self) -> None:
        """Give up what still runs."""
        for transfer in list(self.transfers):
            transfer.cancel(NodeDraining("the node is shutting down", stage=transfer.stage))

    async def stop(self) -> None:
        """End sessions, then the mover. Everything that was held is gone."""
        if self._expirer is not None:
            self._expirer.cancel()
        self.sessions.end_all(NodeDraining("the node is shutting down", stage="session"))
        await self.link.stop()
        if self._firewall is not None:
            await self._firewall.stop()

    def add(self, transfer: Transfer[Any]) -> None:
        """A transfer begins."""
        self._share.take(transfer.tenant)
        self.transfers.add(transfer)
        self._unended.add(transfer)
        self.idle.clear()

    def beginning(self, tenant: str) -> AbstractContextManager[None]:
        """Count what waits to become a transfer as one meanwhile: it holds its offer. Raises LimitExceeded."""
        return self._share.taken(tenant)

    def remove(self, transfer: Transfer[Any]) -> None:
        """The outcome of a transfer is certain: it makes room for another."""
        if transfer in self.transfers:
            self.transfers.discard(transfer)
            self._share.give_back(transfer.tenant)

    def ended(self, transfer: Transfer[Any]) -> None:
        """The mover has ended a transfer."""
        self._unended.discard(transfer)
        if not self._unended:
            self.idle.set()

    @property
    def ready(self) -> bool:
        """Whether transfers are taken."""
        return bool(self.link.transports) and not self.draining

    def require_ready(self, stage: str, tenant: str) -> None:
        """Raises NodeDraining, DataPlaneUnavailable, LimitExceeded where no transfer of a tenant can begin now."""
        self.require_not_draining(stage)
        self.link.require_up(stage)
        self._share.require(tenant)

    def require_not_draining(self, stage: str) -> None:
        """Raises NodeDraining."""
        if self.draining:
            raise NodeDraining("the node is shutting down", stage=stage)

    def on_drain(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Have `notify` called when the node begins to drain, until the function that this returns is called."""
        self._drain_listeners.add(notify)
        return lambda: self._drain_listeners.discard(notify)

    @property
    def device_tag(self) -> int:
        """Of the arena's memory."""
        return DEVICE_CPU if self.config.arena.gpu is None else DEVICE_CUDA

    def stages(self, transport: str) -> bool:
        """Whether what is in the arena goes through host memory on its way to this transport, which is up."""
        return self.link.started is not None and transport in self.link.started.staging

    def chunk_bytes(self, transport: str) -> int:
        """Bytes of the chunks of a snapshot that goes out by this transport."""
        direct = self.device_tag == DEVICE_CUDA and not self.stages(transport)
        return self.config.transfers.chunk_bytes or (CHUNK_BYTES if direct else chunk_bytes_for(transport))

    def tenant_number(self, tenant: str) -> int:
        """What the mover knows a tenant by: never 0, the same while this process lives."""
        return self._tenants.setdefault(tenant, len(self._tenants) + 1)

    def may_view(self, reader: str, contents: Contents) -> bool:
        """Whether a reader of this tenant may have a view of a snapshot; else it gets a copy."""
        return contents.viewed_by == reader and len(self.readers) < self.config.limits.max_readers

    # --- who pays -------------------------------------------------------------------------------------------------

    def keep(self, snapshot: Snapshot, charge: Charge) -> None:
        """A snapshot was committed: the charge for its memory stands until that is free."""
        self._charges[snapshot.contents.memory] = charge

    def take_over(self, snapshot: Snapshot, tenant: str) -> None:
        """Charge this tenant for a snapshot from now on. Raises QuotaExceeded."""
        self.quotas.take_over(self._charges[snapshot.contents.memory], tenant)

    def _removed(self, snapshot: Snapshot, reason: type[HurrayError]) -> None:
        self.tally.end_lease(reason)
        if reason is KeyExpired:
            charge = self._charges[snapshot.contents.memory]
            _log.info("lease ended", key=snapshot.key, generation=snapshot.generation, tenant=charge.tenant)

    def _free(self, memory: int) -> None:
        self.link.free(memory)
        self.quotas.release(self._charges.pop(memory))

    # --- time -----------------------------------------------------------------------------------------------------

    @staticmethod
    def now_s() -> float:
        """The clock of leases: it never steps."""
        return time.monotonic()

    def to_timestamp(self, at_s: float) -> Timestamp:
        """A moment of that clock, as people name it."""
        moment = Timestamp()
        moment.FromMicroseconds(int((time.time() + at_s - self.now_s()) * 1e6))
        return moment

    def leases_changed(self) -> None:
        """A lease began: it may be the next to end."""
        at_s = self.store.next_expiry_s()
        if at_s is not None and at_s < self._looks_at_s:
            self._leases_changed.set()

    async def _expire(self) -> None:
        while True:
            self._leases_changed.clear()
            self.store.expire(self.now_s())
            at_s = self.store.next_expiry_s()
            self._looks_at_s = float("inf") if at_s is None else at_s
            try:
                async with asyncio.timeout(None if at_s is None else max(0.0, at_s - self.now_s())):
                    await self._leases_changed.wait()
            except TimeoutError:
                continue

    # --- mover ----------------------------------------------------------------------------------------------------

    def _mover_up(self, started: mpb.MoverStarted) -> None:
        self.tally.mover_start_count += 1
        kinds = [transport.kind for transport in started.transports]
        _log.info("mover up", incarnation=f"{started.incarnation:016x}", transports=kinds, ucx=started.ucx)
        for kind, reason in started.left_out.items():
            _log.warning("transport left out", transport=kind, reason=reason)
        self._on_ready(self.ready)

    def _unusable(self, kinds: Mapping[str, str]) -> None:
        _log.warning("transports that cannot be used", transports=dict(kinds))
        self._on_ready(self.ready)

    def _reader_gone(self, transfer: int) -> None:
        self.readers.gone(transfer)

    def _peer_lost(self, peer: int, error: HurrayError) -> None:
        self.sessions.lose(peer, error)

    def _unguarded(self, why: str) -> None:
        self.link.condemn(why)

    def _mover_down(self, error: HurrayError) -> None:
        self._on_ready(False)
        self.sessions.lose_all(error)
        lost = self.store.lose_all(self.now_s())
        self.readers.lose_all()
        if lost:  # else what receipts speak of was taken, or its lease is over: it must not come to be once more
            self.requests.forget_receipts()
            _log.error("what the mover held is lost", snapshots=lost, error=str(error))


def _data_identity(config: Config) -> Callable[[], str]:
    """Whose the certificate of the tls data connections is, as it is now; "" where there are none."""
    if config.tls is None:
        return str
    return WatchedCredentials(config.tls.data_credentials, lambda pem: pem.identity, section="tls.data").current
