"""Which ranks are read: every head once, from one that has it, and every rank of the owner hears of the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import LayoutError
from kvx.geometry import HeadRange
from kvx.ranks import Share, heads_of_rank, shares

SIZES = st.sampled_from([1, 2, 4, 8])


@pytest.mark.parametrize(
    ("total", "size", "starts", "count"),
    [
        (4, 1, [0], 4),
        (4, 2, [0, 2], 2),
        (6, 3, [0, 2, 4], 2),
        (2, 4, [0, 0, 1, 1], 1),
        (1, 3, [0, 0, 0], 1),
    ],
)
def test_heads_of_each_rank(total: int, size: int, starts: list[int], count: int) -> None:
    assert [heads_of_rank(total, rank, size) for rank in range(size)] == [
        HeadRange(start, count, total) for start in starts
    ]


@pytest.mark.parametrize(("total", "rank", "size"), [(3, 0, 2), (2, 0, 3), (0, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_what_cannot_be_dealt_out_is_refused(total: int, rank: int, size: int) -> None:
    with pytest.raises(LayoutError, match=r"cannot be dealt out|is none"):
        heads_of_rank(total, rank, size)


@pytest.mark.parametrize(
    ("totals", "reader_size", "owner_size", "expected"),
    [
        # TP 2 to 1: both ranks are read, half of the heads from each.
        ([4], 1, 2, [[Share(0, (HeadRange(0, 2, 4),), 1), Share(1, (HeadRange(2, 2, 4),), 1)]]),
        # TP 1 to 2: the one rank is claimed twice.
        ([4], 2, 1, [[Share(0, (HeadRange(0, 2, 4),), 2)], [Share(0, (HeadRange(2, 2, 4),), 2)]]),
        ([4], 2, 2, [[Share(0, (HeadRange(0, 2, 4),), 1)], [Share(1, (HeadRange(2, 2, 4),), 1)]]),
        # One KV head at TP 2: read once, and the other rank is told.
        ([1], 1, 2, [[Share(0, (HeadRange(0, 1, 1),), 1), Share(1, (None,), 1)]]),
        ([1], 2, 2, [[Share(0, (HeadRange(0, 1, 1),), 1)], [Share(1, (HeadRange(0, 1, 1),), 1)]]),
        # Two groups, of which one has a head alone, as MLA has.
        (
            [4, 1], 1, 2,
            [[Share(0, (HeadRange(0, 2, 4), HeadRange(0, 1, 1)), 1), Share(1, (HeadRange(2, 2, 4), None), 1)]],
        ),
    ],
)  # fmt: skip
def test_shares(totals: list[int], reader_size: int, owner_size: int, expected: list[list[Share]]) -> None:
    assert [shares(totals, rank, reader_size, owner_size) for rank in range(reader_size)] == expected


@given(st.lists(SIZES, min_size=1, max_size=3), SIZES, SIZES)
def test_every_head_is_read_once_and_every_rank_is_told(totals: list[int], readers: int, owners: int) -> None:
    found = [shares(totals, rank, readers, owners) for rank in range(readers)]
    for reader, parts in enumerate(found):
        assert [part.owner_rank for part in parts] == sorted({part.owner_rank for part in parts})
        for group, total in enumerate(totals):
            ours = heads_of_rank(total, reader, readers)
            read = []
            for part in parts:
                heads, theirs = part.heads[group], heads_of_rank(total, part.owner_rank, owners)
                if heads is not None:
                    assert theirs.start <= heads.start
                    assert heads.end <= theirs.end
                    read += range(heads.start, heads.end)
            assert sorted(read) == list(range(ours.start, ours.end)), "once each"
    for owner in range(owners):
        claims = [part for parts in found for part in parts if part.owner_rank == owner]
        assert claims, "somebody tells it"
        assert {part.claims for part in claims} == {len(claims)}


def test_ranks_that_hold_the_same_head_share_the_reading() -> None:
    read = [[part.owner_rank for part in shares([2], rank, 4, 4) if part.reads] for rank in range(4)]
    assert read == [[0], [1], [2], [3]]
