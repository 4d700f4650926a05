"""The vLLM plug-in: nothing outside this folder imports vllm."""
