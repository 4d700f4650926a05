"""Which engines keep vLLM's own cache, and the one sentence that says why."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvx.vllm.activation import Probe, reason_for_stock


def config(cache_dtype: str = "auto") -> Any:
    return SimpleNamespace(
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(enable_elastic_ep=False),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


@pytest.mark.parametrize("backends", [("CPU_ATTN",), ("CPU_MLA",), ("FLASH_ATTN", "TRITON_ATTN")])
def test_attention_that_keeps_nothing_of_the_whole_cache_may_grow(backends: tuple[str, ...]) -> None:
    assert reason_for_stock(config(), [Probe("cpu", backends)]) is None


@pytest.mark.parametrize(
    ("probe", "dtype", "said"),
    [
        (Probe("tpu", ("CPU_ATTN",)), "auto", "no memory driver for the device 'tpu'"),
        (Probe("cpu", ()), "auto", "no attention layer whose cache could grow"),
        (
            Probe("cpu", ("CPU_ATTN", "FLEX")),
            "auto",
            "the attention backend FLEX with a auto cache is not known to work",
        ),
        (Probe("cuda", ("TRITON_ATTN",)), "fp8", "the attention backend TRITON_ATTN with a fp8 cache is not known"),
        (
            Probe("cpu", ("CPU_ATTN", "GDN_ATTN")),
            "auto",
            "the attention backend GDN_ATTN with a auto cache is not known",
        ),
    ],
)
def test_any_other_keeps_vllms_own_cache(probe: Probe, dtype: str, said: str) -> None:
    reason = reason_for_stock(config(dtype), [probe])
    assert reason is not None
    assert reason.startswith("kvx keeps vLLM's own KV cache: ")
    assert reason.endswith(".")
    assert "\n" not in reason
    assert re.search(said, reason), reason
