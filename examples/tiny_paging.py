"""What every engine with a paged cache has, here over kvx's views: attention by block table, and a block allocator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "kvx_paged"
NULL_BLOCK = 0
"""Belongs to no request. It fills block tables up to their width, so that every id in them has memory behind it."""


@dataclass(frozen=True)
class Batch:
    """One forward pass of R requests with T new tokens each: `ids` and `positions` [R, T], and `table` [R, P], the
    block of every position: tokens [p * N, (p + 1) * N) of request r are in block table[r, p]."""

    ids: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor

    def copy_(self, other: Batch) -> None:
        """Takes over the content of another one of the same shape, in place."""
        self.ids.copy_(other.ids)
        self.positions.copy_(other.positions)
        self.table.copy_(other.table)


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, *,
    scaling: float, batch: Batch, views: Sequence[torch.Tensor], sliding_window: int | None = None, **_other: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Stores the new keys and values [R, H, T, D] in this layer's view, and attends to all that is stored.

    A view is [B, H, N, C]: block, KV head, token in the block, content; C holds a key and, behind it, a value. Its
    shape is the *capacity's*, of which a part has memory, so only blocks out of the table may be indexed.
    """
    if sliding_window is not None:
        raise ValueError("this example's attention is causal and nothing else; use a model without sliding windows")
    view = views[module.layer_idx]
    num_heads, block_size = view.shape[1], view.shape[2]
    block = batch.table.gather(1, batch.positions // block_size)  # [R, T]
    view[block, :, batch.positions % block_size] = torch.cat([key, value], dim=-1).transpose(1, 2)

    # A real engine's kernel reads the pages where they are. This one gathers them into a copy, [R, H, P * N, C].
    stored = view[batch.table].transpose(1, 2).flatten(2, 3)
    keys, values = stored.chunk(2, dim=-1)
    visible = torch.arange(keys.shape[2], device=keys.device) <= batch.positions[:, :, None]  # [R, T, P * N]

    # Query heads that share a KV head become more rows of queries, so that no key has to be copied for them.
    rows, _, num_tokens, size = query.shape
    grouped = query.reshape(rows, num_heads, -1, size)  # [R, H, G * T, D]
    mask = visible[:, None].repeat(1, 1, grouped.shape[2] // num_tokens, 1)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(query.shape).transpose(1, 2), None


# This is the whole adoption of the model: `transformers` hands every layer's query, key and value to us. It keeps no
# cache of its own then, and builds no mask for an attention that it does not know.
AttentionInterface.register(ATTENTION, paged_attention)


class BlockAllocator:
    """Hands out block ids below the *final count*; the capacity is larger, and only the cache's business.

    The highest ids go first: those blocks got their memory after warm-up and graph capture, which is what this example
    is about. A real engine does not care.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [block for block in range(num_blocks) if block != NULL_BLOCK]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            # A real engine would let the request wait.
            raise RuntimeError(f"{count} blocks needed, {len(self._free)} of {self.num_blocks} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
        assert len(set(self._free)) == len(self._free) < self.num_blocks, "a block was given back twice"


@dataclass
class Request:
    """`tokens` are the prompt and the answer so far; the KV of the last one is stored by the step that reads it."""

    tokens: list[int]
    num_prompt_tokens: int
    end: int  # as many tokens at most
    blocks: list[int]

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]
