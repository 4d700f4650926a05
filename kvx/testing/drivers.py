"""`DriverTests`: all that the kit asks of a memory driver."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvx.drivers.base import Allocation, Driver
from kvx.errors import KVXError, OutOfDeviceMemory
from kvx.testing.memory import read_bytes, write_bytes

CYCLES = 100
LEAK_BYTES = 64 << 20
"""Less than a tenth of what one granule leaked in each cycle comes to; other threads of a process take some, too."""


class DriverTests:
    """Subclass it and write `make_driver`. Every test takes a few granules, and gives them back."""

    def make_driver(self) -> Driver:
        """A driver of the device to test."""
        raise NotImplementedError("a subclass of DriverTests makes its driver")

    def granules(self) -> int:
        """Granules of an allocation in these tests: 8 MiB, or one where a granule is more."""
        return max(1, (8 << 20) // self.make_driver().granularity_bytes)

    @classmethod
    def kvx_kit_subject(cls) -> str:
        """What the table calls the driver."""
        return f"driver of {cls().make_driver().device}"

    @pytest.fixture
    def driver(self) -> Driver:
        return self.make_driver()

    @pytest.fixture
    def nbytes(self, driver: Driver) -> int:
        """Of one allocation."""
        return self.granules() * driver.granularity_bytes

    def test_its_granularity_is_a_power_of_two(self, driver: Driver) -> None:
        assert driver.granularity_bytes > 0
        assert driver.granularity_bytes & (driver.granularity_bytes - 1) == 0
        assert driver.device

    def test_a_reservation_starts_on_a_granule_and_takes_no_memory(self, driver: Driver, nbytes: int) -> None:
        free = driver.memory_info().free_bytes
        size = (4 << 30) // nbytes * nbytes
        addresses = [driver.reserve(size) for _ in range(4)]
        assert free - driver.memory_info().free_bytes < 4 << 30, "address ranges must cost no memory"
        for address in addresses:
            assert address > 0
            assert address % driver.granularity_bytes == 0
        ordered = sorted(addresses)
        assert all(right - left >= size for left, right in itertools.pairwise(ordered))
        for address in addresses:
            driver.release_reservation(address, size)

    def test_memory_is_there_once_it_is_mapped(self, driver: Driver, nbytes: int) -> None:
        with _reserved(driver, 2 * nbytes) as address, _created(driver, nbytes) as allocation:
            assert allocation.nbytes == nbytes
            driver.map(address + nbytes, allocation)
            if driver.allocations_are_zero:
                assert read_bytes(driver, address + nbytes, nbytes) == bytes(nbytes)
            for offset in (0, nbytes - 3):
                write_bytes(driver, address + nbytes + offset, b"\x01\x02\x03")
                assert read_bytes(driver, address + nbytes + offset, 3) == b"\x01\x02\x03"
            driver.synchronize()
            driver.unmap(address + nbytes, allocation)

    def test_fresh_memory_is_zero_where_declared(self, driver: Driver, nbytes: int) -> None:
        """Also when it was somebody's before."""
        if not driver.allocations_are_zero:
            pytest.skip("allocations_are_zero is not declared")
        with _reserved(driver, nbytes) as address:
            for _ in range(3):
                with _created(driver, nbytes) as allocation:
                    driver.map(address, allocation)
                    assert read_bytes(driver, address, nbytes) == bytes(nbytes)
                    write_bytes(driver, address, b"\xff" * nbytes)
                    driver.unmap(address, allocation)

    def test_content_survives_unmap_and_map(self, driver: Driver, nbytes: int) -> None:
        content = bytes(range(256)) * (nbytes // 256)
        with _reserved(driver, 3 * nbytes) as address, _created(driver, nbytes) as allocation:
            for offset in (0, 2 * nbytes, nbytes, 0):
                driver.map(address + offset, allocation)
                if offset == 0 and read_bytes(driver, address, 4) != content[:4]:
                    write_bytes(driver, address, content)
                assert read_bytes(driver, address + offset, nbytes) == content
                driver.synchronize()
                driver.unmap(address + offset, allocation)

    def test_neighbours_keep_their_content(self, driver: Driver, nbytes: int) -> None:
        with _reserved(driver, 3 * nbytes) as address, contextlib.ExitStack() as stack:
            allocations = [stack.enter_context(_created(driver, nbytes)) for _ in range(3)]
            assert len({allocation.id for allocation in allocations}) == 3
            for index, allocation in enumerate(allocations):
                driver.map(address + index * nbytes, allocation)
                write_bytes(driver, address + index * nbytes, bytes([index + 1]) * nbytes)
            driver.synchronize()
            driver.unmap(address + nbytes, allocations[1])
            for index in (0, 2):
                assert read_bytes(driver, address + index * nbytes, nbytes) == bytes([index + 1]) * nbytes
            driver.map(address + nbytes, allocations[1])
            assert read_bytes(driver, address, 3 * nbytes) == b"".join(bytes([i + 1]) * nbytes for i in range(3))
            driver.synchronize()
            for index, allocation in enumerate(allocations):
                driver.unmap(address + index * nbytes, allocation)

    @pytest.mark.parametrize("size", [0, -1, 1, "granule - 1", "granule + 1"])
    def test_sizes_off_the_granule_are_refused(self, driver: Driver, size: int | str) -> None:
        granule = driver.granularity_bytes
        wrong = size if isinstance(size, int) else granule + (1 if "+" in size else -1)
        with pytest.raises(KVXError):
            driver.reserve(wrong)
        with pytest.raises(KVXError):
            driver.create(wrong)

    def test_an_address_off_the_granule_is_refused(self, driver: Driver, nbytes: int) -> None:
        with _reserved(driver, 2 * nbytes) as address, _created(driver, nbytes) as allocation:
            with pytest.raises(KVXError):
                driver.map(address + 1, allocation)
            driver.map(address, allocation)
            with pytest.raises(KVXError):
                driver.unmap(address + 1, allocation)
            driver.unmap(address, allocation)

    def test_an_allocation_is_released_once(self, driver: Driver, nbytes: int) -> None:
        allocation = driver.create(nbytes)
        driver.release(allocation)
        with pytest.raises(KVXError):
            driver.release(allocation)

    def test_more_than_there_is_is_out_of_memory(self, driver: Driver, nbytes: int) -> None:
        info = driver.memory_info()
        assert 0 < info.free_bytes <= info.total_bytes
        with pytest.raises(OutOfDeviceMemory):
            driver.create(info.total_bytes // nbytes * nbytes + nbytes)
        driver.release(driver.create(nbytes))

    def test_nothing_is_left_behind(self, driver: Driver, nbytes: int) -> None:
        self._live(driver, nbytes)
        before, free = _mapped_bytes(), driver.memory_info().free_bytes
        for _ in range(CYCLES):
            self._live(driver, nbytes)
        assert _mapped_bytes() - before < LEAK_BYTES
        # What others on the machine take meanwhile is no leak of ours, so half of one is allowed for.
        assert free - driver.memory_info().free_bytes < CYCLES * nbytes // 2

    def _live(self, driver: Driver, nbytes: int) -> None:
        with _reserved(driver, 2 * nbytes) as address, _created(driver, nbytes) as allocation:
            driver.map(address, allocation)
            write_bytes(driver, address, b"\x01" * nbytes)
            driver.synchronize()
            driver.unmap(address, allocation)


@contextlib.contextmanager
def _reserved(driver: Driver, nbytes: int) -> Iterator[int]:
    address = driver.reserve(nbytes)
    try:
        yield address
    finally:
        driver.release_reservation(address, nbytes)


@contextlib.contextmanager
def _created(driver: Driver, nbytes: int) -> Iterator[Allocation]:
    allocation = driver.create(nbytes)
    try:
        yield allocation
    finally:
        driver.release(allocation)


def _mapped_bytes() -> int:
    spans = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return sum(int(last, 16) - int(first, 16) for first, last in spans)
