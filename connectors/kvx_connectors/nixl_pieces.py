"""A READ in pieces, for transports over which its owner's UCX sends it in messages (docs/adr/0007-nixl.md).

UCX ends an owner that has messages left to send to a reader that has gone. So a piece is one message, unless there are
many small ones, and the next one is asked for when it has come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvx.connector import Copies

PIECE_BYTES = 1 << 20
"""A copy of more is several pieces."""
SMALL_BYTES, TOGETHER_BYTES = 32 << 10, 128 << 10
"""Many copies of less than the first go together, as many as fit the second: each alone would be a way to the owner."""
FEW = 32
"""So many small ones may each go alone."""
MESSAGE_BYTES = PIECE_BYTES + (4 << 10)
"""What UCX may send at once: a piece, and what it writes before it."""


@dataclass(eq=False)
class Pieces:
    """What is left of a READ, and NIXL's handle of the piece that is on its way; `notify` goes with the last one."""

    rest: deque[Copies]
    notify: bytes
    on_way: Any = None


def pieces_of(copies: Copies) -> deque[Copies]:
    """The same bytes in the same order."""
    cut = _cut(copies)
    is_alone = cut.length >= SMALL_BYTES
    if np.count_nonzero(~is_alone) <= FEW:
        is_alone[:] = True
    before = np.cumsum(cut.length) - cut.length
    is_first = np.ones(len(before), dtype=np.bool_)
    is_first[1:] = is_alone[1:] | is_alone[:-1] | (np.diff(before // TOGETHER_BYTES) != 0)
    bounds = [*np.flatnonzero(is_first).tolist(), len(before)]
    return deque(
        Copies(cut.local[first:last], cut.remote[first:last], cut.length[first:last])
        for first, last in pairwise(bounds)
    )


def _cut(copies: Copies) -> Copies:
    """No copy longer than a piece."""
    counts = -(-copies.length // PIECE_BYTES)
    if (counts == 1).all():
        return copies
    local, remote, left = (np.repeat(each, counts) for each in (copies.local, copies.remote, copies.length))
    done = PIECE_BYTES * (np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts))
    return Copies(local + done, remote + done, np.minimum(left - done, PIECE_BYTES))
