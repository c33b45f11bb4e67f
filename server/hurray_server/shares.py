"""What all tenants of a node share, so that none can keep the others from it. Pure.

`Share`: so many of something at a time. `Remembered`: so many items that are kept for later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from hurray_wire.errors import LimitExceeded


class Share:
    """At most `most` of something at a time, called `field` in the configuration. `divided`: there are tenants, and one
    has another only while it has fewer than are left. So it never takes more than half, and whoever comes next finds as
    many as it has."""

    def __init__(self, what: str, field: str, most: int, *, divided: bool, retry_after_s: float) -> None:
        self._what = what
        self._field = field
        self._most = most
        self._divided = divided
        self._retry_after_s = retry_after_s
        self._taken: dict[str, int] = {}
        self._count = 0

    def require(self, tenant: str) -> None:
        """Raises LimitExceeded where this tenant can have none more now."""
        left, has = self._most - self._count, self._taken.get(tenant, 0)
        if left <= 0:
            self._refuse(f"this node has as many {self._what} as it may", self._count, self._most)
        if self._divided and has >= left:
            self._refuse(f"this tenant has as many {self._what} as are left for others", has, has)

    def take(self, tenant: str) -> None:
        """One more. Raises LimitExceeded."""
        self.require(tenant)
        self._taken[tenant] = self._taken.get(tenant, 0) + 1
        self._count += 1

    def give_back(self, tenant: str) -> None:
        """One less."""
        self._count -= 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """One more meanwhile. Raises LimitExceeded."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

    def _refuse(self, message: str, has: int, most: int) -> None:
        raise LimitExceeded(
            message, retry_after_s=self._retry_after_s, field=self._field, offered=has + 1, required=f"<= {most}"
        )


NameT = TypeVar("NameT", bound=Hashable)
ItemT = TypeVar("ItemT")


class Remembered(Generic[NameT, ItemT]):
    """At most `most` items by their names, each some tenant's. Where there would be more, the tenant that has most
    loses its oldest: what one does makes no other forget."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: OrderedDict[NameT, tuple[str, ItemT]] = OrderedDict()
        """The oldest first."""
        self._names: dict[str, OrderedDict[NameT, None]] = {}
        """Of each tenant, in the same order."""
        self._tenants: dict[int, dict[str, None]] = {}
        """By how many items they have."""
        self._largest = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: NameT) -> ItemT | None:
        """What has this name."""
        found = self._items.get(name)
        return None if found is None else found[1]

    def add(self, tenant: str, name: NameT, item: ItemT) -> NameT | None:
        """Add what is now the newest; the name of what is forgotten for it."""
        self.drop(name)
        self._items[name] = tenant, item
        self._names.setdefault(tenant, OrderedDict())[name] = None
        self._resized(tenant, 1)
        if len(self._items) <= self._most:
            return None
        oldest = next(iter(self._names[next(iter(self._tenants[self._largest]))]))
        self.drop(oldest)
        return oldest

    def drop(self, name: NameT) -> None:
        """Forget it, if it is there."""
        found = self._items.pop(name, None)
        if found is not None:
            tenant = found[0]
            del self._names[tenant][name]
            self._resized(tenant, -1)

    def drop_oldest(self, is_over: Callable[[ItemT], bool]) -> Iterator[NameT]:
        """Forget the oldest for as long as it is over; their names."""
        while self._items:
            name, (_, item) = next(iter(self._items.items()))
            if not is_over(item):
                return
            self.drop(name)
            yield name

    def clear(self) -> None:
        """Forget all."""
        self._items.clear()
        self._names.clear()
        self._tenants.clear()
        self._largest = 0

    def _resized(self, tenant: str, by: int) -> None:
        """A tenant has one more or one less."""
        count = len(self._names[tenant])
        before = self._tenants.get(count - by, {})
        before.pop(tenant, None)
        if not before:
            self._tenants.pop(count - by, None)
        if count:
            self._tenants.setdefault(count, {})[tenant] = None
        else:
            del self._names[tenant]
        if count > self._largest or self._largest not in self._tenants:
            self._largest = count
