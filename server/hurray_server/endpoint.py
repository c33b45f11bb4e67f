"""Plain HTTP for those who watch a node: a few pages, to read only.

One request a connection (RFC 9112), its head bounded in size and time: whoever reaches the address may ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from hurray_wire.errors import InvalidRequest

REQUEST_S: Final = 5.0
"""Longest time for a request to come, and for its answer to be taken."""

HEAD_MAX_BYTES: Final = 8192

CONNECTIONS_MAX: Final = 32
"""At a time; one more is closed at once."""

_BACKLOG: Final = 32

TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = TEXT


class Endpoint:
    """See the module. `pages`: what makes each, by its path."""

    def __init__(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = dict(pages)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> str:
        """Listen; the address, with the port that was taken where `port` is 0. Raises InvalidRequest."""
        try:
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=HEAD_MAX_BYTES, backlog=_BACKLOG, reuse_port=False
            )
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen there: {error.strerror or error}", field="metrics.listen", offered=f"{host}:{port}"
            ) from None
        bound = self._server.sockets[0].getsockname()
        return f"[{host}]:{bound[1]}" if ":" in host else f"{host}:{bound[1]}"

    async def stop(self) -> None:
        """Answer nothing more."""
        if self._server is not None:
            self._server.close()
            for writer in self._connections:
                writer.transport.abort()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._connections.add(writer)
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # nobody that can be answered
        finally:
            self._connections.discard(writer)
            with suppress(ConnectionError):
                writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        make = self._pages.get(path)
        if make is None:
            page = Page(b"not found\n", HTTPStatus.NOT_FOUND)
        elif method not in (b"GET", b"HEAD"):
            page = Page(b"only to be read\n", HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            page = make()
        lines = [
            f"HTTP/1.1 {page.status.value} {page.status.phrase}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "Connection: close",
        ]
        if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
            lines.append("Allow: GET, HEAD")
        answer = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return answer if method == b"HEAD" else answer + page.body
