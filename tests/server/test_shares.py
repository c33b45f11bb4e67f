"""What tenants share: nobody can take it all, and nobody's is forgotten for another's sake."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_server.shares import Remembered, Share
from hurray_wire.errors import LimitExceeded


def share(most: int, *, divided: bool) -> Share:
    return Share("calls", "max_calls", most, divided=divided, retry_after_s=1.0)


def take_all(of: Share, tenant: str) -> int:
    count = 0
    while True:
        try:
            of.take(tenant)
        except LimitExceeded:
            return count
        count += 1


def test_who_has_a_node_alone_has_all_of_it() -> None:
    assert take_all(share(8, divided=False), "local") == 8


@pytest.mark.parametrize(("most", "counts"), [(8, [4, 2, 1, 1, 0]), (1, [1, 0]), (1024, [512, 256, 128, 64])])
def test_each_tenant_leaves_as_many_for_the_next_as_it_has(most: int, counts: list[int]) -> None:
    divided = share(most, divided=True)
    assert [take_all(divided, f"{number}") for number in range(len(counts))] == counts


def test_what_is_given_back_is_there_for_all() -> None:
    divided = share(4, divided=True)
    with divided.taken("a"), divided.taken("a"):
        with pytest.raises(LimitExceeded, match="left for others") as caught:
            divided.take("a")
        assert (caught.value.field, caught.value.retry_after_s) == ("max_calls", 1.0)
        assert take_all(divided, "b") == 1
        with divided.taken("c"), pytest.raises(LimitExceeded, match="this node has as many"):
            divided.require("d")
    divided.give_back("b")
    assert take_all(divided, "d") == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=60))
def test_whoever_has_most_forgets_its_oldest(steps: list[tuple[str, int, bool]]) -> None:
    most, remembered = 5, Remembered[tuple[str, int], str](5)
    model: dict[tuple[str, int], str] = {}  # the oldest first
    for tenant, number, adds in steps:
        name = tenant, number
        model.pop(name, None)
        if adds:
            model[name] = f"{number}"
            forgotten = remembered.add(tenant, name, f"{number}")
            counts = Counter(owner for owner, _ in model)
            if len(model) > most:
                assert forgotten is not None
                assert counts[forgotten[0]] == max(counts.values())
                assert forgotten == next(known for known in model if known[0] == forgotten[0])
                del model[forgotten]
            else:
                assert forgotten is None
        else:
            remembered.drop(name)
        assert len(remembered) == len(model)
        assert {known: remembered.get(known) for known in model} == model
    oldest = [known for known, _ in zip(model, range(2), strict=False)]
    over = {model[known] for known in oldest}
    gone = list(remembered.drop_oldest(lambda item: item in over))
    assert gone[: len(oldest)] == oldest
    remembered.clear()
    assert len(remembered) == 0
    assert remembered.add("a", ("a", 0), "0") is None
