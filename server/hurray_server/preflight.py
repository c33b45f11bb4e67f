"""What a configuration asks of this host: files that are there and fit. Before hurrayd starts, and with --check."""

from __future__ import annotations

import os
from pathlib import Path

from hurray_server.config import Config
from hurray_wire.credentials import read_credentials
from hurray_wire.errors import InvalidRequest, Misuse


def preflight(config: Config) -> None:
    """Raises InvalidRequest that names the key."""
    try:
        if config.tls is not None:
            read_credentials(config.tls.credentials, section="tls").require_valid("tls")
            read_credentials(config.tls.data_credentials, section="tls.data").require_valid("tls.data")
    except Misuse as error:
        raise InvalidRequest(error.message, field=error.field) from None
    if config.audit.path is not None:
        _check_writable(config.audit.path)


def _check_writable(path: Path) -> None:
    there = path if path.exists() else path.parent
    if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        raise InvalidRequest(f"audit.path: {path} cannot be written", field="audit.path", offered=path)
