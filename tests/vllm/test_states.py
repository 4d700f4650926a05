"""What a peer is told of layers that keep a state: from vLLM's own specs and views, without an engine."""

from __future__ import annotations

import pytest
import torch

from kvx.compare import group_differences
from kvx.geometry import GroupGeometry, HeadRange
from kvx.vllm import allocation

pytestmark = [pytest.mark.vllm]

BLOCKS = 4


def told(*states: torch.dtype, tp_rank: int = 0, tp_size: int = 1, tp_replicated: bool = False) -> GroupGeometry:
    """Of a group whose layers have these types of states, with pages of one size."""
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        UniformTypeKVCacheSpecs,
    )

    specs = {
        f"layer{number}": MambaSpec(
            block_size=1024, shapes=((3, 160), (4, 32, 16)), dtypes=(torch.float32, dtype), page_size_padded=16384,
            tp_replicated=tp_replicated,
        )
        for number, dtype in enumerate(states)
    }  # fmt: skip
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=1024, kv_cache_specs=specs))
    size = len(specs) * BLOCKS * 16384
    tensors = [
        KVCacheTensor(size=size, layers=[name], layer_stride=BLOCKS * 16384, block_stride=16384, offset=offset)
        for name, offset in zip(specs, range(0, size, BLOCKS * 16384), strict=True)
    ]
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])
    buffer = torch.zeros(size, dtype=torch.int8)
    views = allocation.create_views(buffer, config, _layout(), None)
    (geometry,) = allocation.group_geometries(
        config, views, base_address=buffer.data_ptr(), capacity_blocks=BLOCKS, tp_rank=tp_rank, tp_size=tp_size,
        total_kv_heads=2, page_orders={},
    )  # fmt: skip
    assert allocation.scratch_blocks(config) == (0,)
    return geometry


def _layout() -> object:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.LBHNC


def test_a_state_is_one_token_of_one_head_and_its_page_says_what_it_holds() -> None:
    group = told(torch.float32, torch.float32)
    assert (group.kind, group.block_size_tokens, group.heads) == ("recurrent", 1, HeadRange(0, 1, 1))
    assert (group.dtype, group.content_bytes) == ("int8", 4 * (3 * 160 + 4 * 32 * 16))
    assert group.page_format == "mamba2: float32[3, 160], float32[4, 32, 16]"


def test_each_rank_has_a_part_unless_all_have_the_same() -> None:
    assert told(torch.float32, tp_rank=1, tp_size=2).heads == HeadRange(1, 1, 2)
    assert told(torch.float32, tp_rank=1, tp_size=2, tp_replicated=True).heads == HeadRange(0, 1, 1)


def test_states_of_other_types_are_told_apart_also_where_they_are_as_large() -> None:
    ours, theirs = told(torch.float32), told(torch.int32)
    assert [item.field for item in group_differences(ours, theirs) if not item.is_bridged] == ["page_format"]
    assert group_differences(ours, told(torch.float32)) == []
    assert told(torch.float32, torch.int32).page_format == f"{ours.page_format}; {theirs.page_format}"
