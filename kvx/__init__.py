"""kvx: an extensible KV cache and a connector framework for disaggregated LLM serving."""

__version__ = "0.1.0"
