"""Throughput against snapshot size, as an SVG. Needs matplotlib (extra plot)."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from typing import Any

from hurray_client.bench.report import GB, throughput
from hurray_client.bench.runner import Outcome
from hurray_client.bench.workloads import MIB, PLOT_BYTES, PLOT_PREFIX
from hurray_wire.errors import Unsupported

_LINES = {"memcpy": "dotted", "socket": "dashed"}


def require_matplotlib() -> Any:
    """matplotlib's figure module. Raises Unsupported where it is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise Unsupported("a plot needs matplotlib: install hurray-transfer[plot]", field="plot") from None


def draw(outcome: Outcome, path: Path) -> None:
    """Medians and ranges of the puts of growing size, by transport; memcpy and the socket at their one size."""
    figure = require_matplotlib().Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, list[float]]]] = {}
    for key, row in outcome.samples.items():
        rates = [throughput(sample) / GB for sample in row if sample is not None and sample.nbytes]
        if key.workload.startswith(PLOT_PREFIX) and rates:
            nbytes = next(sample.nbytes for sample in row if sample is not None)
            lines.setdefault(key.subject, []).append((nbytes, rates))
        elif key.subject in _LINES and rates:
            axes.axhline(statistics.median(rates), linestyle=_LINES[key.subject], color="gray", label=key.subject)
    for subject, points in lines.items():
        points.sort()
        sizes = [nbytes / MIB for nbytes, _ in points]
        axes.plot(sizes, [statistics.median(rates) for _, rates in points], marker="o", label=f"put over {subject}")
        axes.fill_between(sizes, [min(rates) for _, rates in points], [max(rates) for _, rates in points], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xticks([nbytes / MIB for nbytes in PLOT_BYTES], [f"{nbytes // MIB}" for nbytes in PLOT_BYTES])
    axes.set_xlabel("snapshot, MiB (32 KiB pages in random order, checksums on)")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="svg")
