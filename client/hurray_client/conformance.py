"""Runs a manifest of block-paged conformance vectors against this implementation.

A manifest has `valid` and `invalid` descriptors and `semantic` cases, which add buffers and token counts. A vector
passes only if everything it states agrees: the verdict, every decoded field, a rule out of those that are broken, the
bits that each lookup finds, the lookups that must be refused, and the pools after zeroing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hurray_wire.descriptor import Descriptor, decode_descriptor
from hurray_wire.elements import as_buffers, lookup
from hurray_wire.errors import HurrayError, InvalidRequest
from hurray_wire.limits import Limits
from hurray_wire.packing import E8M0_NEUTRAL, E8M0_TAG
from hurray_wire.pages import live_slots, scrub
from hurray_wire.policy import Policy
from hurray_wire.quantization import PerTensorAffine, Quantization
from hurray_wire.sections import BLOCK_PAGED, NO_LAYER, RANK, VERSION_MAJOR
from hurray_wire.validate import BlockStructure, check_buffer_lengths, check_parameters, check_pool, read_structure

Vector = Mapping[str, Any]
Bytes = npt.NDArray[np.uint8]

SECTIONS: Final = ("valid", "invalid", "semantic")

# A manifest is a test, not a peer: the format's rules alone decide.
_UNLIMITED: Final = Limits(max_descriptor_bytes=1 << 32, max_sequences=1 << 32, max_index_entries=1 << 61)
_CONTEXT_KEYS: Final = frozenset({"transport", "private_agreed"})
_WORDS: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one vector went. `problems` is empty where it passed."""

    vector_id: str
    section: str
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if everything that the vector states agrees."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of all vectors of a manifest, in its order."""

    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> int:
        """Number of vectors that passed."""
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def failed(self) -> int:
        """Number of vectors that did not."""
        return len(self.outcomes) - self.passed

    def lines(self) -> list[str]:
        """One line per wrong vector, then `N passed, N failed`."""
        wrong = [
            f"{outcome.vector_id} ({outcome.section}): {'; '.join(outcome.problems)}"
            for outcome in self.outcomes
            if not outcome.passed
        ]
        return [*wrong, f"{self.passed} passed, {self.failed} failed"]

    def to_json(self) -> dict[str, object]:
        """The report as JSON values: counts, and the problems of each wrong vector."""
        wrong = [
            {"id": outcome.vector_id, "section": outcome.section, "problems": list(outcome.problems)}
            for outcome in self.outcomes
            if not outcome.passed
        ]
        return {"passed": self.passed, "failed": self.failed, "wrong": wrong}


def run(manifest: Mapping[str, Any] | str | Path) -> Report:
    """Run every vector of a manifest: its parsed JSON, or the path of the file.

    Raises InvalidRequest if it is no such manifest, OSError if it cannot be read. A vector that cannot be run is
    wrong, whatever the reason, and does not stop the others.
    """
    content = manifest if isinstance(manifest, Mapping) else _load(Path(manifest))
    checks: dict[str, Callable[[Vector], Iterator[str]]] = {
        "valid": _check_decoding,
        "invalid": _check_decoding,
        "semantic": _check_contents,
    }
    outcomes = []
    for section in SECTIONS:
        vectors = content.get(section, [])
        if not isinstance(vectors, list):
            raise InvalidRequest("not a conformance manifest", field=section, required="a list of vectors")
        for number, vector in enumerate(vectors):
            try:
                problems = tuple(checks[section](vector))
            except Exception as error:
                problems = (f"cannot be run: {type(error).__name__}: {error}",)
            name = vector.get("id", f"{section}[{number}]") if isinstance(vector, Mapping) else f"{section}[{number}]"
            outcomes.append(Outcome(str(name), section, problems))
    if not outcomes:
        raise InvalidRequest("not a conformance manifest", field="manifest", required="vectors under valid or invalid")
    return Report(tuple(outcomes))


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"not a conformance manifest: {error}", field="manifest", offered=path) from error
    if not isinstance(content, dict):
        raise InvalidRequest("not a conformance manifest", field="manifest", offered=path, required="a JSON object")
    return content


def _policy(vector: Vector) -> Policy:
    context = vector.get("context") or {}
    unknown = sorted(set(context) - _CONTEXT_KEYS)
    if unknown:
        raise InvalidRequest("unknown context", field=f"context.{unknown[0]}", required=", ".join(_CONTEXT_KEYS))
    return Policy(
        cross_machine=context.get("transport") == "cross_machine",
        private_agreed=bool(context.get("private_agreed", False)),
        limits=_UNLIMITED,
    )


