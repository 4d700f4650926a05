"""The engine settings of a run: a stock baseline, a kvx pair, and a pair with vLLM's own NixlConnector."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvx.engine_settings import EngineSettings, bridge
from kvx.errors import EngineError
from kvx.servers import Server, Servers, free_ports, free_run, require_free_port, share_cores
from kvx.verify.places import DECODE, HOST, PREFILL, Place

SINGLE = "single"
BASELINE_SPACE_GIB = 1


# vLLM's option that says how large a GPU's cache is, so that nothing is measured. (`--num-gpu-blocks-override` says so
# too, but vLLM profiles all the same.)
GPU_SIZE = "--kv-cache-memory-bytes"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """In what the engines of a pair may differ: tensor parallel ranks, and tokens of a block where given."""

    tp_size: int = 1
    block_size_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all engines of a run share. `first_port` 0: free ports are chosen. `arguments` go to every vLLM as they are.

    `kv_space_gib` is for engines on a CPU; GPU engines have their share of the device by `arguments`, and run on the
    first one unless `gpus` names those of prefill and decode. `offloading`: those of the connectors that reach no other
    process; `small_blocks`: the cache of the engine that offloads most. `places`: where prefill and decode run; one
    without a place, on this machine's loopback. `shapes`: of prefill and decode, where they differ from each other or
    from the baseline, which has one rank. `options`: more of `kv_connector_extra_config`.
    """

    model: Path
    connectors: tuple[str, ...] = ("nixl",)
    offloading: tuple[str, ...] = ()
    offload_bytes: int | None = None
    offload_eviction: str = "lru"
    small_blocks: int | None = None
    dtype: str = "float32"
    block_size_tokens: int = 128
    max_model_len_tokens: int = 2048
    max_num_seqs: int = 8
    kv_space_gib: int | None = 1
    explicit_blocks: int | None = None
    layout: str | None = None
    inject: str | None = None
    device: str = "cpu"
    eager: bool = True
    arguments: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    first_port: int = 0
    places: Mapping[str, Place] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, role: str) -> Shape:
        return self.shapes.get(role, Shape())

    def place(self, role: str) -> Place:
        return self.places.get(role, Place())

    @property
    def measures(self) -> bool:
        """Each engine measures what is free, so nobody else may be taking some of that meanwhile."""
        if self.device == "cpu":
            return self.kv_space_gib is None
        return not any(word.split("=")[0] == GPU_SIZE for word in self.arguments)

    @property
    def start_one_by_one(self) -> bool:
        """The engines of a pair, unless each has a GPU of its own to measure."""
        return self.measures and len(set(self.gpus)) < 2

    @property
    def hands_off(self) -> bool:
        """Whether there are connectors between engines, and so a pair; otherwise one engine does everything."""
        return set(self.connectors) != set(self.offloading)

    def described(self) -> dict[str, Any]:
        """All that somebody needs who repeats the run; ports and the model's folder are the machine's own."""
        return {
            "model": self.model.name,
            "connectors": list(self.connectors),
            "offload_bytes": self.offload_bytes,
            "offload_eviction": self.offload_eviction,
            "small_blocks": self.small_blocks,
            "device": self.device,
            "dtype": self.dtype,
            "block_size_tokens": self.block_size_tokens,
            "max_model_len_tokens": self.max_model_len_tokens,
            "max_num_seqs": self.max_num_seqs,
            "kv_space_gib": self.kv_space_gib,
            "explicit_blocks": self.explicit_blocks,
            "layout": self.layout,
            "eager": self.eager,
            "arguments": list(self.arguments),
            "gpus": list(self.gpus),
            "options": dict(self.options),
            "shapes": {role: asdict(shape) for role, shape in self.shapes.items()},
            "places": {role: place.described() for role, place in self.places.items()},
            "inject": self.inject,
        }


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, and the side channel port of each one's first rank."""

    prefill: EngineSettings
    decode: EngineSettings
    prefill_side_port: int
    decode_side_port: int

    @property
    def engines(self) -> tuple[EngineSettings, EngineSettings]:
        return self.prefill, self.decode


def require_ports(run: RunSettings) -> None:
    """Trigger of EngineError: one of the ports that the run was told to use is taken."""
    _pair_ports(run)


def baseline(run: RunSettings) -> EngineSettings:
    """One stock server without any plug-in, on as many cores as each engine of a pair has.

    It always has an explicit cache: left alone, vLLM on CPU takes 0.92 of the host's memory or does not start.
    """
    return replace(
        _engine(run, "baseline", _ports(run, 1)[0]),
        kv_space_gib=run.kv_space_gib or BASELINE_SPACE_GIB,
        cores=share_cores(2)[0],
        environment={**_layout_environment(run), **_gpu_environment(run), "VLLM_PLUGINS": ""},
    )


def kvx_pair(run: RunSettings, *, digests: bool, environment: dict[str, str] | None = None) -> Pair:
    """A prefill/decode pair with the plug-in and the bridge; `digests` of everything that is moved, or of nothing."""
    ports = _pair_ports(run)
    engines = []
    for role, port, side_port, cores in zip((PREFILL, DECODE), ports[:2], ports[2:], share_cores(2), strict=True):
        engine = _kvx_engine(run, role, port, side_port, digests=digests)
        if engine.tp_size > 1:
            cores = share_cores(1)[0]
        shared = {**engine.environment, **_gpu_environment(run, role), **(environment or {})}
        engines.append(replace(engine, cores=cores, environment=shared))
    # Prefill writes the most blocks; decode keeps a cache that its hand-offs fit.
    prefill = replace(engines[0], explicit_blocks=run.small_blocks or run.explicit_blocks)
    return Pair(prefill, engines[1], ports[2], ports[3])


