"""What happens to a request between two real servers: as `faults`, without a look inside.

A hand-off over a link that is slow enough is in its middle when some of its bytes have passed. One inside a host is
over in milliseconds; there the owner is stopped before it is asked for the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from network import until
from servers_world import LEASE_S, Question, ServersWorld, Side

from kvx.verify.client import Ask

CUT_S = 10.0
SPEED, SLOW_SPEED = 16_000_000, 6_000_000
"""Bytes each second; the eight blocks of a request are 47 MB."""
SOME_BYTES = 4_000_000
LEFT_S = 2.5


@dataclass
class HandOff:
    """A request that is being handed off when the fault comes; `notes` of the fault."""

    owner: Side
    reader: Side
    ask: Ask
    question: Question
    notes: dict[str, Any] = field(default_factory=dict)


Step = Callable[[ServersWorld, HandOff], None]


@dataclass(frozen=True)
class ServerFault:
    """`causes`: of which the failure has one. `is_abort`: the client has gone, and gets no answer."""

    begin: Callable[[ServersWorld, Side, Side], HandOff]
    inject: Step
    causes: frozenset[str]
    repair: Step
    is_abort: bool = False


def fault_of(connector: str, name: str) -> ServerFault:
    return OF_CONNECTOR[connector][name]


# Where the request is


def moving(world: ServersWorld, owner: Side, reader: Side) -> HandOff:
    return _moving(world, owner, reader, SPEED, 0.0)


def moving_on_a_short_lease(world: ServersWorld, owner: Side, reader: Side) -> HandOff:
    """It is claimed late, and nothing renews beyond the longest time: the lease ends in the middle."""
    return _moving(world, owner, reader, SLOW_SPEED, LEASE_S - LEFT_S)


def _moving(world: ServersWorld, owner: Side, reader: Side, speed: int, wait_s: float) -> HandOff:
    ask = world.ask()
    params = world.hold(owner, ask)
    time.sleep(wait_s)
    world.hosts.slow_down(speed)
    before = world.hosts.bytes_sent(owner.index)
    question = Question(reader.url, ask, kv_transfer_params=params)
    # On a machine that is busy a short lease may have ended before its claim.
    until(lambda: world.hosts.bytes_sent(owner.index) > before + SOME_BYTES or question.has_answer(), 30.0)
    return HandOff(owner, reader, ask, question)


def unanswered(world: ServersWorld, owner: Side, reader: Side) -> HandOff:
    ask = world.ask()
    params = world.hold(owner, ask)
    _server(owner).pause()
    question = Question(reader.url, ask, kv_transfer_params=params)
    until(lambda: _requests_inside(world, reader) > 0, 30.0)
    return HandOff(owner, reader, ask, question)


def held_too_long(world: ServersWorld, owner: Side, reader: Side) -> HandOff:
    """Its lease has ended when decode comes for it."""
    ask, expired = world.ask(), owner.status()["handoff"]["expired"]
    params = world.hold(owner, ask)
    until(lambda: owner.status()["handoff"]["expired"] > expired, LEASE_S + 10)
    return HandOff(owner, reader, ask, Question(reader.url, ask, kv_transfer_params=params))


def held_by_one_that_restarts(world: ServersWorld, owner: Side, reader: Side) -> HandOff:
    """The owner is another one, of the same name at the same place, when decode comes for it."""
    ask = world.ask()
    params = world.hold(owner, ask)
    owner.kill()
    world.start_again(owner)
    return HandOff(owner, reader, ask, Question(reader.url, ask, kv_transfer_params=params))


# What comes


def nothing(world: ServersWorld, handed: HandOff) -> None:
    """It has come already, or comes by itself."""


def kill(world: ServersWorld, handed: HandOff) -> None:
    handed.owner.kill()


def stop(world: ServersWorld, handed: HandOff) -> None:
    _server(handed.owner).pause()


def cut(world: ServersWorld, handed: HandOff) -> None:
    handed.notes["cut"] = time.monotonic()
    world.hosts.cut()


def hang_up(world: ServersWorld, handed: HandOff) -> None:
    handed.question.hang_up()


# What mends it


def start_anew(world: ServersWorld, handed: HandOff) -> None:
    _speed_up(world)
    world.start_again(handed.owner)


def go_on(world: ServersWorld, handed: HandOff) -> None:
    _server(handed.owner).resume()
    _speed_up(world)


def mend(world: ServersWorld, handed: HandOff) -> None:
    _speed_up(world)
    time.sleep(max(0.0, handed.notes["cut"] + CUT_S - time.monotonic()))
    world.hosts.mend()


def speed_up(world: ServersWorld, handed: HandOff) -> None:
    _speed_up(world)


def _speed_up(world: ServersWorld) -> None:
    if world.has_link:
        world.hosts.speed_up()


def _server(side: Side) -> Any:
    assert side.server is not None
    return side.server


def _requests_inside(world: ServersWorld, side: Side) -> float:
    counters = world.client.counters(side.url)
    return counters["vllm:num_requests_running"] + counters["vllm:num_requests_waiting"]


def _fault(begin: object, inject: object, causes: str, repair: object = nothing, **fields: bool) -> ServerFault:
    return ServerFault(begin, inject, frozenset(causes.split(" ")), repair, **fields)  # type: ignore[arg-type]


# The ticket is of the one before; where it has ended meanwhile, that is what is seen first.
# A start may take longer than a hold may last; then that is the cause.
_RESTART = _fault(held_by_one_that_restarts, nothing, "stale_generation transfer_failed lease_expired")
_STOP_IN_CLAIM = _fault(unanswered, nothing, "timeout", go_on)
# The ticket ends with the longest lease, and is looked at first.
_HELD_TOO_LONG = _fault(held_too_long, nothing, "lease_expired transfer_failed")
OVER_A_LINK = {
    # Both notice: the side channel, and the library whose transfer ends.
    "kill": _fault(moving, kill, "peer_dead transfer_failed", start_anew),
    "stop": _fault(moving, stop, "timeout", go_on),
    "network_cut": _fault(moving, cut, "timeout transfer_failed", mend),
    "restart": _RESTART,
    "abort_move": _fault(moving, hang_up, "cancelled", speed_up, is_abort=True),
    "lease_expiry": _fault(moving_on_a_short_lease, nothing, "lease_expired", speed_up),
}
INSIDE_A_HOST = {
    "kill": _fault(unanswered, kill, "peer_dead", start_anew),
    "stop": _STOP_IN_CLAIM,
    "restart": _RESTART,
    "abort_claim": _fault(unanswered, hang_up, "cancelled", go_on, is_abort=True),
    "lease_expiry": _HELD_TOO_LONG,
}
OF_CONNECTOR = {
    # In the middle of a READ, these two are asked of engines without a model (test_slow_link.py).
    "nixl": OVER_A_LINK | {"stop": _STOP_IN_CLAIM, "lease_expiry": _HELD_TOO_LONG},
    "mooncake": OVER_A_LINK,
    "ipc": INSIDE_A_HOST,
}
