"""The host's copier, and how runs become the tiles of a GPU's (the kernel itself is tested on one: tests/gpu)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.drivers.copier import copier_for
from kvx.drivers.cuda_copier import LARGEST_TILE_BYTES, SMALLEST_TILE_BYTES, tile_bytes, tiles_of
from kvx.errors import DriverUnavailable


def test_the_host_copies_every_run_and_nothing_else() -> None:
    numbers = np.random.default_rng(1)
    source, found = numbers.integers(0, 256, 1 << 16, dtype=np.uint8), np.zeros(1 << 16, np.uint8)
    expected = found.copy()
    sizes = numbers.integers(0, 200, 64)
    starts, targets = numbers.permutation(64) * 1024, numbers.permutation(64) * 1024
    for to, at, size in zip(targets, starts, sizes, strict=True):
        expected[to : to + size] = source[at : at + size]

    copying = copier_for("cpu").start(targets + found.ctypes.data, starts + source.ctypes.data, sizes)

    assert copying.is_done()
    copying.wait()
    assert (found == expected).all()


def test_a_device_without_a_copier_is_named() -> None:
    with pytest.raises(DriverUnavailable, match=r"'xpu:0'.*no copier"):
        copier_for("xpu:0")


@given(st.lists(st.integers(0, 3 << 20), max_size=20))
def test_tiles_are_the_runs_cut_into_pieces(sizes: list[int]) -> None:
    nbytes = np.array(sizes, np.int64)
    source = np.cumsum(nbytes) + 5
    tiles = tiles_of(source + (1 << 40), source, nbytes, tile_bytes(int(nbytes.sum())))

    assert (tiles[:, 0] - tiles[:, 1] == 1 << 40).all()
    assert (tiles[:, 2] <= LARGEST_TILE_BYTES).all()
    covered = [offset for at, size in tiles[:, 1:].tolist() for offset in (at, at + size) if size]
    ends = [offset for at, size in zip(source.tolist(), sizes, strict=True) for offset in (at, at + size) if size]
    assert _joined(covered) == _joined(ends)
    whole = tiles[:, 2] % SMALLEST_TILE_BYTES == 0
    assert (~whole).sum() <= len(sizes), "only a run's last tile may be ragged"


def _joined(bounds: list[int]) -> list[tuple[int, int]]:
    """Intervals [a, b) as flat pairs, in order, those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
