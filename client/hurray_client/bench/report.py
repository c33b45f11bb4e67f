"""What a run came to: medians by case, ratios by round, as JSON. `shown` makes tables of that.

A ratio is taken within each round and then its median over rounds: absolute times drift on a shared machine, and a
ratio of medians would compare moments that have nothing in common.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from hurray_client.bench.runner import CHECKSUM, NO_CHECKSUM, CaseKey, Cost, Outcome, Sample
from hurray_client.bench.workloads import catalogue

GB: Final = 1e9

Compare = Callable[[Sample, Sample], float]
Measure = Callable[[Sample], float]
Better = Literal["higher", "lower"]

_PACKAGES: Final = (
    "numpy",
    "grpcio",
    "xxhash",
    "ucxx-cu12",
    "libucx-cu12",
    "pyhurray",
    "nixl-cu12",
    "mooncake-transfer-engine-non-cuda",
)


_FACTS: Final = {
    "from_paged_ms": "paged",
    "index_from_paged_ms": "sequences_100k",
    "index_validation_ms": "sequences_100k",
    "index_liveness_ms": "sequences_100k",
    "index_compaction_ms": "sequences_100k",
}
"""Figures that are no transfer's, by the workload they are of."""


def throughput(sample: Sample) -> float:
    """Bytes of distinct pages a second."""
    return sample.nbytes / sample.seconds


def faster(ours: Sample, other: Sample) -> float:
    """Our throughput by the other's."""
    return throughput(ours) / throughput(other)


def slower(ours: Sample, other: Sample) -> float:
    """Our time by the other's."""
    return ours.seconds / other.seconds


def readable(ours: Sample, other: Sample) -> float:
    """As `faster`, ours with reading every byte."""
    return ours.nbytes / ours.values["read_seconds"] / throughput(other)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of two cases, taken within each round; with no `other`, of one."""

    name: str
    ours: CaseKey
    other: CaseKey | None
    compare: Compare | Measure
    better: Better = "higher"


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio over all rounds that have both sides; `median` is None where there are none, for this `reason`."""

    better: Better
    median: float | None
    least: float | None = None
    most: float | None = None
    rounds: int = 0
    reason: str | None = None


def ratios(outcome: Outcome) -> dict[str, Figure]:
    """All figures, by name."""
    found = {ratio.name: _figure(ratio, outcome) for ratio in _all_ratios(outcome)}
    for name, workload in _FACTS.items():
        value = outcome.facts.get(name)
        found[name] = Figure("lower", value, reason=None if value is not None else f"{workload} was not run")
    return found


def _put(workload: str, transport: str, checksum: str = CHECKSUM) -> CaseKey:
    return CaseKey(workload, transport, checksum)


def _base(name: str) -> CaseKey:
    return CaseKey("paged", name, None)


def _all_ratios(outcome: Outcome) -> list[Ratio]:
    """The fixed names first, then the same figures of each transport that was run."""
    found = [
        Ratio("tcp_put_vs_socket", _put("paged", "ucx"), _base("socket"), faster),
        Ratio("tcp_put_vs_socket_unchecked", _put("paged", "ucx", NO_CHECKSUM), _base("socket"), faster),
        Ratio("tcp_adjacent_vs_socket", _put("adjacent", "ucx"), _base("socket"), faster),
        Ratio("tcp_adjacent_vs_socket_unchecked", _put("adjacent", "ucx", NO_CHECKSUM), _base("socket"), faster),
        Ratio("tcp_get_into_vs_socket", _put("get_into", "ucx"), _base("socket"), faster),
        Ratio("tcp_put_vs_ucx_perftest", _put("paged", "ucx"), _base("ucx_perftest"), faster),
        Ratio("tcp_put_vs_nixl_tcp", _put("paged", "ucx"), _base("nixl_tcp"), faster),
        Ratio("tcp_put_vs_nixl_tcp_polled", _put("paged", "ucx"), _base("nixl_tcp_polled"), faster),
        Ratio("tcp_put_vs_nixl_tcp_segments", _put("paged", "ucx"), _base("nixl_tcp_segments"), faster),
        Ratio("tcp_put_vs_mooncake", _put("paged", "ucx"), _base("mooncake"), faster),
        Ratio("tcp_put_vs_stream_writer", _put("paged", "ucx"), _base("stream_writer"), faster),
        Ratio("socket_put_vs_socket", _put("paged", "tcp"), _base("socket"), faster),
        Ratio("socket_put_vs_socket_unchecked", _put("paged", "tcp", NO_CHECKSUM), _base("socket"), faster),
        Ratio("shm_put_vs_memcpy", _put("paged", "shm"), _base("memcpy"), faster),
        Ratio("shm_put_vs_memcpy_unchecked", _put("paged", "shm", NO_CHECKSUM), _base("memcpy"), faster),
        Ratio("shm_put_vs_nixl", _put("paged", "shm"), _base("nixl"), faster),
        Ratio("shm_put_vs_nixl_polled", _put("paged", "shm"), _base("nixl_polled"), faster),
        Ratio("shm_get_ms", _put("get", "shm"), None, _milliseconds, "lower"),
        Ratio("shm_get_large_ms", _put("get_large", "shm"), None, _milliseconds, "lower"),
        Ratio("shm_get_read_vs_memcpy", _put("get", "shm"), _base("memcpy"), readable),
        Ratio("gather_vs_memcpy", _base("gather"), _base("memcpy"), faster),
    ]
    first = outcome.transports[0] if outcome.transports else "ucx"
    found += _by_transport(first, "", outcome)
    for transport in outcome.transports:
        found += _by_transport(transport, f"_{transport}", outcome)
        found += _by_socket(transport)
    for name in ("stat_load", "echo_load"):
        found.append(Ratio(f"{name}_vs_quiet", _put(name, first), _put("paged", first), faster))
    return found


