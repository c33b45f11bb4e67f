"""Options that commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from hurray_client.client import Client, connect

Target = Annotated[
    str, typer.Option("--target", "-t", envvar="HURRAY_TARGET", help="The node, host:port.", metavar="HOST:PORT")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, errors too, and no progress.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for everything the command does.")]
Generation = Annotated[int, typer.Option("--generation", min=0, help="This generation only; 0 is the newest.")]
Transport = Annotated[
    str | None, typer.Option("--require-transport", help="Fail rather than move the bytes by another transport.")
]

DEFAULT_TARGET = "127.0.0.1:7411"
DEFAULT_TIMEOUT_S = 60.0


def client(target: str, transport: str | None = None) -> Client:
    """A client of the node, settings from the environment; connected by this transport, if it must be that."""
    return connect(target, transports=None if transport is None else [transport])
