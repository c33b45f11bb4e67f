"""Which tenant an identity is, and what a caller may do. Everything that asks "may they" asks a Principal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hurray_server.grants import Grants, Right
from hurray_wire.credentials import NAME, SPIFFE
from hurray_wire.errors import PermissionDenied, Unauthenticated

LOCAL_TENANT: Final = "local"
"""The one tenant of a node without identities."""

_TENANT: Final = "{tenant}"


class TenantNames:
    """Which tenant an identity is: in a SPIFFE URI what stands where the pattern has {tenant}; else the common name."""

    def __init__(self, pattern: str) -> None:
        """Raises ValueError for a pattern that is none."""
        before, found, after = pattern.partition(_TENANT)
        if not before.startswith(SPIFFE) or not found or _TENANT in after:
            raise ValueError(f"must be a SPIFFE URI with {_TENANT} in it once")
        self._pattern = pattern
        self._form = re.compile(f"{re.escape(before)}({NAME.pattern}){re.escape(after)}")

    def tenant_of(self, identity: str) -> str:
        """Raises Unauthenticated for an identity that is no tenant's."""
        if identity.startswith(SPIFFE):
            found = self._form.fullmatch(identity)
            if found is not None:
                return found[1]
            required = self._pattern
        else:
            if NAME.fullmatch(identity) is not None:
                return identity
            required = NAME.pattern
        raise Unauthenticated(
            "the certificate is not a tenant's", field="certificate", offered=repr(identity)[:256], required=required
        )


def tenant_of(key: str) -> str:
    """Whose a key is, where there are tenants."""
    return key.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `address`: where the call came from, for the log. `identity`: what its certificate says;
    None, and no grants either, on a node without identities, where keys are taken as they are."""

    tenant: str
    admin: bool
    address: str
    identity: str | None
    grants: Grants | None

    def key(self, name: str) -> str:
        """The key that a caller means: one without a slash is its own."""
        return name if self.grants is None or "/" in name else f"{self.tenant}/{name}"

    def owner(self, key: str) -> str:
        """The tenant that a key belongs to, which may read all that is under it."""
        return self.tenant if self.grants is None else tenant_of(key)

    def require(self, right: Right, key: str) -> None:
        """Raises PermissionDenied, which is the same whether or not the key exists."""
        if self.grants is not None and not self.grants.allows(self.tenant, right, key):
            raise self._denied(right, key)

    def listable(self, prefix: str) -> tuple[str, ...]:
        """The prefixes, in order and disjoint, of all keys that begin with `prefix` and that the caller may list.
        Raises PermissionDenied where there can be none."""
        if self.grants is None:
            return (prefix,)
        found = self.grants.listable(self.tenant, self.key(prefix) if prefix else "")
        if not found:
            raise self._denied(Right.LIST, prefix)
        return found

    def require_admin(self) -> None:
        """Raises PermissionDenied."""
        if self.admin:
            return
        if self.grants is None:
            raise PermissionDenied("only an administrator, on this host, may do this", tenant=self.tenant)
        raise self._denied(Right.ADMIN, None)

    def _denied(self, right: Right, key: str | None) -> PermissionDenied:
        return PermissionDenied("no grant allows this", tenant=self.tenant, right=right.value, key=key)
