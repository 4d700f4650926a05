"""A GPU worker's memory: vLLM profiles, warms up and captures; kvx looks at what is free after all of it.

The budget is what was free before the engine loaded, or the share that the user asked for. vLLM's own estimate of
what warm-up will take is not used: it would be a guess, and the cache grows after the fact.
"""

from __future__ import annotations

import logging
from typing import Any

from .. import sizing
from ..cache import ExtensibleKVCache
from ..drivers.base import Driver
from ..drivers.cuda import CudaDriver
from . import activation
from .device import DeviceSide, Measurement, largest_batch_blocks, longest_request, margin_policy, said

logger = logging.getLogger("vllm.kvx")


class CudaSide(DeviceSide):
    """Made before the device is initialised; vLLM's own snapshot of free memory is taken there."""

    # A step takes a few milliseconds there, and the copy needs none of the engine's cores.
    idle_wait_s = 0.002

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._config = worker.vllm_config
        self._driver: CudaDriver | None = None
        self._graph_bytes = 0
        self._free_after_profile_bytes = 0

    def driver(self) -> Driver:
        if self._driver is None:
            self._driver = CudaDriver(self._worker.device.index or 0)
        return self._driver

    def requested_bytes(self, free_bytes: int, total_bytes: int) -> int:
        """In the place of vLLM's `request_memory`, which refuses to start when the share it asks for is not free."""
        return said(self._budget(free_bytes, total_bytes)).nbytes

    def capacity_bytes(self, profile: Any) -> int:
        """The explicit size; else the budget less what is surely used (weights and what came with them)."""
        profiled = int(profile())
        self._free_after_profile_bytes = self.driver().memory_info().free_bytes
        if self._config.cache_config.kv_cache_memory_bytes:
            return profiled
        requested: int = self._worker.requested_memory
        consumed: int = self._worker.total_consumed
        return requested - consumed

    def blocks_for_warmup(self, kv_cache_config: Any) -> int:
        """V2's warm-up gives every request real blocks of its own, with its lookahead, on top of the batch's tokens."""
        seqs: int = self._worker.scheduler_config.max_num_seqs
        lookahead = self._config.num_speculative_tokens if self._config.speculative_config is not None else 0
        per_request = sum(
            2 + -(-lookahead // int(group.kv_cache_spec.block_size)) for group in kv_cache_config.kv_cache_groups
        )
        self._watch_capture()
        return largest_batch_blocks(self._worker, kv_cache_config) + seqs * per_request

    def measure(self, cache: ExtensibleKVCache, kv_cache_config: Any, fixed_blocks: int | None) -> Measurement:
        import torch

        torch.cuda.synchronize()
        snapshot, request = self._worker.init_snapshot, longest_request(self._config, kv_cache_config)
        budget = self._budget(snapshot.free_memory, snapshot.total_memory)
        free = self.driver().memory_info().free_bytes
        taken = max(0, snapshot.free_memory - free - cache.committed_bytes)
        used = self._named(taken, free + cache.committed_bytes)
        explicit_bytes = self._config.cache_config.kv_cache_memory_bytes
        if fixed_blocks is not None:
            found = sizing.fixed_count(budget, used, cache.table, request, num_blocks=fixed_blocks)
        elif explicit_bytes:
            found = sizing.fixed_count(budget, used, cache.table, request, kv_bytes=explicit_bytes)
        else:
            measured = sizing.Measured(used, self._transient_peak_bytes(), cache.committed_blocks)
            found = sizing.final_count(budget, measured, cache.table, request, margin_policy())
        return Measurement(said(found), fixed_blocks is not None or bool(explicit_bytes))

    def keep_stock(self) -> None:
        """vLLM's own cache is not extensible, so its own share holds again."""
        share: float = self._config.cache_config.gpu_memory_utilization
        self._worker.requested_memory = int(self._worker.init_snapshot.total_memory * share)

    def register(self, views: Any) -> None:
        """V1 registers as on CPU; V2 reaches its connector through an object that it made before there was one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

        if self._worker.use_v2_model_runner:
            from vllm.v1.worker.gpu.kv_connector import get_kv_connector

            self._worker.model_runner.kv_connector = get_kv_connector(self._config, views)
            return
        get_kv_transfer_group().register_kv_caches(views)
        get_kv_transfer_group().set_host_xfer_buffer_ops(copy_kv_blocks)

    def _budget(self, free_bytes: int, total_bytes: int) -> sizing.Budget:
        return sizing.gpu_budget(
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            utilization=activation.explicit_utilization(self._config),
            other_processes=_other_processes(self.driver()),
        )

    def _named(self, taken: int, free: int) -> dict[str, int]:
        """What the engine has taken since before it loaded, as far as it can be told apart.

        What came after vLLM's profile is what an estimate from that profile would have missed.
        """
        weights = min(taken, int(getattr(self._worker.model_runner, "model_memory_usage", 0)))
        graphs = min(taken - weights, self._graph_bytes)
        rest = taken - weights - graphs
        late = min(rest, max(0, self._free_after_profile_bytes - free - graphs))
        return {
            "weights": weights,
            "captured graphs": graphs,
            "workspaces that came after profiling": late,
            "context, workspaces and what torch keeps": rest - late,
        }

    def _transient_peak_bytes(self) -> int:
        from vllm import envs

        peak = int(getattr(self._worker, "peak_activation_memory", 0))
        if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            peak -= int(getattr(self._worker, "cudagraph_memory_estimate", 0))
        return max(0, peak)

    def _watch_capture(self) -> None:
        """Remember what graph capture says that it took, for the ledger."""
        runner = self._worker.model_runner
        capture = runner.capture_model

        def watched(*args: Any, **kwargs: Any) -> Any:
            taken = capture(*args, **kwargs)
            self._graph_bytes = int(taken)
            return taken

        runner.capture_model = watched


def _other_processes(driver: Driver) -> int:
    """Processes besides this one that hold memory of the device; 0 where NVML is not there to ask."""
    try:
        import pynvml
    except ImportError:
        logger.warning("kvx: nvidia-ml-py is not installed: other processes on the device go unnoticed")
        return 0
    import torch

    # By its own name: NVML counts all devices, torch those of CUDA_VISIBLE_DEVICES.
    name = f"GPU-{torch.cuda.get_device_properties(driver.device).uuid}"
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        found = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError as error:  # a slice of a GPU (MIG) has another kind of name
        logger.warning("kvx: NVML cannot say who else uses device %s: %s", name, error)
        return 0
    finally:
        pynvml.nvmlShutdown()
    # In a container NVML gives the host's numbers for processes: then one of them is this one.
    return len(found) - 1 if found else 0
