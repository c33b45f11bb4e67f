"""The annotated hex table: complete, in order, and with the broken rule at the field that breaks it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from format.corpus import vectors
from hurray_client.inspect import Inspection, describe, read_text_or_bytes
from hurray_wire.policy import Policy

VECTORS = vectors("valid") + vectors("invalid")


def assert_complete(inspection: Inspection, data: bytes) -> None:
    """The rows cover every byte once, in order."""
    position = 0
    for row in inspection.rows:
        if row.size:
            assert row.offset == position
            assert row.hex.removesuffix(" ...") == data[position : position + min(row.size, 32)].hex(" ")
            position += row.size
    assert position == len(data)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_rows_cover_every_byte_and_name_one_broken_rule(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    agreed, cross = "private_agreed" in vector["context"], "transport" in vector["context"]
    inspection = describe(data, Policy(private_agreed=agreed, cross_machine=cross))
    assert_complete(inspection, data)
    wrong = [row for row in inspection.rows if row.error]
    if vector["expected"] == "accept":
        assert inspection.error is None
        assert wrong == []
        assert inspection.descriptor is not None
        return
    assert inspection.error is not None
    assert len(wrong) == 1
    assert wrong[0].error.split(":")[0] in vector["rules_broken"]
    if vector["change_kind"] == "bytes" and inspection.error.rule != "H6":
        # The row is one whose rule looks at what was changed: its own bytes or those of the field's section.
        assert wrong[0].size > 0


def row(inspection: Inspection, field: str) -> tuple[int, str, str, str]:
    found = next(item for item in inspection.rows if item.field == field)
    return found.offset, found.hex, found.value, found.note


def test_fields_are_named_and_explained() -> None:
    data = next(vector["hex"] for vector in VECTORS if vector["id"] == "V087")
    inspection = describe(bytes.fromhex(data))
    assert row(inspection, "magic") == (0, "48 52 52 59", "HRRY", "")
    assert row(inspection, "flags") == (10, "09 00 00 00", "0x09", "quantization, statistics")
    assert row(inspection, "type_tag") == (14, "11", "0x11", "uint8, 8 bits")
    assert row(inspection, "shape[1]") == (28, "03 00 00 00 00 00 00 00", "3", "num_heads")
    assert row(inspection, "kv_role") == (72, "00", "0", "key")
    assert row(inspection, "buffers[0].byte_size") == (85, "20 01 00 00 00 00 00 00", "288", "page_pool")
    assert row(inspection, "buffers[3].byte_size")[3] == "parameters"
    assert row(inspection, "quantization.zero_point_buffer_index")[3] == "none"
    assert row(inspection, "statistics.computed_mask") == (173, "04 00 00 00", "0x04", "value range")
    assert row(inspection, "statistics.value_max")[2] == "9.0"


@pytest.mark.parametrize(
    ("vector_id", "field", "error"),
    [
        ("I085", "buffers[0].byte_size", "B4: must be 6"),
        ("I227", "quantization.block_size", "Q23: must be page_size, 16"),
        ("I017", "buffers", "H6: must be within descriptor_length 133"),
        ("I015", "", "H6: must be within descriptor_length 132"),
        ("I009", "descriptor_length", "H5: must be <= 132, the bytes supplied"),
    ],
)
def test_broken_rule_is_at_its_field(vector_id: str, field: str, error: str) -> None:
    data = next(vector["hex"] for vector in VECTORS if vector["id"] == vector_id)
    assert [(item.field, item.error) for item in describe(bytes.fromhex(data)).rows if item.error] == [(field, error)]


def test_hex_text_is_taken_as_the_bytes_it_spells() -> None:
    data = bytes.fromhex(VECTORS[0]["hex"])
    lines = "\n".join(data.hex(" ")[start : start + 48] for start in range(0, 3 * len(data), 48))
    for text in (data.hex(), data.hex().upper(), "0x" + data.hex(), lines + "\n", data.hex(" ")):
        assert read_text_or_bytes(text.encode()) == data
        assert describe(text.encode()).error is None
    for raw in (b"", b"abc", b"HRRY 00", b"\x00\x01"):
        assert read_text_or_bytes(raw) == raw


@given(st.binary(max_size=400), st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_shown(noise: bytes, cut: int) -> None:
    base = bytes.fromhex(VECTORS[cut % len(VECTORS)]["hex"])
    for data in (noise, base[:cut] + noise):
        inspection = describe(data)
        json.dumps(inspection.to_json())
        assert_complete(inspection, read_text_or_bytes(data))


def test_json_holds_rows_and_error() -> None:
    broken = next(vector["hex"] for vector in VECTORS if vector["id"] == "I077")
    shown: Any = json.loads(json.dumps(describe(bytes.fromhex(broken)).to_json()))
    assert shown["valid"] is False
    assert shown["error"]["rule"] == "B4"
    assert shown["rows"][0] == {
        "offset": 0,
        "size": 4,
        "hex": "48 52 52 59",
        "field": "magic",
        "value": "HRRY",
        "note": "",
        "error": "",
    }


def test_table_shows_strangers_bytes_as_text() -> None:
    output = io.StringIO()
    data = b"[b]x" + bytes.fromhex(VECTORS[0]["hex"])[4:]
    Console(file=output, width=160, no_color=True).print(describe(data).table())
    text = output.getvalue()
    assert "[b]x" in text
    assert "H1: must be 48525259" in text
    assert "INVALID_DESCRIPTOR" in text


def test_table_of_a_valid_descriptor_ends_with_what_it_is() -> None:
    output = io.StringIO()
    data = next(vector["hex"] for vector in VECTORS if vector["id"] == "V027")
    Console(file=output, width=160, no_color=True).print(describe(bytes.fromhex(data)).table())
    assert "valid: float16 9x2x8, 5 pages of 4 slots, 2 sequences, 640 bytes of page_pool" in output.getvalue()
