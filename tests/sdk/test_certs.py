"""`hurrayctl certs`: one command, and nothing that is there is lost."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from hurray_client.cli.main import app
from hurray_wire.credentials import Credentials, read_credentials
from hurray_wire.errors import Misuse


def run(*arguments: str | Path, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout or done.stderr


def as_json(*arguments: str | Path, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status))


def credentials(folder: Path, stem: str) -> Credentials:
    return Credentials(folder / f"{stem}.pem", folder / f"{stem}.key", folder / "ca.pem")


def usages(folder: Path, stem: str) -> list[x509.ObjectIdentifier]:
    certificate = x509.load_pem_x509_certificate((folder / f"{stem}.pem").read_bytes())
    return list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_one_command_makes_an_authority_nodes_and_tenants(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    made = as_json(folder, "--node", "n1=n1.example,10.0.0.3,::1", "--node", "n2", "--tenant", "a", "--tenant", "b")
    assert [(row["kind"], row["name"]) for row in made["certificates"]] == [
        *(("node", "n1"), ("data", "n1"), ("node", "n2"), ("data", "n2")),
        *(("tenant", "a"), ("tenant", "b")),
    ]
    assert made["certificates"][0]["hosts"] == ["n1.example", "10.0.0.3", "::1"]
    assert made["certificates"][2]["hosts"] == ["n2", "localhost", "127.0.0.1", "::1"]
    assert made["certificates"][1]["hosts"] == []
    for stem, identity in (
        ("node-n1", "spiffe://hurray/node/n1"),
        ("data-n1", "spiffe://hurray/node/n1/data"),
        ("tenant-a", "spiffe://hurray/tenant/a"),
    ):
        pem = read_credentials(credentials(folder, stem))
        assert pem.identity == identity
        assert 29 < (pem.not_after - pem.not_before).days <= 30
        pem.require_valid("tls")
    assert usages(folder, "node-n1") == usages(folder, "data-n1") == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert usages(folder, "tenant-a") == [ExtendedKeyUsageOID.CLIENT_AUTH]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.suffix == ".key" else 0o644), path


def test_nothing_is_replaced_unasked_and_the_authority_never(tmp_path: Path) -> None:
    text = run(tmp_path)  # this host, and the tenant dev
    assert "[tls]" in text
    assert "HURRAY_TLS__CERTIFICATE" in text
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 8
    error = as_json(tmp_path, "--tenant", "x", "--tenant", "dev", status=1)["error"]
    assert "--force" in error["message"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    as_json(tmp_path, "--tenant", "x", "--tenant", "dev", "--force")
    after = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in after if after[path] != before.get(path)} == {
        *("tenant-dev.pem", "tenant-dev.key", "tenant-x.pem", "tenant-x.key")
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tenant", "a/b"],
        ["--tenant", ""],
        ["--tenant", "a", "--tenant", "a"],
        ["--node", "n=bad host"],
        ["--node", "n="],
        ["--node", "=h"],
        ["--node", "n", "--node", "n=h"],
    ],
)
def test_a_wrong_name_makes_nothing(tmp_path: Path, arguments: list[str]) -> None:
    as_json(tmp_path / "pki", *arguments, status=1)
    assert not (tmp_path / "pki").exists()


def test_an_authority_that_cannot_issue_is_refused(tmp_path: Path) -> None:
    as_json(tmp_path, "--tenant", "a", "--ca-days", "0.001")
    with pytest.raises(Misuse):  # nothing is valid for longer than its authority
        read_credentials(credentials(tmp_path, "tenant-b"))
    (tmp_path / "ca.key").write_bytes((tmp_path / "tenant-a.key").read_bytes())
    assert as_json(tmp_path, "--tenant", "b", status=1)["error"]["details"]["field"] == "ca.key"
    (tmp_path / "ca.key").unlink()
    assert "ca.pem" in as_json(tmp_path, "--tenant", "b", status=1)["error"]["message"]
