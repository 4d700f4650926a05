"""Cells of registered regions stand for exactly the copies that they were made from; NIXL itself takes no part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvx_connectors.nixl_cells import CellList, cell_list, most_common

from kvx.peer import RegionTable

BASE = 1 << 33
CELL = 24


def copies_of(found: CellList) -> list[tuple[int, int, int]]:
    """(address, length, device) of each number, as NIXL expands strided rows."""
    cells = [
        (address + index * stride, length, device)
        for address, length, device, stride, count in found.rows.tolist()
        for index in range(count)
    ]
    return [cells[number] for number in found.numbers.tolist()]


@st.composite
def tables(draw: st.DrawFn) -> RegionTable:
    """Regions that start on cells, with gaps, and that end anywhere; one may be smaller than a cell."""
    ranges, start = [], 0
    for _ in range(draw(st.integers(1, 5))):
        start += CELL * draw(st.integers(0, 3))
        nbytes = draw(st.integers(1, CELL * 8))
        ranges.append((start, nbytes))
        start += -(-nbytes // CELL) * CELL
    return RegionTable.of(BASE, ranges)


@given(tables(), st.data())
def test_numbers_of_cells_are_the_copies(table: RegionTable, data: st.DataObject) -> None:
    inside = [
        (start + index * CELL, CELL)
        for start, end in zip(table.starts.tolist(), table.ends.tolist(), strict=True)
        for index in range((end - start) // CELL)
    ]
    if not inside:
        return
    copies = data.draw(st.lists(st.sampled_from(inside), min_size=1, max_size=40))
    starts, ends = table.starts.tolist(), table.ends.tolist()
    for _ in range(data.draw(st.integers(0, len(copies) // 8))):  # some that are no cell
        region = data.draw(st.integers(0, len(starts) - 1))
        first = data.draw(st.integers(starts[region], ends[region] - 1))
        length = data.draw(st.integers(1, ends[region] - first))
        copies[data.draw(st.integers(0, len(copies) - 1))] = (first, length)
    offsets, lengths = np.array(copies, np.int64).T
    found = cell_list(table, offsets + BASE, lengths, CELL, 3)
    assert found is not None
    assert copies_of(found) == [(offset + BASE, length, 3) for offset, length in copies]
    for address, length, _, stride, count in found.rows.tolist():  # NIXL refuses a row beyond a registration
        assert table.holds(np.array([address - BASE]), np.array([stride * (count - 1) + length]))


@pytest.mark.parametrize(
    ("ranges", "offsets", "length"),
    [
        ([(0, 240), (250, 240)], [0, 24], 24),  # the second region starts beside the grid
        ([(0, 240)], [0, 12], 24),  # one of two is too many beside it
        ([(0, 1 << 40)], [0, 24], 24),  # too many cells to count in 32 bits
    ],
)
def test_what_is_no_grid_is_left_to_descriptors(ranges: list[tuple[int, int]], offsets: list[int], length: int) -> None:
    table = RegionTable.of(BASE, ranges)
    lengths = np.full(len(offsets), length)
    assert cell_list(table, np.array(offsets) + BASE, lengths, CELL, 0) is None


def test_the_cell_is_the_most_common_length() -> None:
    assert most_common(np.array([8, 8, 8])) == 8
    assert most_common(np.array([16, 8, 4, 8])) == 8
