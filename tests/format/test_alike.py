"""Work done once for tensors that are alike comes to what it comes to for each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import pytest
from hypothesis import given
from hypothesis import strategies as st

from format.corpus import LENIENT, Seeded, a_descriptor, descriptors
from format.mutants import Mutator
from hurray_wire.alike import change_each, decode_each, pack_each, placed
from hurray_wire.descriptor import Descriptor, decode_descriptor
from hurray_wire.errors import HurrayError
from hurray_wire.sections import HEADER, NO_LAYER, SHAPE, Statistics

PLACE = HEADER.size + SHAPE.size + 20
"""Where kv_role is, and layer_index after it (OFFSETS.md)."""

MUTANTS = 1500


def outcomes(results: Iterable[object]) -> list[object]:
    """All results up to the first that raises, and what it raises."""
    found: list[object] = []
    try:
        for result in results:
            found.append(repr(result))  # noqa: PERF401 -- what came before an error counts
    except HurrayError as error:
        found.append((type(error), str(error), error.details))
    return found


def worked_out(descriptor: Descriptor) -> dict[str, object]:
    """All that a descriptor works out once."""
    names = [name for name, item in vars(Descriptor).items() if isinstance(item, cached_property)]
    assert names
    return {name: getattr(descriptor, name) for name in names}


def put(data: bytes, kv_role: int, layer_index: int) -> bytes:
    return data[:PLACE] + bytes([kv_role]) + layer_index.to_bytes(4, "little") + data[PLACE + 5 :]


@given(base=descriptors(), places=st.lists(st.tuples(st.integers(0, 4), st.integers(0, NO_LAYER)), max_size=5))
def test_decoding_looks_at_role_and_layer_of_each(base: Descriptor, places: list[tuple[int, int]]) -> None:
    data = base.encode(LENIENT)
    encoded = [data, put(data, 1, NO_LAYER), *(put(data, *place) for place in places)]

    assert outcomes(decode_each(encoded, LENIENT)) == outcomes(decode_descriptor(item, LENIENT) for item in encoded)


@given(base=descriptors(), kv_role=st.integers(0, 2), layer_index=st.none() | st.integers(0, NO_LAYER - 1))
def test_what_is_worked_out_for_one_holds_for_another_place(
    base: Descriptor, kv_role: int, layer_index: int | None
) -> None:
    worked_out(base)

    other, alone = placed(base, kv_role, layer_index), replace(base, kv_role=kv_role, layer_index=layer_index)

    assert other == alone
    assert worked_out(other) == worked_out(alone)


@pytest.mark.parametrize("mutants", [Mutator.of_bytes, Mutator.of_fields])
def test_decoding_sees_every_other_difference(mutants: Callable[[Mutator, int], Iterable[bytes]]) -> None:
    corpus = [a_descriptor(Seeded(number)).encode(LENIENT) for number in range(5)]

    for mutant in mutants(Mutator(corpus, seed=7), MUTANTS):
        for encoded in ([*corpus, mutant], [put(mutant, 0, 0), mutant]):
            plain = outcomes(decode_descriptor(item, LENIENT) for item in encoded[-2:])
            assert outcomes(decode_each(encoded, LENIENT))[-len(plain) :] == plain, mutant.hex()


@given(bases=st.lists(descriptors(), max_size=4), layers=st.lists(st.none() | st.integers(0, NO_LAYER - 1), max_size=4))
def test_packing_tells_apart_what_is_not_alike(bases: list[Descriptor], layers: list[int | None]) -> None:
    items = [replace(base, layer_index=layer, kv_role=role) for layer in layers for base in bases for role in (0, 2)]

    assert list(pack_each(items)) == [item.encode(LENIENT) for item in items]


def test_statistics_that_are_equal_but_for_their_bits_are_told_apart() -> None:
    base = a_descriptor(Seeded(1))
    items = [replace(base, statistics=Statistics(4, value_min=zero), layer_index=1) for zero in (0.0, -0.0)]

    assert list(pack_each(items)) == [item.encode(LENIENT) for item in items]
    assert repr(list(change_each(items, lambda item: replace(item, num_pages=1)))).count("value_min=-0.0") == 1


@given(bases=st.lists(descriptors(), max_size=4), layers=st.lists(st.none() | st.integers(0, 9), max_size=4))
def test_a_change_is_made_once_and_reaches_all(bases: list[Descriptor], layers: list[int | None]) -> None:
    bases = [replace(base, statistics=None) for base in bases]
    items = [replace(base, layer_index=layer, kv_role=role) for layer in layers for base in bases for role in (0, 1)]
    made: list[Descriptor] = []

    def change(descriptor: Descriptor) -> Descriptor:
        made.append(descriptor)
        if descriptor.page_size % 2:
            return descriptor
        return replace(descriptor, buffers=tuple(replace(handle, alignment=64) for handle in descriptor.buffers))

    changed, expected = list(change_each(items, change)), [change(item) for item in items]
    assert changed == expected
    assert [worked_out(item) for item in changed] == [worked_out(replace(item)) for item in expected]
    assert len(made) <= len(bases) + len(items)
