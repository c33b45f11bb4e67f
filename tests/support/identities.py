"""A node with identities: its certificates, its tenants', and a daemon that asks for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hurray_wire.credentials import Credentials
from hurray_wire.transport.base import Transport
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.transport.tls import SocketConfig, TcpTransport, TlsTransport
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import UcxConfig
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub
from support.daemon import UCX_PORTS, RunningDaemon, eventually, running_daemon
from support.raw import RawClient, open_channel
from transport.certificates import Authority

TRUSTED_UCX = f'[ucx]\nfirst_port = {UCX_PORTS[0]}\nlast_port = {UCX_PORTS[1]}\ntrusted = ["127.0.0.0/8"]\n'

GRANTS = """
[[grants]]
tenant = "b"
prefix = "a/shared/"
may = ["get", "list"]
[[grants]]
tenant = "a"
prefix = "b/inbox/"
may = ["put"]
[[grants]]
tenant = "ops"
may = ["admin"]
"""


@dataclass
class Identified:
    """A running node, and who may call it."""

    daemon: RunningDaemon
    authority: Authority
    node: Credentials
    data: Credentials

    @property
    def address(self) -> str:
        return self.daemon.address

    def tenant(self, name: str) -> Credentials:
        """A certificate of this tenant's, made when first asked for."""
        made = self.authority.folder / f"tenant-{name}.pem"
        return self.authority.found(f"tenant-{name}") if made.exists() else self.authority.tenant(name)

    @contextmanager
    def calling(self, tls: Credentials | str) -> Iterator[TransferServiceStub]:
        """The service as a tenant, or whoever has these credentials, calls it."""
        with open_channel(self.address, self.tenant(tls) if isinstance(tls, str) else tls) as channel:
            yield TransferServiceStub(channel)

    def transport(self, kind: str, tls: Credentials) -> Callable[[], Transport]:
        """What a peer starts."""
        makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(ShmConfig(path=self.daemon.shm_path)),
            "tls": lambda: TlsTransport(SocketConfig(), tls),
            "tcp": lambda: TcpTransport(SocketConfig()),
            "ucx": lambda: UcxTransport(UcxConfig(first_port=UCX_PORTS[0], last_port=UCX_PORTS[1])),
        }
        return makers[kind]

    def raw(self, tenant: str, kind: str = "tls", *, connect: bool = True) -> RawClient:
        """A peer that acts for this tenant, connected by one kind of transport."""
        tls = self.tenant(tenant)
        return RawClient(self.address, tls=tls, transports={kind: self.transport(kind, tls)}, connect=connect)

    def audit(self, **fields: Any) -> list[dict[str, Any]]:
        """Lines of the audit log with these fields."""
        lines = [line for line in self.daemon.log() if line.get("logger") == "hurray.audit"]
        return [line for line in lines if all(line.get(name) == value for name, value in fields.items())]

    def told(self, **fields: Any) -> list[dict[str, Any]]:
        """The same, once there are any: a line is written a little after the caller has its answer."""
        return eventually(lambda: self.audit(**fields), 5, f"an audit line with {fields}")

    def state(self) -> pb.GetNodeResponse:
        """What GetNode says."""
        with self.calling("ops") as stub:
            return stub.GetNode(pb.GetNodeRequest(), timeout=10)

    def arena(self) -> pb.ArenaUsage:
        """Where the node's memory is."""
        return self.state().arena


def tls_table(node: Credentials, data: Credentials | None = None) -> str:
    """The table [tls], as TOML."""
    lines = ["[tls]", f"ca = {json.dumps(str(node.ca))}", *_pair(node)]
    if data is not None:
        lines += ["[tls.data]", *_pair(data)]
    return "\n".join(lines) + "\n"


def _pair(files: Credentials) -> list[str]:
    return [f"{name} = {json.dumps(str(getattr(files, name)))}" for name in ("certificate", "key")]


@contextmanager
def identified_daemon(folder: Path, config: str = "", *, top: str = "", **options: Any) -> Iterator[Identified]:
    """A daemon with mutual TLS, two tenants a and b, and grants. `top`: keys outside tables."""
    authority = Authority(folder, "ca")
    node, data = authority.node("n"), authority.data("n")
    with running_daemon(top + tls_table(node, data) + GRANTS + config, **options) as daemon:
        yield Identified(daemon, authority, node, data)
