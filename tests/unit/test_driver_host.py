"""The host driver: what the kernel shows of each call, and what a failed call leaves behind."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import textwrap

import pytest
from memory_helpers import MIB, Footprint

from kvx.drivers.base import MemoryInfo
from kvx.drivers.host import HEADROOM_BYTES, HostDriver
from kvx.drivers.host_memory import read_host_memory
from kvx.errors import DriverError, LayoutError, OutOfDeviceMemory

GRANULE = 4 * MIB
LARGE = 8 * GRANULE
NOISE_BYTES = 24 * MIB


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(GRANULE)


def permissions(address: int) -> str:
    """Of the mapping that holds an address, as /proc/self/maps writes them; "" for a hole."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, flags, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return flags
    return ""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)


def test_a_reservation_takes_addresses_and_no_memory(driver: HostDriver) -> None:
    before = Footprint.now()
    address = driver.reserve(1024 * GRANULE)
    during = Footprint.now()
    assert address % GRANULE == 0
    assert permissions(address) == "---p"
    assert during.resident_bytes - before.resident_bytes < GRANULE
    assert abs(during.mapped_bytes - before.mapped_bytes - 1024 * GRANULE) < 100 * GRANULE
    driver.release_reservation(address, 1024 * GRANULE)
    Footprint.now().assert_close(before)


def test_memory_is_taken_by_create_moved_by_map_and_given_back_by_release(driver: HostDriver) -> None:
    """Large pieces: other threads of this process may take some MiB meanwhile."""
    address = driver.reserve(4 * LARGE)
    before = Footprint.now()
    allocation = driver.create(2 * LARGE)
    created = Footprint.now()
    assert abs(created.resident_bytes - before.resident_bytes - 2 * LARGE) < NOISE_BYTES
    driver.map(address + LARGE, allocation)
    assert [permissions(address + i * LARGE) for i in range(4)] == ["---p", "rw-p", "rw-p", "---p"]
    assert ctypes.string_at(address + LARGE, 2 * LARGE) == bytes(2 * LARGE)
    ctypes.memset(address + LARGE, 7, 2 * LARGE)
    driver.unmap(address + LARGE, allocation)
    assert permissions(address + LARGE) == "---p"
    assert abs(Footprint.now().resident_bytes - created.resident_bytes) < NOISE_BYTES
    driver.map(address, allocation)
    assert ctypes.string_at(address, 2 * LARGE) == b"\7" * (2 * LARGE), "an unmapped allocation keeps its content"
    driver.unmap(address, allocation)
    driver.release(allocation)
    Footprint.now().assert_close(before, NOISE_BYTES)
    driver.release_reservation(address, 4 * LARGE)


def test_adjacent_mappings_and_advice_inside_one_do_not_hinder_an_unmap(driver: HostDriver) -> None:
    address = driver.reserve(3 * GRANULE)
    allocations = [driver.create(GRANULE) for _ in range(3)]
    for index, allocation in enumerate(allocations):
        driver.map(address + index * GRANULE, allocation)
        ctypes.memset(address + index * GRANULE, index + 1, GRANULE)
    # A transfer library splits the kernel's record of the range when it keeps a part of it from forked children.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address + GRANULE + MIB), ctypes.c_size_t(MIB), 10)
    driver.unmap(address + GRANULE, allocations[1])
    assert [permissions(address + i * GRANULE)[:2] for i in range(3)] == ["rw", "--", "rw"]
    driver.map(address + GRANULE, allocations[1])
    for index, allocation in enumerate(allocations):
        assert ctypes.string_at(address + index * GRANULE, GRANULE) == bytes([index + 1]) * GRANULE
        driver.unmap(address + index * GRANULE, allocation)
        driver.release(allocation)
    driver.release_reservation(address, 3 * GRANULE)


