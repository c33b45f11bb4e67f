"""What a mover is started with. It goes as one argument of its command line, and holds no secret."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hurray_wire.limits import Limits
from hurray_wire.transport.ucx import UcxConfig


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """Everything that a mover can be told."""

    arena_bytes: int
    prefault: bool
    ucx: UcxConfig
    limits: Limits
    log_level: str
    log_format: str

    def to_json(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MoverConfig:
        """From an argument."""
        values: dict[str, Any] = json.loads(text)
        ucx: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.pop("ucx").items()
        }
        return cls(ucx=UcxConfig(**ucx), limits=Limits(**values.pop("limits")), **values)
