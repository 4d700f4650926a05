"""The host's memory as a `Driver` whose allocations other processes can map: each is a memory file (memfd).

For connectors that share memory between engines of one host; everything else takes `HostDriver`, whose pages are huge
where the kernel gives them (it gives memory files none by default). A memory file cannot be shrunk, once sealed: a
peer that could cut off pages would end us with SIGBUS at the next access.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator

from kvx.drivers.base import Allocation, MemoryInfo
from kvx.drivers.host import MIB, HostDriver
from kvx.drivers.host_memory import read_host_memory
from kvx.errors import DriverError, LayoutError, OutOfDeviceMemory

_F_SEAL_FUTURE_WRITE = 0x10
# The last one: a peer that has the file could seal it against writing, and our own next `map` would fail.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_READ_ONLY = fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE
_NO_FILE = -1
_MAP_SHARED_FIXED = mmap.MAP_SHARED | 0x10
_MAP_POPULATE = 0x8000


class SharedHostDriver(HostDriver):
    """Host memory in memory files. An `Allocation.handle` is the file's descriptor."""

    can_export = True

    def __init__(
        self, granularity_bytes: int = 2 * MIB, memory_info: Callable[[], MemoryInfo] = read_host_memory
    ) -> None:
        super().__init__(granularity_bytes, memory_info)
        self._imported: set[int] = set()

    def create(self, nbytes: int) -> Allocation:
        super()._require_granules(nbytes=nbytes)
        self._require_room(nbytes)
        with _status("memfd_create"):
            file = os.memfd_create("kvx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with _status("fallocate"):
                os.posix_fallocate(file, 0, nbytes)  # takes the pages, zeroed, now
            with _status("seal"):
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(file)
            raise
        return Allocation(next(self._ids), nbytes, file)

    def release(self, allocation: Allocation) -> None:
        self._require_unreleased(allocation, _NO_FILE)
        with _status("close"):
            os.close(allocation.handle)
        self._imported.discard(allocation.id)
        allocation.handle = _NO_FILE  # a second release, or a map, of this one cannot hit a file of somebody else

    def map(self, address: int, allocation: Allocation) -> None:
        self._require_granules(address=address, nbytes=allocation.nbytes)
        # A peer's memory is mapped page by page as it is read: all at once takes 0.1 s for each GiB, and is not needed.
        flags = _MAP_SHARED_FIXED | (0 if allocation.id in self._imported else _MAP_POPULATE)
        mapped = self._libc.mmap(
            address, allocation.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, allocation.handle, 0
        )
        try:
            self._check_address("mmap", mapped, f"{allocation.nbytes} bytes of a memory file")
        except DriverError:
            self._close_range(address, allocation.nbytes)  # a failed map may have emptied its target already
            raise

    def unmap(self, address: int, allocation: Allocation) -> None:
        self._require_granules(address=address, nbytes=allocation.nbytes)
        self._close_range(address, allocation.nbytes)

    def export_fd(self, allocation: Allocation) -> int:
        try:
            with _status("dup"):
                return os.dup(allocation.handle)
        except OverflowError as error:  # an address: memory of the plain host driver
            raise self._cannot_export(allocation.nbytes) from error

    def import_fd(self, fd: int, nbytes: int) -> Allocation:
        with _status("look at a memory file"):
            seals, found = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd)
        if not seals & fcntl.F_SEAL_SHRINK or seals & _READ_ONLY or found.st_size != nbytes:
            raise LayoutError(
                f"a peer's memory file has {found.st_size} bytes and seals {seals}; {nbytes} bytes that can be written "
                "and cannot be cut off are needed"
            )
        if found.st_blocks * 512 < nbytes:
            raise LayoutError(
                f"a peer's memory file of {nbytes} bytes has memory for {found.st_blocks * 512} only; we would have "
                "to pay for the rest"
            )
        with _status("dup"):
            allocation = Allocation(next(self._ids), nbytes, os.dup(fd))
        self._imported.add(allocation.id)
        return allocation

    def _require_granules(self, **values: int) -> None:
        """Whole pages are enough to map what another process created: its granule may be smaller than ours."""
        for name, value in values.items():
            if value <= 0 or value % mmap.PAGESIZE:
                raise LayoutError(f"{name} {value} is not a positive multiple of the host's page, {mmap.PAGESIZE} B")


@contextlib.contextmanager
def _status(call: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        kind = OutOfDeviceMemory if code in (errno.ENOMEM, errno.ENOSPC) else DriverError
        raise kind(call, code, errno.errorcode.get(code, ""), str(error)) from error
