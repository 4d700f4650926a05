"""What a hand-off leaves of a request's last blocks, where vLLM counts on zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..geometry import GroupGeometry


def clear_tail(
    views: Mapping[str, torch.Tensor], group: GroupGeometry, blocks: Sequence[int], first_token: int, end: int
) -> None:
    """Zero what is behind token `end` in the block that it falls into, before the hand-off of [first_token, end).

    Where a block may have been a state before, or have had numbers of another type, its old bytes may read as NaN, and
    attention kernels multiply what they mask by 0. vLLM zeroes new blocks then, except those that a connector fills.

    On the current stream, so before any later step; nothing that the hand-off writes is touched. But pages that are in
    another order than the views say are zeroed whole: those are on a CPU, where it is done when this returns.
    """
    size, kernel = group.block_size_tokens, group.kernel_block_size_tokens
    position, inside = divmod(end, size)
    if not inside or position >= len(blocks) or blocks[position] < 0:
        return
    ratio = size // kernel
    first, last = blocks[position] * ratio, (blocks[position] + 1) * ratio
    is_in_order = not group.transposed_bytes and group.page_format is None
    if not is_in_order and first_token > position * size:
        return  # what is there already is in pages that are not ours to take apart
    cut = first + inside // kernel
    for view in (views[layer] for layer in group.layers):
        if is_in_order:
            view[cut, :, inside % kernel :].zero_()
            view[cut + 1 : last].zero_()
        else:
            view[first:last].zero_()
