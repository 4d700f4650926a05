"""Compares what a reader got with what the owner digested: which pages to ask for, and what they prove. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvx.digest import DIGEST_BYTES, GroupDigests, first_difference
from kvx.errors import HandshakeError
from kvx.geometry import GroupGeometry
from kvx.handshake import DIGEST_PAGE_BYTES, Digests


@dataclass(frozen=True)
class Finding:
    """`first`: (layer group, token position) of the first difference, when there is one."""

    checked: int
    mismatched: int
    first: tuple[str, int] | None


class DigestCheck:
    """One hand-off's check: of the tokens that were wanted, and the heads that both sides hold.

    `expected`: one digest for each wanted token and head of ours, counted apart from what is asked for and compared.
    """

    def __init__(
        self,
        remote_request_id: str,
        blocks: Sequence[Sequence[int]],
        first_token: int,
        num_tokens: int,
        ours: Sequence[GroupGeometry],
        theirs: Sequence[GroupGeometry],
    ) -> None:
        self._first_token = first_token
        self._ours = ours
        self._own: list[GroupDigests] | None = None
        self.expected = sum(
            group.heads.count * _wanted_tokens(of_group, group, first_token, num_tokens)
            for group, of_group in zip(ours, blocks, strict=True)
        )
        self._pages: dict[tuple[int, int], tuple[Digests, bytes]] = {}
        self._first_head = [
            max(our_group.heads.start, their_group.heads.start) - our_group.heads.start
            for our_group, their_group in zip(ours, theirs, strict=True)
        ]
        self.asks = [
            ask
            for index, (our_group, their_group) in enumerate(zip(ours, theirs, strict=True))
            for ask in _pages(remote_request_id, index, our_group, their_group, blocks[index], first_token, num_tokens)
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


def _pages(
    request_id: str,
    index: int,
    ours: GroupGeometry,
    theirs: GroupGeometry,
    blocks: Sequence[int],
    first_token: int,
    num_tokens: int,
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
        for first, end in wanted_ranges(blocks, ours, first_token, num_tokens)
        for start in range(first, end, page_tokens)
    ]


def _wanted_tokens(blocks: Sequence[int], group: GroupGeometry, first_token: int, num_tokens: int) -> int:
    tokens = np.arange(first_token, group.covered_tokens(first_token + num_tokens))
    ids = np.asarray(blocks, dtype=np.int64)[tokens // group.block_size_tokens]
    return int((ids >= 0).sum())


def wanted_ranges(
    blocks: Sequence[int], group: GroupGeometry, first_token: int, num_tokens: int
) -> list[tuple[int, int]]:
    """[first, end) token ranges whose blocks are not negative, adjacent ones joined; whole blocks of packed pages."""
    ranges: list[tuple[int, int]] = []
    size, end = group.block_size_tokens, group.covered_tokens(first_token + num_tokens)
    for position, block in enumerate(blocks):
        start = max(first_token, position * size)
        stop = min(end, (position + 1) * size)
        if block < 0 or start >= stop:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges
