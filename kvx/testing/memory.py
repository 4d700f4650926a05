"""Memory for a connector under test: made by a driver, written and read without any connector.

[0, 12 MiB)    three mappings side by side, registered whole: a long run crosses two borders
[12, 14 MiB)   reserved, nothing behind it: touching it ends the process
[14, 16 MiB)   one mapping; its first MiB is registered, the second is committed and no connector's business
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvx.drivers.base import Driver
from kvx.region import MemoryRegion
from kvx.vmm import Reservation, Transaction

Bytes = NDArray[np.uint8]

MIB: Final = 1 << 20
RESERVED_BYTES: Final = 16 * MIB
COMMITTED: Final = ((0, 6 * MIB), (6 * MIB, 2 * MIB), (8 * MIB, 4 * MIB), (14 * MIB, 2 * MIB))
"""(offset, bytes) of each mapping."""
REGISTERED: Final = (*COMMITTED[:3], (14 * MIB, MIB))
"""(offset, bytes) of each region."""
BORDERS: Final = (6 * MIB, 8 * MIB)
CONTIGUOUS_BYTES: Final = 12 * MIB
"""Registered bytes from offset 0 on without a gap."""
TAIL_OFFSET: Final = 14 * MIB


class KitMemory:
    """One side's reservation. Offsets count from its base."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._reservation = Reservation(driver, RESERVED_BYTES)

    @property
    def base_address(self) -> int:
        return self._reservation.address

    def open(self) -> None:
        with Transaction() as transaction:
            self._reservation.reserve()
            transaction.callback(self._reservation.release)
            for offset, nbytes in COMMITTED:
                self._reservation.commit_range(offset, nbytes)
            transaction.commit()

    def close(self) -> None:
        self._reservation.release()

    def regions(self) -> tuple[MemoryRegion, ...]:
        """What a connector is opened on."""
        return tuple(
            MemoryRegion(self.base_address + offset, nbytes, offset, mapping)
            for (offset, nbytes), mapping in zip(REGISTERED, self._reservation.mappings, strict=True)
        )

    def read(self, offset: int, nbytes: int) -> bytes:
        return read_bytes(self.driver, self.base_address + offset, nbytes)

    def write(self, offset: int, data: bytes) -> None:
        write_bytes(self.driver, self.base_address + offset, data)

    def fill(self, seed: int) -> None:
        """Every committed byte becomes a function of (seed, offset)."""
        content = pattern(seed)
        for offset, nbytes in COMMITTED:
            self.write(offset, content[offset : offset + nbytes].tobytes())

    def snapshot(self) -> Bytes:
        """All bytes of the reservation; those without memory as zeros."""
        found = np.zeros(RESERVED_BYTES, np.uint8)
        for offset, nbytes in COMMITTED:
            found[offset : offset + nbytes] = np.frombuffer(self.read(offset, nbytes), np.uint8)
        return found


def pattern(seed: int) -> Bytes:
    """What `fill` writes, as `snapshot` shows it."""
    content = np.frombuffer(np.random.default_rng(seed).bytes(RESERVED_BYTES), np.uint8).copy()
    content[CONTIGUOUS_BYTES:TAIL_OFFSET] = 0
    return content


def read_bytes(driver: Driver, address: int, nbytes: int) -> bytes:
    """Copy committed bytes of any device out, without a connector."""
    if driver.device == "cpu":
        return ctypes.string_at(address, nbytes)
    data: bytes = _tensor(driver, address, nbytes).cpu().numpy().tobytes()
    return data


def write_bytes(driver: Driver, address: int, data: bytes) -> None:
    """Copy bytes into committed memory of any device, without a connector."""
    if driver.device == "cpu":
        ctypes.memmove(address, data, len(data))
        return
    import torch

    _tensor(driver, address, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.int8))
    driver.synchronize()


def _tensor(driver: Driver, address: int, nbytes: int) -> Any:
    """A tensor on memory that somebody else owns: this reservation is never released."""
    from kvx.tensor import tensor_over  # with torch, which a second process on host memory can do without

    borrowed = Reservation(driver, nbytes)
    borrowed.address = address
    return tensor_over(borrowed)
