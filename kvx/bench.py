"""Time the memory itself: how fast a cache grows, and whether its memory is as fast as torch's own.

Each number is the median of several rounds after one that is not counted, with the lowest and the highest beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

import kvx
from kvx.cache import ExtensibleKVCache
from kvx.drivers.base import Driver
from kvx.drivers.select import driver_for
from kvx.errors import SizingError
from kvx.spec import Segment, SegmentTable
from kvx.spread import spread

KVX, TORCH = "kvx", "torch"
GIB = 1 << 30
BLOCK_BYTES = 1 << 16
"""Of a benchmark's cache, in each segment; the gather moves pieces of this size."""

_MEMSET_BYTES = 4 * GIB
_LEAST_ROUND_S = 0.03
_PART_OF_FREE = {"cpu": 0.25, "cuda": 0.9}
# A CUDA driver cleans released memory before giving it out again (H200: 130 GiB, 240 ms instead of 30). An engine that
# starts does not meet that; a round that follows another does.
_REST_S = {"cpu": 0.0, "cuda": 2.0}


@dataclass(frozen=True, kw_only=True)
class ExtendSettings:
    """A cache of `total_bytes` (None: most of what is free) over so many segments, grown anew each round."""

    device: str
    total_bytes: int | None = None
    segments: int = 30
    rounds: int = 7


@dataclass(frozen=True, kw_only=True)
class BandwidthSettings:
    """Operations from one buffer of `buffer_bytes` to another; kvx memory and torch memory take turns."""

    device: str
    buffer_bytes: int = GIB
    pairs: int = 7


def bench_extend(settings: ExtendSettings) -> dict[str, Any]:
    """The report of growing from warm-up's blocks to all, of sleeping and of waking.

    `map_s` is mapping alone, warm-up's release included, of memory that has rested; `wake_s` comes right after the
    release of as much; `zero_s` and what follows from it are there only where the driver's memory is not zero at first.
    """
    driver = driver_for(settings.device)
    table = _table(driver, settings)
    memset = (
        [_memset_seconds(driver) for _ in range(settings.rounds + 1)][1:] if not driver.allocations_are_zero else []
    )
    torch.cuda.empty_cache()  # torch would keep what memset was tried on
    rounds = [_grow(driver, table) for _ in range(settings.rounds + 1)][1:]
    report: dict[str, Any] = {
        **_heading(driver),
        "segments": settings.segments,
        "total_bytes": table.total_bytes,
        "rounds": settings.rounds,
        **{name: spread([one[name] for one in rounds]) for name in rounds[0]},
    }
    if memset:
        zeroing = [table.total_bytes / one["zero_s"] for one in rounds]
        report["zero_bytes_per_s"] = spread(zeroing)
        report["memset_bytes_per_s"] = spread([_MEMSET_BYTES / seconds for seconds in memset])
        report["zero_bandwidth_ratio"] = statistics.median(zeroing) * statistics.median(memset) / _MEMSET_BYTES
    return report


