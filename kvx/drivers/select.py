"""From a device's name to its driver."""

from __future__ import annotations

import torch

from kvx.drivers.base import Driver
from kvx.drivers.cuda import CudaDriver
from kvx.drivers.hip import HipDriver
from kvx.drivers.host import HostDriver
from kvx.drivers.shared_host import SharedHostDriver
from kvx.errors import DriverUnavailable


def driver_for(device: str, *, shareable: bool = False) -> Driver:
    """The driver of a device as torch names it: "cpu", "cuda" or "cuda:1" (AMD GPUs too, in torch for ROCm).

    `shareable`: other processes shall map its memory. That changes the host's driver; a GPU's memory always can be.
    """
    kind, _, index = device.partition(":")
    if device == "cpu":
        return SharedHostDriver() if shareable else HostDriver()
    if kind != "cuda" or not (index or "0").isdecimal():
        raise DriverUnavailable(
            f"device {device!r}", "kvx knows no memory driver for it", "name cpu, or cuda:0, cuda:1 ..."
        )
    return HipDriver(int(index or 0)) if torch.version.hip else CudaDriver(int(index or 0))
