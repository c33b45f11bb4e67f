"""Settings of a client: read from the environment when `connect` is called, never when a module is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from hurray_wire.cpus import check_cpus
from hurray_wire.credentials import Credentials
from hurray_wire.errors import InvalidRequest, Misuse
from hurray_wire.image import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from hurray_wire.limits import MAX_WINDOW, PAGE_BYTES
from hurray_wire.transport.settings import check_kinds, split_list, split_names
from hurray_wire.transport.shm import DEFAULT_PATH, ShmConfig
from hurray_wire.transport.ucx_config import UcxConfig


class ShmSection(BaseModel):
    """Shared memory, for nodes of this host."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str = DEFAULT_PATH
    """The socket of the node, as this process sees it. One that leads to another node, or to none, is not used."""

    @field_validator("path")
    @classmethod
    def _usable(cls, value: str) -> str:
        try:
            return ShmConfig(path=value).path
        except Misuse as error:
            raise ValueError(error.message) from None


class ClientConfig(BaseSettings):
    """What a client may be told. Environment: prefix `HURRAY_`, `__` between levels (`HURRAY_UCX__NET_DEVICES`)."""

    model_config = SettingsConfigDict(
        env_prefix="HURRAY_",
        env_nested_delimiter="__",
        frozen=True,
        extra="ignore",
        nested_model_default_partial_update=True,
    )

    transports: Annotated[tuple[str, ...] | None, NoDecode] = None
    """Connect by those of them that the node has, too, and prefer them in this order. None: by shm where that reaches
    the node, and by the first other transport of the node's that this process has."""

    tls: Credentials | None = None
    """Who this client is, and whose nodes it believes: PEM files, read again after they change. None: plain text, by
    which only a node without identities can be called."""

    shm: ShmSection = ShmSection()

    ucx: UcxConfig = UcxConfig()
    """How UCX runs. It trusts whoever reaches `net_devices`: loopback unless told otherwise. With `tls` it is used only
    where `trusted` names their networks, or `transports` names ucx."""

    chunk_bytes: int | None = Field(default=None, ge=CHUNK_BYTES_MIN, le=CHUNK_BYTES_MAX, multiple_of=PAGE_BYTES)
    """Bytes of a chunk in a put; None: as suits the transport."""

    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW)
    """Chunks in flight in a get; None: as suits the transport."""

    cpus: Annotated[str, AfterValidator(check_cpus)] | None = None
    """CPUs that the data-plane thread is kept to, as "2" or "0-3,8"; None: all that the process may use. Other threads
    of the process are left alone."""

    retry_s: float = Field(default=10.0, ge=0)
    """For how long an unavailable node is tried again, within the budget of the call."""

    connect_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one attempt to connect the two data planes."""

    keepalive_interval_s: float = Field(default=4.0, ge=1)
    """Between gRPC keepalive pings while anything is open. A node takes one a second at most."""

    keepalive_timeout_s: float = Field(default=3.0, gt=0)
    """A node that leaves a ping unanswered for this long is lost."""

    max_concurrency: int = Field(default=64, ge=1)
    """Calls that one asyncio client runs at the same time; more wait."""

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
    def _split_names(cls, value: Any) -> Any:
        return split_names(value, "net_devices", "tls", "trusted")


def with_choices(config: ClientConfig, transports: Sequence[str] | None, tls: Credentials | None) -> ClientConfig:
    """These settings with that choice of transports and those credentials, where they are given. Raises
    InvalidRequest."""
    if tls is not None:
        config = config.model_copy(update={"tls": tls})
    if transports is None:
        return config
    try:
        return config.model_copy(update={"transports": check_kinds(transports)})
    except ValueError as error:
        raise InvalidRequest(str(error), field="transports", offered=", ".join(transports)) from None


def load_config() -> ClientConfig:
    """The settings as the environment has them now. Raises InvalidRequest that names every wrong one."""
    try:
        return ClientConfig()
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise InvalidRequest(
            "; ".join(wrong), field=".".join(map(str, error.errors()[0]["loc"])), required="a valid HURRAY_ variable"
        ) from None
    except SettingsError as error:  # a value that is not JSON
        raise InvalidRequest(f"the environment cannot be read: {error}", field="HURRAY_") from None
