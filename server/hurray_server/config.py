"""Configuration of hurrayd: a TOML file, below environment variables, below flags.

Built once at start (`load_config`) and passed on; every value is checked there, and a key that nobody knows is refused.
Environment variables are HURRAY_ and the key, with `__` between levels: HURRAY_ARENA__BYTES.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from hurray_server.mover_config import TransportsConfig
from hurray_server.trust_config import AuditConfig, DataConfig, GrantConfig, QuotaConfig, Section, TenantName, TlsConfig
from hurray_wire.cpus import check_cpus
from hurray_wire.cuda import read_device
from hurray_wire.errors import InvalidRequest, Misuse
from hurray_wire.image import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, align
from hurray_wire.limits import MAX_WINDOW, PAGE_BYTES, Limits
from hurray_wire.messages import DURATION_MAX_S
from hurray_wire.transport.settings import KINDS, check_kinds, split_list, split_names
from hurray_wire.transport.shm import DEFAULT_PATH, ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx_config import UcxConfig, with_cuda

DEFAULT_CONFIG_PATH = Path("/etc/hurray/hurrayd.toml")
"""Read when it is there and no other file is named."""

_LIMITS = Limits()


class ArenaConfig(Section):
    """Memory that snapshots are received and held in."""

    bytes: ByteSize = Field(default=ByteSize(1 << 30), ge=1 << 20, le=1 << 46)
    """Size, rounded up to a multiple of 4096. A number, or text such as "64GiB"."""
    device: str = "cpu"
    """"cpu", or a GPU: "cuda:0". What is on another kind of device is refused unless its source lets it change that."""
    prefault: bool = True
    """Touch all of it in the background after the start: the first touch is far slower than any copy later."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        _check(lambda: read_device(value))
        return value

    @property
    def gpu(self) -> int | None:
        """Number of the GPU; None: host memory."""
        return read_device(self.device)


class LeaseConfig(Section):
    """How long snapshots are kept."""

    default_s: float = Field(default=60.0, gt=0)
    max_s: float = Field(default=3600.0, gt=0, le=DURATION_MAX_S)
    """A longer lease asked for is cut to this."""
    max_pin_s: float = Field(default=3600.0, gt=0, le=DURATION_MAX_S)
    """How long one reader may have a snapshot mapped before others cannot read it any more. It keeps what it has."""

    @model_validator(mode="after")
    def _check(self) -> LeaseConfig:
        if self.default_s > self.max_s:
            raise ValueError(f"leases.default_s is {self.default_s:g}, above leases.max_s, {self.max_s:g}")
        return self


class LimitsConfig(Section):
    """What peers may ask for."""

    max_tensors: int = Field(default=_LIMITS.max_tensors, ge=1)
    max_snapshot_bytes: ByteSize = Field(default=ByteSize(_LIMITS.max_snapshot_bytes), ge=PAGE_BYTES)
    max_sequences: int = Field(default=_LIMITS.max_sequences, ge=1)
    max_index_entries: int = Field(default=_LIMITS.max_index_entries, ge=1)
    max_message_bytes: int = Field(default=_LIMITS.max_message_bytes, ge=1 << 16, le=1 << 30)
    max_snapshots: int = Field(default=100_000, ge=1)
    max_transfers: int = Field(default=256, ge=1)
    """At a time. Of these, of sessions and of calls one tenant gets one more only while others could have as many as
    it has: never more than half."""
    max_sessions: int = Field(default=1024, ge=1)
    max_readers: int = Field(default=4096, ge=0)
    """Views that are mapped at a time; who asks for one more gets a copy."""
    max_calls: int = Field(default=4096, ge=8)
    """Calls at a time: sessions, transfers, waits for a key and all others."""


class ShmSection(Section):
    """Shared memory, for processes of this host."""

    path: str | None = None
    """The socket by which they find each other; None: the usual path, which need not be had."""
    group: str | None = Field(default=None, min_length=1)
    """Name or number of the group whose processes may connect, beside those of hurrayd's own user. None: hurrayd's own,
    or that of the socket's folder where the folder is setgid."""

    @field_validator("path")
    @classmethod
    def _usable(cls, value: str | None) -> str | None:
        if value is not None:
            _check(lambda: ShmConfig(path=value))
        return value


class TcpSection(Section):
    """Plain sockets, for trusted networks: nothing on them is encrypted."""

    listen: str | None = None
    """Host and port; None: the control plane's, with the port after its own, where that is loopback."""
    advertise: str | None = None
    """Host by which peers reach it, if not as it is listened at. A name is looked up once, at the start."""


@dataclass(frozen=True, slots=True)
class UcxSection(UcxConfig):
    """UCX, and who reaches it."""

    firewall: bool = False
    """Refuse UCX's port, over every device but loopback, to hosts that have no session here."""

    @property
    def transport(self) -> UcxConfig:
        """What the mover is told of it."""
        return UcxConfig(**{item.name: getattr(self, item.name) for item in fields(UcxConfig)})


class TransferConfig(Section):
    """How transfers run."""

    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW)
    """Chunks in flight per transfer; None: as suits the transport."""
    chunk_bytes: int | None = Field(default=None, ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX)
    """Chunk size of snapshots that this node sends; None: as suits the transport."""
    cpus: Annotated[str, AfterValidator(check_cpus)] | None = None
    """CPUs that the thread which moves bytes is kept to, as "2" or "0-3,8"; None: all."""
    max_budget_s: float = Field(default=600.0, gt=0, le=DURATION_MAX_S)
    """Longest time for one transfer, and for a wait for a key; a caller's own deadline may be shorter."""

    @field_validator("chunk_bytes")
    @classmethod
    def _whole_pages(cls, value: int | None) -> int | None:
        if value is not None and value % PAGE_BYTES:
            raise ValueError(f"must be a multiple of {PAGE_BYTES}")
        return value


