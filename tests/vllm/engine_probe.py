"""Runs one real vLLM engine with the bridge in this process, and prints what the tests want to know as one JSON line.

A script and not a fixture: vLLM changes much of the process that it runs in, and must end before the next test.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    UCX_TLS="tcp,self,cma",
)

calls: list[dict[str, Any]] = []


def watch_nixl() -> None:
    """Record every registration with NIXL, and what the cache had committed at that moment."""
    from nixl._api import nixl_agent

    from kvx.vllm import worker_side

    original = nixl_agent.register_memory

    def register_memory(agent: Any, reg_list: Any, *args: Any, **kwargs: Any) -> Any:
        cache = worker_side.current_seam().require_cache()
        rows = reg_list.tolist() if hasattr(reg_list, "tolist") else [list(row[:2]) for row in reg_list]
        calls.append(
            {
                "ranges": [[int(row[0]), int(row[1])] for row in rows],
                "extends_before": sum(event.name == "extend" for event in cache.events),
                "committed": [[m.address, m.nbytes] for m in cache.mappings],
                "state": str(cache.state),
            }
        )
        return original(agent, reg_list, *args, **kwargs)

    nixl_agent.register_memory = register_memory


def counts(llm: Any) -> dict[str, Any]:
    """The final count in each place that reads it."""
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    return {
        "block_pool": core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "scheduler_config": core.scheduler.kv_cache_config.num_blocks,
        "core_cache_config": core.vllm_config.cache_config.num_gpu_blocks,
        "front_cache_config": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "worker_cache_config": worker.cache_config.num_gpu_blocks,
        "cache": worker.kvx_seam.cache.final_blocks,
        "bridge_scheduler": core.scheduler.connector._kv_cache_config.num_blocks,
        "tokens": core.vllm_config.cache_config.kv_cache_size_tokens,
    }


def copy_and_zero(llm: Any) -> dict[str, bool]:
    """vLLM's own copy-on-write and zeroing, over blocks that exist only since the extend."""
    import torch
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner, seam = worker.model_runner, worker.kvx_seam
    last, before = seam.cache.final_blocks - 1, seam.cache.final_blocks - 2
    assert before > seam.blocks_at_warmup
    views = list(seam.views.values())
    for index, view in enumerate(views):
        view[before] = float(index + 1)
        view[last] = 0.0
    copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, [(before, last)])
    copied = all(bool((view[last] == index + 1).all()) for index, view in enumerate(views))
    runner._zero_block_ids([last])
    zeroed = all(not view[last].any() for view in views)
    kept = all(bool((view[before] == index + 1).all()) for index, view in enumerate(views))
    for view in views:
        view[before] = torch.zeros((), dtype=view.dtype)
    return {"copied": copied, "zeroed": zeroed, "neighbour_kept": kept}


def refused_block_ids(llm: Any) -> dict[str, str]:
    """Block ids outside the committed ones, through kvx's own API: an exception's name, never a crash."""
    from kvx.errors import KVXError

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    cache = worker.kvx_seam.cache
    refused = {}
    for name, block in {"final": cache.final_blocks, "capacity": cache.capacity_blocks, "negative": -1}.items():
        try:
            cache.check_block_ids([0, block])
            refused[name] = "accepted"
        except KVXError as error:
            refused[name] = type(error).__name__
    return refused


def main() -> None:
    watch_nixl()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KvxConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvx.vllm.bridge",
            "kv_connector_extra_config": {"connectors": ["nixl"]},
        },
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    found: dict[str, Any] = {
        "registrations": calls,
        "counts": counts(llm),
        "memory": copy_and_zero(llm),
        "refused": refused_block_ids(llm),
        "report": worker.kvx_seam.report(
            sum(nbytes for _, nbytes in calls[0]["ranges"]),
        ),
    }
    outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
    found["text"] = outputs[0].outputs[0].text
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
