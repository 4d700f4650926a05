"""A CPU worker's memory: kvx's own warm-up pass over the real views, and the measurement around it.

vLLM's CPU worker warms up before any cache exists, and its `compile_or_warm_up_model` does nothing. So kvx runs the
largest batch itself, over the views that requests will use, and looks at the process's resident memory before, at the
peak and after.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import registry, sizing
from ..cache import ExtensibleKVCache
from ..drivers.base import Driver
from ..drivers.host_memory import read_host_memory, resident_bytes
from ..drivers.select import driver_for
from ..errors import SizingError
from . import settings
from .device import DeviceSide, Measurement, largest_batch_blocks, longest_request, margin_policy, said

logger = logging.getLogger("vllm.kvx")

ENGINES_ENVIRONMENT = "KVX_HOST_ENGINES"
"""How many engines share this host's memory, where no engine has an explicit size. 1 by default."""
HOLD_ENVIRONMENT = "KVX_INJECT_HOLD_MIB"
"""Set by a test: so many MiB are taken in warm-up and kept, and must be missing from the final count. One number for
each rank, separated by commas; ranks after the last one take none."""

_held: list[torch.Tensor] = []


class CpuSide(DeviceSide):
    """Made before the model is loaded: what is free and resident then is where the budget starts."""

    # Shorter waits make the engine's processes spin for the cores that the copy needs (2 cores: hand-off p50 11 ms with
    # 20 ms, 14 to 19 with 3).
    idle_wait_s = 0.02

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._config = worker.vllm_config
        self._host = read_host_memory()
        self._resident_at_start_bytes = resident_bytes()

    def driver(self) -> Driver:
        return driver_for("cpu", shareable=registry.need_shareable_memory(settings.connectors_of(self._config)))

    def capacity_bytes(self, profile: Any) -> int:
        """The explicit size, or this rank's share of what was free less its weights. vLLM's profile is not asked."""
        if self._worker._should_warm_up_model():
            self._worker.model_runner.warming_up_model()
        if self._is_explicit:
            return self._budget().nbytes
        weights = max(0, resident_bytes() - self._resident_at_start_bytes)
        return self._budget().nbytes - weights - settings.offload_bytes_of(self._config)

    def blocks_for_warmup(self, kv_cache_config: Any) -> int:
        """The largest batch's, at most a quarter of the capacity, so that there is room to grow.

        The warm-up pass points every block table row at committed blocks, so fewer are enough where memory is short.
        """
        capacity: int = kv_cache_config.num_blocks
        return max(1, min(largest_batch_blocks(self._worker, kv_cache_config), capacity // 4))

    def measure(self, cache: ExtensibleKVCache, kv_cache_config: Any, fixed_blocks: int | None) -> Measurement:
        budget, request = self._budget(), longest_request(self._config, kv_cache_config)
        before = resident_bytes()
        _reset_peak()
        _hold_back(self._config.parallel_config.rank)
        _warm_up(self._worker.model_runner, cache.committed_blocks)
        after, peak = resident_bytes(), _peak_resident_bytes()
        used = {"growth of resident memory in warm-up": max(0, after - before)}
        if not self._is_explicit:
            # Without an explicit space the budget is all of this engine's memory, so its weights come out of it too.
            # The blocks committed for warm-up are resident as well; they count back into what the cache may take.
            weights = max(0, before - self._resident_at_start_bytes - cache.committed_bytes)
            used = {"weights and runtime": weights, **used}
            # Host memory to offload to is this engine's as well, and taken after this.
            if offload_bytes := settings.offload_bytes_of(self._config):
                used["host memory to offload to"] = offload_bytes
        if fixed_blocks is not None:
            return Measurement(
                said(sizing.fixed_count(budget, used, cache.table, request, num_blocks=fixed_blocks)), True
            )
        measured = sizing.Measured(used, max(0, peak - after), cache.committed_blocks)
        return Measurement(
            said(sizing.final_count(budget, measured, cache.table, request, margin_policy())), self._is_explicit
        )

    def register(self, views: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().register_kv_caches(views)

    @property
    def _is_explicit(self) -> bool:
        """Whether `VLLM_CPU_KVCACHE_SPACE` or `--kv-cache-memory-bytes` limits the cache (vLLM makes them one)."""
        return self._config.cache_config.kv_cache_memory_bytes is not None

    def _budget(self) -> sizing.Budget:
        """Every rank of this engine, and every engine that the user declares, has the same share of the host."""
        return sizing.host_budget(
            free_bytes=self._host.free_bytes,
            total_bytes=self._host.total_bytes,
            cache_space_bytes=self._config.cache_config.kv_cache_memory_bytes,
            engines=_declared_engines() * self._config.parallel_config.world_size,
        )


def _warm_up(runner: Any, committed_blocks: int) -> None:
    """The largest batch with attention over committed blocks, then the sampler in a pipeline's last stage.

    Dummy runs write no KV. Sequences are as long as their own share of the batch, so attention costs no more than in
    the longest prefill.
    """
    from vllm.config import CUDAGraphMode
    from vllm.distributed.parallel_state import get_pp_group

    num_tokens = runner.max_num_tokens
    share = -(-num_tokens // min(num_tokens, runner.scheduler_config.max_num_seqs))
    longest = min(max(share, runner.cache_config.block_size), runner.max_model_len)

    tables = [table.block_table.np for table in runner.input_batch.block_table.block_tables]
    for table in tables:
        table[:] = (np.arange(table.size, dtype=table.dtype) % committed_blocks).reshape(table.shape)
    try:
        _, last_hidden = runner._dummy_run(
            num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            force_attention=True,
            skip_eplb=True,
            profile_seq_lens=longest,
        )
        if get_pp_group().is_last_rank:
            runner._dummy_sampler_run(last_hidden)
    finally:
        for table in tables:
            table[:] = 0
    runner.input_batch.block_table.commit_block_table(runner.max_num_reqs)


def _hold_back(rank: int) -> None:
    sizes = [int(size) for size in os.environ.get(HOLD_ENVIRONMENT, "0").split(",")]
    mebibytes = sizes[rank] if rank < len(sizes) else 0
    if mebibytes:
        _held.append(torch.ones(mebibytes << 20, dtype=torch.uint8))
        logger.warning("kvx: holding %d MiB back, because %s says so", mebibytes, HOLD_ENVIRONMENT)


def _declared_engines() -> int:
    text = os.environ.get(ENGINES_ENVIRONMENT, "1")
    if not text.isdigit() or int(text) < 1:
        raise SizingError(f"{ENGINES_ENVIRONMENT} is {text!r}; it needs the number of engines that share this host")
    return int(text)


def _reset_peak() -> None:
    """Makes the kernel's high-water mark of resident memory start again (Linux, /proc/PID/clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        logger.warning("kvx: cannot reset the peak of resident memory (%s); the margin takes the whole peak", error)


def _peak_resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()
