"""The worker's half of the bridge: opens the connectors over the grown cache and runs the hand-offs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import registry
from ..cache import CacheState, RegionUser
from ..connector import Connector
from ..errors import CacheStateError, KVXError
from ..handoff import CacheFollower, EngineInfo, HandoffWorker, Pull
from ..layout import KVCacheLayout, require_block_compact
from . import allocation, settings
from .bridge_scheduler import HoldWork, PullWork, StepWork
from .worker_side import WorkerSeam, current_seam

logger = logging.getLogger("vllm.kvx")

#: The longest that an idle step waits for a transfer: a new request waits as long at the most. Shorter waits make the
#: engine's processes spin for the cores that the copy needs (2 cores: hand-off p50 11 ms with 20 ms, 14 to 19 with 3).
IDLE_WAIT_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """Request ids that came to an end since the last step."""

    sent: frozenset[str]
    received: frozenset[str]
    failed: frozenset[str]


class BridgeWorker:
    """One rank's hand-offs. The constructor only reads configuration; `open` opens connectors and sockets."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings.for_rank(vllm_config)
        self._seam: WorkerSeam = current_seam()
        self._connectors: list[Connector] = []
        self._handoff: HandoffWorker | None = None
        self._follower: CacheFollower | None = None
        self._received_tokens = 0
        self._tokens_asked: dict[str, int] = {}
        self._refused: set[str] = set()
        self._not_held: set[str] = set()

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
        cache = self._seam.require_cache()
        if cache.state is not CacheState.READY:
            raise CacheStateError(f"connectors open after extend_kv_cache, but the cache is {cache.state}")
        layout = KVCacheLayout.parse(self._vllm_config.cache_config.kv_cache_layout)
        require_block_compact(layout)
        for connector_class in registry.connector_classes(self._settings.connectors):
            connector = connector_class()
            self._connectors.append(connector)
            cache.attach(connector)
        self._handoff = HandoffWorker(self._settings, self._info(), self._connectors, status_extra=self._status)
        self._handoff.open(
            groups=self._groups(kv_caches),
            views=kv_caches,
            num_blocks=cache.final_blocks,
            generation=cache.generation,
            layout=layout.name,
        )
        # After the connectors: the hand-off stops before any memory goes, and goes on over what is there then.
        self._follower = CacheFollower(self._handoff, lambda: cache.committed_blocks)
        cache.attach(self._follower)

    def start(self, work: StepWork) -> None:
        """Hand a step's work to the hand-off threads; returns at once."""
        for hold in work.holds:
            self._hold(hold)
        for pull in work.pulls:
            self._pull(pull)
        for request_id in work.cancels:
            self.handoff.cancel(request_id)

    def wait(self) -> None:
        """Sleep until a hand-off has ended, for a moment at the most."""
        self.handoff.wait(IDLE_WAIT_S)

    def take_outcome(self) -> Outcome:
        """What ended since the last step. A pull of no tokens only frees the owner's blocks: vLLM does not wait."""
        events = self.handoff.poll()
        refused, self._refused = self._refused, set()
        not_held, self._not_held = frozenset(self._not_held), set()
        asked = {r: self._tokens_asked.pop(r, 0) for r in {*events.received, *events.failed, *refused}}
        for request_id, cause in events.failed.items():
            logger.warning("kvx: hand-off of request %s failed: %s", request_id, cause)
        for request_id in events.expired:
            logger.warning("kvx: the hold of request %s ended before anyone read its blocks", request_id)
        self._received_tokens += sum(asked[request_id] for request_id in events.received)
        return Outcome(
            sent=events.released | events.expired | not_held,
            received=frozenset(r for r in events.received if asked[r]),
            failed=frozenset(r for r in {*events.failed, *refused} if asked[r]),
        )

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
        try:
            self.handoff.pull(
                Pull(
                    request_id=pull.request_id,
                    remote_request_id=pull.remote_request_id,
                    remote_engine_id=pull.remote_engine_id,
                    host=pull.host,
                    port=pull.port + settings.rank_of(self._vllm_config),
                    blocks=pull.blocks or no_blocks,
                    first_token=pull.first_token,
                    num_tokens=pull.num_tokens,
                )
            )
        except KVXError as error:
            logger.warning("kvx: hand-off of request %s refused: %s", pull.request_id, error)
            self._refused.add(pull.request_id)

    @property
    def _tp_rank(self) -> int:
        parallel = self._vllm_config.parallel_config
        rank: int = parallel.rank % parallel.tensor_parallel_size
        return rank

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

    def _groups(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        cache = self._seam.require_cache()
        parallel = self._vllm_config.parallel_config
        return allocation.group_geometries(
            self._kv_cache_config,
            kv_caches,
            base_address=cache.base_address,
            capacity_blocks=cache.capacity_blocks,
            tp_rank=self._tp_rank,
            tp_size=parallel.tensor_parallel_size,
            page_formats=allocation.packed_page_formats(self._vllm_config),
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
            tp_rank=self._tp_rank,
            tp_size=parallel.tensor_parallel_size,
            pp_rank=parallel.rank // parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
        )

    def _status(self) -> dict[str, Any]:
        """What this engine adds to the hand-off's own status, in plain values that msgpack can carry."""
        # Connectors register the same regions, each with its own library.
        registered_bytes = max((connector.registered_bytes for connector in self._connectors), default=0)
        return {
            "cache": {
                **self._seam.report(registered_bytes),
                "layer_groups": len(self._kv_cache_config.transfer_groups),
            },
            "external_hits": {"received_tokens": self._received_tokens},
        }
