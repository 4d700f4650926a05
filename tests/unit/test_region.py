"""regions_of: exactly the whole block strides of the first blocks, from views and mappings alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from geometry_cases import BASE, FakeView, fixed_seed, geometries, geometry_of, view_of, views_of
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import LayoutError
from kvx.layout import KVCacheLayout
from kvx.region import Mapping, MemoryRegion, regions_of
from kvx.spec import AttentionKind, CacheGeometry, KVCacheSpec, LayerGroup


def committed_mappings(geometry: CacheGeometry, num_blocks: int, cuts: tuple[int, ...] = ()) -> list[Mapping]:
    """One mapping a segment, as after an extend; in tests of growth cut in two after so many granules."""
    table = geometry.segment_table
    mappings: list[Mapping] = []
    for segment in table.segments:
        end = segment.committed_bytes(num_blocks, table.granularity_bytes)
        inside = {0, end, *(cut * table.granularity_bytes for cut in cuts if cut * table.granularity_bytes < end)}
        for start, stop in pairwise(sorted(inside)):
            mappings.append(Mapping(BASE + segment.offset_bytes + start, stop - start, len(mappings), "cpu"))
    return mappings


def expected_ranges(geometry: CacheGeometry, num_blocks: int, mappings: list[Mapping]) -> list[tuple[int, int, int]]:
    """(address, end, allocation) of each segment's first blocks in each mapping, said by the segment table."""
    ranges = []
    for segment, mapping in product(geometry.segment_table.segments, mappings):
        start = max(BASE + segment.offset_bytes, mapping.address)
        end = min(BASE + segment.offset_bytes + num_blocks * segment.block_stride_bytes, mapping.end)
        if start < end:
            ranges.append((start, end, mapping.allocation_id))
    return sorted(ranges)


def as_ranges(regions: tuple[MemoryRegion, ...]) -> list[tuple[int, int, int]]:
    return [(region.address, region.end, region.mapping.allocation_id) for region in regions]


def regions(geometry: CacheGeometry, num_blocks: int, mappings: list[Mapping]) -> tuple[MemoryRegion, ...]:
    return regions_of(
        views_of(geometry), num_blocks, mappings, base_address=BASE, capacity_blocks=geometry.capacity_blocks
    )


def spec_of(kind: AttentionKind, heads: int) -> KVCacheSpec:
    if kind is AttentionKind.MLA:
        return KVCacheSpec.mla(block_size_tokens=4, latent_size=3 * heads, dtype="bfloat16")
    if kind is AttentionKind.RECURRENT:
        return KVCacheSpec.recurrent(state_size=5 * heads, dtype="float32")
    window = {"sliding_window_tokens": 9} if kind is AttentionKind.SLIDING_WINDOW else {}
    return KVCacheSpec(
        kind=kind, block_size_tokens=4, num_kv_heads=heads, content_size=6, dtype="float8_e4m3fn", **window
    )


@pytest.mark.parametrize("kind", AttentionKind)
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_exact_in_every_layout_kind_and_head_count(layout: KVCacheLayout, kind: AttentionKind) -> None:
    for heads in range(1, 9):
        geometry = geometry_of(layout, (LayerGroup("g", ("a", "b", "c"), spec_of(kind, heads)),))
        for num_blocks in (1, 3, geometry.capacity_blocks):
            mappings = committed_mappings(geometry, num_blocks)
            found = regions(geometry, num_blocks, mappings)
            assert as_ranges(found) == expected_ranges(geometry, num_blocks, mappings)
            assert len(found) == len(geometry.segment_table.segments)


@given(geometries(), st.data())
@fixed_seed(200)
def test_exact_with_groups_padding_kernel_blocks_and_cut_mappings(geometry: CacheGeometry, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(0, geometry.capacity_blocks))
    cuts = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 8)))
    mappings = committed_mappings(geometry, num_blocks, cuts)
    found = regions(geometry, num_blocks, data.draw(st.permutations(mappings)))
    assert as_ranges(found) == expected_ranges(geometry, num_blocks, mappings)
    assert sum(region.nbytes for region in found) == num_blocks * geometry.block_bytes
    assert all(region.offset_bytes == region.address - BASE for region in found)


@given(geometries(), st.data())
@fixed_seed(100)
def test_committed_blocks_never_move(geometry: CacheGeometry, data: st.DataObject) -> None:
    """More committed blocks lengthen each segment's region in place; the views themselves are not even rebuilt."""
    few, many = sorted(data.draw(st.tuples(*[st.integers(1, geometry.capacity_blocks)] * 2)))
    before = regions(geometry, few, committed_mappings(geometry, few))
    after = regions(geometry, many, committed_mappings(geometry, many))
    assert [region.address for region in before] == [region.address for region in after]
    assert all(old.nbytes * many == new.nbytes * few for old, new in zip(before, after, strict=True))


