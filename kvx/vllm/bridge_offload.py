"""Offload in the engine core: which blocks leave for host memory, which come back, and what is pinned meanwhile.

A host block is keyed by vLLM's own hash of all tokens up to its end, and holds one block of every layer group. Both
sides of a copy are pinned until every rank has reported its end: the host block in `HostPool`, the cache's blocks by
vLLM's own reference counts, so that no preemption, abort or eviction can give them to somebody else.

Nothing happens until the workers report host blocks, which they do only where a connector offloads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..offload import Eviction, HostPool, Ticket
from ..offload_worker import BlockCopy
from .allocation import layer_specs

logger = logging.getLogger("vllm.kvx")

NO_GENERATION = -1


@dataclass
class OffloadWork:
    """One step's part for the workers. `counters` are the pool's, where they have changed: workers serve the status."""

    loads: list[BlockCopy] = field(default_factory=list)
    stores: list[BlockCopy] = field(default_factory=list)
    counters: Mapping[str, int] | None = None


@dataclass
class RankReport:
    """What one rank, or several together, say after a step. `stored`: store -> how many ranks have ended it."""

    generation: int
    ready_blocks: int
    stored: dict[str, int] = field(default_factory=dict)
    unstored: set[str] = field(default_factory=set)

    def merged(self, other: RankReport) -> RankReport:
        """Both together: a host block is there when every rank has it, of the same generation."""
        agree = self.generation == other.generation
        counts = dict(self.stored)
        for name, count in other.stored.items():
            counts[name] = counts.get(name, 0) + count
        return RankReport(
            generation=max(self.generation, other.generation),
            ready_blocks=min(self.ready_blocks, other.ready_blocks) if agree else 0,
            stored=counts,
            unstored=self.unstored | other.unstored,
        )


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this model cannot be offloaded, in words; empty when it can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so blocks have no hashes to be found by"
    parallel = vllm_config.parallel_config
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "context parallelism spreads a block over ranks"
    groups = kv_cache_config.kv_cache_groups
    if len(kv_cache_config.transfer_groups) != len(groups):
        return "some of its layer groups may not be transferred"
    for group in groups:
        for one in layer_specs(group.kv_cache_spec):
            if type(one) not in (FullAttentionSpec, MLAAttentionSpec):
                return f"it has layers of {type(one).__name__}, whose blocks do not stand for all tokens before them"
    return ""


def tokens_per_block(kv_cache_config: Any) -> int:
    """Tokens of one host block: a whole number of blocks of every layer group."""
    return math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups))


def counters_of(pool: HostPool, external_tokens: int) -> dict[str, int]:
    """For the status. `used`: host blocks that hold something. `pinned`: loads and stores that have not ended.

    `external_tokens`: loaded ones, as vLLM counts them.
    """
    return {
        **pool.counters.as_status(),
        "external_tokens": external_tokens,
        "blocks": pool.num_blocks,
        "used": pool.num_used,
        "pinned": pool.num_in_use,
    }


@dataclass(eq=False)
class _Request:
    """A request that vLLM has given blocks. `considered`: its first so many host blocks need no more thought."""

    request: Any
    considered: int = 0


@dataclass(eq=False)
class _Load:
    """`ticket` is None where host memory was given up, so that nothing is pinned. `tokens` as vLLM counts them."""

    ticket: Ticket | None
    tokens: int = 0


@dataclass(eq=False)
class _Store:
    ticket: Ticket
    pinned: list[Any]  # vLLM's blocks
    ranks_left: int
    ok: bool = True


class OffloadScheduler:
    """All loads and stores of one engine; `num_ranks` workers each copy their own share of a block."""

    def __init__(self, kv_cache_config: Any, *, eviction: Eviction, num_ranks: int) -> None:
        self._kv_cache_config = kv_cache_config
        self._num_ranks = num_ranks
        self._pool = HostPool(eviction)
        self._block_pool: Any = None
        self._generation = NO_GENERATION
        self._requests: dict[str, _Request] = {}
        self._matched: dict[str, tuple[int, Ticket]] = {}  # request -> the first token to load, and what it may load
        self._failed: set[str] = set()
        self._loads: dict[str, _Load] = {}
        self._stores: dict[str, _Store] = {}
        self._new_loads: list[BlockCopy] = []
        self._external_tokens = 0
        self._told, self._was_reset = self._counters(), False

    @cached_property
    def tokens_per_block(self) -> int:
        """Tokens of one host block."""
        return tokens_per_block(self._kv_cache_config)

    @property
    def is_busy(self) -> bool:
        """The engine must keep stepping: a store's end, or the workers' status, waits for a step."""
        return bool(self._stores or self._loads) or (self._counters() != self._told and not self._was_reset)

    @property
    def frees_blocks_soon(self) -> bool:
        """Some of the cache's blocks are held by stores alone: a request that needs blocks gets them shortly."""
        return any(block.ref_cnt == 1 for store in self._stores.values() for block in store.pinned)

    def bind(self, block_pool: Any) -> None:
        """vLLM's pool of cache blocks, there once the scheduler is complete."""
        self._block_pool = block_pool

    def match(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens that host memory has beyond those already here: whole blocks, and never all tokens of a request."""
        name, size = request.request_id, self.tokens_per_block
        self._unmatch(name)
        if not self._pool.num_blocks or num_computed_tokens % size or name in self._failed:
            return 0
        keys = self._keys(request, num_computed_tokens // size, (request.num_tokens - 1) // size)
        found = self._pool.lookup(keys)
        if found:
            # Pinned from here on: vLLM may take several steps before it means to load them.
            self._matched[name] = num_computed_tokens, self._pool.load(keys[:found])
        return found * size

    def admitted(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """vLLM has given the request its blocks, and means to load so many tokens of those that `match` found."""
        # Its blocks may be others than before, and host memory may have lost some meanwhile: all are looked at again.
        self._requests[request.request_id] = _Request(request)
        if num_external_tokens > 0:
            self._new_loads.append(self._load(request, block_ids, num_external_tokens))
        self._unmatch(request.request_id)

    def take_work(self, scheduler_output: Any) -> OffloadWork:
        """This step's loads, and stores of the blocks that this step fills."""
        loads, self._new_loads = self._new_loads, []
        stores = []
        if self._pool.num_blocks:
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                store = self._store(request_id, num_tokens, scheduler_output.kv_connector_block_state)
                if store is not None:
                    stores.append(store)
        counters = self._counters()
        changed = counters if counters != self._told else None
        self._told, self._was_reset = counters, False
        return OffloadWork(loads, stores, changed)

    def finished(self, request: Any) -> None:
        """The request has ended. A load on its way ends by its own report: until then vLLM keeps its blocks."""
        known = self._requests.pop(request.request_id, None)
        self._unmatch(request.request_id)
        self._failed.discard(request.request_id)
        if known is not None and known.considered:
            self._pool.renew(self._keys(request, 0, known.considered))

    def arrived(self, request_ids: Iterable[str], failed: Iterable[str]) -> None:
        """These loads have ended on all ranks. One that failed is never offered again."""
        unloaded = set(failed)
        for request_id in self._loads.keys() & set(request_ids):
            load = self._loads.pop(request_id)
            if load.ticket is not None:
                self._pool.finish(load.ticket, ok=request_id not in unloaded)
                self._external_tokens += 0 if request_id in unloaded else load.tokens
            if request_id in unloaded and request_id in self._requests:
                self._failed.add(request_id)

    def heard(self, report: RankReport) -> None:
        """What all ranks say together after a step."""
        for name, count in report.stored.items():
            store = self._stores[name]
            store.ranks_left -= count
            store.ok = store.ok and name not in report.unstored
            if store.ranks_left == 0:
                self._end_store(name)
        if report.generation != self._generation or report.ready_blocks < self._pool.num_blocks:
            self._pool.reset()
            self._generation = report.generation
        self._pool.offer(report.ready_blocks)

    def reset(self) -> None:
        """Forget all content (the model's weights may have changed)."""
        ready_blocks = self._pool.num_blocks
        self._pool.reset()
        self._pool.offer(ready_blocks)
        self._was_reset = True  # which is no work: vLLM resets an engine that it has paused, and looks whether it idles

    def _load(self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int) -> BlockCopy:
        """The load of what was matched, or less of it where vLLM wants less."""
        name, size = request.request_id, self.tokens_per_block
        first_token, matched = self._matched[name]
        first, count = first_token // size, -(-num_tokens // size)
        if not self._pool.is_current(matched):
            # The request would wait for ever, so it hears of a failure: no worker has this generation.
            logger.warning("kvx: host memory was given up after request %s had found its blocks there", name)
            self._loads[name] = _Load(None)
            return BlockCopy(name, NO_GENERATION, (), ())
        ticket = self._pool.load(matched.keys[:count])
        # vLLM's own counter of external hits knows nothing of what a request loads after a preemption.
        self._loads[name] = _Load(ticket, 0 if request.num_preemptions else num_tokens)
        blocks = tuple(self._cache_blocks(block_ids, first + index) for index in range(count))
        return BlockCopy(name, self._generation, ticket.host_blocks, blocks, first_token)

    def _unmatch(self, name: str) -> None:
        _, ticket = self._matched.pop(name, (0, None))
        if ticket is not None:
            self._pool.finish(ticket, ok=None)

    def _store(self, request_id: str, num_tokens: int, block_state: Any) -> BlockCopy | None:
        """Stores of the blocks of one scheduled request that are full after this step, and hashed already."""
        known = self._requests.get(request_id)
        if known is None:
            return None
        first = known.considered
        end = min(
            (known.request.num_computed_tokens + num_tokens) // self.tokens_per_block, self._hashed(known.request)
        )
        if end <= first:
            return None
        block_ids = self._kv_cache_config.select_transfer_block_ids(block_state.get_block_ids(request_id))
        known.considered = end
        by_key = dict(zip(self._keys(known.request, first, end), range(first, end), strict=True))
        ticket = self._pool.store(by_key)
        if ticket is None:
            return None
        blocks = tuple(self._cache_blocks(block_ids, by_key[key]) for key in ticket.keys)
        pinned = [self._block_pool.blocks[block] for of_one in blocks for block in of_one]
        self._block_pool.touch(pinned)
        name = str(ticket.number)
        self._stores[name] = _Store(ticket, pinned, self._num_ranks)
        return BlockCopy(name, self._generation, ticket.host_blocks, blocks)

    def _end_store(self, name: str) -> None:
        store = self._stores.pop(name)
        self._pool.finish(store.ticket, ok=store.ok)
        # vLLM reuses the first of these first: the last block of a prefix.
        self._block_pool.free_blocks(reversed(store.pinned))

    def _keys(self, request: Any, first: int, end: int) -> list[Any]:
        """Hashes of host blocks [first, end) of a request, as far as it has them: of all tokens up to a block's end."""
        ratio = self._hashes_per_block
        return [
            request.block_hashes[(index + 1) * ratio - 1] for index in range(first, min(end, self._hashed(request)))
        ]

    def _hashed(self, request: Any) -> int:
        """How many host blocks of a request have a hash: their tokens are all known."""
        return len(request.block_hashes) // self._hashes_per_block

    @property
    def _hashes_per_block(self) -> int:
        per_hash: int = self._block_pool.hash_block_size
        return self.tokens_per_block // per_hash

    def _cache_blocks(self, block_ids: Sequence[Sequence[int]], index: int) -> tuple[int, ...]:
        """The cache's blocks of one host block, group after group."""
        size = self.tokens_per_block
        found: list[int] = []
        for ids, group in zip(block_ids, self._kv_cache_config.transfer_groups, strict=True):
            count = size // group.kv_cache_spec.block_size
            found += ids[index * count : (index + 1) * count]
        return tuple(found)

    def _counters(self) -> dict[str, int]:
        return counters_of(self._pool, self._external_tokens)
