"""HurrayConnector: vLLM's KVConnectorBase_V1 over the SDK.

One instance lives in the scheduler and one in each worker. A prefill engine's worker puts the blocks of the prompts
that a step has finished, at the end of that step (puts.py). A decode engine's scheduler turns handles into loads, which
its workers run beside the engine (loads.py). What cannot be handed over is refused when the engine starts (engine.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from hurray_client.connectors.vllm.engine import EngineCache, check_supported, read_cache
from hurray_client.connectors.vllm.handle import rank_key
from hurray_client.connectors.vllm.loads import LoadPlan, Loads
from hurray_client.connectors.vllm.nodes import Nodes
from hurray_client.connectors.vllm.puts import PutOutcome, PutPlan, Puts
from hurray_client.connectors.vllm.requests import PutOrder, Requests
from hurray_client.connectors.vllm.settings import ConnectorSettings, read_settings

logger = logging.getLogger(__name__)


@dataclass
class HurrayMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers with a step."""

    puts: list[PutOrder] = field(default_factory=list)
    loads: list[LoadPlan] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)


@dataclass
class HurrayWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after a step: outcomes of puts by request and rank."""

    puts: dict[str, dict[int, PutOutcome]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both ranks' outcomes."""
        assert isinstance(other, HurrayWorkerMetadata)
        merged = {request_id: dict(outcomes) for request_id, outcomes in self.puts.items()}
        for request_id, outcomes in other.puts.items():
            merged.setdefault(request_id, {}).update(outcomes)
        return HurrayWorkerMetadata(merged)


class HurrayStats(KVConnectorStats):
    """Sums over an interval, which vLLM logs as "KV Transfer metrics"."""

    def add(self, kind: str, *, error: str | None, size_bytes: int, seconds: float) -> None:
        """Count one put or load."""
        values = {kind: 1, f"{kind}_bytes": size_bytes, f"{kind}_s": seconds}
        for name, value in values.items() if error is None else ((f"{kind}_failures", 1),):
            self.data[name] = self.data.get(name, 0) + value

    def reset(self) -> None:
        """Begin anew."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both sums."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """As logged."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not self.data


class HurrayConnector(KVConnectorBase_V1):
    """See the module's docstring. Raises Unsupported and InvalidRequest, which end the engine's start."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        config = self._kv_transfer_config
        settings = read_settings(config.kv_connector_extra_config, produces=config.is_kv_producer)
        self._requests: Requests | None = None
        self._worker: _Worker | None = None
        self._settings = settings
        if role is KVConnectorRole.SCHEDULER:
            self._requests = Requests(
                node=settings.node if config.is_kv_producer else None,
                key_prefix=settings.key_prefix,
                block_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
            )

    # --- in the scheduler -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._scheduling.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All of a prompt that came with a handle, loaded asynchronously. A handle that is no good is found out by the
        load, so that kv_load_failure_policy says what becomes of the request."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        count = self._scheduling.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were given to a request."""
        (block_ids,) = blocks.get_block_ids()
        self._scheduling.allocated(request, tuple(block_ids), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers shall do with this step."""
        scheduled = scheduler_output.num_scheduled_tokens
        computed = {
            item.req_id: item.num_computed_tokens + scheduled[item.req_id]
            for item in scheduler_output.scheduled_new_reqs
        }
        running = scheduler_output.scheduled_cached_reqs
        for request_id, before in zip(running.req_ids, running.num_computed_tokens, strict=True):
            computed[request_id] = before + scheduled[request_id]
        state = scheduler_output.kv_connector_block_state
        puts = self._scheduling.puts(computed, lambda request_id: tuple(state.get_block_ids(request_id)[0]))
        return HurrayMetadata(puts, *self._scheduling.take_loads())

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, HurrayWorkerMetadata):
            for request_id, outcomes in meta.puts.items():
                self._scheduling.put_ended(request_id, outcomes)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its blocks are not needed: what was to be put was put with the step."""
        return False, self._scheduling.finish(request)

    @property
    def _scheduling(self) -> Requests:
        assert self._requests is not None, "this is the scheduler's part"
        return self._requests

    # --- in a worker ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The caches are there. Raises Unsupported for those that cannot be handed over."""
        cache = read_cache(self._vllm_config, self._kv_cache_config, kv_caches, self._settings.revision)
        logger.info("KV cache to hand over: %s", cache.fingerprint)
        self._worker = _Worker(self._settings, cache)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads; they run beside the engine."""
        for plan in self._step.loads:
            self._working.loads.start(plan)
        for request_id in self._step.cancels:
            self._working.loads.cancel(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed only once all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of the step is computed."""
        if self._settings.layerwise and self.has_connector_metadata() and self._step.puts:
            self._working.layer_done(self._step.puts, extract_layer_index(layer_name))

    def wait_for_save(self) -> None:
        """The step is computed: hand over what it has finished."""
        if self._step.puts:
            self._working.put(self._step.puts)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended. Nothing writes to their blocks any more."""
        ended, failed = self._working.take_ended()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Outcomes of the puts of this step."""
        outcomes = self._working.take_outcomes()
        return HurrayWorkerMetadata(outcomes) if outcomes else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Since the last time."""
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        """Cancel what runs, close what is open."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _working(self) -> _Worker:
        assert self._worker is not None, "this is a worker's part, once it has its caches"
        return self._worker

    @property
    def _step(self) -> HurrayMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, HurrayMetadata)
        return meta

    # --- of the class -----------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Pages in the format's own order where a backend can; those of the CPU have one order only."""
        return None if current_platform.is_cpu() else "NHD"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer by layer, Python must run between layers."""
        return bool(extra_config.get("layerwise"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Stats that another process counted."""
        return HurrayStats(data=data or {})


