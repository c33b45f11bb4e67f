"""Configuration of who may call and what they may do: certificates, grants, quotas, the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from hurray_server.grants import Grant, Right
from hurray_server.principal import TenantNames
from hurray_server.quotas import Quota
from hurray_wire.credentials import NAME, TENANT_URI, Credentials

DEFAULT_QUOTA = "default"
"""The name, among quotas by tenant, of that of all others."""


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """The transport tls. Its process holds this key, and not the control plane's where this is another."""

    certificate: Path | None = None
    """None, as is the key then: those of the control plane."""
    key: Path | None = None
    listen: str | None = None
    """Host and port; None: the control plane's, with the port after its own."""
    advertise: str | None = None
    """Host by which peers reach it; None: that of the control plane, if it listens there."""

    @model_validator(mode="after")
    def _check_pair(self) -> DataConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key come together")
        return self


class TlsConfig(Section):
    """Who this node is and whose certificates it takes. PEM files, which are read again after they change."""

    certificate: Path
    """This node's, then the ones between it and the authority."""
    key: Path
    """Not encrypted."""
    ca: Path
    """The authorities that callers' certificates must come from."""
    tenants: str = TENANT_URI
    """SPIFFE URI of tenants, with {tenant} where the name is. Without a SPIFFE URI the common name is the tenant."""
    data: DataConfig = DataConfig()

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
        return Credentials(self.data.certificate or self.certificate, self.data.key or self.key, self.ca)


TenantName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class GrantConfig(Section):
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


class QuotaConfig(Section):
    """How much one tenant may have; what is not given is as in `quotas.default`, and without bound there."""

    bytes: ByteSize | None = Field(default=None, ge=0)
    """Memory of its snapshots."""
    snapshots: int | None = Field(default=None, ge=0)
    transfers: int | None = Field(default=None, ge=0)
    """Puts and gets at a time, those that wait for a key included."""


class AuditConfig(Section):
    """Who did what: one JSON object a line."""

    path: Path | None = None
    """The file; None: standard error."""


def read_quotas(quotas: Mapping[str, QuotaConfig]) -> tuple[Quota, dict[str, Quota]]:
    """The quota of tenants that have none of their own, and those of the others."""
    default = Quota(**quotas.get(DEFAULT_QUOTA, QuotaConfig()).model_dump())
    own = {
        tenant: replace(default, **quota.model_dump(exclude_none=True))
        for tenant, quota in quotas.items()
        if tenant != DEFAULT_QUOTA
    }
    return default, own
