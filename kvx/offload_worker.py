"""One engine rank's copies to host blocks and back: what the engine asks for, as transfers of an offload connector.

A host block is the bytes of its cache blocks, one after the other: of each cache block all segments, padding included.
So it needs no layout, and goes back only into a cache of the same shape. All calls come from the engine's thread; the
connector copies on its own.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvx import inject
from kvx.connector import Connector, ConnectorState, Op, Transfer, TransferState
from kvx.digest import digester_of, first_difference, request_digests
from kvx.drivers.digester import Bytes
from kvx.errors import ConnectorStateError, KVXError, LayoutError
from kvx.geometry import GroupGeometry
from kvx.inject import Fault, Injector
from kvx.metrics import DigestMetrics
from kvx.peer import Int64s, Peer
from kvx.plan import RUN_DTYPE, Runs
from kvx.spec import Segment

logger = logging.getLogger(__name__)

# No peer can keep a copy waiting, only other copies: an end by time is for a device that hangs.
DEADLINE_S = 120.0


class OffloadConnector(Connector):
    """A connector whose peer is memory that it takes itself, up to `host_bytes` (set before it is opened)."""

    host_bytes: int | None = None

    @property
    @abstractmethod
    def ready_bytes(self) -> int:
        """The first so many bytes of it can be copied to and from without waiting."""


@dataclass(frozen=True)
class BlockCopy:
    """Whole blocks to or from host blocks: host block i holds the cache blocks `blocks[i]`, in their order.

    `name`: a load's request, or a store's number. `generation`: of the host memory that the host blocks belong to.
    `first_token`: where in its request the first block starts.
    """

    name: str
    generation: int
    host_blocks: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    first_token: int = 0


@dataclass(frozen=True)
class OffloadEvents:
    """Names of what has ended since the last poll, each once."""

    stored: frozenset[str] = frozenset()
    unstored: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    unloaded: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.unstored or self.loaded or self.unloaded)

    def joined(self, later: OffloadEvents) -> OffloadEvents:
        """Both together."""
        return OffloadEvents(
            self.stored | later.stored,
            self.unstored | later.unstored,
            self.loaded | later.loaded,
            {**self.unloaded, **later.unloaded},
        )


@dataclass
class OffloadMetrics(DigestMetrics):
    """Counted on this rank. `failed`: loads and stores that did not end well."""

    stored_bytes: int = 0
    loaded_bytes: int = 0
    loaded_tokens: int = 0
    failed: int = 0

    def as_counters(self) -> dict[str, int]:
        """What only this rank knows, for the metrics."""
        return {
            "failed": self.failed,
            "digests_checked": self.digests_checked,
            "digests_mismatched": self.digests_mismatched,
        }


@dataclass(eq=False)
class _Active:
    op: Op
    copy: BlockCopy


class OffloadWorker:
    """`groups` and `views`: of the cache, in the order in which a host block holds its groups' blocks.

    `tokens_per_block`: of the request that one host block holds. With `verifies` every block is digested when it is
    stored and again when it has been loaded, on the engine's thread: slow, and meant to be.
    """

    def __init__(
        self,
        connector: OffloadConnector,
        segments: Sequence[Segment],
        groups: Sequence[GroupGeometry],
        views: Mapping[str, torch.Tensor],
        *,
        tokens_per_block: int,
        verifies: bool = False,
        injected: str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.metrics = OffloadMetrics()
        self._connector = connector
        self._segments = np.array([[s.offset_bytes, s.block_stride_bytes] for s in segments], dtype=np.int64)
        self._block_bytes = int(self._segments[:, 1].sum())
        self._per_host_block = [tokens_per_block // group.block_size_tokens for group in groups]
        self._groups, self._views = tuple(groups), dict(views)
        self._tokens_per_block = tokens_per_block
        self._verifies, self._injector, self._deadline_s = verifies, Injector(injected), deadline_s
        self._peer: Peer | None = None
        self._active: dict[Transfer, _Active] = {}
        self._refused: list[tuple[_Active, str]] = []
        self._digests: dict[int, list[Bytes]] = {}  # by host block

    @property
    def host_block_bytes(self) -> int:
        """Bytes of one host block."""
        return self._block_bytes * sum(self._per_host_block)

    @property
    def generation(self) -> int:
        """Of the host memory: a new one holds nothing of an older one."""
        return self._connector.generation

    @property
    def ready_blocks(self) -> int:
        """Host blocks that can be used now."""
        return self._connector.ready_bytes // self.host_block_bytes

    @property
    def is_busy(self) -> bool:
        """Something has not been reported by `poll` yet."""
        return bool(self._active or self._refused)

    def store(self, copy: BlockCopy) -> None:
        """Copy cache blocks to host blocks, when what the device's stream has queued now has run."""
        self._start(Op.WRITE, copy, copy.host_blocks)

    def load(self, copy: BlockCopy) -> None:
        """Copy host blocks into the cache. The outcome of both comes by `poll`, also when they cannot begin."""
        self._start(Op.READ, copy, self._sources(copy))

    def poll(self) -> OffloadEvents:
        """What has ended since the last call."""
        stored: set[str] = set()
        unstored: set[str] = set()
        loaded: set[str] = set()
        unloaded: dict[str, str] = {}
        ended, self._refused = self._refused, []
        for transfer in self._connector.poll().finished:
            active = self._active.pop(transfer)
            ended.append((active, "" if transfer.state is TransferState.DONE else str(transfer.cause)))
        for active, cause in ended:
            name = active.copy.name
            if active.op is Op.READ and not cause:
                cause = self._note_loaded(active.copy)
            if cause:
                self.metrics.failed += 1
                logger.warning("offload: %s of %s failed: %s", active.op.value, name, cause)
            if active.op is Op.WRITE:
                self._note_stored(active.copy, cause)
                (unstored if cause else stored).add(name)
            elif cause:
                unloaded[name] = cause
            else:
                loaded.add(name)
        return OffloadEvents(frozenset(stored), frozenset(unstored), frozenset(loaded), unloaded)

    def status(self) -> dict[str, Any]:
        """Plain values for msgpack and JSON."""
        found = self.metrics
        return {
            "stored_bytes": found.stored_bytes,
            "loaded_bytes": found.loaded_bytes,
            "loaded_tokens": found.loaded_tokens,
            "failed": found.failed,
            "in_flight": len(self._active) + len(self._refused),
            "host_blocks": self.ready_blocks,
            "host_block_bytes": self.host_block_bytes,
            "digests": found.digests_as_status(),
        }

    def _start(self, op: Op, copy: BlockCopy, host_blocks: tuple[int, ...]) -> None:
        """A copy that cannot begin has ended badly: that is reported as any other end."""
        active = _Active(op, copy)
        try:
            if not self._is_current(copy):
                raise ConnectorStateError(
                    f"the host memory is of generation {self._connector.generation} and "
                    f"{self._connector.state.value}, generation {copy.generation} is asked for"
                )
            if self._peer is None or not self._peer.connected:
                self._peer = self._connector.connect(self._connector.metadata())
            runs = self._runs(copy.blocks, host_blocks, to_host=op is Op.WRITE)
            transfer = self._connector.submit(op, self._peer, runs, deadline_s=self._deadline_s)
        except KVXError as error:
            self._refused.append((active, str(error)))
            return
        self._active[transfer] = active

    def _is_current(self, copy: BlockCopy) -> bool:
        """The cache has its memory, and its host blocks are those that are meant. Otherwise neither may be touched."""
        return self._connector.state is ConnectorState.OPEN and copy.generation == self._connector.generation

    def _runs(self, blocks: tuple[tuple[int, ...], ...], host_blocks: tuple[int, ...], *, to_host: bool) -> Runs:
        width = sum(self._per_host_block)
        if any(len(of_one) != width for of_one in blocks) or len(blocks) != len(host_blocks):
            raise LayoutError(f"each host block holds {width} cache blocks; found {blocks} for {host_blocks}")
        return block_runs(
            self._segments,
            np.array(blocks, dtype=np.int64).reshape(-1),
            (np.array(host_blocks, dtype=np.int64)[:, None] * width + np.arange(width)).reshape(-1),
            to_host=to_host,
        )

    # What verifies

    def _note_stored(self, copy: BlockCopy, cause: str) -> None:
        """The cache's blocks are still pinned: the scheduler lets go of them when it hears of the store's end."""
        if cause:
            return
        self.metrics.stored_bytes += len(copy.host_blocks) * self.host_block_bytes
        if self._verifies and self._is_current(copy):
            self._digests.update(zip(copy.host_blocks, self._digest(copy), strict=True))

    def _note_loaded(self, copy: BlockCopy) -> str:
        """What is wrong with the bytes that came, for which the load has failed; else nothing."""
        self.metrics.loaded_bytes += len(copy.host_blocks) * self.host_block_bytes
        self.metrics.loaded_tokens += len(copy.host_blocks) * self._tokens_per_block
        if not self._verifies:
            return ""
        self.metrics.digests_expected += len(copy.host_blocks)
        if not self._is_current(copy):
            return ""
        if self._injector.take(Fault.FLIP_BYTE):
            inject.flip_byte(self._views, self._groups[0], copy.blocks[0][0], 0)
        taken = self._digest(copy)
        found = [self._difference(host, ours) for host, ours in zip(copy.host_blocks, taken, strict=True)]
        self.metrics.digests_checked += len(found)
        wrong = ""
        for index, difference in enumerate(found):
            if difference is not None:
                group, token = difference
                position = copy.first_token + index * self._tokens_per_block + token
                self._mismatch(copy.name, group, position)
                wrong = wrong or f"digests differ in layer group {group}, first at position {position}"
        return "" if self._injector.uses_what_differs else wrong

    def _difference(self, host_block: int, found: Sequence[Bytes]) -> tuple[str, int] | None:
        """(layer group, token in the block) of the first content that is not what was stored."""
        for group, ours, theirs in zip(self._groups, found, self._digests.get(host_block, []), strict=True):
            if (different := first_difference(ours, theirs)) is not None:
                return group.name, different[1]
        return None

    def _mismatch(self, request_id: str, group: str, position: int) -> None:
        self.metrics.digests_mismatched += 1
        self.metrics.mismatch(request_id, group, position)

    def _digest(self, copy: BlockCopy) -> list[list[Bytes]]:
        """For each host block and layer group, one digest for each head and token. All are taken at once."""
        size, ends = self._tokens_per_block, np.cumsum(self._per_host_block).tolist()
        of_groups = [
            [block for of_one in copy.blocks for block in of_one[end - count : end]]
            for end, count in zip(ends, self._per_host_block, strict=True)
        ]
        taken = request_digests(
            self._views, self._groups, of_groups, 0, len(copy.blocks) * size, after=digester_of(self._views).mark()
        )
        return [
            [of_group.values[:, start : start + size].copy() for of_group in taken]
            for start in range(0, len(copy.blocks) * size, size)
        ]

    def _sources(self, copy: BlockCopy) -> tuple[int, ...]:
        """The host blocks to load from. With a fault on purpose, once: others than those that were asked for."""
        if not copy.host_blocks:  # nothing can be loaded, which `_start` says
            return ()
        first, *rest = copy.host_blocks
        other = (first + 1) % max(1, self.ready_blocks)
        if self._injector.take(Fault.SWAP_BLOCKS):
            return (rest[0], first, *rest[1:]) if rest else (other,)
        if self._injector.take(Fault.STALE):  # as if its host block had been given to another hash meanwhile
            return (other, *rest)
        return copy.host_blocks


def block_runs(segments: Int64s, blocks: Int64s, host_blocks: Int64s, *, to_host: bool) -> Runs:
    """Runs that copy whole cache blocks: one for each block and segment (rows of offset and block stride).

    In host memory the pieces of a block lie one after the other, and blocks are as large as all their pieces.
    """
    offsets, strides = segments[:, 0], segments[:, 1]
    inside = np.cumsum(strides) - strides
    cache = offsets + blocks[:, None] * strides
    host = host_blocks[:, None] * int(strides.sum()) + inside
    runs = np.zeros(cache.shape, RUN_DTYPE)
    runs["source"], runs["destination"] = (cache, host) if to_host else (host, cache)
    runs["length"], runs["count"] = strides, 1
    return Runs(runs.reshape(-1))
