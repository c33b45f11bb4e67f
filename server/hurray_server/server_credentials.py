"""What the control plane shows its callers, and whose certificates it takes: TLS, both sides with a certificate.

gRPC asks at every handshake, so that changed files serve the next connection; those that are open stay as they are.
"""

from __future__ import annotations

import grpc

from hurray_wire.credentials import Credentials, Pem, WatchedCredentials


class ServerCredentials:
    """Raises Misuse, naming the field, where the credentials cannot be used at the start."""

    def __init__(self, credentials: Credentials) -> None:
        self._watched = WatchedCredentials(credentials, _configuration)
        self._given = self._watched.current()

    def for_grpc(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            self._changed,  # type: ignore[arg-type]  # the stubs miss that it may be None
            require_client_authentication=True,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by a thread of gRPC's before each handshake. None: nothing has."""
        current = self._watched.current()
        if current is self._given:
            return None
        self._given = current
        return current


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], root_certificates=pem.ca)
