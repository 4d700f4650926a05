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
from collections.abc import Iterator

from kvx.drivers.base import Allocation
from kvx.drivers.host import HostDriver
from kvx.errors import DriverError, LayoutError, OutOfDeviceMemory

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_FILE = -1
_MAP_SHARED_FIXED = mmap.MAP_SHARED | 0x10
_MAP_POPULATE = 0x8000


class SharedHostDriver(HostDriver):
    """Host memory in memory files. An `Allocation.handle` is the file's descriptor."""

    can_export = True

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
        allocation.handle = _NO_FILE  # a second release, or a map, of this one cannot hit a file of somebody else

    def map(self, address: int, allocation: Allocation) -> None:
        self._require_granules(address=address, nbytes=allocation.nbytes)
        flags, protection = _MAP_SHARED_FIXED | _MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = self._libc.mmap(address, allocation.nbytes, protection, flags, allocation.handle, 0)
        self._check_address("mmap", mapped, f"{allocation.nbytes} bytes of a memory file")

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
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        if not seals & fcntl.F_SEAL_SHRINK or size != nbytes:
            raise LayoutError(
                f"a peer's memory file has {size} bytes and seals {seals}; {nbytes} bytes that cannot be cut off "
                "are needed"
            )
        with _status("dup"):
            return Allocation(next(self._ids), nbytes, os.dup(fd))

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
