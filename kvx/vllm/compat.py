"""Which vLLM versions kvx knows, and the check of every function of vLLM that it touches.

The recorded signatures (`signatures.json`) are made from vLLM's sources by `python -m kvx.vllm.compat DIRECTORY`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import EngineError


@dataclass(frozen=True)
class KnownVersion:
    """One vLLM release that kvx knows; `shown` says what was run, and where.

    `proven`: engines with a growing cache and pairs answered as stock ones did, with digests and negative controls.
    """

    release: str
    proven: bool
    shown: str


KNOWN = (
    KnownVersion("0.32", True, "on CPU: the whole test suite"),
    KnownVersion("0.33", True, "on H200s: memory, pairs on one and two GPUs, unequal ranks; no faults"),
)

#: Every function of vLLM that the seam wraps, calls, overrides or counts on, and every field that it sets.
TOUCHED = (
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    "vllm.v1.engine.core:get_kv_cache_configs",
    "vllm.v1.engine.core:update_kv_cache_capacity",
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
    "vllm.v1.worker.cpu_worker:CPUWorker.__init__",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
    "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
    "vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.warming_up_model",
    "vllm.v1.worker.block_table:MultiGroupBlockTable.commit_block_table",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache",
    "vllm.v1.worker.gpu_model_runner:allocate_kv_cache",
    "vllm.v1.kv_cache_interface:create_kv_cache_views",
    "vllm.v1.worker.gpu_worker:Worker.init_device",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
    "vllm.v1.worker.gpu_worker:Worker.shutdown",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    "vllm.v1.worker.gpu_worker:Worker.discard",
    "vllm.v1.worker.gpu_worker:request_memory",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "vllm.v1.worker.gpu.attn_utils:allocate_kv_cache",
    "vllm.v1.worker.gpu.kv_connector:get_kv_connector",
    "vllm.v1.worker.gpu_worker:ensure_kv_transfer_initialized",
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
    "vllm.distributed.kv_transfer:get_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
    "vllm.distributed.kv_transfer.kv_connector.utils:copy_kv_blocks",
    "vllm.distributed.parallel_state:get_pp_group",
    "vllm.distributed.parallel_state:get_world_group",
    "vllm.config:get_layers_from_vllm_config",
    "vllm.v1.kv_cache_interface:KVCacheConfig.select_transfer_block_ids",
    "vllm.v1.kv_cache_interface:KVCacheSpec.max_memory_usage_bytes",
    "vllm.v1.kv_cache_interface:MambaSpec.shapes",
    "vllm.v1.kv_cache_interface:MambaSpec.dtypes",
    "vllm.v1.kv_cache_interface:MambaSpec.mamba_type",
    "vllm.v1.kv_cache_interface:MambaSpec.num_speculative_blocks",
    "vllm.v1.kv_cache_interface:MambaSpec.tp_replicated",
    "vllm.v1.request:Request.get_skip_reading_prefix_cache",
    "vllm.config:ModelConfig.get_total_num_kv_heads",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.create_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.__init__",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.register_kv_caches",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.set_host_xfer_buffer_ops",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.wait_for_layer_load",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.save_kv_layer",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.wait_for_save",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.request_finished",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.shutdown",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_connector_metadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.start_load_kv",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_handshake_metadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.set_xfer_handshake_metadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_transfer_results",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.on_new_request",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_num_new_matched_tokens",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_state_after_alloc",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_connector_output",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_loaded_kv_cache_group_ids",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.request_finished_all_groups",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_gpu_block_pool",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_block_frees",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_push_work",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.reset_cache",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_worker_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_kv_connector_stats",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_kv_connector_stats",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_prom_metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats.to_dict",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats.reset",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats.aggregate",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats.reduce",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats.is_empty",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics.__init__",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics.observe",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata.aggregate",
    "vllm.v1.core.block_pool:BlockPool.touch",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
    "vllm.v1.core.sched.output:KVConnectorBlockState.get_block_ids",
    "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving",
    "vllm.config.kv_transfer:KVTransferConfig.kv_load_failure_policy",
    "vllm.config.observability:ObservabilityConfig.otlp_traces_endpoint",
)
#: What is recorded of a field of one of vLLM's configurations.
FIELD = "field"


def release_of(version: str) -> str:
    """`"0.32.0+cpu"` -> `"0.32"`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_version(version: str) -> KnownVersion:
    """The known release that `version` belongs to.

    Raises:
        EngineError: kvx does not know this vLLM; the sentence names the ones it knows.
    """
    known = {entry.release: entry for entry in KNOWN}
    found = known.get(release_of(version))
    if found is None:
        raise EngineError(f"kvx does not know vLLM {version}; it knows {', '.join(known)}: install one of these.")
    return found


