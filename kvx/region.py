"""Regions: the bytes that a transfer library may register, worked out from views and mappings alone.

A storage's size is the *reserved* size, most of it without memory behind it; it is never looked at. Neither is it
guessed which axis holds K and V: only pointer, shape, strides and element size count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvx.errors import LayoutError
from kvx.geometry import View, ViewLayout, read_view

__all__ = ["Mapping", "MemoryRegion", "View", "regions_of"]


@dataclass(frozen=True)
class Mapping:
    """Bytes [address, address + nbytes) backed by one allocation; `handle` is the driver's, which can export it."""

    address: int
    nbytes: int
    allocation_id: int
    device: str
    handle: object | None = field(default=None, compare=False)

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True)
class MemoryRegion:
    """Bytes to register: committed, and inside one mapping. `offset_bytes` counts from the reservation's base."""

    address: int
    nbytes: int
    offset_bytes: int
    mapping: Mapping

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def regions_of(
    views: Sequence[View],
    num_blocks: int,
    mappings: Sequence[Mapping],
    *,
    base_address: int,
    capacity_blocks: int,
) -> tuple[MemoryRegion, ...]:
    """Exactly the whole block strides of the first `num_blocks` blocks, padding included, in address order.

    One region per segment and mapping. Views of layer groups that overlay one another give their segment once.
    LayoutError when a view is malformed, or when a byte of those blocks lies in no mapping.
    """
    if not 0 <= num_blocks <= capacity_blocks:
        raise LayoutError(f"{num_blocks} blocks asked for, the capacity is {capacity_blocks}")
    if num_blocks == 0:
        return ()
    ordered = _ordered(mappings)
    starts = [mapping.address for mapping in ordered]
    regions: list[MemoryRegion] = []
    layouts = [read_view(view, capacity_blocks) for view in views]
    for address, block_stride in _segments(layouts, base_address, capacity_blocks):
        end = address + num_blocks * block_stride
        while address < end:
            index = bisect_right(starts, address) - 1
            if index < 0 or ordered[index].end <= address:
                raise LayoutError(
                    f"byte {address - base_address} of the reservation belongs to one of the first {num_blocks} blocks "
                    f"but no mapping holds it; commit {num_blocks} blocks first"
                )
            part = min(end, ordered[index].end)
            regions.append(MemoryRegion(address, part - address, address - base_address, ordered[index]))
            address = part
    return tuple(regions)


def _ordered(mappings: Sequence[Mapping]) -> list[Mapping]:
    ordered = sorted(mappings, key=lambda mapping: mapping.address)
    for left, right in pairwise(ordered):
        if left.end > right.address:
            raise LayoutError(f"mappings {left} and {right} overlap")
    return ordered


def _segments(views: Iterable[ViewLayout], base_address: int, capacity_blocks: int) -> list[tuple[int, int]]:
    """(address, block stride) of every segment that the views touch, in address order.

    Views less than one block stride apart lie in the same block: layers of a layout with B outermost.
    """
    pieces = sorted(
        {(address, view.block_stride_bytes, view.inner_bytes) for view in views for address in view.segment_addresses}
    )
    segments: list[tuple[int, int]] = []
    for address, block_stride, inner in pieces:
        if address < base_address:
            raise LayoutError(f"a cache view starts {base_address - address} bytes before the reservation")
        if not segments or address >= segments[-1][0] + segments[-1][1] * capacity_blocks:
            # Only the block at the very base can start before its first view, when that layer has none.
            start = base_address if address - base_address < block_stride else address
            segments.append((start, block_stride))
        start, stride = segments[-1]
        if stride != block_stride or address + inner > start + stride:
            raise LayoutError(
                f"cache views at bytes {start - base_address} and {address - base_address} of the reservation share a "
                f"segment but not its blocks (block strides {stride} and {block_stride}, capacity {capacity_blocks})"
            )
    return segments
