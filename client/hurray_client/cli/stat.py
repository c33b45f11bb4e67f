"""hurrayctl stat: what one key holds, or what one node does."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from hurray_client import watch
from hurray_client.cli import output
from hurray_client.cli.options import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, Generation, Json, Target, Timeout, client
from hurray_wire.errors import InvalidRequest


def stat(
    key: Annotated[str | None, typer.Argument(help="Key of the snapshot.", metavar="[KEY]")] = None,
    *,
    node: Annotated[
        str | None,
        typer.Option("--node", help="Instead: what a node does, by its metrics.", metavar="HOST:PORT"),
    ] = None,
    over: Annotated[float, typer.Option("--over", min=0.1, max=600, help="With --node: seconds to look.")] = 2.0,
    target: Target = DEFAULT_TARGET,
    generation: Generation = 0,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Show what one key holds: sizes, lease, tensors, token counts. Or, of a node: is it moving, how fast, what fails
    and why, what holds its memory."""
    with output.failures(as_json):
        if (key is None) == (node is None):
            raise InvalidRequest("a key, or --node: one of them", field="key", required="KEY or --node HOST:PORT")
        if node is not None:
            before = watch.scrape(node, timeout_s=timeout)
            time.sleep(over)
            values = watch.report(before, watch.scrape(node, timeout_s=timeout))
        else:
            assert key is not None, "one of them"
            with client(target) as connected:
                values = connected.stat(key, generation=generation, timeout_s=timeout).to_dict()
    if as_json:
        output.show_json(values)
    elif node is not None:
        _show_node(values)
    else:
        tensors = values.pop("tensors")
        output.show_fields(values)
        output.show_rows(list(tensors[0]), [list(tensor.values()) for tensor in tensors])


def _show_node(values: dict[str, Any]) -> None:
    moving, speed, memory = values["moving"], values["speed"], values["memory"]
    typer.echo("Is it moving?")
    output.show_fields({name: _shown(value) for name, value in moving.items()})
    links = ", ".join(f"{device} {decimal(rate)}/s" for device, rate in speed["link_bytes_per_s"].items())
    typer.echo(f"\nHow fast? (over {values['over_s']:g} s; links: {links or 'speed not known'})")
    output.show_rows(
        ("direction", "transport", "transfers", "bytes", "mapped", "now", "one transfer"),
        [
            (
                flow["direction"],
                flow["transport"],
                flow["transfers"],
                decimal(flow["bytes"]),
                decimal(flow["mapped_bytes"]),
                f"{decimal(flow['bytes_per_s'])}/s",
                "" if flow["bytes_per_s_of_a_transfer"] is None else f"{decimal(flow['bytes_per_s_of_a_transfer'])}/s",
            )
            for flow in speed["flows"]
        ],
    )
    typer.echo("\nWhat fails, and why?")
    output.show_rows(
        ("what", "cause", "of", "since the start", "now"),
        [(item["what"], item["cause"], item["of"], item["count"], item["now"]) for item in values["failing"]],
    )
    typer.echo("\nWhat holds memory?")
    total = memory["arena_bytes"] or 1
    output.show_fields(
        {
            name.removesuffix("_bytes"): f"{decimal(value)} ({value / total:.0%})" if name.endswith("_bytes") else value
            for name, value in memory.items()
        }
    )


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return value
