"""Whether kvx is asked for, and whether this engine can have the extensible cache. Reads vLLM's configuration only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BRIDGE = "KvxConnector"
SWITCH = "kvx"

#: Attention backends that keep no state sized by the whole cache, so that the cache may grow under them.
GROWABLE_BACKENDS = frozenset(
    {"CPU_ATTN", "CPU_MLA", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLASHMLA", "TRITON_MLA", "FLASH_ATTN_MLA"}
)


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


def reason_for_stock(vllm_config: Any, probes: Iterable[Probe]) -> str | None:
    """One sentence when this engine must keep vLLM's own allocation, None when the cache may grow."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != BRIDGE:
        return (
            f"kvx keeps vLLM's own KV cache: the connector {transfer.kv_connector} registers the whole allocation, "
            f"which a growing cache does not have; use {BRIDGE} to have both."
        )
    if os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"):
        return "kvx keeps vLLM's own KV cache: elastic expert parallelism sizes it before warm-up."
    if os.environ.get("VLLM_ENABLE_STARTUP_PLAN"):
        return "kvx keeps vLLM's own KV cache: VLLM_ENABLE_STARTUP_PLAN fixes its size before warm-up."
    for probe in probes:
        if probe.device_type != "cpu":
            return f"kvx keeps vLLM's own KV cache: it has no memory driver for the device {probe.device_type!r} yet."
        unknown = sorted(set(probe.backends) - GROWABLE_BACKENDS)
        if unknown:
            return (
                f"kvx keeps vLLM's own KV cache: the attention backend {', '.join(unknown)} is not known to work over "
                f"a cache that grows (known: {', '.join(sorted(GROWABLE_BACKENDS))})."
            )
    return None
