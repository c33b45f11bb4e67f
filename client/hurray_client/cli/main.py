"""hurrayctl: put, get, ls, stat, rm, renew, node, drain, inspect, conformance, bench, certs, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hurray_client import conformance as conformance_run
from hurray_client import inspect as inspection
from hurray_client.cli import output
from hurray_client.cli.bench import bench
from hurray_client.cli.certs import certs
from hurray_client.cli.doctor import doctor
from hurray_client.cli.options import (
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT_S,
    FILES,
    Files,
    Generation,
    Json,
    Target,
    Timeout,
    Transport,
    client,
)
from hurray_client.cli.stat import stat
from hurray_client.receipt import Receipt
from hurray_wire.errors import InvalidRequest
from hurray_wire.hrry import load_hrry, save_hrry
from hurray_wire.policy import Policy

app = typer.Typer(
    name="hurrayctl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Hand paged KV caches to hurrayd nodes, take them from there, and look at them.

    Exit status: 0 done, 1 failed, 2 wrong command line, 3 no such snapshot, 4 node unavailable, full or too slow (try
    again), 130 interrupted. Settings of the data plane come from the environment (HURRAY_UCX__NET_DEVICES, ...).
    """,
)


@app.callback()
def files(
    *,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Who calls: PEM. Else from HURRAY_TLS__CERTIFICATE.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its private key. Else from HURRAY_TLS__KEY.")] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="Whose nodes to believe. Else from HURRAY_TLS__CA.")] = None,
) -> None:
    FILES.set(Files(certificate, key, ca))


