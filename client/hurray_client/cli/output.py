"""What commands print: tables and bars for people, JSON for programs, and exit statuses for both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from hurray_client.progress import OnProgress
from hurray_wire.errors import HurrayError


class Exit(IntEnum):
    """Exit statuses of hurrayctl. 2 is a wrong command line."""

    DONE = 0
    FAILED = 1
    NOT_FOUND = 3
    UNAVAILABLE = 4
    """The node or its data plane is not there, or the time was too short: trying again may help."""
    INTERRUPTED = 130


_BY_CODE = {
    "NOT_FOUND": Exit.NOT_FOUND,
    "UNAVAILABLE": Exit.UNAVAILABLE,
    "DEADLINE_EXCEEDED": Exit.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": Exit.UNAVAILABLE,
}

_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True)


def show_json(values: object) -> None:
    """One JSON value on standard output."""
    typer.echo(json.dumps(values, indent=2))


def show(renderable: object) -> None:
    """A table or text on standard output."""
    _out.print(renderable)


def show_fields(values: Mapping[str, Any]) -> None:
    """One line per field."""
    grid = Table.grid(padding=(0, 2))
    for name, value in values.items():
        # Text, not markup: names and values are other people's.
        grid.add_row(Text(name, style="bold"), Text(str(value)))
    _out.print(grid)


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table, numbers to the right."""
    table = Table(show_edge=False)
    for number, name in enumerate(columns):
        right = bool(rows) and isinstance(rows[0][number], (int, float))
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    _out.print(table)


@contextmanager
def failures(as_json: bool) -> Iterator[None]:
    """Turn errors into one message and an exit status."""
    try:
        yield
    except HurrayError as error:
        if as_json:
            show_json({"error": error_values(error)})
        else:
            _err.print(Text.assemble((f"{error.reason}: ", "bold red"), _explain(error)))
        raise typer.Exit(_BY_CODE.get(error.code, Exit.FAILED)) from None
    except OSError as error:
        if as_json:
            show_json({"error": {"reason": "OS_ERROR", "code": "UNKNOWN", "message": str(error), "details": {}}})
        else:
            _err.print(Text(str(error), style="red"))
        raise typer.Exit(Exit.FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def error_values(error: HurrayError) -> dict[str, Any]:
    """An error as JSON values."""
    return {
        "reason": error.reason,
        "code": error.code,
        "message": error.message,
        "details": error.details,
        "retry_after_s": error.retry_after_s,
    }


def _explain(error: HurrayError) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in error.details.items())
    return error.message + (f" ({shown})" if shown else "")


@contextmanager
def bar(what: str, *, quiet: bool) -> Iterator[OnProgress | None]:
    """A progress bar on standard error: yields what to give as `on_progress`, or None where nobody looks."""
    if quiet or not _err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_err, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda at: progress.update(task, completed=at.done_bytes, total=at.total_bytes)
