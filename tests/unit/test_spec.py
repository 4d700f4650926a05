"""Specs, layer groups, segments, and where a capacity puts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from geometry_cases import bytes_view, fixed_seed, geometries
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import LayoutError
from kvx.layout import KVCacheLayout
from kvx.spec import (
    AttentionKind,
    CacheGeometry,
    KVCacheSpec,
    LayerGroup,
    Segment,
    SegmentTable,
    align_capacity,
)


def attention(**changes: Any) -> KVCacheSpec:
    values = {"block_size_tokens": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
    return KVCacheSpec.full_attention(**{**values, **changes})


def test_sizes_of_each_kind() -> None:
    full = attention(page_padding_bytes=64)
    assert (full.content_size, full.content_bytes, full.dense_page_bytes, full.page_size_bytes) == (16, 32, 1024, 1088)
    latent = KVCacheSpec.mla(block_size_tokens=16, latent_size=576, dtype="bfloat16")
    assert (latent.kind, latent.num_kv_heads, latent.page_size_bytes) == (AttentionKind.MLA, 1, 16 * 576 * 2)
    window = KVCacheSpec.sliding_window(
        block_size_tokens=16, num_kv_heads=2, head_size=8, dtype="float32", sliding_window_tokens=512
    )
    assert (window.sliding_window_tokens, window.page_size_bytes) == (512, 2048)
    state = KVCacheSpec.recurrent(state_size=100, dtype="float32")
    assert (state.block_size_tokens, state.num_kv_heads, state.page_size_bytes) == (1, 1, 400)


def test_kernel_blocks() -> None:
    assert attention(kernel_block_size_tokens=4).kernel_blocks_per_block == 4
    assert attention().kernel_blocks_per_block == 1
    assert attention().kernel_block_tokens == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens is 0"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"content_size": 0}, "content_size is 0"),
        ({"dtype": "float7"}, "unknown cache dtype 'float7'"),
        ({"kernel_block_size_tokens": 5}, "does not divide the block size 16"),
        ({"kernel_block_size_tokens": 0}, "does not divide the block size 16"),
        ({"page_padding_bytes": 3}, "multiple of 2, the size of bfloat16"),
        ({"page_padding_bytes": -2}, "page_padding_bytes is -2"),
        ({"sliding_window_tokens": 8}, "sliding_window_tokens is 8 for kind full_attention"),
        ({"kind": AttentionKind.SLIDING_WINDOW}, "sliding_window_tokens is None for kind sliding_window"),
        ({"kind": AttentionKind.SLIDING_WINDOW, "sliding_window_tokens": 0}, "sliding_window_tokens is 0"),
        ({"kind": AttentionKind.MLA}, "stores one head, not 2"),
        ({"kind": AttentionKind.RECURRENT, "num_kv_heads": 1}, "one state .* a block, not 16"),
    ],
)
def test_a_bad_spec_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "kind": AttentionKind.FULL_ATTENTION,
        "block_size_tokens": 16,
        "num_kv_heads": 2,
        "content_size": 16,
        "dtype": "bfloat16",
    }
    with pytest.raises(LayoutError, match=message):
        KVCacheSpec(**{**good, **changes})


@given(st.integers(1, 500), st.lists(st.integers(1, 500), min_size=1, max_size=3), st.sampled_from([16, 48, 64]))
@fixed_seed(100)
def test_align_capacity(capacity: int, strides: list[int], granule: int) -> None:
    up = align_capacity(capacity, strides, granule, up=True)
    down = align_capacity(capacity, strides, granule, up=False)
    assert down <= capacity <= up
    aligned = [blocks for blocks in range(down, up + 1) if all(blocks * stride % granule == 0 for stride in strides)]
    assert aligned == sorted({down, up})


def test_segment_table_refuses_what_shares_a_granule() -> None:
    good = Segment(0, 32, 8)
    assert SegmentTable((good, Segment(256, 32, 8)), 8, 512, 256).block_bytes == 64
    for segments, capacity, total, message in [
        ((), 8, 512, "needs a segment"),
        ((good,), 0, 256, "needs a segment"),
        ((good, Segment(128, 32, 8)), 8, 512, "does not start and end on"),
        ((Segment(0, 24, 8),), 8, 256, "align_capacity"),
        ((good, Segment(0, 32, 8)), 8, 512, "overlaps"),
        ((Segment(0, 32, 16),), 8, 512, "capacity of 8 blocks"),
        ((Segment(0, 0, 8),), 8, 512, "capacity of 8 blocks"),
        ((good, Segment(256, 32, 8)), 8, 256, "end at byte 512 of 256"),
        ((good,), 8, 300, "multiple of the granularity"),
    ]:
        with pytest.raises(LayoutError, match=message):
            SegmentTable(segments, capacity, total, 256)


def test_committed_bytes_are_whole_granules_of_each_segment() -> None:
    table = SegmentTable((Segment(0, 96, 8), Segment(768, 96, 8)), 8, 1536, 256)
    assert [table.committed_bytes(blocks) for blocks in (0, 1, 2, 3, 8)] == [0, 512, 512, 1024, 1536]


@given(geometries())
@fixed_seed(100)
def test_layers_of_a_group_share_no_byte_and_stay_inside_their_blocks(geometry: CacheGeometry) -> None:
    for group_index, group in enumerate(geometry.groups):
        # Write each block's number through the views, then look where the numbers are.
        owner = np.zeros(geometry.total_bytes, np.uint8)
        hits = np.zeros(geometry.total_bytes, np.uint8)
        for layer_index in range(len(group.layers)):
            view = bytes_view(owner, geometry, group_index, layer_index)
            ratio = view.shape[0] // geometry.capacity_blocks
            view[...] = (np.arange(view.shape[0]) // ratio % 255 + 1)[:, None, None, None]
            bytes_view(hits, geometry, group_index, layer_index)[...] += 1
        assert hits.max() == 1
        assert hits.sum() == len(group.layers) * group.spec.dense_page_bytes * geometry.capacity_blocks
        for segment in geometry.segment_table.segments:
            blocks = owner[segment.offset_bytes : segment.end_bytes].reshape(geometry.capacity_blocks, -1)
            number = np.arange(geometry.capacity_blocks)[:, None] % 255 + 1
            assert ((blocks == 0) | (blocks == number)).all()


@given(geometries())
@fixed_seed(100)
def test_the_table_fits_the_layout(geometry: CacheGeometry) -> None:
    table = geometry.segment_table
    slots = max(len(group.layers) for group in geometry.groups)
    heads = geometry.groups[0].spec.num_kv_heads
    assert len(table.segments) == geometry.layout.segments(slots, heads)
    assert geometry.block_bytes * geometry.capacity_blocks == geometry.total_bytes == table.total_bytes
    for group in geometry.groups:
        assert geometry.block_bytes >= len(group.layers) * group.spec.page_size_bytes
        if not geometry.layout.is_block_outermost and geometry.layout.is_block_compact:
            assert table.segments[0].block_stride_bytes >= group.spec.page_size_bytes


def test_two_groups_overlay_with_the_larger_page() -> None:
    full = LayerGroup("full", ("a", "b"), attention())
    state = LayerGroup("state", ("m",), KVCacheSpec.recurrent(state_size=300, dtype="float32"))
    layered = CacheGeometry(KVCacheLayout.LBHNC, (full, state), 64, 256)
    assert [segment.block_stride_bytes for segment in layered.segment_table.segments] == [1200, 1200]
    assert layered.placement(0, 1).offset_bytes == 64 * 1200
    assert layered.placement(1, 0).offset_bytes == 0
    packed = CacheGeometry(KVCacheLayout.BLHNC, (full, state), 64, 256)
    assert packed.block_bytes == 2048  # two dense pages, and the state fits beside nothing else
    assert packed.placement(0, 1).offset_bytes == 1024


def test_geometries_that_a_layout_cannot_hold() -> None:
    one = LayerGroup("one", ("a", "b"), attention())
    other = LayerGroup("other", ("c",), attention(num_kv_heads=1))
    padded = LayerGroup("padded", ("a",), attention(page_padding_bytes=64))
    split = LayerGroup("split", ("a", "b"), attention(kernel_block_size_tokens=4))
    small = LayerGroup("small", ("c",), attention(kernel_block_size_tokens=4, head_size=4))
    for layout, groups, message in [
        ("LBHNC", (), "at least one layer group"),
        ("LBHNC", (one, LayerGroup("again", ("b",), attention())), "belongs to two layer groups"),
        ("LHBNC", (padded,), "cannot be padded"),
        ("BHLNC", (padded,), "cannot be padded"),
        ("LHBNC", (one, other), "must have the same heads and page size"),
        ("BLHNC", (split,), "cannot be split into kernel blocks"),
        ("BHLNC", (LayerGroup("single", ("a",), split.spec),), "cannot be split into kernel blocks"),
        ("BHLNC", (split,), "cannot be split into kernel blocks"),
        ("LBHNC", (one, small), "cannot be split into kernel blocks"),
    ]:
        with pytest.raises(LayoutError, match=message):
            CacheGeometry(KVCacheLayout[layout], groups, 64, 64)
    with pytest.raises(LayoutError, match="align_capacity"):
        CacheGeometry(KVCacheLayout.LBHNC, (one,), 3, 4096)
    for layers in [(), ("a", "a")]:
        with pytest.raises(LayoutError, match="needs at least one layer and no name twice"):
            LayerGroup("bad", layers, attention())


def test_a_recurrent_group_in_head_segments_is_padded_like_one_head() -> None:
    state = KVCacheSpec.recurrent(state_size=10, dtype="float32", page_padding_bytes=24)
    geometry = CacheGeometry(KVCacheLayout.LHBNC, (LayerGroup("state", ("m",), state),), 64, 64)
    assert geometry.placement(0, 0).strides_bytes[0] == 64
