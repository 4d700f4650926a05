"""Compares what a reader got with what the owner digested: which pages to ask for, and what they prove. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvx.digest import DIGEST_BYTES, GroupDigests, first_difference
from kvx.errors import HandshakeError
from kvx.geometry import GroupGeometry, HeadRange
from kvx.handshake import DIGEST_PAGE_BYTES, Digests

# Of each layer group of a hold, at most: a bound on what verifying costs, however long the prompt.
SAMPLED_BLOCKS = 4
_ALL = 1 << 62


@dataclass(frozen=True)
class Finding:
    """`first`: (layer group, token position) of the first difference, when there is one."""

    checked: int
    mismatched: int
    first: tuple[str, int] | None


class DigestCheck:
    """One hand-off's check: of the tokens that were wanted, and the heads that both sides hold.

    `expected`: one digest for each wanted token and head that is to come, counted apart from what is compared.
    `blocks`: ours, of which digests are to be taken.
    """

    def __init__(
        self,
        remote_request_id: str,
        blocks: Sequence[Sequence[int]],
        first_token: int,
        num_tokens: int,
        ours: Sequence[GroupGeometry],
        theirs: Sequence[GroupGeometry],
        sampled_of_tokens: int | None = None,
        heads: Sequence[HeadRange | None] | None = None,
    ) -> None:
        """`sampled_of_tokens`: only the sample is checked that the owner takes of so many tokens; None: everything.

        `heads`: which of ours were to come from this owner, by layer group; None: all.
        """
        samples = [
            [(0, _ALL)] if sampled_of_tokens is None else sampled_ranges(remote_request_id, group, sampled_of_tokens)
            for group in theirs
        ]
        self.blocks = blocks
        if sampled_of_tokens is not None:
            self.blocks = [sampled_blocks(*given) for given in zip(blocks, ours, samples, strict=True)]
        self._first_token = first_token
        self._ours = ours
        self._own: list[GroupDigests] | None = None
        counts = [
            group.heads.count if heads is None else 0 if (part := heads[index]) is None else part.count
            for index, group in enumerate(ours)
        ]
        self.expected = sum(
            count * _wanted_tokens(of_group, group, first_token, num_tokens, sample)
            for count, group, of_group, sample in zip(counts, ours, blocks, samples, strict=True)
        )
        self._pages: dict[tuple[int, int], tuple[Digests, bytes]] = {}
        self._first_head = [
            max(our_group.heads.start, their_group.heads.start) - our_group.heads.start
            for our_group, their_group in zip(ours, theirs, strict=True)
        ]
        self.asks = [
            ask
            for index, (our_group, their_group) in enumerate(zip(ours, theirs, strict=True))
            for ask in _pages(
                remote_request_id,
                index,
                our_group,
                their_group,
                _within(wanted_ranges(blocks[index], our_group, first_token, num_tokens), samples[index]),
            )
        ]

    def add_own(self, own: list[GroupDigests]) -> None:
        """Our digests, of the same token range, group by group."""
        self._own = own

    def add_page(self, ask: Digests, digests: bytes) -> None:
        """The owner's answer to one of `asks`; HandshakeError when it has not the size that was asked for."""
        if len(digests) != ask.head_count * ask.num_tokens * DIGEST_BYTES:
            raise HandshakeError(
                f"a page of digests has {len(digests)} bytes, {ask.head_count} heads of {ask.num_tokens} tokens were "
                "asked for"
            )
        self._pages[ask.group, ask.first_token] = ask, digests

    @property
    def is_complete(self) -> bool:
        return self._own is not None and len(self._pages) == len(self.asks)

    def finding(self) -> Finding:
        """Of a complete check."""
        assert self._own is not None
        checked = mismatched = 0
        first: tuple[str, int] | None = None
        for (index, first_token), (ask, page) in sorted(self._pages.items()):
            start, head = first_token - self._first_token, self._first_head[index]
            own = self._own[index].values[head : head + ask.head_count, start : start + ask.num_tokens]
            checked += own.shape[0] * own.shape[1]
            difference = first_difference(own, np.frombuffer(page, dtype=np.uint8).reshape(own.shape))
            if difference is not None:
                mismatched += difference[0]
                first = first or (self._ours[index].name, first_token + difference[1])
        return Finding(checked, mismatched, first)


def sampled_ranges(request_id: str, owner: GroupGeometry, num_tokens: int) -> list[tuple[int, int]]:
    """[first, end) token ranges of a hold's sample: its last block, which every pull reads, and a few others.

    The same for whoever knows the request's id, the owner's block size, and how many tokens are held.
    """
    size, end = owner.block_size_tokens, owner.covered_tokens(num_tokens)
    count = -(-end // size)
    rng = random.Random(request_id)  # of a text: the same in every process
    positions = {count - 1, *rng.sample(range(count), min(count, SAMPLED_BLOCKS - 1))} if count else set()
    return [(position * size, min(end, (position + 1) * size)) for position in sorted(positions)]


def sampled_blocks(blocks: Sequence[int], group: GroupGeometry, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The block list with -1 where a block has no token of `ranges`."""
    size, chosen = group.block_size_tokens, [-1] * len(blocks)
    for start, end in ranges:
        sampled = slice(start // size, -(-end // size))
        chosen[sampled] = blocks[sampled]
    return chosen


def _pages(
    request_id: str,
    index: int,
    ours: GroupGeometry,
    theirs: GroupGeometry,
    ranges: Sequence[tuple[int, int]],
) -> list[Digests]:
    head = max(ours.heads.start, theirs.heads.start)
    num_heads = min(ours.heads.end, theirs.heads.end) - head
    if num_heads < 1:
        return []
    page_tokens = max(1, DIGEST_PAGE_BYTES // (num_heads * DIGEST_BYTES))
    return [
        Digests(
            sequence=0,
            request_id=request_id,
            group=index,
            first_token=start,
            num_tokens=min(page_tokens, end - start),
            head_start=head - theirs.heads.start,
            head_count=num_heads,
        )
        for first, end in ranges
        for start in range(first, end, page_tokens)
    ]


def _within(ranges: Sequence[tuple[int, int]], sample: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        (max(first, low), min(end, high)) for first, end in ranges for low, high in sample if first < high and low < end
    ]


def _wanted_tokens(
    blocks: Sequence[int],
    group: GroupGeometry,
    first_token: int,
    num_tokens: int,
    sample: Sequence[tuple[int, int]],
) -> int:
    tokens = np.arange(first_token, group.covered_tokens(first_token + num_tokens))
    ids = np.asarray(blocks, dtype=np.int64)[tokens // group.block_size_tokens]
    is_sampled = np.zeros(len(tokens), dtype=bool)
    for low, high in sample:
        is_sampled |= (tokens >= low) & (tokens < high)
    return int(((ids >= 0) & is_sampled).sum())


def wanted_ranges(
    blocks: Sequence[int], group: GroupGeometry, first_token: int, num_tokens: int
) -> list[tuple[int, int]]:
    """[first, end) token ranges whose blocks are not negative, adjacent ones joined; whole blocks of packed pages."""
    size, end = group.block_size_tokens, group.covered_tokens(first_token + num_tokens)
    wanted = np.zeros(len(blocks) + 2, np.bool_)  # with an unwanted one at either end
    first, last = first_token // size, -(-end // size)
    wanted[1 + first : 1 + last] = np.append(np.asarray(blocks, np.int64) >= 0, False)[first:last]
    edges = np.flatnonzero(wanted[1:] != wanted[:-1]).reshape(-1, 2)
    return [(max(first_token, start * size), min(end, stop * size)) for start, stop in edges.tolist()]
