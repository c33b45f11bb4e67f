"""A serving engine of the benchmark, in a process of its own: its pools, and the SDK's client."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

import hurray_client as ht
from hurray_client.bench.baselines import ECHO, ECHO_BYTES
from hurray_client.bench.node import TRANSPORTS, shm_path
from hurray_client.bench.workloads import Tables, Workload, caches, fill, tables
from hurray_client.config import ShmSection
from hurray_wire.checksum import XXH3_64
from hurray_wire.memory import aligned_empty
from hurray_wire.pages import compact, live_slots
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.validate import BlockStructure, check_structure

_STAT = f"/{pb.DESCRIPTOR.services_by_name['TransferService'].full_name}/Stat"
_LEASE_S = 3600.0
_TIMEOUT_S = 120.0
_FREE_S = 5.0
_TIMED_ROUNDS = 5


class Engine:
    """See worker. One memory for the pools of all workloads, one more to receive into; page-aligned, prefaulted."""

    def __init__(self) -> None:
        self._client: ht.Client
        self._snapshots: dict[str, KVSnapshot] = {}
        self._tables: dict[str, Tables] = {}
        self._destinations: dict[str, Tables] = {}
        self._calls: _Calls | None = None

    def open(self, address: str, folder: str, memory_bytes: int, scratch_bytes: int, seed: int) -> dict[str, Any]:
        """Take the memory, connect by every transport that the node has; which they are."""
        self._memory = aligned_empty(memory_bytes, prefault=True)
        self._scratch = aligned_empty(scratch_bytes, prefault=True)
        fill(self._memory, seed)
        config = ht.ClientConfig(shm=ShmSection(path=shm_path(folder)))
        self._client = ht.connect(address, config=config, transports=TRANSPORTS)
        node = self._client.node()
        return {"transports": list(node.transports), "ucx": node.ucx, "version": node.version}

    def close(self) -> None:
        """End the connection."""
        if hasattr(self, "_client"):
            self._client.close()

    # --- puts -------------------------------------------------------------------------------------------------------

    def put(
        self,
        workload: dict[str, Any],
        transport: str,
        checksum: str,
        key: str,
        *,
        at: float = 0.0,
        lease_s: float = 60.0,
    ) -> dict[str, Any]:
        """One put; begun at the time `at` of the monotonic clock, which all processes share."""
        snapshot = self._snapshot(workload)
        time.sleep(max(0.0, at - time.monotonic()))  # not spinning: others may need this core to begin
        began = time.monotonic()
        receipt = self._client.put(
            key,
            snapshot,
            lease_s=lease_s,
            checksum=checksum,  # type: ignore[arg-type]
            require_transport=transport,
            timeout_s=_TIMEOUT_S,
        )
        ended = time.monotonic()
        return {"began": began, "ended": ended, "seconds": ended - began, "wire_bytes": receipt.wire_bytes}

    def put_many(self, workload: dict[str, Any], transport: str, checksum: str, count: int) -> dict[str, Any]:
        """`count` puts, one after the other: their median time. What was put is deleted after each, untimed."""
        times = []
        for number in range(count):
            key = f"bench/tiny/{number}"
            times.append(self.put(workload, transport, checksum, key)["seconds"])
            self._client.delete(key)
        return {"seconds": statistics.median(times)}

    def delete(self, key: str) -> None:
        """Delete what was put, and wait until the node has its memory back, which it gets a little later."""
        until = time.monotonic() + _FREE_S

        def wait(unless: Callable[[Any], bool]) -> None:
            while unless(self._client.node().arena) and time.monotonic() < until:
                time.sleep(1e-3)

        wait(lambda arena: arena.receiving_bytes > 0)  # what was put is told as held a little later
        held = self._client.node().arena.held_bytes
        self._client.delete(key)
        wait(lambda arena: arena.held_bytes >= held)

    # --- gets -------------------------------------------------------------------------------------------------------

    def get(self, key: str, transport: str) -> dict[str, Any]:
        """One get, and the time until every byte of it has been read, too."""
        began = time.monotonic()
        snapshot = self._client.get(key, require_transport=transport, timeout_s=_TIMEOUT_S)
        seconds = time.monotonic() - began
        for tensor in snapshot.tensors:
            XXH3_64(tensor.page_pool.reshape(-1))
        read_seconds = time.monotonic() - began
        receipt = snapshot.receipt
        snapshot.close()
        return {
            "seconds": seconds,
            "read_seconds": read_seconds,
            "wire_bytes": receipt.wire_bytes,
            "mapped_bytes": receipt.mapped_bytes,
        }

    def get_into(self, workload: dict[str, Any], key: str, transport: str) -> dict[str, Any]:
        """One get into pages of this engine's own, which lie in another random order."""
        shape = Workload(**workload)
        if shape.name not in self._destinations:
            self._destinations[shape.name] = tables(shape, variant=1)
        own = self._destinations[shape.name]
        pools = caches(shape, self._scratch)
        began = time.monotonic()
        snapshot = self._client.get(
            key,
            into=pools,
            block_tables=(own.seq_ptr, own.block_table),
            require_transport=transport,
            timeout_s=_TIMEOUT_S,
        )
        return {"seconds": time.monotonic() - began, "wire_bytes": snapshot.receipt.wire_bytes}

    # --- the rest ---------------------------------------------------------------------------------------------------

    def from_paged(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Median time of making a snapshot of pools and tables, which is no part of a put."""
        return {"from_paged_s": _median_s(lambda: self._make(Workload(**workload)))}

    def index(self, workload: dict[str, Any]) -> dict[str, Any]:
        """The same, and median times of validating the index of a workload, of that with liveness, of compaction."""
        structure = self._snapshot(workload).structure
        return {
            "index_from_paged_s": _median_s(lambda: self._make(Workload(**workload))),
            "index_validation_s": _median_s(lambda: check_structure(structure)),
            "index_liveness_s": _median_s(lambda: live_slots(_checked(structure))),
            "index_compaction_s": _median_s(lambda: compact(structure)),
        }

    def begin_stats(self, key: str, rate: float) -> None:
        """Call Stat of a key, `rate` times a second, until `end_calls`."""
        self._calls = _Calls(self._client.target, _STAT, pb.StatRequest(key=key).SerializeToString(), rate)

    def begin_echoes(self, port: int, rate: float) -> None:
        """The same of a server that does nothing."""
        self._calls = _Calls(f"127.0.0.1:{port}", ECHO, ECHO_BYTES, rate)

    def end_calls(self) -> dict[str, Any]:
        """How many calls a second there were."""
        assert self._calls is not None
        return {"rate": self._calls.end()}

    def _snapshot(self, workload: dict[str, Any]) -> KVSnapshot:
        shape = Workload(**workload)
        if shape.name not in self._snapshots:
            self._snapshots[shape.name] = self._make(shape)
        return self._snapshots[shape.name]

    def _make(self, shape: Workload) -> KVSnapshot:
        if shape.name not in self._tables:
            self._tables[shape.name] = tables(shape)
        own = self._tables[shape.name]
        return KVSnapshot.from_paged(
            caches(shape, self._memory),
            block_tables=(own.seq_ptr, own.block_table),
            token_counts=own.token_counts,
        )


def _checked(structure: BlockStructure) -> BlockStructure:
    check_structure(structure)
    return structure


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMED_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class _Calls:
    """Calls at an even rate, from a thread of its own: as cheap as can be, for their cores are the node's, too, where
    those of callers would be elsewhere."""

    def __init__(self, target: str, method: str, request: bytes, rate: float) -> None:
        self._channel = grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)])
        self._call = self._channel.unary_unary(method, None, None)
        self._request = request
        self._rate = rate
        self._ended = threading.Event()
        self._count = 0
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> float:
        """Stop; calls a second."""
        self._ended.set()
        self._thread.join()
        self._channel.close()
        return self._count / (time.monotonic() - self._began)

    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self._began + self._count / self._rate - time.monotonic())):
            self._call(self._request)
            self._count += 1
