"""Copies on an NVIDIA GPU: one launch of kvx's own kernel for all runs of a call (copy_kernel.cu).

The runs are cut into tiles, one for each block of threads, and the kernel reads the table of tiles from pinned host
memory, so that a call queues one launch and nothing else. cuMemcpy would take a call for each run, and its batch call
reaches half of the bus at 32 KiB (seen).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from importlib import resources
from typing import Any

import numpy as np

from kvx.drivers.copier import DONE, Copier, Copying, Int64s
from kvx.drivers.cuda import CudaDriver
from kvx.errors import DriverError

THREADS = 512
# At least so many tiles where there are bytes enough: some 30 for each of the 132 processors of a big GPU. More would
# only cost the host time (1 GiB in tiles of 64 KiB: as much as the copy).
MANY_TILES = 4096
SMALLEST_TILE_BYTES, LARGEST_TILE_BYTES = 4 << 10, 256 << 10
SMALLEST_TABLE_TILES = 1 << 10
_ROW_BYTES = 24
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


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
        self._driver = CudaDriver(index)
        self._lock = threading.RLock()
        self._free_tables: list[_Table] = []
        self._undo, self._is_closed = contextlib.ExitStack(), False
        call, kernel = self._driver.call, resources.files("kvx.drivers").joinpath("copy_kernel.ptx").read_bytes()
        with self._driver.in_context(), contextlib.ExitStack() as undo:
            module = call("cuModuleLoadData", kernel + b"\0")
            undo.callback(call, "cuModuleUnload", module)
            self._kernel = call("cuModuleGetFunction", module, b"kvx_copy")
            self._stream = call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING: it does not wait for stream 0
            undo.callback(call, "cuStreamDestroy", self._stream)
            self._undo = undo.pop_all()

    def start(self, destination: Int64s, source: Int64s, nbytes: Int64s, *, after: int | None = None) -> Copying:
        rows = tiles_of(destination, source, nbytes)
        if not len(rows):
            return DONE
        with self._lock, self._driver.in_context():
            table = self._take_table(len(rows))
            try:
                table.rows[: len(rows)] = rows
                self._queue(table, len(rows), after)
            except BaseException:
                self._driver.call("cuStreamSynchronize", self._stream)
                self._free_tables.append(table)
                raise
        return _Launched(self, table)

    def register_host(self, address: int, nbytes: int) -> None:
        with self._driver.in_context():
            self._driver.call("cuMemHostRegister", address, nbytes, 1 | 2)  # PORTABLE, DEVICEMAP

    def unregister_host(self, address: int) -> None:
        with self._driver.in_context():
            self._driver.call("cuMemHostUnregister", address)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._free_tables.clear()
            with self._driver.in_context(), self._undo:  # given back also when the device has failed
                self._driver.call("cuStreamSynchronize", self._stream)

    def _queue(self, table: _Table, num_tiles: int, after: int | None) -> None:
        call = self._driver.call
        if after is not None:
            call("cuEventRecord", table.event, after)
            call("cuStreamWaitEvent", self._stream, table.event, 0)
        arguments = ((table.address,), (ctypes.c_void_p,))
        call("cuLaunchKernel", self._kernel, num_tiles, 1, 1, THREADS, 1, 1, 0, self._stream, arguments, 0)
        call("cuEventRecord", table.event, self._stream)

    def _take_table(self, num_tiles: int) -> _Table:
        for index, table in enumerate(self._free_tables):
            if len(table.rows) >= num_tiles:
                return self._free_tables.pop(index)
        call, capacity = self._driver.call, max(SMALLEST_TABLE_TILES, 1 << (num_tiles - 1).bit_length())
        with contextlib.ExitStack() as undo:
            address = int(call("cuMemHostAlloc", capacity * _ROW_BYTES, 1 | 2))  # PORTABLE, DEVICEMAP
            undo.callback(call, "cuMemFreeHost", address)
            event = call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING
            undo.callback(call, "cuEventDestroy", event)
            self._undo.push(undo.pop_all())
        return _Table(address, capacity, event)

    def _ended(self, table: _Table, *, wait: bool) -> bool:
        """Whether a launch is over; its table is then free for another one."""
        with self._lock, self._driver.in_context():
            if wait:
                self._driver.call("cuEventSynchronize", table.event)
            else:
                try:
                    self._driver.call("cuEventQuery", table.event)
                except DriverError as error:
                    if error.code == _NOT_READY:
                        return False
                    raise
            self._free_tables.append(table)
            return True


class _Table:
    """Pinned memory for `capacity` tiles, which the kernel reads where it is; and the event of its launch."""

    def __init__(self, address: int, capacity: int, event: Any) -> None:
        self.address, self.event = address, event
        self.rows = np.ctypeslib.as_array((ctypes.c_int64 * (capacity * 3)).from_address(address)).reshape(-1, 3)


class _Launched:
    def __init__(self, copier: CudaCopier, table: _Table) -> None:
        self._copier = copier
        self._table: _Table | None = table

    def is_done(self) -> bool:
        if self._table is not None and self._copier._ended(self._table, wait=False):
            self._table = None
        return self._table is None

    def wait(self) -> None:
        if self._table is not None:
            self._copier._ended(self._table, wait=True)
            self._table = None
