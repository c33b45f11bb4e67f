"""Which tenant may do what with which keys. Deny by default; pure, decided from the key alone and never from what is
held, so that a refusal says nothing about it.

Every key begins with the tenant it belongs to, `tenant/name...`. A tenant may put, get, list and delete what belongs to
it; all else takes a grant of the configuration. `admin` is the right to end the node, and implies none of the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Right(Enum):
    """What can be granted."""

    PUT = "put"
    GET = "get"
    LIST = "list"
    DELETE = "delete"
    ADMIN = "admin"


OWN_RIGHTS: Final = (Right.PUT, Right.GET, Right.LIST, Right.DELETE)
"""What a tenant may do below its own name."""


@dataclass(frozen=True, slots=True)
class Grant:
    """`tenant` may do `rights` with all keys that begin with `prefix`: "" or whole parts of a key, "a/shared/"."""

    tenant: str
    prefix: str
    rights: frozenset[Right]


class Grants:
    """See the module. A question takes time in the number of grants of one tenant, a few bisections at most."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._granted: dict[tuple[str, Right], tuple[str, ...]] = {}
        found: dict[tuple[str, Right], set[str]] = {}
        for grant in grants:
            for right in grant.rights:
                found.setdefault((grant.tenant, right), set()).add(grant.prefix)
        for (tenant, right), prefixes in found.items():
            own = {f"{tenant}/"} if right in OWN_RIGHTS else set()
            self._granted[tenant, right] = _disjoint(prefixes | own)

    def prefixes(self, tenant: str, right: Right) -> tuple[str, ...]:
        """Where a tenant has a right, in order; none begins with another."""
        granted = self._granted.get((tenant, right))
        if granted is not None:
            return granted
        return (f"{tenant}/",) if right in OWN_RIGHTS else ()

    def allows(self, tenant: str, right: Right, key: str) -> bool:
        """Whether a tenant may do this with this key."""
        prefixes = self.prefixes(tenant, right)
        position = bisect_right(prefixes, key)
        return position > 0 and key.startswith(prefixes[position - 1])

    def administers(self, tenant: str) -> bool:
        """Whether a tenant may end the node."""
        return bool(self.prefixes(tenant, Right.ADMIN))

    def listable(self, tenant: str, prefix: str) -> tuple[str, ...]:
        """The prefixes, in order and disjoint, that hold exactly the keys that begin with `prefix` and that the tenant
        may list."""
        if self.allows(tenant, Right.LIST, prefix):
            return (prefix,)
        return tuple(granted for granted in self.prefixes(tenant, Right.LIST) if granted.startswith(prefix))


def _disjoint(prefixes: Iterable[str]) -> tuple[str, ...]:
    """The same keys by fewest prefixes, in order."""
    kept: list[str] = []
    for prefix in sorted(prefixes):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return tuple(kept)
