"""AMD GPUs as a `Driver`: HIP's virtual memory calls, which mirror CUDA's, through ctypes.

Written from HIP's headers and tested against a stand-in library only: it has met no hardware yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator

from kvx.drivers.base import Allocation, Driver, MemoryInfo
from kvx.errors import DriverError, DriverUnavailable, OutOfDeviceMemory

LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so")
OLDEST_RUNTIME = (7, 12)
"""Before it, hipMemSetAccess fails at random once a reservation holds several allocations of different sizes."""

_HINT = f"install ROCm {OLDEST_RUNTIME[0]}.{OLDEST_RUNTIME[1]} or newer"
_OUT_OF_MEMORY = 2  # hipErrorOutOfMemory
_PINNED, _ON_DEVICE, _POSIX_FD, _READ_WRITE, _MINIMUM = 1, 1, 1, 3, 0
_VIRTUAL_MEMORY_ATTRIBUTE = 89  # hipDeviceAttributeVirtualMemoryManagementSupported

_int, _size, _pointer, _flags = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong
_out_int, _out_size, _out_pointer = (ctypes.POINTER(kind) for kind in (_int, _size, _pointer))


class _Location(ctypes.Structure):
    """hipMemLocation."""

    _fields_ = [("type", _int), ("id", _int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [("compression", ctypes.c_ubyte), ("rdma_capable", ctypes.c_ubyte), ("usage", ctypes.c_ushort)]


class _AllocationProperties(ctypes.Structure):
    """hipMemAllocationProp."""

    _fields_ = [
        ("type", _int),
        ("handle_type", _int),
        ("location", _Location),
        ("win32_metadata", _pointer),
        ("flags", _AllocationFlags),
    ]


class _AccessDescription(ctypes.Structure):
    """hipMemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", _int)]


_properties = ctypes.POINTER(_AllocationProperties)
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "hipRuntimeGetVersion": (_out_int,),
    "hipGetDevice": (_out_int,),
    "hipSetDevice": (_int,),
    "hipDeviceGetAttribute": (_out_int, _int, _int),
    "hipMemGetAllocationGranularity": (_out_size, _properties, _int),
    "hipMemAddressReserve": (_out_pointer, _size, _size, _pointer, _flags),
    "hipMemAddressFree": (_pointer, _size),
    "hipMemCreate": (_out_pointer, _size, _properties, _flags),
    "hipMemRelease": (_pointer,),
    "hipMemMap": (_pointer, _size, _size, _pointer, _flags),
    "hipMemSetAccess": (_pointer, _size, ctypes.POINTER(_AccessDescription), _size),
    "hipMemUnmap": (_pointer, _size),
    "hipMemGetInfo": (_out_size, _out_size),
    "hipDeviceSynchronize": (),
    "hipMemExportToShareableHandle": (_pointer, _pointer, _int, _flags),
    "hipMemImportFromShareableHandle": (_out_pointer, _pointer, _int),
}


