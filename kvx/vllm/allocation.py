"""vLLM's plan of its KV cache (`KVCacheTensor`s) as kvx geometry: segments, views and layer groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import LayoutError
from ..plan import GroupGeometry, HeadRange, group_geometry_of_views
from ..spec import AttentionKind, Segment, SegmentTable, align_capacity

#: The kernels of vLLM's CPU attention that keep keys transposed, [C, N], and values token after token behind them.
_KEYS_TRANSPOSED = ("vec", "vec16")
#: vLLM's views of states, which are of several types, are of the whole allocation's.
_STATE_VIEW = torch.int8


@dataclass(frozen=True)
class PageOrder:
    """How a layer's kernels order a head's part of a page: as `GroupGeometry` has it.

    `has_transposed_keys`: the first half of a token's content. `packed_as`: a name for an order that kvx does not know.
    """

    has_transposed_keys: bool = False
    packed_as: str | None = None


def aligned_capacity(kv_cache_config: Any, granularity_bytes: int) -> int:
    """The smallest capacity not under the planned one at which every segment starts on a granule."""
    strides = {tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors}
    return align_capacity(kv_cache_config.num_blocks, strides, granularity_bytes, up=True)


def segment_table(kv_cache_config: Any, is_block_outermost: bool, granularity_bytes: int) -> SegmentTable:
    """Segments of vLLM's plan: one per layer where layers are outermost, one in all where blocks are.

    Groups overlay each other, so a segment that several groups name is one segment.

    Raises:
        LayoutError: groups that overlay each other with different block strides.
    """
    found: dict[int, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        layers = 1 if is_block_outermost else len(tensor.layers)
        for index in range(layers):
            offset = 0 if is_block_outermost else tensor.offset + index * tensor.layer_stride
            if found.setdefault(offset, tensor.block_stride) != tensor.block_stride:
                raise LayoutError(
                    f"two layer groups overlay byte {offset} with block strides {found[offset]} and "
                    f"{tensor.block_stride}; kvx needs one stride for both"
                )
    capacity = kv_cache_config.num_blocks
    return SegmentTable(
        segments=tuple(Segment(offset, stride, capacity) for offset, stride in sorted(found.items())),
        capacity_blocks=capacity,
        total_bytes=kv_cache_config.kv_cache_tensors[0].size,
        granularity_bytes=granularity_bytes,
    )


def create_views(
    buffer: torch.Tensor, kv_cache_config: Any, layout: Any, kernel_block_sizes: list[int] | None
) -> dict[str, torch.Tensor]:
    """Layer name -> `[B, H, N, C]` view over `buffer` (int8, flat), made by vLLM's own view code.

    Raises:
        LayoutError: a layer whose cache has no per-layer views, which kvx cannot describe to a peer.
    """
    from vllm.v1.kv_cache_interface import create_kv_cache_views

    views: dict[str, torch.Tensor] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        group_index, spec = _group_and_spec(kv_cache_config, tensor.layers[0])
        if not spec.has_layer_views or tensor.host_resident:
            raise LayoutError(f"layer {tensor.layers[0]} keeps its cache outside per-layer views; kvx cannot hold it")
        kernel_block_size = None
        if kernel_block_sizes is not None and group_index < len(kernel_block_sizes):
            kernel_block_size = kernel_block_sizes[group_index]
        made = create_kv_cache_views(
            buffer, spec, kv_cache_config.num_blocks, layout, tensor, kernel_block_size=kernel_block_size
        )
        views.update(zip(tensor.layers, made, strict=True))
    return views


def group_geometries(
    kv_cache_config: Any,
    views: Mapping[str, torch.Tensor],
    *,
    base_address: int,
    capacity_blocks: int,
    tp_rank: int,
    tp_size: int,
    total_kv_heads: int,
    page_orders: Mapping[str, PageOrder],
) -> tuple[GroupGeometry, ...]:
    """What a peer must know of each transferable layer group. `page_orders`: see the function of that name."""
    geometries = []
    for index, group in enumerate(kv_cache_config.transfer_groups):
        first = group.layer_names[0]
        _, spec = _group_and_spec(kv_cache_config, first)
        kind, order = _kind(spec), page_orders.get(first, PageOrder())
        content_bytes = views[first].shape[-1] * views[first].element_size()
        geometries.append(
            group_geometry_of_views(
                f"group{index}",
                kind.value,
                {name: views[name] for name in group.layer_names},
                base_address=base_address,
                capacity_blocks=capacity_blocks,
                block_size_tokens=1 if kind is AttentionKind.RECURRENT else spec.block_size,
                heads=_heads(kind, spec, tp_rank, tp_size, total_kv_heads),
                dtype=str(getattr(spec, "dtype", _STATE_VIEW)).removeprefix("torch."),
                sliding_window_tokens=getattr(spec, "sliding_window", None),
                page_format=_state_formats(group.kv_cache_spec) if kind is AttentionKind.RECURRENT else order.packed_as,
                transposed_bytes=content_bytes // 2 if order.has_transposed_keys else 0,
            )
        )
    return tuple(geometries)


def page_orders(vllm_config: Any) -> dict[str, PageOrder]:
    """Layer name -> order, for layers whose kernels do not store a page token after token.

    vLLM's CPU attention keeps all keys of a head's page before its values, in an order made for the instruction set
    that it runs on (vllm/v1/attention/backends/cpu_attn.py), although the view says [B, H, N, C]. The order of some is
    known from what they write (tests/vllm/test_page_order.py).
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(vllm_config, Attention)
    return {
        name: _cpu_order(layer.isa)
        for name, layer in layers.items()
        if layer.get_attn_backend().get_name() == "CPU_ATTN"
    }


