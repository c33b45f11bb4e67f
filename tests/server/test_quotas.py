"""Quotas: exact sums, refused before they are passed, given back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_server.quotas import Charge, Quota, Quotas, Usage
from hurray_wire.errors import Misuse, QuotaExceeded

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "release", "take over", "begin", "end"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 1 << 62),
        st.integers(0, 7),
    ),
    max_size=30,
)


@given(STEPS)
def test_usage_is_the_sum_of_what_is_charged_and_never_above_the_quota(
    steps: list[tuple[str, str, int, int]],
) -> None:
    default, own = Quota(bytes=1 << 62, snapshots=3, transfers=2), Quota(bytes=1 << 60)
    quotas = Quotas(default, {"b": own})
    charges: list[Charge] = []
    slots: list[tuple[str, object]] = []
    for action, tenant, nbytes, number in steps:
        before = {name: Usage(*vars_of(quotas, name)) for name in ("a", "b")}
        try:
            match action:
                case "charge":
                    charges.append(quotas.charge(tenant, nbytes))
                case "release" if charges:
                    quotas.release(charges.pop(number % len(charges)))
                case "take over" if charges:
                    quotas.take_over(charges[number % len(charges)], tenant)
                case "begin":
                    slots.append((tenant, quotas.begin_transfer(tenant)))
                case "end" if slots:
                    slots.pop(number % len(slots))[1]()  # type: ignore[operator]
        except QuotaExceeded:
            assert {name: Usage(*vars_of(quotas, name)) for name in ("a", "b")} == before
        for name, quota in (("a", default), ("b", own)):
            held = [charge for charge in charges if charge.tenant == name]
            running = sum(tenant == name for tenant, _ in slots)
            usage = quotas.usage(name)
            assert usage == Usage(sum(charge.nbytes for charge in held), len(held), running)
            for field in ("bytes", "snapshots", "transfers"):
                most = getattr(quota, field)
                assert most is None or getattr(usage, field) <= most


def vars_of(quotas: Quotas, tenant: str) -> tuple[int, int, int]:
    usage = quotas.usage(tenant)
    return usage.bytes, usage.snapshots, usage.transfers


def test_waiting_is_advised_where_it_can_help() -> None:
    quotas = Quotas(Quota(bytes=10, snapshots=1, transfers=0), {})
    with pytest.raises(QuotaExceeded) as never:
        quotas.charge("a", 11)
    assert (never.value.field, never.value.details["offered"], never.value.retry_after_s) == ("bytes", "11", None)
    quotas.charge("a", 9)
    with pytest.raises(QuotaExceeded) as later:
        quotas.charge("a", 2)
    assert later.value.retry_after_s is not None
    with pytest.raises(QuotaExceeded) as none:
        quotas.begin_transfer("a")
    assert (none.value.field, none.value.retry_after_s) == ("transfers", None)


def test_a_charge_is_released_once() -> None:
    quotas = Quotas(Quota(), {})
    charge = quotas.charge("a", 5)
    quotas.release(charge)
    with pytest.raises(Misuse):
        quotas.release(charge)
    end = quotas.begin_transfer("a")
    end()
    end()
    assert quotas.usage("a") == Usage()
