"""Mutants of valid descriptors: of their bytes, blindly, and of their fields, with the lengths put right again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hurray_wire.cursor import Table
from hurray_wire.dtypes import BY_TAG
from hurray_wire.quantization import SCHEME_TABLES
from hurray_wire.sections import (
    BUFFER_COUNT,
    BUFFER_HANDLE,
    EXTENSION_TYPE,
    HAS_EXTENSION_TYPE,
    HAS_QUANTIZATION,
    HAS_STATISTICS,
    HEADER,
    LAYOUT,
    QUANTIZATION_LENGTH,
    RANGES,
    SHAPE,
    STATISTICS,
)

Values = list[Any]
FLOATS = (0.0, -0.0, 1.0, 0.5, -0.5, 1.5, float("nan"), float("inf"), float("-inf"), 1e-300, 5e-324)
FLOATS_32 = (0.0, -0.0, 1.0, -1.5, float("nan"), float("inf"), float("-inf"), 1e-45, 3e38)
SMALL = (0, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 65, 255, 4096)


@dataclass
class Parts:
    """A descriptor taken apart: the values of its tables."""

    header: Values
    shape: Values
    layout: Values
    handles: list[Values]
    scheme: Values | None
    statistics: Values | None
    extension: Values | None
    padding: bytes = b""
    trailing: bytes = b""
    more_flags: int = 0


def split(data: bytes) -> Parts:
    """The parts of a valid descriptor."""
    position = 0

    def take(table: Table) -> Values:
        nonlocal position
        position += table.size
        return list(table.struct.unpack_from(data, position - table.size))

    header, shape, layout = take(HEADER), take(SHAPE), take(LAYOUT)
    handles = [take(BUFFER_HANDLE) for _ in range(take(BUFFER_COUNT)[0])]
    scheme = None
    padding = b""
    if header[4] & HAS_QUANTIZATION:
        end = position + QUANTIZATION_LENGTH.size + take(QUANTIZATION_LENGTH)[0]
        scheme = take(SCHEME_TABLES[data[position]])
        padding, position = data[position:end], end
    statistics = take(STATISTICS) if header[4] & HAS_STATISTICS else None
    extension = take(EXTENSION_TYPE) if header[4] & HAS_EXTENSION_TYPE else None
    return Parts(header, shape, layout, handles, scheme, statistics, extension, padding, data[position : header[3]])


def join(parts: Parts) -> bytes:
    """The bytes of the parts: flags and lengths say what is there, every value what it was set to."""
    body = [SHAPE.struct.pack(*parts.shape), LAYOUT.struct.pack(*parts.layout)]
    body.append(BUFFER_COUNT.struct.pack(len(parts.handles)))
    body += [BUFFER_HANDLE.struct.pack(*handle) for handle in parts.handles]
    flags = parts.more_flags
    if parts.scheme is not None:
        payload = scheme_table(parts.scheme).struct.pack(*parts.scheme) + parts.padding
        body += [QUANTIZATION_LENGTH.struct.pack(len(payload)), payload]
        flags |= HAS_QUANTIZATION
    if parts.statistics is not None:
        body.append(STATISTICS.struct.pack(*parts.statistics))
        flags |= HAS_STATISTICS
    if parts.extension is not None:
        body.append(EXTENSION_TYPE.struct.pack(*parts.extension))
        flags |= HAS_EXTENSION_TYPE
    body.append(parts.trailing)
    rest = b"".join(body)
    header = [*parts.header]
    header[3:5] = [HEADER.size + len(rest), flags]
    return HEADER.struct.pack(*header) + rest


def scheme_table(scheme: Values) -> Table:
    """The table that the values have the length of, whatever tag they bear."""
    return next(table for table in SCHEME_TABLES.values() if len(table.fields) == len(scheme))


class Mutator:
    """Draws mutants from a corpus of valid descriptors."""

    def __init__(self, corpus: list[bytes], seed: int) -> None:
        self._corpus = corpus
        self._parts = [split(data) for data in corpus]
        self._random = random.Random(seed)
        self._schemes = [parts.scheme for parts in self._parts if parts.scheme is not None]
        self._extensions = [parts.extension for parts in self._parts if parts.extension is not None]
        self._statistics = [parts.statistics for parts in self._parts if parts.statistics is not None]
        self._field_changes: tuple[Callable[[Parts], None], ...] = (
            *[self._change_field] * 12,
            self._change_handles,
            self._change_every_handle,
            self._change_sections,
            self._change_ends,
        )

    def of_bytes(self, count: int) -> Iterator[bytes]:
        """Mutants with bytes overwritten, cut, doubled, or joined from two descriptors. No length is put right."""
        rng = self._random
        for _ in range(count):
            data = bytearray(rng.choice(self._corpus))
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                at = rng.randrange(len(data))
                kind = rng.random()
                if kind < 0.45:
                    data[at] = rng.getrandbits(8)
                elif kind < 0.75:
                    data[at] ^= 1 << rng.randrange(8)
                elif kind < 0.85:
                    data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
                elif kind < 0.90:
                    del data[at : at + rng.randint(1, 20)]
                elif kind < 0.95:
                    data[at:at] = data[at : at + rng.randint(1, 20)]
                else:
                    data[at:] = rng.choice(self._corpus)[at:]
                if not data:
                    break
            yield bytes(data)

    def of_fields(self, count: int) -> Iterator[bytes]:
        """Mutants with fields set and sections changed, with flags and lengths right, and mostly the buffer sizes."""
        rng = self._random
        for _ in range(count):
            parts = copy.copy(rng.choice(self._parts))
            for _ in range(rng.choice((1, 1, 2, 3))):
                rng.choice(self._field_changes)(parts)
            if rng.random() < 0.7:
                repair_sizes(parts)
            yield join(parts)

    def _value(self, code: str, now: Any) -> Any:
        rng = self._random
        if code in RANGES:
            values = RANGES[code]
            value = rng.choice(
                (
                    rng.choice(SMALL),
                    values.stop - 1,
                    values.start,
                    now + 1,
                    now - 1,
                    now ^ (1 << rng.randrange(8)),
                    now * 2,
                    now // 2,
                    rng.randrange(values.start, values.stop),
                )
            )
            return min(max(value, values.start), values.stop - 1)
        if code in "fd":
            return rng.choice(FLOATS_32 if code == "f" else FLOATS)
        filled = bytearray(len(now))
        filled[rng.randrange(len(filled))] = rng.choice((0, 1, 0x80))
        return bytes(filled)

    def _change_field(self, parts: Parts) -> None:
        rng = self._random
        choices = [
            ("header", HEADER, (1, 2, 2, 5, 5, 5, 5, 6, 7)),
            ("shape", SHAPE, range(4)),
            ("layout", LAYOUT, range(8)),
        ]
        if parts.scheme is not None:
            table = scheme_table(parts.scheme)
            choices += [("scheme", table, range(len(table.fields)))] * 2
        if parts.statistics is not None:
            choices.append(("statistics", STATISTICS, range(14)))
        if parts.extension is not None:
            choices.append(("extension", EXTENSION_TYPE, range(12)))
        name, table, fields = rng.choice(choices)
        index = rng.choice(fields)
        values = [*getattr(parts, name)]
        if name == "header" and index == 5:
            values[5] = rng.choice((*BY_TAG, values[5], rng.getrandbits(8)))
        else:
            values[index] = self._value(table.fields[index].code, values[index])
        setattr(parts, name, values)

    def _change_handles(self, parts: Parts) -> None:
        rng = self._random
        handles = [[*handle] for handle in parts.handles]
        kind = rng.random()
        if kind < 0.6 and handles:
            index = rng.randrange(6)
            handle = rng.choice(handles)
            handle[index] = self._value(BUFFER_HANDLE.fields[index].code, handle[index])
        elif kind < 0.8 and handles:
            del handles[rng.randrange(len(handles))]
        elif handles:
            handles += [[*rng.choice(handles)] for _ in range(rng.choice((1, 1, 2, 60)))]
        parts.handles = handles

    def _change_every_handle(self, parts: Parts) -> None:
        """Device, class, sync mode or alignment of all buffers: mostly valid pairs, which one handle alone is not."""
        rng = self._random
        index = rng.choice((1, 2, 3, 4))
        value = rng.choice(((64, 4096, 65536), (*range(9), 0xF0), (0, 1, 2), (0, 1, 2, 3, 0xF0))[index - 1])
        parts.handles = [[*handle[:index], value, *handle[index + 1 :]] for handle in parts.handles]

    def _change_sections(self, parts: Parts) -> None:
        rng = self._random
        kind = rng.randrange(5)
        if kind == 0:
            parts.scheme = rng.choice((None, *self._schemes))
            parts.padding = b""
            # The parameters it names, no more.
            named = 0 if parts.scheme is None or len(parts.scheme) == 6 else len({*parts.scheme[-4:-2]} - {0xFFFFFFFF})
            last = len(parts.handles) - 1
            parts.handles = [[*parts.handles[min(index, last)]] for index in range(3 + named)] if last >= 0 else []
        elif kind == 1:
            parts.statistics = rng.choice((None, *self._statistics))
        elif kind == 2:
            parts.extension = rng.choice((None, *self._extensions))
            parts.header = [*parts.header]
            parts.header[5] = rng.randint(0xF0, 0xFE) if parts.extension else rng.choice((*BY_TAG,))
        elif kind == 3:
            parts.more_flags = 1 << rng.randrange(32)
        elif parts.scheme is not None and len(parts.scheme) == 9:
            size = rng.choice(SMALL)
            parts.layout = [size, *parts.layout[1:]]
            parts.scheme = [*parts.scheme[:4], size, *parts.scheme[5:]]

    def _change_ends(self, parts: Parts) -> None:
        rng = self._random
        extra = bytes(rng.getrandbits(8) for _ in range(rng.randint(1, 24)))
        if parts.scheme is not None and rng.random() < 0.5:
            parts.padding = extra
        else:
            parts.trailing = extra
            if rng.random() < 0.7:
                parts.header = [*parts.header]
                parts.header[2] = rng.randint(0, 255)


def repair_sizes(parts: Parts) -> None:
    """Give every buffer the size that the geometry asks for, where it has one that fits, so that later rules decide."""
    if len(parts.handles) < 3:
        return
    page_size, num_pages, _, num_seqs, _, _, index_type, _ = parts.layout
    tag = parts.header[5]
    elements = num_pages * page_size * parts.shape[1] * parts.shape[2]
    if tag in BY_TAG:
        pool = BY_TAG[tag].packed_bytes(elements)
    elif parts.extension is not None:
        pool = -(-elements * parts.extension[0] // 8)
    else:
        return
    width = 8 if index_type else 4
    pages = parts.handles[1][0] // width if num_pages and num_seqs else 0
    sizes = [pool, pages * width, (num_seqs + 1) * width, *(handle[0] for handle in parts.handles[3:])]
    scheme = parts.scheme
    if scheme is not None and len(scheme) > 6:
        axis = scheme[3]
        entries = parts.shape[axis] if len(scheme) == 8 and axis < 3 else num_pages * page_size
        scale_index, zero_point_index, scale_type = scheme[-4:-1]
        needed: dict[int, int] = {}
        for index, bytes_each in ((scale_index, 2 if scale_type in (1, 2) else 4), (zero_point_index, 4)):
            needed[index] = needed.get(index, 0) + entries * bytes_each
        sizes[3:] = [needed.get(index, size) for index, size in enumerate(sizes) if index >= 3]
    parts.handles = [[min(size, (1 << 64) - 1), *handle[1:]] for size, handle in zip(sizes, parts.handles, strict=True)]
    parts.shape = [min(parts.shape[0], pages * page_size), *parts.shape[1:]]
