"""Every place where kvx stands around a function of vLLM, in one list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import parking
from .hooks import Wrapper


@dataclass(frozen=True)
class Target:
    """`wrapper` is called in the place of `module.name`."""

    module: str
    name: str
    wrapper: Wrapper


def _lazy(module_name: str, function_name: str) -> Wrapper:
    """The function `kvx.vllm.<module_name>.<function_name>`, imported at its first call.

    The plug-in runs in every vLLM process; torch-heavy parts of kvx load only where a hook is reached.
    """

    def call(*args: object, **kwargs: object) -> object:
        from importlib import import_module

        return getattr(import_module(f"{__package__}.{module_name}"), function_name)(*args, **kwargs)

    return call


WORKER_MODULE = "vllm.v1.worker.gpu_worker"


def add_worker_methods(module: Any) -> None:
    """Give vLLM's `Worker` the methods that `core_side` calls by name through vLLM's `collective_rpc`."""
    for name in ("kvx_probe", "kvx_keep_stock", "kvx_measure", "kvx_agree", "kvx_extend"):
        setattr(module.Worker, name, _as_method(_lazy("worker_side", name)))


def _as_method(function: Wrapper) -> Wrapper:
    return lambda worker, *args: function(worker, *args)


TARGETS = (
    Target("vllm.v1.engine.core", "EngineCore._initialize_kv_caches", _lazy("core_side", "initialize_kv_caches")),
    Target("vllm.v1.engine.core", "get_kv_cache_configs", _lazy("core_side", "plan_capacity")),
    Target("vllm.v1.engine.core", "update_kv_cache_capacity", _lazy("core_side", "update_capacity")),
    Target("vllm.v1.worker.cpu_worker", "CPUWorker.__init__", _lazy("worker_side", "construct_cpu_worker")),
    Target("vllm.engine.arg_utils", "EngineArgs.create_engine_config", _lazy("activation", "note_given")),
    Target(WORKER_MODULE, "Worker.init_device", _lazy("worker_side", "init_gpu")),
    Target(WORKER_MODULE, "request_memory", _lazy("worker_side", "request_memory")),
    Target(WORKER_MODULE, "Worker.determine_available_memory", _lazy("worker_side", "determine_memory")),
    Target("vllm.v1.worker.gpu.attn_utils", "allocate_kv_cache", _lazy("worker_side", "allocate")),
    Target(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.determine_available_memory",
        _lazy("worker_side", "determine_memory"),
    ),
    Target(
        "vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", _lazy("worker_side", "initialize_from_config")
    ),
    Target(WORKER_MODULE, "Worker.sleep", _lazy("worker_side", "sleep")),
    Target(WORKER_MODULE, "Worker.wake_up", _lazy("worker_side", "wake_up")),
    Target(WORKER_MODULE, "Worker.discard", _lazy("worker_side", "discard")),
    Target("vllm.v1.worker.gpu_worker", "Worker.shutdown", _lazy("worker_side", "shut_down")),
    Target("vllm.v1.worker.gpu_worker", "ensure_kv_transfer_initialized", _lazy("worker_side", "ensure_connector")),
    Target("vllm.v1.worker.gpu_model_runner", "allocate_kv_cache", _lazy("worker_side", "allocate")),
    Target("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.wait", parking.wait),
)
