"""Every fault with every connector under both policies: one request pays, and nothing is lost.

Its outcome is right and in time, all others are right, all blocks come back, the engines go on and nothing is left.
"""

from __future__ import annotations

from typing import Any

import pytest
from faults import OF_HOST_MEMORY, OF_PEERS, Fault, Request
from network import until
from table import QUICK, RUN, Cell
from world import DEADLINE_S, DRAIN_S, LEASE_S, World

pytestmark = [pytest.mark.faults, pytest.mark.transfer]


def _param(cell: Cell) -> Any:
    marks = [pytest.mark.quick] if (cell.connector, cell.fault, cell.policy) in QUICK else []
    return pytest.param(cell, id=str(cell), marks=marks)


@pytest.mark.parametrize("cell", [_param(cell) for cell in RUN])
def test_cell(cell: Cell, world: World) -> None:
    fault = (OF_HOST_MEMORY if world.offloads else OF_PEERS)[cell.fault]
    world.recover()
    world.require_blocks_back()
    world.note_footprints()
    request = fault.begin(world)
    fault.inject(world, request)
    if not fault.changes_reader:
        world.hand_off(world.well, world.well)
    outcome = world.reader.offload_outcome if world.offloads else world.reader.outcome
    ended = outcome(request[0], DEADLINE_S + DRAIN_S)
    fault.repair(world, request)
    require_right(world, fault, request, ended)
    if fault.frees_at_once:
        until(lambda: not world.peer.num_used(), LEASE_S / 2)
    world.recover()
    world.hand_off(world.peer, world.well)
    if world.offloads:
        _reload(world)
    world.require_blocks_back()
    world.require_no_internal_errors()
    world.require_nothing_leaked()


def require_right(world: World, fault: Fault, request: Request, ended: dict[str, Any] | None) -> None:
    assert ended is not None, "the request has no end in time"
    assert ended["cause"] in fault.causes, ended
    assert ended["took_s"] <= DEADLINE_S + DRAIN_S, ended
    if ended["error"]:
        peer = "host memory" if world.offloads else "engine peer at "
        assert peer in ended["error"], ended
        assert ended["error"].startswith(ended["cause"])
    has_answer = not ended["error"] or (world.policy == "recompute" and not fault.is_abort)
    assert ended["answer"] == (world.answer(request[1]) if has_answer else None)


def _reload(world: World) -> None:
    """Host memory works on: stored, loaded, and every ticket back."""
    name, seed = world.new()
    for turn in ("store", "load"):
        blocks = world.reader.run_offloaded(f"{name} {turn}", 128, seed)
        assert (blocks > 0) == (turn == "load")
        ended = world.reader.offload_outcome(f"{name} {turn}", 5)
        assert (ended["error"], ended["answer"]) == ("", world.answer(seed))
    assert world.reader.pool_counts()["in_use"] == 0
