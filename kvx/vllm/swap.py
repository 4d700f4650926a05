"""vLLM's own batch of copies between a GPU and host memory, for benchmarks beside kvx's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def swap_blocks_batch() -> Callable[[Any, Any, Any], None] | None:
    """`(source pointers, destination pointers, sizes)`, int64 tensors on the host; None where vLLM has none here."""
    try:
        found: Callable[[Any, Any, Any], None] | None = getattr(
            import_module("vllm._custom_ops"), "swap_blocks_batch", None
        )
    except (ImportError, RuntimeError, OSError):  # not installed, or made for another torch or another device
        return None
    # vLLM has the function everywhere, and the kernel behind it only where its library for the device was loaded.
    return found if hasattr(torch.ops._C_cache_ops, "swap_blocks_batch") else None
