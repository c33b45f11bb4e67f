"""`hurrayctl bench`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hurray_client.bench import plot as plotting
from hurray_client.bench import report
from hurray_client.bench.processes import BenchError
from hurray_client.bench.runner import Plan, run
from hurray_client.bench.workloads import FULL, QUICK
from hurray_client.cli import output
from hurray_client.cli.options import Json


def bench(  # noqa: PLR0917 -- typer's options, given by name
    quick: Annotated[bool, typer.Option("--quick", help="Less than a minute: smaller, and fewer rounds.")] = False,
    workload: Annotated[list[str] | None, typer.Option("--workload", help="Only this one. Repeatable.")] = None,
    transport: Annotated[list[str] | None, typer.Option("--transport", help="Only this one. Repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Interleaved rounds.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write throughput against snapshot size, SVG.", dir_okay=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure puts and gets on this host against what it and others can do. Starts daemons and clients of its own.

    Only ratios mean something: the machine is compared with itself, round by round. Exit status 1 if a case failed.
    """
    scale = QUICK if quick else FULL
    if rounds is not None:
        scale = replace(scale, rounds=rounds, budget_s=None)
    plan = Plan(scale, tuple(workload or ()), tuple(transport or ()), plot=plot is not None)
    with output.failures(as_json):
        plan.chosen()
        if plot is not None:
            plotting.require_matplotlib()
        try:
            with _progress() as progress:
                outcome = run(plan, progress)
        except BenchError as error:
            Console(stderr=True).print(Text(str(error), style="red"))
            raise typer.Exit(output.Exit.FAILED) from None
        if plot is not None:
            plotting.draw(outcome, plot)
    if as_json:
        output.show_json(report.to_json(outcome))
    else:
        output.show(report.tables(outcome))
    if outcome.failed:
        raise typer.Exit(output.Exit.FAILED)


class _Bar:
    """A bar on a terminal."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def step(self, text: str) -> None:
        self._bar.update(self._task, description=f"{text:40.40}")

    def rounds(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


class _Lines:
    """A line a round where standard error is a file."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        if text.startswith("starting"):
            self._say(text)

    def rounds(self, done: int, total: int) -> None:
        self._say(f"round {done} of {total}")

    def _say(self, text: str) -> None:
        typer.echo(f"{time.monotonic() - self._began:6.1f} s  {text}", err=True)


@contextmanager
def _progress() -> Iterator[_Bar | _Lines]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar)
