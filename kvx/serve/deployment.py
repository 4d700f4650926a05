"""From the options of `kvx serve` to the settings of its servers. It looks at ports and devices, and starts nothing."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvx.engine_settings import EngineSettings, bridge
from kvx.errors import EngineError
from kvx.layout import KVCacheLayout, require_block_compact
from kvx.registry import connector_classes
from kvx.secret import FILE as SECRET_FILE
from kvx.serve import router as routers
from kvx.serve.devices import deal_out, visible_devices
from kvx.serve.options import ServeOptions
from kvx.serve.ports import LOOPBACK, Ports
from kvx.serve.router import RouterSettings
from kvx.serve.words import api_key, last_value, require_undecided, world_size
from kvx.servers import require_known_vllm, share_cores
from kvx.verify.model import MODEL_NAME, default_model, default_model_folder, require_model_folder

PREFILL, DECODE = "prefill", "decode"
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
# Clients first lose the router, then decode its readers, then prefill, which they read from.
STOP_ORDER = {DECODE: 1, PREFILL: 2}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
GPU_SHARE = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")


@dataclass(frozen=True)
class Member:
    """One engine of a deployment. `devices`: the GPUs it computes on; on a CPU, none."""

    role: str
    engine: EngineSettings
    side_port: int
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.engine.name


@dataclass(frozen=True)
class Deployment:
    """Engines, and the router where there is one. `elsewhere`: of other machines, so only to be printed."""

    members: tuple[Member, ...]
    router: RouterSettings | None
    served_model_name: str
    elsewhere: bool = False

    def waves(self) -> list[list[Member]]:
        """Engines in their order of start: those of one wave start together, since they share no device.

        Each engine measures what is free, so nobody else may be taking some of the same memory meanwhile.
        """
        waves: list[list[Member]] = []
        for member in self.members:
            for wave in waves:
                if not any(_share(member, other) for other in wave):
                    wave.append(member)
                    break
            else:
                waves.append([member])
        return waves


def plan(options: ServeOptions, *, only_printed: bool = False) -> Deployment:
    """The deployment that the options ask for. `only_printed`: nothing is started, so less has to be there.

    Triggers of EngineError: no known vLLM, no model, a port that is taken, a router that is wanted but not installed,
    engines that share a GPU without a size, hosts elsewhere without what protects them. LayoutError: a layout that
    connectors cannot move. ConnectorError: a connector that is not known or not installed here.
    """
    elsewhere = bool(options.prefill_hosts)
    if elsewhere and not only_printed:
        raise EngineError("engines on other machines are not started from here; add --dry-run to see their commands")
    if elsewhere:
        _require_protection(options)
    device = require_vllm(options.device, only_printed=only_printed)
    if not only_printed:
        connector_classes(options.connectors)
    if options.layout is not None:
        require_block_compact(KVCacheLayout.parse(options.layout))
    wants_router = _wants_router(options, only_printed)
    worlds = [world_size(words_of(options, role)) for role in _roles(options)]
    ports = Ports.chosen(options, worlds) if not elsewhere else Ports.elsewhere(options, worlds)
    devices = _devices(options, worlds, only_printed) if device == "cuda" else [()] * len(worlds)
    model, served_name = _model(options, only_printed)  # late: it may have to be converted first
    engines = _engines(options, device, model, served_name, ports)
    members = _members(engines, ports.sides, devices)
    _require_shares(members)
    router = _router(options, members, ports) if wants_router else None
    return Deployment(members, router, served_name, elsewhere)


def urls(members: Sequence[Member], role: str) -> list[str]:
    """Where the engines of a role are reached."""
    return [f"http://{m.engine.host}:{m.engine.port}" for m in members if m.role == role]


def require_vllm(device: str | None, *, only_printed: bool) -> str:
    """What engines compute on: as told, or as the installed vLLM does; where nothing is started, a GPU if none is."""
    try:
        return device or require_known_vllm()
    except EngineError:
        if only_printed:
            return "cuda"
        raise


def engine_settings(
    options: ServeOptions, role: str, *, device: str, model: Path | str, served_name: str, **particular: Any
) -> EngineSettings:
    """What all engines of a role have in common, and what is particular to one."""
    return EngineSettings(
        model=model,
        served_model_name=served_name,
        dtype=options.dtype,
        block_size_tokens=options.block_size or BLOCK_TOKENS[device],
        max_model_len_tokens=None,
        max_num_seqs=None,
        device=device,
        eager=device == "cpu" if options.eager is None else options.eager,
        kv_space_gib=options.kv_space or None,
        arguments=words_of(options, role),
        stop_order=STOP_ORDER[role],
        **particular,
    )


def words_of(options: ServeOptions, role: str) -> list[str]:
    """What the engines of a role get on vLLM's command line as it is. Trigger of EngineError: `require_undecided`."""
    words = [*options.vllm_args, *(options.prefill_args if role == PREFILL else options.decode_args)]
    require_undecided(words)
    return words


def environment_of(options: ServeOptions, engines_of_host: int) -> dict[str, str]:
    """kvx's own variables, without the secret's."""
    made = {"VLLM_PLUGINS": "kvx", "KVX_HOST_ENGINES": str(engines_of_host)}
    if options.layout is not None:
        made["VLLM_KV_CACHE_LAYOUT"] = options.layout
    return made


def _roles(options: ServeOptions) -> list[str]:
    """The role of each engine."""
    return [PREFILL] * options.prefill + [DECODE] * options.decode


