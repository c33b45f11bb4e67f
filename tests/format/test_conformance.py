"""The conformance run: all vectors pass, and whatever a vector states is really compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from format.corpus import VECTORS
from hurray_client.conformance import run
from hurray_wire.errors import InvalidRequest

Manifest = dict[str, Any]


@pytest.fixture(name="manifest")
def whole_manifest() -> Manifest:
    found: Manifest = json.loads(VECTORS.read_bytes())
    return found


def only(manifest: Manifest, section: str, vector_id: str) -> tuple[Manifest, dict[str, Any]]:
    """A manifest of one vector, and that vector to tamper with."""
    vector = copy.deepcopy(next(item for item in manifest[section] if item["id"] == vector_id))
    return {section: [vector]}, vector


def test_every_vector_passes() -> None:
    report = run(VECTORS)
    assert report.lines() == ["218 passed, 0 failed"]
    assert report.to_json() == {"passed": 218, "failed": 0, "wrong": []}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in nested JSON that are neither objects nor lists."""
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, name))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path]


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.5
        case str():
            return value + "0"
        case _:
            return 0


@pytest.mark.parametrize("vector_id", ["V027", "V057", "V071", "V075", "V087", "V091", "V093", "V099"])
def test_every_decoded_field_is_compared(manifest: Manifest, vector_id: str) -> None:
    _, original = only(manifest, "valid", vector_id)
    for path in leaves(original["decoded"]):
        single, vector = only(manifest, "valid", vector_id)
        inner = vector["decoded"]
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = changed(inner[path[-1]])
        report = run(single)
        assert report.failed == 1, path
        assert str(path[-1]) in report.lines()[0]


def test_floats_are_compared_by_their_bits(manifest: Manifest) -> None:
    single, vector = only(manifest, "valid", "V085")
    data = bytearray.fromhex(vector["hex"])
    for offset, bits in ((24, "0000000000000080"), (32, "000000000000f87f"), (40, "000000000000f0ff")):
        data[133 + offset : 133 + offset + 8] = bytes.fromhex(bits)
    vector["hex"] = data.hex()
    good = {"value_min": -0.0, "value_max": "NaN", "value_abs_max": "-Infinity"}
    vector["decoded"]["statistics"] |= good
    assert run(single).lines() == ["1 passed, 0 failed"]
    for name, wrong in (("value_min", 0.0), ("value_max", "Infinity"), ("value_abs_max", "Infinity")):
        vector["decoded"]["statistics"] |= good | {name: wrong}
        assert run(single).failed == 1


def test_integers_past_2_to_53_are_exact(manifest: Manifest) -> None:
    single, vector = only(manifest, "valid", "V041")
    vector["decoded"]["derived"]["page_pool_bytes"] += 1
    assert run(single).failed == 1