class HipDriver(Driver):
    """The memory of one AMD GPU, with the rules of `CudaDriver`. `device` is as torch for ROCm writes it, "cuda:0"."""

    allocations_are_zero = False
    dlpack_device_type = 10

    def __init__(self, index: int = 0, library: str | None = None) -> None:
        self.device = f"cuda:{index}"
        self._index = index
        self._hip = _load((library,) if library else LIBRARIES)
        self._require_runtime()
        supported = _int()
        self._call("hipDeviceGetAttribute", supported, _VIRTUAL_MEMORY_ATTRIBUTE, index)
        if not supported.value:
            found = f"{self.device} has no virtual memory management"
            raise DriverUnavailable("hipDeviceGetAttribute", found, "take a GPU that has it")
        here = _Location(_ON_DEVICE, index)
        self._properties = _AllocationProperties(type=_PINNED, handle_type=_POSIX_FD, location=here)
        self._access = _AccessDescription(here, _READ_WRITE)
        granularity = _size()
        self._call("hipMemGetAllocationGranularity", granularity, self._properties, _MINIMUM)
        self.granularity_bytes = granularity.value
        self._ids = itertools.count(1)

    def reserve(self, nbytes: int) -> int:
        found = _pointer()
        detail = f"no address range of {nbytes} bytes"
        self._call("hipMemAddressReserve", found, nbytes, self.granularity_bytes, None, 0, detail=detail)
        return int(found.value or 0)

    def release_reservation(self, address: int, nbytes: int) -> None:
        self._call("hipMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Allocation:
        handle = _pointer()
        detail = f"{nbytes} bytes wanted on {self.device}; ask for fewer blocks, or stop what else uses the device"
        self._call("hipMemCreate", handle, nbytes, self._properties, 0, detail=detail)
        return Allocation(next(self._ids), nbytes, int(handle.value or 0))

    def release(self, allocation: Allocation) -> None:
        self._call("hipMemRelease", allocation.handle)
        allocation.handle = 0  # a second release of this one cannot hit memory of somebody else

    def map(self, address: int, allocation: Allocation) -> None:
        self._call("hipMemMap", address, allocation.nbytes, 0, allocation.handle, 0)
        try:
            self._call("hipMemSetAccess", address, allocation.nbytes, self._access, 1)
        except BaseException:
            self._call("hipMemUnmap", address, allocation.nbytes)
            raise

    def unmap(self, address: int, allocation: Allocation) -> None:
        self._call("hipMemUnmap", address, allocation.nbytes)

    def memory_info(self) -> MemoryInfo:
        free, total = _size(), _size()
        with self._on_device():
            self._call("hipMemGetInfo", free, total)
        return MemoryInfo(free.value, total.value)

    def synchronize(self) -> None:
        with self._on_device():
            self._call("hipDeviceSynchronize")

    def export_fd(self, allocation: Allocation) -> int:
        """A file descriptor through which another process can import the allocation; the caller closes it."""
        fd = _int(-1)
        self._call("hipMemExportToShareableHandle", ctypes.addressof(fd), allocation.handle, _POSIX_FD, 0)
        return fd.value

    def import_fd(self, fd: int, nbytes: int) -> Allocation:
        """Another process's allocation of `nbytes`, from its file descriptor, which stays the caller's to close."""
        handle = _pointer()
        self._call("hipMemImportFromShareableHandle", handle, fd, _POSIX_FD)
        return Allocation(next(self._ids), nbytes, int(handle.value or 0))

    def _require_runtime(self) -> None:
        """HIP writes its version as major * 10,000,000 + minor * 100,000 + patch."""
        found = _int()
        self._call("hipRuntimeGetVersion", found)
        version = (found.value // 10_000_000, found.value // 100_000 % 100)
        if version < OLDEST_RUNTIME:
            named = f"HIP runtime {version[0]}.{version[1]}, whose hipMemSetAccess fails at random"
            raise DriverUnavailable("hipRuntimeGetVersion", named, _HINT)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """For the calls that mean the calling thread's device."""
        before = _int()
        self._call("hipGetDevice", before)
        self._call("hipSetDevice", self._index)
        try:
            yield
        finally:
            self._call("hipSetDevice", before.value)

    def _call(self, name: str, *arguments: object, detail: str = "") -> None:
        """Calls; ctypes passes its own objects by reference where a pointer is declared. Statuses are checked."""
        code = getattr(self._hip, name)(*arguments)
        if code != 0:
            kind = OutOfDeviceMemory if code == _OUT_OF_MEMORY else DriverError
            word = self._hip.hipGetErrorName(code)
            raise kind(name, code, word.decode() if word else "unknown status", detail)


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    """The first HIP library that is there, its functions typed."""
    problems = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
            for function, arguments in _SIGNATURES.items():
                getattr(library, function).argtypes = arguments
        except (OSError, AttributeError) as error:  # not there, or without one of the functions
            problems.append(str(error))
            continue
        library.hipGetErrorName.argtypes, library.hipGetErrorName.restype = (_int,), ctypes.c_char_p
        return library
    raise DriverUnavailable("load HIP", "; ".join(problems), _HINT)