def scratch_blocks(kv_cache_config: Any) -> tuple[int | None, ...]:
    """By transferable layer group, how many blocks for drafts vLLM keeps behind a request's state.

    None for a group that keeps an entry for each token instead of a state: its spec has no such number.
    """
    return tuple(
        getattr(next(iter(layer_specs(group.kv_cache_spec))), "num_speculative_blocks", None)
        for group in kv_cache_config.transfer_groups
    )


def left_tokens(kv_cache_config: Any) -> int:
    """Of a prompt's last tokens, how many decode computes itself.

    One where a group keeps a state: the first new token is computed from the prompt's last, which a state must not
    take in twice. Without states that token is computed again over what was handed off of it, which changes nothing.
    """
    return int(any(scratch is not None for scratch in scratch_blocks(kv_cache_config)))


def layer_specs(spec: Any) -> Collection[Any]:
    """Of each layer of a group where they have their own, else the one of all."""
    return getattr(spec, "kv_cache_specs", {"": spec}).values()


def _state_formats(spec: Any) -> str:
    """What the pages of a group hold, which their size does not say: `mamba2: float32[3, 160], float32[4, 32, 16]`."""
    found = (
        f"{one.mamba_type.name.lower()}: "
        + ", ".join(
            f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for shape, dtype in zip(one.shapes, one.dtypes, strict=True)
        )
        for one in layer_specs(spec)
    )
    return "; ".join(dict.fromkeys(found))


def _cpu_order(isa: str) -> PageOrder:
    return PageOrder(True) if isa in _KEYS_TRANSPOSED else PageOrder(packed_as=f"CPU_ATTN/{isa}")


def _heads(kind: AttentionKind, spec: Any, tp_rank: int, tp_size: int, total_kv_heads: int) -> HeadRange:
    """KV heads that this rank holds. With more ranks than heads, neighbouring ranks hold the same head.

    A state counts as one head, of which every rank has a part of its own unless all have the same one.
    """
    if kind is AttentionKind.RECURRENT and not spec.tp_replicated:
        return HeadRange(start=tp_rank, count=1, total=tp_size)
    if kind in (AttentionKind.MLA, AttentionKind.RECURRENT):
        return HeadRange(start=0, count=1, total=1)
    count = int(spec.num_kv_heads)
    total = max(total_kv_heads, count)
    start = tp_rank * count if total >= tp_size else tp_rank * total // tp_size
    return HeadRange(start=start, count=count, total=total)


def _kind(spec: Any) -> AttentionKind:
    """What a spec holds, for the ones that kvx can hand off.

    Raises:
        LayoutError: any other.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    kinds = {
        FullAttentionSpec: AttentionKind.FULL_ATTENTION,
        MLAAttentionSpec: AttentionKind.MLA,
        SlidingWindowSpec: AttentionKind.SLIDING_WINDOW,
        MambaSpec: AttentionKind.RECURRENT,
    }
    found = kinds.get(type(spec))
    if found is None:
        raise LayoutError(
            f"the bridge cannot hand off a layer of {type(spec).__name__}; it knows "
            f"{', '.join(kind.__name__ for kind in kinds)}: run this model without it"
        )
    return found


def _group_and_spec(kv_cache_config: Any, layer_name: str) -> tuple[int, Any]:
    """The group that a layer belongs to, and the layer's own spec."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            return index, spec.kv_cache_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    raise LayoutError(f"vLLM planned memory for layer {layer_name}, which is in no KV cache group")
