"""vLLM hands its KV cache over: `kv_connector_module_path` "hurray_client.connectors.vllm", `kv_connector`
"HurrayConnector". docs/vllm.md says how to run it.

Importing this does not import vLLM: that happens when HurrayConnector is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "HurrayConnector":
        from hurray_client.connectors.vllm.connector import HurrayConnector

        return HurrayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
