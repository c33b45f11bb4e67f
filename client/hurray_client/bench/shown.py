"""A run's figures for people: tables on a terminal, and Markdown inside pages that say what was measured.

Both are made of the JSON of a run, so that one of another day or machine is shown as well. A page marks where figures
go, and which:

    <!-- bench ratios -->
    | ratio | ...
    <!-- /bench -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hurray_client.bench.runner import CHECKSUM, NO_CHECKSUM
from hurray_wire.errors import InvalidRequest

MIB: Final = 1 << 20

Found = Mapping[str, Any]
"""What `report.to_json` gives."""

_CASES: Final = ("workload", "by", "median", "min-max", "CPU s/GB", "beyond MiB")
_RATIOS: Final = ("ratio", "median", "min", "max", "rounds", "better")
_BLOCK: Final = re.compile(r"(<!-- bench ([a-z]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def read(text: str) -> dict[str, Any]:
    """The JSON of a run. Raises InvalidRequest for anything else."""
    try:
        found: dict[str, Any] = json.loads(text)
        found["ratio_details"], found["most_beyond_snapshot"]
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest("not the JSON of a run", field="from", required="hurrayctl bench --json") from None
    return found


def tables(found: Found) -> RenderableType:
    """Cases, then ratios, then what is not there and why."""
    missing = Table.grid(padding=(0, 2))
    for name, reason in _missing(found):
        missing.add_row(Text(name, style="dim"), Text(reason, style="dim"))
    for name, error in found["failed"].items():
        missing.add_row(Text(f"FAILED {name}", style="bold red"), Text(error, style="red"))
    title = f"{found['rounds']} rounds in {found['seconds']:.0f} s"
    return Group(
        _table(title, _CASES, 2, _case_rows(found)),
        Text(),
        *(Text(line) for line in _beyond(found)),
        Text(),
        _table("ratios", _RATIOS, 1, _ratio_rows(found)),
        Text(),
        missing,
    )


def update_page(page: str, found: Found) -> str:
    """The page with its marked blocks anew. Raises InvalidRequest where nothing is marked, or something unknown."""

    def fill(block: re.Match[str]) -> str:
        make = BLOCKS.get(block[2])
        if make is None:
            raise InvalidRequest("no such block", field="page", offered=block[2], required=", ".join(BLOCKS))
        return f"{block[1]}{make(found)}\n{block[3]}"

    filled, count = _BLOCK.subn(fill, page)
    if not count:
        raise InvalidRequest("the page marks no place for figures", field="page", required="<!-- bench ratios -->")
    return filled


# --- what is in them ------------------------------------------------------------------------------------------------


def _case_rows(found: Found) -> Iterator[Sequence[str]]:
    for case in found["results"]:
        rate, seconds = case["gigabytes_per_second"], case["seconds"]
        mapped = case["values"].get("mapped_bytes")
        if rate is None or mapped or case["workload"] == "tiny":
            median = f"{1e6 * seconds['median']:,.0f} us"
            spread = f"{1e6 * seconds['min']:,.0f}-{1e6 * seconds['max']:,.0f}"
        else:
            median, spread = f"{rate['median']:.2f} GB/s", f"{rate['min']:.2f}-{rate['max']:.2f}"
        name = case.get("transport") or case["baseline"]
        if mapped:
            name += " view"
        elif case["checksum"] == NO_CHECKSUM:
            name += " unchecked"
        cpu = _both(case["cpu_s_per_gb"], 1, "{:.2f}") if case["workload"] != "tiny" else ""
        # A baseline's process may take memory as it likes.
        beyond = _both(case["beyond_snapshot_bytes"], MIB, "{:.0f}") if case["checksum"] else ""
        yield case["workload"], name, median, spread, cpu, beyond


def _both(sides: Mapping[str, float | None] | None, unit: int, form: str) -> str:
    """Source and target."""
    return "+".join(form.format(value / unit) for value in (sides or {}).values() if value is not None)


def _details(found: Found) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All figures; what is of the first transport once, under its plain name."""
    repeated = f"_{found['transports'][0]}" if found["transports"] else " "
    details = found["ratio_details"]
    for name, item in details.items():
        if not (name.endswith(repeated) and name.removesuffix(repeated) in details):
            yield name, item


