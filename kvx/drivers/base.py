"""The memory calls that kvx needs of a device, in the shape that CUDA's and HIP's virtual memory calls have.

Two kinds of thing are kept apart: an address range (reserved, costs no memory) and an allocation (physical memory,
has no address of its own as far as kvx knows). `map` binds one to the other; `unmap` takes the binding away and
leaves the allocation's content as it is, so that an undone unmap is exact.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from kvx.errors import DriverError


@dataclass(eq=False)
class Allocation:
    """Physical memory of `nbytes`. `handle` belongs to the driver; nobody else reads it."""

    id: int
    nbytes: int
    handle: int = field(repr=False)


@dataclass(frozen=True)
class MemoryInfo:
    """What a device has: `free_bytes` could be committed now, `total_bytes` is all that this process may ever use."""

    free_bytes: int
    total_bytes: int


class Driver(ABC):
    """One device's memory calls. Every status is checked: a failed call is a `DriverError` and changed nothing."""

    device: str
    """As torch writes it: "cpu", "cuda:0"."""
    granularity_bytes: int
    """The smallest unit that `map` binds; offsets and sizes of every call are multiples of it."""
    allocations_are_zero: bool
    """True when fresh allocations read as zeros, so that nobody has to write zeros over them."""
    dlpack_device_type: int = 1
    """DLPack's number for this kind of device: 1 is the host, 2 CUDA, 10 ROCm."""
    can_export: bool = False
    """Whether other processes can map its allocations: `export_fd` and `import_fd`."""

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Reserves an address range and returns its first address, a multiple of the granularity."""

    @abstractmethod
    def release_reservation(self, address: int, nbytes: int) -> None:
        """Gives a whole address range back; nothing may be mapped in it."""

    @abstractmethod
    def create(self, nbytes: int) -> Allocation:
        """Takes physical memory now, not at first touch; `OutOfDeviceMemory` when there is no room."""

    @abstractmethod
    def release(self, allocation: Allocation) -> None:
        """Gives an unmapped allocation's memory back."""

    @abstractmethod
    def map(self, address: int, allocation: Allocation) -> None:
        """Binds a whole allocation to reserved addresses and allows reading and writing there."""

    @abstractmethod
    def unmap(self, address: int, allocation: Allocation) -> None:
        """Takes the binding away; the addresses stay reserved, the allocation keeps its content."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Free and total bytes of the device, or of what this process may use of it."""

    def export_fd(self, allocation: Allocation) -> int:
        """A file descriptor through which another process can import the allocation; the caller closes it."""
        raise self._cannot_export(allocation.nbytes)

    def import_fd(self, fd: int, nbytes: int) -> Allocation:
        """Another process's allocation of `nbytes`, from its file descriptor, which stays the caller's to close."""
        del fd
        raise self._cannot_export(nbytes)

    def synchronize(self) -> None:
        """Waits until the device has no work queued. A host has none."""
        return

    def _cannot_export(self, nbytes: int) -> DriverError:
        return DriverError(
            "export_fd", errno.ENOTSUP, "ENOTSUP",
            f"{nbytes} bytes of {self.device} cannot be shared with another process by file descriptor",
        )  # fmt: skip
