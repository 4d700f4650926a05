"""The cache on a real GPU: growth under captured graphs, zeros, illegal acts, other processes, and the end."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from gpu_helpers import BLOCKS, FIRST, GIB, MIB, CapturedStep, keep_busy, opened, plain_table, run_python

from kvx.cache import CacheState, ExtensibleKVCache
from kvx.drivers.base import MemoryInfo
from kvx.drivers.cuda import CudaDriver
from kvx.errors import CacheStateError, DriverError, LayoutError, OutOfDeviceMemory
from kvx.layout import KVCacheLayout
from kvx.tensor import tensor_over
from kvx.vmm import Reservation

EIGHT_LAST = list(range(BLOCKS - 8, BLOCKS))


def test_what_the_device_says(driver: CudaDriver) -> None:
    print(f"granularity {driver.granularity_bytes}, export {driver.can_export}, RDMA {driver.is_rdma_capable}")
    assert driver.granularity_bytes % (64 << 10) == 0
    found: list[MemoryInfo] = []
    thread = threading.Thread(target=lambda: (driver.synchronize(), found.append(driver.memory_info())))
    thread.start()
    thread.join()
    assert found[0].total_bytes == torch.cuda.mem_get_info()[1], "a thread without a context of its own may ask"


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_a_whole_life(driver: CudaDriver, layout: KVCacheLayout) -> None:
    cache, views = opened(driver, layout)
    base = cache.base_address
    assert views["layer0"].device == torch.device(driver.device)
    for view in views.values():
        view[:FIRST] = 7
    cache.extend_kv_cache(BLOCKS // 2)
    assert not any(bool(view[: BLOCKS // 2].any()) for view in views.values()), "warm-up's garbage is gone"
    for number, view in enumerate(views.values()):
        view[: BLOCKS // 2] = number + 1
    cache.extend_kv_cache(BLOCKS)
    for number, view in enumerate(views.values()):
        assert bool((view[: BLOCKS // 2] == number + 1).all())
        assert not bool(view[BLOCKS // 2 : BLOCKS].any())
    assert len(cache.mappings) == len(cache.table.segments)
    cache.check_integrity()
    before = driver.memory_info().free_bytes
    cache.sleep()
    assert driver.memory_info().free_bytes - before >= sum(BLOCKS * 16384 for _ in views) - 64 * MIB
    cache.wake()
    assert not any(bool(view[:BLOCKS].any()) for view in views.values())
    assert cache.base_address == base
    cache.close()


def test_live_blocks_survive_the_first_extend(driver: CudaDriver) -> None:
    cache, views = opened(driver)
    views["layer3"][:FIRST] = 7
    cache.extend_kv_cache(BLOCKS, live=True)
    assert bool((views["layer3"][:FIRST] == 7).all())
    assert not bool(views["layer3"][FIRST:BLOCKS].any())
    cache.close()


def test_memory_that_somebody_poisoned_reads_as_zeros(driver: CudaDriver) -> None:
    nbytes = int(driver.memory_info().free_bytes * 0.9) // (8 * 2 * MIB) * (2 * MIB)
    poison = [torch.full((nbytes,), 0x5A, dtype=torch.int8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    del poison
    torch.cuda.empty_cache()
    cache = ExtensibleKVCache(driver, plain_table(8, nbytes))
    cache.open()
    cache.commit(1)
    cache.extend_kv_cache(cache.capacity_blocks)
    for segment in cache.table.segments:
        assert not bool(cache.committed_range(segment.offset_bytes, nbytes).view(torch.int64).any())
    cache.close()


# -- captured graphs -------------------------------------------------------------------------------------------------


def test_a_graph_replays_right_on_blocks_committed_after_its_capture(driver: CudaDriver) -> None:
    cache, views = opened(driver)
    step = CapturedStep(views["layer2"])
    step.replay_and_check(list(range(8)), 3)
    cache.extend_kv_cache(BLOCKS // 2)
    step.replay_and_check(list(range(BLOCKS // 2 - 8, BLOCKS // 2)), 4)
    cache.extend_kv_cache(BLOCKS)
    step.replay_and_check(EIGHT_LAST, 5)
    assert bool((views["layer2"][BLOCKS // 2 - 8 : BLOCKS // 2] == 4).all())
    cache.sleep()
    cache.wake()
    step.replay_and_check(EIGHT_LAST, 6)
    assert not bool(views["layer2"][: BLOCKS - 8].any()), "the rest woke as zeros"
    cache.close()


def test_a_graph_replays_right_while_another_cache_grows_on_another_thread(driver: CudaDriver) -> None:
    cache, views = opened(driver)
    step = CapturedStep(views["layer1"])
    cache.extend_kv_cache(BLOCKS)
    stop, errors, lives = threading.Event(), [], []

    def live() -> None:
        try:
            while not stop.is_set():
                other, _ = opened(driver)
                other.extend_kv_cache(BLOCKS // 2)
                other.extend_kv_cache(BLOCKS)
                other.sleep()
                other.wake()
                other.close()
                lives.append(1)
        except Exception as error:  # noqa: BLE001  (shown below, on the test's own thread)
            errors.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    number = 0
    while thread.is_alive() and (len(lives) < 5 or number < 300):
        step.replay_and_check([(number * 8 + i) % BLOCKS for i in range(8)], float(number % 100))
        number += 1
    stop.set()
    thread.join()
    assert not errors
    print(f"{number} replays beside {len(lives)} lives of another cache")
    cache.close()


def test_an_extend_waits_for_the_graphs_of_the_same_cache(driver: CudaDriver) -> None:
    cache, views = opened(driver)
    step = CapturedStep(views["layer0"])
    cache.extend_kv_cache(BLOCKS // 2)
    blocks = list(range(16, 24))
    step.set(blocks, 9)
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        keep_busy(0.3)
        step.graph.replay()
        done.record()
    assert not done.query()
    cache.extend_kv_cache(BLOCKS)
    assert done.query()
    assert all(bool((views["layer0"][block] == 9).all()) for block in blocks)
    cache.close()


# -- illegal acts: an error of kvx, a context that lives, a state as before -----------------------------------------


def spans(cache: ExtensibleKVCache) -> list[tuple[int, int]]:
    return [(mapping.address, mapping.nbytes) for mapping in cache.mappings]


def test_bytes_and_blocks_without_memory_are_refused(driver: CudaDriver) -> None:
    cache, _ = opened(driver)
    host = torch.zeros(2 * MIB, dtype=torch.int8, pin_memory=True)
    second = cache.table.segments[1].offset_bytes
    for offset in (second - 2 * MIB, cache.reserved_bytes - MIB, MIB):
        with pytest.raises(LayoutError, match="not inside one mapping"):
            cache.committed_range(offset, 2 * MIB).copy_(host, non_blocking=True)
    cache.committed_range(second, 2 * MIB).copy_(host, non_blocking=True)
    with pytest.raises(LayoutError, match=f"block id {FIRST} "):
        cache.check_block_ids([0, FIRST])
    cache.extend_kv_cache(BLOCKS)
    cache.check_block_ids(range(BLOCKS))
    cache.sleep()
    with pytest.raises(LayoutError, match="ASLEEP"):
        cache.committed_range(second, 2 * MIB)
    with pytest.raises(LayoutError, match="0 committed"):
        cache.check_block_ids([0])
    cache.close()


def test_an_extend_beyond_the_capacity_is_refused(driver: CudaDriver) -> None:
    cache, views = opened(driver)
    views["layer0"][:FIRST] = 7
    before = spans(cache)
    with pytest.raises(LayoutError, match="at most the capacity"):
        cache.extend_kv_cache(cache.capacity_blocks + 1)
    with pytest.raises(CacheStateError, match="sleep in state WARMING"):
        cache.sleep()
    assert (cache.state, spans(cache)) == (CacheState.WARMING, before)
    assert bool((views["layer0"][:FIRST] == 7).all())
    cache.close()


@pytest.mark.parametrize("act", ["close", "last view", "sleep"])
def test_nothing_goes_under_work_in_flight(driver: CudaDriver, act: str) -> None:
    cache, views = opened(driver)
    cache.extend_kv_cache(BLOCKS)
    kept = [views["layer0"]]
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    if act == "last view":
        views.clear()
        cache.close()
        assert driver.memory_info().free_bytes > 0
    with torch.cuda.stream(stream):
        keep_busy(0.3)
        kept[0][:BLOCKS].fill_(5)
        done.record()
    assert not done.query()
    if act == "sleep":
        cache.sleep()
    views.clear()
    kept.clear()
    cache.close()
    assert done.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("live", [False, True])
def test_running_out_of_memory_in_the_middle_of_an_extend_is_undone(
    driver: CudaDriver, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = driver.memory_info().free_bytes
    cache = ExtensibleKVCache(driver, plain_table(4, int(free * 0.4)))
    cache.open()
    cache.commit(8)
    cache.buffer[: 16 * MIB] = 7
    before = spans(cache)
    free = driver.memory_info().free_bytes
    with pytest.raises(OutOfDeviceMemory, match="ask for fewer blocks"):  # seen before anything is touched
        cache.extend_kv_cache(cache.capacity_blocks, live=live)
    monkeypatch.setattr(driver, "memory_info", lambda: MemoryInfo(1 << 60, 1 << 60))  # seen by the device, half-way
    with pytest.raises(OutOfDeviceMemory) as caught:
        cache.extend_kv_cache(cache.capacity_blocks, live=live)
    monkeypatch.undo()
    assert (caught.value.call, caught.value.code) == ("cuMemCreate", 2)
    assert (cache.state, cache.committed_blocks, spans(cache)) == (CacheState.WARMING, 8, before)
    assert abs(driver.memory_info().free_bytes - free) <= 4 * MIB
    cache.check_integrity()
    if live:
        assert bool((cache.committed_range(0, 16 * MIB) == 7).all())
    cache.extend_kv_cache(cache.capacity_blocks // 4, live=live)
    assert cache.state is CacheState.READY
    cache.close()


def test_a_bad_call_is_cudas_own_error(driver: CudaDriver) -> None:
    allocation = driver.create(2 * MIB)
    with pytest.raises(DriverError, match="cuMemMap failed with CUDA_ERROR"):
        driver.map(12345 * MIB, allocation)
    driver.release(allocation)
    with pytest.raises(DriverError, match="cuMemCreate failed with CUDA_ERROR"):
        driver.create(12345)


# -- other processes, and the end --------------------------------------------------------------------------------------

IMPORT = """
    import sys
    import torch
    from kvx.drivers.cuda import CudaDriver
    from kvx.tensor import tensor_over
    from kvx.vmm import Reservation

    torch.zeros(1, device="cuda")
    driver, fd, nbytes = CudaDriver(), int(sys.argv[1]), int(sys.argv[2])
    reservation = Reservation(driver, nbytes)
    reservation.reserve()
    reservation.bind(0, driver.import_fd(fd, nbytes))
    tensor = tensor_over(reservation)
    assert bool((tensor == 7).all())
    tensor[: nbytes // 2] = 8
    torch.cuda.synchronize()
    print("same bytes")
"""


def test_a_second_process_maps_the_same_memory(driver: CudaDriver) -> None:
    reservation = Reservation(driver, 4 * MIB)
    reservation.reserve()
    reservation.commit_range(0, 4 * MIB)
    tensor = tensor_over(reservation)
    tensor.fill_(7)
    torch.cuda.synchronize()
    fd = driver.export_fd(reservation.mappings[0].handle)
    done = run_python(IMPORT, str(fd), str(4 * MIB), fds=[fd])
    os.close(fd)
    assert (done.returncode, done.stdout) == (0, "same bytes\n"), done.stderr
    assert (int(tensor[0]), int(tensor[-1])) == (8, 7)
    del tensor
    reservation.release()


END = """
    import sys, threading, time
    sys.path.insert(0, sys.argv[1])
    import torch
    from gpu_helpers import BLOCKS, CapturedStep, keep_busy, opened
    from kvx.drivers.cuda import CudaDriver

    driver = CudaDriver()
    cache, views = opened(driver)
    step = CapturedStep(views["layer0"])
    cache.extend_kv_cache(BLOCKS)
    sys.kept = views["layer1"]
    closed, closed_views = opened(driver)
    closed.close()
    loop = [opened(driver)]
    loop.append(loop)
    threading.Thread(target=lambda kept: time.sleep(60), args=(opened(driver),), daemon=True).start()
    host = torch.zeros(views["layer2"].shape, dtype=torch.float16, pin_memory=True)
    keep_busy(0.5)
    step.graph.replay()
    views["layer2"][:BLOCKS].copy_(host[:BLOCKS], non_blocking=True)
    print("end")
"""


def test_a_process_with_live_tensors_graphs_and_copies_ends_well(driver: CudaDriver) -> None:
    done = run_python(END, os.path.dirname(__file__))
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_the_driver_alone_ends_well_without_torch() -> None:
    done = run_python("""
        from kvx.drivers.cuda import CudaDriver
        driver = CudaDriver()
        address, allocation = driver.reserve(1 << 40), driver.create(1 << 30)
        driver.map(address, allocation)
        print(driver.memory_info().total_bytes > 0)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# -- speed -----------------------------------------------------------------------------------------------------------


def require_room(driver: CudaDriver, nbytes: int) -> None:
    name = torch.cuda.get_device_name(driver.device)
    if "H200" not in name or driver.memory_info().free_bytes < nbytes + GIB:
        pytest.skip(f"the targets are for an idle H200, this is {name} with {driver.memory_info().free_bytes} free")


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "segments", "most_ms"), [(130, 30, 40), (100, 60, 60)])
def test_growing_is_fast(driver: CudaDriver, gib: int, segments: int, most_ms: float) -> None:
    from kvx.bench import ExtendSettings, bench_extend

    require_room(driver, gib * GIB)
    found = bench_extend(ExtendSettings(device=driver.device, total_bytes=gib * GIB, segments=segments))
    print(found)
    torch.cuda.empty_cache()
    assert found["map_s"]["median"] * 1e3 <= most_ms
    assert found["sleep_s"]["median"] * 1e3 <= 150
    assert found["zero_bandwidth_ratio"] >= 0.8


@pytest.mark.slow
def test_memory_is_as_fast_as_torchs(driver: CudaDriver) -> None:
    from kvx.bench import BandwidthSettings, bench_bandwidth

    require_room(driver, 20 * GIB)
    found = bench_bandwidth(BandwidthSettings(device=driver.device, buffer_bytes=4 * GIB))
    print(found)
    ratios = {name: sides["ratio"]["median"] for name, sides in found["operations"].items()}
    assert all(ratio >= 0.99 for ratio in ratios.values()), ratios
