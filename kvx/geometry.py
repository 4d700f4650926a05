"""One layer group in bytes: read from views or from a spec, and sent to the peer in the handshake.

Below both region and plan, so that what may be registered and what is copied come from one reading of the views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvx.errors import LayoutError
from kvx.spec import AttentionKind, CacheGeometry, dtype_bytes

_MAX_BYTES: Final = 2**62  # offsets are int64; this leaves room to add two of them
_KINDS: Final = frozenset(kind.value for kind in AttentionKind)


class View(Protocol):
    """One layer as [B, H, N, C], or in kernel blocks as [B * r, H, N / r, C]. torch tensors satisfy it."""

    @property
    def shape(self) -> Sequence[int]: ...

    def data_ptr(self) -> int: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...


@dataclass(frozen=True)
class ViewLayout:
    """A view in bytes, its kernel blocks joined to blocks."""

    address: int
    kernel_blocks_per_block: int
    heads: int
    kernel_block_size_tokens: int
    content_bytes: int
    element_bytes: int
    block_stride_bytes: int
    kernel_block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int

    @property
    def has_head_segments(self) -> bool:
        """Each head has a segment of its own (LHBNC)."""
        return self.heads > 1 and self.head_stride_bytes >= self.block_stride_bytes

    @property
    def inner_bytes(self) -> int:
        """From the first to the last byte that one block takes in one segment."""
        heads = 1 if self.has_head_segments else self.heads
        return (
            (self.kernel_blocks_per_block - 1) * self.kernel_block_stride_bytes
            + (heads - 1) * self.head_stride_bytes
            + (self.kernel_block_size_tokens - 1) * self.token_stride_bytes
            + self.content_bytes
        )

    @property
    def segment_addresses(self) -> list[int]:
        """Where the segments that this layer touches start, up to the layer's place in a block."""
        heads = self.heads if self.has_head_segments else 1
        return [self.address + head * self.head_stride_bytes for head in range(heads)]


def read_view(view: View, capacity_blocks: int) -> ViewLayout:
    """Pointer, shape and strides of a view; LayoutError when they are not [B, H, N, C] blocks of that capacity."""
    shape, stride, size = tuple(view.shape), tuple(view.stride()), view.element_size()
    if len(shape) != 4 or min(shape) < 1:
        raise LayoutError(f"a cache view must be [B, H, N, C] with no empty axis, found shape {list(shape)}")
    if capacity_blocks < 1 or shape[0] % capacity_blocks:
        raise LayoutError(f"a cache view of {shape[0]} blocks does not divide into the capacity of {capacity_blocks}")
    if shape[3] > 1 and stride[3] != 1:
        raise LayoutError(f"the content axis of a cache view must be contiguous, found stride {stride[3]}")
    if any(extent > 1 and step < 1 for extent, step in zip(shape, stride, strict=True)):
        raise LayoutError(f"a cache view must have positive strides, found {list(stride)}")
    ratio = shape[0] // capacity_blocks
    layout = ViewLayout(
        address=view.data_ptr(),
        kernel_blocks_per_block=ratio,
        heads=shape[1],
        kernel_block_size_tokens=shape[2],
        content_bytes=shape[3] * size,
        element_bytes=size,
        block_stride_bytes=stride[0] * size * ratio,
        kernel_block_stride_bytes=stride[0] * size,
        head_stride_bytes=stride[1] * size,
        token_stride_bytes=stride[2] * size,
    )
    if layout.inner_bytes > layout.block_stride_bytes:
        raise LayoutError(
            f"a block of a cache view takes {layout.inner_bytes} bytes but the next one starts after "
            f"{layout.block_stride_bytes}: shape {list(shape)}, strides {list(stride)}"
        )
    if layout.has_head_segments and layout.head_stride_bytes < layout.block_stride_bytes * capacity_blocks:
        raise LayoutError(
            f"the heads of a cache view are {layout.head_stride_bytes} bytes apart: neither inside one block of "
            f"{layout.block_stride_bytes} bytes nor {capacity_blocks} blocks apart"
        )
    return layout


