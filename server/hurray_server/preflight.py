"""What a configuration asks of this host: files that are there and fit. Before hurrayd starts, and with --check."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hurray_server.config import Config
from hurray_server.firewall import check_firewall
from hurray_wire.credentials import Credentials, read_credentials
from hurray_wire.errors import InvalidRequest, Misuse


def preflight(config: Config) -> None:
    """Raises InvalidRequest that names the key."""
    if config.tls is not None:
        for credentials, section in ((config.tls.credentials, "tls"), (config.tls.data_credentials, "tls.data")):
            _named(partial(_check_files, credentials, section))
    if "ucx" in config.transports_config.kinds:
        _named(config.ucx.check_trusted)
    if config.has_firewall:
        check_firewall(config.ucx.net_devices)
    if config.audit.path is not None:
        _check_writable(config.audit.path)


def _check_files(credentials: Credentials, section: str) -> None:
    read_credentials(credentials, section=section).require_valid(section)


def _named(check: Callable[[], None]) -> None:
    try:
        check()
    except Misuse as error:
        raise InvalidRequest(error.message, field=error.field) from None


def _check_writable(path: Path) -> None:
    there = path if path.exists() else path.parent
    if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        raise InvalidRequest(f"audit.path: {path} cannot be written", field="audit.path", offered=path)
