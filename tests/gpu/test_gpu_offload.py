"""Cache blocks to pinned host memory and back on a real GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from gpu_helpers import BLOCKS, keep_busy, opened
from kvx_connectors.cpu_offload import CpuOffloadConnector

from kvx import bench_offload
from kvx.cache import ExtensibleKVCache
from kvx.drivers.cuda import CudaDriver
from kvx.geometry import HeadRange, group_geometry_of_views
from kvx.offload_worker import BlockCopy, OffloadEvents, OffloadWorker

HOST_BLOCKS = 64
DEADLINE_S = 20.0


@dataclass
class World:
    cache: ExtensibleKVCache
    views: dict[str, torch.Tensor]
    connector: CpuOffloadConnector
    worker: OffloadWorker

    def copy(self, name: str, host_blocks: list[int], blocks: list[int]) -> BlockCopy:
        return BlockCopy(name, self.worker.generation, tuple(host_blocks), tuple((block,) for block in blocks))

    def events(self) -> OffloadEvents:
        until = time.monotonic() + DEADLINE_S
        while not (found := self.worker.poll()):
            assert time.monotonic() < until, "nothing ended"
        return found


@pytest.fixture
def world(driver: CudaDriver) -> Iterator[World]:
    cache, views = opened(driver)
    cache.extend_kv_cache(BLOCKS)
    connector = CpuOffloadConnector(HOST_BLOCKS * cache.table.block_bytes)
    cache.attach(connector)
    group = group_geometry_of_views(
        "g", "full_attention", views, base_address=cache.base_address, capacity_blocks=cache.capacity_blocks,
        block_size_tokens=16, heads=HeadRange(0, 4, 4), dtype="float16",
    )  # fmt: skip
    worker = OffloadWorker(connector, cache.table.segments, [group], views, tokens_per_block=16, verifies=True)
    assert connector.wait_ready(DEADLINE_S) >= HOST_BLOCKS * cache.table.block_bytes
    world = World(cache, views, connector, worker)
    yield world
    cache.close()
    views.clear()
    world.__dict__.clear()  # pytest keeps it longer than the driver, and the worker in it has the views


def test_a_store_sees_the_step_that_was_queued_before_it(world: World) -> None:
    keep_busy(0.3)
    for index, view in enumerate(world.views.values()):
        view[3] = 7.0 + index
    began = time.monotonic()
    world.worker.store(world.copy("s", [5], [3]))
    assert time.monotonic() - began < 0.2, "the engine's thread does not wait"
    assert world.events().stored == {"s"}
    for view in world.views.values():
        view[3] = 0.0
    world.worker.load(world.copy("r", [5], [900]))
    assert world.events().loaded == {"r"}
    for index, view in enumerate(world.views.values()):
        assert bool((view[900] == 7.0 + index).all())
        assert not bool(view[901].any())
    assert world.worker.status()["digests"]["mismatched"] == 0


def test_sleep_waits_for_copies_and_ends_the_host_memory(world: World) -> None:
    keep_busy(0.2)
    copy = world.copy("s", list(range(HOST_BLOCKS)), list(range(HOST_BLOCKS)))
    world.worker.store(copy)
    world.cache.sleep()
    events = world.events()
    assert events.stored | events.unstored == {"s"}
    world.cache.wake()
    assert world.worker.generation > copy.generation
    world.worker.load(BlockCopy("r", copy.generation, (0,), ((1,),)))
    assert "r" in world.events().unloaded


def test_the_bench_moves_the_right_bytes(driver: CudaDriver) -> None:
    found = bench_offload.bench_offload(
        bench_offload.OffloadSettings(device=driver.device, total_bytes=64 << 20, pairs=1)
    )
    assert len(found["rows"]) == 8
    assert all(row["bytes_per_s"]["kvx"]["median"] > 0 for row in found["rows"])
