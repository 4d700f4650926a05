"""Digests of canonical KV content, so that a hand-off can be proven byte for byte.

Canonical content of a token range is [L, H, n, C]: it is the same whatever the layout, block size or kernel block
size. There is one digest for each head and token, over all layers of the group: engines that hold different heads or
start at different tokens compare what they share, and a difference has an exact position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvx.geometry import GroupGeometry

DIGEST_BYTES = 16
# Tokens whose content is gathered at once: bounds the copy to a few MiB for common models.
CHUNK_TOKENS = 256

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GroupDigests:
    """`values`: [H, n, 16] for tokens from `first_token`; `present`: [n], false where there is no block."""

    first_token: int
    values: Bytes
    present: npt.NDArray[np.bool_]


def canonical(
    views: Mapping[str, torch.Tensor], group: GroupGeometry, blocks: Sequence[int], first_token: int, num_tokens: int
) -> Bytes:
    """The content bytes [L, H, n, C] of a token range whose blocks are all present, copied to the host.

    `views` are [B, H, N, C], or in kernel blocks [B * r, H, N / r, C].
    """
    tokens = np.arange(first_token, first_token + num_tokens)
    arranged = _gather(views, group, np.asarray(blocks, dtype=np.int64), tokens)
    return np.ascontiguousarray(arranged.transpose(2, 0, 1, 3))


def digests(
    views: Mapping[str, torch.Tensor], group: GroupGeometry, blocks: Sequence[int], first_token: int, num_tokens: int
) -> GroupDigests:
    """One digest for each head and token; a token whose block is absent (negative or beyond the list) has zeros."""
    ids = np.asarray(blocks, dtype=np.int64)
    tokens = np.arange(first_token, first_token + num_tokens)
    positions = tokens // group.block_size_tokens
    present = positions < len(ids)
    present[present] = ids[positions[present]] >= 0
    values = np.zeros((group.heads.count, num_tokens, DIGEST_BYTES), dtype=np.uint8)
    wanted = np.flatnonzero(present)
    for start in range(0, len(wanted), CHUNK_TOKENS):
        chunk = wanted[start : start + CHUNK_TOKENS]
        values[:, chunk] = _digest_rows(_gather(views, group, ids, tokens[chunk]))
    return GroupDigests(first_token, values, present)


def _gather(
    views: Mapping[str, torch.Tensor], group: GroupGeometry, ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> Bytes:
    """Content bytes as [H, n, L, C], so that all layers of one head and token lie side by side."""
    kernel = group.kernel_block_size_tokens
    inside = tokens % group.block_size_tokens
    rows = ids[tokens // group.block_size_tokens] * (group.block_size_tokens // kernel) + inside // kernel
    gathered = np.empty((group.heads.count, len(tokens), len(group.layers), group.content_bytes), dtype=np.uint8)
    for index, layer in enumerate(group.layers):
        gathered[:, :, index] = _content(views[layer], rows, inside % kernel).transpose(1, 0, 2)
    return gathered


def _content(view: torch.Tensor, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> Bytes:
    """[n, H, C] content bytes at (kernel block, slot) pairs."""
    if view.device.type == "cpu":
        content: Bytes = view.view(torch.uint8).numpy()[rows, :, slots]
        return content
    picked = view[torch.from_numpy(rows).to(view.device), :, torch.from_numpy(slots).to(view.device)]
    moved: Bytes = picked.contiguous().view(torch.uint8).cpu().numpy()
    return moved


def _digest_rows(content: Bytes) -> Bytes:
    heads, tokens = content.shape[:2]
    rows = content.reshape(heads * tokens, -1)
    # SHA-256 runs at 1.3 GB/s where the CPU has instructions for it, BLAKE2 at 0.6.
    joined = b"".join(sha256(row.data, usedforsecurity=False).digest()[:DIGEST_BYTES] for row in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(heads, tokens, DIGEST_BYTES)


def first_difference(ours: Bytes, theirs: Bytes) -> tuple[int, int] | None:
    """(how many digests differ, index of the first token with one), of two [H, n, 16]; None when they agree."""
    different: npt.NDArray[Any] = (ours != theirs).any(axis=2)
    if not different.any():
        return None
    return int(different.sum()), int(different.any(axis=0).argmax())
