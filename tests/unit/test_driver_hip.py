"""The HIP driver against a stand-in library behind ctypes: structures, call order, statuses, what a failed call leaves.

No AMD GPU was at hand. The stand-in is C, so that the driver's structures meet a compiler's layout of HIP's own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from memory_helpers import opened_cache, small_geometry

from kvx.cache import ExtensibleKVCache
from kvx.drivers.hip import HipDriver
from kvx.errors import DriverError, DriverUnavailable, OutOfDeviceMemory

GRANULE = 1 << 16
BLOCKS = 40


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make the stand-in library with")
    library = tmp_path_factory.mktemp("hip") / "libfake_hip.so"
    source = Path(__file__).with_name("fake_hip.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


class Fake:
    """The stand-in's own controls; a copy of the library each, so that no test sees another's books."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_log.restype = self._library.fake_books.restype = ctypes.c_char_p
        self.arm = self._library.fake_arm

    def set(self, name: str, value: int) -> None:
        kind = ctypes.c_size_t if name == "fake_total" else ctypes.c_int
        kind.in_dll(self._library, name).value = value

    @property
    def calls(self) -> list[str]:
        return self._library.fake_log().decode().split()

    @property
    def books(self) -> list[int]:
        """Bytes reserved, allocated and mapped."""
        return [int(word) for word in self._library.fake_books().split()]


@pytest.fixture
def fake(compiled: Path, tmp_path: Path) -> Fake:
    return Fake(Path(shutil.copy(compiled, tmp_path / "libamdhip64.so")))


class HipOnHost(HipDriver):
    """As torch without ROCm can use it: the stand-in's memory is the host's."""

    def __init__(self, fake: Fake) -> None:
        super().__init__(library=fake.path)
        self.device, self.dlpack_device_type = "cpu", 1


def test_without_the_library_one_sentence_says_what_to_install() -> None:
    with pytest.raises(DriverUnavailable, match=r"libnone.so.*install ROCm 7\.12 or newer"):
        HipDriver(library="libnone.so")


def test_a_library_without_the_calls_is_not_hip() -> None:
    with pytest.raises(DriverUnavailable, match=r"hipRuntimeGetVersion.*install ROCm"):
        HipDriver(library="libc.so.6")


@pytest.mark.parametrize("version", [71199999, 71100000, 60342134])
def test_a_runtime_whose_set_access_fails_at_random_is_refused(fake: Fake, version: int) -> None:
    fake.set("fake_version", version)
    with pytest.raises(DriverUnavailable, match=r"HIP runtime [67]\.\d+, whose hipMemSetAccess .* 7\.12"):
        HipDriver(library=fake.path)


@pytest.mark.parametrize("version", [71200000, 71260123, 80000000])
def test_newer_runtimes_are_taken(fake: Fake, version: int) -> None:
    fake.set("fake_version", version)
    driver = HipDriver(library=fake.path)
    assert (driver.device, driver.granularity_bytes, driver.dlpack_device_type) == ("cuda:0", GRANULE, 10)
    assert not driver.allocations_are_zero


def test_a_device_without_virtual_memory_management_is_refused(fake: Fake) -> None:
    fake.set("fake_has_vmm", 0)
    with pytest.raises(DriverUnavailable, match="no virtual memory management"):
        HipDriver(library=fake.path)


def test_a_device_that_is_not_there_is_hips_own_error(fake: Fake) -> None:
    with pytest.raises(DriverError, match=r"hipDeviceGetAttribute failed with hipErrorInvalidDevice \(101\)"):
        HipDriver(3, library=fake.path)


def test_the_order_of_calls_of_one_allocation_s_life(fake: Fake) -> None:
    driver = HipDriver(library=fake.path)
    fake.arm(0)
    address = driver.reserve(4 * GRANULE)
    allocation = driver.create(2 * GRANULE)
    driver.map(address + GRANULE, allocation)
    assert ctypes.string_at(address + GRANULE, 4) == b"\x5a" * 4
    driver.unmap(address + GRANULE, allocation)
    driver.release(allocation)
    driver.release_reservation(address, 4 * GRANULE)
    assert fake.calls == [
        "hipMemAddressReserve", "hipMemCreate", "hipMemMap", "hipMemSetAccess", "hipMemUnmap", "hipMemRelease",
        "hipMemAddressFree",
    ]  # fmt: skip
    assert fake.books == [0, 0, 0]
    with pytest.raises(DriverError, match="hipMemRelease failed with hipErrorInvalidValue"):
        driver.release(allocation)


