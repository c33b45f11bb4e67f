"""Authorities and certificates for tests, made anew for each, by the code of `hurrayctl certs`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hurray_client.certs
from hurray_client.certs import Issued, write_files
from hurray_wire.credentials import Credentials

DAY = timedelta(days=1)


class Authority:
    """A certificate authority that writes what it issues to `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.path = folder / f"{name}.pem"
        self.folder = folder
        self._authority = hurray_client.certs.Authority.new(name, 7 * DAY)
        self.path.write_bytes(self._authority.certificate)

    def issue(
        self,
        name: str,
        *,
        spiffe: str | None = None,
        uris: Sequence[str] = (),
        expired: bool = False,
        trusts: Authority | None = None,
        common_name: str | None = "",
        **options: Any,
    ) -> Credentials:
        """Credentials of `name` (its common name, unless one is given), which accept what `trusts` (by default this
        authority) issued."""
        issued = self._authority.issue(
            name if common_name == "" else common_name,
            valid=-DAY if expired else DAY,
            since=2 * DAY,
            uris=[spiffe] if spiffe is not None else uris,
            **options,
        )
        return self.write(name, issued, trusts)

    def tenant(self, name: str, **options: Any) -> Credentials:
        """Of a tenant, as hurrayctl makes them."""
        return self.write(f"tenant-{name}", self._authority.issue_tenant(name, DAY), **options)

    def node(self, name: str, hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> Credentials:
        """Of a node, as hurrayctl makes them."""
        return self.write(f"node-{name}", self._authority.issue_node(name, hosts, DAY))

    def data(self, name: str) -> Credentials:
        """Of a node's data plane, as hurrayctl makes them."""
        return self.write(f"data-{name}", self._authority.issue_data(name, DAY))

    def write(self, stem: str, issued: Issued, trusts: Authority | None = None) -> Credentials:
        """Into files, in place of those that are there."""
        found = (trusts or self).found(stem, self.folder)
        write_files({found.certificate: issued.certificate, found.key: issued.key}, force=True)
        return found

    def found(self, stem: str, folder: Path | None = None) -> Credentials:
        """Those that were written under this name, which trust this authority."""
        folder = folder or self.folder
        return Credentials(folder / f"{stem}.pem", folder / f"{stem}.key", self.path)
