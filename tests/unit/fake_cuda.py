"""A stand-in for `cuda.bindings.driver` over host memory: the same calls, results and statuses, and its own books.

An allocation is a memory file full of 0x5A, as a GPU's memory is full of what somebody left there; mapping it is a
shared mapping of that file. A call that breaks a rule of CUDA's (access before map, release of a range with something
mapped, an unknown handle) gets CUDA's status for it. Nothing here is taken from the real library but names and numbers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum
from types import SimpleNamespace

GRANULE = 1 << 16
_PRIVATE_RESERVE, _SHARED_FIXED = 0x4022, 0x11  # MAP_PRIVATE|ANONYMOUS|NORESERVE; MAP_SHARED|FIXED
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


OK, BAD = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


class FakeCuda:
    """`devices` devices, with `total_bytes` in all. Call number `fail_at` (from 1, since `arm`) fails with UNKNOWN."""

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read-write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm",
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED="fd",
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED="rdma",
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED="fabric",
        CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED="dma-buf",
    )

    def __init__(
        self, total_bytes: int = 256 * GRANULE, features: tuple[str, ...] = ("vmm", "fd", "rdma"), devices: int = 1
    ) -> None:
        self.devices = devices
        self.total_bytes = total_bytes
        self.features = features
        self.calls: list[str] = []
        self.fail_at = 0
        self.reserved: dict[int, tuple[int, int]] = {}  # address -> (bytes, the host's own start)
        self.allocated: dict[int, int] = {}  # handle (a memory file) -> bytes
        self.mapped: dict[int, tuple[int, int, bool]] = {}  # address -> (bytes, handle, access set)
        self.contexts: list[str] = []
        self.created_with: list[SimpleNamespace] = []
        self.pending = False  # somebody queued work and has not waited for it

    def arm(self, fail_at: int) -> None:
        self.calls.clear()
        self.fail_at = fail_at

    def books(self) -> tuple[dict[int, int], list[int], dict[int, int]]:
        reserved = {address: nbytes for address, (nbytes, _) in self.reserved.items()}
        return reserved, sorted(self.allocated.values()), {a: m[0] for a, m in self.mapped.items()}

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        location, flags = SimpleNamespace(type=None, id=None), SimpleNamespace(gpuDirectRDMACapable=0)
        return SimpleNamespace(type=None, location=location, requestedHandleTypes=None, allocFlags=flags)

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:
        return SimpleNamespace(location=None, flags=None)

    def __getattribute__(self, name: str):
        """Counts the calls, and fails the one that is armed before it does anything."""
        found = super().__getattribute__(name)
        if not (name.startswith("cu") and callable(found)):
            return found

        def call(*arguments):
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                return (CUresult.CUDA_ERROR_UNKNOWN, None)
            return found(*arguments)

        return call

    def cuInit(self, flags):
        return (OK if flags == 0 else BAD,)

    def cuDeviceGet(self, index):
        return (OK, 70 + index) if 0 <= index < self.devices else (CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetAttribute(self, attribute, device):
        return (OK, int(attribute in self.features)) if 70 <= device < 70 + self.devices else (BAD, None)

    def cuDeviceCanAccessPeer(self, device, other):
        return OK, int("peers" in self.features)

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, "primary"

    def cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self):
        return OK, self.contexts.pop()

    def cuCtxSynchronize(self):
        if self.contexts[-1:] != ["primary"]:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.pending = False
        return (OK,)

    def cuMemGetInfo(self):
        if self.contexts[-1:] != ["primary"]:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None, None
        return OK, self.total_bytes - sum(self.allocated.values()), self.total_bytes

    def cuMemGetAllocationGranularity(self, properties, option):
        good = properties.type == "pinned" and properties.location.type == "device" and option == "minimum"
        return (OK, GRANULE) if good else (BAD, None)

    def cuMemAddressReserve(self, nbytes, alignment, hint, flags):
        if nbytes <= 0 or nbytes % GRANULE or alignment != GRANULE or hint or flags:
            return BAD, None
        start = _libc.mmap(None, nbytes + alignment, 0, _PRIVATE_RESERVE, -1, 0)
        address = -(-start // alignment) * alignment
        self.reserved[address] = (nbytes, start)
        return OK, address

    def cuMemAddressFree(self, address, nbytes):
        if self.reserved.get(address, (0, 0))[0] != nbytes or any(address <= m < address + nbytes for m in self.mapped):
            return (BAD,)
        _, start = self.reserved.pop(address)
        assert _libc.munmap(start, nbytes + GRANULE) == 0
        return (OK,)

    def cuMemCreate(self, nbytes, properties, flags):
        if nbytes <= 0 or nbytes % GRANULE or flags:
            return BAD, None
        if nbytes > self.total_bytes - sum(self.allocated.values()):
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        handle = os.memfd_create("fake")
        os.write(handle, b"\x5a" * nbytes)
        self.allocated[handle] = nbytes
        self.created_with.append(properties)
        return OK, handle

    def cuMemRelease(self, handle):
        if handle not in self.allocated or any(handle == m[1] for m in self.mapped.values()):
            return (BAD,)
        os.close(handle)
        del self.allocated[handle]
        return (OK,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        inside = any(r <= address and address + nbytes <= r + n for r, (n, _) in self.reserved.items())
        overlaps = any(m < address + nbytes and address < m + n for m, (n, _, _) in self.mapped.items())
        if not inside or overlaps or offset or flags or self.allocated.get(handle) != nbytes:
            return (BAD,)
        assert _libc.mmap(address, nbytes, 0, _SHARED_FIXED, handle, 0) == address
        self.mapped[address] = (nbytes, handle, False)
        return (OK,)

    def cuMemSetAccess(self, address, nbytes, descriptions, count):
        good = count == len(descriptions) == 1 and descriptions[0].flags == "read-write"
        if (
            not good
            or not 0 <= descriptions[0].location.id < self.devices
            or self.mapped.get(address, (0,))[0] != nbytes
        ):
            return (BAD,)
        assert _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self.mapped[address] = (*self.mapped[address][:2], True)
        return (OK,)

    def cuMemUnmap(self, address, nbytes):
        assert not self.pending, "unmapped under queued work: a real context is dead now"
        if self.mapped.get(address, (0,))[0] != nbytes:
            return (BAD,)
        assert _libc.mmap(address, nbytes, 0, _PRIVATE_RESERVE | 0x10, -1, 0) == address
        del self.mapped[address]
        return (OK,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        good = handle in self.allocated and kind == "fd" and flags == 0
        return (OK, os.dup(handle)) if good else (BAD, None)

    def cuMemImportFromShareableHandle(self, fd, kind):
        if kind != "fd":
            return BAD, None
        handle = os.dup(fd)
        self.allocated[handle] = os.fstat(fd).st_size
        return OK, handle
