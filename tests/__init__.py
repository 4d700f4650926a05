"""A package, so that `tests/vllm` is `tests.vllm` and never shadows vLLM itself."""
