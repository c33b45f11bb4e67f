"""`hurrayctl bench`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from hurray_client.bench import gpu, report, shown
from hurray_client.bench import plot as plotting
from hurray_client.bench.processes import BenchError
from hurray_client.bench.runner import Plan, run
from hurray_client.bench.workloads import FULL, QUICK
from hurray_client.cli import output
from hurray_client.cli.options import Json
from hurray_wire.cuda import read_device
from hurray_wire.errors import InvalidRequest


def bench(  # noqa: PLR0917 -- typer's options, given by name
    quick: Annotated[bool, typer.Option("--quick", help="Less than a minute: smaller, and fewer rounds.")] = False,
    workload: Annotated[list[str] | None, typer.Option("--workload", help="Only this one. Repeatable.")] = None,
    transport: Annotated[list[str] | None, typer.Option("--transport", help="Only this one. Repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Interleaved rounds.")] = None,
    peers: Annotated[bool, typer.Option(help="Run other engines, too, where they are installed.")] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write throughput against snapshot size, SVG.", dir_okay=False)
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Show the --json of an earlier run.", exists=True, dir_okay=False)
    ] = None,
    page: Annotated[
        list[Path] | None,
        typer.Option("--page", help="Write the figures to where this page marks it. Repeatable.", exists=True),
    ] = None,
    device: Annotated[str, typer.Option("--device", help='"cpu", or a GPU: "cuda", "cuda:1".')] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure puts and gets on this host against what it and others can do. Starts daemons and clients of its own.

    Only ratios mean something: the machine is compared with itself, round by round. Exit status 1 if a case failed.
    """
    with output.failures(as_json):
        if read_device(device) is not None:
            if workload or transport or plot or recorded or page:
                raise InvalidRequest(
                    "of a GPU there is one benchmark: --quick, --rounds and --json go with it", field="device"
                )
            _show_gpu(_run_gpu(device, quick=quick, rounds=rounds, peers=peers), as_json)
            return
        if recorded is None:
            if page:
                raise InvalidRequest("pages are written from a run that is kept: give --from", field="page")
            scale = QUICK if quick else FULL
            if rounds is not None:
                scale = replace(scale, rounds=rounds, budget_s=None)
            found = _run(Plan(scale, tuple(workload or ()), tuple(transport or ()), plot is not None, peers), plot)
        elif quick or workload or transport or rounds or plot:
            raise InvalidRequest("an earlier run is shown as it was: --from goes with --page and --json", field="from")
        else:
            found = shown.read(recorded.read_text())
        for path in page or ():
            path.write_text(shown.update_page(path.read_text(), found))
    if as_json:
        output.show_json(found)
    else:
        output.show(shown.tables(found))
    if found["failed"]:
        raise typer.Exit(output.Exit.FAILED)


def _run_gpu(device: str, *, quick: bool, rounds: int | None, peers: bool) -> dict[str, Any]:
    scale = gpu.QUICK if quick else gpu.Scale()
    if rounds is not None:
        scale = replace(scale, rounds=rounds)
    try:
        with _progress() as progress:
            return gpu.run(scale, device, progress, peers=peers)
    except BenchError as error:
        Console(stderr=True).print(Text(str(error), style="red"))
        raise typer.Exit(output.Exit.FAILED) from None


def _show_gpu(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.show_json(found)
    else:
        output.show_rows(("on " + found["device"], "median", "goal", "met"), gpu.rows(found))
        for name, reason in (found["skipped"] | found["failed"]).items():
            output.show(Text(f"{name}: {reason}", style="red" if name in found["failed"] else "dim"))
    if found["failed"]:
        raise typer.Exit(output.Exit.FAILED)


def _run(plan: Plan, plot: Path | None) -> dict[str, Any]:
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
    return report.to_json(outcome, shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))


class _Bar:
    """A bar on a terminal, with the time that is left."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def step(self, text: str, rounds: float = 0.0) -> None:
        self._bar.update(self._task, description=f"{text:40.40}", completed=rounds)

    def rounds(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


class _Lines:
    """A line a round where standard error is a file."""

    def __init__(self) -> None:
        self._began = self._rounds_began = time.monotonic()

    def step(self, text: str, rounds: float = 0.0) -> None:
        if not rounds and text.startswith("starting"):
            self._say(text)

    def rounds(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not done:
            self._rounds_began = now
        left = f", {(now - self._rounds_began) / done * (total - done):.0f} s left" if 0 < done < total else ""
        self._say(f"round {done} of {total}{left}")

    def _say(self, text: str) -> None:
        typer.echo(f"{time.monotonic() - self._began:6.1f} s  {text}", err=True)


@contextmanager
def _progress() -> Iterator[_Bar | _Lines]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar)
