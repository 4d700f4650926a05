"""Real GPUs only; on a machine without one every test here is skipped, and says why."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvx.drivers.cuda import CudaDriver

SLACK_BYTES = 64 << 20
GIVEN_BACK_S = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if torch.cuda.is_available() else pytest.mark.skip(reason="torch finds no CUDA device here")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(missing)


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    """A driver, and after the test a context that still works and a device with its memory back."""
    found = CudaDriver(torch.cuda.current_device())
    capture_once()  # the first graph of a process takes memory that stays
    torch.cuda.empty_cache()
    free_bytes = found.memory_info().free_bytes
    yield found
    assert torch.arange(1000, device="cuda").sum().item() == 499500, "the context is dead"
    lost = free_bytes - memory_given_back(found, free_bytes - SLACK_BYTES)
    assert lost < SLACK_BYTES, f"{lost} bytes were not given back"


def capture_once() -> None:
    number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        number.add_(1)
    graph.replay()
    assert number.item() == 1


def memory_given_back(driver: CudaDriver, wanted_bytes: int) -> int:
    """What is free as soon as that is what is wanted, or after a while: released memory comes back when it is clean."""
    deadline_s = time.monotonic() + GIVEN_BACK_S
    while True:
        gc.collect()
        torch.cuda.empty_cache()
        free_bytes = driver.memory_info().free_bytes
        if free_bytes >= wanted_bytes or time.monotonic() > deadline_s:
            return free_bytes
        time.sleep(0.05)
