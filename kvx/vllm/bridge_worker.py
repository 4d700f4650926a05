"""The worker's half of the bridge: opens the connectors over the grown cache and runs the hand-offs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import door, registry
from ..cache import CacheState, RegionUser
from ..connector import Connector
from ..curve import read_curve
from ..errors import CacheStateError, ConnectorError, KVXError, MalformedParams
from ..geometry import GroupGeometry
from ..handoff import CacheFollower, EngineInfo, Failure, HandoffWorker, Pull, Waiting
from ..layout import KVCacheLayout, require_block_compact
from ..offload import HostPool
from ..offload_worker import OffloadConnector, OffloadEvents, OffloadWorker
from ..ranks import Share, shares
from ..secret import read_secret
from . import allocation, bridge_offload, settings
from .bridge_metrics import KvxStats, StatsTaker
from .bridge_offload import OffloadWork, RankReport
from .bridge_scheduler import HoldWork, PullWork, RemotePrefill, StepWork, WaitWork
from .log import log_as_vllm
from .steps import WorkerSteps
from .tails import clear_tail
from .worker_side import WorkerSeam, current_seam

logger = logging.getLogger("vllm.kvx")

#: How often an idle step looks for the end of a load or store, which no condition announces.
OFFLOAD_LOOK_S = 0.001
#: vLLM's ways to draft tokens for which nothing is kept in the KV cache.
_DRAFT_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


@dataclass(frozen=True)
class Outcome:
    """Request ids that came to an end since the last step."""

    sent: frozenset[str]
    received: frozenset[str]
    failed: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed)


class BridgeWorker:
    """One rank's hand-offs. The constructor only reads configuration; `open` opens connectors and sockets."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings.for_rank(vllm_config)
        self._secret = read_secret()
        self._curve = read_curve(self._secret)
        self._seam: WorkerSeam = current_seam()
        self._connectors: list[Connector] = []
        self._handoff: HandoffWorker | None = None
        self._views: Mapping[str, torch.Tensor] = {}
        self._geometries: tuple[GroupGeometry, ...] = ()
        self._counts_on_zeros: bool = kv_cache_config.needs_kv_cache_zeroing  # looks at every layer
        self._follower: CacheFollower | None = None
        self._offload: OffloadWorker | None = None
        self._offload_counters: Mapping[str, int] = bridge_offload.counters_of(HostPool(), 0)
        self._offload_events = OffloadEvents()
        self._received_tokens = 0
        self._tokens_asked: dict[str, int] = {}
        self._refused: dict[str, Failure] = {}
        self._failures: dict[str, Failure] = {}
        self._not_held: set[str] = set()
        self._stats = StatsTaker(self._cache_gauges)
        self._is_idle = False
        self.steps = WorkerSteps()

    @property
    def handoff(self) -> HandoffWorker:
        assert self._handoff is not None, "vLLM registers its caches before the first step"
        return self._handoff

    @property
    def address(self) -> tuple[str, int]:
        """Where this rank's side channel listens."""
        return self._settings.side_channel_host, self.handoff.port

    def open(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Open the connectors over what is committed now, and the side channel.

        Raises:
            CacheStateError: the cache has not grown to its final count yet.
            LayoutError: a layout that connectors cannot use.
            ConnectorUnavailable: a connector's library is not installed.
        """
        log_as_vllm()
        cache = self._seam.require_cache()
        if cache.state is not CacheState.READY:
            raise CacheStateError(f"connectors open after extend_kv_cache, but the cache is {cache.state}")
        layout = KVCacheLayout.parse(self._vllm_config.cache_config.kv_cache_layout)
        require_block_compact(layout)
        groups = self._groups(kv_caches)
        self._views, self._geometries = kv_caches, groups
        for connector_class in registry.connector_classes(self._settings.connectors):
            connector = connector_class()
            if isinstance(connector, OffloadConnector) and not self._begin_offload(connector, groups, kv_caches):
                continue
            door.prepare(self._settings, [connector])
            try:
                cache.attach(connector)
            except ConnectorError as error:
                if not registry.may_be_missing(self._settings.connectors, connector.name):
                    raise
                logger.warning("kvx: auto goes without connector %s: %s", connector.name, error)
                continue
            self._connectors.append(connector)
        if not self._connectors and registry.AUTO in self._settings.connectors:
            raise ConnectorError("auto has no connector that could be opened; the log above says why")
        movers = [connector for connector in self._connectors if connector.capabilities.reaches_processes]
        self._handoff = HandoffWorker(
            self._settings, self._info(), movers, status_extra=self._status, secret=self._secret, curve=self._curve
        )
        self._handoff.open(
            groups=groups,
            views=kv_caches,
            num_blocks=cache.final_blocks,
            generation=cache.generation,
            layout=layout.name,
        )
        # After the connectors: the hand-off stops before any memory goes, and goes on over what is there then.
        self._follower = CacheFollower(self._handoff, lambda: cache.committed_blocks)
        cache.attach(self._follower)

    def start(self, work: StepWork) -> None:
        """Hand a step's work to the hand-off threads and its loads to the connector; returns at once."""
        self._is_idle = work.idle
        self.steps.begin(work.number, work.read)
        for hold in work.holds:
            self._hold(hold)
        for pull in work.pulls:
            self._pull(pull)
        for wait in work.waits:
            self._keep(wait)
        for request_id in work.cancels:
            self.handoff.cancel(request_id)
        if self._offload is not None:
            self._load(self._offload, work.offload)

    def store(self, work: StepWork) -> None:
        """Begin the step's stores; call it when the step's forward pass has been queued."""
        if self._offload is not None:
            for copy in work.offload.stores:
                self._offload.store(copy)

    def wait(self) -> None:
        """In a step that computes nothing: sleep until a hand-off, a load or a store has ended, or for a moment."""
        if not self._is_idle or not self.steps.all_read:
            return
        until = time.monotonic() + self._seam.device.idle_wait_s
        while self._offload is not None and self._offload.is_busy:
            # Looked at by polling, and kept for `take_outcome`.
            self._offload_events = self._offload_events.joined(self._offload.poll())
            if self._offload_events or self.handoff.wait(OFFLOAD_LOOK_S) or time.monotonic() >= until:
                return
        self.handoff.wait(max(0.0, until - time.monotonic()))

    def take_outcome(self) -> Outcome:
        """What ended since the last step. A pull of no tokens only frees the owner's blocks: vLLM does not wait."""
        events = self.handoff.poll()
        refused, self._refused = self._refused, {}
        not_held, self._not_held = frozenset(self._not_held), set()
        asked = {r: self._tokens_asked.pop(r, 0) for r in {*events.received, *events.failed, *refused}}
        failed = {**events.failed, **refused}
        for request_id, failure in failed.items():
            logger.warning("kvx: hand-off of request %s failed: %s", request_id, failure)
            if asked[request_id]:
                self._failures[request_id] = failure
        for request_id in events.expired:
            logger.warning("kvx: the hold of request %s ended before anyone read its blocks", request_id)
        self._received_tokens += sum(asked[request_id] for request_id in events.received)
        if self._offload is not None:
            self._offload_events = self._offload_events.joined(self._offload.poll())
        outcome = Outcome(
            sent=events.released | events.expired | not_held,
            received=self._offload_events.loaded | {r for r in events.received if asked[r]},
            failed=frozenset(self._offload_events.unloaded) | {r for r in failed if asked[r]},
        )
        if outcome or not self._is_idle:
            self.steps.tell()
        return outcome

    def take_report(self) -> RankReport | None:
        """What the scheduler must know of host blocks, after `take_outcome`; None where nothing is offloaded."""
        if self._offload is None:
            return None
        events, self._offload_events = self._offload_events, OffloadEvents()
        return RankReport(
            generation=self._offload.generation,
            ready_blocks=self._offload.ready_blocks,
            stored=dict.fromkeys(events.stored | events.unstored, 1),
            unstored=set(events.unstored),
        )

    def take_stats(self) -> KvxStats | None:
        """What vLLM's `/metrics` must be told of since the last call; None when nothing has changed."""
        handoff = self._handoff
        if handoff is None:
            return None
        offload = {} if self._offload is None else {**self._offload_counters, **self._offload.metrics.as_counters()}
        return self._stats.take(
            handoff.metrics,
            handoff.num_held,
            lambda: handoff.num_blocks_held,
            self._seam.require_cache().generation,
            offload,
        )

    def _cache_gauges(self) -> Mapping[str, Mapping[str, float]]:
        registered_bytes = max((connector.registered_bytes for connector in self._connectors), default=0)
        report = self._seam.report(registered_bytes)
        margin = sum(row["bytes"] for row in report["ledger"] if row["consumer"] == "margin")
        sizes = {state: report[f"{state}_bytes"] for state in ("reserved", "committed", "registered")}
        return {
            "kvx_cache_bytes": {**sizes, "margin": margin},
            "kvx_cache_blocks": {"capacity": report["capacity_blocks"], "final": report["blocks_final"]},
        }

    def take_failures(self) -> dict[str, Failure]:
        """Why hand-offs have failed, after `take_outcome`, each once."""
        failures, self._failures = self._failures, {}
        return failures

    def _begin_offload(
        self, connector: OffloadConnector, groups: tuple[Any, ...], kv_caches: Mapping[str, torch.Tensor]
    ) -> bool:
        """Set the connector up, unless this model cannot be offloaded, which is said."""
        if self._offload is not None:
            raise ConnectorError(f"connector {connector.name}: one connector that offloads is enough; name one")
        if why := bridge_offload.refusal(self._vllm_config, self._kv_cache_config):
            logger.warning("kvx: this model goes without %s: %s", connector.name, why)
            return False
        connector.host_bytes = self._settings.offload_bytes
        alone = set(self._settings.connectors) == {connector.name}
        self._offload = OffloadWorker(
            connector,
            self._seam.require_cache().table.segments,
            groups,
            kv_caches,
            tokens_per_block=bridge_offload.tokens_per_block(self._kv_cache_config),
            verifies=self._settings.verify == "all",
            # With others beside it, the fault is for the hand-off.
            injected=self._settings.inject if alone else None,
        )
        return True

    def _load(self, offload: OffloadWorker, work: OffloadWork) -> None:
        if work.counters is not None:
            self._offload_counters = work.counters
        for copy in work.loads:
            offload.load(copy)

    def _hold(self, hold: HoldWork) -> None:
        """A hold that cannot begin (the cache is changing) frees the request's blocks; decode will be refused."""
        try:
            self.handoff.hold(hold.request_id, hold.blocks, hold.num_tokens)
        except KVXError as error:
            logger.warning("kvx: request %s is not held for decode: %s", hold.request_id, error)
            self._not_held.add(hold.request_id)

    def _pull(self, pull: PullWork) -> None:
        """A hand-off that cannot even begin fails its own request, not the engine."""
        self._tokens_asked[pull.request_id] = pull.num_tokens
        no_blocks: tuple[tuple[int, ...], ...] = tuple(() for _ in self._kv_cache_config.transfer_groups)
        remote = pull.remote
        asked = Pull(
            request_id=pull.request_id,
            remote_request_id=remote.request_id,
            remote_engine_id=remote.engine_id,
            host=remote.host,
            port=remote.port + self._first_rank(remote),
            blocks=pull.blocks or no_blocks,
            first_token=pull.first_token,
            num_tokens=pull.num_tokens,
            ticket=remote.ticket,
        )
        try:
            if remote.malformed:
                raise MalformedParams(remote.malformed)
            if pull.num_tokens and self._counts_on_zeros:
                for group, blocks in zip(self._geometries, pull.blocks, strict=True):
                    clear_tail(self._views, group, blocks, pull.first_token, pull.first_token + pull.num_tokens)
            self.handoff.pull(replace(asked, shares=self._shares(remote)))
        except KVXError as error:
            if pull.num_tokens:
                self.handoff.count_failure(error)
            self._refused[pull.request_id] = Failure.of(asked, error)

    def _keep(self, wait: WaitWork) -> None:
        """Where that cannot be, the pull will say why not."""
        remote = wait.remote
        try:
            ranks = tuple(share.owner_rank for share in self._shares(remote)) or (0,)
        except KVXError:
            return
        port = remote.port + self._first_rank(remote)
        self.handoff.keep(
            Waiting(wait.request_id, remote.request_id, remote.engine_id, remote.host, port, remote.ticket, ranks)
        )

    def _first_rank(self, remote: RemotePrefill) -> int:
        """Of the ranks there, the first of our pipeline stage; or the one like ours, where there are as many."""
        stage, rank = divmod(settings.rank_of(self._vllm_config), self._tp_size)
        theirs = remote.tp_size or self._tp_size
        return stage * theirs + (rank if theirs == self._tp_size else 0)

    def _shares(self, remote: RemotePrefill) -> tuple[Share, ...]:
        """What this rank reads of which rank of our stage there; empty where it is one like ours, all of it.

        LayoutError: the model's heads cannot be dealt out to as many ranks as it is said to have.
        """
        theirs = remote.tp_size or self._tp_size
        if theirs == self._tp_size:
            return ()
        totals = [group.heads.total for group in self._geometries]
        return tuple(shares(totals, self._tp_rank, self._tp_size, theirs))

    @property
    def _tp_rank(self) -> int:
        return settings.rank_of(self._vllm_config) % self._tp_size

    @property
    def _tp_size(self) -> int:
        size: int = self._vllm_config.parallel_config.tensor_parallel_size
        return size

    def close(self) -> None:
        """Stop the hand-offs, then close the connectors. Idempotent."""
        if self._handoff is not None:
            self._handoff.close()
        users: list[RegionUser] = [*self._connectors, *([] if self._follower is None else [self._follower])]
        self._connectors, self._follower = [], None
        cache = self._seam.cache
        while users:
            user = users.pop()
            if cache is not None and cache.state is not CacheState.CLOSED:
                cache.detach(user)
            else:
                user.close()

    def _groups(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[GroupGeometry, ...]:
        cache = self._seam.require_cache()
        return allocation.group_geometries(
            self._kv_cache_config,
            kv_caches,
            base_address=cache.base_address,
            capacity_blocks=cache.capacity_blocks,
            tp_rank=self._tp_rank,
            tp_size=self._tp_size,
            page_orders=allocation.page_orders(self._vllm_config),
            total_kv_heads=self._vllm_config.model_config.get_total_num_kv_heads(),
        )

    def _info(self) -> EngineInfo:
        config = self._vllm_config
        parallel = config.parallel_config
        return EngineInfo(
            engine_id=config.kv_transfer_config.engine_id,
            model=config.model_config.model,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            speculation=_drafter(config.speculative_config),
            tp_rank=self._tp_rank,
            tp_size=self._tp_size,
            pp_rank=parallel.rank // self._tp_size,
            pp_size=parallel.pipeline_parallel_size,
        )

    def _status(self) -> dict[str, Any]:
        """What this engine adds to the hand-off's own status, in plain values that msgpack can carry."""
        # Connectors register the same regions, each with its own library.
        registered_bytes = max((connector.registered_bytes for connector in self._connectors), default=0)
        offload = {} if self._offload is None else {"offload": {**self._offload_counters, **self._offload.status()}}
        return {
            **offload,
            "cache": {
                **self._seam.report(registered_bytes),
                "layer_groups": len(self._kv_cache_config.transfer_groups),
            },
            "external_hits": {
                "received_tokens": self._received_tokens,
                "left_tokens": allocation.left_tokens(self._kv_cache_config),
            },
        }


def _drafter(speculative_config: Any) -> str:
    """The drafter that keeps KV of its own, and how it drafts; empty where there is none."""
    if speculative_config is None or speculative_config.method in _DRAFT_WITHOUT_KV:
        return ""
    return f"{speculative_config.method} with {speculative_config.model}"