class LogConfig(Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


class MetricsConfig(Section):
    """Metrics and readiness over HTTP, in plain text, to whoever reaches the address."""

    enabled: bool = True
    listen: str | None = None
    """Host and port; None: loopback, with the port two after the control plane's. Port 0 takes a free one."""

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


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
    ucx: UcxSection = UcxSection()
    """UCX trusts whoever reaches `net_devices`: name none that strangers can reach."""
    leases: LeaseConfig = LeaseConfig()
    limits: LimitsConfig = LimitsConfig()
    transfers: TransferConfig = TransferConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    tls: TlsConfig | None = None
    """None: plain text, one tenant, and no identities."""
    grants: tuple[GrantConfig, ...] = ()
    quotas: dict[TenantName, QuotaConfig] = {}
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
        return split_names(value, "net_devices", "tls", "trusted")

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
        without = self._without
        for kind in self.transports or ():
            if kind in without:
                raise ValueError(f"transports has {kind}: {without[kind]}")
        if self.metrics_listen is not None and self.metrics_listen[1] > 65535:
            raise ValueError(f"there is no port two after that of listen, {self.listen}: say metrics.listen")
        data = self.tls.data if self.tls is not None else DataConfig()
        for name, section in (("tcp", self.tcp), ("tls.data", data)):
            if section.listen is None:
                continue
            listened, _ = split_address(section.listen)
            if listened in ("0.0.0.0", "::") and section.advertise is None:  # noqa: S104 -- compared, not bound
                raise ValueError(
                    f"{name}.listen is {section.listen}: say by which address peers reach it ({name}.advertise)"
                )
        return self

    @property
    def has_tenants(self) -> bool:
        """Whether callers have identities, and share this node with others."""
        return self.tls is not None

    @property
    def tcp_listen(self) -> tuple[str, int]:
        """Host and port that the transport tcp listens at."""
        return split_address(self.tcp.listen) if self.tcp.listen is not None else self._next_port

    @property
    def metrics_listen(self) -> tuple[str, int] | None:
        """Host and port of the metrics; None where there are none."""
        if not self.metrics.enabled:
            return None
        if self.metrics.listen is not None:
            return split_address(self.metrics.listen)
        _, port = split_address(self.listen)
        return "127.0.0.1", port + 2 if port else 0

    @property
    def _next_port(self) -> tuple[str, int]:
        """Host of the control plane and the port after its own, which counts only where it is one."""
        host, port = split_address(self.listen)
        return host, port + 1 if port else 0

    @property
    def _without(self) -> dict[str, str]:
        """Transports that there cannot be unless more is said, and why."""
        found: dict[str, str] = {}
        host, port = self._next_port
        no_port = f"there is no port after that of listen, {self.listen}" if port > 65535 else None
        if self.tls is None:
            found["tls"] = "it needs certificates ([tls])"
        elif self.tls.data.listen is None and no_port:
            found["tls"] = f"{no_port}: say tls.data.listen"
        if self.tls is not None and not self.ucx.trusted:
            found["ucx"] = "whoever reaches it need not show a certificate: ucx.trusted names where that may be"
        if self.tcp.listen is None:
            if self.tls is not None:
                found["tcp"] = "it is not encrypted: tcp.listen names a trusted network"
            elif not is_loopback(host):
                where = f"listen is {self.listen}, not loopback"
                found["tcp"] = f"{where}, and tcp is not encrypted: tcp.listen names a trusted network"
            elif no_port:
                found["tcp"] = f"{no_port}: say tcp.listen"
        return found

    @property
    def left_out(self) -> dict[str, str]:
        """Transports that this configuration leaves out by itself, and why."""
        return self._without if self.transports is None else {}

    @property
    def has_firewall(self) -> bool:
        """Whether UCX is to be guarded, and may run at all."""
        return self.ucx.firewall and "ucx" in self.transports_config.kinds

    @property
    def transports_config(self) -> TransportsConfig:
        """What the mover is told to start."""
        tcp, ucx = _sockets(self.tcp_listen, self.tcp.advertise), self.ucx.transport
        if self.arena.gpu is not None:
            ucx = with_cuda(ucx)
        shm = ShmConfig(path=self.shm.path or DEFAULT_PATH, listens=True, group=self.shm.group)
        if self.tls is None:
            tls = credentials = None
        else:
            data, credentials = self.tls.data, self.tls.data_credentials
            listen = split_address(data.listen) if data.listen is not None else self._next_port
            advertised = data.advertise
            if advertised is None and data.listen is None and self.advertise is not None:
                advertised, _ = split_address(self.advertise)
            tls = _sockets(listen, advertised)
        if self.transports is not None:
            return TransportsConfig(self.transports, shm=shm, tcp=tcp, ucx=ucx, tls=tls, credentials=credentials)
        return TransportsConfig(
            kinds=tuple(kind for kind in KINDS if kind not in self.left_out),
            optional=("ucx",) if self.shm.path or self.shm.group else ("shm", "ucx"),
            by_merit=True,
            shm=shm,
            tcp=tcp,
            ucx=ucx,
            tls=tls,
            credentials=credentials,
        )

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


def _sockets(listen: tuple[str, int], advertised_host: str | None) -> SocketConfig:
    host, port = listen
    return SocketConfig(listen_host=host, listen_port=min(port, 65535), advertised_host=advertised_host)


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
