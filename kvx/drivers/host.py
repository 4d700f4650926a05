"""The host's memory as a `Driver`: anonymous pages, bound to reserved addresses by moving them there (mremap).

An allocation that is not mapped lives at a home address of its own. Moving it costs page-table work only, keeps the
content, and its pages stay huge where they were. Memory is populated when it is created: a host that has no room
says so in `create`, as a GPU does, and not by SIGKILL at some later write.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap as _mmap
import os
from collections.abc import Callable

from kvx.drivers.base import Allocation, Driver, MemoryInfo
from kvx.drivers.host_memory import read_host_memory
from kvx.errors import DriverError, LayoutError, OutOfDeviceMemory

MIB = 1 << 20
HEADROOM_BYTES = 64 * MIB
"""Never taken: the kernel needs some room while it hands out the rest."""

_PROT_NONE, _PROT_READ_WRITE = 0, _mmap.PROT_READ | _mmap.PROT_WRITE
_MAP_RESERVE = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MAP_FIXED = 0x10
_MREMAP_MOVE_TO, _MREMAP_KEEP_RANGE = 1 | 2, 4  # MAYMOVE | FIXED, DONTUNMAP
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_NO_HOME = 0
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Libc:
    """The four calls, typed. `mmap` and `mremap` return an address, `munmap` and `madvise` a status."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.mmap = self._typed(library.mmap, pointer, pointer, size, number, number, number, ctypes.c_long)
        self.mremap = self._typed(library.mremap, pointer, pointer, size, size, number, pointer)
        self.munmap = self._typed(library.munmap, number, pointer, size)
        self.madvise = self._typed(library.madvise, number, pointer, size, number)

    @staticmethod
    def _typed(function: ctypes._NamedFuncPointer, result: type, *arguments: type) -> Callable[..., int]:
        function.restype, function.argtypes = result, arguments
        return function


