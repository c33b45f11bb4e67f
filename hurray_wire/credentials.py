"""PEM files that say who this side is and whom it believes, and what a certificate says of its owner.

Read by whoever opens connections (gRPC at daemon and client, the tls transport), and again after they change.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from .errors import HurrayError, Misuse, Unauthenticated
from .log import get_logger

if TYPE_CHECKING:
    from cryptography import x509

_log = get_logger("hurray.credentials")

SPIFFE: Final = "spiffe://"

TENANT_URI: Final = "spiffe://hurray/tenant/{tenant}"
"""How the certificates that hurrayctl makes name tenants, and what hurrayd expects unless told otherwise."""

NODE_URI: Final = "spiffe://hurray/node/{node}"
DATA_URI: Final = "spiffe://hurray/node/{node}/data"
"""The same for nodes and their data planes. None of them is a tenant's."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a tenant or a node may be called; a tenant's name is the first part of its keys."""

MAX_FILE_BYTES: Final = 1 << 20

Stamp = tuple[tuple[int, int, int], ...]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Paths of PEM files."""

    certificate: Path
    """This side's certificate, then the ones between it and the authority."""

    key: Path
    """Its private key, not encrypted."""

    ca: Path
    """Certificates of the authorities that peers' certificates must come from."""


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a certificate says. `identity` is None where it names nobody or several; `why_nobody` then says so."""

    identity: str | None
    why_nobody: str
    not_before: datetime
    not_after: datetime

    def require_identity(self) -> str:
        """Whose it is. Raises Unauthenticated."""
        if self.identity is None:
            raise Unauthenticated(self.why_nobody, field="certificate", required="one SPIFFE URI, or one common name")
        return self.identity


@dataclass(frozen=True, slots=True)
class Pem:
    """Credentials as they were read. The key belongs to the first certificate, which is `identity`'s; `der` is it."""

    certificate: bytes
    der: bytes
    key: bytes
    ca: bytes
    identity: str
    not_before: datetime
    not_after: datetime

    def require_valid(self, section: str) -> None:
        """Raises Misuse for a certificate that every peer would refuse now."""
        now = datetime.now(UTC)
        if not self.not_before <= now <= self.not_after:
            raise Misuse(
                f"{section}.certificate is not valid now",
                field=f"{section}.certificate",
                offered=f"{self.not_before:%Y-%m-%d %H:%M:%S}Z to {self.not_after:%Y-%m-%d %H:%M:%S}Z",
                required=f"{now:%Y-%m-%d %H:%M:%S}Z within it",
            )


class WatchedCredentials(Generic[T]):
    """What `build` makes of credentials, made anew after the files change. Thread-safe.

    Raises Misuse, naming the field, where they cannot be used at the start.
    """

    def __init__(self, credentials: Credentials, build: Callable[[Pem], T], *, section: str = "tls") -> None:
        self._credentials = credentials
        self._build = build
        self._section = section
        self._lock = threading.Lock()
        self._stamp = _stamp(credentials)
        self._failed_stamp: Stamp | None = None
        self._built = build(read_credentials(credentials, section=section))

    def current(self) -> T:
        """For a new connection. Changed files that cannot be used leave what there was in force."""
        with self._lock:
            stamp = _stamp(self._credentials)
            if stamp not in (self._stamp, self._failed_stamp):
                try:
                    self._built = self._build(read_credentials(self._credentials, section=self._section))
                except Misuse as error:
                    self._failed_stamp = stamp
                    _log.error("changed credentials cannot be used, the old ones stay in force", error=str(error))
                else:
                    self._stamp = stamp
                    _log.info("credentials read again", certificate=str(self._credentials.certificate))
            return self._built


def read_credentials(credentials: Credentials, *, section: str = "tls") -> Pem:
    """Read and check the three files. Raises Misuse that names the field below `section`, and the path."""
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    certificate = _read(credentials.certificate, f"{section}.certificate")
    key = _read(credentials.key, f"{section}.key")
    ca = _read(credentials.ca, f"{section}.ca")
    parsed = _certificates(certificate, f"{section}.certificate", credentials.certificate)[0]
    _certificates(ca, f"{section}.ca", credentials.ca)
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:  # TypeError: it needs a password
        raise _unusable(f"{section}.key", credentials.key, str(error), "a PEM private key without a password") from None
    if private.public_key() != parsed.public_key():
        raise _unusable(f"{section}.key", credentials.key, "it is another key", f"the key of {credentials.certificate}")
    try:
        facts = _facts(parsed)
    except ValueError as error:
        raise _unusable(
            f"{section}.certificate", credentials.certificate, str(error), "names that can be read"
        ) from None
    if facts.identity is None:
        raise _unusable(
            f"{section}.certificate",
            credentials.certificate,
            facts.why_nobody,
            "one SPIFFE URI, or one common name",
        )
    return Pem(
        certificate, parsed.public_bytes(Encoding.DER), key, ca, facts.identity, facts.not_before, facts.not_after
    )


def read_certificate(pem: bytes) -> CertificateFacts:
    """What a verified peer's certificate says. Raises Unauthenticated for what is none."""
    from cryptography import x509

    try:
        return _facts(x509.load_pem_x509_certificate(pem))
    except ValueError:
        raise Unauthenticated("the certificate cannot be read", field="certificate") from None


def choose_identity(uris: Sequence[str], common_names: Sequence[str]) -> tuple[str | None, str]:
    """The one identity among a certificate's URIs and common names, or None and why: a SPIFFE URI counts before a
    common name, and several of what counts name nobody."""
    for kind, names in (("SPIFFE URI", [uri for uri in uris if uri.startswith(SPIFFE)]), ("common name", common_names)):
        if len(names) == 1 and names[0]:
            return names[0], ""
        if names:
            return None, f"the certificate has {len(names)} {kind}s; it must have one"
    return None, "the certificate has neither a SPIFFE URI nor a common name"


def _facts(certificate: x509.Certificate) -> CertificateFacts:
    """Raises ValueError for names that cannot be read."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(str(error)) from None
    common_names = [str(item.value) for item in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    identity, why_nobody = choose_identity(uris, common_names)
    return CertificateFacts(identity, why_nobody, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def _certificates(pem: bytes, field: str, path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise _unusable(field, path, str(error), "PEM certificates") from None


def _read(path: Path, field: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unusable(field, path, error.strerror or str(error), "a file that can be read") from None
    if len(data) > MAX_FILE_BYTES:
        raise _unusable(field, path, "it is too long", f"<= {MAX_FILE_BYTES} bytes")
    return data


def _stamp(credentials: Credentials) -> Stamp:
    """Differs once a file differs."""
    found = []
    for path in (credentials.certificate, credentials.key, credentials.ca):
        try:
            entry = path.stat()
            found.append((entry.st_ino, entry.st_size, entry.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _unusable(field: str, path: Path, why: str, required: str) -> HurrayError:
    return Misuse(f"{field} ({path}) cannot be used: {why}", field=field, offered=path, required=required)
