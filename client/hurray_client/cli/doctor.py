"""hurrayctl doctor: why does it not start, why is it slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from hurray_client.cli import output
from hurray_client.cli.options import FILES, Json
from hurray_client.doctor.configuration import look_at_configuration, read_configuration
from hurray_client.doctor.findings import Finding, Status
from hurray_client.doctor.host import Wishes, look_at_host
from hurray_client.doctor.pair import look_at_pair

_STYLES = {Status.OK: "green", Status.NOTE: "cyan", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def doctor(
    node: Annotated[
        str | None,
        typer.Argument(help="A node to look at from here; else hurrayd on this host.", metavar="[HOST:PORT]"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration of hurrayd; else the one it reads unasked.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find out why a node does not start, or why it is slow.

    Without an address: this host, the configuration of hurrayd, and the node if it runs. With one: this host and that
    node, with probes over every transport. Exit status 1 if something that was asked for cannot work.
    """
    with output.failures(as_json):
        findings = list(_look(node, config))
    failed = [finding for finding in findings if finding.status is Status.FAILED]
    if as_json:
        output.show_json({"ok": not failed, "findings": [finding.to_dict() for finding in findings]})
    else:
        output.show(_table(findings))
    if failed:
        raise typer.Exit(output.Exit.FAILED)


def _look(node: str | None, config: Path | None) -> Iterator[Finding]:
    tls = FILES.get().credentials()
    if node is not None and config is None:
        yield from look_at_host(Wishes())
    else:
        configuration = read_configuration(config)
        yield from look_at_host(configuration.wishes)
        yield from look_at_configuration(configuration, tls)
    if node is not None:
        yield from look_at_pair(node, tls)


def _table(findings: list[Finding]) -> Table:
    table = Table(show_edge=False)
    for name in ("check", "", "found"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        found = Text(finding.what)
        if finding.remedy and finding.status is not Status.OK:
            found.append(f"\n{finding.remedy}", style="dim")
        table.add_row(Text(finding.check), Text(finding.status.value, style=_STYLES[finding.status]), found)
    return table