def test_the_calling_thread_s_device_is_put_back(fake: Fake) -> None:
    driver = HipDriver(library=fake.path)
    fake.arm(0)
    assert driver.memory_info().total_bytes == 256 * GRANULE
    driver.synchronize()
    assert fake.calls == [
        "hipGetDevice", "hipSetDevice", "hipMemGetInfo", "hipSetDevice",
        "hipGetDevice", "hipSetDevice", "hipDeviceSynchronize", "hipSetDevice",
    ]  # fmt: skip
    device = ctypes.c_int()
    driver._hip.hipGetDevice(device)
    assert device.value == 7


def test_a_mapping_that_gets_no_access_is_taken_away_again(fake: Fake) -> None:
    driver = HipDriver(library=fake.path)
    address, allocation = driver.reserve(GRANULE), driver.create(GRANULE)
    books = fake.books
    fake.arm(2)
    with pytest.raises(DriverError, match=r"hipMemSetAccess failed with hipErrorUnknown \(999\)"):
        driver.map(address, allocation)
    assert fake.calls == ["hipMemMap", "hipMemSetAccess", "hipMemUnmap"]
    assert fake.books == books
    driver.release(allocation)
    driver.release_reservation(address, GRANULE)


def test_too_little_memory_is_its_own_error(fake: Fake) -> None:
    driver = HipDriver(library=fake.path)
    with pytest.raises(OutOfDeviceMemory, match="ask for fewer blocks") as caught:
        driver.create(257 * GRANULE)
    assert (caught.value.call, caught.value.code, caught.value.name) == ("hipMemCreate", 2, "hipErrorOutOfMemory")


def test_an_exported_allocation_is_the_same_memory_when_imported(fake: Fake) -> None:
    driver = HipDriver(library=fake.path)
    address = driver.reserve(2 * GRANULE)
    allocation = driver.create(GRANULE)
    driver.map(address, allocation)
    fd = driver.export_fd(allocation)
    imported = driver.import_fd(fd, GRANULE)
    os.close(fd)
    driver.map(address + GRANULE, imported)
    ctypes.memset(address, 7, GRANULE)
    assert ctypes.string_at(address + GRANULE, GRANULE) == b"\7" * GRANULE
    for offset, one in ((0, allocation), (GRANULE, imported)):
        driver.unmap(address + offset, one)
        driver.release(one)
    driver.release_reservation(address, 2 * GRANULE)
    assert fake.books == [0, 0, 0]


def test_a_cache_lives_its_whole_life_on_it(fake: Fake) -> None:
    cache, views = opened_cache(HipOnHost(fake), small_geometry(granularity_bytes=GRANULE, blocks=BLOCKS))
    cache.commit(3)
    cache.extend_kv_cache(BLOCKS)
    assert not any(view[:BLOCKS].any() for view in views.values()), "memory is zeroed, whoever had it before"
    views["layer0"][:BLOCKS] = 4.0
    cache.sleep()
    assert fake.books[1:] == [0, 0]
    cache.wake()
    assert not views["layer0"][:BLOCKS].any()
    cache.close()
    views.clear()
    assert fake.books == [0, 0, 0]


def test_a_fault_at_each_hip_call_of_an_extend_leaves_everything_as_it_was(fake: Fake) -> None:
    geometry = small_geometry(granularity_bytes=GRANULE, blocks=BLOCKS)
    cache = ExtensibleKVCache(HipOnHost(fake), geometry.segment_table)
    cache.open()
    cache.commit(6)
    kept_bytes = 6 * geometry.segment_table.segments[0].block_stride_bytes
    cache.buffer[:kept_bytes] = 5
    books, descriptors = fake.books, len(os.listdir("/proc/self/fd"))
    for fail_at in range(1, 200):
        fake.arm(fail_at)
        try:
            cache.extend_kv_cache(BLOCKS, live=True)
        except DriverError as error:
            failed = error.call
        else:
            break
        assert failed == fake.calls[fail_at - 1]
        fake.arm(0)
        assert (cache.state, fake.books, len(os.listdir("/proc/self/fd"))) == ("WARMING", books, descriptors)
        cache.check_integrity()
        assert torch.all(cache.buffer[:kept_bytes] == 5)
    fake.arm(0)
    assert fail_at > 12
    cache.close()
    assert fake.books == [0, 0, 0]
