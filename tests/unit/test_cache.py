"""The life of a cache: what each call does, which order is refused, and what a failed call leaves."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from memory_helpers import MIB, FakeConnector, FaultyDriver, Footprint, each_fault, opened_cache, small_geometry

from kvx.cache import CacheState, ExtensibleKVCache
from kvx.drivers.base import MemoryInfo
from kvx.drivers.host import HEADROOM_BYTES, HostDriver
from kvx.errors import CacheStateError, DriverError, LayoutError, OutOfDeviceMemory
from kvx.layout import KVCacheLayout
from kvx.spec import Segment, SegmentTable

GRANULE = 4096


@pytest.fixture(params=[False, True], ids=["host", "dirty"])
def driver(request: pytest.FixtureRequest) -> FaultyDriver:
    """Once as the host is, once as a device whose fresh memory is not zero."""
    return FaultyDriver(HostDriver(GRANULE), dirty=request.param)


def big_table(granularity_bytes: int = 4 * MIB) -> SegmentTable:
    """Two segments whose blocks are a quarter of a granule, so that sizes show in this process's memory."""
    segments = tuple(Segment(i * 16 * granularity_bytes, granularity_bytes // 4, 64) for i in range(2))
    return SegmentTable(segments, 64, 32 * granularity_bytes, granularity_bytes)


def fill(views: dict[str, torch.Tensor], blocks: range, value: float) -> None:
    for view in views.values():
        view[blocks.start : blocks.stop] = value


def values(views: dict[str, torch.Tensor], blocks: range) -> set[float]:
    return {float(v) for view in views.values() for v in view[blocks.start : blocks.stop].unique()}


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_a_whole_life(driver: FaultyDriver, layout: KVCacheLayout) -> None:
    geometry = small_geometry(layout)
    cache, views = opened_cache(driver, geometry)
    base = cache.base_address
    connector = FakeConnector()
    cache.attach(connector)
    assert (cache.state, cache.committed_bytes, cache.reserved_bytes) == ("RESERVED", 0, geometry.total_bytes)
    cache.commit(3)
    assert (cache.state, cache.committed_blocks, connector.opened) == ("WARMING", 3, [])
    assert values(views, range(3)) == {0.0}
    fill(views, range(3), 7)

    cache.extend_kv_cache(6)
    assert (cache.state, cache.committed_blocks, cache.final_blocks) == ("READY", 6, 6)
    assert values(views, range(6)) == {0.0}, "warm-up's garbage is gone"
    assert connector.opened == [(6 * geometry.block_bytes, 1)]
    assert len(cache.mappings) == len(geometry.segment_table.segments)
    fill(views, range(6), 8)

    cache.extend_kv_cache(9)
    assert values(views, range(6)) == {8.0}
    assert values(views, range(6, 9)) == {0.0}
    assert connector.opened[1:] == [(9 * geometry.block_bytes, 2)]
    assert len(cache.mappings) == len(geometry.segment_table.segments)

    cache.sleep()
    assert (cache.state, cache.committed_bytes, cache.committed_blocks, cache.final_blocks) == ("ASLEEP", 0, 0, 9)
    assert not connector.is_open
    cache.wake()
    assert values(views, range(9)) == {0.0}
    assert connector.opened[2:] == [(9 * geometry.block_bytes, 3)]
    assert cache.base_address == base
    cache.check_integrity()
    names = [event.name for event in cache.events if event.name not in ("zero",)]
    assert names == ["reserve", "commit", "extend", "open", "extend", "open", "sleep", "wake", "open"]

    cache.close()
    assert not connector.is_open
    views.clear()
    assert driver.books() == ({}, [], {})
    cache.close()
    cache.check_integrity()


def test_live_blocks_survive_the_first_extend(driver: FaultyDriver) -> None:
    cache, views = opened_cache(driver, small_geometry())
    cache.commit(3)
    fill(views, range(3), 7)
    cache.extend_kv_cache(6, live=True)
    assert values(views, range(3)) == {7.0}
    assert values(views, range(3, 6)) == {0.0}
    cache.close()


def test_the_same_count_again_changes_nothing(driver: FaultyDriver) -> None:
    cache, views = opened_cache(driver, small_geometry())
    connector = FakeConnector()
    cache.attach(connector)
    cache.commit(3)
    cache.extend_kv_cache(3)
    fill(views, range(3), 5)
    mappings = cache.mappings
    cache.extend_kv_cache(3)
    assert (cache.mappings, len(connector.opened)) == (mappings, 1)
    cache.close()


CALLS = {
    "open": lambda c: c.open(),
    "commit": lambda c: c.commit(1),
    "extend": lambda c: c.extend_kv_cache(2),
    "sleep": lambda c: c.sleep(),
    "wake": lambda c: c.wake(),
    "set_views": lambda c: c.set_views([c.buffer]),
    "attach": lambda c: c.attach(FakeConnector()),
}
ALLOWED = {
    CacheState.NEW: {"open", "attach"},
    CacheState.RESERVED: {"commit", "set_views", "attach"},
    CacheState.WARMING: {"extend", "set_views", "attach"},
    CacheState.READY: {"extend", "sleep", "set_views", "attach"},
    CacheState.ASLEEP: {"wake", "set_views", "attach"},
    CacheState.CLOSED: set(),
}


def cache_in(state: CacheState, driver: FaultyDriver) -> ExtensibleKVCache:
    cache = ExtensibleKVCache(driver, small_geometry().segment_table)
    if state is CacheState.NEW:
        return cache
    cache, _ = opened_cache(driver, small_geometry())
    if state in (CacheState.WARMING, CacheState.READY, CacheState.ASLEEP):
        cache.commit(1)
    if state in (CacheState.READY, CacheState.ASLEEP):
        cache.extend_kv_cache(2)
    if state is CacheState.ASLEEP:
        cache.sleep()
    if state is CacheState.CLOSED:
        cache.close()
    assert cache.state is state
    return cache


@pytest.mark.parametrize("state", list(CacheState))
def test_any_other_order_raises_and_changes_nothing(state: CacheState, driver: FaultyDriver) -> None:
    for call in CALLS.keys() - ALLOWED[state]:
        cache = cache_in(state, driver)
        books = driver.books()
        with pytest.raises(CacheStateError, match=state):
            CALLS[call](cache)
        assert (cache.state, driver.books()) == (state, books)
        cache.check_integrity()
        cache.close()
    for call in ALLOWED[state] - {"set_views"}:
        cache = cache_in(state, driver)
        CALLS[call](cache)
        cache.check_integrity()
        cache.close()
    assert driver.books() == ({}, [], {})


def test_counts_outside_the_cache_are_refused(driver: FaultyDriver) -> None:
    cache, _ = opened_cache(driver, small_geometry())
    for count in (-1, 0, cache.capacity_blocks + 1):
        with pytest.raises(LayoutError, match="at most the capacity"):
            cache.commit(count)
    cache.commit(3)
    for count in (2, cache.capacity_blocks + 1):
        with pytest.raises(LayoutError, match="never shrinks"):
            cache.extend_kv_cache(count)
    assert cache.state is CacheState.WARMING
    cache.close()


def test_a_table_for_other_granules_is_refused() -> None:
    cache = ExtensibleKVCache(HostDriver(2 * MIB), small_geometry().segment_table)
    with pytest.raises(LayoutError, match="do not fit the driver's granularity"):
        cache.open()


def test_views_of_other_memory_are_refused(driver: FaultyDriver) -> None:
    cache, _ = opened_cache(driver, small_geometry())
    with pytest.raises(LayoutError, match="1 of 2 views are not on this cache"):
        cache.set_views([cache.buffer, torch.zeros(4)])
    cache.close()


def test_views_cannot_change_under_open_connectors(driver: FaultyDriver) -> None:
    cache, views = opened_cache(driver, small_geometry())
    cache.attach(FakeConnector())
    cache.commit(1)
    cache.extend_kv_cache(2)
    with pytest.raises(CacheStateError, match="connectors are open"):
        cache.set_views(views)
    cache.close()


def test_an_attached_connector_opens_now_or_at_the_next_ready(driver: FaultyDriver) -> None:
    geometry = small_geometry()
    cache, _ = opened_cache(driver, geometry)
    early, late = FakeConnector(), FakeConnector()
    cache.attach(early)
    cache.commit(1)
    cache.extend_kv_cache(2)
    cache.attach(late)
    assert early.opened == late.opened == [(2 * geometry.block_bytes, 1)]
    cache.detach(early)
    assert not early.is_open
    cache.extend_kv_cache(4)
    assert (len(early.opened), late.opened[1:]) == (1, [(4 * geometry.block_bytes, 2)])
    cache.close()


def test_a_connector_needs_views(driver: FaultyDriver) -> None:
    cache = ExtensibleKVCache(driver, small_geometry().segment_table)
    cache.open()
    cache.attach(FakeConnector())
    cache.commit(1)
    books = driver.books()
    with pytest.raises(CacheStateError, match="set_views"):
        cache.extend_kv_cache(2)
    assert (cache.state, driver.books()) == (CacheState.WARMING, books)
    cache.close()


@pytest.mark.parametrize("when", ["first", "later"])
def test_an_extend_is_undone_when_a_connector_does_not_open(driver: FaultyDriver, when: str) -> None:
    geometry = small_geometry()
    cache, views = opened_cache(driver, geometry)
    good, bad = FakeConnector(), FakeConnector()
    cache.attach(good)
    cache.attach(bad)
    cache.commit(2)
    if when == "later":
        cache.extend_kv_cache(3)
        fill(views, range(3), 6)
    state, count, books = cache.state, cache.committed_blocks, driver.books()
    bad.fail_open = True
    good_before = len(good.opened)
    cache._connectors = [good, bad]
    with pytest.raises(RuntimeError, match="cannot register"):
        cache.extend_kv_cache(6)
    assert (cache.state, cache.committed_blocks, driver.books()) == (state, count, books)
    if when == "later":
        assert values(views, range(3)) == {6.0}
        assert good.opened[-1] == (3 * geometry.block_bytes, cache.generation), "open again on what is there now"
        assert len(good.opened) == good_before + 2
    else:
        assert not good.is_open
    bad.fail_open = False
    cache.close()


def test_an_extend_is_not_begun_when_a_connector_does_not_drain(driver: FaultyDriver) -> None:
    cache, views = opened_cache(driver, small_geometry())
    connectors = [FakeConnector(), FakeConnector(), FakeConnector()]
    for connector in connectors:
        cache.attach(connector)
    cache.commit(1)
    cache.extend_kv_cache(3)
    fill(views, range(3), 6)
    mappings = cache.mappings
    connectors[1].fail_close = True
    for call in (lambda: cache.extend_kv_cache(6), cache.sleep, cache.close):
        with pytest.raises(RuntimeError, match="cannot drain"):
            call()
        assert (cache.state, cache.mappings) == (CacheState.READY, mappings), "no unmap under a transfer"
        cache.check_integrity()
        assert values(views, range(3)) == {6.0}
    connectors[1].fail_close = False
    cache.close()
    assert not any(connector.is_open for connector in connectors)


def test_bytes_for_a_copy_are_committed_or_refused(driver: FaultyDriver) -> None:
    cache = ExtensibleKVCache(driver, big_table(GRANULE))
    cache.open()
    with pytest.raises(LayoutError, match="RESERVED with 0 committed blocks"):
        cache.committed_range(0, 1)
    cache.commit(5)  # two granules of each segment
    assert tuple(cache.committed_range(GRANULE, GRANULE).shape) == (GRANULE,)
    second = 16 * GRANULE
    for offset, nbytes in ((0, 2 * GRANULE + 1), (-1, 2), (second - 1, 2), (2 * GRANULE, 1), (0, 0), (0, -1)):
        with pytest.raises(LayoutError, match="not inside one mapping"):
            cache.committed_range(offset, nbytes)
    cache.extend_kv_cache(64)
    with pytest.raises(LayoutError, match="not inside one mapping"):
        cache.committed_range(0, second + 1)
    cache.committed_range(0, second).copy_(torch.ones(second, dtype=torch.int8))
    cache.sleep()
    with pytest.raises(LayoutError, match="ASLEEP"):
        cache.committed_range(0, 1)
    cache.close()


# -- a fault at each driver call in turn -----------------------------------------------------------------------------


def state_of(cache: ExtensibleKVCache, driver: FaultyDriver) -> tuple[object, ...]:
    spans = tuple((m.address, m.nbytes) for m in cache.mappings)
    return cache.state, cache.committed_blocks, cache.final_blocks, spans, cache.base_address, driver.books()


FAULTS = {
    "open": (lambda c: None, lambda c: c.open()),
    "commit": (lambda c: c.open(), lambda c: c.commit(6)),
    "extend": (lambda c: (c.open(), c.commit(6)), lambda c: c.extend_kv_cache(20)),
    "extend live": (lambda c: (c.open(), c.commit(6)), lambda c: c.extend_kv_cache(20, live=True)),
    "extend again": (lambda c: (c.open(), c.commit(6), c.extend_kv_cache(9)), lambda c: c.extend_kv_cache(20)),
    "wake": (lambda c: (c.open(), c.commit(6), c.extend_kv_cache(9), c.sleep()), lambda c: c.wake()),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("dirty", [False, True], ids=["host", "dirty"])
def test_a_fault_at_each_driver_call_leaves_everything_as_it_was(name: str, dirty: bool) -> None:
    driver = FaultyDriver(HostDriver(4 * MIB), dirty=dirty)
    prepare, act = FAULTS[name]
    cache = ExtensibleKVCache(driver, big_table())
    prepare(cache)
    kept = cache.committed_blocks if name in ("extend live", "extend again") else 0
    block = big_table().segments[0].block_stride_bytes
    if kept:
        cache.buffer[: kept * block] = 5
        torch.zeros(8 * MIB).copy_(
            torch.ones(8 * MIB)
        )  # torch starts its threads, which take memory, at its first copy
    before, state = Footprint.now(), state_of(cache, driver)
    calls = []
    for call in each_fault(driver, lambda: act(cache)):
        calls.append(call)
        Footprint.now().assert_close(before)
        assert state_of(cache, driver) == state
        cache.check_integrity()
        if kept:
            low, high = cache.buffer[: kept * block].aminmax()
            assert (int(low), int(high)) == (5, 5)
    assert len(calls) >= (1 if name == "open" else 4)
    cache.check_integrity()
    cache.close()
    assert driver.books() == ({}, [], {})


def test_a_fault_at_each_driver_call_of_sleep() -> None:
    """Until memory is given back everything is undone; after that the cache is asleep, and wake tries again."""
    driver = FaultyDriver(HostDriver(4 * MIB))
    found = []
    for fail_at in range(1, 7):
        before = Footprint.now()
        cache = ExtensibleKVCache(driver, big_table())
        cache.open()
        cache.commit(6)
        cache.extend_kv_cache(9)
        cache.buffer[:100] = 5
        state = state_of(cache, driver)
        driver.arm(fail_at)
        try:
            cache.sleep()
            break
        except DriverError:
            call = driver.calls[-1] if driver.calls[-1] == "release" else driver.calls[fail_at - 1]
        finally:
            driver.arm(0)
        cache.check_integrity()
        found.append((call, cache.state))
        if cache.state is CacheState.READY:
            assert state_of(cache, driver) == state
            assert cache.buffer[:100].tolist() == [5] * 100
        else:
            cache.wake()
            assert not cache.buffer[:100].any()
        cache.close()
        assert driver.books() == ({}, [], {})
        Footprint.now().assert_close(before)
    ready, asleep = CacheState.READY, CacheState.ASLEEP
    assert found == [
        ("synchronize", ready),
        ("unmap", ready),
        ("unmap", ready),
        ("release", asleep),
        ("release", asleep),
    ]


@pytest.mark.parametrize("fail_at", range(1, 8))
def test_a_close_that_failed_can_be_called_again(fail_at: int) -> None:
    before = Footprint.now()
    driver = FaultyDriver(HostDriver(4 * MIB))
    cache = ExtensibleKVCache(driver, big_table())
    cache.open()
    cache.commit(6)
    cache.extend_kv_cache(9)
    driver.arm(fail_at)
    if fail_at <= 6:
        with pytest.raises(DriverError, match="INJECTED"):
            cache.close()
    driver.arm(0)
    cache.close()
    assert driver.books() == ({}, [], {})
    Footprint.now().assert_close(before)


# -- too little memory -----------------------------------------------------------------------------------------------


class LimitedMemory:
    """A host with so many bytes for this driver's allocations."""

    def __init__(self, limit_bytes: int) -> None:
        self.driver = FaultyDriver(HostDriver(GRANULE, self.info))
        self.limit_bytes = limit_bytes

    def info(self) -> MemoryInfo:
        free = self.limit_bytes - sum(self.driver.allocated.values())
        return MemoryInfo(free + HEADROOM_BYTES, self.limit_bytes + HEADROOM_BYTES)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.LHBNC])
def test_too_large_an_extend_is_out_of_memory_and_undone(layout: KVCacheLayout, live: bool) -> None:
    geometry = small_geometry(layout, blocks=48, layers=4)
    for limit in range(8 * GRANULE, 80 * GRANULE, 3 * GRANULE):
        memory = LimitedMemory(limit)
        cache, views = opened_cache(memory.driver, geometry)
        cache.commit(4)
        fill(views, range(4), 3)
        state = state_of(cache, memory.driver)
        try:
            cache.extend_kv_cache(40, live=live)
        except OutOfDeviceMemory:
            assert state_of(cache, memory.driver) == state
            assert not live or values(views, range(4)) == {3.0}
        cache.check_integrity()
        cache.close()
    assert cache.final_blocks == 40, "the last limit was large enough"


def test_too_large_a_commit_is_out_of_memory() -> None:
    memory = LimitedMemory(2 * GRANULE)
    cache, _ = opened_cache(memory.driver, small_geometry(blocks=48))
    with pytest.raises(OutOfDeviceMemory, match="ask for fewer blocks"):
        cache.commit(30)
    assert (cache.state, cache.committed_bytes) == (CacheState.RESERVED, 0)
    cache.commit(2)
    cache.close()


# -- block ids -------------------------------------------------------------------------------------------------------


def test_block_ids_are_checked_against_the_committed_count(driver: FaultyDriver) -> None:
    cache, _ = opened_cache(driver, small_geometry())
    with pytest.raises(LayoutError, match="outside the 0 committed"):
        cache.check_block_ids([0])
    cache.commit(3)
    cache.check_block_ids([0, 2, 1])
    cache.check_block_ids([])
    cache.check_block_ids(np.array([[0, 1], [2, 0]], dtype=np.int32))
    with pytest.raises(LayoutError, match=r"block id 3 \(at index 2\) is outside the 3 committed blocks"):
        cache.check_block_ids([0, 2, 3, 4])
    with pytest.raises(LayoutError, match="block id -1"):
        cache.check_block_ids(np.array([[0, 1], [-1, 0]]))
    for strange in ([2**70], [0.5], np.array([1.0]), ["1"]):
        with pytest.raises(LayoutError, match="whole numbers"):
            cache.check_block_ids(strange)
    with pytest.raises(LayoutError):
        cache.check_block_ids(np.array([2**64 - 1], dtype=np.uint64))
    cache.extend_kv_cache(5)
    cache.check_block_ids(range(5))
    cache.sleep()
    with pytest.raises(LayoutError, match="ASLEEP"):
        cache.check_block_ids([0])
    cache.close()


def test_block_ids_out_of_bounds_are_exceptions_and_no_crash_in_a_second_process() -> None:
    code = """
        import sys
        sys.path.insert(0, {here!r})
        from memory_helpers import opened_cache, small_geometry
        from kvx.drivers.host import HostDriver
        from kvx.errors import LayoutError, PeerMismatch
        from kvx.geometry import group_geometry
        from kvx.plan import plan
        from kvx.region import regions_of
        geometry = small_geometry(blocks=4000)
        cache, views = opened_cache(HostDriver(4096), geometry)
        cache.commit(3)
        group = group_geometry(geometry, 0)
        for bad in (3, -1, cache.capacity_blocks - 1, cache.capacity_blocks, 2**40):
            for call in (
                lambda: cache.check_block_ids([0, bad]),
                lambda: plan(group, [0, bad], group, [0, 1], first_token=0, num_tokens=8,
                             source_num_blocks=cache.committed_blocks, destination_num_blocks=cache.committed_blocks),
            ):  # a read of any of these would end this process
                try:
                    call()
                except (LayoutError, PeerMismatch) as error:
                    print(type(error).__name__)
        try:
            regions_of(list(views.values()), 2000, cache.mappings, base_address=cache.base_address,
                       capacity_blocks=cache.capacity_blocks)
        except LayoutError as error:
            print(type(error).__name__)
        cache.close()
    """
    here = __file__.rsplit("/", 1)[0]
    code = textwrap.dedent(code).replace("{here!r}", repr(here))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 11, done.stdout
    assert set(done.stdout.split()) <= {"LayoutError", "PeerMismatch"}, done.stdout


# -- tensors and close -----------------------------------------------------------------------------------------------


def test_close_keeps_the_memory_of_views_that_live(driver: FaultyDriver) -> None:
    cache, views = opened_cache(driver, small_geometry())
    cache.commit(3)
    fill(views, range(3), 4)
    cache.close()
    assert values(views, range(3)) == {4.0}
    assert (cache.state, cache.committed_blocks, cache.base_address) == (CacheState.CLOSED, 0, 0)
    with pytest.raises(CacheStateError, match="CLOSED"):
        _ = cache.buffer
    del views["layer0"]
    assert driver.mapped
    views.clear()
    assert driver.books() == ({}, [], {})
