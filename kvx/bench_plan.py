"""Time `plan()`: how long it takes to work out a hand-off's copies, for caches that are alike and for unequal ones.

It runs on the hand-off thread, on one core, and everything else of its engine's hand-offs waits for it. What is taken
is that core's time for it: it waits for nothing, and what else runs on the machine is not its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvx
from kvx.layout import KVCacheLayout
from kvx.plan import HeadRange, Ints, Runs, group_geometry, plan
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup
from kvx.spread import spread

TOTAL_HEADS = 8
# An engine's allocator has long had so much in one piece, and keeps what it gets back. That of a new process returns
# megabytes to the system each time, and a plan of 100,000 copies then pays for 2,500 pages that it touches anew.
_KEPT_BYTES = 31 << 20


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """About `copies` contiguous copies in each case; the first of the plans of each is not counted."""

    copies: int = 100_000
    rounds: int = 15


@dataclass(frozen=True)
class _Cache:
    """One side: the last `heads` of 8 heads of 64, in bfloat16."""

    layout: KVCacheLayout = KVCacheLayout.LBNHC
    block_size_tokens: int = 16
    heads: int = TOTAL_HEADS

    def num_blocks(self, num_tokens: int) -> int:
        """A cache in which the request's blocks may lie apart."""
        return 2 * -(-num_tokens // self.block_size_tokens)

    def geometry(self, layers: int, num_tokens: int) -> CacheGeometry:
        spec = KVCacheSpec.full_attention(
            block_size_tokens=self.block_size_tokens, num_kv_heads=self.heads, head_size=64, dtype="bfloat16"
        )
        group = LayerGroup("group", tuple(f"layer{index}" for index in range(layers)), spec)
        return CacheGeometry(self.layout, (group,), self.num_blocks(num_tokens), 1)

    def blocks(self, num_tokens: int, seed: int, *, permuted: bool) -> Ints:
        """The blocks of one request, by position."""
        ids = np.arange(self.num_blocks(num_tokens), dtype=np.int64)
        if permuted:
            ids = np.random.default_rng(seed).permutation(ids)
        return ids[: len(ids) // 2]


@dataclass(frozen=True)
class _Case:
    name: str
    source: _Cache = _Cache()
    destination: _Cache = _Cache()
    permuted: bool = True
    layers: int = 1

    def tokens(self, copies: int) -> int:
        """How many take about as many copies, where none joins another."""
        period = math.lcm(self.source.block_size_tokens, self.destination.block_size_tokens)
        return -(-copies // self.prepared(2 * period)().num_descriptors) * 2 * period

    def prepared(self, num_tokens: int) -> Callable[[], Runs]:
        """The call to be timed."""
        sides = self.source, self.destination
        geometries = [
            group_geometry(
                side.geometry(self.layers, num_tokens), 0, HeadRange(TOTAL_HEADS - side.heads, side.heads, TOTAL_HEADS)
            )
            for side in sides
        ]
        blocks = [side.blocks(num_tokens, seed, permuted=self.permuted) for seed, side in enumerate(sides)]
        committed = [side.num_blocks(num_tokens) for side in sides]

        def call() -> Runs:
            return plan(
                geometries[0], blocks[0], geometries[1], blocks[1], first_token=0, num_tokens=num_tokens,
                source_num_blocks=committed[0], destination_num_blocks=committed[1],
            )  # fmt: skip

        return call


_LBHNC, _BLNHC = (_Cache(layout) for layout in (KVCacheLayout.LBHNC, KVCacheLayout.BLNHC))
_CASES = (
    _Case("equal blocks, in order", permuted=False),
    _Case("equal blocks"),
    _Case("blocks of 32 to 64", _Cache(block_size_tokens=32), _Cache(block_size_tokens=64)),
    _Case("blocks of 64 to 32", _Cache(block_size_tokens=64), _Cache(block_size_tokens=32)),
    _Case("blocks of 128 to 32", _Cache(block_size_tokens=128), _Cache(block_size_tokens=32)),
    _Case("blocks of 48 to 32", _Cache(block_size_tokens=48), _Cache(block_size_tokens=32)),
    _Case("8 heads to 4 of them, LBHNC", _LBHNC, _Cache(KVCacheLayout.LBHNC, heads=4)),
    _Case("8 heads to 4 of them, LBNHC", _Cache(), _Cache(heads=4)),
    _Case("LBHNC to LBNHC", _LBHNC),
    _Case("LBHNC to BLNHC", _LBHNC, _BLNHC),
    _Case("LBNHC to BLNHC, 32 layers", _Cache(), _BLNHC, layers=32),
)


def bench_plan(settings: PlanSettings) -> dict[str, Any]:
    """The report, case by case: seconds of one core for a plan, its runs, and how many contiguous copies they are."""
    np.empty(_KEPT_BYTES, np.uint8)
    rows = [_measure(case, settings) for case in _CASES]
    return {"kvx": kvx.__version__, "numpy": np.__version__, "copies": settings.copies, "rows": rows}


def _measure(case: _Case, settings: PlanSettings) -> dict[str, Any]:
    tokens = case.tokens(settings.copies) if case.permuted else settings.copies * case.source.block_size_tokens
    call = case.prepared(tokens)
    runs = call()
    durations = []
    for _ in range(settings.rounds):
        start = time.thread_time()
        call()
        durations.append(time.thread_time() - start)
    return {
        "case": case.name,
        "tokens": tokens,
        "runs": len(runs),
        "copies": runs.num_descriptors,
        "plan_s": spread(durations),
    }
