"""The bridge's settings, from `kv_connector_extra_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .. import registry
from ..errors import ConnectorError
from ..handoff import HandoffSettings
from .activation import bridge_configured, settings_of


def from_vllm(vllm_config: Any) -> HandoffSettings:
    """Checked settings. Errors as in `from_options`."""
    # Where vLLM's own traces go, kvx's go as well.
    observed = getattr(vllm_config, "observability_config", None)
    traces = getattr(observed, "otlp_traces_endpoint", None) or ""
    return from_options({"otlp_traces_endpoint": traces, **settings_of(vllm_config)})


def from_options(options: Mapping[str, Any]) -> HandoffSettings:
    """Checked settings from what `kv_connector_extra_config` holds.

    Raises:
        ConnectorError: an option that kvx does not have, or a value of the wrong kind; the message names it.
    """
    given = dict(options)
    secrets = sorted(name for name in given if "secret" in name.lower())
    if secrets:
        raise ConnectorError(
            f"kv_connector_extra_config has {', '.join(secrets)}, and vLLM logs all of it; take it out, and name a file"
            " with the secret in the environment: KVX_SECRET_FILE"
        )
    known = {field.name: field for field in dataclasses.fields(HandoffSettings)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConnectorError(
            f"kv_connector_extra_config has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    if "connectors" in given:
        names = given["connectors"]
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names) or not names:
            raise ConnectorError(f"kv_connector_extra_config.connectors is {names!r}; it needs a list of names")
        given["connectors"] = tuple(names)
    if isinstance(given.get("allowed_hosts"), list):
        given["allowed_hosts"] = tuple(given["allowed_hosts"])
    return HandoffSettings(**given)


def connectors_of(vllm_config: Any) -> tuple[str, ...]:
    """The configured connectors; none where the bridge is not configured. Errors as in `from_vllm`."""
    return from_vllm(vllm_config).connectors if bridge_configured(vllm_config) else ()


def offload_bytes_of(vllm_config: Any) -> int:
    """Host memory that each rank gives to connectors that offload; 0 where there are none. Errors as in `from_vllm`."""
    if not bridge_configured(vllm_config):
        return 0
    found = from_vllm(vllm_config)
    classes = registry.connector_classes(found.connectors)
    return 0 if all(one.capabilities.reaches_processes for one in classes) else found.offload_bytes


def _reaches_engines(connectors: tuple[str, ...]) -> bool:
    """Whether other engines must find our side channel; otherwise each rank may listen anywhere, for its status."""
    return any(one.capabilities.reaches_processes for one in registry.connector_classes(connectors))


def rank_of(vllm_config: Any) -> int:
    """This worker's rank in its engine, over all pipeline stages and tensor parallel slices."""
    rank: int = vllm_config.parallel_config.rank
    return rank


def engine_port(vllm_config: Any) -> int:
    """The side channel port of an engine's first rank; data parallel engines follow one another.

    Raises:
        ConnectorError: several ranks or engines, but no port that the others could be counted from.
    """
    found = from_vllm(vllm_config)
    port = found.side_channel_port
    parallel = vllm_config.parallel_config
    listeners = parallel.world_size * parallel.data_parallel_size
    if port == 0 and listeners > 1 and _reaches_engines(found.connectors):
        raise ConnectorError(f"side_channel_port is 0 with {listeners} ranks; give the first of as many ports")
    if port + listeners > 65536:
        raise ConnectorError(f"side_channel_port {port} leaves no room for {listeners} ranks below 65536")
    index: int = parallel.data_parallel_index
    return port and port + index * int(parallel.world_size)


def for_rank(vllm_config: Any) -> HandoffSettings:
    """This rank's settings: rank r of an engine listens r ports above the engine's first."""
    port = engine_port(vllm_config)
    return dataclasses.replace(from_vllm(vllm_config), side_channel_port=port and port + rank_of(vllm_config))
