"""Digests of canonical KV content, so that a hand-off can be proven byte for byte.

Canonical content of a token range is [L, H, n, C]: it is the same whatever the layout, block size or kernel block
size. There is one digest for each head and token, over all layers of the group in the order of their names: engines
that hold different heads or start at different tokens compare what they share, and a difference has an exact position.
The function itself, and what computes it where the cache is, are in `drivers.digester`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvx.drivers.digester import DIGEST_BYTES as DIGEST_BYTES
from kvx.drivers.digester import DIGEST_NAME as DIGEST_NAME
from kvx.drivers.digester import Bytes, Content, Digester, Transposed, digester_for
from kvx.geometry import GroupGeometry

Views = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class GroupDigests:
    """`values`: [H, n, 16] for tokens from `first_token`; `present`: [n], false where there is no block."""

    first_token: int
    values: Bytes
    present: npt.NDArray[np.bool_]


def digester_of(views: Views) -> Digester:
    """What digests these views, all of one device. `DriverUnavailable` when kvx cannot do it there."""
    device = next(iter(views.values())).device
    return digester_for(str(device))


def digests(
    views: Views, group: GroupGeometry, blocks: Sequence[int], first_token: int, num_tokens: int
) -> GroupDigests:
    """One digest for each head and token; a token whose block is absent (negative or beyond the list) has zeros.

    `views` are [B, H, N, C], or [B * r, H, N / r, C] in kernel blocks.
    """
    return request_digests(views, [group], [blocks], first_token, num_tokens)[0]


def request_digests(
    views: Views,
    groups: Sequence[GroupGeometry],
    blocks: Sequence[Sequence[int]],
    first_token: int,
    num_tokens: int,
    *,
    after: object = None,
) -> list[GroupDigests]:
    """The same of every layer group at once; whole blocks of packed pages. `after`: a mark of the views' digester."""
    contents, present = [], []
    for group, of_group in zip(groups, blocks, strict=True):
        ids = np.asarray(of_group, dtype=np.int64)
        tokens = np.arange(first_token, group.covered_tokens(first_token + num_tokens))
        positions = tokens // group.block_size_tokens
        has_block = positions < len(ids)
        has_block[has_block] = ids[positions[has_block]] >= 0
        contents.append(_content(views, group, ids[positions[has_block]], tokens[has_block]))
        present.append(has_block)
    taken = digester_of(views).take(contents, after=after)
    return [GroupDigests(first_token, _spread(*given), given[1]) for given in zip(taken, present, strict=True)]


def _spread(values: Bytes, present: npt.NDArray[np.bool_]) -> Bytes:
    """Digests of the present tokens, with zeros for the others between them."""
    if present.all():
        return values
    every = np.zeros((len(values), len(present), DIGEST_BYTES), dtype=np.uint8)
    every[:, present] = values
    return every


def _content(views: Views, group: GroupGeometry, ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Content:
    """Where the content of these tokens lies; their blocks are all present."""
    addresses = np.array([views[layer].data_ptr() for layer in sorted(group.layers)], dtype=np.int64)
    if not group.transposed_bytes:
        offsets = group.token_offsets(ids, tokens)
        return Content(addresses, offsets, group.heads.count, group.head_stride_bytes, group.content_bytes)
    first, rest = group.first_elements(), group.untransposed()
    return Content(
        addresses,
        rest.token_offsets(ids, tokens) + rest.layer_offsets_bytes[0] - group.layer_offsets_bytes[0],
        group.heads.count,
        group.head_stride_bytes,
        rest.content_bytes,
        Transposed(
            first.token_offsets(ids, tokens),
            group.transposed_bytes // first.content_bytes,
            first.content_bytes,
            group.element_stride_bytes,
        ),
    )


def first_difference(ours: Bytes, theirs: Bytes) -> tuple[int, int] | None:
    """(how many digests differ, index of the first token with one), of two [H, n, 16]; None when they agree."""
    words: npt.NDArray[np.bool_] = ours.view(np.uint64) != theirs.view(np.uint64)
    if not words.any():
        return None
    different = words.any(axis=2)
    return int(different.sum()), int(different.any(axis=0).argmax())