class _Worker:
    """One worker's puts and loads."""

    def __init__(self, settings: ConnectorSettings, cache: EngineCache) -> None:
        self._nodes = Nodes(settings.nodes)
        self._tp_rank = cache.tp_rank
        self._tp_size = int(cache.fingerprint["tp_size"])
        self._stats = HurrayStats()
        self._outcomes: dict[str, dict[int, PutOutcome]] = {}
        self._puts = Puts(
            lambda: self._nodes.client(settings.node or ""),
            cache.caches,
            cache.element_type,
            cache.fingerprint,
            lease_s=settings.lease_s,
            timeout_s=settings.put_timeout_s,
        )
        self.loads = Loads(
            self._nodes.client,
            cache.caches,
            cache.element_type,
            cache.fingerprint,
            block_size=cache.block_size,
            tp_rank=cache.tp_rank,
            timeout_s=settings.load_timeout_s,
        )

    def layer_done(self, orders: list[PutOrder], layer: int) -> None:
        """A layer of the step is computed."""
        self._puts.layer_done(list(map(self._plan, orders)), layer)

    def put(self, orders: list[PutOrder]) -> None:
        """Hand over what the step has finished; returns when all is committed or has failed."""
        for request_id, outcome in self._puts.end_step(list(map(self._plan, orders))).items():
            self._stats.add("puts", error=outcome.error, size_bytes=outcome.wire_bytes, seconds=outcome.seconds)
            self._outcomes[request_id] = {self._tp_rank: outcome}

    def take_outcomes(self) -> dict[str, dict[int, PutOutcome]]:
        """Of puts, since the last time."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last time, and those of them whose loads failed."""
        ended, failed = set(), set()
        for outcome in self.loads.take_ended():
            ended.add(outcome.request_id)
            self._stats.add("loads", error=outcome.error, size_bytes=outcome.wire_bytes, seconds=outcome.seconds)
            if outcome.error is not None:
                failed.add(outcome.request_id)
                logger.warning("the cache of request %s was not loaded: %s", outcome.request_id, outcome.error)
        return ended, failed

    def take_stats(self) -> HurrayStats | None:
        """Since the last time."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, HurrayStats()
        return stats

    def close(self) -> None:
        """Cancel what runs, close what is open."""
        self.loads.close()
        self._puts.close()
        self._nodes.close()

    def _plan(self, order: PutOrder) -> PutPlan:
        key = rank_key(order.key, self._tp_rank, self._tp_size)
        return PutPlan(order.request_id, key, order.token_count, order.block_ids, order.prompt)