@app.command(epilog="Example: hurrayctl put batch.hrry --key req/42 --lease 300 -t decode-3:7411")
def put(
    file: Annotated[Path, typer.Argument(help="Snapshot to hand over, .hrry.", exists=True, dir_okay=False)],
    *,
    key: Annotated[str, typer.Option("--key", "-k", help="Key to keep it under.")],
    target: Target = DEFAULT_TARGET,
    lease: Annotated[float | None, typer.Option("--lease", help="Seconds to keep it; the node's default else.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what the key holds.")] = False,
    token_counts: Annotated[
        str | None,
        typer.Option(
            "--token-counts", help="Tokens of each sequence, 6,3: for a file that does not say.", metavar="N,.."
        ),
    ] = None,
    annotate: Annotated[
        list[str] | None, typer.Option("--annotate", "-a", help="Kept with the snapshot.", metavar="NAME=VALUE")
    ] = None,
    checksum: Annotated[bool, typer.Option(help="Check every chunk that crosses.")] = True,
    require_transport: Transport = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Hand a snapshot in a file to a node."""
    with output.failures(as_json):
        counts = None if token_counts is None else _numbers(token_counts)
        annotations = dict(map(_pair, annotate or ()))
        snapshot = load_hrry(file, token_counts=counts)
        with client(target, require_transport) as node, output.bar(key, quiet=as_json) as on_progress:
            receipt = node.put(
                key,
                snapshot,
                lease_s=lease,
                overwrite=overwrite,
                timeout_s=timeout,
                checksum="xxh3_64" if checksum else "none",
                annotations=annotations,
                require_transport=require_transport,
                on_progress=on_progress,
            )
    _show_receipt(receipt, as_json)


@app.command(epilog="Example: hurrayctl get req/42 -o batch.hrry --wait 30 --consume")
def get(
    key: Annotated[str, typer.Argument(help="Key of the snapshot.")],
    *,
    file: Annotated[Path, typer.Option("--output", "-o", help="File to write, .hrry.", dir_okay=False)],
    target: Target = DEFAULT_TARGET,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the key.")] = 0.0,
    consume: Annotated[bool, typer.Option("--consume", help="Delete it from the node afterwards.")] = False,
    generation: Generation = 0,
    require_transport: Transport = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Take a snapshot from a node into a file."""
    with output.failures(as_json):
        with client(target, require_transport) as node, output.bar(key, quiet=as_json) as on_progress:
            received = node.get(
                key,
                wait_s=wait,
                consume=consume,
                generation=generation,
                timeout_s=timeout,
                require_transport=require_transport,
                on_progress=on_progress,
            )
        save_hrry(file, received)
    _show_receipt(received.receipt, as_json)


@app.command("ls", epilog="Example: hurrayctl ls req/")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin with this.")] = "",
    *,
    target: Target = DEFAULT_TARGET,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """List the snapshots of a node."""
    with output.failures(as_json), client(target) as node:
        found = list(node.list(prefix, timeout_s=timeout))
    if as_json:
        output.show_json([info.to_dict() for info in found])
        return
    output.show_rows(
        ("key", "generation", "bytes", "tensors", "sequences", "tokens", "expires"),
        [
            (
                info.key,
                info.generation,
                info.held_bytes,
                info.tensor_count,
                info.num_seqs,
                info.total_tokens,
                f"{info.expire_time:%Y-%m-%d %H:%M:%S}Z",
            )
            for info in found
        ],
    )


@app.command(epilog="Example: hurrayctl rm req/42 req/43")
def rm(
    keys: Annotated[list[str], typer.Argument(help="Keys of the snapshots.", metavar="KEY...")],
    *,
    target: Target = DEFAULT_TARGET,
    generation: Generation = 0,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Delete snapshots. Stops at the first that cannot be deleted."""
    deleted = []
    with output.failures(as_json), client(target) as node:
        for key in keys:
            deleted.append({"key": key, "generation": node.delete(key, generation=generation, timeout_s=timeout)})
            if not as_json:
                output.show(Text(f"deleted {key}"))
    if as_json:
        output.show_json(deleted)


@app.command(epilog="Example: hurrayctl renew req/42 --lease 600")
def renew(
    key: Annotated[str, typer.Argument(help="Key of the snapshot.")],
    *,
    target: Target = DEFAULT_TARGET,
    lease: Annotated[float | None, typer.Option("--lease", help="Seconds from now; the node's default else.")] = None,
    generation: Generation = 0,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Let the lease of a snapshot begin anew."""
    with output.failures(as_json), client(target) as node:
        values = node.renew(key, lease_s=lease, generation=generation, timeout_s=timeout).to_dict()
    _show(values, as_json)


@app.command()
def node(target: Target = DEFAULT_TARGET, timeout: Timeout = DEFAULT_TIMEOUT_S, as_json: Json = False) -> None:
    """Show what a node is and can do."""
    with output.failures(as_json), client(target) as connected:
        values = connected.node(timeout_s=timeout).to_dict()
    if not as_json:
        values.update({f"arena.{name}": value for name, value in values.pop("arena").items()})
    _show(values, as_json)


@app.command()
def drain(
    target: Target = DEFAULT_TARGET,
    deadline: Annotated[
        float | None, typer.Option("--deadline", help="Seconds that running transfers may take.")
    ] = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Let a node finish what runs, take nothing new, and stop."""
    with output.failures(as_json), client(target) as connected:
        count = connected.drain(deadline_s=deadline, timeout_s=timeout)
    _show({"transfer_count": count}, as_json)


@app.command(epilog="Example: hurrayctl inspect descriptor.bin")
def inspect(
    file: Annotated[str, typer.Argument(help="Descriptor, raw or as hex text; - reads standard input.")],
    permissive: Annotated[
        bool, typer.Option("--permissive", help="Accept what a permissive reader may, to look at a damaged one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a descriptor as an annotated hex table. Exit status 1 if it breaks a rule."""
    with output.failures(as_json):
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        found = inspection.describe(data, Policy(permissive=permissive))
    if as_json:
        output.show_json(found.to_json())
    else:
        output.show(found.table())
    if found.error is not None:
        raise typer.Exit(output.Exit.FAILED)


@app.command(epilog="Example: hurrayctl conformance manifest.json")
def conformance(
    manifest: Annotated[Path, typer.Argument(help="Manifest of vectors, JSON.", exists=True, dir_okay=False)],
    as_json: Json = False,
) -> None:
    """Run a manifest of conformance vectors: one line per wrong one, then the counts. Exit status 1 if any failed."""
    with output.failures(as_json):
        report = conformance_run.run(manifest)
    if as_json:
        output.show_json(report.to_json())
    else:
        for line in report.lines():
            typer.echo(line)
    if report.failed:
        raise typer.Exit(output.Exit.FAILED)


app.command(epilog="Example: hurrayctl stat req/42 --json; hurrayctl stat --node 127.0.0.1:7413")(stat)
app.command(epilog="Example: hurrayctl bench --quick --workload paged --json")(bench)
app.command(epilog="Example: hurrayctl certs pki --node decode-3=decode-3,10.0.0.3 --tenant prefill --tenant decode")(
    certs
)
app.command(epilog="Example: hurrayctl doctor decode-3:7411")(doctor)


def main() -> None:
    """Entry point of hurrayctl."""
    app()


def _show(values: dict[str, object], as_json: bool) -> None:
    if as_json:
        output.show_json(values)
    else:
        output.show_fields(values)


def _show_receipt(receipt: Receipt, as_json: bool) -> None:
    values = receipt.to_dict()
    if not as_json:
        stages = values.pop("stages")
        values["gigabytes_per_second"] = f"{receipt.gigabytes_per_second:.3f}"
        values["stages"] = ", ".join(f"{item['stage']} {item['duration_s'] * 1e3:.1f} ms" for item in stages)
    _show(values, as_json)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidRequest(
            "not a list of numbers", field="token_counts", offered=text, required="numbers between commas"
        ) from None


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InvalidRequest("not an annotation", field="annotations", offered=text, required="NAME=VALUE")
    return name, value


if __name__ == "__main__":
    main()
