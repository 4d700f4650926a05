"""`FakeCuda` with streams, events and launches: queued work runs when somebody waits for it, and not before.

A kernel is a Python function of its blocks, threads and arguments. kvx's digests are taken by the kernel's own source,
which the C++ compiler of this machine makes into a library; only the sum over the lanes of a warp is done here instead.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import BAD, OK, CUresult, FakeCuda

SOURCE = Path(__file__).resolve().parents[2] / "kvx" / "drivers" / "digest_kernel.cu"
PRIORITIES = (0, -5)  # lowest, highest: as on an H200
SHIM = """
#define __device__ static
#define __global__
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)
#define __byte_perm(x, y, selector) __builtin_bswap32(x)
#define __shfl_xor_sync(mask, value, step) (value)
struct ulonglong2 { unsigned long long x, y; };
static ulonglong2 __ldcs(const ulonglong2 *address) { return *address; }
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim;
#include KERNEL

extern "C" void run(unsigned blocks, unsigned threads, const Group *groups, unsigned num_groups) {
    for (unsigned warp = 0; warp < blocks * (threads / 32); ++warp) {
        const Place place = place_of(groups, num_groups, warp);
        const Group &group = groups[place.group];
        if (place.token >= group.num_tokens) continue;
        Sums sums = {};
        for (unsigned lane = 0; lane < 32; ++lane) {
            const Sums part =
                group.is_aligned ? part_of<true>(group, place, lane) : part_of<false>(group, place, lane);
            for (int t = 0; t < TOKENS; ++t) {
                sums.straight[t] += part.straight[t];
                sums.turned[t] += part.turned[t];
            }
        }
        for (unsigned t = 0; t < TOKENS; ++t) write(group, place, t, sums.straight[t], sums.turned[t]);
    }
}
"""


def digest_kernel(folder: Path, *flags: str) -> Callable[..., None]:
    """The kernel's source as a function of this process; the test is skipped where there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(SHIM.replace("KERNEL", f'"{SOURCE}"'))
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", *flags]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    run.restype = None
    return run


def copy_kernel(blocks: int, threads: int, table: int) -> None:
    """What copy_kernel.cu does, tile by tile."""
    rows = np.ctypeslib.as_array((ctypes.c_int64 * (blocks * 3)).from_address(table)).reshape(-1, 3)
    for destination, source, nbytes in rows.tolist():
        ctypes.memmove(destination, source, nbytes)


class FakeLaunches(FakeCuda):
    """`kernels` by name. Device memory that `cuMemAlloc` gives is full of 0x5A."""

    def __init__(self, **kernels: Callable[..., None]) -> None:
        super().__init__()
        self.kernels = kernels
        self.queue: list[Callable[[], object]] = []
        self.buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.alive: list[str] = []
        self.waited_for: list[int] = []
        self.priorities: list[int] = []

    def _made(self, kind: str):
        self.alive.append(kind)
        return OK, f"{kind} {len(self.calls)}"

    def _gone(self, kind: str):
        self.alive.remove(kind)
        return (OK,)

    def cuModuleLoadData(self, image):
        return self._made("module") if image.endswith(b"}\n\n\0") else (BAD, None)

    def cuModuleUnload(self, module):
        return self._gone("module")

    def cuModuleGetFunction(self, module, name):
        return (OK, name.decode()) if name.decode() in self.kernels else (CUresult.CUDA_ERROR_UNKNOWN, None)

    def cuCtxGetStreamPriorityRange(self):
        return OK, *PRIORITIES

    def cuStreamCreateWithPriority(self, flags, priority):
        self.priorities.append(priority)
        return self._made("stream") if flags == 1 else (BAD, None)

    def cuStreamDestroy(self, stream):
        return self._gone("stream")

    def cuEventCreate(self, flags):
        return self._made("event") if flags in (2, 3) else (BAD, None)

    def cuEventDestroy(self, event):
        return self._gone("event")

    def cuMemHostAlloc(self, nbytes, flags):
        return self._buffer(nbytes) if flags == 3 else (BAD, None)

    def cuMemAlloc(self, nbytes):
        return self._buffer(nbytes)

    def _buffer(self, nbytes):
        buffer = ctypes.create_string_buffer(b"\x5a" * (nbytes + 16), nbytes + 16)
        address = -(-ctypes.addressof(buffer) // 16) * 16
        self.buffers[address] = buffer
        return OK, address

    def cuMemFreeHost(self, address):
        return self.cuMemFree(address)

    def cuMemFree(self, address):
        return (OK,) if self.buffers.pop(address, None) is not None else (BAD,)

    def cuMemcpyHtoDAsync(self, destination, source, nbytes, stream):
        self.queue.append(lambda: ctypes.memmove(destination, source, nbytes))
        return (OK,)

    def cuMemcpyDtoHAsync(self, destination, source, nbytes, stream):
        self.queue.append(lambda: ctypes.memmove(destination, source, nbytes))
        return (OK,)

    def cuLaunchKernel(self, kernel, x, y, z, threads, ty, tz, shared, stream, arguments, extra):
        values, kinds = arguments
        if (y, z, ty, tz, shared, extra) != (1, 1, 1, 1, 0, 0) or x < 1 or len(values) != len(kinds):
            return (BAD,)
        self.queue.append(lambda: self.kernels[kernel](x, threads, *values))
        return (OK,)

    def cuEventRecord(self, event, stream):
        return (OK,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.waited_for.append(event)
        return (OK,)

    def cuEventQuery(self, event):
        if self.queue:
            return (CUresult.CUDA_ERROR_NOT_READY,)
        return (OK,)

    def cuEventSynchronize(self, event):
        while self.queue:
            self.queue.pop(0)()
        return (OK,)

    def cuStreamSynchronize(self, stream):
        return self.cuEventSynchronize(None)
