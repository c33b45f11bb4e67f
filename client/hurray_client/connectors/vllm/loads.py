"""A worker's loads: snapshots that are got into blocks of the engine, while it does other work.

Straight into the blocks where they are like the snapshot's pages and all of them are wanted; else into memory of ours
first, and from there to the slots of the positions that are wanted: other block sizes, and prompts of which the engine
has a beginning. Blocks that hold that beginning belong to other requests, too, and are not touched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hurray_client.call import Call
from hurray_client.client import Client
from hurray_client.connectors.vllm.handle import Handle
from hurray_client.receipt import Receipt
from hurray_client.transfer import ReceivedSnapshot
from hurray_wire.destination import Destination
from hurray_wire.errors import GeometryMismatch, HurrayError
from hurray_wire.paged import CacheKey, DeclaredCache, tensor_name

logger = logging.getLogger(__name__)

_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Positions [start, end) of a prompt, to be loaded. `block_ids` are the request's, from position 0 on."""

    request_id: str
    handle: Handle | None
    error: str | None
    start: int
    end: int
    block_ids: tuple[int, ...]
    prompt: str


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load ended."""

    request_id: str
    wire_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class Loads:
    """Loads that run, and how those that have ended did. For one engine thread; the loads have threads of their own."""

    def __init__(
        self,
        client: Callable[[str], Client],
        caches: Mapping[CacheKey, Any],
        element_type: str | None,
        fingerprint: Mapping[str, str],
        *,
        block_size: int,
        tp_rank: int,
        timeout_s: float,
    ) -> None:
        """`client` gives the client of a node by name. Raises what Destination.from_paged raises."""
        self._client = client
        # Checked once: whether caches have memory in common takes longer than a load.
        self._destination = Destination.from_paged(caches, block_tables=[[]], element_type=element_type)
        self._fingerprint = dict(fingerprint)
        self._block_size = block_size
        self._tp_rank = tp_rank
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hurray-load")
        self._lock = threading.Lock()
        self._calls: dict[str, Call] = {}
        self._ended: list[LoadOutcome] = []

    def start(self, plan: LoadPlan) -> None:
        """Begin a load; its budget begins, too. Raises nothing: what goes wrong is in its outcome."""
        call = Call(self._timeout_s)
        with self._lock:
            self._calls[plan.request_id] = call
        self._pool.submit(self._run, plan, call)

    def cancel(self, request_id: str) -> None:
        """Nobody wants it any more: it ends soon, as failed. One that is not known has ended already."""
        with self._lock:
            call = self._calls.get(request_id)
        if call is not None:
            call.cancel()

    def take_ended(self) -> list[LoadOutcome]:
        """Those that have ended since the last time. Nothing writes to their blocks any more."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Cancel all."""
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        self._pool.shutdown(wait=True)

    def _run(self, plan: LoadPlan, call: Call) -> None:
        begun = time.monotonic()
        outcome = LoadOutcome(plan.request_id, error=plan.error)
        try:
            if plan.handle is not None:
                receipt = self._load(plan, plan.handle, call)
                size_bytes = receipt.wire_bytes + receipt.mapped_bytes
                outcome = LoadOutcome(plan.request_id, size_bytes, time.monotonic() - begun)
        except HurrayError as error:
            outcome = LoadOutcome(plan.request_id, error=str(error))
        except Exception as error:  # an engine must not die of it, nor wait for ever
            logger.exception("a load failed in an unexpected way")
            outcome = LoadOutcome(plan.request_id, error=f"INTERNAL: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._calls.pop(plan.request_id, None)
                self._ended.append(outcome)

    def _load(self, plan: LoadPlan, handle: Handle, call: Call) -> Receipt:
        call.left_s("queue")
        client = self._client(handle.node)
        key, generation = handle.snapshots[self._tp_rank]
        options: dict[str, Any] = {
            "generation": generation,
            "consume": True,
            "require": {**self._fingerprint, "prompt": plan.prompt},
        }
        first, last = plan.start // self._block_size, -(-plan.end // self._block_size)
        blocks = np.array(plan.block_ids[first:last], dtype=np.int64)
        assert blocks.size == last - first, "the request has fewer blocks than the positions to load"
        assert not (blocks == 0).any(), "vLLM's null block is nobody's"
        whole = plan.start == 0 and plan.end == handle.token_count
        if whole and handle.block_size == self._block_size:
            destination = self._destination.with_tables([blocks])
            return client.run_get(call, key, into=destination, **options).receipt
        with client.run_get(call, key, **options) as got:
            self._check(got, handle.token_count)
            for cache in self._destination.caches:
                _write(cache, got, plan, blocks, first * self._block_size)
            return got.receipt

    def _check(self, got: ReceivedSnapshot, token_count: int) -> None:
        """What `into=` compares, but for the page size."""
        caches = self._destination.caches
        own = {(cache.layer_index, cache.role): cache.pool for cache in caches}
        names = [(tensor.layer_index, tensor.role) for tensor in got.tensors]
        if set(names) != set(own) or got.token_counts.tolist() != [token_count]:
            raise GeometryMismatch(
                "the snapshot is of other layers, or of another number of tokens",
                field="tensors",
                offered=f"{len(names)} tensors, {got.token_counts.tolist()} tokens",
                required=f"{len(own)} tensors, {[token_count]} tokens",
            )
        for tensor in got.tensors:
            pool, descriptor = own[tensor.layer_index, tensor.role], tensor.descriptor
            for field, offered, required in (
                ("num_heads", descriptor.num_heads, pool.num_heads),
                ("head_dim", descriptor.head_dim, pool.head_dim),
                ("element_type", descriptor.element_type.name, pool.element_type.name),
            ):
                if offered != required:
                    raise GeometryMismatch(
                        f"{tensor_name(tensor.layer_index, tensor.role)}: {field} is {offered} in the snapshot and"
                        f" {required} in the engine",
                        field=field,
                        offered=offered,
                        required=required,
                    )


def _write(
    cache: DeclaredCache, got: ReceivedSnapshot, plan: LoadPlan, blocks: npt.NDArray[np.int64], base: int
) -> None:
    """Copy the wanted positions of one tensor to their slots. `blocks` begin at position `base`."""
    pool = cache.pool
    rows = got.tokens(cache.layer_index, cache.role, 0)[plan.start : plan.end]
    positions = np.arange(plan.start, plan.end) - base
    words = pool.array
    if words.ndim == 2:  # pages in one piece
        width = pool.element_type.bits // 8
        words = words.view(f"u{width}").reshape(pool.num_pages, pool.page_size, pool.num_heads, pool.head_dim)
    words[blocks[positions // pool.page_size], positions % pool.page_size] = rows.view(words.dtype)
