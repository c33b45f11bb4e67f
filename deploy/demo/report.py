"""What the demo says on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import hurray_client as ht


class Report:
    """What the demo says, and whether all of it was as it should be."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.failed_checks: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a part."""
        self.console.print(f"\n[bold cyan]{text}[/]")

    def say(self, text: str, style: str = "") -> None:
        """Tell something."""
        self.console.print(Padding(Text(text, style), (0, 0, 0, 6)))

    def check(self, holds: bool, text: str) -> None:
        """Say whether something is as it should be."""
        self.console.print(f"  {'[bold green]yes[/]' if holds else '[bold red]NO [/]'} {text}")
        if not holds:
            self.failed_checks.append(text)

    def refusal(self, text: str, error: ht.HurrayError, expected: type[ht.HurrayError], named: dict[str, str]) -> None:
        """Say how something was refused; it must be by this error, which names this."""
        self.check(isinstance(error, expected) and error.details.items() >= named.items(), text)
        self.say(str(error), "yellow")


def receipt_table(receipt: dict[str, Any]) -> Table:
    """The receipt, for people."""
    table = Table(title="Receipt", title_justify="left", show_header=False)
    for name, value in receipt.items():
        table.add_row(name, _shown(value))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{item['stage']} {item['duration_s'] * 1e3:.1f} ms" for item in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