@dataclass(frozen=True)
class HeadRange:
    """KV heads [start, start + count) of `total`: the slice that one tensor parallel rank holds."""

    start: int
    count: int
    total: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1 or self.end > self.total:
            raise LayoutError(f"heads [{self.start}, {self.end}) are not at least one of {self.total} heads")

    @property
    def end(self) -> int:
        return self.start + self.count

    def common(self, other: HeadRange) -> HeadRange | None:
        """The heads that both hold."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return HeadRange(start, end - start, self.total) if start < end and self.total == other.total else None

    def __str__(self) -> str:
        return f"heads {self.start} to {self.end - 1} of {self.total}"


@dataclass(frozen=True)
class GroupGeometry:
    """Byte offset of (layer, b, h, n) from the reservation's base, h counted from heads.start:
    layer_offset + b * block_stride + (n // kernel) * kernel_stride + h * head_stride + (n % kernel) * token_stride.

    `transposed_bytes`: so many of a token's content are kept element by element over a kernel block, [C, N] and not
    [N, C], in front of the rest of all its tokens. So element e of token n, counted in the kernel block, is at
    e * element_stride + n * element size, and the rest at N * transposed_bytes + n * (content - transposed).
    `page_format` names the order in which an engine's kernels pack a head's part of a page, where kvx does not know
    it: then only whole pages mean anything, and both sides need the same format and block size.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    layer_offsets_bytes: tuple[int, ...]
    block_stride_bytes: int
    kernel_block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    block_size_tokens: int
    kernel_block_size_tokens: int
    heads: HeadRange
    content_bytes: int
    dtype: str
    sliding_window_tokens: int | None = None
    page_format: str | None = None
    transposed_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise LayoutError(f"kind of layer group {self.name!r} is {self.kind!r}; use one of {sorted(_KINDS)}")
        distinct = set(self.layers)
        if not distinct or not len(distinct) == len(self.layers) == len(self.layer_offsets_bytes):
            raise LayoutError(f"layer group {self.name!r} needs distinct layer names and one offset for each")
        self._check_numbers()
        if self.block_size_tokens % self.kernel_block_size_tokens or self.content_bytes % dtype_bytes(self.dtype):
            raise LayoutError(
                f"layer group {self.name!r}: kernel blocks of {self.kernel_block_size_tokens} tokens do not divide a "
                f"block of {self.block_size_tokens}, or {self.content_bytes} bytes are no whole {self.dtype} elements"
            )
        self._check_order()
        if self._inner_bytes() > self.block_stride_bytes:
            raise LayoutError(
                f"a block of layer group {self.name!r} takes {self._inner_bytes()} bytes, "
                f"but the next one starts after {self.block_stride_bytes}"
            )

    def _check_order(self) -> None:
        """Of bytes inside a head's part of a page."""
        order = f"packed as {self.page_format!r}" if self.page_format is not None else "transposed"
        is_plain = self.page_format is None and self.transposed_bytes == 0
        if not is_plain and self.token_stride_bytes != self.content_bytes:
            raise LayoutError(
                f"pages of layer group {self.name!r} are {order}, which needs each head's part "
                f"of a page in one run: {self.content_bytes} bytes a token, found {self.token_stride_bytes}; use LBHNC"
            )
        if self.transposed_bytes and (
            self.page_format is not None
            or self.transposed_bytes >= self.content_bytes
            or self.transposed_bytes % dtype_bytes(self.dtype)
        ):
            raise LayoutError(
                f"{self.transposed_bytes} transposed bytes of layer group {self.name!r} are not whole {self.dtype} "
                f"elements and fewer than its {self.content_bytes} bytes a token, or its pages are packed besides"
            )

    def _check_numbers(self) -> None:
        numbers = [("layer_offsets_bytes", offset) for offset in self.layer_offsets_bytes]
        numbers += [(field.name, getattr(self, field.name)) for field in fields(self)]
        for name, value in numbers:
            smallest = 0 if "stride" in name or "offset" in name or name == "transposed_bytes" else 1
            if isinstance(value, int) and not smallest <= value < _MAX_BYTES:
                raise LayoutError(f"{name} of layer group {self.name!r} is {value}, out of range")

    def _inner_bytes(self) -> int:
        """From the first to the last byte of one block in one segment."""
        heads = self.heads.count if self.head_stride_bytes < self.block_stride_bytes else 1
        return (
            (self.block_size_tokens // self.kernel_block_size_tokens - 1) * self.kernel_block_stride_bytes
            + (heads - 1) * self.head_stride_bytes
            + (self.kernel_block_size_tokens - 1) * self.token_stride_bytes
            + self.content_bytes
        )

    def covered_tokens(self, end_tokens: int) -> int:
        """Up to where a copy or a digest of the tokens up to `end_tokens` reaches: whole blocks of packed pages."""
        if self.page_format is None:
            return end_tokens
        return -(-end_tokens // self.block_size_tokens) * self.block_size_tokens

    @property
    def element_stride_bytes(self) -> int:
        """From one transposed element of a token to its next."""
        return self.kernel_block_size_tokens * dtype_bytes(self.dtype)

    def first_elements(self) -> GroupGeometry:
        """Of transposed pages: every token's first element alone, as a group of its own."""
        size = dtype_bytes(self.dtype)
        return replace(self, token_stride_bytes=size, content_bytes=size, transposed_bytes=0)

    def untransposed(self) -> GroupGeometry:
        """Of transposed pages: what they keep token after token, as a group of its own."""
        rest, shift = self.content_bytes - self.transposed_bytes, self.kernel_block_size_tokens * self.transposed_bytes
        offsets = tuple(offset + shift for offset in self.layer_offsets_bytes)
        return replace(
            self, layer_offsets_bytes=offsets, token_stride_bytes=rest, content_bytes=rest, transposed_bytes=0
        )

    def check_extent(self, num_blocks: int) -> None:
        """LayoutError when the offsets of the first `num_blocks` blocks do not fit 64 bits."""
        heads = (self.heads.count - 1) * self.head_stride_bytes
        if max(self.layer_offsets_bytes) + heads + num_blocks * self.block_stride_bytes >= _MAX_BYTES:
            raise LayoutError(f"{num_blocks} blocks of layer group {self.name!r} do not fit a 64-bit address range")

    def token_offsets(self, ids: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset of head 0 of each token in the block of that id; `tokens` count over the request.

        The layer's own offset is not in it.
        """
        offsets = ids * self.block_stride_bytes
        token, kernel = tokens % self.block_size_tokens, self.kernel_block_size_tokens
        if kernel < self.block_size_tokens:
            offsets += token // kernel * self.kernel_block_stride_bytes
            token %= kernel
        token *= self.token_stride_bytes
        offsets += token
        return offsets

    def to_wire(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and integers, for msgpack."""
        return {**asdict(self), "layers": list(self.layers), "layer_offsets_bytes": list(self.layer_offsets_bytes)}

    @classmethod
    def from_wire(cls, wire: object) -> GroupGeometry:
        """The reverse of to_wire, strict: an unknown, missing, mistyped or negative field is a LayoutError."""
        values = _exact_fields(wire, cls)
        heads = _exact_fields(values["heads"], HeadRange)
        layers = _items("layers", values["layers"], str)
        offsets = _items("layer_offsets_bytes", values["layer_offsets_bytes"], int)
        for name in ("start", "count", "total"):
            _require(name, heads[name], int)
        for name in ("name", "kind", "dtype"):
            _require(name, values[name], str)
        for name in values:
            if name.endswith(("content_bytes", "transposed_bytes", "_stride_bytes", "_size_tokens")):
                _require(name, values[name], int)
        if values["sliding_window_tokens"] is not None:
            _require("sliding_window_tokens", values["sliding_window_tokens"], int)
        if values["page_format"] is not None:
            _require("page_format", values["page_format"], str)
        return cls(**{**values, "heads": HeadRange(**heads), "layers": layers, "layer_offsets_bytes": offsets})


def _exact_fields(wire: object, cls: type[GroupGeometry] | type[HeadRange]) -> dict[str, Any]:
    known = {field.name for field in fields(cls)}
    if not isinstance(wire, dict) or set(wire) != known:
        found = sorted(map(str, wire)) if isinstance(wire, dict) else type(wire).__name__
        raise LayoutError(f"{cls.__name__} from a peer must have exactly the fields {sorted(known)}, found {found}")
    return wire


def _items(name: str, value: object, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{name} from a peer must be a list, found {type(value).__name__}")
    for item in value:
        _require(name, item, kind)
    return tuple(value)


def _require(name: str, value: object, kind: type) -> None:
    if type(value) is not kind:  # a bool is no number here
        raise LayoutError(f"{name} from a peer must be {kind.__name__}, found {value!r}")


def group_geometry(geometry: CacheGeometry, group_index: int, heads: HeadRange | None = None) -> GroupGeometry:
    """One group of a geometry; `heads` says which of the model's heads they are (all of them by default)."""
    group = geometry.groups[group_index]
    spec = group.spec
    held = heads or HeadRange(0, spec.num_kv_heads, spec.num_kv_heads)
    if held.count != spec.num_kv_heads:
        raise LayoutError(f"group {group.name!r} stores {spec.num_kv_heads} heads, {held} was given")
    placements = [geometry.placement(group_index, index) for index in range(len(group.layers))]
    block_stride, head_stride, token_stride, _ = placements[0].strides_bytes
    return GroupGeometry(
        name=group.name,
        kind=spec.kind.value,
        layers=group.layers,
        layer_offsets_bytes=tuple(placement.offset_bytes for placement in placements),
        block_stride_bytes=block_stride,
        kernel_block_stride_bytes=placements[0].kernel_block_stride_bytes,
        head_stride_bytes=head_stride,
        token_stride_bytes=token_stride,
        block_size_tokens=spec.block_size_tokens,
        kernel_block_size_tokens=spec.kernel_block_tokens,
        heads=held,
        content_bytes=spec.content_bytes,
        dtype=spec.dtype,
        sliding_window_tokens=spec.sliding_window_tokens,
    )


def group_geometry_of_views(
    name: str,
    kind: str,
    layers: Mapping[str, View],
    *,
    base_address: int,
    capacity_blocks: int,
    block_size_tokens: int,
    heads: HeadRange,
    dtype: str,
    sliding_window_tokens: int | None = None,
    page_format: str | None = None,
    transposed_bytes: int = 0,
) -> GroupGeometry:
    """The same, read from the views of a group's layers [B, H, N, C] (or in kernel blocks); they must be alike."""
    read = {layer: read_view(view, capacity_blocks) for layer, view in layers.items()}
    if not read:
        raise LayoutError(f"layer group {name!r} has no layer")
    first_layer, first = next(iter(read.items()))
    for layer, view in read.items():
        if {**asdict(view), "address": 0} != {**asdict(first), "address": 0}:
            raise LayoutError(f"layers {first_layer!r} and {layer!r} of group {name!r} differ: {first}, {view}")
    found = (first.heads, first.kernel_blocks_per_block * first.kernel_block_size_tokens, first.element_bytes)
    needed = (heads.count, block_size_tokens, dtype_bytes(dtype))
    if found != needed:
        raise LayoutError(
            f"the views of group {name!r} hold (heads, tokens a block, bytes an element) {found}, "
            f"the engine says {needed}; a recurrent state counts as one token a block"
        )
    return GroupGeometry(
        name=name,
        kind=kind,
        layers=tuple(read),
        layer_offsets_bytes=tuple(view.address - base_address for view in read.values()),
        block_stride_bytes=first.block_stride_bytes,
        kernel_block_stride_bytes=first.kernel_block_stride_bytes,
        head_stride_bytes=first.head_stride_bytes,
        token_stride_bytes=first.token_stride_bytes,
        block_size_tokens=block_size_tokens,
        kernel_block_size_tokens=first.kernel_block_size_tokens,
        heads=heads,
        content_bytes=first.content_bytes,
        dtype=dtype,
        sliding_window_tokens=sliding_window_tokens,
        page_format=page_format,
        transposed_bytes=transposed_bytes,
    )
