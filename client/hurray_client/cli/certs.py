"""`hurrayctl certs`."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from hurray_client.certs import (
    CA_CERTIFICATE,
    CA_KEY,
    Authority,
    Issued,
    check_host,
    check_name,
    unique,
    write_files,
)
from hurray_client.cli import output
from hurray_client.cli.options import Json
from hurray_wire.errors import InvalidRequest

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")

_DEFAULT_TENANT: Final = "dev"


def certs(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.", file_okay=False)],
    *,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            help="A node and the hosts it is reached by; without any: its name and loopback. Repeatable.",
            metavar="NAME[=HOST,..]",
        ),
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option("--tenant", help="A tenant. Repeatable.", metavar="NAME")] = None,
    days: Annotated[float, typer.Option("--days", min=0.001, max=825, help="How long certificates are valid.")] = 30,
    ca_days: Annotated[
        float, typer.Option("--ca-days", min=0.001, max=3650, help="The same for an authority that is made now.")
    ] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace certificates that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Make certificates for nodes and tenants, and an authority that vouches for them.

    For development, tests and clusters whose keys may lie on one disk: whoever reads ca.key can be every node and
    tenant. An authority that is in the folder is used again, so that nodes and tenants can be added, and renewed with
    --force; it is itself never replaced. Without --node and --tenant: this host as a node, and the tenant "dev".
    """
    with output.failures(as_json):
        if not node and not tenant:
            node, tenant = [socket.gethostname()], [_DEFAULT_TENANT]
        nodes, tenants = _nodes(node or []), tenant or []
        for name in tenants:
            check_name(name, "tenant")
        unique(tenants, "tenant")
        authority, files = _authority(folder, timedelta(days=ca_days))
        rows: list[dict[str, Any]] = []

        def add(kind: str, name: str, issued: Issued) -> None:
            certificate, key = folder / f"{kind}-{name}.pem", folder / f"{kind}-{name}.key"
            files.update({certificate: issued.certificate, key: issued.key})
            rows.append(
                {
                    "kind": kind,
                    "name": name,
                    "identity": issued.identity,
                    "hosts": list(issued.hosts),
                    "certificate": str(certificate),
                    "key": str(key),
                    "expire_time": f"{issued.not_after:%Y-%m-%dT%H:%M:%SZ}",
                }
            )

        valid = timedelta(days=days)
        for name, hosts in nodes.items():
            add("node", name, authority.issue_node(name, hosts, valid))
            add("data", name, authority.issue_data(name, valid))
        for name in tenants:
            add("tenant", name, authority.issue_tenant(name, valid))
        write_files(files, force=force)
    if as_json:
        output.show_json({"ca": str(folder / CA_CERTIFICATE), "certificates": rows})
        return
    output.show_rows(
        ("file", "identity", "hosts", "expires"),
        [
            (f"{row['kind']}-{row['name']}.pem", row["identity"], ", ".join(row["hosts"]), row["expire_time"])
            for row in rows
        ],
    )
    output.show(Text("\n".join(_hints(folder, list(nodes), tenants))))


def _nodes(given: list[str]) -> dict[str, tuple[str, ...]]:
    nodes: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, separator, listed = text.partition("=")
        hosts = tuple(part.strip() for part in listed.split(",")) if separator else (name, *_LOOPBACK)
        check_name(name, "node")
        for host in hosts:
            check_host(host)
        unique([*nodes, name], "node")
        nodes[name] = hosts
    return nodes


def _authority(folder: Path, valid: timedelta) -> tuple[Authority, dict[Path, bytes]]:
    """The one of the folder, or a new one with the files it is to be written to."""
    certificate, key = folder / CA_CERTIFICATE, folder / CA_KEY
    if key.exists():
        return Authority.load(folder), {}
    if certificate.exists():
        raise InvalidRequest(
            f"{certificate} is there, but not its key: nothing can be issued", field="folder", offered=folder
        )
    authority = Authority.new("hurray development authority", valid)
    return authority, {certificate: authority.certificate, key: authority.key}


def _hints(folder: Path, nodes: list[str], tenants: list[str]) -> list[str]:
    lines = []
    where = folder.absolute()
    for name in nodes[:1]:
        lines += [
            "",
            f"hurrayd.toml on {name}:",
            "  [tls]",
            *(f'  {field} = "{where / file}"' for field, file in _files(f"node-{name}")),
            "  [tls.data]",
            *(f'  {field} = "{where / file}"' for field, file in _files(f"data-{name}")[:2]),
        ]
    for name in tenants[:1]:
        lines += [
            "",
            f"Environment of whoever acts for {name}:",
            *(f"  HURRAY_TLS__{field.upper()}={where / file}" for field, file in _files(f"tenant-{name}")),
        ]
    return lines


def _files(stem: str) -> list[tuple[str, str]]:
    return [("certificate", f"{stem}.pem"), ("key", f"{stem}.key"), ("ca", CA_CERTIFICATE)]
