"""Options that commands share."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from hurray_client.client import Client, connect
from hurray_wire.credentials import Credentials
from hurray_wire.errors import InvalidRequest

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


@dataclass(frozen=True)
class Files:
    """PEM files given before the command."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def credentials(self) -> Credentials | None:
        """None where there are none. Raises InvalidRequest where some are missing."""
        given = asdict(self)
        missing = [name for name, path in given.items() if path is None]
        if len(missing) == len(given):
            return None
        if missing:
            raise InvalidRequest(
                f"--{missing[0]} is missing: --certificate, --key and --ca come together", field=missing[0]
            )
        return Credentials(**given)


FILES: ContextVar[Files] = ContextVar("files", default=Files())  # noqa: B039 -- frozen
"""Of the command that runs."""


def client(target: str, transport: str | None = None) -> Client:
    """A client of the node, settings from the environment and from options before the command; connected by this
    transport, if it must be that."""
    return connect(target, tls=FILES.get().credentials(), transports=None if transport is None else [transport])
