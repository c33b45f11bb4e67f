"""What was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hurray_wire.errors import HurrayError


class Status(Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, and as it may be."""
    WARNING = "warning"
    """It works, but not as well as it could."""
    FAILED = "failed"
    """Something that was asked for cannot work like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one check. `what` names the cause, `remedy` what to do about it; `facts` are for programs."""

    check: str
    status: Status
    what: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "check": self.check,
            "status": self.status.value,
            "what": self.what,
            "remedy": self.remedy,
            "facts": self.facts,
        }


def failed_by(check: str, error: HurrayError, remedy: str = "") -> Finding:
    """An error is what was found."""
    shown = ", ".join(f"{name} {value}" for name, value in error.details.items() if name in ("field", "stage"))
    what = error.message + (f" ({shown})" if shown else "")
    return Finding(check, Status.FAILED, what, remedy, {"reason": error.reason, **error.details})
