"""Copies on an NVIDIA GPU: one launch of kvx's own kernel for all runs of a call (copy_kernel.cu), two for very many.

The runs are cut into tiles, one for each block of threads, and the kernel reads the table of tiles from pinned host
memory, so that a call queues a launch and nothing else. cuMemcpy would take a call for each run, and its batch call
reaches half of the bus at 32 KiB (seen).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvx.drivers.copier import DONE, Copier, Copying, Int64s
from kvx.drivers.cuda_kernel import CudaKernel, Table

THREADS = 512
# At least so many tiles where there are bytes enough: some 30 for each of the 132 processors of a big GPU. More would
# only cost the host time (1 GiB in tiles of 64 KiB: as much as the copy).
MANY_TILES = 4096
SMALLEST_TILE_BYTES, LARGEST_TILE_BYTES = 4 << 10, 256 << 10
# Of a big call of many runs so many are launched first, and copied while the others are cut.
FIRST_RUNS, MANY_RUNS, BIG_BYTES = 2048, 8192, 256 << 20


def tile_bytes(total_bytes: int) -> int:
    """How large the tiles of a call of so many bytes are, at most."""
    size = min(max(total_bytes // MANY_TILES, SMALLEST_TILE_BYTES), LARGEST_TILE_BYTES)
    return size // SMALLEST_TILE_BYTES * SMALLEST_TILE_BYTES


def tiles_of(destination: Int64s, source: Int64s, nbytes: Int64s, size: int) -> Int64s:
    """Rows [T, 3] of destination, source and size, which is `size` bytes or less; their order is the runs'."""
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
    """One stream of one GPU. `DriverUnavailable` without cuda-bindings, an NVIDIA driver or that GPU.

    `goes_first`: see `copier_for`.
    """

    only_queues = True

    def __init__(self, index: int = 0, *, goes_first: bool = False) -> None:
        self._kernel = CudaKernel(index, "copy_kernel.ptx", "kvx_copy", goes_first=goes_first)
        self._driver = self._kernel.driver

    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        total = int(nbytes.sum())
        if not total:
            return DONE
        size, tables = tile_bytes(total), list[Table]()
        is_split = total >= BIG_BYTES and len(nbytes) >= MANY_RUNS
        try:
            for part in (slice(FIRST_RUNS), slice(FIRST_RUNS, None)) if is_split else (slice(None),):
                rows = tiles_of(destination[part], source[part], nbytes[part], size)
                tables.append(self._launch(rows, None if tables else after))
        except BaseException:
            _Launched(self._kernel, tables).wait()
            raise
        return _Launched(self._kernel, tables)

    def _launch(self, rows: Int64s, after: int | None) -> Table:
        table = self._kernel.take_table(rows.nbytes)
        table.words[: rows.size] = rows.reshape(-1)
        arguments = ((table.address,), (ctypes.c_void_p,))
        self._kernel.launch(table, len(rows), THREADS, arguments, after_stream=after)
        return table

    def register_host(self, address: int, nbytes: int) -> None:
        with self._driver.in_context():
            self._driver.call("cuMemHostRegister", address, nbytes, 1 | 2)  # PORTABLE, DEVICEMAP

    def unregister_host(self, address: int) -> None:
        with self._driver.in_context():
            self._driver.call("cuMemHostUnregister", address)

    def close(self) -> None:
        self._kernel.close()


class _Launched:
    """Launches on one stream: when the last one is over, all are."""

    def __init__(self, kernel: CudaKernel, tables: Sequence[Table]) -> None:
        self._kernel = kernel
        self._tables = tables

    def is_done(self) -> bool:
        if self._tables and self._kernel.has_ended(self._tables[-1]):
            self._end()
        return not self._tables

    def wait(self) -> None:
        if self._tables:
            self._kernel.wait(self._tables[-1])
            self._end()

    def _end(self) -> None:
        """Once, whoever sees the end first: the tables are then other launches'."""
        tables, self._tables = self._tables, ()
        for table in tables:
            self._kernel.give_back(table)
