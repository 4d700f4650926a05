"""What is behind a hand-off's last token in its block is zero before the hand-off begins, and nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_digest import cache

from kvx.geometry import GroupGeometry
from kvx.layout import KVCacheLayout
from kvx.vllm.tails import clear_tail

OLD = float("nan")
BLOCKS = (5, 2, 9)


def zeroed_tokens(views: dict[str, torch.Tensor], group: GroupGeometry, block: int) -> list[set[int]]:
    """Of each layer, the tokens of a block that are all zeros; the others are all as they were."""
    size, kernel = group.block_size_tokens, group.kernel_block_size_tokens
    found = []
    for view in views.values():
        rows = {t: view[block * (size // kernel) + t // kernel, :, t % kernel] for t in range(size)}
        zeros = {t for t, row in rows.items() if not row.isnan().any() and not row.any()}
        assert all(row.isnan().all() for t, row in rows.items() if t not in zeros)
        found.append(zeros)
    return found


@pytest.mark.parametrize(("size", "kernel"), [(8, None), (8, 4), (8, 2)])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
@given(end=st.integers(0, 24), first=st.integers(0, 23), absent=st.booleans())
def test_the_tail_of_the_last_block_alone_is_zeroed(
    layout: KVCacheLayout, size: int, kernel: int | None, end: int, first: int, absent: bool
) -> None:
    views, group = cache(layout, size, kernel)
    for view in views.values():
        view.fill_(OLD)
    blocks = tuple(-1 if absent and position == end // size else block for position, block in enumerate(BLOCKS))
    clear_tail(views, group, blocks, min(first, end), end)
    for block in range(16):
        is_last = block in blocks and blocks.index(block) == end // size
        expected = set(range(end % size, size)) if is_last and end % size else set()
        assert zeroed_tokens(views, group, block) == [expected] * len(views)


@pytest.mark.parametrize("change", [{"transposed_bytes": 16}, {"page_format": "packed"}])
def test_pages_in_another_order_are_zeroed_as_a_whole_unless_something_is_there(change: dict[str, object]) -> None:
    views, plain = cache(KVCacheLayout.LBHNC, 8)
    group = dataclasses.replace(plain, **change)
    for view in views.values():
        view.fill_(OLD)
    clear_tail(views, group, BLOCKS, 10, 13)
    assert zeroed_tokens(views, plain, 2) == [set()] * len(views)
    clear_tail(views, group, BLOCKS, 8, 13)
    assert zeroed_tokens(views, plain, 2) == [set(range(8))] * len(views)
    assert zeroed_tokens(views, plain, 5) == zeroed_tokens(views, plain, 9) == [set()] * len(views)
