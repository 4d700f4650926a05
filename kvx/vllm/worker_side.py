"""kvx in vLLM's worker processes: its cache behind `allocate_kv_cache`, the warm-up that measures, the extend.

The hooks are plain wrappers `(original, *args)`; what a worker needs to remember lives in one `WorkerSeam` on it.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..cache import CacheState, ExtensibleKVCache
from ..errors import EngineError
from ..sizing import agreed_count
from ..vmm import Transaction
from . import activation, allocation, parking
from .device import DeviceSide, Measurement
from .device_cpu import CpuSide

logger = logging.getLogger("vllm.kvx")

#: vLLM's name for the cache among the memory that can sleep.
KV_TAG = "kv_cache"

_current: WorkerSeam | None = None


def current_seam() -> WorkerSeam:
    """The seam of the worker in this process.

    Raises:
        EngineError: this process has none, so the plug-in's hooks did not run and nothing here is safe to register.
    """
    if _current is None:
        raise EngineError(
            "the bridge was loaded without kvx's plug-in: vLLM's hooks are absent in this process; install kvx as a "
            "distribution (its entry point vllm.general_plugins) and leave 'kvx' in VLLM_PLUGINS where that is set"
        )
    return _current


class WorkerSeam:
    """One worker's extensible cache, from the plan to the extend."""

    def __init__(self, worker: Any, device: DeviceSide) -> None:
        self.worker = worker
        self.device = device
        self.cache: ExtensibleKVCache | None = None
        self.views: dict[str, torch.Tensor] = {}
        self.kv_cache_config: Any = None
        self.blocks_at_warmup = 0
        self.addresses_at_warmup: tuple[int, ...] = ()
        self.measurement: Measurement | None = None
        self.allocating = False

    def allocate(self, kv_cache_config: Any, layout: Any, kernel_block_sizes: list[int] | None) -> dict[str, Any]:
        """Reserve vLLM's whole plan, commit what warm-up addresses, and view it."""
        driver = self.device.driver()
        table = allocation.segment_table(kv_cache_config, layout.is_block_outermost, driver.granularity_bytes)
        cache = ExtensibleKVCache(driver, table)
        cache.open()
        self.blocks_at_warmup = min(self.device.blocks_for_warmup(kv_cache_config), table.capacity_blocks)
        cache.commit(self.blocks_at_warmup)
        self.views = allocation.create_views(cache.buffer, kv_cache_config, layout, kernel_block_sizes)
        cache.set_views(list(self.views.values()))
        self.cache = cache
        logger.info(
            "kvx: reserved %d blocks (%.2f GiB of addresses), committed %d for warm-up",
            table.capacity_blocks, table.total_bytes / 2**30, self.blocks_at_warmup,
        )  # fmt: skip
        return dict(self.views)

    def extend(self, final_blocks: int) -> None:
        """Grow to the final count, then let vLLM build and register the bridge over the grown cache."""
        cache = self.require_cache()
        assert self.measurement is not None, "the engine core measures before it extends"
        agreed = agreed_count(self.measurement.sizing, final_blocks, cache.table)
        self.measurement = Measurement(agreed, self.measurement.explicit_size)
        logger.info("kvx: %d blocks after warm-up; where the memory went:\n%s", final_blocks, agreed.ledger.table())
        cache.extend_kv_cache(final_blocks)
        parking.use(self.worker.device_config.device_type)
        self.kv_cache_config.num_blocks = final_blocks
        self.worker.cache_config.num_gpu_blocks = final_blocks
        if self.worker.vllm_config.kv_transfer_config is None:
            return
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized

        # The config from before vLLM added KV-sharing layers to it, which a connector must not see.
        ensure_kv_transfer_initialized(self.worker.vllm_config, self.kv_cache_config)
        self.device.register(self.views)

    def vllm_addresses(self) -> tuple[int, ...]:
        """Where vLLM's own tensors of the cache are: what attention reads and captured graphs have in them."""
        return tuple(tensor.data_ptr() for tensor in self.worker.model_runner.kv_caches)

    def report(self, registered_bytes: int) -> dict[str, Any]:
        """The cache's numbers, in plain values: what `kvx verify` checks."""
        cache, measurement = self.require_cache(), self.measurement
        opened = [event.start_s for event in cache.events if event.name == "open"]
        extended = [event.start_s + event.duration_s for event in cache.events if event.name == "extend"]
        addresses = self.vllm_addresses()
        return {
            "blocks_at_warmup": self.blocks_at_warmup,
            "blocks_final": cache.final_blocks,
            "capacity_blocks": cache.capacity_blocks,
            "base_address_unchanged": bool(addresses) and addresses == self.addresses_at_warmup,
            "reserved_bytes": cache.reserved_bytes,
            "committed_bytes": cache.committed_bytes,
            "registered_bytes": registered_bytes,
            "connector_opened_after_extend": bool(opened and extended) and opened[0] >= extended[0],
            "explicit_size": measurement is None or measurement.explicit_size,
            "ledger": [] if measurement is None else measurement.sizing.ledger.as_dicts(),
            "timeline": [[e.name, e.start_s, e.duration_s] for e in cache.events],
            "granularity_bytes": cache.table.granularity_bytes,
            "segments": [[one.offset_bytes, one.block_stride_bytes] for one in cache.table.segments],
        }

    def require_cache(self) -> ExtensibleKVCache:
        """The cache.

        Raises:
            EngineError: vLLM has not allocated it through kvx.
        """
        if self.cache is None:
            raise EngineError("vLLM did not allocate its KV cache through kvx; is another plug-in in its place?")
        return self.cache