def _refusal(vector: Vector, error: HurrayError) -> Iterator[str]:
    """What is wrong with having refused a vector with `error`."""
    if vector["expected"] == "accept":
        yield f"refused ({error})"
    elif error.rule not in vector["rules_broken"]:
        yield f"refused by rule {error.rule}, expected one of {', '.join(vector['rules_broken'])}"


# --- descriptors ------------------------------------------------------------------------------------------------


def _check_decoding(vector: Vector) -> Iterator[str]:
    try:
        descriptor, consumed = decode_descriptor(bytes.fromhex(vector["hex"]), _policy(vector))
    except HurrayError as error:
        yield from _refusal(vector, error)
        return
    if vector["expected"] != "accept":
        yield f"accepted, breaks {', '.join(vector['rules_broken'])}"
        return
    if consumed != vector["consumed"]:
        yield f"consumed: {consumed}, expected {vector['consumed']}"
    yield from _differences("", decoded_fields(descriptor, consumed), vector["decoded"])


def decoded_fields(descriptor: Descriptor, descriptor_length: int) -> dict[str, Any]:
    """Every field of a decoded descriptor under the names that manifests use, with the sizes that follow from it."""
    layer_index, scheme, scale_entries = descriptor.layer_index, descriptor.quantization, descriptor.scale_entries
    fields: dict[str, Any] = {
        "version_major": VERSION_MAJOR,
        "version_minor": descriptor.version_minor,
        "descriptor_length": descriptor_length,
        "flags": descriptor.flags,
        "type_tag": descriptor.type_tag,
        "layout_tag": BLOCK_PAGED,
        "rank": RANK,
        "shape": list(descriptor.shape),
        "byte_offset": descriptor.byte_offset,
        "layout": {
            "page_size": descriptor.page_size,
            "num_pages": descriptor.num_pages,
            "paged_axis": descriptor.paged_axis,
            "num_seqs": descriptor.num_seqs,
            "kv_role": descriptor.kv_role,
            "kv_role_name": descriptor.kv_role_name,
            "layer_index": layer_index,
            "layer_index_raw": NO_LAYER if layer_index is None else layer_index,
            "block_table_index_type": descriptor.block_table_index_type,
            "index_width_bytes": descriptor.index_width_bytes,
        },
        "buffer_count": len(descriptor.buffers),
        "buffers": [
            {"index": index, **_slots(handle), "reserved": 0} for index, handle in enumerate(descriptor.buffers)
        ],
        "quantization": None,
        "statistics": None if descriptor.statistics is None else _slots(descriptor.statistics),
        "extension_type": None if descriptor.extension_type is None else _slots(descriptor.extension_type),
        "trailing_bytes_inside": descriptor.trailing_bytes,
        "derived": {
            "index_width_bytes": descriptor.index_width_bytes,
            "page_pool_bytes": descriptor.page_pool_bytes,
            "page_elements": descriptor.page_elements,
            "total_logical_pages": descriptor.total_logical_pages,
            "seq_ptr_bytes": descriptor.seq_ptr_bytes,
            "element_count": descriptor.element_count,
        },
    }
    if scheme is not None:
        length = len(scheme.pack()) + descriptor.quantization_padding_bytes
        fields["quantization_length"] = length
        fields["quantization"] = _scheme_fields(scheme, length)
    if scale_entries is not None:
        fields["derived"]["scale_entries"] = scale_entries
    return fields


def _slots(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__slots__}


def _scheme_fields(scheme: Quantization, length: int) -> dict[str, Any]:
    fields = {
        "scheme_tag": scheme.scheme_tag,
        "scheme": scheme.scheme,
        # Any other version is refused.
        "scheme_version": 1,
        "flags": scheme.flags,
        "length": length,
        **_slots(scheme),
    }
    if isinstance(scheme, PerTensorAffine):
        fields["scale_bits"] = _float32_bits(scheme.scale)
    else:
        fields["symmetric"] = scheme.symmetric
    return fields


def _float32_bits(value: float) -> str:
    return struct.pack(">f", value).hex()


def _differences(where: str, ours: object, expected: object) -> Iterator[str]:
    """Where `ours` is not what a manifest expects; fields that it does not name are free."""
    if isinstance(expected, Mapping) and isinstance(ours, Mapping):
        for name, value in expected.items():
            inner = f"{where}.{name}" if where else str(name)
            if name in ours:
                yield from _differences(inner, ours[name], value)
            else:
                yield f"{inner}: not a field, expected {value}"
    elif isinstance(expected, list) and isinstance(ours, list) and len(expected) == len(ours):
        for index, (mine, value) in enumerate(zip(ours, expected, strict=True)):
            yield from _differences(f"{where}[{index}]", mine, value)
    elif not _same(ours, expected):
        yield f"{where}: {ours}, expected {expected}"


