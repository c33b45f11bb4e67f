"""Loggers of library code: they speak through the standard library's logging, where whoever embeds it decides.

structlog itself is configured by programs, not by libraries; unconfigured it would print to the standard output of an
engine that never asked for it.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """A structlog logger whose fields become part of the message: `_log.warning("peer lost", peer="5ee8")`."""
    return structlog.wrap_logger(
        logging.getLogger(name), processors=[_render], wrapper_class=structlog.stdlib.BoundLogger
    )


def _render(_logger: object, _method: str, event: structlog.types.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    text, exc_info = event.pop("event"), event.pop("exc_info", None)
    fields = ", ".join(f"{name}={value}" for name, value in event.items())
    return (f"{text} ({fields})" if fields else str(text),), {"exc_info": exc_info}
