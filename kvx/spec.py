"""What one layer stores for a block, which layers share a block table, and where a capacity of blocks puts all that.

Shapes are [B, H, N, C] for one layer (blocks, heads, tokens, content elements). Strides come from the capacity, never
from the committed count, so that a block's address stays the same while the cache grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import gcd, lcm
from typing import Final

from kvx.errors import LayoutError
from kvx.layout import KVCacheLayout

DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` (a name without "torch."); LayoutError lists the known names."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise LayoutError(f"unknown cache dtype {dtype!r}; use one of {', '.join(DTYPE_BYTES)}") from None


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def align_capacity(
    capacity_blocks: int, block_strides_bytes: Iterable[int], granularity_bytes: int, *, up: bool
) -> int:
    """The nearest capacity, upwards or downwards, for which every segment is a whole number of granules."""
    step = lcm(*(granularity_bytes // gcd(stride, granularity_bytes) for stride in block_strides_bytes))
    return round_up(capacity_blocks, step) if up else capacity_blocks // step * step


class AttentionKind(StrEnum):
    """What a layer keeps; it decides which blocks of a request a peer wants, not how they are copied."""

    FULL_ATTENTION = "full_attention"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """One layer's page: [H, N, C] elements of `dtype`, then `page_padding_bytes` that nobody reads.

    `content_size` (C) counts the elements that one head stores for one token, K and V together.
    """

    kind: AttentionKind
    block_size_tokens: int
    num_kv_heads: int
    content_size: int
    dtype: str
    kernel_block_size_tokens: int | None = None
    sliding_window_tokens: int | None = None
    page_padding_bytes: int = 0

    def __post_init__(self) -> None:
        for field in ("block_size_tokens", "num_kv_heads", "content_size"):
            if getattr(self, field) < 1:
                raise LayoutError(f"{field} is {getattr(self, field)}; it must be at least 1")
        kernel = self.kernel_block_size_tokens
        if kernel is not None and (kernel < 1 or self.block_size_tokens % kernel):
            raise LayoutError(
                f"kernel_block_size_tokens {kernel} does not divide the block size {self.block_size_tokens}"
            )
        if self.page_padding_bytes < 0 or self.page_padding_bytes % self.dtype_bytes:
            raise LayoutError(
                f"page_padding_bytes is {self.page_padding_bytes}; "
                f"it must be a multiple of {self.dtype_bytes}, the size of {self.dtype}"
            )
        self._check_kind()

    def _check_kind(self) -> None:
        window = self.sliding_window_tokens
        if (self.kind is AttentionKind.SLIDING_WINDOW) != (window is not None) or (window is not None and window < 1):
            raise LayoutError(
                f"sliding_window_tokens is {window} for kind {self.kind}; "
                f"a sliding window needs at least 1 token, every other kind None"
            )
        if self.kind in (AttentionKind.MLA, AttentionKind.RECURRENT) and self.num_kv_heads != 1:
            raise LayoutError(f"kind {self.kind} stores one head, not {self.num_kv_heads}")
        if self.kind is AttentionKind.RECURRENT and self.block_size_tokens != 1:
            raise LayoutError(f"kind {self.kind} stores one state (one token) a block, not {self.block_size_tokens}")

    @classmethod
    def full_attention(
        cls,
        *,
        block_size_tokens: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
        kernel_block_size_tokens: int | None = None,
        page_padding_bytes: int = 0,
    ) -> KVCacheSpec:
        """Grouped-query attention: C is K and V of one head."""
        return cls(
            kind=AttentionKind.FULL_ATTENTION,
            block_size_tokens=block_size_tokens,
            num_kv_heads=num_kv_heads,
            content_size=2 * head_size,
            dtype=dtype,
            kernel_block_size_tokens=kernel_block_size_tokens,
            page_padding_bytes=page_padding_bytes,
        )

    @classmethod
    def sliding_window(
        cls,
        *,
        block_size_tokens: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
        sliding_window_tokens: int,
        kernel_block_size_tokens: int | None = None,
        page_padding_bytes: int = 0,
    ) -> KVCacheSpec:
        """Like full attention, but only the last `sliding_window_tokens` are kept."""
        return cls(
            kind=AttentionKind.SLIDING_WINDOW,
            block_size_tokens=block_size_tokens,
            num_kv_heads=num_kv_heads,
            content_size=2 * head_size,
            dtype=dtype,
            kernel_block_size_tokens=kernel_block_size_tokens,
            sliding_window_tokens=sliding_window_tokens,
            page_padding_bytes=page_padding_bytes,
        )

    @classmethod
    def mla(
        cls,
        *,
        block_size_tokens: int,
        latent_size: int,
        dtype: str,
        kernel_block_size_tokens: int | None = None,
        page_padding_bytes: int = 0,
    ) -> KVCacheSpec:
        """Multi-head latent attention: one head, C is the latent vector."""
        return cls(
            kind=AttentionKind.MLA,
            block_size_tokens=block_size_tokens,
            num_kv_heads=1,
            content_size=latent_size,
            dtype=dtype,
            kernel_block_size_tokens=kernel_block_size_tokens,
            page_padding_bytes=page_padding_bytes,
        )

    @classmethod
    def recurrent(cls, *, state_size: int, dtype: str, page_padding_bytes: int = 0) -> KVCacheSpec:
        """A state-space layer: one head, one token a block, C is the whole state."""
        return cls(
            kind=AttentionKind.RECURRENT,
            block_size_tokens=1,
            num_kv_heads=1,
            content_size=state_size,
            dtype=dtype,
            page_padding_bytes=page_padding_bytes,
        )

    @property
    def dtype_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def content_bytes(self) -> int:
        return self.content_size * self.dtype_bytes

    @property
    def dense_page_bytes(self) -> int:
        """H * N * C in bytes, without padding."""
        return self.num_kv_heads * self.block_size_tokens * self.content_bytes

    @property
    def page_size_bytes(self) -> int:
        return self.dense_page_bytes + self.page_padding_bytes

    @property
    def kernel_block_tokens(self) -> int:
        """Tokens of one kernel block; the whole block where nothing splits it."""
        return self.kernel_block_size_tokens or self.block_size_tokens

    @property
    def kernel_blocks_per_block(self) -> int:
        return self.block_size_tokens // self.kernel_block_tokens


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one block table and one spec."""

    name: str
    layers: tuple[str, ...]
    spec: KVCacheSpec

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise LayoutError(f"layer group {self.name!r} needs at least one layer and no name twice: {self.layers}")


