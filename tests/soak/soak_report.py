"""What a soak run has shown: how processes looked between its laps, and whether they grew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """What processes hold after so many hand-offs, when all is at rest; see `SoakEngine.look`."""

    hand_offs: int
    decode: dict[str, int]
    prefill: dict[str, int]
