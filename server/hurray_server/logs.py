"""Structured logs on standard error, of hurrayd and its mover alike."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level: str, form: str, process: str) -> None:
    """Set up structlog for this process, and the standard library's logging, which libraries use, by the same rules.

    `form`: "json" (one object a line) or "text". `process` is in every line.
    """

    def add_process(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        event["process"] = process
        return event

    common: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if form == "json":
        rendered: list[structlog.types.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendered = [structlog.dev.ConsoleRenderer()]
    number: int = getattr(logging, level.upper())
    structlog.configure(
        processors=[*common, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write for a line with its end: hurrayd and its mover share the standard error, and print makes two.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered]
        )
    )
    # Libraries tell much that is of no use to whoever runs hurrayd.
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.getLogger("hurray").setLevel(number)  # ours speak through it, too