def _by_transport(transport: str, suffix: str, outcome: Outcome) -> list[Ratio]:
    tensors = catalogue(outcome.plan.scale)["small_tensors"].tensor_count
    return [
        Ratio(f"large_vs_small{suffix}", _put("large", transport), _put("paged", transport), faster),
        Ratio(f"concurrent_vs_single{suffix}", _put("concurrent", transport), _put("paged", transport), faster),
        Ratio(
            f"concurrent_spread{suffix}",
            _put("concurrent", transport),
            None,
            lambda ours: ours.values["spread"],
            "lower",
        ),
        Ratio(f"tiny_put_vs_echo{suffix}", _put("tiny", transport), CaseKey("tiny", "echo", None), slower, "lower"),
        Ratio(
            f"per_tensor_us{suffix}",
            _put("small_tensors", transport),
            _put("paged", transport),
            lambda ours, paged: 1e6 * (ours.seconds - ours.nbytes / throughput(paged)) / tensors,
            "lower",
        ),
        Ratio(
            f"shared_prefix_wire{suffix}",
            _put("shared_prefix", transport),
            None,
            lambda ours: ours.values["wire_bytes"] / ours.nbytes,
            "lower",
        ),
    ]


def _by_socket(transport: str) -> list[Ratio]:
    """The same for every transport: what one is worth beside another."""
    return [
        Ratio(f"{name}_vs_socket{end}_{transport}", _put(workload, transport, checksum), _base("socket"), faster)
        for name, workload in (("put", "paged"), ("adjacent", "adjacent"), ("get", "get"), ("get_into", "get_into"))
        for end, checksum in (("", CHECKSUM), ("_unchecked", NO_CHECKSUM))
        if checksum == CHECKSUM or not name.startswith("get")
    ]


def _milliseconds(ours: Sample) -> float:
    return 1e3 * ours.seconds


def _figure(ratio: Ratio, outcome: Outcome) -> Figure:
    sides = [ratio.ours] if ratio.other is None else [ratio.ours, ratio.other]
    # A baseline that stands in for another workload's, where `paged` was not chosen, is filed there.
    rows = [outcome.samples.get(key) or _filed_elsewhere(key, outcome) for key in sides]
    values = [
        float(ratio.compare(*samples))
        for samples in zip(*(row or () for row in rows), strict=False)
        if all(sample is not None for sample in samples)
    ]
    if values:
        return Figure(ratio.better, statistics.median(values), min(values), max(values), len(values))
    missing = [key for key, row in zip(sides, rows, strict=True) if not row]
    return Figure(
        ratio.better, None, reason="; ".join(_why_missing(key, outcome) for key in missing) or "no round has both"
    )


def _filed_elsewhere(key: CaseKey, outcome: Outcome) -> list[Sample | None] | None:
    if key.checksum is not None:
        return None
    return next((row for other, row in outcome.samples.items() if other.subject == key.subject), None)


