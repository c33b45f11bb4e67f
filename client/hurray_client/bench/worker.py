"""`python -m hurray_client.bench.worker KIND FD`: a process that does what it is told on the socket FD, until its end.

A request is one line of JSON, {"do": method, argument: value, ...}; so is the answer, with "error" where it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import Any, Final

KINDS: Final = {
    "node": "hurray_client.bench.node:Node",
    "engine": "hurray_client.bench.engine:Engine",
    "baseline": "hurray_client.bench.baselines:Baseline",
    "nixl": "hurray_client.bench.peers:Nixl",
    "nixl_polled": "hurray_client.bench.peers:NixlPolled",
    "nixl_gpu": "hurray_client.bench.gpu:NixlGpu",
    "gpu_engine": "hurray_client.bench.gpu:GpuEngine",
    "mooncake": "hurray_client.bench.peers:Mooncake",
}
"""What a worker can be; imported only in the worker that is it."""


def main() -> None:
    """Entry point."""
    kind, descriptor = sys.argv[1], int(sys.argv[2])
    module, name = KINDS[kind].split(":")
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        actor: Any = None
        for line in stream:
            request: dict[str, Any] = json.loads(line)
            try:
                if actor is None:
                    actor = getattr(importlib.import_module(module), name)()
                answer = getattr(actor, request.pop("do"))(**request) or {}
            except Exception as error:  # whatever it is, it is told
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
        if actor is not None:
            actor.close()
    sys.stdout.flush()
    os._exit(0)  # threads of peers' libraries would keep the process


if __name__ == "__main__":
    main()
