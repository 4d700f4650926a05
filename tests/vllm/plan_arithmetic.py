"""Prints what vLLM itself makes of the configs that are named: page and block sizes, groups. A process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout


def specs(config: Any) -> Iterator[tuple[str, KVCacheSpec]]:
    """As vLLM's attention layers make them, from what vLLM read in the config."""
    model, size = config.model_config, config.cache_config.block_size
    heads, head_size = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    common: dict[str, Any] = {
        "block_size": size,
        "num_kv_heads": heads,
        "head_size": head_size,
        "dtype": torch.bfloat16,
    }
    kinds = getattr(model.hf_text_config, "layer_types", None) or ["full_attention"] * model.get_num_layers(
        config.parallel_config
    )
    for layer, kind in enumerate(kinds):
        if model.use_mla:
            yield f"layers.{layer}", MLAAttentionSpec(**common)
        elif kind == "sliding_attention":
            yield f"layers.{layer}", SlidingWindowSpec(**common, sliding_window=model.get_sliding_window())
        else:
            yield f"layers.{layer}", FullAttentionSpec(**common)


def found(folder: str) -> dict[str, Any]:
    arguments = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096)
    config = arguments.create_engine_config()
    made = dict(specs(config))
    layout = KVCacheLayout.LBHNC
    groups = kv_cache_utils.get_kv_cache_groups(
        SimpleNamespace(
            scheduler_config=config.scheduler_config,
            attention_config=config.attention_config,
            speculative_config=None,
            model_config=config.model_config,
            cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        ),
        made,
    )
    return {
        "block_size": config.cache_config.block_size,
        "pages": sorted({spec.page_size_bytes for spec in made.values()}),
        "groups": sorted(sorted(group.layer_names) for group in groups),
        "block_bytes": kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout),
    }


if __name__ == "__main__":
    print(json.dumps([found(folder) for folder in sys.argv[1:]]))
