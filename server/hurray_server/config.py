"""Configuration of hurrayd: a TOML file, below environment variables, below flags.

Built once at start (`load_config`) and passed on; every value is checked there, and a key that nobody knows is refused.
Environment variables are HURRAY_ and the key, with `__` between levels: HURRAY_ARENA__BYTES.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from hurray_server.grants import Grant, Right
from hurray_server.mover_config import TransportsConfig
from hurray_server.principal import TenantNames
from hurray_server.quotas import Quota
from hurray_wire.credentials import NAME, TENANT_URI, Credentials
from hurray_wire.errors import InvalidRequest, Misuse
from hurray_wire.image import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, align
from hurray_wire.limits import MAX_WINDOW, PAGE_BYTES, Limits
from hurray_wire.messages import DURATION_MAX_S
from hurray_wire.transport.settings import KINDS, check_kinds, split_list, split_names
from hurray_wire.transport.shm import DEFAULT_PATH, ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx import UcxConfig

DEFAULT_CONFIG_PATH = Path("/etc/hurray/hurrayd.toml")
"""Read when it is there and no other file is named."""

_LIMITS = Limits()


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ArenaConfig(_Section):
    """Memory that snapshots are received and held in."""

    bytes: ByteSize = Field(default=ByteSize(1 << 30), ge=1 << 20, le=1 << 46)
    """Size, rounded up to a multiple of 4096. A number, or text such as "64GiB"."""
    prefault: bool = True
    """Touch all of it in the background after the start: the first touch is far slower than any copy later."""


class LeaseConfig(_Section):
    """How long snapshots are kept."""

    default_s: float = Field(default=60.0, gt=0)
    max_s: float = Field(default=3600.0, gt=0, le=DURATION_MAX_S)
    """A longer lease asked for is cut to this."""

    @model_validator(mode="after")
    def _check(self) -> LeaseConfig:
        if self.default_s > self.max_s:
            raise ValueError(f"leases.default_s is {self.default_s:g}, above leases.max_s, {self.max_s:g}")
        return self


class LimitsConfig(_Section):
    """What peers may ask for."""

    max_tensors: int = Field(default=_LIMITS.max_tensors, ge=1)
    max_snapshot_bytes: ByteSize = Field(default=ByteSize(_LIMITS.max_snapshot_bytes), ge=PAGE_BYTES)
    max_sequences: int = Field(default=_LIMITS.max_sequences, ge=1)
    max_index_entries: int = Field(default=_LIMITS.max_index_entries, ge=1)
    max_message_bytes: int = Field(default=_LIMITS.max_message_bytes, ge=1 << 16, le=1 << 30)
    max_snapshots: int = Field(default=100_000, ge=1)
    max_transfers: int = Field(default=256, ge=1)
    max_sessions: int = Field(default=1024, ge=1)
    max_calls: int = Field(default=4096, ge=8)
    """Calls at a time: sessions, transfers, waits for a key and all others."""


class ShmSection(_Section):
    """Shared memory, for processes of this host."""

    path: str | None = None
    """The socket by which they find each other; None: the usual path, which need not be had."""

    @field_validator("path")
    @classmethod
    def _usable(cls, value: str | None) -> str | None:
        if value is not None:
            _check(lambda: ShmConfig(path=value))
        return value


class TcpSection(_Section):
    """Plain sockets, for trusted networks: nothing on them is encrypted."""

    listen: str | None = None
    """Host and port; None: the control plane's, with the port after its own, where that is loopback."""
    advertise: str | None = None
    """Host by which peers reach it, if not as it is listened at. A name is looked up once, at the start."""


class TransferConfig(_Section):
    """How transfers run."""

    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW)
    """Chunks in flight per transfer; None: as suits the transport."""
    chunk_bytes: int | None = Field(default=None, ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX)
    """Chunk size of snapshots that this node sends; None: as suits the transport."""
    max_budget_s: float = Field(default=600.0, gt=0, le=DURATION_MAX_S)
    """Longest time for one transfer, and for a wait for a key; a caller's own deadline may be shorter."""

    @field_validator("chunk_bytes")
    @classmethod
    def _whole_pages(cls, value: int | None) -> int | None:
        if value is not None and value % PAGE_BYTES:
            raise ValueError(f"must be a multiple of {PAGE_BYTES}")
        return value


