"""kvx in vLLM's engine core: plans the capacity, agrees on the final count, makes it true wherever vLLM reads it."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import EngineError
from . import activation, allocation, compat, orphans, parking, settings
from .device import GRANULARITY_BYTES, Measurement

logger = logging.getLogger("vllm.kvx")


_planning = False
"""Whether `_initialize_kv_caches` is running with kvx: its helpers are hooked by module and know no engine."""


def initialize_kv_caches(original: Any, core: Any, vllm_config: Any) -> Any:
    """Around `EngineCore._initialize_kv_caches`: the whole start of a growing cache.

    Raises:
        EngineError: this vLLM is not one that kvx knows.
        ConnectorError: the bridge's settings are wrong.
        SizingError: what is left after warm-up cannot hold one request of `max_model_len`.
    """
    if not activation.is_asked(vllm_config):
        return original(core, vllm_config)
    import vllm

    known = compat.check_seam(vllm.__version__, vllm_config.device_config.device_type)
    if not known.proven:
        logger.warning("kvx: vLLM %s is known but not proven yet: %s", vllm.__version__, known.shown)
    if activation.bridge_configured(vllm_config):
        contradiction = activation.set_failure_policy(vllm_config, settings.from_vllm(vllm_config).failure_policy)
        if contradiction is not None:
            logger.warning("%s", contradiction)
    reason = activation.reason_for_stock(vllm_config, core.collective_rpc("kvx_probe"))
    if reason is not None:
        return _start_stock(original, core, vllm_config, reason)
    return _start_growing(original, core, vllm_config)


def _start_stock(original: Any, core: Any, vllm_config: Any, reason: str) -> Any:
    if activation.bridge_configured(vllm_config):
        raise EngineError(reason.replace("kvx keeps vLLM's own KV cache", "the bridge needs a growing KV cache"))
    logger.warning("%s", reason)
    core.collective_rpc("kvx_keep_stock")
    return original(core, vllm_config)


def _start_growing(original: Any, core: Any, vllm_config: Any) -> Any:
    global _planning
    parking.use(vllm_config.device_config.device_type)
    orphans.end_with_parent()
    fixed = vllm_config.cache_config.num_gpu_blocks_override
    _planning = True
    try:
        scheduler_config = original(core, vllm_config)
    finally:
        _planning = False
    measurements: list[Measurement] = core.collective_rpc("kvx_measure", args=(fixed,))
    smallest = min(measurement.sizing.num_blocks for measurement in measurements)
    final = min(core.collective_rpc("kvx_agree", args=(smallest,)))
    core.collective_rpc("kvx_extend", args=(final,))
    _adopt(vllm_config, scheduler_config, final)
    return scheduler_config


def plan_capacity(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `get_kv_cache_configs`: the same plan, with a capacity at which every segment starts on a granule.

    It is rounded up: the capacity costs addresses only, and the final count is worked out from memory later.
    """
    configs = original(vllm_config, *args, **kwargs)
    if not _planning or not configs or not configs[0].kv_cache_tensors:
        return configs
    capacity = max(allocation.aligned_capacity(config, GRANULARITY_BYTES) for config in configs)
    cache_config = vllm_config.cache_config
    override = cache_config.num_gpu_blocks_override
    try:
        cache_config.num_gpu_blocks_override = capacity
        return original(vllm_config, *args, **kwargs)
    finally:
        cache_config.num_gpu_blocks_override = override


def update_capacity(original: Any, vllm_config: Any, kv_cache_config: Any) -> None:
    """Around `update_kv_cache_capacity`: says nothing while the count is still the capacity."""
    if not _planning:
        original(vllm_config, kv_cache_config)


def _adopt(vllm_config: Any, scheduler_config: Any, final_blocks: int) -> None:
    """Make the final count true in the engine core: scheduler and block pool are built from these after this."""
    from vllm.v1.engine import core as core_module

    scheduler_config.num_blocks = final_blocks
    vllm_config.cache_config.num_gpu_blocks = final_blocks
    core_module.update_kv_cache_capacity(vllm_config, scheduler_config)
