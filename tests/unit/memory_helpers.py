"""What the memory tests share: a driver with faults, a footprint of this process, and a small cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvx.cache import ExtensibleKVCache
from kvx.drivers.base import Allocation, Driver, MemoryInfo
from kvx.drivers.host import HostDriver
from kvx.drivers.host_memory import resident_bytes
from kvx.errors import DriverError
from kvx.layout import KVCacheLayout
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup, align_capacity
from kvx.tensor import views_of

MIB = 1 << 20


class FaultyDriver(Driver):
    """Passes every call on, counts them, and fails call number `fail_at` (from 1) before it does anything.

    It also keeps its own books of what is alive, to the byte, in which a call that breaks a rule shows at once.
    """

    device = "cpu"

    def __init__(self, driver: HostDriver, *, dirty: bool = False) -> None:
        self.driver = driver
        self.granularity_bytes = driver.granularity_bytes
        self.allocations_are_zero = not dirty
        self.dirty = dirty
        self.calls: list[str] = []
        self.fail_at = 0
        self.reserved: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.mapped: dict[int, int] = {}

    def arm(self, fail_at: int) -> None:
        """The call that is `fail_at` calls away fails (0: none)."""
        self.calls.clear()
        self.fail_at = fail_at

    def books(self) -> tuple[dict[int, int], list[int], dict[int, int]]:
        """Reservations, sizes of allocations, mapped bytes by address. Allocation numbers may change in an undo."""
        return dict(self.reserved), sorted(self.allocated.values()), dict(self.mapped)

    def reserve(self, nbytes: int) -> int:
        self._step("reserve")
        address = self.driver.reserve(nbytes)
        self.reserved[address] = nbytes
        return address

    def release_reservation(self, address: int, nbytes: int) -> None:
        self._step("release_reservation")
        assert not [a for a in self.mapped if address <= a < address + nbytes], "released with something mapped"
        assert self.reserved[address] == nbytes
        self.driver.release_reservation(address, nbytes)
        del self.reserved[address]

    def create(self, nbytes: int) -> Allocation:
        self._step("create")
        allocation = self.driver.create(nbytes)
        if self.dirty:  # as a GPU does: an allocation shows what its memory held before
            import ctypes

            ctypes.memset(allocation.handle, 0x5A, nbytes)
        self.allocated[allocation.id] = nbytes
        return allocation

    def release(self, allocation: Allocation) -> None:
        self._step("release")
        assert allocation.id in self.allocated, "released twice"
        assert allocation.handle not in self.mapped, "released while mapped"
        self.driver.release(allocation)
        del self.allocated[allocation.id]

    def map(self, address: int, allocation: Allocation) -> None:
        self._step("map")
        assert address not in self.mapped
        assert any(r <= address and address + allocation.nbytes <= r + n for r, n in self.reserved.items())
        self.driver.map(address, allocation)
        self.mapped[address] = allocation.nbytes

    def unmap(self, address: int, allocation: Allocation) -> None:
        self._step("unmap")
        assert self.mapped[address] == allocation.nbytes
        self.driver.unmap(address, allocation)
        del self.mapped[address]

    def synchronize(self) -> None:
        self._step("synchronize")

    def memory_info(self) -> MemoryInfo:
        return self.driver.memory_info()

    def _step(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) == self.fail_at:
            raise DriverError(call, 999, "INJECTED")


@dataclass(frozen=True)
class Footprint:
    """What this process holds, from the kernel: resident and mapped bytes, file descriptors."""

    resident_bytes: int
    mapped_bytes: int
    files: int

    @classmethod
    def now(cls) -> Footprint:
        mapped = 0
        with open("/proc/self/maps") as lines:
            for line in lines:
                first, last = line.split(" ", 1)[0].split("-")
                mapped += int(last, 16) - int(first, 16)
        return cls(resident_bytes(), mapped, len(os.listdir("/proc/self/fd")))

    def assert_close(self, other: Footprint, slack_bytes: int = 7 * MIB // 2) -> None:
        """Equal but for what the interpreter itself takes; a granule of the tests is larger than the slack."""
        assert abs(self.resident_bytes - other.resident_bytes) <= slack_bytes, (self, other)
        assert abs(self.mapped_bytes - other.mapped_bytes) <= slack_bytes, (self, other)
        assert self.files == other.files


def small_geometry(
    layout: KVCacheLayout = KVCacheLayout.LBHNC, *, granularity_bytes: int = 4096, blocks: int = 12, layers: int = 2
) -> CacheGeometry:
    """Two layers of 2 heads; a page of 768 bytes, so that blocks and granules never line up."""
    spec = KVCacheSpec.full_attention(block_size_tokens=4, num_kv_heads=2, head_size=12, dtype="float32")
    strides = [spec.page_size_bytes, spec.page_size_bytes // 2, spec.page_size_bytes * layers]
    capacity = align_capacity(blocks, strides, granularity_bytes, up=True)
    group = LayerGroup("g", tuple(f"layer{i}" for i in range(layers)), spec)
    return CacheGeometry(layout, (group,), capacity, granularity_bytes)


@dataclass(eq=False)
class FakeConnector:
    """Remembers what it was opened with, and can be told to fail."""

    opened: list[tuple[int, int]] = field(default_factory=list)  # (registered bytes, generation)
    is_open: bool = False
    fail_open: bool = False
    fail_close: bool = False

    def open(self, regions, generation) -> None:
        assert not self.is_open
        if self.fail_open:
            raise RuntimeError("cannot register")
        self.opened.append((sum(region.nbytes for region in regions), generation))
        self.is_open = True

    def close(self) -> None:
        if self.fail_close:
            raise RuntimeError("cannot drain")
        self.is_open = False


def opened_cache(driver: Driver, geometry: CacheGeometry):
    """A cache in RESERVED with its views set, and those views."""
    cache = ExtensibleKVCache(driver, geometry.segment_table)
    cache.open()
    views = views_of(cache.buffer, geometry)
    cache.set_views(views)
    return cache, views


def each_fault(driver: FaultyDriver, act: Callable[[], object]) -> Iterator[str]:
    """Runs `act` with a fault at its first call, its second, ..., until it gets through; yields after each fault."""
    for fail_at in range(1, 200):
        driver.arm(fail_at)
        try:
            act()
        except DriverError as error:
            if error.name != "INJECTED":
                raise
            call = driver.calls[fail_at - 1]
        else:
            driver.arm(0)
            return
        driver.arm(0)
        yield call
    raise AssertionError("still failing after 200 calls")