class LogConfig(_Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


class TlsFiles(_Section):
    """A certificate of this node, PEM, then the ones between it and the authority; and its key, not encrypted."""

    certificate: Path
    key: Path


class TlsConfig(TlsFiles):
    """Who this node is and whose certificates it takes. Files are read again after they change."""

    ca: Path
    """The authorities that callers' certificates must come from, PEM."""
    tenants: str = TENANT_URI
    """SPIFFE URI of tenants, with {tenant} where the name is. Without a SPIFFE URI the common name is the tenant."""
    data: TlsFiles | None = None
    """What the data plane shows, whose process holds this key and not the other; None: the same."""

    @field_validator("tenants")
    @classmethod
    def _check_tenants(cls, value: str) -> str:
        TenantNames(value)
        return value

    @property
    def credentials(self) -> Credentials:
        """Of the control plane."""
        return Credentials(self.certificate, self.key, self.ca)

    @property
    def data_credentials(self) -> Credentials:
        """Of the data plane."""
        own = self.data or self
        return Credentials(own.certificate, own.key, self.ca)


TenantName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class GrantConfig(_Section):
    """What a tenant may do beyond what is its own."""

    tenant: TenantName
    prefix: str | None = None
    """With all keys that begin with this: "" or whole parts of a key, as in "a/shared/". None: for admin alone."""
    may: tuple[Literal["put", "get", "list", "delete", "admin"], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_prefix(self) -> GrantConfig:
        if self.prefix is None:
            if set(self.may) != {"admin"}:
                raise ValueError("prefix is missing: only admin goes without")
        elif self.prefix and not self.prefix.endswith("/"):
            raise ValueError(f'prefix is "{self.prefix}": it must end with "/", or others that begin so would match')
        return self

    @property
    def grant(self) -> Grant:
        """As it is asked for."""
        return Grant(self.tenant, self.prefix or "", frozenset(Right(name) for name in self.may))


class QuotaConfig(_Section):
    """How much one tenant may have; what is not given is as in `quotas.default`, and without bound there."""

    bytes: ByteSize | None = Field(default=None, ge=0)
    """Memory of its snapshots."""
    snapshots: int | None = Field(default=None, ge=0)
    transfers: int | None = Field(default=None, ge=0)
    """Puts and gets at a time, those that wait for a key included."""


class AuditConfig(_Section):
    """Who did what: one JSON object a line."""

    path: Path | None = None
    """The file; None: standard error."""


class Config(BaseSettings):
    """Everything that hurrayd can be told."""

    model_config = SettingsConfigDict(
        env_prefix="HURRAY_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    listen: str = "127.0.0.1:7411"
    """Host and port of the control plane; port 0 takes a free one."""
    advertise: str | None = None
    """Host and port by which peers reach `listen`; None: as it is."""
    node: str = Field(default_factory=socket.gethostname, min_length=1, max_length=255)
    """Name of this node, for people."""
    insecure: bool = False
    """Serve in plain text to everyone who reaches an address that is not loopback."""
    drain_s: float = Field(default=30.0, ge=0, le=DURATION_MAX_S)
    """How long running transfers may take after a stop was asked for."""

    transports: Annotated[tuple[str, ...] | None, NoDecode] = None
    """Exactly these, in this order of preference. None: all that can be had, best first."""

    arena: ArenaConfig = ArenaConfig()
    shm: ShmSection = ShmSection()
    tcp: TcpSection = TcpSection()
    ucx: UcxConfig = UcxConfig()
    """UCX trusts whoever reaches `net_devices`: name none that strangers can reach."""
    leases: LeaseConfig = LeaseConfig()
    limits: LimitsConfig = LimitsConfig()
    transfers: TransferConfig = TransferConfig()
    log: LogConfig = LogConfig()
    tls: TlsConfig | None = None
    """None: plain text, one tenant, and no identities."""
    grants: tuple[GrantConfig, ...] = ()
    quotas: dict[str, QuotaConfig] = {}
    """By tenant; "default" is of all that have none."""
    audit: AuditConfig = AuditConfig()

    @field_validator("transports", mode="before")
    @classmethod
    def _split_transports(cls, value: Any) -> Any:
        return split_list(value)

    @field_validator("transports")
    @classmethod
    def _check_transports(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else check_kinds(value)

    @field_validator("ucx", mode="before")
    @classmethod
    def _split_ucx_names(cls, value: Any) -> Any:
        return split_names(value, "net_devices", "tls")

    @model_validator(mode="after")
    def _check_addresses(self) -> Config:
        host, _ = split_address(self.listen)
        if self.advertise is not None:
            split_address(self.advertise)
        if self.tls is None and not is_loopback(host) and not self.insecure:
            raise ValueError(
                f"listen is {self.listen}, which is not loopback: without identities everyone who reaches it would be "
                "served; give it certificates ([tls]), or say insecure = true (--insecure) if the network is trusted"
            )
        if self.tls is not None and self.insecure:
            raise ValueError("insecure and [tls] exclude each other")
        if self.tls is None and self.grants:
            raise ValueError("grants need [tls]: without identities everyone is one tenant")
        if host in ("0.0.0.0", "::") and self.advertise is None:  # noqa: S104 -- compared, not bound
            raise ValueError(f"listen is {self.listen}: say by which address peers reach it (advertise)")
        if "tcp" in (self.transports or ()) and self._without_tcp is not None:
            raise ValueError(f"transports has tcp: {self._without_tcp}")
        tcp_host, _ = self.tcp_listen
        if self.tcp.listen is not None and tcp_host in ("0.0.0.0", "::") and self.tcp.advertise is None:  # noqa: S104
            raise ValueError(f"tcp.listen is {self.tcp.listen}: say by which address peers reach it (tcp.advertise)")
        return self

    @property
    def tcp_listen(self) -> tuple[str, int]:
        """Host and port that the transport tcp listens at."""
        if self.tcp.listen is not None:
            return split_address(self.tcp.listen)
        host, port = split_address(self.listen)
        return host, port + 1 if port else 0

    @property
    def _without_tcp(self) -> str | None:
        """Why there is no tcp unless more is said; None: there may be."""
        host, port = self.tcp_listen
        if self.tcp.listen is None and not is_loopback(host):
            return (
                f"listen is {self.listen}, not loopback, and tcp is not encrypted: tcp.listen names a trusted network"
            )
        return None if port <= 65535 else f"there is no port after that of listen, {self.listen}: say tcp.listen"

    @property
    def left_out(self) -> dict[str, str]:
        """Transports that this configuration leaves out by itself, and why."""
        reason = self._without_tcp
        return {} if self.transports is not None or reason is None else {"tcp": reason}

    @property
    def transports_config(self) -> TransportsConfig:
        """What the mover is told to start."""
        host, port = self.tcp_listen
        port = min(port, 65535)  # counts only where tcp does, and then it is checked
        tcp = SocketConfig(listen_host=host, listen_port=port, advertised_host=self.tcp.advertise)
        shm = ShmConfig(path=self.shm.path or DEFAULT_PATH, listens=True)
        if self.transports is not None:
            return TransportsConfig(self.transports, shm=shm, tcp=tcp, ucx=self.ucx)
        return TransportsConfig(
            kinds=tuple(kind for kind in KINDS if kind not in self.left_out),
            optional=("ucx",) if self.shm.path else ("shm", "ucx"),
            by_merit=True,
            shm=shm,
            tcp=tcp,
            ucx=self.ucx,
        )

    @property
    def quota_table(self) -> tuple[Quota, dict[str, Quota]]:
        """The quota of tenants that have none of their own, and those of the others."""
        default = Quota(**self.quotas.get("default", QuotaConfig()).model_dump())
        own = {
            tenant: replace(default, **quota.model_dump(exclude_none=True))
            for tenant, quota in self.quotas.items()
            if tenant != "default"
        }
        return default, own

    @property
    def wire_limits(self) -> Limits:
        """Bounds on an offer: those configured, and never more than the arena holds."""
        return Limits(
            max_tensors=self.limits.max_tensors,
            max_snapshot_bytes=min(self.limits.max_snapshot_bytes, align(self.arena.bytes)),
            max_sequences=self.limits.max_sequences,
            max_index_entries=self.limits.max_index_entries,
            max_message_bytes=self.limits.max_message_bytes,
        )


def load_config(path: Path | None, flags: Mapping[str, Any]) -> Config:
    """The configuration. `path`: the file, or None for the default one if it is there. `flags`: values by key, nested
    as in the file.

    Raises InvalidRequest that names every wrong key.
    """
    if path is None and DEFAULT_CONFIG_PATH.exists():
        path = DEFAULT_CONFIG_PATH
    if path is not None and not path.is_file():
        raise InvalidRequest(f"no configuration file {path}", field="config", offered=path)

    class Layered(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            layers = (init_settings, env_settings)
            return (*layers, TomlConfigSettingsSource(settings_cls, path)) if path is not None else layers

    try:
        return Layered(**flags)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc'])) or 'configuration'}: {item['msg']}" for item in error.errors()]
        first = error.errors()[0]["loc"]
        raise InvalidRequest(
            "; ".join(text.replace("Value error, ", "") for text in wrong), field=".".join(map(str, first)) or None
        ) from None
    except Misuse as error:
        raise InvalidRequest(error.message, field=error.field) from None
    except (SettingsError, ValueError) as error:  # not TOML, or an environment value that is not JSON
        raise InvalidRequest(f"cannot be read: {error}", field="config", offered=path) from None


def _check(make: Callable[[], object]) -> None:
    try:
        make()
    except Misuse as error:
        raise ValueError(error.message) from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r} is not host:port; an IPv6 address goes in brackets")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def to_toml(config: Config) -> str:
    """The configuration as a file that gives it again."""
    values = config.model_dump(mode="json", exclude_none=True)
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [_assignment(key, value) for key, value in plain.items()]
    for name, table in tables.items():
        lines += _table(name, table)
    return "\n".join(lines)


def _table(name: str, table: Mapping[str, Any]) -> list[str]:
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = ["", f"[{name}]", *(_assignment(key, value) for key, value in table.items() if key not in inner)]
    for key, value in inner.items():
        lines += _table(f"{name}.{json.dumps(key)}", value)
    return lines


def _assignment(key: str, value: object) -> str:
    return f"{key} = {_value(value)}"


def _value(value: object) -> str:
    # A JSON string, number or boolean is the same thing in TOML.
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(_assignment(key, item) for key, item in value.items())} }}"
    return json.dumps(value)
