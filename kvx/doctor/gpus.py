"""What the GPUs' driver can do for a cache that grows and for sharing it: asked of the driver, and tried once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvx.doctor.findings import Finding, error, ok, skipped, warning
from kvx.drivers.base import Driver
from kvx.drivers.cuda import CudaDriver
from kvx.drivers.select import driver_for
from kvx.errors import DriverError, DriverUnavailable

_GROWS = "the cache cannot grow in place there, so an engine with kvx does not start"


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_gpus(device: str, count: int) -> tuple[list[Finding], bool | None]:
    """Findings for GPUs 0 to `count` - 1, and whether all export their memory as dma-buf (None: there are none)."""
    if device == "cpu":
        return [skipped("GPU", "engines compute on the CPU here")], None
    if count == 0:
        return [
            error(
                "GPU", "torch finds none", "engines are to compute on one",
                "see nvidia-smi; docker run --gpus all; a torch build for the driver's CUDA version",
            )
        ], None  # fmt: skip
    findings: list[Finding] = []
    drivers: list[CudaDriver] = []
    for index in range(count):
        found, driver = _check_gpu(index)
        findings += found
        drivers += [driver] if isinstance(driver, CudaDriver) else []
    findings += [_check_peers(drivers), _check_neighbours(count)]
    return findings, bool(drivers) and all(_offers(driver, "DMA_BUF_SUPPORTED") for driver in drivers)


def _check_gpu(index: int) -> tuple[list[Finding], Driver | None]:
    name = f"GPU {index}"
    try:
        driver = driver_for(f"cuda:{index}")
        _try_memory(driver)
    except DriverUnavailable as problem:
        return [error(name, str(problem), _GROWS, problem.hint)], None
    except DriverError as problem:
        fix = "install a current driver, and see dmesg, and what else uses this GPU"
        return [error(name, str(problem), _GROWS, fix)], None
    granule = f"granules of {driver.granularity_bytes >> 10} KiB"
    findings = [ok(name, f"its driver has virtual memory management, {granule}; a granule was committed and mapped")]
    return [*findings, _check_handles(name, driver)], driver


def _try_memory(driver: Driver) -> None:
    """Reserve, commit, map, and take all back: a granule. DriverError where a call fails."""
    size = driver.granularity_bytes
    address = driver.reserve(size)
    try:
        allocation = driver.create(size)
        try:
            driver.map(address, allocation)
            try:
                driver.synchronize()
            finally:
                driver.unmap(address, allocation)
        finally:
            driver.release(allocation)
    finally:
        driver.release_reservation(address, size)


def _check_handles(gpu: str, driver: Driver) -> Finding:
    check = f"{gpu} handle types"
    if not isinstance(driver, CudaDriver):
        return skipped(check, "not asked of this kind of GPU")
    fabric = (
        "fabric handles too" if _offers(driver, "HANDLE_TYPE_FABRIC_SUPPORTED") else "no fabric handles (not needed)"
    )
    if driver.can_export:
        rdma = "RDMA-capable" if driver.is_rdma_capable else "not RDMA-capable"
        return ok(check, f"file descriptors, {fabric}; memory is {rdma}")
    return warning(
        check, "no file descriptors", "no other process can map this GPU's memory, so the connector ipc does not work",
        "a current driver; inside a virtual machine, ask its provider; or the connector nixl",
    )  # fmt: skip


def _offers(driver: CudaDriver, attribute: str) -> bool:
    """Of an attribute that came later than kvx's oldest driver: one that does not know it does not have it."""
    try:
        return driver.has(attribute)
    except DriverError:
        return False


def _check_peers(drivers: Sequence[CudaDriver]) -> Finding:
    check = "GPU peer access"
    if len(drivers) < 2:
        return skipped(check, "fewer than two GPUs")
    without = [
        f"{one.device} to {other.device}"
        for one in drivers
        for other in drivers
        if one is not other and not one.reaches(other)
    ]
    if not without:
        return ok(check, f"each of {len(drivers)} GPUs reaches the others")
    return warning(
        check, f"none from {', '.join(without[:4])}{' ...' if len(without) > 4 else ''}",
        "between these GPUs the connector ipc does not work, and other copies go through the host",
        "nvidia-smi topo -m; PCIe access control (ACS) off; or pairs of GPUs that have it",
    )  # fmt: skip


def _check_neighbours(count: int) -> Finding:
    """Other processes on the GPUs, as far as NVML is there to ask."""
    check = "GPU neighbours"
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return warning(
            check, "nvidia-ml-py is not installed", "another process on the GPU goes unnoticed, and changes what is "
            "free while kvx measures it", "pip install nvidia-ml-py",
        )  # fmt: skip
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return warning(check, f"NVML does not start: {problem}", "the driver is not whole", "reinstall the driver")
    try:
        busy = [index for index in range(count) if _num_processes(nvml, index) > 1]
        version = nvml.nvmlSystemGetDriverVersion()
    finally:
        nvml.nvmlShutdown()
    if not busy:
        return ok(check, f"none; driver {version}")
    return warning(
        check, f"other processes on GPU {', '.join(map(str, busy))}; driver {version}",
        "kvx refuses to measure a GPU that it shares, and what they take is missing from the cache",
        "stop them, or give --gpu-memory-utilization",
    )  # fmt: skip


def _num_processes(nvml: Any, index: int) -> int:
    """This one counts: the checks before have made it one. Of a slice of a GPU (MIG), NVML does not say."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(_name_of(index))
        return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return 0


def _name_of(index: int) -> str:
    """NVML's name: it counts all devices, torch those of CUDA_VISIBLE_DEVICES."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
