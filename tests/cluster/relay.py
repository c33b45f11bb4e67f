"""Forwards connections to a host, ports unchanged, and lets every byte be `delay_s` on its way, in each direction: a
long line, not a narrow one.

`python3 relay.py HOST DELAY_S PORT...`
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

READ_BYTES = 1 << 18
IN_FLIGHT = 256
"""Pieces of one direction under way: then the sender waits."""


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)

    async def send() -> None:
        while True:
            due_s, data = await line.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    sender = asyncio.create_task(send())
    try:
        while True:
            data = await reader.read(READ_BYTES)
            await line.put((loop.time() + delay_s, data))
            if not data:
                break
        await sender
    except OSError:
        sender.cancel()


async def serve(host: str, delay_s: float, ports: list[int]) -> None:
    async def connect(port: int, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        try:
            far, to_far = await asyncio.open_connection(host, port)
        except OSError:
            to_near.transport.abort()
            return
        await asyncio.gather(forward(near, to_far, delay_s), forward(far, to_near, delay_s), return_exceptions=True)
        for writer in (to_near, to_far):
            writer.transport.abort()

    servers = [await asyncio.start_server(partial(connect, port), "0.0.0.0", port) for port in ports]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2]), list(map(int, sys.argv[3:]))))
