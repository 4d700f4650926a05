"""The CUDA driver against a stand-in for NVIDIA's binding: call order, statuses, and what a failed call leaves."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
import torch
from fake_cuda import GRANULE, CUresult, FakeCuda
from memory_helpers import opened_cache, small_geometry

from kvx.cache import ExtensibleKVCache
from kvx.drivers import cuda
from kvx.drivers.cuda import CudaDriver
from kvx.errors import DriverError, DriverUnavailable, OutOfDeviceMemory


class CudaOnHost(CudaDriver):
    """As torch without CUDA can use it: the stand-in's memory is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.dlpack_device_type = "cpu", 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    library = FakeCuda()
    monkeypatch.setattr(cuda, "_load_bindings", lambda: library)
    return library


def test_without_the_binding_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverUnavailable, match=r"pip install 'kvx\[cuda\]'") as caught:
        CudaDriver()
    assert isinstance(caught.value, DriverError)


def test_without_an_nvidia_driver_one_sentence_says_so(fake: FakeCuda) -> None:
    def not_there(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    fake.cuInit = not_there
    with pytest.raises(DriverUnavailable, match=r"libcuda.*install a current NVIDIA driver"):
        CudaDriver()


def test_a_device_that_is_not_there_is_cudas_own_error(fake: FakeCuda) -> None:
    with pytest.raises(DriverError, match=r"cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE \(101\)") as caught:
        CudaDriver(3)
    assert (caught.value.call, caught.value.code, caught.value.name) == (
        "cuDeviceGet", 101, "CUDA_ERROR_INVALID_DEVICE",
    )  # fmt: skip


def test_a_device_without_virtual_memory_management_is_refused(fake: FakeCuda) -> None:
    fake.features = ("fd",)
    with pytest.raises(DriverUnavailable, match="cuda:0 has no virtual memory management"):
        CudaDriver()


def test_what_it_says_of_the_device(fake: FakeCuda) -> None:
    driver = CudaDriver()
    assert (driver.device, driver.granularity_bytes, driver.dlpack_device_type) == ("cuda:0", GRANULE, 2)
    assert not driver.allocations_are_zero
    allocation = driver.create(4 * GRANULE)
    info = driver.memory_info()
    assert (info.free_bytes, info.total_bytes) == (252 * GRANULE, 256 * GRANULE)
    driver.release(allocation)
    assert fake.contexts == [], "every context that was pushed was popped"


@pytest.mark.parametrize(
    ("features", "handle", "rdma"),
    [(("vmm", "fd", "rdma"), "fd", 1), (("vmm", "fd"), "fd", 0), (("vmm",), None, 0)],
)
def test_memory_is_made_for_export_and_rdma_as_far_as_the_device_has_them(
    fake: FakeCuda, features: tuple[str, ...], handle: str | None, rdma: int
) -> None:
    fake.features = features
    driver = CudaDriver()
    allocation = driver.create(GRANULE)
    made = fake.created_with[-1]
    assert (made.requestedHandleTypes, made.allocFlags.gpuDirectRDMACapable) == (handle, rdma)
    assert (made.type, made.location.type, made.location.id) == ("pinned", "device", 0)
    if handle is None:
        with pytest.raises(DriverError, match="cannot share memory"):
            driver.export_fd(allocation)
    driver.release(allocation)


def test_the_order_of_calls_of_one_allocation_s_life(fake: FakeCuda) -> None:
    driver = CudaDriver()
    fake.arm(0)
    address = driver.reserve(4 * GRANULE)
    allocation = driver.create(2 * GRANULE)
    driver.map(address + GRANULE, allocation)
    assert ctypes.string_at(address + GRANULE, 4) == b"\x5a" * 4
    driver.unmap(address + GRANULE, allocation)
    driver.release(allocation)
    driver.release_reservation(address, 4 * GRANULE)
    assert fake.calls == [
        "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease",
        "cuMemAddressFree",
    ]  # fmt: skip
    assert fake.books() == ({}, [], {})
    with pytest.raises(DriverError, match="cuMemRelease failed with CUDA_ERROR_INVALID_VALUE"):
        driver.release(allocation)


def test_a_mapping_that_gets_no_access_is_taken_away_again(fake: FakeCuda) -> None:
    driver = CudaDriver()
    address, allocation = driver.reserve(GRANULE), driver.create(GRANULE)
    books = fake.books()
    fake.arm(2)
    with pytest.raises(DriverError, match=r"cuMemSetAccess failed with CUDA_ERROR_UNKNOWN \(999\)"):
        driver.map(address, allocation)
    assert fake.calls == ["cuMemMap", "cuMemSetAccess", "cuMemUnmap"]
    assert fake.books() == books
    driver.release(allocation)
    driver.release_reservation(address, GRANULE)


def test_too_little_memory_is_its_own_error(fake: FakeCuda) -> None:
    driver = CudaDriver()
    with pytest.raises(OutOfDeviceMemory, match="ask for fewer blocks") as caught:
        driver.create(257 * GRANULE)
    assert (caught.value.call, caught.value.code, caught.value.name) == ("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert isinstance(caught.value, MemoryError)


def test_every_call_s_status_is_looked_at(fake: FakeCuda) -> None:
    for fail_at in range(1, 100):
        fake.arm(fail_at)
        try:
            driver = CudaDriver()
            driver.memory_info()
            driver.synchronize()
        except DriverError as error:
            caught = error
        else:
            break
        assert (caught.call, caught.code) == (fake.calls[fail_at - 1], CUresult.CUDA_ERROR_UNKNOWN)
        fake.contexts.clear()
    assert fail_at == len(fake.calls) + 1 > 12


def test_an_exported_allocation_is_the_same_memory_when_imported(fake: FakeCuda) -> None:
    driver = CudaDriver()
    address = driver.reserve(2 * GRANULE)
    allocation = driver.create(GRANULE)
    driver.map(address, allocation)
    fd = driver.export_fd(allocation)
    imported = driver.import_fd(fd, GRANULE)
    os.close(fd)
    assert (imported.nbytes, imported.id == allocation.id) == (GRANULE, False)
    driver.map(address + GRANULE, imported)
    ctypes.memset(address, 7, GRANULE)
    assert ctypes.string_at(address + GRANULE, GRANULE) == b"\7" * GRANULE
    for offset, one in ((0, allocation), (GRANULE, imported)):
        driver.unmap(address + offset, one)
        driver.release(one)
    driver.release_reservation(address, 2 * GRANULE)
    assert fake.books() == ({}, [], {})


# -- under a cache ---------------------------------------------------------------------------------------------------

BLOCKS = 40
FAULTS = {
    "open": (lambda c: None, lambda c: c.open()),
    "commit": (lambda c: c.open(), lambda c: c.commit(6)),
    "extend": (lambda c: (c.open(), c.commit(6)), lambda c: c.extend_kv_cache(BLOCKS)),
    "extend live": (lambda c: (c.open(), c.commit(6)), lambda c: c.extend_kv_cache(BLOCKS, live=True)),
    "extend again": (lambda c: (c.open(), c.commit(6), c.extend_kv_cache(9)), lambda c: c.extend_kv_cache(BLOCKS)),
    "wake": (lambda c: (c.open(), c.commit(6), c.extend_kv_cache(9), c.sleep()), lambda c: c.wake()),
}


def test_a_cache_lives_its_whole_life_on_it(fake: FakeCuda) -> None:
    geometry = small_geometry(granularity_bytes=GRANULE, blocks=BLOCKS)
    cache, views = opened_cache(CudaOnHost(), geometry)
    cache.commit(3)
    assert not any(view[:3].any() for view in views.values()), "memory is zeroed, whoever had it before"
    cache.extend_kv_cache(BLOCKS)
    assert not any(view[:BLOCKS].any() for view in views.values())
    assert all(access for _, _, access in fake.mapped.values())
    views["layer0"][:BLOCKS] = 4.0
    cache.sleep()
    assert fake.allocated == {}
    cache.wake()
    assert not views["layer0"][:BLOCKS].any()
    cache.close()
    views.clear()
    assert fake.books() == ({}, [], {})


@pytest.mark.parametrize("end", ["close", "last tensor", "sleep", "extend", "extend again"])
def test_nothing_is_unmapped_under_queued_work(fake: FakeCuda, end: str) -> None:
    """The stand-in's cuMemUnmap fails an assertion when work is pending."""
    cache, views = opened_cache(CudaOnHost(), small_geometry(granularity_bytes=GRANULE, blocks=BLOCKS))
    cache.commit(3)
    if end in ("sleep", "extend again"):
        cache.extend_kv_cache(6)
    if end == "last tensor":
        cache.close()
    fake.pending = True
    if end == "sleep":
        cache.sleep()
    elif end.startswith("extend"):
        cache.extend_kv_cache(BLOCKS)
    elif end == "close":
        views.clear()
        cache.close()
    else:
        assert fake.mapped
        views.clear()
    assert not fake.pending
    cache.close()
    views.clear()
    assert fake.books() == ({}, [], {})


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_each_cuda_call_leaves_everything_as_it_was(fake: FakeCuda, name: str) -> None:
    geometry = small_geometry(granularity_bytes=GRANULE, blocks=BLOCKS)
    cache = ExtensibleKVCache(CudaOnHost(), geometry.segment_table)
    prepare, act = FAULTS[name]
    prepare(cache)
    kept = cache.committed_blocks if name in ("extend live", "extend again") else 0
    kept_bytes = kept * geometry.segment_table.segments[0].block_stride_bytes
    if kept:
        cache.buffer[:kept_bytes] = 5
    books, state, descriptors = fake.books(), cache.state, len(os.listdir("/proc/self/fd"))
    for fail_at in range(1, 200):
        fake.arm(fail_at)
        try:
            act(cache)
        except DriverError as error:
            failed = error.call
        else:
            break
        assert failed == fake.calls[fail_at - 1]
        fake.arm(0)
        assert (cache.state, fake.books()) == (state, books)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        cache.check_integrity()
        assert not kept or torch.all(cache.buffer[:kept_bytes] == 5)
    fake.arm(0)
    cache.check_integrity()
    cache.close()
    assert fake.books() == ({}, [], {})
