"""The benchmark on one GPU: kernels and transfers between two processes, as ratios of a copy on the device.

Everything is a ratio of `device_copy`, in bytes read plus bytes written a second, within the same round.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import hurray_client as ht
from hurray_client.bench.peers import Nixl
from hurray_client.bench.processes import BenchError, Worker
from hurray_client.bench.runner import Progress
from hurray_client.bench.workloads import MIB, Workload, page_order
from hurray_wire import cuda, kernels
from hurray_wire.checksum import MIX64
from hurray_wire.descriptor import build_descriptor
from hurray_wire.dtypes import BY_NAME
from hurray_wire.memory import on_device_of
from hurray_wire.pages import gather, scatter, scrub
from hurray_wire.snapshot import KVSnapshot

PAGE: Final = (16, 8, 128)
"""page_size, num_heads, head_dim of float16: 32 KiB."""

_PAGE_BYTES: Final = 16 * 8 * 128 * 2
_LAYERS: Final = 32
_SEQ_PAGES: Final = 128
_DEAD_PART: Final = 0.03
_INDEX_ENTRIES: Final = 1_500_000
_TIMEOUT_S: Final = 60.0

_DEVICE: Final = "HURRAYBENCH_DEVICE"
"""Environment of workers: their GPU."""

GOALS: Final = {
    "gather": 0.8,
    "scatter": 0.8,
    "put": 0.1,
}
"""Least ratio to the device copy."""

SCRUB_MOST: Final = 0.1
"""Most time for scrubbing a pool of which 3 % is dead, in that of copying it."""

INDEX_MOST_MS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Scale:
    """How large and how often. `kernel_bytes`: the pool that kernels work on; `put_bytes`: the snapshot that is put."""

    kernel_bytes: int = 4096 * MIB
    put_bytes: int = 4096 * MIB
    rounds: int = 9


QUICK: Final = Scale(kernel_bytes=512 * MIB, put_bytes=1024 * MIB, rounds=5)


def run(scale: Scale, device: str, progress: Progress, *, peers: bool = True) -> dict[str, Any]:
    """Run all of it; what fails is left out, and named with the reason. Raises Unsupported, with the reason, where
    there is no such GPU."""
    number = cuda.read_device(device)
    assert number is not None
    place = cuda.gpu(number)
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    facts: dict[str, Any] = {}
    progress.step("preparing pools")
    bench = Kernels(place, scale.kernel_bytes)
    cases: dict[str, Callable[[], float]] = dict(bench.cases)
    with ExitStack() as stack:
        env = {"HURRAY_ARENA__DEVICE": device, "HURRAY_UCX__TLS": "tcp,cuda", _DEVICE: device}
        try:
            cases |= _puts(stack, env, scale, facts, progress)
        except BenchError as error:
            failed["put"] = str(error)
        if peers:
            try:
                cases["nixl"] = _nixl(stack, env, scale.put_bytes)
            except BenchError as error:
                skipped["nixl"] = str(error)
        samples = _rounds(cases, scale.rounds, failed, progress)
    return _found(bench, scale, samples, facts=facts, skipped=skipped, failed=failed)


def _puts(
    stack: ExitStack, env: dict[str, str], scale: Scale, facts: dict[str, Any], progress: Progress
) -> dict[str, Callable[[], float]]:
    """Puts of one process to a node of another; `facts` gets their receipts."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hurray-bench-"))
    progress.step("starting hurrayd")
    # The arena holds one snapshot, and what of the last one is still being given back.
    arena_bytes = 2 * scale.put_bytes + 256 * MIB
    node = stack.enter_context(Worker("node", env)).ask("start", folder=folder, arena_bytes=arena_bytes)
    engine = stack.enter_context(Worker("gpu_engine", env))
    engine.ask("open", address=node["address"], folder=folder, nbytes=scale.put_bytes)

    def put(checksum: str) -> float:
        done = engine.ask("put", checksum=checksum)
        facts[f"put_{checksum}"] = done["receipt"]
        return float(done["seconds"])

    return {"put": lambda: put("mix64"), "put_unchecked": lambda: put("none")}


