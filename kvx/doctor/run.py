"""The diagnosis: every check in the order in which a deployment meets them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvx.curve import Curve
from kvx.doctor import fit, gpus, machine, meeting, network, software, transports, tuning
from kvx.doctor.findings import Finding, Level, error, exit_status, ok, skipped
from kvx.doctor.half import MODEL, Trip
from kvx.doctor.network import Peer
from kvx.doctor.process import Failed, HalfProcess, Opened
from kvx.engine_side import HandoffSettings
from kvx.errors import ConnectorError
from kvx.peer import PeerDescriptor
from kvx.registry import AUTO, AUTO_ORDER, known_connectors, may_be_missing
from kvx.secret import Secret
from kvx.vllm.settings import from_options

SHOWN_VARIABLES = ("UCX_", "NIXL_", "MC_", "KVX_", "VLLM_", "CUDA_VISIBLE_DEVICES", "NCCL_")
_PRIVATE = ("SECRET", "TOKEN", "KEY", "PASSWORD")


@dataclass(frozen=True)
class Options:
    """`extra_config`: as in vLLM's `kv_connector_extra_config`. `ranks`: side channels of this engine.

    `device`: "cpu" or "cuda", by default what the installed vLLM computes on. `moves`: start processes, and move bytes.
    """

    extra_config: Mapping[str, Any] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()
    wanted: fit.Wanted = field(default_factory=fit.Wanted)
    ranks: int = 1
    device: str | None = None
    moves: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """`software` and `environment` are what a reader of the report needs beside the findings; no secret is in them."""

    findings: tuple[Finding, ...]
    software: Mapping[str, str]
    environment: Mapping[str, str]
    duration_s: float

    @property
    def status(self) -> int:
        return exit_status(self.findings)


def diagnose(options: Options, on_stage: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Look at everything; trouble is a finding, never an exception."""
    began = time.monotonic()
    findings = tuple(_Diagnosis(options, on_stage).run())
    return Diagnosis(findings, software.versions(), shown_environment(), time.monotonic() - began)


