"""Who did what, or was refused and why: one line per call, under the logger `hurray.audit`.

Written when the call is over, for a session when it is open. One JSON object a line, to a file of its own where the
configuration names one, else to standard error among the other lines; at every level of the log. It holds names,
numbers and reasons: no token, no key, no byte of a cache.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hurray_server.principal import Principal
from hurray_wire.errors import HurrayError, InvalidRequest
from hurray_wire.status import cut_text

LOGGER: Final = "hurray.audit"

_REFUSED: Final = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"})
"""Codes of what a caller may not do. All other failures are of something that it may."""

_DETAILS: Final = ("right", "field", "offered", "allowed", "required")
_WHY_MAX_BYTES: Final = 512
_FILE_MODE: Final = 0o640


@dataclass(eq=False, slots=True)
class Decision:
    """One call: who wants what. `facts` are added as they become known."""

    action: str
    address: str
    principal: Principal | None = None
    facts: dict[str, object] = field(default_factory=dict)
    told: bool = False
    begun: bool = False
    """What it asked for was given to it, or had begun: what fails then is no refusal."""

    @property
    def caller(self) -> Principal:
        """Who it is, once that is known."""
        assert self.principal is not None
        return self.principal


class Audit:
    """See the module."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidRequest for a file that cannot be written."""
        handler = logging.StreamHandler(sys.stderr) if path is None else _open(path)
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._logger = logging.getLogger(LOGGER)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.handlers[:] = [handler]

    def record(self, decision: Decision, error: HurrayError | None) -> None:
        """The call was allowed, and ended like this, or it was refused. What was allowed is told once."""
        refused = error is not None and error.code in _REFUSED
        if decision.told and not refused:
            return
        decision.told = True
        line: dict[str, object] = {
            "timestamp": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "logger": LOGGER,
            "event": "refused" if refused else "allowed",
            "action": decision.action,
        }
        if decision.principal is not None:
            line |= {"tenant": decision.principal.tenant, "identity": decision.principal.identity}
        line |= {"address": decision.address, **decision.facts, "outcome": "OK" if error is None else error.reason}
        if error is not None:
            line |= {"why": cut_text(error.message, _WHY_MAX_BYTES)}
            line |= {name: error.details[name] for name in _DETAILS if name in error.details}
        self._logger.info(json.dumps({name: value for name, value in line.items() if value is not None}))


def _open(path: Path) -> logging.Handler:
    """Appends, and opens the file anew after somebody has moved it away."""
    try:
        path.touch(mode=_FILE_MODE, exist_ok=True)
        return logging.handlers.WatchedFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"the audit log cannot be written: {error.strerror}", field="audit.path", offered=path
        ) from None
