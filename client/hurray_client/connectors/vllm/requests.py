"""The scheduler's side: which prompts are put and which are loaded, request by request. Does no I/O."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hurray_client.connectors.vllm.handle import Handle, failed_params, prompt_digest
from hurray_client.connectors.vllm.loads import LoadPlan
from hurray_client.connectors.vllm.puts import PutOutcome
from hurray_wire.errors import InvalidRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PutOrder:
    """A prompt to put in this step; each rank adds its own to the key."""

    request_id: str
    key: str
    token_count: int
    block_ids: tuple[int, ...]
    prompt: str


@dataclass(slots=True)
class _Wanted:
    """A request whose prompt is to be put. `params` is what its caller gets, filled in once the outcome is known."""

    key: str
    token_count: int
    prompt: str
    params: dict[str, Any] = field(default_factory=lambda: failed_params("NOT_PUT: the prompt was not computed"))
    is_ordered: bool = False
    is_known: bool = False


class Requests:
    """State of the requests of one engine. For the scheduler's thread."""

    def __init__(self, *, node: str | None, key_prefix: str, block_size: int, tp_size: int) -> None:
        """`node` None: this engine puts nothing."""
        self._node = node
        self._key_prefix = key_prefix
        self._block_size = block_size
        self._tp_size = tp_size
        self._wanted: dict[str, _Wanted] = {}
        self._told: dict[str, _Wanted] = {}
        self._local: dict[str, int] = {}
        self._tried: set[str] = set()
        self._loads: list[LoadPlan] = []
        self._cancels: list[str] = []

    # --- putting ----------------------------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A request has arrived."""
        params = request.kv_transfer_params
        if self._node is None or not isinstance(params, Mapping) or not params.get("do_remote_decode"):
            return
        self._wanted[request.request_id] = _Wanted(
            self._key_prefix + "vllm-" + uuid.uuid4().hex, request.num_prompt_tokens, digest_of(request)
        )

    def puts(self, computed: Mapping[str, int], block_ids: Callable[[str], tuple[int, ...]]) -> list[PutOrder]:
        """The prompts that this step finishes. `computed`: how many tokens of each scheduled request the step leaves
        computed; `block_ids` gives its blocks."""
        orders = []
        for request_id, count in computed.items():
            wanted = self._wanted.get(request_id)
            if wanted is None or wanted.is_ordered or count < wanted.token_count:
                continue
            wanted.is_ordered = True
            blocks = block_ids(request_id)[: -(-wanted.token_count // self._block_size)]
            orders.append(PutOrder(request_id, wanted.key, wanted.token_count, blocks, wanted.prompt))
        return orders

    def put_ended(self, request_id: str, outcomes: Mapping[int, PutOutcome]) -> None:
        """The outcome at each rank. What the request's caller gets is completed in place: it may have been handed to
        vLLM a moment ago, which sends it at the end of the step."""
        wanted = self._told.pop(request_id, None) or self._wanted.get(request_id)
        if wanted is None:
            return
        wanted.is_known = True
        wanted.params.clear()
        errors = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error is not None}
        missing = set(range(self._tp_size)) - set(outcomes)
        if errors or missing:
            text = (
                "; ".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())) or f"no word of {missing}"
            )
            logger.warning("the cache of request %s was not handed over: %s", request_id, text)
            wanted.params.update(failed_params(text))
            return
        assert self._node is not None
        snapshots = tuple((outcomes[rank].key, outcomes[rank].generation) for rank in range(self._tp_size))
        wanted.params.update(Handle(self._node, self._block_size, wanted.token_count, snapshots).to_params())

    # --- loading ----------------------------------------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> int:
        """How many tokens beyond the first `computed` shall be loaded."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or not params.get("do_remote_prefill") or request.request_id in self._tried:
            return 0
        count: int = request.num_prompt_tokens - computed
        if count <= 1:  # the last is computed anyway: its logits are wanted
            return 0
        self._local[request.request_id] = computed
        return count

    def allocated(self, request: Any, block_ids: tuple[int, ...], count: int) -> None:
        """Blocks were given to a request, `count` tokens of which shall be loaded."""
        if not count:
            return
        start = self._local.pop(request.request_id)
        self._tried.add(request.request_id)
        handle, error = None, None
        try:
            handle = Handle.from_params(
                request.kv_transfer_params, tp_size=self._tp_size, token_count=request.num_prompt_tokens
            )
        except InvalidRequest as refusal:
            error = str(refusal)
        plan = LoadPlan(request.request_id, handle, error, start, start + count, block_ids, digest_of(request))
        self._loads.append(plan)

    def take_loads(self) -> tuple[list[LoadPlan], list[str]]:
        """Loads to start, and requests whose load nobody wants any more."""
        loads, cancels = self._loads, self._cancels
        self._loads, self._cancels = [], []
        return loads, cancels

    # --- both -------------------------------------------------------------------------------------------------------

    def finish(self, request: Any) -> dict[str, Any] | None:
        """A request has ended, however. What its caller gets as kv_transfer_params."""
        self._local.pop(request.request_id, None)
        if request.request_id in self._tried:
            self._tried.discard(request.request_id)
            self._cancels.append(request.request_id)
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None:
            return None
        if wanted.is_ordered and not wanted.is_known:
            self._told[request.request_id] = wanted
        return wanted.params

    @property
    def is_empty(self) -> bool:
        """Nothing is known of any request, nor left to be told."""
        return not (self._wanted or self._told or self._local or self._tried or self._loads or self._cancels)


def digest_of(request: Any) -> str:
    """The digest of a request's prompt. One without token ids (embeddings) has a digest that no other has."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return f"embeddings {uuid.uuid4().hex}"
    lora = request.lora_request
    extra = [] if lora is None else [f"lora {lora.lora_name}"]
    extra += [f"media {feature.identifier} {feature.mm_position.offset}" for feature in request.mm_features]
    if request.cache_salt is not None:
        extra.append(f"salt {request.cache_salt}")
    return prompt_digest(request.prompt_token_ids, *extra)
