"""Grants: what a tenant may do follows from the key alone, and a listing is exactly what may be listed."""

from __future__ import annotations

from bisect import insort

from hypothesis import given
from hypothesis import strategies as st

from hurray_server.grants import OWN_RIGHTS, Grant, Grants, Right

KEYS = st.text(alphabet="ab/-", max_size=8)
PREFIXES = st.one_of(st.just(""), st.text(alphabet="ab/-", max_size=6).map(lambda text: text + "/"))
TENANTS = st.sampled_from(["a", "b", "ab"])
GRANTS = st.lists(st.builds(Grant, TENANTS, PREFIXES, st.frozensets(st.sampled_from(Right), min_size=1)), max_size=6)


def plainly(grants: list[Grant], tenant: str, right: Right, key: str) -> bool:
    """The definition."""
    own = right in OWN_RIGHTS and key.startswith(f"{tenant}/")
    return own or any(
        grant.tenant == tenant and right in grant.rights and key.startswith(grant.prefix) for grant in grants
    )


@given(GRANTS, TENANTS, st.sampled_from(Right), KEYS)
def test_nothing_is_allowed_but_ones_own_and_what_is_granted(
    grants: list[Grant], tenant: str, right: Right, key: str
) -> None:
    assert Grants(grants).allows(tenant, right, key) == plainly(grants, tenant, right, key)


@given(GRANTS, TENANTS, KEYS, st.lists(KEYS, max_size=12, unique=True))
def test_a_listing_is_what_may_be_listed_in_order_and_each_once(
    grants: list[Grant], tenant: str, prefix: str, keys: list[str]
) -> None:
    ordered: list[str] = []
    for key in keys:
        insort(ordered, key)
    ranges = Grants(grants).listable(tenant, prefix)
    shown = [key for part in ranges for key in ordered if key.startswith(part)]
    assert shown == [key for key in ordered if key.startswith(prefix) and plainly(grants, tenant, Right.LIST, key)]


def test_nobody_administers_without_being_told() -> None:
    grants = Grants([Grant("ops", "", frozenset([Right.ADMIN])), Grant("root", "", frozenset([Right.PUT]))])
    assert [grants.administers(tenant) for tenant in ("ops", "root", "a")] == [True, False, False]
    assert not grants.allows("ops", Right.GET, "a/x")
    assert grants.allows("root", Right.PUT, "a/x")
