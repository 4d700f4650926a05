"""What one of kvx's own CUDA kernels needs: its code, a stream to run on, and pinned tables that it reads and writes.

The PTX lies beside its source, so that nothing is compiled where kvx runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx.drivers.cuda import CudaDriver
from kvx.errors import DriverError

SMALLEST_TABLE_BYTES = 32 << 10
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class Table:
    """Pinned memory, which the kernel reaches where it is; and the event after the launch that uses it.

    `mirror`: as much memory of the device, where the kernel asked for it.
    """

    def __init__(self, address: int, nbytes: int, event: Any, mirror: int) -> None:
        self.address, self.nbytes, self.event, self.mirror = address, nbytes, event, mirror
        self.words: npt.NDArray[np.int64] = np.ctypeslib.as_array(
            (ctypes.c_int64 * (nbytes // 8)).from_address(address)
        )


class CudaKernel:
    """One stream of one GPU, and the kernel that is launched on it. Any thread may call.

    `mirrors`: tables get memory of the device too, for what every thread reads again and again. `waits_asleep`: whoever
    waits leaves its core to others, and wakes some tens of microseconds later. `goes_first`: before work of the device
    that is queued elsewhere and has not begun.
    """

    def __init__(
        self, index: int, file: str, function: str, *, mirrors: bool = False, waits_asleep: bool = False,
        goes_first: bool = False,
    ) -> None:  # fmt: skip
        self.driver = CudaDriver(index)
        self._lock = threading.RLock()
        self._free: list[Table] = []
        self._mirrors, self._event_flags = mirrors, 2 | int(waits_asleep)  # CU_EVENT_DISABLE_TIMING, BLOCKING_SYNC
        self._undo, self._is_closed = contextlib.ExitStack(), False
        call, code = self.driver.call, resources.files("kvx.drivers").joinpath(file).read_bytes()
        with self.driver.in_context(), contextlib.ExitStack() as undo:
            module = call("cuModuleLoadData", code + b"\0")
            undo.callback(call, "cuModuleUnload", module)
            self._kernel = call("cuModuleGetFunction", module, function.encode())
            lowest, highest = call("cuCtxGetStreamPriorityRange")
            # CU_STREAM_NON_BLOCKING: it does not wait for stream 0
            self._stream = call("cuStreamCreateWithPriority", 1, highest if goes_first else lowest)
            undo.callback(call, "cuStreamDestroy", self._stream)
            self._undo = undo.pop_all()

    def take_table(self, nbytes: int) -> Table:
        """One of at least that size; `give_back` it when nothing queued uses it any more."""
        with self._lock:
            for index, table in enumerate(self._free):
                if table.nbytes >= nbytes:
                    return self._free.pop(index)
            with self.driver.in_context():
                return self._new_table(max(SMALLEST_TABLE_BYTES, 1 << (nbytes - 1).bit_length()))

    def give_back(self, table: Table) -> None:
        with self._lock:
            self._free.append(table)

    def upload(self, array: npt.NDArray[Any]) -> int:
        """A copy of it on the device, which stays until the end; what is launched from now on finds it there."""
        call = self.driver.call
        with self._lock, self.driver.in_context(), contextlib.ExitStack() as undo:
            address = int(call("cuMemAlloc", array.nbytes))
            undo.callback(call, "cuMemFree", address)
            call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream)
            call("cuStreamSynchronize", self._stream)
            self._undo.push(undo.pop_all())
        return address

    def launch(
        self, table: Table, blocks: int, threads: int, arguments: tuple[tuple[Any, ...], tuple[Any, ...]], *,
        after_stream: int | None = None, after_event: int | None = None, mirrored_bytes: int = 0,
        returned_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Queue one launch, when what a stream has queued now, or what came before an event, has run.

        `mirrored_bytes`: the beginning of the table that is copied to its mirror first. `returned_bytes`: what follows,
        which is copied back from the mirror afterwards. A launch that fails is waited for, and gives its table back.
        """
        call = self.driver.call
        with self._lock, self.driver.in_context():
            try:
                if after_stream is not None:
                    call("cuEventRecord", table.event, after_stream)
                    after_event = table.event
                if after_event is not None:
                    call("cuStreamWaitEvent", self._stream, after_event, 0)
                if mirrored_bytes:
                    call("cuMemcpyHtoDAsync", table.mirror, table.address, mirrored_bytes, self._stream)
                call("cuLaunchKernel", self._kernel, blocks, 1, 1, threads, 1, 1, 0, self._stream, arguments, 0)
                if returned_bytes:
                    found, at = table.address + mirrored_bytes, table.mirror + mirrored_bytes
                    call("cuMemcpyDtoHAsync", found, at, returned_bytes, self._stream)
                call("cuEventRecord", table.event, self._stream)
            except BaseException:
                call("cuStreamSynchronize", self._stream)
                self._free.append(table)
                raise

    def has_ended(self, table: Table) -> bool:
        """Whether the launch with this table is over; never waits. `DriverError` when the device has failed."""
        with self.driver.in_context():
            try:
                self.driver.call("cuEventQuery", table.event)
            except DriverError as error:
                if error.code == _NOT_READY:
                    return False
                raise
        return True

    def wait(self, table: Table) -> None:
        """Return when it is over. Nobody else is kept waiting. `DriverError` when the device has failed."""
        with self.driver.in_context():
            self.driver.call("cuEventSynchronize", table.event)

    def close(self) -> None:
        """Wait for what was launched and give everything back. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._free.clear()
            with self.driver.in_context(), self._undo:  # given back also when the device has failed
                self.driver.call("cuStreamSynchronize", self._stream)

    def _new_table(self, nbytes: int) -> Table:
        call, mirror = self.driver.call, 0
        with contextlib.ExitStack() as undo:
            address = int(call("cuMemHostAlloc", nbytes, 1 | 2))  # PORTABLE, DEVICEMAP
            undo.callback(call, "cuMemFreeHost", address)
            event = call("cuEventCreate", self._event_flags)
            undo.callback(call, "cuEventDestroy", event)
            if self._mirrors:
                mirror = int(call("cuMemAlloc", nbytes))
                undo.callback(call, "cuMemFree", mirror)
            self._undo.push(undo.pop_all())
        return Table(address, nbytes, event, mirror)
