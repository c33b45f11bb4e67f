"""Work on descriptors that is done once for all that differ in kv_role and layer_index alone, as most of a snapshot do.

No rule of the format connects these two fields with any other, and neither has a say in any size, so what was checked
and worked out for one tensor holds for the others: only the two fields are looked at anew.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, TypeVar

from .descriptor import Descriptor, decode_descriptor
from .policy import STRICT, Policy
from .sections import HEADER, KV_ROLE_NAMES, LAYOUT, NO_LAYER, SHAPE

Made = TypeVar("Made")

_PLACE: Final = struct.Struct("<BI")
"""kv_role and layer_index, which follow each other in the layout fields."""

_START: Final = HEADER.size + SHAPE.size + next(item.offset for item in LAYOUT.fields if item.name == "kv_role")
_END: Final = _START + _PLACE.size

_KV_ROLES: Final = range(len(KV_ROLE_NAMES))

_GEOMETRY: Final = [item.name for item in fields(Descriptor) if item.name not in ("kv_role", "layer_index")]

_geometry: Final[Callable[[Descriptor], tuple[Any, ...]]] = attrgetter(*_GEOMETRY)


def placed(descriptor: Descriptor, kv_role: int, layer_index: int | None) -> Descriptor:
    """The descriptor of a tensor that is alike, of another role and layer."""
    if descriptor.kv_role == kv_role and descriptor.layer_index == layer_index:
        return descriptor
    # Not by dataclasses.replace, which takes several times as long: all tensors of a snapshot come through here. What
    # has been worked out for the one comes along.
    values = descriptor.__dict__.copy()
    values["kv_role"], values["layer_index"] = kv_role, layer_index
    alike = object.__new__(Descriptor)
    object.__setattr__(alike, "__dict__", values)
    return alike


def change_each(descriptors: Iterable[Descriptor], change: Callable[[Descriptor], Descriptor]) -> Iterator[Descriptor]:
    """`change` of each, which must leave kv_role and layer_index as they are, look at neither, and keep the rules."""

    def changed(descriptor: Descriptor) -> Descriptor | None:
        other = change(descriptor)
        return None if other is descriptor else _worked_out(other)

    for descriptor, other in _with_each(descriptors, changed):
        yield descriptor if other is None else placed(other, descriptor.kv_role, descriptor.layer_index)


def pack_each(descriptors: Iterable[Descriptor]) -> Iterator[bytes]:
    """The canonical bytes of each. All must have been checked, or decoded."""

    def around(descriptor: Descriptor) -> tuple[bytes, bytes]:
        packed = descriptor.pack()
        return packed[:_START], packed[_END:]

    for descriptor, (head, tail) in _with_each(descriptors, around):
        layer_index = NO_LAYER if descriptor.layer_index is None else descriptor.layer_index
        yield head + _PLACE.pack(descriptor.kv_role, layer_index) + tail


def decode_each(encoded: Iterable[bytes], policy: Policy = STRICT) -> Iterator[tuple[Descriptor, int]]:
    """What `decode_descriptor` returns for each. Raises what it raises."""
    known: dict[tuple[bytes, bytes], tuple[Descriptor, int]] = {}
    for data in encoded:
        key = data[:_START], data[_END:]
        found = known.get(key)
        if found is not None and data[_START] in _KV_ROLES:
            descriptor, consumed = found
            kv_role, layer_index = _PLACE.unpack_from(data, _START)
            yield placed(descriptor, kv_role, None if layer_index == NO_LAYER else layer_index), consumed
        else:
            found = known[key] = decode_descriptor(data, policy)
            _worked_out(found[0])
            yield found


def _with_each(
    descriptors: Iterable[Descriptor], make: Callable[[Descriptor], Made]
) -> Iterator[tuple[Descriptor, Made]]:
    """Each, with what `make` makes of the first that is alike."""
    known: dict[tuple[Any, ...], Made] = {}
    last: tuple[Any, ...] | None = None
    for descriptor in descriptors:
        key = _key(descriptor)
        if key != last:  # to compare with the one before costs less than to hash
            last = key
            if key not in known:
                known[key] = make(descriptor)
            made = known[key]
        yield descriptor, made


def _worked_out(descriptor: Descriptor) -> Descriptor:
    """It, with all that follows from its geometry and that each of those that are alike would work out again."""
    _ = descriptor.own_buffers, descriptor.page_pool_bytes, descriptor.total_logical_pages
    return descriptor


def _key(descriptor: Descriptor) -> tuple[Any, ...]:
    """Equal for tensors that are alike. Not for those with statistics: floats that are equal may have other bytes."""
    return _geometry(descriptor) if descriptor.statistics is None else (object(),)
