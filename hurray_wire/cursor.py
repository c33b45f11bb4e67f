"""Packed little-endian structs as tables of named fields, and a cursor that reads them without leaving its bounds."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from .policy import broken


class Field(NamedTuple):
    """One field of a table: `code` is its struct format character, `offset` and `size` are bytes in the table."""

    name: str
    code: str
    offset: int
    size: int


class Table:
    """The fields of one packed little-endian struct in wire order. `size` is its length in bytes.

    Reserved bytes are fields like any other (`6s`, not `6x`): a strict reader checks them.
    """

    __slots__ = ("fields", "name", "size", "struct")

    def __init__(self, name: str, *fields: tuple[str, str]) -> None:
        self.name: Final = name
        self.struct: Final = struct.Struct("<" + "".join(code for _, code in fields))
        self.size: Final = self.struct.size
        placed = []
        offset = 0
        for field_name, code in fields:
            size = struct.calcsize("<" + code)
            placed.append(Field(field_name, code, offset, size))
            offset += size
        self.fields: Final = tuple(placed)


class Cursor:
    """Reads tables from `data` between `position` and `limit`, and nothing outside (rule H6)."""

    __slots__ = ("_data", "limit", "position")

    def __init__(self, data: bytes | memoryview, position: int, limit: int) -> None:
        assert 0 <= position <= limit <= len(data)
        self._data = data
        self.position = position
        self.limit = limit

    def read(self, table: Table) -> tuple[Any, ...]:
        """The values of one table. Raises InvalidDescriptor (H6) if it runs past the limit."""
        start = self._advance(table.size, table.name)
        return table.struct.unpack_from(self._data, start)

    def read_each(self, table: Table, count: int) -> list[tuple[Any, ...]]:
        """The values of `count` tables, one after another. Raises InvalidDescriptor (H6) before it reads any."""
        start = self._advance(table.size * count, table.name)
        return list(table.struct.iter_unpack(self._data[start : self.position]))

    def take(self, size: int, section: str) -> bytes | memoryview:
        """The next `size` bytes. Raises InvalidDescriptor (H6) if they run past the limit."""
        start = self._advance(size, section)
        return self._data[start : self.position]

    def _advance(self, size: int, section: str) -> int:
        start = self.position
        if size > self.limit - start:
            offered = f"{size} bytes at offset {start}"
            raise broken("H6", section, offered, f"within descriptor_length {self.limit}")
        self.position = start + size
        return start
