"""Two vLLM engines behind a router: one computes prompts and hands their cache to the other. See docs/vllm.md."""
