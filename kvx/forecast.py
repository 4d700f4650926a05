"""How many blocks an engine will have, before there is one. Pure, and an estimate: an engine measures.

The KV cache's side is exact (page sizes, granules, budget, margin: the same code as in the engine). What the engine
itself takes is not: `overheads` carries over what was measured once (docs/measurements.md), and each can be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvx import sizing
from kvx.errors import ModelError
from kvx.geometry import HeadRange, group_geometry
from kvx.layout import KVCacheLayout
from kvx.model import ModelShape
from kvx.plan import plan
from kvx.sizing import MIB, MarginPolicy, Measured, Request, Sizing
from kvx.spec import AttentionKind, CacheGeometry, LayerGroup, dtype_bytes

GRANULARITY_BYTES = 2 << 20
IN_USE_BYTES = 719 * MIB
"""Held by driver and context before an engine loads, on an H200."""
_CONTEXT_BYTES = 500 * MIB
_GRAPH_BYTES_A_LAYER = 5 * MIB


@dataclass(frozen=True)
class Device:
    """`total_bytes` by the device's own count, `in_use_bytes` before the engine loads."""

    total_bytes: int
    in_use_bytes: int = IN_USE_BYTES


@dataclass(frozen=True)
class Setting:
    """What an operator may choose. `cache_dtype`: None for the model's own. `utilization`: None where none is given."""

    block_size_tokens: int = 16
    layout: KVCacheLayout = KVCacheLayout.LBHNC
    cache_dtype: str | None = None
    tp_size: int = 1
    max_model_len_tokens: int = 8192
    max_batch_tokens: int = 8192
    utilization: float | None = None
    margin: MarginPolicy = MarginPolicy.DEFAULT


@dataclass(frozen=True)
class Overheads:
    """Bytes on each rank besides the cache."""

    weights_bytes: int
    graph_bytes: int
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.graph_bytes + self.context_bytes

    def rows(self) -> dict[str, int]:
        """Named as in a running engine's ledger."""
        return {
            "weights": self.weights_bytes,
            "captured graphs": self.graph_bytes,
            "context, workspaces and what torch keeps": self.context_bytes,
        }


@dataclass(frozen=True)
class Stock:
    """What vLLM's own allocation makes of the same at its default share of the device."""

    num_blocks: int
    idle_bytes: int


