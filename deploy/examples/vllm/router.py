"""A router that has prompts computed by one engine and answered by another.

All there is to it: the prefill engine gets the request with `do_remote_decode` and one token to make; what it answers
as `kv_transfer_params` goes, unread, with the same request to the decode engine. If the first step fails, the second
engine does it all.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 120.0


class Router(ThreadingHTTPServer):
    """Listens on a free port of loopback. `prefill` and `decode` are base URLs of engines."""

    daemon_threads = True

    def __init__(self, prefill: str, decode: str) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.prefill = prefill
        self.decode = decode
        self.handed: list[dict[str, Any] | None] = []
        """What the prefill engine gave for each request; None where it did not answer."""

    @property
    def url(self) -> str:
        """Where requests go instead of to an engine."""
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The decode engine's answer. Raises urllib.error.HTTPError where that refuses."""
        first = one_token({**body, "stream": False, "kv_transfer_params": {"do_remote_decode": True}})
        try:
            params = ask(self.prefill + path, first).get("kv_transfer_params")
        except (OSError, ValueError):
            params = None
        self.handed.append(params)
        return ask(self.decode + path, {**body, "kv_transfer_params": params} if params else body)


class _Request(BaseHTTPRequestHandler):
    server: Router

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        try:
            answer, status = self.server.answer(self.path, json.loads(self.rfile.read(size))), 200
        except urllib.error.HTTPError as error:
            answer, status = {"error": error.reason}, error.code
        except (OSError, ValueError) as error:
            answer, status = {"error": str(error)}, 502
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def one_token(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for one token: all that the prefill engine shall make."""
    if isinstance(body.get("sampling_params"), dict):
        return {**body, "sampling_params": {**body["sampling_params"], "max_tokens": 1}}
    return {**body, "max_tokens": 1}


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST JSON, get JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@contextmanager
def running_router(prefill: str, decode: str) -> Iterator[Router]:
    """A router in a thread."""
    with Router(prefill, decode) as router:
        threading.Thread(target=router.serve_forever, daemon=True).start()
        try:
            yield router
        finally:
            router.shutdown()
