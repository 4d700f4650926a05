"""What the GPU side makes of the numbers around a start, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvx.vllm.device_cuda import CudaSide


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
