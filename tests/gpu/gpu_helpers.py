"""A small cache on the GPU, a captured graph over one of its views, and Python in a second process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import torch

from kvx.cache import ExtensibleKVCache
from kvx.drivers.base import Driver
from kvx.layout import KVCacheLayout
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup, Segment, SegmentTable, align_capacity
from kvx.tensor import views_of

MIB, GIB = 1 << 20, 1 << 30
FIRST, BLOCKS = 64, 4000  # 16 KiB pages: 128 blocks a granule, so that counts and granules do not line up


def opened(
    driver: Driver, layout: KVCacheLayout = KVCacheLayout.LBHNC, layers: int = 4
) -> tuple[ExtensibleKVCache, dict[str, torch.Tensor]]:
    """A cache in WARMING with FIRST blocks, room for BLOCKS, and its views."""
    spec = KVCacheSpec.full_attention(block_size_tokens=16, num_kv_heads=4, head_size=64, dtype="float16")
    page = spec.page_size_bytes
    capacity = align_capacity(BLOCKS, [page, page // 4, page * layers], driver.granularity_bytes, up=True)
    group = LayerGroup("g", tuple(f"layer{i}" for i in range(layers)), spec)
    geometry = CacheGeometry(layout, (group,), capacity, driver.granularity_bytes)
    cache = ExtensibleKVCache(driver, geometry.segment_table)
    cache.open()
    views = views_of(cache.buffer, geometry)
    cache.set_views(views)
    cache.commit(FIRST)
    return cache, views


def plain_table(segments: int, segment_bytes: int, block_bytes: int = 2 * MIB) -> SegmentTable:
    """Segments of one size, whose blocks are whole granules."""
    blocks = segment_bytes // block_bytes
    nbytes = blocks * block_bytes
    rows = tuple(Segment(i * nbytes, block_bytes, blocks) for i in range(segments))
    return SegmentTable(rows, blocks, segments * nbytes, block_bytes)


class CapturedStep:
    """A graph that writes `source` to the blocks in `ids` and reads them back into `found`, all at fixed addresses."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view
        self.ids = torch.arange(8, device="cuda")
        self.source = torch.zeros(8, *view.shape[1:], dtype=view.dtype, device="cuda")
        self.found = torch.zeros_like(self.source)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        self.view.index_copy_(0, self.ids, self.source)
        torch.index_select(self.view, 0, self.ids, out=self.found)

    def set(self, blocks: Sequence[int], value: float) -> None:
        self.ids.copy_(torch.tensor(blocks))
        self.source.fill_(value)
        self.found.zero_()

    def replay_and_check(self, blocks: Sequence[int], value: float) -> None:
        """Eight blocks."""
        self.set(blocks, value)
        self.graph.replay()
        torch.cuda.synchronize()
        assert bool((self.found == value).all()), (blocks, value)
        assert all(bool((self.view[block] == value).all()) for block in blocks)


def keep_busy(seconds: float) -> None:
    """Queues a kernel on the current stream that does nothing for so long."""
    torch.cuda._sleep(int(seconds * 1.9e9))


def run_python(code: str, *arguments: str, fds: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=200,
        pass_fds=fds, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
