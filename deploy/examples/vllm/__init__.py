"""Two vLLM engines that hand a cache over: `make vllm-example`. docs/vllm.md explains it."""
