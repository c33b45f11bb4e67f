"""Who calls: from the certificate of a TLS connection, or, without identities, whoever reaches the address.

Never from a request. What a certificate says is parsed once; afterwards a call costs a look-up and a clock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol
from urllib.parse import unquote

from hurray_server.config import Config, is_loopback, split_address
from hurray_server.grants import Grants
from hurray_server.principal import LOCAL_TENANT, Principal, TenantNames
from hurray_wire.credentials import read_certificate
from hurray_wire.errors import Unauthenticated


class Connection(Protocol):
    """What gRPC knows of a call's connection."""

    def peer(self) -> str:
        """Address: "ipv4:127.0.0.1:40312", "ipv6:[::1]:40312", "unix:"."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What TLS has verified."""


_CACHED: Final = 1024
"""Certificates, and addresses, whose meaning is remembered."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """Of a certificate."""

    tenant: str
    admin: bool
    identity: str
    not_after: datetime


class CertifiedCallers:
    """Callers by their certificates."""

    def __init__(
        self, names: TenantNames, grants: Grants, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._names = names
        self._grants = grants
        self._now = now
        self._holder = functools.lru_cache(_CACHED)(self._read_holder)

    def principal(self, connection: Connection) -> Principal:
        """The caller. Raises Unauthenticated for a certificate that names no tenant, and for one that has expired since
        the connection was made."""
        certificate = next(iter(connection.auth_context().get("x509_pem_cert", ())), None)
        if certificate is None:
            raise Unauthenticated("the connection has no certificate", field="certificate")
        holder = self._holder(certificate)
        if self._now() > holder.not_after:
            raise Unauthenticated(
                "the certificate of this connection has expired: connect anew with another",
                field="certificate",
                offered=f"until {holder.not_after:%Y-%m-%d %H:%M:%S}Z",
            )
        return Principal(holder.tenant, holder.admin, connection.peer(), holder.identity, self._grants)

    def _read_holder(self, certificate: bytes) -> _Holder:
        facts = read_certificate(certificate)
        identity = facts.require_identity()
        tenant = self._names.tenant_of(identity)
        return _Holder(tenant, self._grants.administers(tenant), identity, facts.not_after)


class LocalCallers:
    """One tenant, `local`: whoever reaches the address. Only callers on this host may administer."""

    def principal(self, connection: Connection) -> Principal:
        """The caller."""
        address = connection.peer()
        return Principal(LOCAL_TENANT, admin=_is_of_this_host(address), address=address, identity=None, grants=None)


@functools.lru_cache(_CACHED)
def _is_of_this_host(address: str) -> bool:
    scheme, _, place = unquote(address).partition(":")
    try:
        return scheme == "unix" or is_loopback(split_address(place)[0])
    except ValueError:
        return False


Callers = CertifiedCallers | LocalCallers


def make_callers(config: Config) -> Callers:
    """As this configuration has them."""
    if config.tls is None:
        return LocalCallers()
    return CertifiedCallers(TenantNames(config.tls.tenants), Grants(item.grant for item in config.grants))