def _rounds(
    cases: dict[str, Callable[[], float]], rounds: int, failed: dict[str, str], progress: Progress
) -> dict[str, list[float]]:
    """Seconds of each case in each round. The first round is left out: it compiles kernels, opens handles, takes
    staging memory. A case that fails is not run again, and left out; `failed` gets the reason."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        progress.rounds(max(0, number - 1), rounds)
        turn = list(samples) if number % 2 == 0 else list(reversed(samples))
        for place, name in enumerate(turn):
            progress.step(name, max(0, number - 1) + place / len(turn))
            try:
                seconds = cases[name]()
            except BenchError as error:
                failed[name] = str(error)
                del samples[name]
                continue
            if number:
                samples[name].append(seconds)
    progress.rounds(rounds, rounds)
    return samples


def _found(
    bench: Kernels,
    scale: Scale,
    samples: dict[str, list[float]],
    *,
    facts: dict[str, Any],
    skipped: dict[str, str],
    failed: dict[str, str],
) -> dict[str, Any]:
    moved = dict.fromkeys(bench.cases, 2 * scale.kernel_bytes) | dict.fromkeys(samples, 2 * scale.put_bytes)
    moved |= dict.fromkeys(bench.cases, 2 * scale.kernel_bytes) | {"checksum": scale.kernel_bytes}
    copies = [moved["device_copy"] / seconds for seconds in samples["device_copy"]]
    ratios = {}
    for name, times in samples.items():
        if name in ("device_copy", "index", "scrub", "scrub_dirty"):
            continue
        each = [moved[name] / seconds / copy for seconds, copy in zip(times, copies, strict=True)]
        ratios[name] = {"median": statistics.median(each), "min": min(each), "max": max(each), "goal": GOALS.get(name)}
    scrubs = {
        name: statistics.median(mine / copy for mine, copy in zip(samples[name], samples["device_copy"], strict=True))
        for name in ("scrub", "scrub_dirty")
    }
    return {
        "device": bench.name,
        "rounds": scale.rounds,
        "device_copy_gb_s": statistics.median(copies) / 1e9,
        "ratios": ratios,
        "scrub_of_copy_time": scrubs | {"goal_most": SCRUB_MOST},
        "index_ms": {"median": statistics.median(samples["index"]) * 1e3, "goal_most": INDEX_MOST_MS},
        "receipts": facts,
        "skipped": skipped,
        "failed": failed,
    }


def rows(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """For people: what, median, goal, whether it was met."""
    lines = [("device copy, GB/s read plus written", f"{found['device_copy_gb_s']:.0f}", "", "")]
    for name, ratio in found["ratios"].items():
        goal = ratio["goal"]
        met = "" if goal is None else "yes" if ratio["median"] >= goal else "NO"
        lines.append((f"{name}, of the copy", f"{ratio['median']:.3f}", "" if goal is None else f">= {goal}", met))
    scrubs = found["scrub_of_copy_time"]
    for name in ("scrub", "scrub_dirty"):
        met = "yes" if scrubs[name] <= scrubs["goal_most"] else "NO"
        lines.append((f"{name} of 3 % dead, of the copy's time", f"{scrubs[name]:.3f}", f"<= {SCRUB_MOST}", met))
    index = found["index_ms"]
    met = "yes" if index["median"] <= index["goal_most"] else "NO"
    lines.append(("index of 1.5 million entries, ms", f"{index['median']:.3f}", f"<= {INDEX_MOST_MS}", met))
    for name, receipt in found["receipts"].items():
        text = f"{receipt['transport']}, checksum {receipt['checksum']}, staged {receipt['staged_bytes']} bytes"
        lines.append((f"{name} went by", text, "", ""))
    return lines


class Kernels:
    """Pools on one GPU, and what is timed on them. Each case returns the seconds that the GPU took."""

    def __init__(self, place: cuda.Gpu, nbytes: int) -> None:
        self._place = place
        self._cupy = importlib.import_module("cupy")
        properties = self._cupy.cuda.runtime.getDeviceProperties(place.device_id)
        self.name: Final = properties["name"].decode()
        place.enter()
        rng = np.random.default_rng()
        count = nbytes // _PAGE_BYTES
        self._pool = place.take(nbytes).reshape(count, _PAGE_BYTES)
        self._out = place.take(nbytes).reshape(count, _PAGE_BYTES)
        self._pool[...] = 1
        order = rng.permutation(count)
        self._order = on_device_of(self._pool, order)
        # One page in two has a dead slot, but for what 3 % of all slots are.
        dead = rng.random(count) < _DEAD_PART * PAGE[0]
        self._live = on_device_of(self._pool, (PAGE[0] - dead).astype(np.uint32))
        self._descriptor = _descriptor(count)
        self._index, self._counts = _index(self._pool, rng)
        self.cases: Final[dict[str, Callable[[], float]]] = {
            "device_copy": lambda: self._timed(self._copy),
            "gather": lambda: self._timed(lambda: kernels.copy_pages(self._pool, self._order, self._out, None)),
            "scatter": lambda: self._timed(lambda: kernels.copy_pages(self._out, None, self._pool, self._order)),
            "gather_host_ids": lambda: self._timed(lambda: gather(self._pool, order, self._out)),
            "scatter_host_ids": lambda: self._timed(lambda: scatter(self._pool, order, self._out)),
            "scrub": lambda: self._timed(self._scrub, self._clean),
            "scrub_dirty": lambda: self._timed(self._scrub, self._soil),
            "checksum": lambda: self._timed(lambda: MIX64(self._pool.reshape(-1))),
            "index": lambda: self._timed(self._check_index),
        }

    def _timed(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        place, events = self._place, [self._cupy.cuda.Event(), self._cupy.cuda.Event()]
        place.enter()
        prepare()
        place.settle()
        events[0].record(place.stream)
        work()
        events[1].record(place.stream)
        place.settle()
        return float(self._cupy.cuda.get_elapsed_time(*events)) / 1e3

    def _copy(self) -> None:
        self._out[...] = self._pool

    def _clean(self) -> None:
        scrub(self._descriptor, self._pool, self._live)

    def _soil(self) -> None:
        self._pool[...] = 1

    def _scrub(self) -> None:
        scrub(self._descriptor, self._pool, self._live)

    def _check_index(self) -> None:
        pointers, table = self._index
        status = kernels.index_status(pointers, table, self._counts, num_pages=_INDEX_ENTRIES, page_size=PAGE[0])
        assert status == kernels.INTACT


def _descriptor(count: int) -> Any:
    return build_descriptor(
        element_type=BY_NAME["float16"],
        page_size=PAGE[0],
        num_pages=count,
        num_heads=PAGE[1],
        head_dim=PAGE[2],
        total_tokens=0,
        num_seqs=1,
        total_logical_pages=count,
        kv_role=0,
        layer_index=0,
        block_table_index_type=0,
        quantization=None,
    )


def _index(beside: Any, rng: np.random.Generator) -> tuple[list[Any], Any]:
    """seq_ptr and block_table of 100,000 sequences, compact, and their token counts."""
    per_seq = 15
    seqs = _INDEX_ENTRIES // per_seq
    pointers = np.arange(seqs + 1, dtype=np.uint32) * np.uint32(per_seq)
    counts = rng.integers((per_seq - 1) * PAGE[0] + 1, per_seq * PAGE[0], seqs, dtype=np.uint64, endpoint=True)
    table = np.arange(_INDEX_ENTRIES, dtype=np.uint32)
    return [on_device_of(beside, pointers), on_device_of(beside, table)], on_device_of(beside, counts)


def _own_gpu() -> cuda.Gpu:
    """The GPU of a worker."""
    return cuda.gpu(cuda.read_device(os.environ[_DEVICE]) or 0)


class GpuEngine:
    """See worker: an engine with pools on a GPU."""

    def open(self, address: str, folder: str, nbytes: int) -> dict[str, Any]:
        """Take the pools, connect over UCX alone."""
        place = _own_gpu()
        pages = nbytes // (2 * _LAYERS * _PAGE_BYTES)
        rng = np.random.default_rng()
        place.enter()
        caches: dict[tuple[int | None, str], Any] = {}
        for layer in range(_LAYERS):
            for role in ("key", "value"):
                pool = place.take(pages * _PAGE_BYTES)
                pool[...] = rng.integers(1, 256)
                caches[layer, role] = pool.view(np.uint16).reshape(pages, *PAGE)
        place.settle()
        order = rng.permutation(pages)
        tables = [order[start : start + _SEQ_PAGES] for start in range(0, pages, _SEQ_PAGES)]
        counts = [len(table) * PAGE[0] for table in tables]
        self._snapshot = KVSnapshot.from_paged(caches, block_tables=tables, token_counts=counts, element_type="float16")
        self._client = ht.connect(address, transports=["ucx"])
        return {"folder": folder}

    def put(self, checksum: Any) -> dict[str, Any]:
        """One put; the snapshot is deleted afterwards."""
        began = time.monotonic()
        receipt = self._client.put(
            "bench/gpu", self._snapshot, checksum=checksum, require_transport="ucx", timeout_s=_TIMEOUT_S
        )
        seconds = time.monotonic() - began
        self._client.delete("bench/gpu")
        return {"seconds": seconds, "receipt": receipt.to_dict()}

    def close(self) -> None:
        """End the connection."""
        self._client.close()


class NixlGpu(Nixl):
    """NIXL between two memories on the same GPU."""

    segment = "VRAM"

    def open(self, workload: dict[str, Any], role: str) -> dict[str, Any]:
        """See Peer."""
        place = _own_gpu()
        self._workload, self._role, self._device = Workload(**workload), role, place.device_id
        self._memory: Any = place.take(self._workload.nbytes)
        self._order = page_order(self._workload)
        return self._register()

    def _module(self) -> str:
        return _nixl_module()

    @property
    def _address(self) -> int:
        return int(self._memory.data.ptr)


def _nixl_module() -> str:
    for name in ("nixl_cu13", "nixl_cu12"):
        if importlib.util.find_spec(name) is not None:
            return name
    raise BenchError("not installed: nixl-cu12 or nixl-cu13")


def _nixl(stack: ExitStack, env: dict[str, str], nbytes: int) -> Callable[[], float]:
    """NIXL's write of the same number of pages, in random order, from one process to another."""
    _nixl_module()
    quiet = env | {"NIXL_LOG_LEVEL": "ERROR", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    workload = Workload("paged", "put", _LAYERS, nbytes // (2 * _LAYERS * _PAGE_BYTES)).to_dict()
    source, target = (stack.enter_context(Worker("nixl_gpu", quiet)) for _ in range(2))
    told = {
        role: worker.ask("open", workload=workload, role=role)
        for role, worker in (("source", source), ("target", target))
    }
    source.ask("connect", other=told["target"])
    target.ask("connect", other=told["source"])

    def once() -> float:
        target.tell("await_end")
        sent = source.ask("send")
        return float(target.answer()["ended"] - sent["began"])

    return once