@dataclass(frozen=True)
class LayerPlacement:
    """Where one layer sits: byte address of (b, h, n) from the reservation's base is
    offset + b * strides[0] + (n // kernel) * kernel_stride + h * strides[1] + (n % kernel) * strides[2]."""

    offset_bytes: int
    shape: tuple[int, int, int, int]  # [B, H, N, C], C in elements
    strides_bytes: tuple[int, int, int, int]
    kernel_block_stride_bytes: int
    kernel_block_size_tokens: int
    dtype: str

    @property
    def view_shape(self) -> tuple[int, int, int, int]:
        """[B * r, H, N / r, C], r kernel blocks a block: what an attention kernel sees."""
        blocks, heads, tokens, content = self.shape
        ratio = tokens // self.kernel_block_size_tokens
        return blocks * ratio, heads, self.kernel_block_size_tokens, content

    @property
    def view_strides_bytes(self) -> tuple[int, int, int, int]:
        """Strides of `view_shape`."""
        return self.kernel_block_stride_bytes, *self.strides_bytes[1:]


@dataclass(frozen=True)
class Segment:
    """A run of the address range in which block b starts at offset + b * block_stride."""

    offset_bytes: int
    block_stride_bytes: int
    capacity_blocks: int

    @property
    def nbytes(self) -> int:
        return self.block_stride_bytes * self.capacity_blocks

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.nbytes

    def committed_bytes(self, num_blocks: int, granularity_bytes: int) -> int:
        """Bytes of the whole granules that hold the first `num_blocks` blocks."""
        return round_up(num_blocks * self.block_stride_bytes, granularity_bytes)


