"""Geometries for property tests, and views of them that name memory without having any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from kvx.errors import LayoutError
from kvx.layout import KVCacheLayout
from kvx.spec import AttentionKind, CacheGeometry, KVCacheSpec, LayerGroup, align_capacity, dtype_bytes

BASE = 0x7F00_0000_0000
LAYOUTS = st.sampled_from(list(KVCacheLayout))
DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "uint8"])


def fixed_seed(max_examples: int) -> settings:
    """The same examples in every run, and nothing written to disk."""
    return settings(max_examples=max_examples, derandomize=True, database=None, deadline=None)


@dataclass(frozen=True)
class FakeView:
    """Pointer, shape and strides [B, H, N, C], which is all that kvx may look at."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, as torch counts them
    itemsize: int = 1

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.itemsize


def view_of(geometry: CacheGeometry, group_index: int, layer_index: int) -> FakeView:
    place = geometry.placement(group_index, layer_index)
    size = dtype_bytes(place.dtype)
    strides = tuple(stride // size for stride in place.view_strides_bytes)
    return FakeView(BASE + place.offset_bytes, place.view_shape, strides, size)


def views_of(geometry: CacheGeometry) -> list[FakeView]:
    return [
        view_of(geometry, group_index, layer_index)
        for group_index, group in enumerate(geometry.groups)
        for layer_index in range(len(group.layers))
    ]


def bytes_view(buffer: np.ndarray, geometry: CacheGeometry, group_index: int, layer_index: int) -> np.ndarray:
    """The layer's kernel-block view [B * r, H, N / r, C in bytes] of a byte buffer, by numpy's own indexing."""
    place = geometry.placement(group_index, layer_index)
    size = dtype_bytes(place.dtype)
    *shape, content = place.view_shape
    *strides, _ = place.view_strides_bytes
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + content * size
    assert buffer.dtype == np.uint8  # as_strided itself checks nothing
    assert place.offset_bytes + last <= len(buffer)
    return np.lib.stride_tricks.as_strided(buffer[place.offset_bytes :], (*shape, content * size), (*strides, 1))


@st.composite
def specs(draw: st.DrawFn, kind: AttentionKind | None = None, dtype: str | None = None) -> KVCacheSpec:
    """Any kind, 1 to 8 KV heads where the kind has them, kernel blocks or page padding or neither."""
    kind = kind or draw(st.sampled_from(list(AttentionKind)))
    dtype = dtype or draw(DTYPES)
    content = draw(st.integers(1, 4))
    if kind is AttentionKind.RECURRENT:
        padding = draw(st.integers(0, 2)) * dtype_bytes(dtype)
        return KVCacheSpec.recurrent(state_size=content, dtype=dtype, page_padding_bytes=padding)
    kernel = draw(st.sampled_from([1, 2, 3, 4]))
    ratio = draw(st.sampled_from([1, 1, 2, 3]))
    padding = draw(st.integers(0, 2)) * dtype_bytes(dtype) if ratio == 1 else 0
    return KVCacheSpec(
        kind=kind,
        block_size_tokens=kernel * ratio,
        num_kv_heads=1 if kind is AttentionKind.MLA else draw(st.integers(1, 8)),
        content_size=content,
        dtype=dtype,
        kernel_block_size_tokens=kernel,
        sliding_window_tokens=draw(st.integers(1, 64)) if kind is AttentionKind.SLIDING_WINDOW else None,
        page_padding_bytes=padding,
    )


def geometry_of(layout: KVCacheLayout, groups: tuple[LayerGroup, ...], min_blocks: int = 8, granule: int = 16):
    """A geometry with the smallest capacity of at least `min_blocks` that granules allow."""
    # The capacity decides no stride of a block, so any aligned one tells the strides.
    probe = CacheGeometry(layout, groups, granule, granule)
    strides = {segment.block_stride_bytes for segment in probe.segment_table.segments}
    return CacheGeometry(layout, groups, align_capacity(min_blocks, strides, granule, up=True), granule)


@st.composite
def geometries(draw: st.DrawFn, max_groups: int = 3) -> CacheGeometry:
    """One to three overlaid layer groups in any layout that can hold them."""
    layout = draw(LAYOUTS)
    first = draw(specs())
    groups = [LayerGroup("g0", tuple(f"g0.{layer}" for layer in range(draw(st.integers(1, 4)))), first)]
    for index in range(1, draw(st.integers(1, max_groups))):
        layers = tuple(f"g{index}.{layer}" for layer in range(draw(st.integers(1, 4))))
        groups.append(LayerGroup(f"g{index}", layers, draw(st.one_of(st.just(first), specs()))))
    granule = draw(st.sampled_from([16, 48]))
    try:
        return geometry_of(layout, tuple(groups), draw(st.integers(1, 9)), granule)
    except LayoutError:  # this layout cannot hold these groups; what it refuses is tested by example
        return geometry_of(KVCacheLayout.LBHNC, tuple(plain(group) for group in groups), 8, granule)


def plain(group: LayerGroup) -> LayerGroup:
    """The group without kernel blocks, which any layout with L outermost can hold."""
    spec = group.spec
    values = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return LayerGroup(group.name, group.layers, KVCacheSpec(**{**values, "kernel_block_size_tokens": None}))