def bench_bandwidth(settings: BandwidthSettings) -> dict[str, Any]:
    """The report of a copy, an elementwise kernel and a gather of shuffled blocks: bytes read and written a second."""
    driver = driver_for(settings.device)
    nbytes = _whole(settings.buffer_bytes, max(driver.granularity_bytes, BLOCK_BYTES))
    segments = tuple(Segment(i * nbytes, BLOCK_BYTES, nbytes // BLOCK_BYTES) for i in range(2))
    table = SegmentTable(segments, nbytes // BLOCK_BYTES, 2 * nbytes, driver.granularity_bytes)
    cache = _whole_cache(driver, table)
    empty = torch.zeros(2, nbytes, dtype=torch.int8, device=driver.device)
    buffers = {
        KVX: (cache.committed_range(0, nbytes), cache.committed_range(nbytes, nbytes)),
        TORCH: (empty[0], empty[1]),
    }
    order = torch.randperm(nbytes // BLOCK_BYTES, generator=torch.Generator().manual_seed(1)).to(driver.device)
    operations: dict[str, Any] = {}
    for name, operation in _OPERATIONS.items():
        acts = {side: operation(*pair, order) for side, pair in buffers.items()}
        operations[name] = _alternate(driver, acts, settings.pairs, 2 * nbytes)
    cache.close()
    return {**_heading(driver), "buffer_bytes": nbytes, "pairs": settings.pairs, "operations": operations}


def _copy(source: torch.Tensor, target: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


def _kernel(source: torch.Tensor, target: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    numbers, results = source.view(torch.float32), target.view(torch.float32)
    return lambda: torch.add(numbers, 1.0, out=results)


def _gather(source: torch.Tensor, target: torch.Tensor, order: torch.Tensor) -> Callable[[], object]:
    blocks, results = (buffer.view(torch.float32).view(order.numel(), -1) for buffer in (source, target))
    return lambda: torch.index_select(blocks, 0, order, out=results)


_OPERATIONS = {"copy": _copy, "kernel": _kernel, "gather": _gather}


def _alternate(
    driver: Driver, acts: dict[str, Callable[[], object]], pairs: int, bytes_each: int
) -> dict[str, dict[str, float]]:
    """Both sides in turn, each going first as often as the other; bytes a second, and kvx over torch pair by pair."""
    times = dict.fromkeys(acts, 1)
    for side, act in acts.items():
        _seconds(driver, act, 1)
        times[side] = max(1, round(_LEAST_ROUND_S / _seconds(driver, act, 1)))
    repeat = max(times.values())
    found: dict[str, list[float]] = {side: [] for side in acts}
    for number in range(pairs):
        for side in acts if number % 2 else reversed(acts):
            found[side].append(bytes_each / _seconds(driver, acts[side], repeat))
    ratios = [ours / theirs for ours, theirs in zip(found[KVX], found[TORCH], strict=True)]
    return {**{side: spread(values) for side, values in found.items()}, "ratio": spread(ratios)}


def _seconds(driver: Driver, act: Callable[[], object], repeat: int) -> float:
    driver.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        act()
    driver.synchronize()
    return (time.perf_counter() - start) / repeat


def _grow(driver: Driver, table: SegmentTable) -> dict[str, float]:
    """One life of a cache; seconds of its steps."""
    time.sleep(_REST_S[driver.device.partition(":")[0]])
    cache = ExtensibleKVCache(driver, table)
    cache.open()
    cache.commit(max(1, table.capacity_blocks // 128))
    first = len(cache.events)
    cache.extend_kv_cache(table.capacity_blocks)
    grown = {event.name: event.duration_s for event in cache.events[first:]}
    start = time.perf_counter()
    cache.sleep()
    sleep_s = time.perf_counter() - start
    cache.wake()
    wake_s = next(event.duration_s for event in cache.events if event.name == "wake")
    cache.close()
    zero = {"zero_s": grown["zero"]} if "zero" in grown else {}
    return {"map_s": grown["extend"], **zero, "sleep_s": sleep_s, "wake_s": wake_s}


def _whole_cache(driver: Driver, table: SegmentTable) -> ExtensibleKVCache:
    cache = ExtensibleKVCache(driver, table)
    cache.open()
    cache.commit(1)
    cache.extend_kv_cache(table.capacity_blocks)
    return cache


def _memset_seconds(driver: Driver) -> float:
    """What the device's own memset needs for torch memory of `_MEMSET_BYTES`."""
    memory = torch.empty(_MEMSET_BYTES, dtype=torch.int8, device=driver.device)
    if torch.version.cuda is None or not memory.is_cuda:
        return _seconds(driver, memory.zero_, 4)
    memset = import_module("cuda.bindings.driver").cuMemsetD32
    return _seconds(driver, lambda: memset(memory.data_ptr(), 0, _MEMSET_BYTES // 4), 4)


def _table(driver: Driver, settings: ExtendSettings) -> SegmentTable:
    free_bytes = driver.memory_info().free_bytes
    wanted = settings.total_bytes or int(free_bytes * _PART_OF_FREE[driver.device.partition(":")[0]])
    granule = max(driver.granularity_bytes, BLOCK_BYTES)
    each = _whole(wanted // settings.segments, granule)
    if (total := each * settings.segments) > free_bytes:
        raise SizingError(f"{total} bytes over {settings.segments} segments, but {free_bytes} are free; ask for less")
    blocks = each // BLOCK_BYTES
    segments = tuple(Segment(i * each, BLOCK_BYTES, blocks) for i in range(settings.segments))
    return SegmentTable(segments, blocks, total, driver.granularity_bytes)


def _whole(nbytes: int, unit: int) -> int:
    """The largest multiple of `unit` that is not above `nbytes`, and at least one."""
    return max(unit, nbytes // unit * unit)


def _heading(driver: Driver) -> dict[str, str]:
    is_gpu = driver.device != "cpu"
    name = torch.cuda.get_device_name(driver.device) if is_gpu else "host memory"
    return {"kvx": kvx.__version__, "torch": torch.__version__, "device": driver.device, "device_name": name}
