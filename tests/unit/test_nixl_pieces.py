"""Pieces of a READ: the same bytes in the same order, each piece what an owner's UCX sends as one message, or small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvx_connectors.nixl_pieces import FEW, MESSAGE_BYTES, PIECE_BYTES, SMALL_BYTES, TOGETHER_BYTES, pieces_of

from kvx.connector import Copies

SIZES = st.one_of(
    st.integers(1, 2 * SMALL_BYTES),
    st.integers(1, 4 * PIECE_BYTES),
    st.sampled_from([SMALL_BYTES - 1, SMALL_BYTES, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]),
)


def copies_of(lengths: list[int], starts: list[int]) -> Copies:
    remote, length = np.array(starts, np.int64), np.array(lengths, np.int64)
    return Copies(local=remote + (1 << 50), remote=remote, length=length)


@given(st.lists(SIZES, min_size=1, max_size=2 * FEW), st.randoms(use_true_random=False))
def test_pieces_are_the_copies(lengths: list[int], random: object) -> None:
    starts = (np.cumsum(lengths) - lengths + np.arange(len(lengths))).tolist()  # with gaps between them
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    copies = copies_of([lengths[index] for index in order], [starts[index] for index in order])
    pieces = pieces_of(copies)
    found = []
    for piece in pieces:
        assert (piece.local - piece.remote == 1 << 50).all()
        if len(piece.length) > 1:
            assert piece.length.max() < SMALL_BYTES
            assert piece.length.sum() < TOGETHER_BYTES + SMALL_BYTES
        assert piece.length.max() <= PIECE_BYTES < MESSAGE_BYTES
        for start, length in zip(piece.remote.tolist(), piece.length.tolist(), strict=True):
            if found and sum(found[-1]) == start:
                found[-1] = found[-1][0], found[-1][1] + length
            else:
                found.append((start, length))
    assert found == list(zip(copies.remote.tolist(), copies.length.tolist(), strict=True))


def test_small_copies_share_the_way_to_the_owner() -> None:
    starts = [8192 * index for index in range(32768)]
    pieces = pieces_of(copies_of([4096] * len(starts), starts))
    assert {len(piece.length) for piece in pieces} == {TOGETHER_BYTES // 4096}


@pytest.mark.parametrize(("num_small", "is_alone"), [(FEW, True), (FEW + 1, False)])
def test_a_few_small_ones_go_alone(num_small: int, is_alone: bool) -> None:
    lengths = [PIECE_BYTES, *[4096] * num_small, SMALL_BYTES]
    pieces = pieces_of(copies_of(lengths, [2 * PIECE_BYTES * index for index in range(len(lengths))]))
    assert all(len(piece.length) == 1 for piece in pieces) is is_alone
