"""What a TLS transport shows its peers and accepts from them: TLS 1.3, both sides with a certificate."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from hurray_wire.credentials import Credentials, Pem, WatchedCredentials, choose_identity
from hurray_wire.errors import Misuse


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """Credentials as they were read: one context per direction, and this side's certificate (DER)."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes


def watch_contexts(credentials: Credentials) -> WatchedCredentials[TlsContexts]:
    """The contexts for new connections. Raises Misuse, naming the file, where the credentials cannot be used."""

    def build(pem: Pem) -> TlsContexts:
        try:
            return TlsContexts(
                _context(credentials, pem, ssl.PROTOCOL_TLS_SERVER),
                _context(credentials, pem, ssl.PROTOCOL_TLS_CLIENT),
                pem.der,
            )
        except (OSError, ValueError) as error:
            raise Misuse(
                f"the TLS credentials ({credentials.certificate}, {credentials.key}, {credentials.ca}) cannot be used: "
                f"{error}",
                field="tls",
            ) from error

    return WatchedCredentials(credentials, build)


def identity_of(certificate: Mapping[str, object]) -> str | None:
    """Identity in a verified certificate, as SSLObject.getpeercert gives it. None where it names nobody or several."""
    alternatives = certificate.get("subjectAltName", ())
    subject = certificate.get("subject", ())
    assert isinstance(alternatives, tuple)
    assert isinstance(subject, tuple)
    uris = [value for kind, value in alternatives if kind == "URI"]
    common_names = [value for part in subject for name, value in part if name == "commonName"]
    return choose_identity(uris, common_names)[0]


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a certificate (DER), or of nothing in plain mode."""
    return hashlib.sha256(certificate).digest()


def _context(credentials: Credentials, pem: Pem, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A peer is known by its identity and the proof of both tokens, whatever the name it is reached by.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=pem.ca.decode())
    context.load_cert_chain(credentials.certificate, credentials.key, password=lambda: "")
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection is verified in full
    return context
