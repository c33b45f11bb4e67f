"""Where the clients of tests listen."""

from __future__ import annotations

from support.daemon import UCX_PORTS

WIDE_PORTS = {"HURRAY_UCX__FIRST_PORT": str(UCX_PORTS[0]), "HURRAY_UCX__LAST_PORT": str(UCX_PORTS[1])}
"""Tests have many workers, and the default range has twenty ports."""
