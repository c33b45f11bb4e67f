"""What a TLS transport shows its peers and accepts from them: TLS 1.3, both sides with a certificate."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hurray_wire.errors import Misuse
from hurray_wire.log import get_logger

_log = get_logger("hurray.transport")

_PEM_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_PEM_END: Final = b"-----END CERTIFICATE-----"
_SPIFFE: Final = "spiffe://"

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM files, as the control plane has them. They are read again for the next connection after they change."""

    certificate: Path
    """This side's certificate, then the ones between it and the authority."""

    key: Path
    """Its private key, not encrypted."""

    authority: Path
    """Certificates of the authorities that peers' certificates must come from."""


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """Credentials as they were read: one context per direction, and this side's certificate (DER)."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes
    stamp: Stamp


class CredentialsReader:
    """Raises Misuse, naming the file, where the credentials cannot be used at the start."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._contexts = _load(credentials)
        self._failed_stamp: Stamp | None = None

    def current(self) -> TlsContexts:
        """The contexts for a new connection. Changed files that cannot be used leave the old ones in force."""
        try:
            stamp = _stamp(self._credentials)
            if stamp not in (self._contexts.stamp, self._failed_stamp):
                self._failed_stamp = stamp
                self._contexts = _load(self._credentials)
                _log.info("credentials read again", certificate=str(self._credentials.certificate))
        except Misuse as error:
            _log.warning("changed credentials cannot be used, the old ones stay in force", error=str(error))
        except OSError:
            pass  # a file is being replaced: the stamp differs again once it is there
        return self._contexts


def identity_of(certificate: Mapping[str, object]) -> str | None:
    """Identity in a verified certificate, as SSLObject.getpeercert gives it: its SPIFFE URI, else its common name.

    None where it has neither, or several of the one that counts.
    """
    names: list[str] = []
    alternatives = certificate.get("subjectAltName", ())
    assert isinstance(alternatives, tuple)
    names = [value for kind, value in alternatives if kind == "URI" and value.startswith(_SPIFFE)]
    if not names:
        subject = certificate.get("subject", ())
        assert isinstance(subject, tuple)
        names = [value for part in subject for name, value in part if name == "commonName"]
    return names[0] if len(names) == 1 else None


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a certificate (DER), or of nothing in plain mode."""
    return hashlib.sha256(certificate).digest()


def _stamp(credentials: Credentials) -> Stamp:
    found = [path.stat() for path in (credentials.certificate, credentials.key, credentials.authority)]
    return tuple((entry.st_ino, entry.st_size, entry.st_mtime_ns) for entry in found)


def _load(credentials: Credentials) -> TlsContexts:
    try:
        stamp = _stamp(credentials)
        return TlsContexts(
            _context(credentials, ssl.PROTOCOL_TLS_SERVER),
            _context(credentials, ssl.PROTOCOL_TLS_CLIENT),
            _first_certificate(credentials.certificate),
            stamp,
        )
    except (OSError, ValueError) as error:
        paths = f"{credentials.certificate}, {credentials.key}, {credentials.authority}"
        raise Misuse(
            f"the TLS credentials ({paths}) cannot be used: {error}",
            field="tls.credentials",
            offered=paths,
            required="a PEM certificate, its key without a password, and an authority's certificate",
        ) from error


def _context(credentials: Credentials, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A peer is known by its identity and the proof of both tokens, whatever the name it is reached by.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(credentials.authority)
    context.load_cert_chain(credentials.certificate, credentials.key, password=lambda: "")
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection is verified in full
    return context


def _first_certificate(path: Path) -> bytes:
    text = path.read_bytes()
    start = text.find(_PEM_BEGIN)
    end = text.find(_PEM_END, start)
    if start < 0 or end < 0:
        raise ValueError(f"{path} holds no certificate")
    return ssl.PEM_cert_to_DER_cert(text[start : end + len(_PEM_END)].decode("ascii"))