@dataclass(frozen=True)
class Forecast:
    """One setting on one device: per rank. `idle_bytes`: free after start; `concurrency`: longest requests at once."""

    setting: Setting
    groups: tuple[LayerGroup, ...]
    block_bytes: int
    sizing: Sizing
    stock: Stock
    request_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit; where several groups share the blocks, in requests of the longest length."""
        if len(self.groups) > 1:
            return int(self.concurrency * self.setting.max_model_len_tokens)
        return self.sizing.num_blocks * self.setting.block_size_tokens

    @property
    def idle_bytes(self) -> int:
        return sum(row.nbytes for row in self.sizing.ledger.rows if row.consumer in _IDLE)

    @property
    def concurrency(self) -> float:
        return (self.sizing.num_blocks - 1) / (self.request_blocks - 1)


_IDLE = ("outside the budget", "margin", "left over")


def overheads(shape: ModelShape, setting: Setting, weights_bytes: int | None = None) -> Overheads:
    """The estimate, per rank. `weights_bytes`: of the whole model; by default its parameters in its own dtype."""
    whole = shape.parameters * dtype_bytes(shape.dtype) if weights_bytes is None else weights_bytes
    widest = 4 * shape.hidden_size + 2 * shape.intermediate_size // setting.tp_size
    activations = setting.max_batch_tokens * widest * dtype_bytes(shape.dtype)
    return Overheads(
        weights_bytes=whole // setting.tp_size,
        graph_bytes=_GRAPH_BYTES_A_LAYER * len(shape.kinds),
        context_bytes=_CONTEXT_BYTES + activations,
    )


def forecast(shape: ModelShape, device: Device, setting: Setting, taken: Overheads) -> Forecast:
    """The count that an engine of this setting would end with.

    Raises:
        SizingError: nothing is left for the cache, or not enough for one request of the longest length.
        ModelError: the heads cannot be divided among the ranks.
        LayoutError: a cache dtype or layout that cannot hold these layers.
    """
    dtype = setting.cache_dtype or shape.dtype
    groups = shape.groups(setting.block_size_tokens, dtype, setting.tp_size)
    free = device.total_bytes - device.in_use_bytes
    budget = sizing.gpu_budget(free_bytes=free, total_bytes=device.total_bytes, utilization=setting.utilization)
    block_bytes = shape.geometry(setting.layout, groups, 1, 1).block_bytes
    strides = (block_bytes,)
    capacity = sizing.capacity_for(budget.nbytes - taken.weights_bytes, strides, 1)
    geometry = shape.geometry(setting.layout, groups, capacity, GRANULARITY_BYTES)
    blocks = shape.request_blocks(groups, setting.max_model_len_tokens, setting.max_batch_tokens)
    request = Request(blocks, setting.max_model_len_tokens)
    measured = Measured(taken.rows(), 0, 1)
    found = sizing.final_count(budget, measured, geometry.segment_table, request, setting.margin)
    return Forecast(setting, groups, block_bytes, found, _stock(device, taken, block_bytes), blocks)


def _stock(device: Device, taken: Overheads, block_bytes: int) -> Stock:
    room = int(sizing.STOCK_UTILIZATION * device.total_bytes) - taken.total_bytes
    blocks = max(0, room // block_bytes)
    idle = device.total_bytes - device.in_use_bytes - taken.total_bytes - blocks * block_bytes
    return Stock(blocks, max(0, idle))


@dataclass(frozen=True)
class HandoffPlan:
    """One request between one rank of each side: `runs` strided copies, `descriptors` contiguous ones."""

    runs: int
    descriptors: int
    nbytes: int

    @property
    def descriptor_bytes(self) -> int:
        """The mean length of a contiguous copy."""
        return self.nbytes // max(1, self.descriptors)


def handoff_plan(shape: ModelShape, ours: Setting, theirs: Setting, num_tokens: int, seed: int = 0) -> HandoffPlan:
    """What moves for a prompt of `num_tokens`, from blocks in order on our side to shuffled ones on theirs.

    A layer of sliding windows moves its last window only.

    Raises:
        PeerMismatch: two sides between which nothing can be moved; it names the field.
        ModelError: the heads cannot be divided among the ranks, or a prompt without tokens.
    """
    if num_tokens < 1:
        raise ModelError(f"a prompt of {num_tokens} tokens has nothing to move; give at least 1")
    sides = [_side(shape, setting, num_tokens) for setting in (ours, theirs)]
    runs = descriptors = nbytes = 0
    for index, group in enumerate(sides[0].groups):
        first = max(0, num_tokens - (group.spec.sliding_window_tokens or num_tokens))
        blocks = [np.arange(side.capacity_blocks) for side in sides]
        np.random.default_rng(seed).shuffle(blocks[1])
        held = [group_geometry(side, index, _heads(shape, side.groups[index])) for side in sides]
        found = plan(
            held[0],
            blocks[0],
            held[1],
            blocks[1],
            first_token=first,
            num_tokens=num_tokens - first,
            source_num_blocks=sides[0].capacity_blocks,
            destination_num_blocks=sides[1].capacity_blocks,
        )
        runs, descriptors, nbytes = runs + len(found), descriptors + found.num_descriptors, nbytes + found.total_bytes
    return HandoffPlan(runs, descriptors, nbytes)


def _side(shape: ModelShape, setting: Setting, num_tokens: int) -> CacheGeometry:
    groups = shape.groups(setting.block_size_tokens, setting.cache_dtype or shape.dtype, setting.tp_size)
    return shape.geometry(setting.layout, groups, -(-num_tokens // setting.block_size_tokens), 1)


def _heads(shape: ModelShape, group: LayerGroup) -> HeadRange:
    """Those of rank 0."""
    total = 1 if group.spec.kind is AttentionKind.MLA else shape.num_kv_heads
    return HeadRange(0, group.spec.num_kv_heads, total)


def variations(setting: Setting, shape: ModelShape) -> Sequence[tuple[str, Setting]]:
    """The setting itself and those that differ in one field, for a table; ranks that the heads fit only."""
    found = [("as given", setting)]
    for size in (16, 32, 64, 128):
        if size != setting.block_size_tokens:
            found.append((f"block size {size}", replace(setting, block_size_tokens=size)))
    if (setting.cache_dtype or shape.dtype) != "float8_e4m3fn":
        found.append(("fp8 cache", replace(setting, cache_dtype="float8_e4m3fn")))
    for ranks in (1, 2, 4, 8):
        fits = max(ranks, shape.num_kv_heads) % min(ranks, shape.num_kv_heads) == 0
        if ranks != setting.tp_size and fits:
            found.append((f"TP {ranks}", replace(setting, tp_size=ranks)))
    other = KVCacheLayout.LBHNC if setting.layout is KVCacheLayout.BLHNC else KVCacheLayout.BLHNC
    found.append((f"layout {other.name}", replace(setting, layout=other)))
    return found