class HostDriver(Driver):
    """Host memory. `granularity_bytes` is a huge page by default; tests take smaller ones (a multiple of 4 KiB)."""

    device = "cpu"
    allocations_are_zero = True

    def __init__(
        self, granularity_bytes: int = 2 * MIB, memory_info: Callable[[], MemoryInfo] = read_host_memory
    ) -> None:
        if granularity_bytes <= 0 or granularity_bytes % _mmap.PAGESIZE or granularity_bytes & (granularity_bytes - 1):
            raise LayoutError(
                f"granularity of {granularity_bytes} bytes: needs a power of two that is a multiple of the host's "
                f"page of {_mmap.PAGESIZE} bytes; leave it out for 2 MiB"
            )
        self.granularity_bytes = granularity_bytes
        self._memory_info = memory_info
        self._libc = _Libc()
        self._ids = itertools.count(1)

    def reserve(self, nbytes: int) -> int:
        self._require_granules(nbytes=nbytes)
        return self._aligned_range(nbytes)

    def release_reservation(self, address: int, nbytes: int) -> None:
        self._require_granules(address=address, nbytes=nbytes)
        self._check("munmap", self._libc.munmap(address, nbytes))

    def create(self, nbytes: int) -> Allocation:
        self._require_granules(nbytes=nbytes)
        self._require_room(nbytes)
        home = self._aligned_range(nbytes)
        try:
            self._populate(home, nbytes)
        except BaseException:
            self._libc.munmap(home, nbytes)
            raise
        return Allocation(next(self._ids), nbytes, home)

    def release(self, allocation: Allocation) -> None:
        self._require_unreleased(allocation, _NO_HOME)
        self._check("munmap", self._libc.munmap(allocation.handle, allocation.nbytes))
        allocation.handle = _NO_HOME  # a second release, or a map, of this one cannot hit memory of somebody else

    def map(self, address: int, allocation: Allocation) -> None:
        self._require_granules(address=address, nbytes=allocation.nbytes)
        try:
            self._move(allocation, address, keep_range=False)
        except DriverError:
            self._close_range(address, allocation.nbytes)  # a failed move may have emptied its target already
            raise

    def unmap(self, address: int, allocation: Allocation) -> None:
        self._require_granules(address=address, nbytes=allocation.nbytes)
        home = self._aligned_range(allocation.nbytes)
        try:
            # The range is kept until it is closed: a hole could be taken by another thread's mmap.
            self._move(allocation, home, keep_range=True)
        except DriverError:
            self._libc.munmap(home, allocation.nbytes)
            raise
        try:
            self._close_range(address, allocation.nbytes)
        except DriverError:
            self._move(allocation, address, keep_range=False)
            raise

    def memory_info(self) -> MemoryInfo:
        found = self._memory_info()
        return MemoryInfo(max(0, found.free_bytes - HEADROOM_BYTES), found.total_bytes)

    @staticmethod
    def _require_unreleased(allocation: Allocation, released: int) -> None:
        if allocation.handle == released:
            raise LayoutError(f"allocation {allocation.id} was released already; release each once")

    def _require_room(self, nbytes: int) -> None:
        free = self.memory_info().free_bytes
        if nbytes > free:
            raise OutOfDeviceMemory(
                "create", errno.ENOMEM, "ENOMEM",
                f"{nbytes} bytes wanted, but this process may take only {free} more (with {HEADROOM_BYTES} kept free); "
                "ask for fewer blocks, or stop something",
            )  # fmt: skip

    def _aligned_range(self, nbytes: int) -> int:
        """Address space without memory, `nbytes` long, that starts on a granule."""
        spare = self.granularity_bytes - _mmap.PAGESIZE
        found = self._libc.mmap(None, nbytes + spare, _PROT_NONE, _MAP_RESERVE, -1, 0)
        start = self._check_address("mmap", found, f"no address range of {nbytes} bytes (see ulimit -v)")
        address = -(-start // self.granularity_bytes) * self.granularity_bytes
        if address > start:
            self._check("munmap", self._libc.munmap(start, address - start))
        if tail := start + spare - address:
            self._check("munmap", self._libc.munmap(address + nbytes, tail))
        return address

    def _populate(self, address: int, nbytes: int) -> None:
        """Puts zeroed memory behind a range that has none. Raises `OutOfDeviceMemory` when there is not enough."""
        opened = self._libc.mmap(address, nbytes, _PROT_READ_WRITE, _MAP_RESERVE | _MAP_FIXED, -1, 0)
        self._check_address("mmap", opened, f"{nbytes} bytes wanted")
        # Huge pages are a matter of speed, and a kernel may be built without them: this status alone is not checked.
        self._libc.madvise(address, nbytes, _MADV_HUGEPAGE)
        if self._libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() != errno.EINVAL:
            raise self._error("madvise(MADV_POPULATE_WRITE)", f"{nbytes} bytes wanted")
        ctypes.memset(address, 0, nbytes)  # a kernel before 5.14 does not know the advice

    def _move(self, allocation: Allocation, target: int, *, keep_range: bool) -> None:
        flags = _MREMAP_MOVE_TO | (_MREMAP_KEEP_RANGE if keep_range else 0)
        nbytes = allocation.nbytes
        moved = self._libc.mremap(allocation.handle, nbytes, nbytes, flags, target)
        self._check_address("mremap", moved, f"{nbytes} bytes (with ENOMEM see vm.max_map_count)")
        allocation.handle = target

    def _close_range(self, address: int, nbytes: int) -> None:
        """Makes a range inaccessible and drops its pages; the addresses stay reserved."""
        closed = self._libc.mmap(address, nbytes, _PROT_NONE, _MAP_RESERVE | _MAP_FIXED, -1, 0)
        self._check_address("mmap", closed, f"{nbytes} bytes")

    def _require_granules(self, **values: int) -> None:
        for name, value in values.items():
            if value <= 0 or value % self.granularity_bytes:
                raise LayoutError(
                    f"{name} {value} is not a positive multiple of the {self.granularity_bytes} B granule"
                )

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise self._error(call)

    def _check_address(self, call: str, address: int | None, detail: str) -> int:
        if address is None or address == _MAP_FAILED:
            raise self._error(call, detail)
        return address

    @staticmethod
    def _error(call: str, detail: str = "") -> DriverError:
        code = ctypes.get_errno()
        kind = OutOfDeviceMemory if code == errno.ENOMEM else DriverError
        return kind(call, code, errno.errorcode.get(code, os.strerror(code)), detail)
