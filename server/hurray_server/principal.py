"""Who calls. Everything that asks "may they" asks a Principal; where it comes from is decided here alone.

Without identities there is one tenant, `local`: whoever reaches the address. Only callers on this host may administer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from hurray_server.config import is_loopback, split_address
from hurray_wire.errors import PermissionDenied

LOCAL_TENANT: Final = "local"


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `address`: where the call came from, for the log."""

    tenant: str
    admin: bool
    address: str

    def require_admin(self) -> None:
        """Raises PermissionDenied."""
        if not self.admin:
            raise PermissionDenied("only an administrator, on this host, may do this", tenant=self.tenant)


def principal_of(peer: str) -> Principal:
    """The caller at a gRPC peer address ("ipv4:127.0.0.1:40312", "ipv6:[::1]:40312", "unix:")."""
    scheme, _, address = unquote(peer).partition(":")
    try:
        local = scheme == "unix" or is_loopback(split_address(address)[0])
    except ValueError:
        local = False
    return Principal(LOCAL_TENANT, admin=local, address=peer)