def _why_missing(key: CaseKey, outcome: Outcome) -> str:
    name = " ".join(filter(None, (key.workload, key.subject, key.checksum)))
    if name in outcome.failed:
        return f"{name} failed: {outcome.failed[name]}"
    if key.subject in outcome.skipped:
        return f"{key.subject}: {outcome.skipped[key.subject]}"
    if key.checksum is not None and key.subject not in outcome.transports:
        return f"{key.subject}: the node does not offer this transport, or it was not chosen"
    return f"{name} was not run"


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(outcome: Outcome, command: str = "") -> dict[str, Any]:
    """Everything. `ratios` has plain numbers, null where there is none; `ratio_details` has rounds, reasons, and which
    way is better. `command`: by which it was run."""
    figures = ratios(outcome)
    scale = outcome.plan.scale
    results = [_case_json(key, row) for key, row in outcome.samples.items() if any(row)]
    return {
        "command": command,
        "version": outcome.version,
        "ucx": outcome.ucx,
        "machine": machine(),
        "scale": {name: getattr(scale, name) for name in scale.__slots__},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HURRAY_")},
        "transports": list(outcome.transports),
        "rounds": outcome.rounds,
        "seconds": outcome.seconds,
        "results": results,
        "most_beyond_snapshot": {side: _most_beyond(results, side) for side in ("source", "target")},
        "ratios": {name: figure.median for name, figure in figures.items()},
        "ratio_details": {
            name: {
                "median": figure.median,
                "min": figure.least,
                "max": figure.most,
                "rounds": figure.rounds,
                "better": figure.better,
                "reason": figure.reason,
            }
            for name, figure in figures.items()
        },
        "facts": outcome.facts,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
    }


def _case_json(key: CaseKey, row: Sequence[Sample | None]) -> dict[str, Any]:
    samples = [sample for sample in row if sample is not None]
    seconds = [sample.seconds for sample in samples]
    names = sorted({name for sample in samples for name in sample.values})
    return {
        "workload": key.workload,
        "transport" if key.checksum is not None else "baseline": key.subject,
        "checksum": key.checksum,
        "bytes": samples[0].nbytes,
        "rounds": len(samples),
        "seconds": _spread(seconds),
        "gigabytes_per_second": _spread([throughput(sample) / GB for sample in samples]) if samples[0].nbytes else None,
        "cpu_s_per_gb": {
            side: _median([cost.cpu_s / _moved_gb(sample) for sample, cost in costs]) for side, costs in _sides(samples)
        }
        if samples[0].nbytes
        else None,
        "peak_rss_bytes": {side: _most([cost.peak_bytes for _, cost in costs]) for side, costs in _sides(samples)},
        "beyond_snapshot_bytes": {
            side: _most([cost.beyond_bytes for _, cost in costs]) for side, costs in _sides(samples)
        },
        "values": {name: statistics.median(sample.values[name] for sample in samples) for name in names},
    }


def _most_beyond(results: Sequence[dict[str, Any]], side: str) -> dict[str, Any] | None:
    """Which of our own cases needed most memory beside the snapshot, and how much."""
    found = [
        (row["beyond_snapshot_bytes"][side], f"{row['workload']} {row['transport']} {row['checksum']}")
        for row in results
        if "transport" in row and row["beyond_snapshot_bytes"].get(side) is not None
    ]
    return dict(zip(("bytes", "case"), max(found), strict=True)) if found else None


def _moved_gb(sample: Sample) -> float:
    return sample.nbytes * sample.values.get("count", 1) / GB


def _sides(samples: Sequence[Sample]) -> list[tuple[str, list[tuple[Sample, Cost]]]]:
    return [
        ("source", [(sample, sample.source) for sample in samples if sample.source is not None]),
        ("target", [(sample, sample.target) for sample in samples if sample.target is not None]),
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _most(values: Sequence[int]) -> int | None:
    return max(values) if values else None


def machine() -> dict[str, Any]:
    """What it was run on."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cpu": next(iter(_lines("/proc/cpuinfo", "model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "packages": versions,
        "load_average": list(os.getloadavg()),
    }


def _lines(path: str, field: str) -> list[str]:
    return [line.partition(":")[2].strip() for line in Path(path).read_text().splitlines() if line.startswith(field)]