@given(geometries(), st.data())
@fixed_seed(100)
def test_every_byte_needs_a_mapping(geometry: CacheGeometry, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, geometry.capacity_blocks))
    mappings = committed_mappings(geometry, num_blocks, (2,))
    lost = data.draw(st.sampled_from(mappings))
    if not any(lost.allocation_id == found[2] for found in expected_ranges(geometry, num_blocks, mappings)):
        return  # padding to the granule, which no block uses
    mappings.remove(lost)
    with pytest.raises(LayoutError, match=f"byte {lost.address - BASE} of the reservation .* no mapping holds it"):
        regions(geometry, num_blocks, mappings)


@given(geometries(max_groups=1), st.data())
@fixed_seed(100)
def test_one_view_is_enough_where_it_touches_every_segment(geometry: CacheGeometry, data: st.DataObject) -> None:
    """With B outermost any one layer tells the whole segment, also when the first layer of the block has no view."""
    layer = data.draw(st.integers(0, len(geometry.groups[0].layers) - 1))
    num_blocks = data.draw(st.integers(1, geometry.capacity_blocks))
    mappings = committed_mappings(geometry, geometry.capacity_blocks)
    found = regions_of(
        [view_of(geometry, 0, layer)], num_blocks, mappings, base_address=BASE, capacity_blocks=geometry.capacity_blocks
    )
    expected = expected_ranges(geometry, num_blocks, mappings)
    if not geometry.layout.is_block_outermost:
        each = len(expected) // len(geometry.groups[0].layers)
        expected = expected[layer * each : (layer + 1) * each]
    assert as_ranges(found) == expected


def test_torch_views_are_read_as_they_are() -> None:
    """Two KV heads: the shape alone could not tell heads from K and V, and the storage is larger than the regions."""
    capacity, heads, tokens, content = 8, 2, 16, 4
    storage = torch.zeros(capacity * heads * tokens * content + 4096, dtype=torch.bfloat16)
    view = torch.as_strided(storage, (capacity, heads, tokens, content), (128, 64, 4, 1))
    mapping = Mapping(view.data_ptr(), storage.untyped_storage().nbytes(), 1, "cpu")
    (region,) = regions_of([view], 3, [mapping], base_address=view.data_ptr(), capacity_blocks=capacity)
    assert (region.address, region.nbytes, region.offset_bytes) == (view.data_ptr(), 3 * 256, 0)
    assert region.mapping is mapping
    kernel_view = torch.as_strided(storage, (capacity * 4, heads, 4, content), (32, 16, 4, 1))
    (region,) = regions_of([kernel_view], 3, [mapping], base_address=view.data_ptr(), capacity_blocks=capacity)
    assert region.nbytes == 3 * 256


GOOD = FakeView(BASE, (8, 2, 4, 3), (24, 12, 3, 1))
WHOLE = Mapping(BASE, 1 << 20, 1, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (8, 2, 4)}, "must be \\[B, H, N, C\\]"),
        ({"shape": (8, 0, 4, 3)}, "no empty axis"),
        ({"shape": (12, 2, 4, 3)}, "12 blocks does not divide into the capacity of 8"),
        ({"strides": (24, 12, 3, 2)}, "content axis .* must be contiguous"),
        ({"strides": (24, 0, 3, 1)}, "positive strides"),
        ({"strides": (24, 12, -3, 1)}, "positive strides"),
        ({"strides": (23, 12, 3, 1)}, "takes 24 bytes but the next one starts after 23"),
        ({"strides": (12, 60, 3, 1)}, "neither inside one block of 12 bytes nor 8 blocks apart"),
        ({"address": BASE - 1}, "starts 1 bytes before the reservation"),
    ],
)
def test_a_malformed_view_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        regions_of([replace(GOOD, **changes)], 4, [WHOLE], base_address=BASE, capacity_blocks=8)


def test_views_that_contradict_each_other_are_refused() -> None:
    for other in [FakeView(BASE, (8, 2, 2, 3), (12, 6, 3, 1)), FakeView(BASE + 12, (8, 2, 4, 3), (24, 12, 3, 1))]:
        with pytest.raises(LayoutError, match="share a segment but not its blocks"):
            regions_of([GOOD, other], 4, [WHOLE], base_address=BASE, capacity_blocks=8)


def test_counts_and_mappings_are_checked() -> None:
    for num_blocks in (-1, 9):
        with pytest.raises(LayoutError, match=f"{num_blocks} blocks asked for, the capacity is 8"):
            regions_of([GOOD], num_blocks, [WHOLE], base_address=BASE, capacity_blocks=8)
    with pytest.raises(LayoutError, match="overlap"):
        regions_of([GOOD], 1, [WHOLE, replace(WHOLE, address=BASE + 8)], base_address=BASE, capacity_blocks=8)
    assert regions_of([GOOD], 0, [], base_address=BASE, capacity_blocks=8) == ()
    assert regions_of([], 4, [WHOLE], base_address=BASE, capacity_blocks=8) == ()


def test_a_mapping_is_compared_without_its_export_handle() -> None:
    assert replace(WHOLE, handle=object()) == WHOLE
