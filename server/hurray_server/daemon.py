"""The life of hurrayd: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import signal
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # untyped
from grpc_reflection.v1alpha import reflection

from hurray_server.audit import Audit
from hurray_server.config import Config, is_loopback, split_address
from hurray_server.endpoint import Endpoint, Page
from hurray_server.identity import make_callers
from hurray_server.metrics import metrics_page
from hurray_server.node import Node
from hurray_server.rpc import MalformedRequests, OtherServices
from hurray_server.server_credentials import ServerCredentials
from hurray_server.service import Service
from hurray_wire.errors import InternalError, InvalidRequest
from hurray_wire.v1 import transfer_pb2, transfer_pb2_grpc

_log = structlog.get_logger("hurray.daemon")

SERVICE_NAME: Final = transfer_pb2.DESCRIPTOR.services_by_name["TransferService"].full_name

SETTLE_S: Final = 5.0
"""Longest time for what was cancelled after the drain to come to its end."""

STOP_S: Final = 1.0
"""What calls that still run get to end by themselves when the server stops."""


class Daemon:
    """One run of hurrayd."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stop_asked = asyncio.Event()
        self._forced = asyncio.Event()
        self._drain_s = config.drain_s
        self._health = health.HealthServicer()
        self._health_sets: set[asyncio.Task[None]] = set()
        self._callers = make_callers(config)
        self._audit = Audit(config.audit.path)
        self._node = Node(config, on_ready=self._set_ready)
        self._server = self._make_server()
        self._pages = Endpoint(
            {
                "/metrics": metrics_page(self._node, version("hurray-transfer")),
                "/healthz": lambda: Page(b"ok\n"),
                "/readyz": self._readiness,
            }
        )

    async def run(self) -> None:
        """Serve until told to stop. Raises HurrayError where that cannot begin or go on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        port, watched = self._bind(), "off"
        try:
            if self._config.metrics_listen is not None:
                watched = await self._pages.start(*self._config.metrics_listen)
            await self._publish(False)
            await self._server.start()
            await self._node.start()
            self._announce(port, watched)
            await self._serve()
            await self._drain()
        finally:
            await self._node.stop()
            await self._server.stop(STOP_S)
            await self._pages.stop()
            _log.info("stopped")

    def ask_to_stop(self, drain_s: float) -> None:
        """Drain for at most that long, then stop."""
        self._drain_s = drain_s
        self._stop_asked.set()

    def _on_signal(self, number: int) -> None:
        _log.info("signal", signal=signal.Signals(number).name, forced=self._stop_asked.is_set())
        if self._stop_asked.is_set():
            self._forced.set()
        self._stop_asked.set()

    # --- start ------------------------------------------------------------------------------------------------------

    def _make_server(self) -> grpc.aio.Server:
        most = self._config.limits.max_message_bytes
        server = grpc.aio.server(
            interceptors=[MalformedRequests(), OtherServices(self._callers, self._audit, self._node.calls)],
            maximum_concurrent_rpcs=self._config.limits.max_calls,
            options=[
                ("grpc.so_reuseport", 0),  # else a second daemon would share the port, unnoticed
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", most),
                # A peer that is gone without a word is noticed within 8 s; pings are answered without the GIL. What
                # bounds the answer is the ping timeout: the keepalive timeout alone leaves it at a minute.
                ("grpc.keepalive_time_ms", 4_000),
                ("grpc.keepalive_timeout_ms", 3_000),
                ("grpc.http2.ping_timeout_ms", 3_000),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
                # Clients ping, too, and must not be sent away for it.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(
            Service(self._node, self._callers, self._audit, self.ask_to_stop), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), server
        )
        return server

    def _bind(self) -> int:
        """The port that the control plane is bound to. Raises InvalidRequest: a bind that fails is fatal."""
        listen, tls = self._config.listen, self._config.tls
        try:
            if tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, ServerCredentials(tls.credentials).for_grpc())
        except RuntimeError:
            port = 0
        if port == 0:
            raise InvalidRequest("cannot listen there: is the port taken?", field="listen", offered=listen)
        return port

    def _announce(self, port: int, watched: str) -> None:
        """Tell people, and whoever started this process, that it serves. `watched`: where its metrics are."""
        config, mover = self._config, self._node.link.require_up("start")
        host, _ = split_address(config.listen)
        listens = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if config.tls is not None:
            for path in {config.tls.credentials.key, config.tls.data_credentials.key}:
                if path.stat().st_mode & 0o077:
                    _log.warning("others of this host may read a private key", path=str(path))
            _log.info("mutual TLS: tenants by their certificates", listen=listens, grants=len(config.grants))
        elif not is_loopback(host):
            _log.warning("insecure: everyone who reaches this address is served", listen=listens)
        for kind, reason in config.left_out.items():
            _log.info("transport left out", transport=kind, reason=reason)
        kinds = [transport.kind for transport in mover.transports]
        if "ucx" in kinds and config.ucx.firewall:
            _log.info("ucx trusts this host and those with a session", net_devices=config.ucx.net_devices)
        elif "ucx" in kinds:
            _log.warning("ucx trusts whoever reaches these devices", net_devices=config.ucx.net_devices)
        if "tcp" in kinds and not is_loopback(config.tcp_listen[0]):
            _log.warning("tcp is not encrypted: who can read its network reads the data", listen=config.tcp.listen)
        print(
            f"hurrayd ready: address={config.advertise or listens} listen={listens} node={config.node} "
            f"incarnation={self._node.incarnation:016x} arena_bytes={self._node.link.usage.arena.total_bytes} "
            f"metrics={watched} "
            f"transports={','.join(kinds)} ucx=({mover.ucx})",
            flush=True,
        )

    def _readiness(self) -> Page:
        node = self._node
        if node.ready:
            return Page(b"ready\n")
        unusable = "; ".join(f"{kind}: {why}" for kind, why in node.link.usage.unusable.items())
        why = "draining" if node.draining else unusable or "the data plane is not up"
        return Page(f"{why}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)

    def _set_ready(self, ready: bool) -> None:
        task = asyncio.ensure_future(self._publish(ready))
        self._health_sets.add(task)
        task.add_done_callback(self._health_sets.discard)

    async def _publish(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)

    # --- serve, drain -------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        stop = asyncio.create_task(self._stop_asked.wait())
        supervisor = self._node.link.supervisor
        assert supervisor is not None, "started"
        waits: set[asyncio.Future[Any]] = {stop, supervisor}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.done():
                raise InternalError("nobody watches over the mover any more") from supervisor.exception()
        finally:
            stop.cancel()

    async def _drain(self) -> None:
        """Let running transfers end; after the deadline, or when forced, cancel them."""
        self._node.begin_drain()
        await self._settled(self._drain_s)
        if self._node.transfers:
            _log.warning("cancelling", transfers=len(self._node.transfers), forced=self._forced.is_set())
            self._node.cancel_transfers()
            self._forced.clear()
            await self._settled(SETTLE_S)

    async def _settled(self, timeout_s: float) -> None:
        """Wait until no transfer runs, at most that long, or until forced."""
        waits = {asyncio.ensure_future(event.wait()) for event in (self._node.idle, self._forced)}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


async def serve(config: Config) -> None:
    """Run hurrayd until it is told to stop. Raises HurrayError where it cannot."""
    await Daemon(config).run()
