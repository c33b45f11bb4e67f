"""Authorities and certificates for tests, made anew for each."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hurray_wire.transport.tls import Credentials

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority that writes what it issues to `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._path = folder / f"{name}.pem"
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder(self._name, self._name, self._key.public_key(), x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *, spiffe: str | None = None, expired: bool = False, trusts: Authority | None = None
    ) -> Credentials:
        """Credentials of `name`, which accept what `trusts` (by default this authority) issued."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder(self._name, _name(name), key.public_key(), x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + (-DAY if expired else DAY))
        )
        if spiffe is not None:
            alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(spiffe)])
            builder = builder.add_extension(alternative, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        certificate_path, key_path = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Credentials(certificate_path, key_path, (trusts or self)._path)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