TAMPERED: list[tuple[str, str, Callable[[dict[str, Any]], object], str]] = [
    ("valid", "V095", lambda vector: vector.update(consumed=157), "consumed: 153, expected 157"),
    ("valid", "V027", lambda vector: vector["decoded"].update(shard=None), "shard: not a field"),
    ("valid", "V089", lambda vector: vector.update(context={}), "rule=E6"),
    ("valid", "V027", lambda vector: vector.update(context={"transport": "x", "more": 1}), "unknown context"),
    ("valid", "V027", lambda vector: vector.update(hex="485"), "cannot be run: ValueError"),
    ("valid", "V027", lambda vector: vector.pop("decoded"), "cannot be run: KeyError"),
    ("invalid", "I079", lambda vector: vector.update(rules_broken=["B5", "B6"]), "rule B4, expected one of B5, B6"),
    ("invalid", "I125", lambda vector: vector.update(context={}), "accepted, breaks D6"),
    ("semantic", "S001", lambda vector: vector["live_slots"].pop(), "live_slots"),
    ("semantic", "S001", lambda vector: vector["zero_slots"].append([0, 3]), "zero_slots"),
    ("semantic", "S001", lambda vector: vector["unreferenced_pages"].remove(4), "unreferenced_pages"),
    ("semantic", "S001", lambda vector: flip(vector, "pool_after_zeroing"), "pool_after_zeroing: differs from byte 0"),
    ("semantic", "S017", lambda vector: flip(vector, "pool_after_zeroing_all"), "pool_after_zeroing_all: differs"),
    ("semantic", "S001", lambda vector: vector.update(pool_after_zeroing="00"), "bytes, expected 1"),
    ("semantic", "S001", lambda vector: bump(vector, "page"), "lookup s=0, t=0, h=0, d=7.page"),
    ("semantic", "S015", lambda vector: bump(vector, "slot"), ".slot"),
    ("semantic", "S015", lambda vector: bump(vector, "flat"), ".flat"),
    ("semantic", "S017", lambda vector: bump(vector, "raw"), ".raw"),
    ("semantic", "S021", lambda vector: bump(vector, "stored"), ".stored"),
    ("semantic", "S021", lambda vector: bump(vector, "scale"), ".scale"),
    ("semantic", "S021", lambda vector: bump(vector, "zero_point"), ".zero_point"),
    ("semantic", "S023", lambda vector: bump(vector, "real"), ".real"),
    ("semantic", "S023", lambda vector: vector["lookups"][0].update(real_f32_bits="00000000"), ".real_f32_bits"),
    ("semantic", "S001", lambda vector: vector["lookups"][0].update(t=6), "refused (INVALID"),
    ("semantic", "S001", lambda vector: vector["bad_lookups"][0].update(t=5), "read, must be refused"),
    ("semantic", "S001", lambda vector: vector.update(token_counts=[5, 4]), "live_slots"),
    ("semantic", "S001", lambda vector: vector.update(token_counts=[6, 4]), "refused (INVALID_CONTENTS"),
    ("semantic", "S045", lambda vector: vector.update(token_counts=[6, 3]), "accepted, breaks V7"),
    ("semantic", "S031", lambda vector: vector.update(rules_broken=["V5"]), "rule V4, expected one of V5"),
]


def flip(vector: dict[str, Any], name: str) -> None:
    data = bytearray.fromhex(vector[name])
    data[0] ^= 1
    vector[name] = data.hex()


def bump(vector: dict[str, Any], name: str) -> None:
    vector["lookups"][0][name] += 1


@pytest.mark.parametrize(("section", "vector_id", "tamper", "shown"), TAMPERED, ids=range(len(TAMPERED)))
def test_what_a_vector_states_is_compared(
    manifest: Manifest, section: str, vector_id: str, tamper: Callable[[dict[str, Any]], object], shown: str
) -> None:
    single, vector = only(manifest, section, vector_id)
    assert run(single).failed == 0
    tamper(vector)
    report = run(single)
    assert (report.passed, report.failed) == (0, 1)
    line, last = report.lines()
    assert line.startswith(f"{vector_id} ({section}): ")
    assert shown in line
    assert last == "0 passed, 1 failed"


def test_a_wrong_vector_does_not_stop_the_others(manifest: Manifest) -> None:
    manifest["valid"][0] = {"id": "broken"}
    manifest["valid"][1] = None
    report = run(manifest)
    assert (report.passed, report.failed) == (216, 2)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"valid": 3}', "\xff"])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequest):
        run(path)


def test_dead_elements_of_e8m0_may_be_cleared_to_the_value_1(manifest: Manifest) -> None:
    # Slot 3 of page 0 of 9 tokens in 3 pages of 4, one element a slot, three bytes of type float8_e8m0 unnamed.
    single, vector = only(manifest, "semantic", "S015")
    descriptor = bytearray.fromhex(vector["descriptor"])
    descriptor[14] = 0x42
    descriptor[85:93] = (36).to_bytes(8, "little")
    pool = bytes(range(1, 37))
    cleared = pool[:12] + pool[12:24] + pool[24:30] + bytes(6)
    vector |= {
        "descriptor": descriptor.hex(),
        "buffers": [pool.hex(), *vector["buffers"][1:]],
        "lookups": [],
        "pool_after_zeroing": cleared.hex(),
        "pool_after_zeroing_all": (cleared[:12] + bytes(12) + cleared[24:]).hex(),
    }
    assert run(single).lines() == ["1 passed, 0 failed"]
    vector["pool_after_zeroing"] = (cleared[:-1] + b"\1").hex()
    assert run(single).failed == 1
