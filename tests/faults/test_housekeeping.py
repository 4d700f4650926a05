"""An engine ends, asked or killed, in each state of a hand-off: nothing is left of it, nor in its survivors.

The same for vLLM's three processes: tests/vllm/test_housekeeping.py.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Kept
from engine_process import Remote
from faults import loading
from network import until
from world import DEADLINE_S, DRAIN_S, TOKENS, World

pytestmark = [pytest.mark.faults, pytest.mark.transfer]

LEASE_S = 1.0
"""Of a hold whose reader ends: it is kept as long."""
Requests = list[tuple[str, int]]


def connected(world: World, victim: Remote) -> Requests:
    """Nothing is on its way."""
    return []


def held(world: World, victim: Remote) -> Requests:
    """Nobody has claimed it."""
    world.peer.prefill(world.new()[0], TOKENS, world.new()[1], LEASE_S)
    return []


def claiming(world: World, victim: Remote) -> Requests:
    """What the owner does not hold yet."""
    (other, seed), (name, _) = world.new(), world.new()
    place = world.peer.prefill(other, TOKENS, seed, LEASE_S)
    place = type(place)(place.remote_engine_id, place.host, place.port, world.peer.ticket(name, TOKENS))
    world.reader.resume(name, place, TOKENS, seed)
    until(lambda: world.reader.phase(name) == "claim")
    return [(name, seed)]


def moving(world: World, victim: Remote) -> Requests:
    """The first piece has been read, and four more have not."""
    if world.offloads:
        return [loading(world)]
    return [world.begin_gated(world.peer, LEASE_S)]


def asleep(world: World, victim: Remote) -> Requests:
    """Its cache has no memory."""
    victim.sleep()
    return []


STATES: dict[str, Callable[[World, Remote], Requests]] = {
    state.__name__: state for state in (connected, held, claiming, moving, asleep)
}
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
ROWS = [
    *itertools.product(("nixl", "mooncake", "ipc"), SIGNALS, ("peer", "reader"), STATES),
    *itertools.product(("cpu_offload",), SIGNALS, ("reader",), ("connected", "moving", "asleep")),
]
QUICK = {("nixl", signal.SIGTERM, "peer", "moving"), ("ipc", signal.SIGKILL, "reader", "moving")}


def _row(row: tuple[str, signal.Signals, str, str]) -> Any:
    connector, number, side, state = row
    return pytest.param(
        *row, id=f"{connector}-{number.name}-{side}-{state}", marks=[pytest.mark.quick] * (row in QUICK)
    )


@pytest.mark.parametrize(("connector", "number", "side", "state"), [_row(row) for row in ROWS])
def test_nothing_is_left_of_an_engine(
    worlds: Kept, connector: str, number: signal.Signals, side: str, state: str
) -> None:
    world = worlds.get(connector, "recompute", False)
    world.sound = False  # a failed test leaves the next one another world
    world.hand_off(world.peer, world.well)
    world.require_blocks_back()
    world.note_footprints()
    victim: Remote = getattr(world, side)
    requests = STATES[state](world, victim)
    sockets = sockets_of(victim)
    assert sockets & sockets_there(), "its own are seen"
    victim.signal(number)
    victim.process.join(DEADLINE_S + DRAIN_S)
    assert victim.process.exitcode == (0 if number is signal.SIGTERM else -number), "it ends, and in its own way"
    if side == "peer":
        for name, seed in requests:
            ended = world.reader.outcome(name, DEADLINE_S + DRAIN_S)
            assert ended is not None
            assert ended["answer"] == world.answer(seed)
    assert not sockets & sockets_there()
    assert world.files() == []
    world.restart_peer(same_port=True) if side == "peer" else world.restart_reader()
    world.recover()
    world.hand_off(world.peer, world.well)
    world.require_blocks_back()
    world.require_nothing_leaked()
    world.require_no_internal_errors()
    assert world.files() == []
    world.sound = True


def sockets_of(engine: Remote) -> set[str]:
    """Inodes of its sockets, Unix and TCP."""
    folder = f"/proc/{engine.process.pid}/fd"
    links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def sockets_there() -> set[str]:
    """Inodes of sockets that listen, or are bound to a name: a process that died has none."""
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found |= {row[9] for row in rows if row[3] == "0A"}
    return found | {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
