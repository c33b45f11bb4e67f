"""What a configuration asks of this host: files that are there and fit. Before hurrayd starts, and with --check."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hurray_server.config import Config, split_address
from hurray_server.firewall import check_firewall
from hurray_wire.credentials import Credentials, read_credentials
from hurray_wire.errors import HurrayError, InvalidRequest, Misuse


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


def checked(config: Config | None, error: HurrayError | None) -> dict[str, Any]:
    """What a configuration comes to, and what is wrong with it, as JSON values: for who looks at a host before hurrayd
    starts there. `config`: None where it cannot even be read."""
    found: dict[str, Any] = {"error": None if error is None else {"message": error.message, **error.details}}
    if config is None:
        return found
    transports, watched, tls = config.transports_config, config.metrics_listen, config.tls
    sockets = {"listen": split_address(config.listen)}
    for kind, place in (("tcp", transports.tcp), ("tls", transports.tls)):
        if kind in transports.kinds and place is not None and place.listen_host is not None:
            sockets[kind] = (place.listen_host, place.listen_port)
    if watched is not None:
        sockets["metrics"] = watched
    credentials = {} if tls is None else {"tls": tls.credentials, "tls.data": tls.data_credentials}
    return found | {
        "advertise": config.advertise,
        "sockets": sockets,
        "credentials": {
            section: {"certificate": str(files.certificate), "key": str(files.key), "ca": str(files.ca)}
            for section, files in credentials.items()
        },
        "kinds": transports.kinds,
        "required": [kind for kind in transports.kinds if kind not in transports.optional],
        "left_out": config.left_out,
        "ucx": asdict(transports.ucx),
    }


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
