"""What a mover is started with. It goes as one argument of its command line, and holds no secret: of keys the paths."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hurray_wire.credentials import Credentials
from hurray_wire.limits import Limits
from hurray_wire.transport.shm import ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx_config import UcxConfig


@dataclass(frozen=True, slots=True)
class TransportsConfig:
    """Which transports a mover starts, and how each runs."""

    kinds: tuple[str, ...]
    """Best first."""

    shm: ShmConfig
    tcp: SocketConfig
    ucx: UcxConfig

    tls: SocketConfig | None = None
    credentials: Credentials | None = None
    """Of the transport tls."""

    optional: tuple[str, ...] = ()
    """Those left out where they cannot be had: shm that cannot listen, UCX that is not installed."""

    by_merit: bool = False
    """Move ucx behind the others where it has nothing better than sockets."""

    def lines(self) -> list[str]:
        """What will be started and where, for people."""
        places = {
            "shm": f"at {self.shm.path}",
            "tcp": f"at {self.tcp.listen_host}, port {self.tcp.listen_port or 'any'}",
            "tls": f"at {self.tls.listen_host}, port {self.tls.listen_port or 'any'}" if self.tls else "",
            "ucx": f"on {', '.join(self.ucx.net_devices)}",
        }
        return [
            f"transport {kind} {places[kind]}" + (", if it can be had" if kind in self.optional else "")
            for kind in self.kinds
        ]


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """Everything that a mover can be told."""

    arena_bytes: int
    prefault: bool
    transports: TransportsConfig
    limits: Limits
    log_level: str
    log_format: str
    gpu: int | None = None
    """The GPU that has the arena; None: the host."""

    cpus: str | None = None
    """Those that the data-plane thread is kept to; None: all."""

    def to_json(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self), default=str)  # paths

    @classmethod
    def from_json(cls, text: str) -> MoverConfig:
        """From an argument."""
        values: dict[str, Any] = json.loads(text)
        transports = _with_tuples(values.pop("transports"))
        tls, paths = transports.pop("tls"), transports.pop("credentials")
        return cls(
            transports=TransportsConfig(
                shm=ShmConfig(**transports.pop("shm")),
                tcp=SocketConfig(**transports.pop("tcp")),
                ucx=UcxConfig(**_with_tuples(transports.pop("ucx"))),
                tls=tls and SocketConfig(**tls),
                credentials=paths and Credentials(**{name: Path(path) for name, path in paths.items()}),
                **transports,
            ),
            limits=Limits(**values.pop("limits")),
            **values,
        )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
