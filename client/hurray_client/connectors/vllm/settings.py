"""What an engine's configuration tells the connector: `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hurray_wire.errors import InvalidRequest


class ConnectorSettings(BaseModel):
    """How the client reaches nodes (transports, certificates) is said by the HURRAY_ environment variables."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: dict[str, str] = Field(min_length=1)
    """Name and address ("host:port") of each node that may be dialled. Handles name nodes; nobody else is dialled."""

    node: str | None = None
    """The node that this engine puts to. Needed where it produces."""

    lease_s: float = Field(default=60.0, gt=0)
    """How long a node keeps what a decode engine has not taken."""

    put_timeout_s: float = Field(default=10.0, gt=0)
    """For one put. A step of the engine waits for the puts of the prompts that it has finished."""

    load_timeout_s: float = Field(default=30.0, gt=0)
    """For one load. The engine does other work meanwhile."""

    layerwise: bool = False
    """Send each layer while the next is computed, instead of all at the end of the step."""

    key_prefix: str = ""
    """What keys begin with, for example "prefill/handoff/". Without it they are the caller's own."""

    revision: str | None = None
    """What tells these weights from others. None: vLLM's revision, or a digest of the files."""


def read_settings(extra_config: Mapping[str, Any], *, produces: bool) -> ConnectorSettings:
    """The settings of one engine. Raises InvalidRequest naming every wrong one."""
    try:
        settings = ConnectorSettings.model_validate(dict(extra_config))
    except ValidationError as error:
        wrong = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
        raise InvalidRequest(
            "kv_connector_extra_config: " + "; ".join(f"{name}: {text}" for name, text in wrong), field=wrong[0][0]
        ) from None
    if produces and settings.node not in settings.nodes:
        raise InvalidRequest(
            "kv_connector_extra_config: node is where this engine puts to",
            field="node",
            offered=settings.node,
            required=" or ".join(settings.nodes),
        )
    return settings
