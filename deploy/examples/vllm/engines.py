"""Engines as an operator starts them: `vllm serve`, each in a process of its own, ended with all its children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 300.0
STOP_S = 20.0
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def connector(role: str, address: str) -> dict[str, Any]:
    """The kv_transfer_config of an engine that hands caches over by the node at `address`."""
    extra: dict[str, Any] = {"nodes": {"store": address}}
    if role != "kv_consumer":
        extra["node"] = "store"
    return {
        "kv_connector": "HurrayConnector",
        "kv_connector_module_path": "hurray_client.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


@contextmanager
def serving(
    folder: Path, model: Path, roles: Mapping[str, dict[str, Any] | None], env: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """An engine for each name, with that kv_transfer_config; their base URLs, once all are up. Logs are in `folder`.

    Raises RuntimeError with the log of one that does not start.
    """
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(_engine(name, folder, model, config, env)) for name, config in roles.items()
        }
        yield {name: wait() for name, wait in started.items()}


@contextmanager
def _engine(
    name: str, folder: Path, model: Path, config: dict[str, Any] | None, env: Mapping[str, str]
) -> Iterator[Any]:
    port = _free_port()
    # What `vllm serve` runs. The command itself asks for the version of a package called vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--tokens-only", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--dtype", "float32"]
    command += ["--max-model-len", "2048", "--block-size", "32", "--served-model-name", "tiny"]
    if config is not None:
        command += ["--kv-transfer-config", json.dumps(config)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HURRAY_")}
    log = folder / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**kept, **SETTINGS, **env},
            process_group=0,
        )

    def wait() -> str:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
            time.sleep(0.2)
        raise RuntimeError(f"{name} does not start:\n{log.read_text(errors='replace')[-4000:]}")

    with process:
        try:
            yield wait
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