def _ratio_rows(found: Found) -> Iterator[Sequence[str]]:
    """Those that have a median."""
    for name, figure in _details(found):
        if figure["median"] is not None:
            values = ["" if figure[key] is None else _number(figure[key]) for key in ("median", "min", "max")]
            yield name, *values, str(figure["rounds"] or ""), "lower" if figure["better"] == "lower" else ""


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _missing(found: Found) -> list[tuple[str, str]]:
    """What is not there though it was asked for."""
    reasons = {name: item["reason"] for name, item in _details(found) if item["median"] is None}
    return [(name, reason) for name, reason in reasons.items() if not reason.endswith("was not run")]


def _beyond(found: Found) -> list[str]:
    return [
        f"most memory beyond the snapshot at the {side}: {most['bytes'] / MIB:.0f} MiB ({most['case']})"
        for side, most in found["most_beyond_snapshot"].items()
        if most is not None
    ]


def _machine(found: Found) -> str:
    machine, seconds = found["machine"], found["seconds"]
    took = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    memory = f"{machine['memory_bytes'] / (1 << 30):.0f} GiB"
    packages = [f"Python {machine['python']}", *(f"{name} {one}" for name, one in machine["packages"].items())]
    settings = [f"{name}={value}" for name, value in found["settings"].items()]
    ucx = re.sub(r" from \S+,", ",", found["ucx"])  # where it lies there is nobody's business
    return "\n".join(
        (
            f"- `{' '.join([*settings, found['command']])}`: {found['rounds']} rounds, {took}",
            f"- {machine['cores']} cores of {machine['cpu']}, {memory}, Linux {machine['kernel']}",
            f"- {', '.join(packages)}",
            f"- {ucx}",
        )
    )


def _transports(found: Found) -> str:
    """One row for each transport: what it is worth beside the same socket, and what it costs."""
    rows = []
    for kind in found["transports"]:
        ratios = [found["ratios"].get(f"{name}_{kind}") for name in _BY_TRANSPORT]
        (paged,) = [
            case
            for case in found["results"]
            if (case["workload"], case.get("transport"), case["checksum"]) == ("paged", kind, CHECKSUM)
        ] or [{"cpu_s_per_gb": None}]
        values = ["" if value is None else _number(value) for value in ratios]
        rows.append((kind, *values, _both(paged["cpu_s_per_gb"], 1, "{:.2f}")))
    return _markdown(("transport", *(f"`{name}`" for name in _BY_TRANSPORT), "CPU s/GB"), rows)


_BY_TRANSPORT: Final = (
    "put_vs_socket",
    "put_vs_socket_unchecked",
    "adjacent_vs_socket",
    "get_into_vs_socket",
    "concurrent_vs_single",
    "tiny_put_vs_echo",
)

BLOCKS: Final[Mapping[str, Callable[[Found], str]]] = {
    "machine": _machine,
    "cases": lambda found: _markdown(_CASES, _case_rows(found)),
    "ratios": lambda found: _markdown(_RATIOS, ((f"`{row[0]}`", *row[1:]) for row in _ratio_rows(found))),
    "memory": lambda found: "\n".join(f"- {line}" for line in _beyond(found)),
    "missing": lambda found: "\n".join(f"- `{name}`: {reason}" for name, reason in _missing(found)) or "None.",
    "transports": _transports,
}
"""What a page may ask for."""


# --- how it looks ---------------------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[str], words: int, rows: Iterator[Sequence[str]]) -> Table:
    """The first `words` columns are words, the others numbers."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))  # 80 columns are enough
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _markdown(columns: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
