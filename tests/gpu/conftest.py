"""Real GPUs only; on a machine without one every test here is skipped, and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvx.drivers.cuda import CudaDriver


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
    torch.zeros(1, device="cuda").sum().item()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes = found.memory_info().free_bytes
    yield found
    assert torch.arange(1000, device="cuda").sum().item() == 499500, "the context is dead"
    torch.cuda.empty_cache()
    lost = free_bytes - found.memory_info().free_bytes
    assert lost < 64 << 20, f"{lost} bytes were not given back"
