"""A certificate authority for development and tests: it issues to nodes and tenants what hurrayd and the SDK ask for.

Keys are on the curve P-256. A node's certificate is for TLS servers and for its host names; a tenant's is for TLS
clients and names the tenant; that of a node's data plane is for no host name, so that whoever has its key cannot pass
for a control plane.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hurray_wire.credentials import DATA_URI, NAME, NODE_URI, TENANT_URI
from hurray_wire.errors import InvalidRequest, Misuse

CA_CERTIFICATE: Final = "ca.pem"
CA_KEY: Final = "ca.key"

CLOCK_SKEW: Final = timedelta(hours=1)
"""Certificates are valid from this long ago: hosts whose clocks are behind take them, too."""

_USAGE: Final = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}

Usage = Literal["server", "client"]


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key, both PEM."""

    certificate: bytes
    key: bytes
    identity: str
    hosts: tuple[str, ...]
    not_after: datetime


class Authority:
    """See the module."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def new(cls, name: str, valid: timedelta) -> Self:
        """A new one, which vouches for itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            _builder(_name(name), _name(name), key, now - CLOCK_SKEW, now + valid)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The one in this folder. Raises Misuse for files that are not its own, OSError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / CA_CERTIFICATE).read_bytes())
            key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        except (ValueError, TypeError) as error:
            raise Misuse(f"the authority in {folder} cannot be read: {error}", field=CA_KEY) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise Misuse(f"{CA_KEY} in {folder} is not the key of {CA_CERTIFICATE}", field=CA_KEY)
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            raise Misuse(
                f"the authority in {folder} has expired; remove {CA_CERTIFICATE} and {CA_KEY} to make another",
                field=CA_CERTIFICATE,
                offered=certificate.not_valid_after_utc,
            )
        return cls(certificate, key)

    @property
    def certificate(self) -> bytes:
        """PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key(self) -> bytes:
        """PEM."""
        return _key_pem(self._key)

    @property
    def not_after(self) -> datetime:
        """End of its validity; nothing that it issues is valid for longer."""
        return self._certificate.not_valid_after_utc

    def issue(
        self,
        common_name: str | None,
        *,
        valid: timedelta,
        uris: Sequence[str] = (),
        hosts: Sequence[str] = (),
        usages: Sequence[Usage] = ("server", "client"),
        since: timedelta = CLOCK_SKEW,
    ) -> Issued:
        """A certificate, valid from `since` ago for `valid` from now. `hosts`: DNS names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        not_after = min(now + valid, self.not_after)
        subject = _name(common_name) if common_name is not None else x509.Name([])
        builder = (
            _builder(subject, self._certificate.subject, key, now - since, not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_USAGE[usage] for usage in usages]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        names = [*map(x509.UniformResourceIdentifier, uris), *map(_host, hosts)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=common_name is None)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(
            certificate.public_bytes(serialization.Encoding.PEM),
            _key_pem(key),
            next(iter(uris), common_name or ""),
            tuple(hosts),
            certificate.not_valid_after_utc,
        )

    def issue_node(self, node: str, hosts: Sequence[str], valid: timedelta) -> Issued:
        """For the control plane of a node that is reached by these names. Raises InvalidRequest."""
        check_name(node, "node")
        return self.issue(node, valid=valid, uris=[NODE_URI.format(node=node)], hosts=hosts, usages=["server"])

    def issue_data(self, node: str, valid: timedelta) -> Issued:
        """For the data plane of a node. Raises InvalidRequest."""
        check_name(node, "node")
        return self.issue(node, valid=valid, uris=[DATA_URI.format(node=node)], usages=["server"])

    def issue_tenant(self, tenant: str, valid: timedelta) -> Issued:
        """For whoever acts for a tenant. Raises InvalidRequest."""
        check_name(tenant, "tenant")
        return self.issue(tenant, valid=valid, uris=[TENANT_URI.format(tenant=tenant)], usages=["client"])


def check_name(name: str, field: str) -> None:
    """Raises InvalidRequest for what cannot be the name of a node or tenant."""
    if NAME.fullmatch(name) is None:
        raise InvalidRequest(f"not a name of a {field}", field=field, offered=name, required=NAME.pattern)


def check_host(host: str) -> None:
    """Raises InvalidRequest for what is neither an IP address nor a host name."""
    try:
        _host(host)
    except ValueError as error:
        raise InvalidRequest(f"not a host: {error}", field="host", offered=host) from None


def write_files(files: Mapping[Path, bytes], *, force: bool) -> None:
    """Write all of them, keys (.key) for their owner only, each in one step. Without `force` nothing is written where
    one of them exists. Raises InvalidRequest, OSError."""
    existing = [path for path in files if path.exists()]
    if existing and not force:
        raise InvalidRequest(
            f"{existing[0]} exists"
            + (f", and {len(existing) - 1} more" if len(existing) > 1 else "")
            + ": say --force",
            field="force",
            offered=existing[0],
        )
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.unlink(missing_ok=True)
        mode = 0o600 if path.suffix == ".key" else 0o644
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        staged.replace(path)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, not_before: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not all(_is_label(label) for label in host.split(".")):
        raise ValueError(f"{host!r} is neither an IP address nor a name")
    return x509.DNSName(host)


def _is_label(label: str) -> bool:
    return label.isascii() and label.replace("-", "").replace("_", "").isalnum() and len(label) <= 63


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def unique(names: Iterable[str], field: str) -> None:
    """Raises InvalidRequest for a name that is given twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"{name!r} is given twice", field=field, offered=name)
        seen.add(name)