def _engines(
    options: ServeOptions, device: str, model: Path | str, served_name: str, ports: Ports
) -> Iterator[EngineSettings]:
    hosts, elsewhere = _hosts(options), bool(options.prefill_hosts)
    bound = share_cores(len(hosts)) if device == "cpu" and not elsewhere else [()] * len(hosts)
    secret = {SECRET_FILE: os.environ[SECRET_FILE]} if SECRET_FILE in os.environ else {}
    for index, (role, host, cores) in enumerate(zip(_roles(options), hosts, bound, strict=True)):
        name = f"{role}-{index if role == PREFILL else index - options.prefill}"
        side = {"side_channel_host": host, "side_channel_port": ports.sides[index]}
        extra = {"connectors": list(options.connectors), **side, **options.handoff}
        yield engine_settings(
            options,
            role,
            device=device,
            model=model,
            served_name=served_name,
            name=name,
            host=host,
            port=ports.engines[index],
            cores=cores,
            one_host=not elsewhere,
            kv_transfer=bridge(f"{name}-{uuid.uuid4().hex[:8]}", extra),
            environment={**environment_of(options, hosts.count(host)), **secret},
        )


def _hosts(options: ServeOptions) -> list[str]:
    """The machine of each engine."""
    return [*options.prefill_hosts, *options.decode_hosts] or [LOOPBACK] * (options.prefill + options.decode)


def _devices(options: ServeOptions, worlds: Sequence[int], only_printed: bool) -> list[tuple[int, ...]]:
    """The GPUs of each engine. Where they cannot be counted, each engine gets GPUs of its own."""
    hosts = _hosts(options)
    dealt: dict[int, tuple[int, ...]] = {}
    for host in dict.fromkeys(hosts):
        here = [index for index, other in enumerate(hosts) if other == host]
        needed = [worlds[index] for index in here]
        devices = options.gpus if options.gpus is not None else visible_devices()
        if options.gpus is None and (options.prefill_hosts or (only_printed and not devices)):
            devices = list(range(sum(needed)))
        dealt |= dict(zip(here, deal_out(devices, needed), strict=True))
    return [dealt[index] for index in range(len(hosts))]


def _members(
    engines: Iterable[EngineSettings], side_ports: Sequence[int], devices: Sequence[tuple[int, ...]]
) -> tuple[Member, ...]:
    """Engines with their GPUs. Each sees its own first, and then those that it may have to read from."""
    own = list(zip(engines, side_ports, devices, strict=True))
    members = []
    for engine, side_port, gpus in own:
        if gpus:
            here = (gpu for other, _, others in own if other.host == engine.host for gpu in others)
            seen = ",".join(map(str, dict.fromkeys((*gpus, *here))))
            engine = replace(engine, environment={**engine.environment, "CUDA_VISIBLE_DEVICES": seen})
        members.append(Member(engine.name.rpartition("-")[0], engine, side_port, gpus))
    return tuple(members)


def _router(options: ServeOptions, members: Sequence[Member], ports: Ports) -> RouterSettings:
    return RouterSettings(
        host=options.host,
        port=ports.router,
        metrics_port=ports.router_metrics,
        prefill_urls=urls(members, PREFILL),
        decode_urls=urls(members, DECODE),
        api_key=api_key(options.vllm_args),
        arguments=tuple(options.router_args),
    )


def _wants_router(options: ServeOptions, only_printed: bool) -> bool:
    if options.router is None:
        return only_printed or routers.is_installed()
    if options.router and not (only_printed or routers.is_installed()):
        raise EngineError(f"vllm-router is not installed; {routers.HINT}, or give --no-router")
    return options.router


def _model(options: ServeOptions, only_printed: bool) -> tuple[Path | str, str]:
    """The model's folder or name, and what clients call it."""
    if options.model is None:
        folder = default_model_folder() if only_printed else default_model()
        return folder, options.served_model_name or MODEL_NAME
    folder = Path(options.model)
    if folder.is_dir() or not _HUB_NAME.fullmatch(options.model):
        found = folder.resolve() if only_printed else require_model_folder(folder.resolve())
        return found, options.served_model_name or found.name
    return options.model, options.served_model_name or options.model


def _share(one: Member, other: Member) -> bool:
    """Whether they compute on the same memory: a GPU, or without GPUs the host's."""
    if one.engine.host != other.engine.host:
        return False
    if not one.devices and not other.devices:
        return True
    return bool(set(one.devices) & set(other.devices))


def _require_shares(members: Sequence[Member]) -> None:
    for index, member in enumerate(members):
        for other in members[:index]:
            if not (member.devices and _share(member, other)):
                continue
            if last_value(member.engine.arguments, GPU_SHARE) is None:
                both = f"{other.name} and {member.name} share GPU {min(set(member.devices) & set(other.devices))}"
                raise EngineError(f"{both}; say how much each may take, for example -- --gpu-memory-utilization 0.45")


def _require_protection(options: ServeOptions) -> None:
    """What engines that are not on loopback need before they start: better said here than by each of them."""
    if not options.handoff.get("allow_unauthenticated_data_plane"):
        raise EngineError(
            "engines on other machines open ports that authenticate nobody; keep strangers out of their network, and "
            "say that you did: --handoff allow_unauthenticated_data_plane=true (docs/security.md)"
        )
    if not options.handoff.get("allowed_hosts") and SECRET_FILE not in os.environ:
        raise EngineError(
            f"engines on other machines need a secret; export {SECRET_FILE}, the path of a file that each of them has, "
            "or name their networks: --handoff 'allowed_hosts=[\"10.0.0.0/24\"]'"
        )
