"""GroupGeometry from specs, from views and from the wire; what Runs offer besides their rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from geometry_cases import BASE, FakeView, fixed_seed, geometries, view_of
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import LayoutError
from kvx.geometry import GroupGeometry, HeadRange, group_geometry, group_geometry_of_views
from kvx.layout import KVCacheLayout
from kvx.plan import RUN_DTYPE, Runs, split_rows
from kvx.spec import CacheGeometry, KVCacheSpec, LayerGroup

GROUP = GroupGeometry(
    name="g",
    kind="full_attention",
    layers=("a", "b"),
    layer_offsets_bytes=(0, 4096),
    block_stride_bytes=256,
    kernel_block_stride_bytes=256,
    head_stride_bytes=128,
    token_stride_bytes=32,
    block_size_tokens=4,
    kernel_block_size_tokens=4,
    heads=HeadRange(2, 2, 8),
    content_bytes=32,
    dtype="bfloat16",
)


@given(geometries(), st.data())
@fixed_seed(100)
def test_views_and_specs_tell_the_same(geometry: CacheGeometry, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(geometry.groups) - 1))
    group = geometry.groups[index]
    heads = HeadRange(1, group.spec.num_kv_heads, group.spec.num_kv_heads + 2)
    from_spec = group_geometry(geometry, index, heads)
    from_their_views = group_geometry_of_views(
        group.name,
        group.spec.kind.value,
        {layer: view_of(geometry, index, number) for number, layer in enumerate(group.layers)},
        base_address=BASE,
        capacity_blocks=geometry.capacity_blocks,
        block_size_tokens=group.spec.block_size_tokens,
        heads=heads,
        dtype=group.spec.dtype,
        sliding_window_tokens=group.spec.sliding_window_tokens,
    )
    assert from_their_views == from_spec
    assert GroupGeometry.from_wire(msgpack.unpackb(msgpack.packb(from_spec.to_wire()))) == from_spec


def from_views(views: dict[str, FakeView], **changes: Any) -> GroupGeometry:
    values: dict[str, Any] = {
        "base_address": BASE,
        "capacity_blocks": 8,
        "block_size_tokens": 4,
        "heads": HeadRange(0, 2, 2),
        "dtype": "bfloat16",
    }
    return group_geometry_of_views("g", "full_attention", views, **{**values, **changes})


VIEW = FakeView(BASE, (8, 2, 4, 3), (24, 12, 3, 1), 2)


@pytest.mark.parametrize(
    ("views", "changes", "message"),
    [
        ({}, {}, "layer group 'g' has no layer"),
        ({"a": VIEW, "b": replace(VIEW, shape=(8, 2, 4, 2))}, {}, "layers 'a' and 'b' of group 'g' differ"),
        ({"a": VIEW}, {"block_size_tokens": 8}, r"hold .* \(2, 4, 2\), the engine says \(2, 8, 2\)"),
        ({"a": VIEW}, {"heads": HeadRange(0, 4, 4)}, r"the engine says \(4, 4, 2\)"),
        ({"a": VIEW}, {"dtype": "float32"}, r"the engine says \(2, 4, 4\)"),
        ({"a": VIEW}, {"dtype": "complex"}, "unknown cache dtype 'complex'"),
        ({"a": VIEW}, {"capacity_blocks": 3}, "does not divide into the capacity of 3"),
        ({"a": replace(VIEW, address=BASE - 64)}, {}, "layer_offsets_bytes of layer group 'g' is -64"),
    ],
)
def test_views_that_contradict_the_engine(views: dict[str, FakeView], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_views(views, **changes)


def test_kernel_blocks_are_seen_in_the_view() -> None:
    group = from_views({"a": replace(VIEW, shape=(16, 2, 2, 3), strides=(12, 6, 3, 1))})
    assert (group.block_size_tokens, group.kernel_block_size_tokens) == (4, 2)
    assert (group.block_stride_bytes, group.kernel_block_stride_bytes) == (48, 24)


def test_heads_must_fit_the_spec() -> None:
    with pytest.raises(LayoutError, match="stores 2 heads"):
        group_geometry(small_geometry(), 0, HeadRange(0, 1, 2))
    assert group_geometry(small_geometry(), 0).heads == HeadRange(0, 2, 2)
    for start, count, total in [(-1, 1, 2), (0, 0, 2), (1, 2, 2)]:
        with pytest.raises(LayoutError, match="not at least one of 2 heads"):
            HeadRange(start, count, total)


def small_geometry() -> CacheGeometry:
    spec = KVCacheSpec.full_attention(block_size_tokens=4, num_kv_heads=2, head_size=4, dtype="bfloat16")
    return CacheGeometry(KVCacheLayout.LBHNC, (LayerGroup("g", ("a",), spec),), 16, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guess"}, "kind of layer group 'g' is 'guess'"),
        ({"layers": ()}, "distinct layer names"),
        ({"layers": ("a", "a")}, "distinct layer names"),
        ({"layers": ("a",)}, "one offset for each"),
        ({"layer_offsets_bytes": (0, -1)}, "layer_offsets_bytes of layer group 'g' is -1"),
        ({"layer_offsets_bytes": (0, 2**62)}, "out of range"),
        ({"block_stride_bytes": 255}, "takes 256 bytes, but the next one starts after 255"),
        ({"token_stride_bytes": -32}, "token_stride_bytes of layer group 'g' is -32"),
        ({"block_size_tokens": 0}, "block_size_tokens of layer group 'g' is 0"),
        ({"kernel_block_size_tokens": 3}, "do not divide a block of 4"),
        ({"content_bytes": 31}, "no whole bfloat16 elements"),
        ({"dtype": "bfloat17"}, "unknown cache dtype"),
        ({"sliding_window_tokens": 0}, "sliding_window_tokens of layer group 'g' is 0"),
        ({"page_format": "halves", "token_stride_bytes": 64, "head_stride_bytes": 32}, "packed as 'halves'.*use LBHNC"),
    ],
)
def test_a_bad_geometry_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(GROUP, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "exactly the fields"),
        ({"name": b"g"}, "name from a peer must be str"),
        ({"layers": "ab"}, "layers from a peer must be a list, found str"),
        ({"layers": ["a", 2]}, "layers from a peer must be str, found 2"),
        ({"layer_offsets_bytes": [0, 4096.0]}, "must be int, found 4096.0"),
        ({"content_bytes": True}, "content_bytes from a peer must be int, found True"),
        ({"block_size_tokens": "4"}, "block_size_tokens from a peer must be int"),
        ({"head_stride_bytes": None}, "head_stride_bytes from a peer must be int"),
        ({"sliding_window_tokens": "9"}, "sliding_window_tokens from a peer must be int"),
        ({"page_format": 1}, "page_format from a peer must be str"),
        ({"heads": [2, 2, 8]}, "HeadRange from a peer must have exactly the fields"),
        ({"heads": {"start": 0, "count": 1}}, "HeadRange from a peer must have exactly the fields"),
        ({"heads": {"start": 0, "count": 1.0, "total": 1}}, "count from a peer must be int"),
        ({"heads": {"start": 0, "count": 9, "total": 8}}, "not at least one of 8 heads"),
        ({"block_stride_bytes": -1}, "out of range"),
    ],
)
def test_the_wire_is_read_strictly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        GroupGeometry.from_wire({**GROUP.to_wire(), **change})


def test_a_missing_field_and_no_dict_at_all_are_refused() -> None:
    for field in GROUP.to_wire():
        wire = GROUP.to_wire()
        del wire[field]
        with pytest.raises(LayoutError, match="exactly the fields"):
            GroupGeometry.from_wire(wire)
    for wire in (None, [], {1: 2}):
        with pytest.raises(LayoutError, match="exactly the fields"):
            GroupGeometry.from_wire(wire)
    full = replace(GROUP, sliding_window_tokens=512, page_format="halves")
    assert GroupGeometry.from_wire(full.to_wire()) == full


def runs_of(*rows: tuple[int, int, int, int, int, int]) -> Runs:
    return Runs(np.array(list(rows), RUN_DTYPE))


def test_runs_expand_concat_and_bounds() -> None:
    first = runs_of((0, 100, 8, 50, 60, 3), (8, 200, 4, 50, 60, 3))
    second = runs_of((1000, 1, 2, 0, 0, 1))
    both = Runs.concat([first, Runs.empty(), second])
    assert (len(both), both.num_descriptors, both.total_bytes) == (3, 7, 3 * 8 + 3 * 4 + 2)
    assert sorted(both.expand().tolist()) == [
        [0, 100, 8],
        [8, 200, 4],
        [50, 160, 8],
        [58, 260, 4],
        [100, 220, 8],
        [108, 320, 4],
        [1000, 1, 2],
    ]
    assert both.bounds() == ((0, 1002), (1, 324))
    assert first.bounds() == ((0, 112), (100, 324))
    for nothing in (Runs.empty(), Runs.concat([])):
        assert nothing.bounds() == ((0, 0), (0, 0))
        assert nothing.expand().shape == (0, 3)
        assert nothing.total_bytes == nothing.num_descriptors == 0


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40)), max_size=6),
    st.lists(st.integers(0, 100), max_size=5),
    st.lists(st.integers(0, 100), max_size=5),
)
@fixed_seed(200)
def test_split_rows_cuts_at_every_cut_and_nowhere_else(
    rows: list[tuple[int, int, int]], source_cuts: list[int], destination_cuts: list[int]
) -> None:
    split = split_rows(np.array(rows, np.int64).reshape(-1, 3), source_cuts, destination_cuts)
    expected = []
    for source, destination, length in rows:
        inside = {cut - source for cut in source_cuts} | {cut - destination for cut in destination_cuts}
        edges = sorted({0, length, *(edge for edge in inside if 0 < edge < length)})
        expected += [[source + start, destination + start, stop - start] for start, stop in pairwise(edges)]
    assert sorted(split.tolist()) == sorted(expected)
