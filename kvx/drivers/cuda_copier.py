"""Copies on an NVIDIA GPU: one launch of kvx's own kernel for all runs of a call (copy_kernel.cu).

The runs are cut into tiles, one for each block of threads, and the kernel reads the table of tiles from pinned host
memory, so that a call queues one launch and nothing else. cuMemcpy would take a call for each run, and its batch call
reaches half of the bus at 32 KiB (seen).
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvx.drivers.copier import DONE, Copier, Copying, Int64s
from kvx.drivers.cuda_kernel import CudaKernel, Table

THREADS = 512
# At least so many tiles where there are bytes enough: some 30 for each of the 132 processors of a big GPU. More would
# only cost the host time (1 GiB in tiles of 64 KiB: as much as the copy).
MANY_TILES = 4096
SMALLEST_TILE_BYTES, LARGEST_TILE_BYTES = 4 << 10, 256 << 10


def tiles_of(destination: Int64s, source: Int64s, nbytes: Int64s) -> Int64s:
    """Rows [T, 3] of destination, source and size, none larger than a tile; their order is the runs'."""
    total = int(nbytes.sum())
    size = min(max(total // MANY_TILES, SMALLEST_TILE_BYTES), LARGEST_TILE_BYTES) // SMALLEST_TILE_BYTES
    size *= SMALLEST_TILE_BYTES
    counts = -(-nbytes // size)
    if int(counts.max(initial=0)) <= 1:
        return np.stack([destination, source, nbytes], axis=1)
    first_tile = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(first_tile)) - first_tile) * size
    rows = np.empty((len(offsets), 3), np.int64)
    rows[:, 0] = np.repeat(destination, counts) + offsets
    rows[:, 1] = np.repeat(source, counts) + offsets
    rows[:, 2] = np.minimum(np.repeat(nbytes, counts) - offsets, size)
    return rows


class CudaCopier(Copier):
    """One stream of one GPU. `DriverUnavailable` without cuda-bindings, an NVIDIA driver or that GPU."""

    def __init__(self, index: int = 0) -> None:
        self._kernel = CudaKernel(index, "copy_kernel.ptx", "kvx_copy")
        self._driver = self._kernel.driver

    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        rows = tiles_of(destination, source, nbytes)
        if not len(rows):
            return DONE
        table = self._kernel.take_table(rows.nbytes)
        table.words[: rows.size] = rows.reshape(-1)
        arguments = ((table.address,), (ctypes.c_void_p,))
        self._kernel.launch(table, len(rows), THREADS, arguments, after_stream=after)
        return _Launched(self._kernel, table)

    def register_host(self, address: int, nbytes: int) -> None:
        with self._driver.in_context():
            self._driver.call("cuMemHostRegister", address, nbytes, 1 | 2)  # PORTABLE, DEVICEMAP

    def unregister_host(self, address: int) -> None:
        with self._driver.in_context():
            self._driver.call("cuMemHostUnregister", address)

    def close(self) -> None:
        self._kernel.close()


class _Launched:
    def __init__(self, kernel: CudaKernel, table: Table) -> None:
        self._kernel = kernel
        self._table: Table | None = table

    def is_done(self) -> bool:
        if self._table is not None and self._kernel.has_ended(self._table):
            self._end()
        return self._table is None

    def wait(self) -> None:
        if self._table is not None:
            self._kernel.wait(self._table)
            self._end()

    def _end(self) -> None:
        """Once, whoever sees the end first: the table is then another launch's."""
        table, self._table = self._table, None
        if table is not None:
            self._kernel.give_back(table)
