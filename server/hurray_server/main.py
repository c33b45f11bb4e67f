"""The command `hurrayd`."""

from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from hurray_server.config import DEFAULT_CONFIG_PATH, load_config, to_toml
from hurray_server.logs import configure_logs
from hurray_server.preflight import checked, preflight
from hurray_wire.errors import HurrayError

EXIT_FAILED = 1
EXIT_CONFIG = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hurrayd {version('hurray-transfer')}")
        raise typer.Exit


@app.command()
def hurrayd(  # noqa: PLR0917 -- typer's options, given by name
    config: Annotated[
        Path | None,
        typer.Option(help=f"Configuration file (TOML). Without it: {DEFAULT_CONFIG_PATH}, if it is there."),
    ] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT of the control plane; port 0 takes a free one.")] = None,
    advertise: Annotated[str | None, typer.Option(help="HOST:PORT by which peers reach it, if not as it is.")] = None,
    node: Annotated[str | None, typer.Option(help="Name of this node, for people.")] = None,
    arena: Annotated[str | None, typer.Option(help='Memory for snapshots, as "64GiB" or a number of bytes.')] = None,
    net_device: Annotated[
        list[str] | None,
        typer.Option(help="Network device that UCX uses, on networks that --ucx-trusted names. Repeatable."),
    ] = None,
    ucx_trusted: Annotated[
        list[str] | None,
        typer.Option(help="Network, as 10.0.0.0/24, that nobody reaches who is not trusted. Repeatable."),
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Serve everyone who reaches an address that is not loopback.")
    ] = None,
    drain_s: Annotated[float | None, typer.Option(help="Seconds that running transfers get after SIGTERM.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="json or text.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the configuration and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: what it comes to, as JSON.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration that results from all layers and exit.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Receive, keep and serve paged KV caches on this node.

    Settings come from flags, then from environment variables (HURRAY_ and the key, "__" between levels, as in
    HURRAY_ARENA__BYTES), then from the configuration file.

    The first SIGTERM or SIGINT drains: running transfers may end. A second one cuts them short. Exit status: 0 after
    an orderly stop, 1 when hurrayd cannot start or go on, 2 when the configuration is wrong.
    """
    flags = {
        "listen": listen,
        "advertise": advertise,
        "node": node,
        "arena": {"bytes": arena},
        "ucx": {
            "net_devices": tuple(net_device) if net_device else None,
            "trusted": tuple(ucx_trusted) if ucx_trusted else None,
        },
        "insecure": insecure,
        "drain_s": drain_s,
        "log": {"level": log_level, "format": log_format},
    }
    settings = None
    try:
        settings = load_config(config, _given(flags))
        if not print_config:
            preflight(settings)
    except HurrayError as error:
        if check and as_json:
            typer.echo(json.dumps(checked(settings, error)))
        else:
            typer.echo(f"hurrayd: configuration: {error.message}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    if print_config:
        typer.echo(to_toml(settings))
    if check and as_json:
        typer.echo(json.dumps(checked(settings, None)))
    elif check and not print_config:
        typer.echo("configuration is fine")
        left_out = [f"transport {kind} left out: {reason}" for kind, reason in settings.left_out.items()]
        typer.echo("\n".join(settings.transports_config.lines() + left_out))
    if check or print_config:
        return
    configure_logs(settings.log.level, settings.log.format, "hurrayd")
    from hurray_server.daemon import serve

    try:
        asyncio.run(serve(settings))
    except HurrayError as error:
        typer.echo(f"hurrayd: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Only the flags that were given."""
    given = {name: _given(value) if isinstance(value, dict) else value for name, value in flags.items()}
    return {name: value for name, value in given.items() if value is not None and value != {}}


def main() -> None:
    """Entry point."""
    # gRPC's core writes what it finds notable to standard error as plain text, between our lines of JSON. It reads this
    # when it is first imported, which is why `serve` comes later.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    app()
