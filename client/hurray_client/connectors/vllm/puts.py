"""A worker's puts: the prompts that a step of the engine finishes, handed over before the step ends.

Within the step nothing can take their blocks away: no preemption, no abort, no other request. So nothing is pinned, and
the engine answers with a handle that names what a node has committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from hurray_client.client import Client
from hurray_client.receipt import Receipt
from hurray_client.stream import PutStream
from hurray_wire.errors import DeadlineExceeded, HurrayError, InternalError
from hurray_wire.paged import CacheKey
from hurray_wire.snapshot import KVSnapshot

_THREADS: Final = 8
_GRACE_S: Final = 5.0
"""Beyond the budget of a put, for one that waits its turn or ends late."""


@dataclass(frozen=True, slots=True)
class PutPlan:
    """One prompt to hand over. `block_ids` are those of its first `token_count` tokens."""

    request_id: str
    key: str
    token_count: int
    block_ids: tuple[int, ...]
    prompt: str


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What became of it: the snapshot's full key and its generation, or the error."""

    key: str = ""
    generation: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


class Puts:
    """The puts of one step at a time. `client` is asked for at each, as its connection may have to be made."""

    def __init__(
        self,
        client: Callable[[], Client],
        caches: Mapping[CacheKey, Any],
        element_type: str | None,
        fingerprint: Mapping[str, str],
        *,
        lease_s: float,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._caches = caches
        self._element_type = element_type
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hurray-put")
        self._streams: dict[str, _Stream] | None = None

    def run(self, plans: Sequence[PutPlan]) -> dict[str, PutOutcome]:
        """Put all at once; what became of each, by request. Raises nothing."""
        running = {plan.request_id: self._pool.submit(self._put, plan) for plan in plans}
        return {request_id: self._outcome(future) for request_id, future in running.items()}

    def layer_done(self, plans: Sequence[PutPlan], layer: int) -> None:
        """A layer of the step is computed: begin with the first, send each. Raises nothing."""
        if self._streams is None:
            self._streams = {plan.request_id: _Stream(self._open, plan) for plan in plans}
        for stream in self._streams.values():
            stream.ready(layer)

    def end_step(self, plans: Sequence[PutPlan]) -> dict[str, PutOutcome]:
        """The step is over: what became of the puts that `layer_done` began, or of those that now run."""
        streams, self._streams = self._streams, None
        if streams is None:
            return self.run(plans)
        return {request_id: stream.end() for request_id, stream in streams.items()}

    def close(self) -> None:
        """Take no more. What runs ends with its budget, or when its client is closed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _snapshot(self, plan: PutPlan) -> KVSnapshot:
        return KVSnapshot.from_paged(
            self._caches,
            block_tables=[list(plan.block_ids)],
            token_counts=[plan.token_count],
            element_type=self._element_type,
        )

    def _options(self, plan: PutPlan) -> dict[str, Any]:
        annotations = {**self._fingerprint, "prompt": plan.prompt}
        return {"lease_s": self._lease_s, "timeout_s": self._timeout_s, "annotations": annotations}

    def _put(self, plan: PutPlan) -> Receipt:
        return self._client().put(plan.key, self._snapshot(plan), **self._options(plan))

    def _open(self, plan: PutPlan) -> PutStream:
        return self._client().put_stream(plan.key, self._snapshot(plan), **self._options(plan))

    def _outcome(self, future: Future[Receipt]) -> PutOutcome:
        try:
            return _committed(future.result(self._timeout_s + _GRACE_S))
        except FutureTimeout:
            future.cancel()
            return _failed(DeadlineExceeded("the put did not end in time", stage="put", budget_s=self._timeout_s))
        except Exception as error:  # an engine must not die of it
            return _failed(error)


class _Stream:
    """One put that is sent layer by layer."""

    def __init__(self, start: Callable[[PutPlan], PutStream], plan: PutPlan) -> None:
        self._block = ExitStack()
        self._begun = time.monotonic()
        self._error: Exception | None = None
        self._put: PutStream | None = None
        try:
            self._put = self._block.enter_context(start(plan))
        except Exception as error:
            self._error = error

    def ready(self, layer: int) -> None:
        """Send a layer, unless the put has failed."""
        if self._error is None and self._put is not None:
            try:
                self._put.ready(layer)
            except Exception as error:
                self._error = error

    def end(self) -> PutOutcome:
        """Wait for the end. The put's own budget bounds it."""
        try:
            if self._error is None:
                self._block.close()
                assert self._put is not None
                return _committed(self._put.receipt)
            # Leave the block by the error: nothing is committed.
            self._block.__exit__(type(self._error), self._error, self._error.__traceback__)
        except Exception as error:
            self._error = error
        assert self._error is not None
        return _failed(self._error)


def _committed(receipt: Receipt) -> PutOutcome:
    return PutOutcome(receipt.key, receipt.generation, receipt.wire_bytes, receipt.transfer_s)


def _failed(error: Exception) -> PutOutcome:
    known = error if isinstance(error, HurrayError) else InternalError(f"{type(error).__name__}: {error}")
    return PutOutcome(error=str(known))