def kvx_single(run: RunSettings, *, digests: bool) -> tuple[EngineSettings, int]:
    """One engine with the plug-in and the bridge, on as many cores as the baseline; and its side channel port."""
    port, side_port = _ports(run, 2)
    engine = _kvx_engine(run, SINGLE, port, side_port, digests=digests)
    environment = {**engine.environment, **_gpu_environment(run)}
    small = run.small_blocks or run.explicit_blocks
    return replace(engine, cores=share_cores(2)[0], explicit_blocks=small, environment=environment), side_port


def _kvx_engine(run: RunSettings, role: str, port: int, side_port: int, *, digests: bool) -> EngineSettings:
    place = run.place(role)
    extra: dict[str, Any] = {"connectors": list(run.connectors), "side_channel_host": place.side_channel_host}
    extra |= {"side_channel_port": side_port, "verify": "all" if digests else "off", **run.options}
    if run.inject is not None:
        extra["inject"] = run.inject
    if run.offload_bytes is not None:
        extra |= {"offload_bytes": run.offload_bytes, "offload_eviction": run.offload_eviction}
    environment = {
        "VLLM_PLUGINS": "kvx",
        "KVX_HOST_ENGINES": os.environ.get("KVX_HOST_ENGINES", "2"),
        **_layout_environment(run),
        **place.environment,
    }
    shape = run.shape(role)
    engine = replace(_engine(run, role, port), host=place.host, prefix=place.prefix, one_host=not run.places)
    engine = replace(engine, tp_size=shape.tp_size, block_size_tokens=shape.block_size_tokens or run.block_size_tokens)
    return replace(engine, kv_transfer=bridge(_engine_id(role), extra), environment=environment)


def stock_pair(run: RunSettings, *, environment: dict[str, str] | None = None) -> Pair:
    """A prefill/decode pair with vLLM's own NixlConnector on vLLM's own cache. The plug-in only times hand-offs."""
    ports = _ports(run, 4)
    engines = []
    for role, port, side_port, cores in zip((PREFILL, DECODE), ports[:2], ports[2:], share_cores(2), strict=True):
        variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        variables |= {"VLLM_PLUGINS": "kvx", **_gpu_environment(run, role), **(environment or {})}
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": _engine_id(role)}
        engine = _engine(run, f"stock-{role}", port)
        engines.append(replace(engine, cores=cores, kv_transfer=transfer, environment=variables))
    return Pair(engines[0], engines[1], ports[2], ports[3])


def start_pair(
    run: RunSettings, servers: Servers, pair: Pair, waiting: Callable[[Server, float], None]
) -> tuple[Server, Server]:
    """The prefill and the decode server, both healthy. Triggers of EngineError: as `Servers.wait_healthy`."""
    prefill = servers.start(pair.prefill)
    if run.start_one_by_one:
        servers.wait_healthy(waiting=waiting, only=(prefill,))
    decode = servers.start(pair.decode)
    servers.wait_healthy(waiting=waiting, only=(prefill, decode))
    return prefill, decode


def start_pairs(
    run: RunSettings, servers: Servers, pairs: Sequence[Pair], waiting: Callable[[Server, float], None]
) -> list[tuple[Server, Server]]:
    """Several pairs; on a GPU whose engines measure nothing all at once: it has cores enough, and starts are long."""
    if run.device == "cpu" or run.measures:
        return [start_pair(run, servers, pair, waiting) for pair in pairs]
    started = [(servers.start(pair.prefill), servers.start(pair.decode)) for pair in pairs]
    servers.wait_healthy(waiting=waiting, only=tuple(server for pair in started for server in pair))
    return started


def _engine(run: RunSettings, name: str, port: int) -> EngineSettings:
    return EngineSettings(
        name=name,
        model=run.model,
        port=port,
        host=HOST,
        dtype=run.dtype,
        block_size_tokens=run.block_size_tokens,
        max_model_len_tokens=run.max_model_len_tokens,
        max_num_seqs=run.max_num_seqs,
        explicit_blocks=run.explicit_blocks,
        kv_space_gib=run.kv_space_gib,
        device=run.device,
        eager=run.eager,
        arguments=run.arguments,
    )


def _engine_id(role: str) -> str:
    return f"{role}-{uuid.uuid4().hex[:8]}"


def _layout_environment(run: RunSettings) -> dict[str, str]:
    return {} if run.layout is None else {"VLLM_KV_CACHE_LAYOUT": run.layout}


def _gpu_environment(run: RunSettings, role: str = PREFILL) -> dict[str, str]:
    """An engine computes on the first GPU that it sees. It sees the other one too, whose memory it may map."""
    if not run.gpus:
        return {}
    own = run.gpus[-1] if role == DECODE else run.gpus[0]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys([own, *run.gpus]))}


def _pair_ports(run: RunSettings) -> Sequence[int]:
    """Two for HTTP, and the first side channel port of either engine, which has as many as it has ranks."""
    ranks = [run.shape(role).tp_size for role in (PREFILL, DECODE)]
    if run.first_port:
        ports = _ports(run, 2 + sum(ranks))
        return [*ports[:3], ports[2] + ranks[0]]
    taken: set[int] = set()
    return [free_run(count, taken) for count in (1, 1, *ranks)]


def _ports(run: RunSettings, count: int) -> Sequence[int]:
    """Ports that are free now, else EngineError naming the first that is not."""
    if run.first_port == 0:
        return free_ports(count)
    ports = range(run.first_port, run.first_port + count)
    if ports[-1] > 65535:
        raise EngineError(f"port {run.first_port} leaves no room for {count} ports below 65536; give a lower one")
    for port in ports:
        require_free_port(HOST, port)
    return ports