def shown_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that matter, and of private ones only that they are set."""
    return {
        name: "(set, not shown)" if any(word in name and not name.endswith("_FILE") for word in _PRIVATE) else value
        for name, value in sorted(environ.items())
        if name.startswith(SHOWN_VARIABLES)
    }


class _Diagnosis:
    """What later checks take from earlier ones."""

    def __init__(self, options: Options, on_stage: Callable[[str], None]) -> None:
        self._options, self._on_stage = options, on_stage
        self._device = options.device or software.device_of_vllm() or "cpu"
        self._secret: Secret | None = None
        self._curve: Curve | None = None
        self._settings = HandoffSettings()
        self._met: dict[Peer, PeerDescriptor] = {}
        self._may_move = True

    def run(self) -> Iterator[Finding]:
        self._on_stage("settings and versions")
        yield from self._look_at_settings()
        extras = _named(self._settings.connectors) + (["cuda"] if self._device == "cuda" else [])
        yield from software.check_versions(extras)
        self._on_stage("this machine")
        yield from self._look_at_machine()
        self._on_stage("where this engine listens")
        yield from self._look_at_our_address()
        for peer in self._options.peers:
            self._on_stage(f"peer {peer}")
            yield from self._meet(peer)
        yield from self._compare()
        if self._options.moves:
            yield from self._move()
        else:
            yield from self._look_at_names()

    def _look_at_settings(self) -> Iterator[Finding]:
        try:
            self._settings = from_options(self._options.extra_config)
        except ConnectorError as problem:
            yield error(
                "settings", str(problem), "the engine ends at its start with the same words",
                "correct kv_connector_extra_config; what follows was looked at with default settings",
            )  # fmt: skip
        self._secret, self._curve, trouble = tuning.read_keys()
        if trouble is not None:
            self._may_move = False
            yield trouble
        else:
            yield tuning.check_window(self._settings, self._secret)
        yield tuning.check_leases(self._settings)

    def _look_at_machine(self) -> Iterator[Finding]:
        rdma = machine.read_rdma()
        yield machine.check_memlock(rdma)
        yield machine.check_files()
        yield machine.check_shared_memory()
        yield machine.check_verbs_library(self._settings.connectors, rdma)
        yield machine.check_rdma(rdma)
        found, dma_buf = gpus.check_gpus(self._device, 0 if self._device == "cpu" else gpus.count_gpus())
        yield from found
        yield machine.check_dma_buf(rdma, dma_buf)

    def _look_at_our_address(self) -> Iterator[Finding]:
        settings, peers = self._settings, self._options.peers
        elsewhere = [peer for peer in peers if not network.is_ours(peer.host)]
        host = network.check_host(settings.side_channel_host, elsewhere)
        yield host
        if host.is_trouble:
            self._may_move = False
            yield skipped(network.PORT, "nothing can be said before the host is right")
        else:
            yield self._look_at_our_port()
        if (mooncake := transports.check_mooncake(settings.connectors, elsewhere)) is not None:
            yield mooncake
        here = len(elsewhere) < len(peers) if peers else network.is_local(settings.side_channel_host)
        yield transports.check_growing_memory(settings.connectors, self._device, peer_is_here=here)

    def _look_at_our_port(self) -> Finding:
        """An engine of kvx that runs there already is no trouble, and is what peers are compared with."""
        place = Peer(self._settings.side_channel_host, self._settings.side_channel_port)
        finding = network.check_port(place.host, place.port, self._options.ranks)
        if not finding.is_trouble or not place.port or network.reach(place, self._curve is not None).is_trouble:
            self._may_move &= not finding.is_trouble
            return finding
        running = meeting.meet(place, self._secret, self._curve, self._settings.auth_window_s).peer
        if running is None:
            self._may_move = False
            return finding
        self._met[place] = running
        self._settings = replace(self._settings, side_channel_port=0)  # for the halves
        return ok(network.PORT, f"{place.port}: engine {running.info.engine_id} runs there already")

    def _meet(self, peer: Peer) -> Iterator[Finding]:
        reached = network.reach(peer, self._curve is not None)
        yield reached
        if reached.is_trouble:
            return
        found = meeting.meet(peer, self._secret, self._curve, self._settings.auth_window_s)
        if found.peer is not None:
            self._met[peer] = found.peer
        yield from found.findings

    def _compare(self) -> Iterator[Finding]:
        engines = [(str(peer), found) for peer, found in self._met.items() if found.info.model != MODEL]
        for index, engine in enumerate(engines):
            if len(engines) == 1 or self._options.wanted.is_given:
                connectors = _named(self._settings.connectors)
                yield fit.check_wanted(*engine, self._options.wanted, connectors, self._settings.verify)
            for other in engines[index + 1 :]:
                yield fit.check_pair(engine, other)

    def _look_at_names(self) -> Iterator[Finding]:
        """Where nothing is started, a connector is at least to be known."""
        known = known_connectors()
        for name in _named(self._settings.connectors):
            if name not in known:
                yield error(
                    f"connector {name}", "no connector of this name is installed",
                    "an engine with it ends at its start", f"use one of {', '.join(known)}, or install its package",
                )  # fmt: skip

    def _move(self) -> Iterator[Finding]:
        if not self._may_move:
            yield skipped("round trips", "nothing is moved before the errors above are gone")
            return
        sound = True
        for name in _named(self._settings.connectors):
            for finding in self._move_here(name):
                sound &= finding.level is not Level.ERROR
                yield finding
        halves = {peer: found for peer, found in self._met.items() if found.info.model == MODEL}
        if sound and halves:
            with HalfProcess(self._settings, self._device) as reader:
                opened = reader.opened()
                if isinstance(opened, Failed):
                    yield transports.check_connector(", ".join(self._settings.connectors), opened)
                    return
                for peer, found in halves.items():
                    yield self._trip(reader, peer, found)
        for peer in self._options.peers:
            if peer in self._met and peer not in halves:
                yield skipped(
                    f"round trip with {peer}",
                    "it is an engine in service, through which nothing is moved; start `kvx doctor --serve` on its "
                    "host, and give that address as --peer",
                )

    def _move_here(self, name: str) -> Iterator[Finding]:
        """One connector between two processes of this host."""
        self._on_stage(f"connector {name}, in processes of its own")
        settings = replace(self._settings, connectors=(name,), side_channel_port=0)
        if settings.allowed_hosts:  # this trip is no hand-off of the deployment
            settings = replace(settings, allowed_hosts=(*settings.allowed_hosts, settings.side_channel_host))
        with HalfProcess(settings, self._device) as reader, HalfProcess(settings, self._device) as owner:
            opened, theirs = reader.opened(), owner.opened()
            failed = next((found for found in (opened, theirs) if isinstance(found, Failed)), None)
            if failed is not None and may_be_missing(self._settings.connectors, name):
                yield skipped(f"connector {name}", f"auto goes on without it: {failed.text}")
                return
            yield transports.check_connector(name, failed)
            if isinstance(opened, Failed) or isinstance(theirs, Failed) or not theirs.connectors:
                return
            self._on_stage(f"64 MiB by {name} between two processes of this host")
            yield transports.check_trip(f"round trip by {name}", reader.round_trip(theirs))
            if name == "nixl":
                yield transports.check_ucx(self._device, reader.words())

    def _trip(self, reader: HalfProcess, peer: Peer, found: PeerDescriptor) -> Finding:
        check = f"round trip with {peer}"
        self._on_stage(f"64 MiB to {peer} and back")
        outcome: Trip | Failed = reader.round_trip(Opened(peer.host, peer.port, found.info.engine_id))
        lanes = transports.lanes_of(reader.words()).get(transports.ELSEWHERE)
        finding = transports.check_trip(check, outcome)
        return replace(finding, found=f"{finding.found}, over {', '.join(lanes)}") if lanes else finding


def _named(connectors: Sequence[str]) -> list[str]:
    """With `auto` replaced by what it stands for."""
    return list(dict.fromkeys(name for given in connectors for name in (AUTO_ORDER if given == AUTO else (given,))))
