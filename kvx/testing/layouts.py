"""Caches for the kit's data tests, and where their bytes are by numpy's own indexing: `kvx.plan` is not asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvx.geometry import GroupGeometry, HeadRange, group_geometry
from kvx.layout import KVCacheLayout
from kvx.plan import Runs, plan
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.testing.memory import CONTIGUOUS_BYTES, Bytes

BLOCKS = 96
COMPACT = tuple(layout for layout in KVCacheLayout if layout.is_block_compact)
LAYERS = ("layer.0", "layer.1", "layer.2")


@dataclass(frozen=True)
class Cache:
    """One side: a layout, a block size and the heads that it holds, of `total_heads`."""

    layout: KVCacheLayout = KVCacheLayout.LBNHC
    block_size_tokens: int = 16
    kernel_block_size_tokens: int | None = None
    first_head: int = 0
    num_heads: int = 4
    total_heads: int = 4

    @property
    def geometry(self) -> CacheGeometry:
        spec = KVCacheSpec.full_attention(
            block_size_tokens=self.block_size_tokens,
            num_kv_heads=self.num_heads,
            head_size=8,
            dtype="float16",
            kernel_block_size_tokens=self.kernel_block_size_tokens,
        )
        made = CacheGeometry(self.layout, (LayerGroup("full", LAYERS, spec),), BLOCKS, 64)
        assert made.total_bytes <= CONTIGUOUS_BYTES
        return made

    @property
    def group(self) -> GroupGeometry:
        return group_geometry(self.geometry, 0, HeadRange(self.first_head, self.num_heads, self.total_heads))

    def token(self, memory: Bytes, layer: int, head: int, block: int, slot: int) -> Bytes:
        """The bytes [C] of one token of one of the model's heads, as a view that can be written."""
        place = self.geometry.placement(0, layer)
        kernel = place.kernel_block_size_tokens
        start = place.offset_bytes + block * place.strides_bytes[0] + (head - self.first_head) * place.strides_bytes[1]
        start += slot // kernel * place.kernel_block_stride_bytes + slot % kernel * place.strides_bytes[2]
        return memory[start : start + 32]  # K and V of 8 half-precision numbers


@dataclass(frozen=True)
class Move:
    """Tokens [first, first + count) of a sequence, from the source's blocks to the destination's."""

    source: Cache
    destination: Cache
    first_token: int
    num_tokens: int
    seed: int = 0

    def blocks(self) -> tuple[list[int], list[int]]:
        """A random table for each side."""
        rng = np.random.default_rng(self.seed)
        end = self.first_token + self.num_tokens
        source, destination = (
            rng.permutation(BLOCKS)[: -(-end // side.block_size_tokens)].tolist()
            for side in (self.source, self.destination)
        )
        return source, destination

    def runs(self) -> Runs:
        source, destination = self.blocks()
        return plan(
            self.source.group,
            source,
            self.destination.group,
            destination,
            first_token=self.first_token,
            num_tokens=self.num_tokens,
            source_num_blocks=BLOCKS,
            destination_num_blocks=BLOCKS,
        )

    def apply(self, source: Bytes, destination: Bytes) -> None:
        """Copy token by token; every other byte stays."""
        from_blocks, to_blocks = self.blocks()
        first = max(self.source.first_head, self.destination.first_head)
        end = min(side.first_head + side.num_heads for side in (self.source, self.destination))
        for layer in range(len(LAYERS)):
            for head in range(first, end):
                for token in range(self.first_token, self.first_token + self.num_tokens):
                    there, slot = divmod(token, self.source.block_size_tokens)
                    here, own = divmod(token, self.destination.block_size_tokens)
                    content = self.source.token(source, layer, head, from_blocks[there], slot)
                    self.destination.token(destination, layer, head, to_blocks[here], own)[:] = content
