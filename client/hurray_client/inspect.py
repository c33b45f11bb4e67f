"""A descriptor as an annotated hex table: every field with its offset, bytes, value and meaning.

Works on invalid descriptors, too: the bytes are split by the offset tables as far as they go, and the first broken
rule is shown at the field that breaks it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.table import Table as RichTable
from rich.text import Text

from hurray_wire.cursor import Table
from hurray_wire.descriptor import Descriptor, decode_descriptor
from hurray_wire.dtypes import BY_TAG, TYPE_TAG_PRIVATE
from hurray_wire.errors import HurrayError
from hurray_wire.policy import STRICT, Policy
from hurray_wire.quantization import NO_BUFFER, SCHEME_HEADER, SCHEME_TABLES
from hurray_wire.sections import (
    BLOCK_PAGED,
    BUFFER_COUNT,
    BUFFER_HANDLE,
    DEVICE_NAMES,
    DYNAMIC,
    EXTENSION_TYPE,
    HAS_COMPOSITE_MEMBER,
    HAS_EXTENSION_TYPE,
    HAS_QUANTIZATION,
    HAS_SHARD,
    HAS_STATISTICS,
    HEADER,
    KV_ROLE_NAMES,
    LAYOUT,
    MAGIC,
    MEMORY_CLASS_NAMES,
    NO_LAYER,
    PRIVATE,
    QUANTIZATION_LENGTH,
    RANK,
    SHAPE,
    STATISTICS,
    SYNC_MODE_NAMES,
)

SHARD_BYTES, COMPOSITE_MEMBER_BYTES = 48, 16
_HEX_BYTES: Final = 32
"""Longest run of bytes that a row shows."""

_CUT_NOTE: Final = "does not hold the next section"

_FLAG_NAMES: Final = {
    HAS_QUANTIZATION: "quantization",
    HAS_SHARD: "shard",
    HAS_EXTENSION_TYPE: "extension type",
    HAS_STATISTICS: "statistics",
    HAS_COMPOSITE_MEMBER: "composite member",
}
_SCHEME_NAMES: Final = {
    0x01: "per-tensor affine",
    0x02: "per-channel affine",
    0x03: "per-block affine",
    0x04: "NF4",
    0x05: "MXFP",
}
_MASK_NAMES: Final = ("nnz", "sparsity", "value range", "value stats", "n:m sparsity", "nan/inf")
_BUFFER_NAMES: Final = ("page_pool", "block_table", "seq_ptr")


@dataclass(frozen=True, slots=True)
class Row:
    """One field: where it is, its bytes in hex, its value, what that means, and what is wrong with it, if anything."""

    offset: int
    size: int
    hex: str
    field: str
    value: str
    note: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `describe` found. `descriptor` is None and `error` says why where the descriptor is refused."""

    rows: tuple[Row, ...]
    descriptor: Descriptor | None
    error: HurrayError | None

    def to_json(self) -> dict[str, object]:
        """JSON values: the rows in order, and the error with its rule, or none."""
        error = self.error
        return {
            "valid": error is None,
            "error": None if error is None else {"reason": error.reason, "message": error.message, **error.details},
            "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in self.rows],
        }

    def table(self) -> RichTable:
        """The rows as a table for a terminal, the row with the error in red, the verdict below."""
        table = RichTable(show_edge=False, caption=self._verdict(), caption_justify="left")
        for name in ("offset", "size"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("hex", "field", "value", "note"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            note = "; ".join(part for part in (row.note, row.error) if part)
            cells = (str(row.offset), str(row.size), row.hex, row.field, row.value, note)
            # Text, not markup: the bytes are a stranger's.
            table.add_row(*(Text(cell) for cell in cells), style="bold red" if row.error else None)
        return table

    def _verdict(self) -> Text:
        if self.error is not None:
            return Text(str(self.error), style="red")
        assert self.descriptor is not None
        descriptor = self.descriptor
        tensor = "x".join(str(size) for size in descriptor.shape)
        return Text(
            f"valid: {descriptor.element_type.name} {tensor}, {descriptor.num_pages} pages of {descriptor.page_size} "
            f"slots, {descriptor.num_seqs} sequences, {descriptor.page_pool_bytes} bytes of page_pool"
        )


def read_text_or_bytes(data: bytes) -> bytes:
    """The descriptor bytes in `data`, which holds them raw or as hex text with any white space between."""
    if data.startswith(MAGIC):
        return data
    text = b"".join(data.split()).removeprefix(b"0x")
    digits = string.hexdigits.encode()
    if text and len(text) % 2 == 0 and all(byte in digits for byte in text):
        return bytes.fromhex(text.decode("ascii"))
    return data


def describe(data: bytes, policy: Policy = STRICT) -> Inspection:
    """Take a descriptor apart. `data` is raw bytes, or the hex text of them, and may run on after the descriptor."""
    content = read_text_or_bytes(data)
    rows = list(_Walk(content).rows())
    descriptor, refusal = None, None
    try:
        descriptor, _ = decode_descriptor(content, policy)
    except HurrayError as error:
        refusal = error
        _mark(rows, error, len(content))
    return Inspection(tuple(rows), descriptor, refusal)


def _mark(rows: list[Row], error: HurrayError, size: int) -> None:
    """Put the error at its field's row, else at the first row of its section, else in a row of its own.

    A section that does not fit (H6) is missing where the rows break off, not where its first part still fitted.
    """
    field = error.field or ""
    required = error.details.get("required", "")
    text = f"{error.rule or error.reason}: must be {required}"
    exact = [index for index, row in enumerate(rows) if row.field == field]
    inside = (f"{field}.", f"{field}[")
    within = [
        index
        for index, row in enumerate(rows)
        if (row.note == _CUT_NOTE if error.rule == "H6" else row.field.startswith(inside))
    ]
    if found := exact or within:
        rows[found[0]] = replace(rows[found[0]], error=text)
        return
    rows.append(Row(size, 0, "", field, error.details.get("offered", ""), "", text))


class _Walk:
    """Splits bytes into rows by the offset tables, without judging them, until they end or cannot be split."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._end = len(data)
        self._ended = False
        self._rows: list[Row] = []

    def rows(self) -> Iterator[Row]:
        """All rows, in order: the descriptor's, then the bytes behind it."""
        self._split()
        if self._position < self._end:
            note = _CUT_NOTE if self._ended else "unknown bytes inside descriptor_length"
            self._raw(self._end - self._position, "", note)
        if self._end < len(self._data):
            self._end = len(self._data)
            self._raw(self._end - self._position, "", "behind the descriptor")
        return iter(self._rows)

    def _split(self) -> None:
        header = self._table(HEADER, "", _header_note)
        if header is None:
            return
        # A length that cannot be right tells nothing about where the descriptor ends.
        if HEADER.size <= header["descriptor_length"] < self._end:
            self._end = header["descriptor_length"]
        if header["layout_tag"] != BLOCK_PAGED or header["rank"] != RANK:
            self._ended = True
            return
        if self._table(SHAPE, "", _shape_note) is None or self._table(LAYOUT, "", _layout_note) is None:
            return
        count = self._table(BUFFER_COUNT, "", _no_note)
        if count is None:
            return
        for index in range(count["buffer_count"]):
            name = _BUFFER_NAMES[index] if index < len(_BUFFER_NAMES) else "parameters"
            if self._table(BUFFER_HANDLE, f"buffers[{index}].", _handle_note, name) is None:
                return
        self._sections(header["flags"])

    def _sections(self, flags: int) -> None:
        if flags & HAS_QUANTIZATION:
            length = self._table(QUANTIZATION_LENGTH, "", _no_note)
            if length is None:
                return
            self._scheme(length["quantization_length"])
        if flags & HAS_SHARD and not self._ended:
            self._raw(SHARD_BYTES, "shard", "not allowed on block-paged")
        if flags & HAS_STATISTICS and not self._ended:
            self._table(STATISTICS, "statistics.", _statistics_note)
        if flags & HAS_EXTENSION_TYPE and not self._ended:
            self._table(EXTENSION_TYPE, "extension_type.", _no_note)
        if flags & HAS_COMPOSITE_MEMBER and not self._ended:
            self._raw(COMPOSITE_MEMBER_BYTES, "composite_member", "not allowed on block-paged")

    def _scheme(self, length: int) -> None:
        left = self._end - self._position
        if length > left or length < SCHEME_HEADER.size:
            self._ended = length > left
            self._raw(min(length, left), "quantization", "cut short")
            return
        table = SCHEME_TABLES.get(self._data[self._position], SCHEME_HEADER)
        if table.size > length:
            table = SCHEME_HEADER
        self._table(table, "quantization.", _scheme_note)
        self._raw(length - table.size, "quantization", "padding" if table is not SCHEME_HEADER else "payload")

    def _table(
        self, table: Table, prefix: str, note: Callable[[str, Any], str], first_note: str = ""
    ) -> dict[str, Any] | None:
        """Rows of one table's fields; its values by name, or None where the bytes end before it does."""
        if self._end - self._position < table.size:
            self._ended = True
            return None
        values = dict(
            zip(
                (field.name for field in table.fields),
                table.struct.unpack_from(self._data, self._position),
                strict=True,
            )
        )
        for field in table.fields:
            value = values[field.name]
            text = f"{first_note}; " if first_note and field.offset == 0 else ""
            start = self._position + field.offset
            self._rows.append(
                Row(
                    start,
                    field.size,
                    self._data[start : start + field.size].hex(" "),
                    prefix + field.name,
                    _text(field.name, value),
                    (text + note(field.name, value)).removesuffix("; "),
                )
            )
        self._position += table.size
        return values

    def _raw(self, size: int, field: str, note: str) -> None:
        size = min(size, self._end - self._position)
        if size == 0:
            return
        shown = self._data[self._position : self._position + min(size, _HEX_BYTES)].hex(" ")
        self._rows.append(Row(self._position, size, shown + (" ..." if size > _HEX_BYTES else ""), field, "", note))
        self._position += size


def _text(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return ascii(value.decode("latin-1"))[1:-1] if name == "magic" else ("0" if not any(value) else "not zero")
    if name.endswith("_tag") or name in ("flags", "computed_mask", "memory_class"):
        return f"{value:#04x}"
    return str(value)


def _tag_name(names: tuple[str, ...], value: int) -> str:
    if value < len(names):
        return names[value]
    return "private" if value in PRIVATE else "invalid"


def _type_name(value: int) -> str:
    if value in BY_TAG:
        return f"{BY_TAG[value].name}, {BY_TAG[value].bits} bits"
    return "private" if value in TYPE_TAG_PRIVATE else "not a type"


def _bit_names(value: int, names: dict[int, str]) -> str:
    known = [name for bit, name in names.items() if value & bit]
    rest = value & ~sum(names)
    return ", ".join([*known, *([f"reserved {rest:#x}"] if rest else [])])


def _no_note(_name: str, _value: Any) -> str:
    return ""


def _header_note(name: str, value: Any) -> str:
    match name:
        case "flags":
            return _bit_names(value, _FLAG_NAMES)
        case "type_tag":
            return _type_name(value)
        case "layout_tag":
            return "block-paged" if value == BLOCK_PAGED else "another layout"
        case _:
            return ""


def _shape_note(name: str, value: Any) -> str:
    meaning = {"shape[0]": "total_tokens", "shape[1]": "num_heads", "shape[2]": "head_dim"}.get(name, "")
    return f"{meaning}, dynamic" if meaning and value == DYNAMIC else meaning


def _layout_note(name: str, value: Any) -> str:
    match name:
        case "kv_role":
            return KV_ROLE_NAMES[value] if value < len(KV_ROLE_NAMES) else "invalid"
        case "layer_index":
            return "none" if value == NO_LAYER else ""
        case "block_table_index_type":
            return ("uint32", "uint64")[value] if value < 2 else "invalid"
        case _:
            return ""


def _handle_note(name: str, value: Any) -> str:
    match name:
        case "device_tag":
            return _tag_name(DEVICE_NAMES, value)
        case "sync_mode":
            return _tag_name(SYNC_MODE_NAMES, value) if value not in PRIVATE else "invalid"
        case "memory_class":
            return _tag_name(MEMORY_CLASS_NAMES, value)
        case _:
            return ""


def _scheme_note(name: str, value: Any) -> str:
    match name:
        case "scheme_tag":
            return _SCHEME_NAMES.get(value, "private" if value in PRIVATE else "unknown")
        case "flags":
            return _bit_names(value, {1: "symmetric"})
        case "zero_point_buffer_index":
            return "none" if value == NO_BUFFER else ""
        case "scale_type_tag":
            return _type_name(value)
        case _:
            return ""


def _statistics_note(name: str, value: Any) -> str:
    return (
        _bit_names(value, {1 << bit: text for bit, text in enumerate(_MASK_NAMES)}) if name == "computed_mask" else ""
    )
