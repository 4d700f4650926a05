"""The order of bytes in a page of vLLM's CPU attention, as its own kernel writes it: what `allocation` says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

HEADS, BLOCK = 2, 3


def written(isa: str, dtype: torch.dtype, kv_dtype: str, of: torch.Tensor) -> torch.Tensor:
    """[H, a head's page as numbers]: `of` [N, H, D] written to block BLOCK as keys and, negative, as values."""
    from vllm import _custom_ops as ops

    tokens, _, head_size = of.shape
    stored = dtype if kv_dtype == "auto" else torch.uint8
    cache = torch.zeros(BLOCK + 1, HEADS, 2 * tokens, head_size, dtype=stored)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(tokens) + BLOCK * tokens
    ops.cpu_attn_reshape_and_cache(of.to(dtype), -of.to(dtype), keys, values, slots, isa, kv_cache_dtype=kv_dtype)
    assert not cache[:BLOCK].any()
    page = cache[BLOCK].reshape(HEADS, -1)
    return (page if kv_dtype == "auto" else page.view(torch.float8_e4m3fn)).float()


@pytest.mark.parametrize("tokens", [32, 64, 128])
@pytest.mark.parametrize(
    ("isa", "head_size", "dtype", "kv_dtype"),
    [
        ("vec", 64, "float32", "auto"),
        ("vec", 128, "bfloat16", "auto"),
        ("vec", 64, "bfloat16", "fp8_e4m3"),
        ("vec16", 80, "float32", "auto"),
        ("vec16", 80, "bfloat16", "auto"),
    ],
)
def test_keys_are_transposed_and_values_are_not(
    isa: str, head_size: int, tokens: int, dtype: str, kv_dtype: str, model: Any
) -> None:
    from kvx.vllm.allocation import PageOrder, _cpu_order

    del model  # vLLM is installed
    assert _cpu_order(isa) == PageOrder(has_transposed_keys=True)
    random = torch.Generator().manual_seed(1)
    given = torch.randint(1, 16, (tokens, HEADS, head_size), generator=random).float()  # exact in every dtype
    page = written(isa, getattr(torch, dtype), kv_dtype, given)
    size = tokens * head_size
    for head in range(HEADS):
        assert page[head, :size].reshape(head_size, tokens).equal(given[:, head].T)
        assert page[head, size:].reshape(tokens, head_size).equal(-given[:, head])


@pytest.mark.parametrize("isa", ["amx", "neon", "vxe"])
def test_what_is_not_known_is_packed(isa: str) -> None:
    from kvx.vllm.allocation import PageOrder, _cpu_order

    assert _cpu_order(isa) == PageOrder(packed_as=f"CPU_ATTN/{isa}")