def test_too_large_a_create_is_out_of_memory_and_not_a_kill(driver: HostDriver) -> None:
    before = Footprint.now()
    beyond = (read_host_memory().free_bytes // GRANULE + 1) * GRANULE
    with pytest.raises(OutOfDeviceMemory, match="ask for fewer blocks") as caught:
        driver.create(beyond)
    assert (caught.value.call, caught.value.code) == ("create", errno.ENOMEM)
    assert isinstance(caught.value, MemoryError)
    Footprint.now().assert_close(before)


def test_some_memory_is_never_taken() -> None:
    driver = HostDriver(GRANULE, lambda: MemoryInfo(GRANULE + HEADROOM_BYTES - 1, 64 * GRANULE))
    with pytest.raises(OutOfDeviceMemory):
        driver.create(GRANULE)
    driver = HostDriver(GRANULE, lambda: MemoryInfo(GRANULE + HEADROOM_BYTES, 64 * GRANULE))
    driver.release(driver.create(GRANULE))
    assert driver.memory_info().total_bytes == 64 * GRANULE


def test_an_address_space_limit_is_out_of_memory_in_a_second_process() -> None:
    done = run_python("""
        import resource
        from kvx.drivers.host import HostDriver
        from kvx.errors import OutOfDeviceMemory
        driver = HostDriver()
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            driver.reserve(64 << 30)
        except OutOfDeviceMemory as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert "ulimit -v" in done.stdout
    assert "ENOMEM" in done.stdout


@pytest.mark.parametrize("granularity", [0, -4096, 100, 4096 * 3])
def test_a_granularity_that_the_host_cannot_map_is_refused(granularity: int) -> None:
    with pytest.raises(LayoutError, match="power of two"):
        HostDriver(granularity)


def test_sizes_and_addresses_off_the_granule_are_refused(driver: HostDriver) -> None:
    for nbytes in (0, 1, GRANULE + 4096):
        with pytest.raises(LayoutError, match="granule"):
            driver.reserve(nbytes)
        with pytest.raises(LayoutError, match="granule"):
            driver.create(nbytes)
    address = driver.reserve(2 * GRANULE)
    allocation = driver.create(GRANULE)
    with pytest.raises(LayoutError, match="granule"):
        driver.map(address + 4096, allocation)
    driver.release(allocation)
    driver.release_reservation(address, 2 * GRANULE)


def failing(driver: HostDriver, call: str, code: int, status: int | None) -> None:
    """Makes one libc call of this driver fail from now on."""

    def fail(*_: object) -> int | None:
        ctypes.set_errno(code)
        return status

    setattr(driver._libc, call, fail)


@pytest.mark.parametrize("call", ["mmap", "madvise"])
def test_a_create_that_fails_half_way_leaves_nothing(driver: HostDriver, call: str) -> None:
    before = Footprint.now()
    failing(driver, call, errno.ENOMEM, None if call == "mmap" else -1)
    with pytest.raises(OutOfDeviceMemory, match="ENOMEM"):
        driver.create(8 * GRANULE)
    Footprint.now().assert_close(before)


def test_a_kernel_without_populate_gets_its_pages_touched(driver: HostDriver) -> None:
    failing(driver, "madvise", errno.EINVAL, -1)
    before = Footprint.now()
    allocation = driver.create(8 * GRANULE)
    assert abs(Footprint.now().resident_bytes - before.resident_bytes - 8 * GRANULE) < GRANULE
    driver.release(allocation)


def test_a_failed_move_leaves_mapped_what_was_mapped(driver: HostDriver) -> None:
    address = driver.reserve(2 * GRANULE)
    mapped, other = driver.create(GRANULE), driver.create(GRANULE)
    driver.map(address, mapped)
    ctypes.memset(address, 9, GRANULE)
    before = Footprint.now()
    works = driver._libc.mremap
    failing(driver, "mremap", errno.EFAULT, None)
    with pytest.raises(DriverError, match="EFAULT"):
        driver.unmap(address, mapped)
    with pytest.raises(DriverError, match="EFAULT"):
        driver.map(address + GRANULE, other)
    driver._libc.mremap = works
    Footprint.now().assert_close(before)
    assert ctypes.string_at(address, GRANULE) == b"\t" * GRANULE
    assert permissions(address + GRANULE) == "---p"
    driver.map(address + GRANULE, other)
    for offset, allocation in ((0, mapped), (GRANULE, other)):
        driver.unmap(address + offset, allocation)
        driver.release(allocation)
    driver.release_reservation(address, 2 * GRANULE)


def test_a_failed_unmap_or_release_says_which_call(driver: HostDriver) -> None:
    allocation = driver.create(GRANULE)
    works = driver._libc.munmap
    failing(driver, "munmap", errno.EINVAL, -1)
    with pytest.raises(DriverError, match="munmap failed with EINVAL"):
        driver.release(allocation)
    driver._libc.munmap = works
    driver.release(allocation)


def write(root, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def machine(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable: 9000 kB\n")
    return tmp_path


def test_without_limits_the_machine_decides(machine) -> None:
    write(machine, "proc/self/cgroup", "0::/\n")
    assert read_host_memory(machine) == MemoryInfo(9000 * 1024, 16000 * 1024)


def test_the_tightest_control_group_above_decides(machine) -> None:
    write(machine, "proc/self/cgroup", "0::/box/inner\n")
    write(machine, "sys/fs/cgroup/box/memory.max", "4096000\n")
    write(machine, "sys/fs/cgroup/box/memory.current", "3000000\n")
    write(machine, "sys/fs/cgroup/box/memory.stat", "anon 5\ninactive_file 1000000\n")
    write(machine, "sys/fs/cgroup/box/inner/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/box/inner/memory.current", "100\n")
    assert read_host_memory(machine) == MemoryInfo(2096000, 4096000)


def test_version_1_of_control_groups_is_read_too(machine) -> None:
    write(machine, "proc/self/cgroup", "5:cpu:/\n4:memory:/job\n0::/\n")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    write(machine, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000000\n")
    write(machine, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "2500000\n")
    assert read_host_memory(machine) == MemoryInfo(0, 2000000)


def test_a_container_that_shows_its_own_group_as_the_root_is_read(machine) -> None:
    write(machine, "proc/self/cgroup", "0::/../../outside\n")
    write(machine, "sys/fs/cgroup/memory.max", "4096000\n")
    write(machine, "sys/fs/cgroup/memory.current", "96000\n")
    assert read_host_memory(machine) == MemoryInfo(4000000, 4096000)
