"""Copies of many byte runs at once, between addresses that this process has mapped: `copier_for(device)`.

On the host they are done inside the call, by memmove. On CUDA they are one kernel launch for all runs of a call, on a
stream of the copier's own (`cuda_copier`); there an address may also be host memory that was registered for it, or
another GPU's memory that was mapped for this one.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvx.errors import DriverUnavailable

Int64s = npt.NDArray[np.int64]


class Copying(Protocol):
    """Copies under way. The memory on both sides must stay until they are done."""

    def is_done(self) -> bool:
        """Whether all bytes have arrived; never waits. `DriverError` when the device has failed."""

    def wait(self) -> None:
        """Return when all bytes have arrived. `DriverError` when the device has failed."""


class Copier(ABC):
    """One device's copies. Any thread may call."""

    #: `start` only queues work for the device, so that whoever calls it goes on at once.
    only_queues: ClassVar[bool] = False

    @abstractmethod
    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        """Copy `nbytes[i]` bytes from address `source[i]` to `destination[i]`, for all i, in no order.

        Addresses are not checked: whoever calls knows that all of it is committed. `after`: a stream of this device
        (its handle as an integer); the copies begin when what is queued on it now has run.
        """

    def register_host(self, address: int, nbytes: int) -> None:
        """Let copies reach a range of host memory. Takes some 50 ms for each GiB, and any thread may wait for it."""
        del address, nbytes

    def unregister_host(self, address: int) -> None:
        """The undo of `register_host`; nothing may be copying there."""
        del address

    def close(self) -> None:
        """Wait for what was started and give everything back. Idempotent."""
        return


def copier_for(device: str, *, goes_first: bool = False) -> Copier:
    """The copier of a device as torch names it: "cpu", "cuda", "cuda:1". `DriverUnavailable` when there is none.

    `goes_first`: its copies begin before kernels of the device that are queued elsewhere, of the model or for digests.
    For copies as fast as the device's memory, which somebody waits for; slower ones would keep the model waiting.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return HostCopier()
    if kind != "cuda":
        raise DriverUnavailable(f"device {device!r}", "kvx has no copier for it", "name cpu, or cuda:0, cuda:1 ...")
    from kvx.drivers.cuda_copier import CudaCopier

    return CudaCopier(int(index or 0), goes_first=goes_first)


class _Done:
    """Copies that were over when the call returned."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Final[Copying] = _Done()


class HostCopier(Copier):
    """memmove, run by run; ctypes lets other threads go on meanwhile."""

    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        del after  # a host has no streams
        move = ctypes.memmove
        for to, at, size in zip(destination.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            move(to, at, size)
        return DONE
