"""What is left for the KV cache: kvx's own warm-up pass over the real views, and the measurement around it (CPU).

vLLM's CPU worker warms up before any cache exists, and its `compile_or_warm_up_model` does nothing. So kvx runs the
largest batch itself, over the views that requests will use, and looks at the process's resident memory before, at the
peak and after.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import sizing
from ..cache import ExtensibleKVCache
from ..drivers.host_memory import read_host_memory, resident_bytes
from ..errors import SizingError
from ..sizing import Sizing

logger = logging.getLogger("vllm.kvx")

GRANULARITY_BYTES = 2 << 20
ENGINES_ENVIRONMENT = "KVX_HOST_ENGINES"
"""How many engines share this host's memory, where no engine has an explicit size. 1 by default."""
MARGIN_ENVIRONMENT = "KVX_MARGIN"
"""The margin policy: `default` or `peak`."""
HOLD_ENVIRONMENT = "KVX_INJECT_HOLD_MIB"
"""Set by a test: so many MiB are taken in warm-up and kept, and must be missing from the final count."""

_held: list[torch.Tensor] = []


@dataclass(frozen=True)
class StartPoint:
    """This process and its host before the model is loaded."""

    free_bytes: int
    total_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One rank's own count and ledger, and whether an option fixed the size or limited it."""

    sizing: Sizing
    explicit_size: bool


def start_point() -> StartPoint:
    """Taken before the model is loaded."""
    host = read_host_memory()
    return StartPoint(host.free_bytes, host.total_bytes, resident_bytes())


def blocks_for_warmup(worker: Any, kv_cache_config: Any) -> int:
    """Blocks to commit first: the largest batch's, at most a quarter of the capacity, so that there is room to grow.

    The warm-up pass points every block table row at committed blocks, so fewer are enough where memory is short.
    """
    tokens: int = worker.scheduler_config.max_num_batched_tokens
    needed = 1 + sum(-(-tokens // group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)
    capacity: int = kv_cache_config.num_blocks
    return max(1, min(int(needed), capacity // 4))


def capacity_bytes(vllm_config: Any, start: StartPoint) -> int:
    """Bytes to plan the capacity with: the explicit size, or this rank's share of what was free less its weights."""
    budget = _budget(vllm_config, start)
    weights = 0
    if vllm_config.cache_config.kv_cache_memory_bytes is None:
        weights = max(0, resident_bytes() - start.resident_bytes)
    return budget.nbytes - weights


def warm_up_and_measure(
    worker: Any, cache: ExtensibleKVCache, kv_cache_config: Any, start: StartPoint, fixed_blocks: int | None
) -> Measurement:
    """Run the largest batch over the real views, and work out the final count from what it took.

    With `fixed_blocks` (vLLM's `--num-gpu-blocks-override`) the count is that, whatever was measured.

    Raises:
        SizingError: what is left cannot hold one request of `max_model_len`.
    """
    vllm_config = worker.vllm_config
    budget, request = _budget(vllm_config, start), _longest_request(vllm_config, kv_cache_config)
    before = resident_bytes()
    _reset_peak()
    _hold_back()
    _warm_up(worker.model_runner, cache.committed_blocks)
    after, peak = resident_bytes(), _peak_resident_bytes()
    growth = max(0, after - before)
    used = {"growth of resident memory in warm-up": growth}
    if vllm_config.cache_config.kv_cache_memory_bytes is None:
        # Without an explicit space the budget is all of this engine's memory, so its weights come out of it too.
        # The blocks committed for warm-up are resident as well; they count back into what the cache may take.
        used = {"weights and runtime": max(0, before - start.resident_bytes - cache.committed_bytes), **used}
    if fixed_blocks is not None:
        result = sizing.fixed_count(budget, used, cache.table, request, num_blocks=fixed_blocks)
    else:
        measured = sizing.Measured(used, max(0, peak - after), cache.committed_blocks)
        result = sizing.final_count(budget, measured, cache.table, request, _margin_policy())
    for warning in result.warnings:
        logger.warning("kvx: %s", warning)
    explicit = fixed_blocks is not None or vllm_config.cache_config.kv_cache_memory_bytes is not None
    return Measurement(result, explicit)


def _budget(vllm_config: Any, start: StartPoint) -> sizing.Budget:
    """Every rank of this engine, and every engine that the user declares, has the same share of the host."""
    sharers = _declared_engines() * vllm_config.parallel_config.world_size
    return sizing.host_budget(
        free_bytes=start.free_bytes,
        total_bytes=start.total_bytes,
        cache_space_bytes=vllm_config.cache_config.kv_cache_memory_bytes,
        engines=sharers,
    )


def _longest_request(vllm_config: Any, kv_cache_config: Any) -> sizing.Request:
    """Blocks that one request of `max_model_len` takes over all groups, and vLLM's null block."""
    blocks = 1
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        blocks += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
    return sizing.Request(blocks, vllm_config.model_config.max_model_len)


def _warm_up(runner: Any, committed_blocks: int) -> None:
    """The largest batch with attention over committed blocks, then the sampler. Dummy runs write no KV.

    Sequences are as long as their own share of the batch, so attention costs no more than in the longest prefill.
    """
    from vllm.config import CUDAGraphMode

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
        runner._dummy_sampler_run(last_hidden)
    finally:
        for table in tables:
            table[:] = 0
    runner.input_batch.block_table.commit_block_table(runner.max_num_reqs)


def _hold_back() -> None:
    mebibytes = int(os.environ.get(HOLD_ENVIRONMENT, "0"))
    if mebibytes:
        _held.append(torch.ones(mebibytes << 20, dtype=torch.uint8))
        logger.warning("kvx: holding %d MiB back, because %s says so", mebibytes, HOLD_ENVIRONMENT)


def _declared_engines() -> int:
    text = os.environ.get(ENGINES_ENVIRONMENT, "1")
    if not text.isdigit() or int(text) < 1:
        raise SizingError(f"{ENGINES_ENVIRONMENT} is {text!r}; it needs the number of engines that share this host")
    return int(text)


def _margin_policy() -> sizing.MarginPolicy:
    text = os.environ.get(MARGIN_ENVIRONMENT, sizing.MarginPolicy.DEFAULT.value)
    try:
        return sizing.MarginPolicy(text)
    except ValueError:
        known = ", ".join(policy.value for policy in sizing.MarginPolicy)
        raise SizingError(f"{MARGIN_ENVIRONMENT} is {text!r}; it needs one of {known}") from None


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