def recorded_signatures() -> Mapping[str, Mapping[str, str]]:
    """Release -> touched function -> its parameters, as recorded from vLLM's sources."""
    text = resources.files(__package__).joinpath("signatures.json").read_text(encoding="utf-8")
    recorded: Mapping[str, Mapping[str, str]] = json.loads(text)
    return recorded


def touched_on(device_type: str) -> tuple[str, ...]:
    """The touched functions of one kind of device: importing a CPU worker changes torch in a GPU process."""
    other = "vllm.v1.worker.gpu." if device_type == "cpu" else "vllm.v1.worker.cpu_"
    return tuple(target for target in TOUCHED if not target.startswith(other))


def check_seam(version: str, device_type: str) -> KnownVersion:
    """Check the running vLLM's version, and every touched function by name and signature.

    Raises:
        EngineError: an unknown vLLM, or one whose functions are not the recorded ones (each is named).
    """
    known = check_version(version)
    recorded = recorded_signatures()[known.release]
    differing = [
        f"{target}({found}) instead of ({recorded.get(target)})"
        for target in touched_on(device_type)
        if (found := live_signature(target)) != recorded.get(target)
    ]
    if differing:
        raise EngineError(
            f"this vLLM {version} is not the {known.release} that kvx was made for: it has {'; '.join(differing)}. "
            "Install an unmodified release."
        )
    return known


def live_signature(target: str) -> str | None:
    """Parameters of a touched function in this process, None where it does not exist."""
    module_name, _, qualified = target.partition(":")
    found: object = importlib.import_module(module_name)
    for part in qualified.split("."):
        if part in getattr(found, "__dataclass_fields__", ()):
            return FIELD
        found = getattr(found, part, None)
        if found is None:
            return None
    function = inspect.unwrap(found)  # type: ignore[arg-type]
    function = getattr(function, "__func__", function)
    return ", ".join(_spell(parameter) for parameter in inspect.signature(function).parameters.values())


def _spell(parameter: inspect.Parameter) -> str:
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    keyword_only = "!" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    default = "=" if parameter.default is not inspect.Parameter.empty else ""
    return stars.get(parameter.kind, "") + keyword_only + parameter.name + default


def source_signature(root: Path, target: str) -> str | None:
    """The same, read from the sources below `root` (the folder that holds `vllm/`) without importing them."""
    module_name, _, qualified = target.partition(":")
    path = root / module_name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    found: ast.stmt | None = None
    for part in qualified.split("."):
        found = next((n for n in scope if _name_of(n) == part), None)
        if found is None:
            package = module_name if path.name == "__init__.py" else module_name.rpartition(".")[0]
            home = _imported_from(scope, part, package)
            return None if home is None else source_signature(root, f"{home}:{qualified}")
        if isinstance(found, ast.AnnAssign):
            return FIELD
        scope = found.body if isinstance(found, ast.ClassDef) else []
    return _spell_arguments(found.args) if isinstance(found, ast.FunctionDef) else None


def _name_of(node: ast.stmt) -> str | None:
    """Of a class, a function or an annotated field."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return node.name if isinstance(node, ast.ClassDef | ast.FunctionDef) else None


def _imported_from(scope: Iterable[ast.stmt], name: str, package: str) -> str | None:
    """The module that a module-level `from module import name` in `package` names."""
    for node in scope:
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            relative = "." * node.level + (node.module or "")
            return importlib.util.resolve_name(relative, package)
    return None


def _spell_arguments(arguments: ast.arguments) -> str:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    words = [a.arg + ("=" if i >= first_default else "") for i, a in enumerate(positional)]
    if arguments.vararg is not None:
        words.append("*" + arguments.vararg.arg)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        words.append("!" + argument.arg + ("=" if default is not None else ""))
    if arguments.kwarg is not None:
        words.append("**" + arguments.kwarg.arg)
    return ", ".join(words)


def record(roots: Iterable[Path]) -> dict[str, dict[str, str | None]]:
    """Signatures of the vLLM sources below each root, keyed by release."""
    recorded = {}
    for root in roots:
        version_file = (root / "vllm" / "_version.py").read_text(encoding="utf-8")
        version = next(line.split("'")[1] for line in version_file.splitlines() if line.startswith("__version__ ="))
        recorded[release_of(version)] = {target: source_signature(root, target) for target in TOUCHED}
    return recorded


if __name__ == "__main__":
    sys.stdout.write(json.dumps(record(map(Path, sys.argv[1:])), indent=1, sort_keys=True) + "\n")
