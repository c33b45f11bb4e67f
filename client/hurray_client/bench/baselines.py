"""What the machine itself can do: memcpy, gather, a plain socket, a gRPC echo, pyhurray's StreamWriter, ucx_perftest.

Each moves the pages of one workload, from a process that has them to another, and has moved them when the other has
all of them and has said so. `Baseline` is what both processes are.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import re
import shutil
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, Final

import grpc
import numpy as np

from hurray_client.bench.processes import BenchError
from hurray_client.bench.workloads import Workload, caches, fill, page_order, tables
from hurray_wire.checksum import XXH3_64
from hurray_wire.memory import aligned_empty
from hurray_wire.transport.ucx_config import UcxConfig

ECHO: Final = "/bench.Echo/Echo"
ECHO_BYTES: Final = bytes(64)
_ACK: Final = b"+"
_PERFTEST_S: Final = 60.0
_PERFTEST_MESSAGE_BYTES: Final = 4 << 20


class Baseline:
    """See worker. A source has the pages of a workload, a target as much memory; both page-aligned and prefaulted."""

    def __init__(self) -> None:
        self._echo: Callable[[bytes], bytes]
        self._channel: grpc.Channel | None = None
        self._socket: socket.socket
        self._stream: socket.socket
        self._writer: Any = None

    def open(self, workload: dict[str, Any], role: str) -> None:
        """Take the memory; a source takes as much again to copy to."""
        self._workload = Workload(**workload)
        self._memory = aligned_empty(self._workload.nbytes, prefault=True)
        if role == "source":
            fill(self._memory)
            self._scratch = aligned_empty(self._workload.nbytes, prefault=True)
        self._order = page_order(self._workload)

    def close(self) -> None:
        """Nothing that the end of the process does not do."""

    # --- in one process ---------------------------------------------------------------------------------------------

    def memcpy(self) -> dict[str, Any]:
        """All bytes in one copy by one thread."""
        began = time.monotonic()
        np.copyto(self._scratch, self._memory)
        return {"seconds": time.monotonic() - began}

    def gather(self) -> dict[str, Any]:
        """All pages in the workload's order, by one thread."""
        page_bytes = self._workload.page_bytes
        pool, out = self._memory.reshape(-1, page_bytes), self._scratch.reshape(-1, page_bytes)
        began = time.monotonic()
        np.take(pool, self._order, axis=0, out=out, mode="clip")
        return {"seconds": time.monotonic() - began}

    # --- a plain socket ---------------------------------------------------------------------------------------------

    def socket_serve(self) -> dict[str, Any]:
        """As a target: take whole workloads from one connection, and acknowledge each."""
        return {"port": _listen(self._socket_take)}

    def _socket_take(self, connection: socket.socket) -> None:
        while True:
            view = memoryview(self._memory)  # type: ignore[arg-type]
            while view:
                count = connection.recv_into(view)
                if not count:
                    return
                view = view[count:]
            connection.sendall(_ACK)

    def socket_connect(self, port: int) -> None:
        """As a source."""
        self._socket = _connect(port)

    def socket_send(self) -> dict[str, Any]:
        """As a source: all bytes as they lie, in one call, until the target has them."""
        began = time.monotonic()
        self._socket.sendall(memoryview(self._memory))  # type: ignore[arg-type]
        _await_ack(self._socket)
        return {"seconds": time.monotonic() - began}

    def digest(self) -> dict[str, Any]:
        """A hash of what was sent, or of what came in, to see that they are the same."""
        return {"digest": f"{XXH3_64(self._memory):016x}"}

    # --- gRPC -------------------------------------------------------------------------------------------------------

    def echo_serve(self) -> dict[str, Any]:
        """As a target: a grpc.aio server of one unary method, on an event loop of its own."""
        ports: list[int] = []
        up = threading.Event()

        async def serve() -> None:
            async def echo(request: bytes, _: object) -> bytes:
                return request

            server = grpc.aio.server()
            handler = grpc.method_handlers_generic_handler(
                "bench.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
            )
            server.add_generic_rpc_handlers((handler,))
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            up.set()
            await server.wait_for_termination()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        if not up.wait(10.0):
            raise BenchError("the echo server did not start")
        return {"port": ports[0]}

    def echo_connect(self, port: int) -> None:
        """As a source."""
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)])
        self._echo = self._channel.unary_unary(ECHO, None, None)

    def echo_many(self, count: int) -> dict[str, Any]:
        """Median time of `count` calls, one after the other."""
        times = []
        for _ in range(count):
            began = time.monotonic()
            self._echo(ECHO_BYTES)
            times.append(time.monotonic() - began)
        return {"seconds": statistics.median(times)}

    # --- pyhurray ---------------------------------------------------------------------------------------------------

    def stream_serve(self) -> dict[str, Any]:
        """As a target: read tensors with pyhurray's StreamReader, acknowledge each whole workload."""
        return {"port": _listen(self._stream_take)}

    def _stream_take(self, connection: socket.socket) -> None:
        reader = iter(_pyhurray().StreamReader(connection))
        while True:
            for _ in range(self._workload.tensor_count):
                if next(reader, None) is None:
                    return
            connection.sendall(_ACK)

    def stream_connect(self, port: int) -> None:
        """As a source."""
        hurray = _pyhurray()
        self._stream = _connect(port)
        self._writer = hurray.StreamWriter(self._stream)

    def stream_send(self) -> dict[str, Any]:
        """As a source: gather the pages of each pool, write them as a tensor, until the target has all."""
        hurray = _pyhurray()
        table = tables(self._workload).block_table
        pools, gathered = (caches(self._workload, memory) for memory in (self._memory, self._scratch))
        began = time.monotonic()
        for pool, out in zip(pools.values(), gathered.values(), strict=True):
            self._writer.write(hurray.from_numpy(np.take(pool, table, axis=0, out=out, mode="clip")))
        _await_ack(self._stream)
        return {"seconds": time.monotonic() - began}

    # --- UCX --------------------------------------------------------------------------------------------------------

    def perftest(self, nbytes: int) -> dict[str, Any]:
        """Both sides of `ucx_perftest`, processes of their own."""
        return {"seconds": perftest(nbytes)}


