"""NVIDIA GPUs as a `Driver`: CUDA's virtual memory calls, through NVIDIA's own cuda-bindings.

Works in the device's primary context, which is torch's too, and keeps it until the process ends, as torch does.
Importing this file needs nothing; `CudaDriver()` without the library, the NVIDIA driver or a GPU says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kvx.drivers.base import Allocation, Driver, MemoryInfo
from kvx.errors import DriverError, DriverUnavailable, OutOfDeviceMemory

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaDriver(Driver):
    """The memory of one NVIDIA GPU. Any thread may call; no call waits for queued work but `synchronize`.

    Nothing may be unmapped while queued work can still touch it: the context dies of that, without an error from the
    call. Whoever unmaps calls `synchronize` first.
    """

    allocations_are_zero = False
    dlpack_device_type = 2

    def __init__(self, index: int = 0) -> None:
        self.device = f"cuda:{index}"
        self._cuda = _load_bindings()
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", index)
        if not self.has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            found = f"{self.device} has no virtual memory management"
            raise DriverUnavailable("cuDeviceGetAttribute", found, "take a GPU that has it")
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.can_export = self.has("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        self.is_rdma_capable = self.has("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        self._properties = self._allocation_properties(index)
        self._access = self._cuda.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(self.call("cuMemGetAllocationGranularity", self._properties, smallest))
        self._ids = itertools.count(1)

    def reserve(self, nbytes: int) -> int:
        detail = f"no address range of {nbytes} bytes"
        return int(self.call("cuMemAddressReserve", nbytes, self.granularity_bytes, 0, 0, detail=detail))

    def release_reservation(self, address: int, nbytes: int) -> None:
        self.call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Allocation:
        detail = f"{nbytes} bytes wanted on {self.device}; ask for fewer blocks, or stop what else uses the device"
        handle = self.call("cuMemCreate", nbytes, self._properties, 0, detail=detail)
        return Allocation(next(self._ids), nbytes, int(handle))

    def release(self, allocation: Allocation) -> None:
        self.call("cuMemRelease", allocation.handle)
        allocation.handle = 0  # a second release of this one cannot hit memory of somebody else

    def map(self, address: int, allocation: Allocation) -> None:
        self.call("cuMemMap", address, allocation.nbytes, 0, allocation.handle, 0)
        try:
            self.call("cuMemSetAccess", address, allocation.nbytes, [self._access], 1)
        except BaseException:
            self.call("cuMemUnmap", address, allocation.nbytes)
            raise

    def unmap(self, address: int, allocation: Allocation) -> None:
        self.call("cuMemUnmap", address, allocation.nbytes)

    def memory_info(self) -> MemoryInfo:
        with self.in_context():
            free_bytes, total_bytes = self.call("cuMemGetInfo")
        return MemoryInfo(int(free_bytes), int(total_bytes))

    def synchronize(self) -> None:
        with self.in_context():
            self.call("cuCtxSynchronize")

    def export_fd(self, allocation: Allocation) -> int:
        """A file descriptor through which another process can import the allocation; the caller closes it."""
        if not self.can_export:
            raise DriverError(
                "cuMemExportToShareableHandle", 801, "CUDA_ERROR_NOT_SUPPORTED",
                f"{self.device} cannot share memory by file descriptors",
            )  # fmt: skip
        return int(self.call("cuMemExportToShareableHandle", allocation.handle, self._posix_fd, 0))

    def import_fd(self, fd: int, nbytes: int) -> Allocation:
        """Another process's allocation of `nbytes`, from its file descriptor, which stays the caller's to close."""
        handle = self.call("cuMemImportFromShareableHandle", fd, self._posix_fd)
        return Allocation(next(self._ids), nbytes, int(handle))

    @property
    def _posix_fd(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _allocation_properties(self, index: int) -> Any:
        """Pinned memory on this device, for export and for RDMA as far as the device has them."""
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        if self.can_export:
            properties.requestedHandleTypes = self._posix_fd
        properties.allocFlags.gpuDirectRDMACapable = int(self.is_rdma_capable)
        return properties

    def has(self, attribute: str) -> bool:
        """One of CU_DEVICE_ATTRIBUTE_*, as yes or no."""
        wanted = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return bool(self.call("cuDeviceGetAttribute", wanted, self._device))

    def reaches(self, other: CudaDriver) -> bool:
        """Whether this GPU can be given access to the other one's memory."""
        return bool(self.call("cuDeviceCanAccessPeer", self._device, other._device))

    @contextlib.contextmanager
    def in_context(self) -> Iterator[None]:
        """For the calls that mean the calling thread's context, which may be another device's, or none."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: object, detail: str = "") -> Any:
        """The result of a call, or a tuple of them. A status that is not success is a `DriverError`."""
        try:
            status, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # the binding found no libcuda, or one without this function
            raise DriverUnavailable(name, str(error), "install a current NVIDIA driver") from error
        if (code := int(status)) != 0:
            kind = OutOfDeviceMemory if code == _OUT_OF_MEMORY else DriverError
            raise kind(name, code, status.name, detail)
        return results[0] if len(results) == 1 else tuple(results)


def _load_bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverUnavailable("import cuda.bindings", str(error), "pip install 'kvx[cuda]'") from error
