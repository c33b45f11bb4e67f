"""Work on descriptors that is done once for all that differ in kv_role and layer_index alone, as most of a snapshot do.

No rule of the format connects these two fields with any other, and neither has a say in any size, so what was checked
and worked out for one tensor holds for the others: only the two fields are looked at anew.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from .descriptor import Descriptor, decode_descriptor
from .policy import STRICT, Policy
from .sections import HEADER, KV_ROLE_NAMES, LAYOUT, NO_LAYER, SHAPE

_PLACE: Final = struct.Struct("<BI")
"""kv_role and layer_index, which follow each other in the layout fields."""

_START: Final = HEADER.size + SHAPE.size + next(item.offset for item in LAYOUT.fields if item.name == "kv_role")
_END: Final = _START + _PLACE.size

_KV_ROLES: Final = range(len(KV_ROLE_NAMES))

_GEOMETRY: Final = [item.name for item in fields(Descriptor) if item.name not in ("kv_role", "layer_index")]

_geometry: Final[Callable[[Descriptor], tuple[Any, ...]]] = attrgetter(*_GEOMETRY)

_setters: Final = [getattr(Descriptor, name).__set__ for name in (*_GEOMETRY, "kv_role", "layer_index")]


def placed(descriptor: Descriptor, kv_role: int, layer_index: int | None) -> Descriptor:
    """The descriptor of a tensor that is alike, of another role and layer."""
    if descriptor.kv_role == kv_role and descriptor.layer_index == layer_index:
        return descriptor
    # By its slots: dataclasses.replace takes several times as long, and all tensors of a snapshot come through here.
    alike = object.__new__(Descriptor)
    for set_field, value in zip(_setters, (*_geometry(descriptor), kv_role, layer_index), strict=True):
        set_field(alike, value)
    return alike


def change_each(descriptors: Iterable[Descriptor], change: Callable[[Descriptor], Descriptor]) -> Iterator[Descriptor]:
    """`change` of each, which must leave kv_role and layer_index as they are and look at neither."""
    known: dict[tuple[Any, ...], Descriptor | None] = {}
    for descriptor in descriptors:
        key = _key(descriptor)
        if key not in known:
            changed = change(descriptor)
            known[key] = None if changed is descriptor else changed
        alike = known[key]
        yield descriptor if alike is None else placed(alike, descriptor.kv_role, descriptor.layer_index)


def pack_each(descriptors: Iterable[Descriptor]) -> Iterator[bytes]:
    """The canonical bytes of each. All must have been checked, or decoded."""
    known: dict[tuple[Any, ...], bytes] = {}
    for descriptor in descriptors:
        key = _key(descriptor)
        packed = known.get(key)
        if packed is None:
            packed = known[key] = descriptor.pack()
            yield packed
        else:
            layer_index = NO_LAYER if descriptor.layer_index is None else descriptor.layer_index
            yield packed[:_START] + _PLACE.pack(descriptor.kv_role, layer_index) + packed[_END:]


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
            yield found


def _key(descriptor: Descriptor) -> tuple[Any, ...]:
    """Equal for tensors that are alike. Not for those with statistics: floats that are equal may have other bytes."""
    return _geometry(descriptor) if descriptor.statistics is None else (object(),)
