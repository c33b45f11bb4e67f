"""Other transfer engines on the same work: the pages of a workload from one process to another, in the same order.

NIXL and Mooncake write each page from where it lies to its place in the target's memory. Memory is registered, and
NIXL's lists of all pages are prepared, before; what a single transfer needs is timed. It is over when the target has
been told of its end and has said so.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hurray_client.bench.processes import BenchError
from hurray_client.bench.workloads import Workload, fill, page_order
from hurray_wire.checksum import XXH3_64
from hurray_wire.memory import aligned_empty
from hurray_wire.transport.ucx_config import UcxConfig

_TIMEOUT_S: Final = 120.0
_MOONCAKE_BATCH: Final = 64
"""Pages in one call: more than about that are refused over tcp."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer as it is run: worker kind, module that must be there, environment."""

    name: str
    kind: str
    module: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether its module is there; not whether it can be loaded."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False


def peer_kinds() -> tuple[PeerKind, ...]:
    """All peers: NIXL as it comes, with UCX on tcp only, and that with our segment sizes; the first two also without
    NIXL's progress thread, which costs a small machine a core on each side; Mooncake over tcp."""
    config = UcxConfig()
    tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    sizes = {
        "UCX_TCP_TX_SEG_SIZE": str(config.tcp_tx_seg_size_bytes),
        "UCX_TCP_RX_SEG_SIZE": str(config.tcp_rx_seg_size_bytes),
    }
    quiet = {"NIXL_LOG_LEVEL": "ERROR", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    return (
        PeerKind("nixl", "nixl", "nixl_cu12", quiet),
        PeerKind("nixl_polled", "nixl_polled", "nixl_cu12", quiet),
        PeerKind("nixl_tcp", "nixl", "nixl_cu12", quiet | tcp),
        PeerKind("nixl_tcp_polled", "nixl_polled", "nixl_cu12", quiet | tcp),
        PeerKind("nixl_tcp_segments", "nixl", "nixl_cu12", quiet | tcp | sizes),
        PeerKind("mooncake", "mooncake", "mooncake.engine", {"MC_LOG_LEVEL": "ERROR", "MC_FORCE_TCP": "1"}),
    )


class Peer(ABC):
    """See worker. One object at the source, one at the target; what they exchange is JSON."""

    _device = 0

    def open(self, workload: dict[str, Any], role: str) -> dict[str, Any]:
        """Take and register the memory; what the other side must know of this one."""
        self._workload = Workload(**workload)
        self._memory = aligned_empty(self._workload.nbytes, prefault=True)
        if role == "source":
            fill(self._memory)
        self._order = page_order(self._workload)
        self._role = role
        return self._register()

    def connect(self, other: dict[str, Any]) -> None:
        """Get ready to send to the other side, as it told of itself."""
        self._connect(other)

    def close(self) -> None:  # noqa: B027 -- nothing to do
        """Nothing that the end of the process does not do."""

    def send(self) -> dict[str, Any]:
        """Move all pages; when that began, on the clock that all processes share."""
        began = time.monotonic()
        self._send()
        return {"began": began, "ended": time.monotonic()}

    def await_end(self) -> dict[str, Any]:
        """At the target: wait until all pages are there; when that was."""
        self._await_end()
        return {"ended": time.monotonic()}

    def digest(self) -> dict[str, Any]:
        """A hash of what should arrive, or of what did."""
        data = self._memory
        if self._role == "source":
            data = np.take(data.reshape(-1, self._workload.page_bytes), self._order, axis=0, mode="clip").reshape(-1)
        return {"digest": f"{XXH3_64(data):016x}"}

    @property
    def _address(self) -> int:
        return int(self._memory.ctypes.data)

    def _pages(self, address: int) -> list[tuple[int, int, int]]:
        """(address, size, device) of each page."""
        size = self._workload.page_bytes
        return [(address + number * size, size, self._device) for number in range(self._memory.nbytes // size)]

    @abstractmethod
    def _register(self) -> dict[str, Any]: ...

    @abstractmethod
    def _connect(self, other: dict[str, Any]) -> None: ...

    @abstractmethod
    def _send(self) -> None: ...

    @abstractmethod
    def _await_end(self) -> None: ...


class Nixl(Peer):
    """NIXL with its UCX backend; the target learns of the end by NIXL's own notification."""

    progress_thread = True
    segment = "DRAM"
    """What NIXL calls the kind of memory."""

    def _register(self) -> dict[str, Any]:
        api = importlib.import_module(f"{self._module()}._api")
        self._agent = api.nixl_agent(self._role, self._config(api))
        self._agent.register_memory([(self._address, self._memory.nbytes, self._device, "")], self.segment)
        return {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": self._address,
        }

    def _connect(self, other: dict[str, Any]) -> None:
        name = self._agent.add_remote_agent(base64.b64decode(other["metadata"]))
        name = name.decode() if isinstance(name, bytes) else name
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._pages(self._address), self.segment)
        self._remote = self._agent.prep_xfer_dlist(name, self._pages(other["address"]), self.segment)

    def _send(self) -> None:
        sources = self._order.astype(np.int32)
        targets = np.arange(sources.size, dtype=np.int32)
        transfer = self._agent.make_prepped_xfer("WRITE", self._local, sources, self._remote, targets, b"done")
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise BenchError(f"NIXL ended the transfer with {state}")

    def _await_end(self) -> None:
        until = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until:
            if any(b"done" in messages for messages in self._agent.get_new_notifs().values()):
                return
            time.sleep(50e-6)  # its own thread makes the progress, or the source's: leave it the core
        raise BenchError("NIXL's notification did not come in time")

    def _module(self) -> str:
        return "nixl_cu12"

    def _config(self, api: Any) -> Any:
        return api.nixl_agent_config(enable_prog_thread=self.progress_thread, backends=["UCX"])


class NixlPolled(Nixl):
    """The same without a thread of its own: progress is made where it is asked how far it is."""

    progress_thread = False


class Mooncake(Peer):
    """Mooncake's transfer engine over tcp. A synchronous write has been acknowledged by the target's engine."""

    def _register(self) -> dict[str, Any]:
        try:
            engine = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise BenchError(f"{error}; Mooncake needs the system's libibverbs (Debian: libibverbs1)") from None
        self._engine = engine.TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise BenchError("Mooncake did not start")
        if self._engine.register_memory(self._address, self._memory.nbytes):
            raise BenchError("Mooncake did not register the memory")
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._address}

    def _connect(self, other: dict[str, Any]) -> None:
        self._session = other["session"]
        size = self._workload.page_bytes
        self._sources = (self._address + self._order * size).tolist()
        self._targets = [other["address"] + number * size for number in range(self._order.size)]

    def _send(self) -> None:
        size = self._workload.page_bytes
        for start in range(0, len(self._sources), _MOONCAKE_BATCH):
            part = slice(start, start + _MOONCAKE_BATCH)
            sources, targets = self._sources[part], self._targets[part]
            if self._engine.batch_transfer_sync_write(self._session, sources, targets, [size] * len(sources)):
                raise BenchError(f"Mooncake refused the batch at page {start}")

    def _await_end(self) -> None:
        """Nothing: each write was acknowledged."""