@dataclass(frozen=True)
class SegmentTable:
    """Every segment of one reservation. Each starts and ends on a granule, so that no two share one."""

    segments: tuple[Segment, ...]
    capacity_blocks: int
    total_bytes: int
    granularity_bytes: int

    def __post_init__(self) -> None:
        if not self.segments or self.capacity_blocks < 1 or self.granularity_bytes < 1:
            raise LayoutError("a segment table needs a segment, a capacity of at least 1 block and a granularity")
        end = 0
        for segment in sorted(self.segments, key=lambda segment: segment.offset_bytes):
            self._check_segment(segment)
            if segment.offset_bytes < end:
                raise LayoutError(f"the segment at byte {segment.offset_bytes} overlaps the one that ends at {end}")
            end = segment.end_bytes
        if end > self.total_bytes or self.total_bytes % self.granularity_bytes:
            raise LayoutError(
                f"segments end at byte {end} of {self.total_bytes}; the total must hold them all "
                f"and be a multiple of the granularity {self.granularity_bytes}"
            )

    def _check_segment(self, segment: Segment) -> None:
        if segment.capacity_blocks != self.capacity_blocks or segment.block_stride_bytes < 1:
            raise LayoutError(f"{segment} must hold the table's capacity of {self.capacity_blocks} blocks")
        if segment.offset_bytes % self.granularity_bytes or segment.nbytes % self.granularity_bytes:
            raise LayoutError(
                f"the segment at byte {segment.offset_bytes}, {segment.nbytes} bytes long, does not start and end on "
                f"a granule of {self.granularity_bytes} bytes; choose the capacity with align_capacity()"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all segments."""
        return sum(segment.block_stride_bytes for segment in self.segments)

    def committed_bytes(self, num_blocks: int) -> int:
        """Bytes of all granules that hold the first `num_blocks` blocks."""
        return sum(segment.committed_bytes(num_blocks, self.granularity_bytes) for segment in self.segments)


@dataclass(frozen=True)
class CacheGeometry:
    """Layer groups that overlay one allocation: a block id belongs to one group at a time.

    With L outermost every group uses the same layer slots and the same (largest) page, smaller pages padded; with B
    outermost each group packs its own pages into the same block, as large as the largest group needs.
    """

    layout: KVCacheLayout
    groups: tuple[LayerGroup, ...]
    capacity_blocks: int
    granularity_bytes: int

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a cache needs at least one layer group")
        names = [layer for group in self.groups for layer in group.layers]
        if len(set(names)) != len(names):
            raise LayoutError("a layer belongs to two layer groups")
        for group in self.groups:
            self._check_group(group)
        assert self.segment_table.total_bytes >= self.block_bytes  # building the table checks capacity and granules

    def _check_group(self, group: LayerGroup) -> None:
        spec, first = group.spec, self.groups[0].spec
        if not self.layout.is_block_compact and spec.num_kv_heads > 1 and spec.page_padding_bytes:
            raise LayoutError(f"{self.layout.name} scatters the page of group {group.name!r}, so it cannot be padded")
        if self._segment_heads > 1 and (spec.num_kv_heads, spec.dense_page_bytes) != (
            first.num_kv_heads,
            first.dense_page_bytes,
        ):
            raise LayoutError(
                f"{self.layout.name} gives each head a segment, so groups {self.groups[0].name!r} and "
                f"{group.name!r} must have the same heads and page size; use LBHNC"
            )
        dense = not self.layout.is_block_outermost and self._piece_bytes * self._segment_heads == spec.dense_page_bytes
        if spec.kernel_blocks_per_block > 1 and not dense:
            raise LayoutError(
                f"{self.layout.name} does not store the blocks of group {group.name!r} as dense pages, so they cannot "
                f"be split into kernel blocks; make the block {spec.kernel_block_tokens} tokens, or use LBHNC"
            )

    @cached_property
    def _segment_heads(self) -> int:
        """Segments that one layer slot takes."""
        heads = max(group.spec.num_kv_heads for group in self.groups)
        return 1 if self.layout.is_block_compact or self.layout.is_block_outermost else heads

    @cached_property
    def _piece_bytes(self) -> int:
        """The block stride of every segment; whole elements of every dtype in it."""
        if self.layout.is_block_outermost:
            needed = max(len(group.layers) * group.spec.page_size_bytes for group in self.groups)
        else:
            needed = max(group.spec.page_size_bytes for group in self.groups) // self._segment_heads
        return round_up(needed, max(group.spec.dtype_bytes for group in self.groups))

    @cached_property
    def segment_table(self) -> SegmentTable:
        slots = 1 if self.layout.is_block_outermost else max(len(group.layers) for group in self.groups)
        stride, nbytes = self._piece_bytes, self._piece_bytes * self.capacity_blocks
        count = slots * self._segment_heads
        segments = tuple(Segment(index * nbytes, stride, self.capacity_blocks) for index in range(count))
        return SegmentTable(segments, self.capacity_blocks, count * nbytes, self.granularity_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all segments."""
        return self.segment_table.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.segment_table.total_bytes

    def placement(self, group_index: int, layer_index: int) -> LayerPlacement:
        """Where layer `layer_index` of a group sits; offsets count from the reservation's base."""
        group = self.groups[group_index]
        spec = group.spec
        content, kernel = spec.content_bytes, spec.kernel_block_tokens
        segment_bytes = self._piece_bytes * self.capacity_blocks
        layer_stride, head, token = segment_bytes * self._segment_heads, kernel * content, content
        if self.layout.is_block_outermost:
            layer_stride = spec.page_size_bytes
        if self.layout.is_token_major:
            head, token = content, spec.num_kv_heads * content
        elif not self.layout.is_block_compact and spec.num_kv_heads > 1:
            head = segment_bytes
            if self.layout.is_block_outermost:  # BHLNC
                layer_stride = spec.block_size_tokens * content
                head = len(group.layers) * layer_stride
        return LayerPlacement(
            offset_bytes=layer_index * layer_stride,
            shape=(self.capacity_blocks, spec.num_kv_heads, spec.block_size_tokens, spec.content_size),
            strides_bytes=(self._piece_bytes, head, token, spec.dtype_bytes),
            kernel_block_stride_bytes=self._piece_bytes // spec.kernel_blocks_per_block,
            kernel_block_size_tokens=kernel,
            dtype=spec.dtype,
        )
