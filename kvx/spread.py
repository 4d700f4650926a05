"""How every benchmark sums up what it measured more than once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and how far the values lie apart."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
