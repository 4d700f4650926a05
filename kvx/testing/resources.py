"""Resources: after many lives a process holds what it held after the first ones."""

from __future__ import annotations

import pytest

from kvx.testing.kit import Kit
from kvx.testing.pair import Pair
from kvx.testing.peers import Processes

WARM_LIVES = 4
MAPPINGS_PER_LIFE = 2
MAPPED_BYTES_PER_LIFE = 4 << 20
"""Libraries keep some memory of their own for later. A region or a peer's memory left in each life is more."""


class ResourceTests(Kit):
    """Counted in a process in which nothing else runs. File descriptors, threads, shared memory: not one more."""

    @pytest.mark.parametrize("lives", [6, pytest.param(24, marks=pytest.mark.matrix)])
    def test_open_and_close_leave_nothing_behind(self, pair: Pair, processes: Processes, lives: int) -> None:
        metadata = pair.peer_metadata if self.capabilities.reaches_processes else None
        counted = processes.start()
        try:
            op = self.operations()[0].value
            generation = counted.live(WARM_LIVES, metadata, op, 1)
            before = counted.footprint()
            counted.live(lives, metadata, op, generation)
            after = counted.footprint()
            growth = {name: after[name] - before[name] for name in before}
            for name in ("file descriptors", "threads", "shared memory mappings"):
                assert growth[name] <= 0, f"{name}: {growth[name]} more after {2 * lives} lives ({before}, {after})"
            assert growth["mappings"] <= MAPPINGS_PER_LIFE * lives, growth
            assert growth["mapped bytes"] <= MAPPED_BYTES_PER_LIFE * lives, growth
        finally:
            counted.stop()
