"""Many equal copies for NIXL: the registered regions as rows of cells, and the copies as numbers of cells.

A strided row (address, length, device, stride, count) stands for all cells of a region at once, whatever their number,
so that NIXL looks up registrations once a region and not once a copy. Measured in docs/adr/0007-nixl.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvx.peer import Int64s, RegionTable

LEAST_COPIES = 2048
"""Below it, preparing the rows of 30 regions takes longer than naming each copy."""
_MOST_CELLS = 1 << 31  # NIXL counts them in 32 bits
_ODD_PART = 8


class CellList(NamedTuple):
    """One side of a transfer: strided rows [R, 5], and for each copy which of their cells it is."""

    rows: npt.NDArray[np.uint64]
    numbers: npt.NDArray[np.int32]


def most_common(lengths: Int64s) -> int:
    if (lengths == lengths[0]).all():
        return int(lengths[0])
    values, counts = np.unique(lengths, return_counts=True)
    return int(values[counts.argmax()])


def cell_list(
    regions: RegionTable, addresses: Int64s, lengths: Int64s, cell_bytes: int, device_id: int
) -> CellList | None:
    """Copies inside `regions` as cells of `cell_bytes`, the few that are none as rows of their own.

    None where too many are none, or where the regions are no grid; then each copy has to be named.
    """
    if (regions.starts % cell_bytes).any():
        return None
    counts = (regions.ends - regions.starts) // cell_bytes
    before, grid_cells = np.cumsum(counts) - counts, int(counts.sum())
    offsets = addresses - regions.base_address
    numbers = offsets // cell_bytes
    odd = _odd(offsets, numbers, lengths, cell_bytes)
    if len(odd) > len(numbers) // _ODD_PART or grid_cells + len(odd) >= _MOST_CELLS:
        return None
    numbers += (before - regions.starts // cell_bytes)[regions.numbers_of(offsets)]
    numbers[odd] = np.arange(grid_cells, grid_cells + len(odd))
    whole = counts > 0
    grid = _rows(regions.starts[whole] + regions.base_address, cell_bytes, counts[whole], device_id)
    return CellList(np.concatenate([grid, _rows(addresses[odd], lengths[odd], 1, device_id)]), numbers.astype(np.int32))


def _odd(offsets: Int64s, cells: Int64s, lengths: Int64s, cell_bytes: int) -> Int64s:
    """Which copies are no cell. Sums first: remainders are never negative, so that all are zero when their sum is."""
    if lengths.min() == lengths.max() == cell_bytes and offsets.sum() == cells.sum() * cell_bytes:
        return np.empty(0, np.int64)
    return np.flatnonzero((cells * cell_bytes != offsets) | (lengths != cell_bytes))


def _rows(addresses: Int64s, lengths: Int64s | int, counts: Int64s | int, device_id: int) -> npt.NDArray[np.uint64]:
    rows = np.empty((len(addresses), 5), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4] = addresses, lengths, device_id, lengths, counts
    return rows
