"""What the GPU side makes of the numbers around a start, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvx.vllm.device_cuda import CudaSide, _other_processes


@pytest.mark.parametrize(
    ("taken", "profiled", "free", "expected"),
    [
        (400, 1000, 850, (100, 30, 120, 150)),
        (400, 1000, 990, (100, 30, 0, 270)),  # no more than the graphs came late
        (400, 0, 850, (100, 30, 0, 270)),  # vLLM was not asked for a profile
        (120, 1000, 0, (100, 20, 0, 0)),  # never more than what was taken
    ],
)
def test_the_ledger_names_what_came_after_profiling(
    taken: int, profiled: int, free: int, expected: tuple[int, ...]
) -> None:
    worker = SimpleNamespace(vllm_config=None, model_runner=SimpleNamespace(model_memory_usage=100))
    side = CudaSide(worker)
    side._graph_bytes, side._free_after_profile_bytes = 30, profiled
    named = side._named(taken, free)
    assert tuple(named.values()) == expected
    assert sum(named.values()) == taken


class FakeNvml:
    """Two devices, in NVML's own order."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.processes = {"GPU-first": [1, 2, 3], "GPU-second": [9]}

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.processes:
            raise self.NVMLError("Not Found")
        return name

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.processes[handle]]


@pytest.mark.parametrize(("visible", "expected"), [("first", 2), ("second", 0), ("slice", 0)])
def test_other_processes_are_those_of_the_visible_device(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: int
) -> None:
    """With CUDA_VISIBLE_DEVICES=1,0 the device cuda:0 is NVML's second."""
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", cast("Any", nvml))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=visible))
    assert _other_processes(cast("Any", SimpleNamespace(device="cuda:0"))) == expected
    assert not nvml.is_open
