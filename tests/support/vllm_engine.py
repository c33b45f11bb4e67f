"""A vLLM engine in a process of its own, told what to do by JSON lines: run by vllm_engines.py, not imported.

It answers on the standard output that it was started with; what vLLM prints goes to standard error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from typing import Any

DEADLINE_S = 120.0


class Engine:
    """One LLM, and what its scheduler has computed, request by request."""

    def __init__(self, options: dict[str, Any]) -> None:
        isa = options.pop("isa", None)
        if isa is not None:  # another kernel of the same backend
            from vllm.v1.attention.backends import cpu_attn

            cpu_attn._get_attn_isa = lambda *_, **__: isa
        from vllm import LLM

        self.llm = LLM(skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, **options)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.computed: dict[str, int] = defaultdict(int)
        self.preemptions = 0
        self._watch()

    def _watch(self) -> None:
        schedule = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            starts = {item.req_id: item.num_computed_tokens for item in output.scheduled_new_reqs}
            running = output.scheduled_cached_reqs
            starts.update(zip(running.req_ids, running.num_computed_tokens, strict=True))
            for request_id, count in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[request_id]
                start = starts[request_id]
                self.computed[request_id] += max(0, min(start + count, request.num_prompt_tokens) - start)
            self.preemptions += len(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = watched

    def generate(self, requests: list[dict[str, Any]], aborts: dict[str, int]) -> dict[str, Any]:
        from vllm import SamplingParams

        answers: dict[str, Any] = {}
        self.computed.clear()
        self.preemptions = 0
        for item in requests:
            params = SamplingParams(
                max_tokens=item.get("max_tokens", 8),
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                logprobs=item.get("logprobs"),
                extra_args={"kv_transfer_params": item["kv"]} if item.get("kv") is not None else None,
            )
            self.engine.add_request(item["id"], {"prompt_token_ids": item["prompt"]}, params)
        until, steps = time.monotonic() + DEADLINE_S, 0
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            assert time.monotonic() < until, "the engine does not come to an end"
            for request_id in [name for name, count in aborts.items() if count == steps]:
                self.engine.abort_request([request_id])
                answers[request_id] = {"tokens": [], "finish": "abort"}
            for output in self.engine.step():
                if output.finished:
                    answers[output.request_id] = self._answer(output)
            steps += 1
            if not self.scheduler.running:
                time.sleep(0.001)  # as vLLM does in a process of its own, for threads that load
        for name, count in self.computed.items():
            for request_id in (name, name.rpartition("-")[0]):  # vLLM adds a suffix to the ids that it is given
                if request_id in answers:
                    answers[request_id]["computed"] = count
        return {"answers": answers, "preemptions": self.preemptions}

    def _answer(self, output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        answer = {
            "tokens": list(completion.token_ids),
            "finish": completion.finish_reason,
            "kv": output.kv_transfer_params,
            "cached": output.num_cached_tokens,
        }
        if completion.logprobs:
            values = [sorted((item.logprob for item in step.values()), reverse=True) for step in completion.logprobs]
            answer["margin"] = min(best - second for best, second, *_ in values)
        return answer

    def state(self) -> dict[str, Any]:
        """Free blocks, requests that are left, a digest of the whole cache."""
        digest = hashlib.sha256()
        for layer in self.engine.vllm_config.compilation_config.static_forward_context.values():
            digest.update(layer.kv_cache.contiguous().view(dtype=__import__("torch").uint8).numpy().data)
        connector = self.scheduler.connector
        return {
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(self.scheduler.requests),
            "forgotten": connector is None or connector._requests.is_empty,
            "digest": digest.hexdigest(),
        }

    def read_back(self, prompt: list[int]) -> dict[str, Any]:
        """Run a prompt, and compare what each layer was given to keep with what the connector's views show."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        layers = self.engine.vllm_config.compilation_config.static_forward_context
        kept: dict[str, Any] = {}
        originals = {name: layer.impl.do_kv_cache_update for name, layer in layers.items()}

        def watch(name: str) -> Any:
            def update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
                kept.setdefault(name, (key.clone(), value.clone(), slots.clone()))
                originals[name](layer, key, value, cache, slots)

            return update

        for name, layer in layers.items():
            layer.impl.do_kv_cache_update = watch(name)
        self.generate([{"id": "read-back", "prompt": prompt, "max_tokens": 1}], {})
        for name, layer in layers.items():
            layer.impl.do_kv_cache_update = originals[name]
        views = get_kv_transfer_group()._worker._puts._caches
        equal, count = True, 0
        for index, name in enumerate(layers):
            key, value, slots = kept[name]
            live = slots[: len(prompt)]
            for role, given in (("key", key), ("value", value)):
                view = views[index, role]
                seen = view[live // view.shape[1], live % view.shape[1]]
                equal &= bool(torch.equal(seen, given[: len(prompt)].reshape(seen.shape)))
            count = len(set(live.tolist()))
        return {"layers": len(kept), "slots": count, "equal": equal}

    def reset(self) -> dict[str, Any]:
        """Forget all prefixes."""
        return {"reset": self.scheduler.reset_prefix_cache()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    try:
        engine = Engine(json.loads(sys.argv[1]))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "stop":
            break
        try:
            answer(getattr(engine, operation)(**request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
    if engine.scheduler.connector is not None:
        engine.engine.engine_core.shutdown()
    answer({"stopped": True})
    answers.flush()
    os._exit(0)  # torch and its thread pools are in no hurry


if __name__ == "__main__":
    main()