def perftest(nbytes: int) -> float:
    """Seconds that `ucx_perftest` needs for so many bytes over tcp with the segment sizes that we use, in messages of
    4 MiB, by its own account. Raises BenchError where it cannot be run."""
    binary, env = _find_perftest()
    config = UcxConfig()
    env |= {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "UCX_TCP_TX_SEG_SIZE": str(config.tcp_tx_seg_size_bytes),
        "UCX_TCP_RX_SEG_SIZE": str(config.tcp_rx_seg_size_bytes),
        "UCX_RNDV_THRESH": str(config.rndv_thresh_bytes),
        "UCX_LOG_LEVEL": "error",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    size = min(nbytes, _PERFTEST_MESSAGE_BYTES)
    port = _free_port()
    test = ["-t", "tag_bw", "-s", str(size), "-n", str(max(1, nbytes // size)), "-w", "4", "-p", str(port)]
    with subprocess.Popen([binary, *test], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, env=env) as server:  # noqa: S603
        try:
            _await_listener(port)
            client = subprocess.run(  # noqa: S603
                [binary, "127.0.0.1", *test],
                stdin=DEVNULL,
                capture_output=True,
                env=env,
                timeout=_PERFTEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BenchError("ucx_perftest did not end in time") from None
        finally:
            server.kill()
    final = [line for line in client.stdout.decode().splitlines() if line.startswith("Final:")]
    if client.returncode or not final:
        raise BenchError(f"ucx_perftest failed: {client.stderr.decode().strip()[-200:]}")
    # Final: messages, latency (50 %, average, overall), bandwidth in MiB/s (average, overall), message rate (both).
    mib_per_second = float(final[-1].split()[6])
    return nbytes / (mib_per_second * (1 << 20))


def _find_perftest() -> tuple[str, dict[str, str]]:
    """The program and the environment it needs: the one of the UCX wheel, which is the UCX that ucxx loads."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    wheel = importlib.util.find_spec("libucx")
    for folder in wheel.submodule_search_locations or () if wheel is not None else ():
        binary = Path(folder, "bin", "ucx_perftest")
        if os.access(binary, os.X_OK):
            return str(binary), env | {"LD_LIBRARY_PATH": str(Path(folder, "lib"))}
    found = shutil.which("ucx_perftest")
    if found is None:
        raise BenchError("no ucx_perftest is installed")
    return found, env


def _await_listener(port: int) -> None:
    """Until something listens at the port of this host. Nothing connects: ucx_perftest serves one connection only."""
    until = time.monotonic() + 10.0
    wanted = re.compile(rf":{port:04X} 0+:0000 0A ", re.IGNORECASE)
    while time.monotonic() < until:
        if any(wanted.search(Path(path).read_text()) for path in ("/proc/net/tcp", "/proc/net/tcp6")):
            return
        time.sleep(0.005)
    raise BenchError("ucx_perftest did not listen in time")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listen(serve: Callable[[socket.socket], None]) -> int:
    """Take one connection in a thread; the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with server:
            connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve(connection)

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _await_ack(connection: socket.socket) -> None:
    if connection.recv(1) != _ACK:
        raise BenchError("the target went away")


def _pyhurray() -> Any:
    try:
        return importlib.import_module("hurray")
    except ImportError:
        raise BenchError("pyhurray is not installed (extra files)") from None