# --- hooks -----------------------------------------------------------------------------------------------------------


def construct_cpu_worker(original: Any, worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Around `CPUWorker.__init__`: 0.32 refuses to start there when 0.92 of all memory is not free.

    kvx takes a share of what is free instead, so the fraction is out of the way while the constructor looks at it.
    """
    if not activation.is_asked(vllm_config):
        original(worker, vllm_config, *args, **kwargs)
        return
    global _current
    cache_config = vllm_config.cache_config
    fraction = cache_config.gpu_memory_utilization
    try:
        cache_config.gpu_memory_utilization = 0.0 if cache_config.kv_cache_memory_bytes is None else fraction
        original(worker, vllm_config, *args, **kwargs)
    finally:
        cache_config.gpu_memory_utilization = fraction
    worker.kvx_seam = _current = WorkerSeam(worker, CpuSide(worker))


def init_gpu(original: Any, worker: Any) -> None:
    """Around `Worker.init_device` (CPU workers have their own): the device side is there before memory is asked for."""
    global _current
    if activation.is_asked(worker.vllm_config) and worker.device_config.device_type == "cuda":
        from .device_cuda import CudaSide

        worker.kvx_seam = _current = WorkerSeam(worker, CudaSide(worker))
    original(worker)


def request_memory(original: Any, init_snapshot: Any, cache_config: Any, *args: Any, **kwargs: Any) -> int:
    """Around `request_memory`: without a share from the user, all that is free, where vLLM takes 0.92 of the total."""
    seam = _current
    if seam is None or any(args) or any(kwargs.values()):
        return int(original(init_snapshot, cache_config, *args, **kwargs))
    return seam.device.requested_bytes(init_snapshot.free_memory, init_snapshot.total_memory)


def determine_memory(original: Any, worker: Any) -> int:
    """Around the workers' `determine_available_memory`: the bytes to plan the capacity with."""
    seam = _active_seam(worker)
    if seam is None:
        return int(original(worker))
    return seam.device.capacity_bytes(lambda: original(worker))


def initialize_from_config(original: Any, worker: Any, kv_cache_config: Any) -> None:
    """Around `Worker.initialize_from_config`: vLLM allocates from kvx's reservation and builds no connector yet."""
    seam = _active_seam(worker)
    if seam is None:
        original(worker, kv_cache_config)
        return
    seam.kv_cache_config = copy.deepcopy(kv_cache_config)
    seam.allocating = True
    try:
        original(worker, kv_cache_config)
    finally:
        seam.allocating = False


def ensure_connector(original: Any, vllm_config: Any, kv_cache_config: Any) -> None:
    """Around the worker's `ensure_kv_transfer_initialized`: the bridge waits until the cache has grown."""
    if _current is not None and _current.allocating:
        return
    original(vllm_config, kv_cache_config)


def allocate(
    original: Any, kv_cache_config: Any, device: Any, layout: Any, kernel_block_sizes: list[int] | None = None
) -> Mapping[str, Any]:
    """Around `allocate_kv_cache`. The memory profiler's own small cache is not ours: it comes at another time."""
    if _current is None or not _current.allocating or not kv_cache_config.kv_cache_tensors:
        result: Mapping[str, Any] = original(kv_cache_config, device, layout, kernel_block_sizes)
        return result
    return _current.allocate(kv_cache_config, layout, kernel_block_sizes)


def shut_down(original: Any, worker: Any) -> Any:
    """Around `Worker.shutdown`: the connectors go first, then vLLM's tensors, then the reservation under them."""
    result = original(worker)
    cache = _active_cache(worker)
    if cache is not None:
        cache.close()
    return result


def sleep(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Worker.sleep`: vLLM's sleep backends know only memory that they allocated, so the cache goes first.

    Where vLLM's part fails, vLLM believes itself awake: the cache comes back.
    """
    with Transaction() as transaction:
        if _give_back(worker):
            transaction.callback(_active_cache(worker).wake)
        result = original(worker, *args, **kwargs)
        transaction.commit()
    return result


def discard(original: Any, worker: Any, tags: tuple[str, ...]) -> Any:
    """Around `Worker.discard`: the cache alone goes, where it is named."""
    if KV_TAG in tags:
        _give_back(worker)
    return original(worker, tags)


def wake_up(original: Any, worker: Any, tags: list[str] | None = None) -> Any:
    """Around `Worker.wake_up`: the same blocks at the same addresses, all zeros, and the connectors open again.

    All or nothing, so that a later wake-up can try again: the cache goes first, because vLLM's part cannot be undone,
    and goes back to sleep where that fails. OutOfDeviceMemory: somebody has taken the memory meanwhile.
    """
    cache = _active_cache(worker)
    with Transaction() as transaction:
        if cache is not None and cache.state is CacheState.ASLEEP and (tags is None or KV_TAG in tags):
            # What torch keeps of freed tensors, of reloaded weights for example, is memory that the cache had before.
            gc.collect()
            torch.cuda.empty_cache()
            cache.wake()
            transaction.callback(cache.sleep)
        result = original(worker, tags)
        transaction.commit()
    return result


def _give_back(worker: Any) -> bool:
    cache = _active_cache(worker)
    if cache is None or cache.state is not CacheState.READY:
        return False
    committed_bytes = cache.committed_bytes
    cache.sleep()
    logger.info("kvx: the cache is asleep, %.2f GiB given back", committed_bytes / 2**30)
    return True


def _active_cache(worker: Any) -> Any:
    """The worker's cache, None where vLLM has its own."""
    seam = _active_seam(worker)
    return None if seam is None else seam.cache


# --- called by `core_side` through vLLM's collective_rpc, as methods of the worker -----------------------------------


def kvx_probe(worker: Any) -> activation.Probe:
    """Device and attention backends of this worker."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase)
    backends = {layer.get_attn_backend().get_name() for layer in layers.values()}
    return activation.Probe(worker.device.type, tuple(sorted(backends)))


def kvx_keep_stock(worker: Any) -> None:
    """vLLM's own allocation for this worker."""
    global _current
    current_seam().device.keep_stock()
    worker.kvx_seam = _current = None


def kvx_measure(worker: Any, fixed_blocks: int | None) -> Measurement:
    """Warm up over the real views and measure what is left. On CPU vLLM has no such pass of its own."""
    seam = current_seam()
    seam.measurement = seam.device.measure(seam.require_cache(), seam.kv_cache_config, fixed_blocks)
    seam.addresses_at_warmup = seam.vllm_addresses()
    return seam.measurement


def kvx_agree(worker: Any, blocks: int) -> int:
    """The smallest count of all ranks, where each rank has an engine core of its own (the external launcher)."""
    parallel = worker.vllm_config.parallel_config
    if parallel.distributed_executor_backend != "external_launcher" or parallel.world_size == 1:
        return blocks
    from vllm.distributed.parallel_state import get_world_group

    smallest = torch.tensor([blocks], dtype=torch.int64)
    torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return int(smallest.item())


def kvx_extend(worker: Any, final_blocks: int) -> None:
    """Grow this worker's cache to the count that all ranks agreed on."""
    current_seam().extend(final_blocks)


def _active_seam(worker: Any) -> WorkerSeam | None:
    seam: WorkerSeam | None = getattr(worker, "kvx_seam", None)
    return seam