def _same(ours: object, expected: object) -> bool:
    if isinstance(ours, float):
        value = _WORDS.get(expected) if isinstance(expected, str) else expected
        if isinstance(value, float):
            both_nan = math.isnan(ours) and math.isnan(value)
            return both_nan or struct.pack(">d", ours) == struct.pack(">d", value)
        return ours == value
    return ours == expected


# --- contents ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Contents:
    descriptor: Descriptor
    buffers: list[Bytes]
    structure: BlockStructure
    live: npt.NDArray[np.uint32]


def _read_contents(vector: Vector) -> _Contents:
    """Everything a receiver checks, in its order. Raises a HurrayError naming the rule."""
    policy = _policy(vector)
    descriptor, _ = decode_descriptor(bytes.fromhex(vector["descriptor"]), policy)
    contents = [bytes.fromhex(text) for text in vector["buffers"]]
    check_buffer_lengths(descriptor, contents)
    buffers = as_buffers(descriptor, contents)
    structure = read_structure(descriptor, buffers[1], buffers[2], vector["token_counts"], policy)
    live = live_slots(structure)
    check_parameters(descriptor, buffers, live)
    check_pool(descriptor, buffers[0], live)
    return _Contents(descriptor, buffers, structure, live)


def _check_contents(vector: Vector) -> Iterator[str]:
    try:
        contents = _read_contents(vector)
    except HurrayError as error:
        yield from _refusal(vector, error)
        return
    if vector["expected"] != "accept":
        yield f"accepted, breaks {', '.join(vector['rules_broken'])}"
        return
    yield from _check_liveness(vector, contents)
    yield from _check_zeroing(vector, contents)
    yield from _check_lookups(vector, contents)


def _check_liveness(vector: Vector, contents: _Contents) -> Iterator[str]:
    page_size = contents.descriptor.page_size
    named = set(contents.structure.block_table.tolist())
    counts = contents.live.tolist()
    live = [[page, slot] for page, count in enumerate(counts) for slot in range(count)]
    dead = [[page, slot] for page in sorted(named) for slot in range(counts[page], page_size)]
    unreferenced = [page for page in range(len(counts)) if page not in named]
    for name, ours in (("live_slots", live), ("zero_slots", dead), ("unreferenced_pages", unreferenced)):
        if ours != sorted(vector[name]):
            yield f"{name}: {ours}, expected {sorted(vector[name])}"


def _check_zeroing(vector: Vector, contents: _Contents) -> Iterator[str]:
    descriptor = contents.descriptor
    # A page with nothing dead is left alone, so this leaves alone the pages that no sequence names.
    kept = np.full_like(contents.live, descriptor.page_size)
    named = contents.structure.block_table.astype(np.intp)
    kept[named] = contents.live[named]
    for name, live in (("pool_after_zeroing", kept), ("pool_after_zeroing_all", contents.live)):
        pool = contents.buffers[0].copy()
        scrub(descriptor, pool, live)
        expected = np.frombuffer(bytes.fromhex(vector[name]), dtype=np.uint8)
        if pool.shape != expected.shape:
            yield f"{name}: {pool.size} bytes, expected {expected.size}"
            continue
        wrong = pool != expected
        if descriptor.type_tag == E8M0_TAG:
            # Zero bits are no value of this type, so scrub writes 1.0 where a manifest clears the bits.
            wrong &= ~((pool == E8M0_NEUTRAL) & (expected == 0))
        if wrong.any():
            yield f"{name}: differs from byte {int(np.argmax(wrong))} on"


def _check_lookups(vector: Vector, contents: _Contents) -> Iterator[str]:
    descriptor, structure, buffers = contents.descriptor, contents.structure, contents.buffers
    for wanted in vector["lookups"]:
        where = {axis: wanted[axis] for axis in "sthd"}
        name = f"lookup {', '.join(f'{axis}={index}' for axis, index in where.items())}"
        try:
            # A scale near the end of float32's range overflows to infinity, which is the answer then.
            with np.errstate(over="ignore"):
                found = lookup(descriptor, structure, buffers, **where)
        except HurrayError as error:
            yield f"{name}: refused ({error})"
            continue
        fields = {**where, **_slots(found)}
        if found.real is not None:
            fields["real_f32_bits"] = _float32_bits(found.real)
        yield from _differences(name, fields, wanted)
    for unwanted in vector["bad_lookups"]:
        where = {axis: unwanted[axis] for axis in "sthd"}
        try:
            lookup(descriptor, structure, buffers, **where)
        except HurrayError as error:
            if error.rule != "V10":
                yield f"bad lookup {where}: refused by rule {error.rule}, expected V10"
        else:
            yield f"bad lookup {where}: read, must be refused ({unwanted.get('why', 'out of range')})"
