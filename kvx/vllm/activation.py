"""Whether kvx is asked for, and whether this engine can have the extensible cache. Reads vLLM's configuration only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..sizing import STOCK_UTILIZATION

BRIDGE = "KvxConnector"
SWITCH = "kvx"
UTILIZATION_ENVIRONMENT = "KVX_UTILIZATION_GIVEN"
POLICY_ENVIRONMENT = "KVX_FAILURE_POLICY_GIVEN"
STOCK_FAILURE_POLICY = "fail"

#: Attention backends that keep no state sized by the whole cache, so that the cache may grow under them, each with the
#: cache types that this holds for: quantised ones may come with scales for every token of the cache.
_PLAIN = frozenset({"auto", "float32", "float16", "bfloat16"})
_FP8 = _PLAIN | {"fp8", "fp8_e4m3", "fp8_e5m2"}
GROWABLE = {
    "CPU_ATTN": _FP8,
    "CPU_MLA": _PLAIN,
    "FLASH_ATTN": _FP8,
    "FLASHINFER": _FP8,
    "TRITON_ATTN": _PLAIN,
    "FLASHMLA": _PLAIN,
    "FLASH_ATTN_MLA": _PLAIN,
    "TRITON_MLA": _PLAIN,
    "MAMBA2_ATTN": _PLAIN,
}


@dataclass(frozen=True)
class Probe:
    """What a worker says of itself before its cache is planned."""

    device_type: str
    backends: tuple[str, ...]


def bridge_configured(vllm_config: Any) -> bool:
    """Whether vLLM's `--kv-transfer-config` names the bridge."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == BRIDGE


def is_asked(vllm_config: Any) -> bool:
    """kvx is active only when asked: the bridge is configured, or `--additional-config` holds `"kvx": {}`."""
    additional = vllm_config.additional_config
    return bridge_configured(vllm_config) or (isinstance(additional, Mapping) and SWITCH in additional)


def settings_of(vllm_config: Any) -> Mapping[str, Any]:
    """The bridge's `kv_connector_extra_config`; empty where the bridge is not configured."""
    if not bridge_configured(vllm_config):
        return {}
    return vllm_config.kv_transfer_config.kv_connector_extra_config or {}


def note_given(original: Any, arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `EngineArgs.create_engine_config`, the last place where what the user gave can be told from defaults.

    vLLM's default share is a number like any other, so a share counts as given when it is not that number, or when the
    command line names the option; its default failure policy likewise. Engine processes inherit what is found here
    through the environment.
    """
    given = arguments.gpu_memory_utilization != STOCK_UTILIZATION or any(
        word.split("=")[0].replace("_", "-") == "--gpu-memory-utilization" for word in sys.argv
    )
    os.environ[UTILIZATION_ENVIRONMENT] = "1" if given else "0"
    os.environ[POLICY_ENVIRONMENT] = "1" if any("kv_load_failure_policy" in word for word in sys.argv) else "0"
    return original(arguments, *args, **kwargs)


def explicit_utilization(vllm_config: Any) -> float | None:
    """The share of a GPU's memory that the user gave; None where nobody gave one."""
    share: float = vllm_config.cache_config.gpu_memory_utilization
    return share if os.environ.get(UTILIZATION_ENVIRONMENT) == "1" else None


def set_failure_policy(vllm_config: Any, policy: str) -> str | None:
    """Make vLLM's own policy kvx's, which the scheduler reads when it is built; a sentence when the user gave another.

    vLLM's default is `fail`, which only the command line tells from one that was given.
    """
    transfer = vllm_config.kv_transfer_config
    theirs = transfer.kv_load_failure_policy
    was_given = theirs != STOCK_FAILURE_POLICY or os.environ.get(POLICY_ENVIRONMENT) == "1"
    transfer.kv_load_failure_policy = policy
    if theirs == policy or not was_given:
        return None
    return (
        f"kvx: kv_load_failure_policy is {theirs!r} but kvx's failure_policy is {policy!r}, which counts; "
        "set failure_policy in kv_connector_extra_config."
    )


def reason_for_stock(vllm_config: Any, probes: Iterable[Probe]) -> str | None:
    """One sentence when this engine must keep vLLM's own allocation, None when the cache may grow."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != BRIDGE:
        return (
            f"kvx keeps vLLM's own KV cache: the connector {transfer.kv_connector} registers the whole allocation, "
            f"which a growing cache does not have; use {BRIDGE} to have both."
        )
    if vllm_config.parallel_config.enable_elastic_ep or os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"):
        return "kvx keeps vLLM's own KV cache: elastic expert parallelism sizes it before warm-up."
    if os.environ.get("VLLM_ENABLE_STARTUP_PLAN"):
        return "kvx keeps vLLM's own KV cache: VLLM_ENABLE_STARTUP_PLAN fixes its size before warm-up."
    for probe in probes:
        if probe.device_type not in ("cpu", "cuda"):
            return f"kvx keeps vLLM's own KV cache: it has no memory driver for the device {probe.device_type!r} yet."
        if not probe.backends:
            return "kvx keeps vLLM's own KV cache: this model has no attention layer whose cache could grow."
        cache_dtype = vllm_config.cache_config.cache_dtype
        unknown = [name for name in probe.backends if cache_dtype not in GROWABLE.get(name, ())]
        if unknown:
            return (
                f"kvx keeps vLLM's own KV cache: the attention backend {', '.join(unknown)} with a {cache_dtype} cache "
                f"is not known to work over a cache that grows (known backends: {', '.join(sorted(GROWABLE))})."
            )
    return None
