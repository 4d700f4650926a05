"""Which ranks of an owner a rank of the reader reads, and what of each. Pure; both sides work out the same.

An engine of several tensor parallel ranks has each KV head on one of them or, with more ranks than heads, on several.
A head is read once, whoever has it. Every rank of the owner keeps its own hold of a request, so each of them must be
told when it may let go: also those of which nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvx.errors import LayoutError
from kvx.geometry import HeadRange

MOST_RANKS = 1024


@dataclass(frozen=True)
class Share:
    """What one rank of the reader does about one rank of the owner.

    `heads`: what it reads, by layer group; None where nothing. `claims`: of how many of the reader's ranks the owner's
    rank will be claimed: with the release of the last it may let go.
    """

    owner_rank: int
    heads: tuple[HeadRange | None, ...]
    claims: int

    @property
    def reads(self) -> bool:
        return any(part is not None for part in self.heads)


def heads_of_rank(total: int, rank: int, size: int) -> HeadRange:
    """The heads that a rank of so many holds. LayoutError: they cannot be dealt out evenly."""
    if not 0 < size <= MOST_RANKS or not 0 <= rank < size:
        raise LayoutError(f"rank {rank} of {size} is none; there are 1 to {MOST_RANKS} ranks, counted from 0")
    if total < 1 or (total % size and size % total):
        raise LayoutError(f"{total} KV heads cannot be dealt out to {size} ranks; one must divide the other")
    count = max(1, total // size)
    return HeadRange(rank * total // size // count * count, count, total)


def shares(totals: Sequence[int], reader_rank: int, reader_size: int, owner_size: int) -> list[Share]:
    """By owner rank. `totals`: the model's KV heads, by layer group. LayoutError: as `heads_of_rank`."""
    read = [_read_by(totals, rank, reader_size, owner_size) for rank in range(reader_size)]
    nothing = (None,) * len(totals)
    found = []
    for rank in range(owner_size):
        claiming = [reader for reader, parts in enumerate(read) if rank in parts] or [rank % reader_size]
        if reader_rank in claiming:
            found.append(Share(rank, read[reader_rank].get(rank, nothing), len(claiming)))
    return found


def _read_by(
    totals: Sequence[int], reader_rank: int, reader_size: int, owner_size: int
) -> dict[int, tuple[HeadRange | None, ...]]:
    """By owner rank, what a rank of the reader reads there."""
    parts: dict[int, list[HeadRange | None]] = {}
    for group, total in enumerate(totals):
        ours = heads_of_rank(total, reader_rank, reader_size)
        copies = max(1, owner_size // total)  # ranks of the owner that hold the same
        at = ours.start
        while at < ours.end:
            # Ranks of ours that hold the same read from different ones of theirs.
            rank = at * owner_size // total if copies == 1 else at * copies + reader_rank % copies
            end = min(ours.end, heads_of_rank(total, rank, owner_size).end)
            parts.setdefault(rank, [None] * len(totals))[group] = HeadRange(at, end - at, total)
            at = end
    return {rank: tuple(heads) for rank, heads in parts.items()}
