"""How much each tenant may make this node hold and do. Pure, in whole numbers.

Whoever puts a snapshot is charged for it, wherever its key is: from before its memory is reserved until that memory is
free again, readers after deletion included. Who extends its lease takes the charge over. A charge is taken in one step
with the check, so that no two transfers pass one limit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hurray_wire.errors import Misuse, QuotaExceeded

RETRY_AFTER_S: Final = 1.0
"""When a tenant that is over its quota may ask again: when its transfers end, leases run out or readers go."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of one tenant; None: those of the node alone.

    `transfers`: puts and gets at a time, those that wait for a key included.
    """

    bytes: int | None = None
    snapshots: int | None = None
    transfers: int | None = None


@dataclass(slots=True)
class Usage:
    """What a tenant has."""

    bytes: int = 0
    snapshots: int = 0
    transfers: int = 0


@dataclass(eq=False, slots=True)
class Charge:
    """What a tenant was charged for one snapshot, until it is released."""

    tenant: str
    nbytes: int
    released: bool = False


class Quotas:
    """See the module. `quotas`: of tenants that have one of their own."""

    def __init__(self, default: Quota, quotas: Mapping[str, Quota]) -> None:
        self._default = default
        self._quotas = dict(quotas)
        self._usage: dict[str, Usage] = {}
        """By tenant; entries stay: there are no more than certificates."""

    def usage(self, tenant: str) -> Usage:
        """What a tenant has now."""
        return self._usage.get(tenant, Usage())

    def charge(self, tenant: str, nbytes: int) -> Charge:
        """One more snapshot, of so many bytes of memory. Raises QuotaExceeded."""
        quota, usage = self._of(tenant)
        _require("bytes", usage.bytes, nbytes, quota.bytes)
        _require("snapshots", usage.snapshots, 1, quota.snapshots)
        usage.bytes += nbytes
        usage.snapshots += 1
        return Charge(tenant, nbytes)

    def release(self, charge: Charge) -> None:
        """The memory is free again."""
        if charge.released:
            raise Misuse("this charge was released", tenant=charge.tenant)
        charge.released = True
        usage = self._usage[charge.tenant]
        usage.bytes -= charge.nbytes
        usage.snapshots -= 1

    def take_over(self, charge: Charge, tenant: str) -> None:
        """Charge this tenant for it instead. Raises QuotaExceeded, and leaves it where it is."""
        if charge.tenant != tenant:
            taken = self.charge(tenant, charge.nbytes)
            self.release(charge)
            charge.tenant, charge.released = taken.tenant, False

    def begin_transfer(self, tenant: str) -> Callable[[], None]:
        """One more transfer, until what this returns is called, which may happen again. Raises QuotaExceeded."""
        quota, usage = self._of(tenant)
        _require("transfers", usage.transfers, 1, quota.transfers)
        usage.transfers += 1
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                usage.transfers -= 1

        return end

    def _of(self, tenant: str) -> tuple[Quota, Usage]:
        return self._quotas.get(tenant, self._default), self._usage.setdefault(tenant, Usage())


def _require(field: str, used: int, more: int, allowed: int | None) -> None:
    if allowed is not None and used + more > allowed:
        raise QuotaExceeded(
            f"the tenant's quota of {field} would be passed",
            retry_after_s=RETRY_AFTER_S if more <= allowed else None,
            field=field,
            offered=used + more,
            allowed=allowed,
        )
