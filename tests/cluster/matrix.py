"""What came of each scenario, as a table that the run prints at its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    scenario: str
    transport: str
    outcome: str
    seconds: float | None
    """From the fault to the error."""

    books: str
    right: bool
    counted: str = ""
    """Causes by which the node's metrics count it."""


ROWS: list[Row] = []


def table() -> list[str]:
    """Aligned columns, a line each."""
    header = ("scenario", "transport", "outcome", "s to error", "counted as", "books", "")
    lines = [header] + [
        (
            row.scenario,
            row.transport,
            row.outcome,
            "" if row.seconds is None else f"{row.seconds:.1f}",
            row.counted,
            row.books,
            "right" if row.right else "WRONG",
        )
        for row in ROWS
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
