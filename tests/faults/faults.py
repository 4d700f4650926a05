"""What happens to a request, fault by fault: where it is then, what comes, how it is mended, and what may be its cause.

`begin` returns the request, `inject` brings the fault, `repair` ends it when the request has its outcome.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from network import until
from world import OFFLOAD_BLOCKS, TOKENS, World

Request = tuple[str, int]


def nothing(world: World, request: Request) -> None:
    """Nothing to mend."""


def open_gate(world: World) -> None:
    world.reader.open_gate()


@dataclass(frozen=True)
class Fault:
    """`causes`: of which the failure has one; "" where the request may be right all the same.

    `is_abort`: the request ends at once, whatever the policy. `changes_reader`: all requests of the reader meet it.
    `frees_at_once`: the owner need not wait for the lease.
    """

    begin: Callable[[World], Request]
    inject: Callable[[World, Request], None]
    causes: frozenset[str]
    repair: Callable[[World, Request], None] = nothing
    is_abort: bool = False
    frees_at_once: bool = False
    changes_reader: bool = False


# Where the request is


def moving(world: World) -> Request:
    return world.begin_gated(world.peer)


def moving_on_a_short_lease(world: World) -> Request:
    return world.begin_gated(world.peer, lease_s=0.5)


def greeting(world: World) -> Request:
    """The owner is new there, and does not answer."""
    world.restart_peer(same_port=True)
    return _unanswered(world, "greet")


def claiming(world: World) -> Request:
    return _unanswered(world, "claim")


def _unanswered(world: World, phase: str) -> Request:
    name, seed = world.begin_unanswered()
    until(lambda: world.reader.phase(name) == phase)
    return name, seed


def checking(world: World) -> Request:
    """All of it has been read; the owner's digests do not come."""
    name, seed = world.new()
    place = world.peer.prefill(name, 1, seed)  # in one piece: nothing is left to be read when the owner stops
    world.reader.resume(name, place, 1, seed, True)
    until(world.reader.is_gated)
    world.peer.signal(signal.SIGSTOP)
    open_gate(world)
    until(lambda: world.reader.phase(name) == "check")
    return name, seed


def loading(world: World) -> Request:
    """A request whose blocks are in host memory, and are being loaded."""
    name, seed = world.new()
    assert world.reader.run_offloaded(name, TOKENS, seed) == 0
    assert world.reader.offload_outcome(name, 5)["answer"] == world.answer(seed)
    again = world.new()[0]
    assert world.reader.run_offloaded(again, TOKENS, seed, True) == OFFLOAD_BLOCKS
    return again, seed


# What comes


def kill(world: World, request: Request) -> None:
    world.peer.stop()


def stop(world: World, request: Request) -> None:
    world.peer.signal(signal.SIGSTOP)
    open_gate(world)


def cut(world: World, request: Request) -> None:
    assert world.network is not None
    world.network.cut()
    open_gate(world)


def restart(world: World, request: Request) -> None:
    world.restart_peer(same_port=True)
    open_gate(world)


def abort(world: World, request: Request) -> None:
    world.reader.abort(request[0])


def nobody_renews(world: World, request: Request) -> None:
    """The lease ends at its longest time, whoever renews it, with the request in the middle of its transfer."""


def fill_host(world: World, request: Request) -> None:
    assert "bytes wanted" in world.reader.grow_where_memory_ends()


def extend_reader(world: World, request: Request) -> None:
    world.reader.grow()


def sleep_reader(world: World, request: Request) -> None:
    world.reader.nap()


def change_owner(name: str) -> Callable[[World, Request], None]:
    """It waits for its reader, who then goes on."""

    def change(world: World, request: Request) -> None:
        wait = world.peer.begin(name)
        open_gate(world)
        wait()

    return change


def abort_load(world: World, request: Request) -> None:
    world.reader.abort_offloaded(request[0])
    open_gate(world)


def change_under_load(name: str) -> Callable[[World, Request], None]:
    def change(world: World, request: Request) -> None:
        getattr(world.reader, name)()
        open_gate(world)

    return change


def fill_pool(world: World, request: Request) -> None:
    """The blocks being loaded leave room for a part of another request's, which computes."""
    compute_offloaded(world)
    counts = world.reader.pool_counts()
    assert OFFLOAD_BLOCKS < counts["blocks"] < 2 * OFFLOAD_BLOCKS
    assert counts["refused"] == 2 * OFFLOAD_BLOCKS - counts["blocks"]
    open_gate(world)


def compute_offloaded(world: World) -> None:
    name, seed = world.new()
    assert world.reader.run_offloaded(name, TOKENS, seed) == 0
    assert world.reader.offload_outcome(name, 5)["answer"] == world.answer(seed)


# What mends it


def start_anew(world: World, request: Request) -> None:
    world.restart_peer(same_port=False)


def go_on(world: World, request: Request) -> None:
    world.peer.signal(signal.SIGCONT)


def mend(world: World, request: Request) -> None:
    assert world.network is not None
    world.network.mend()


def empty_host(world: World, request: Request) -> None:
    """And now the host has no memory for the pool at all, until it has again."""
    world.reader.fill_host(True)
    compute_offloaded(world)
    assert world.reader.pool_counts()["blocks"] == 0
    world.reader.fill_host(False)


def _fault(begin: object, inject: object, causes: str, repair: object = nothing, **fields: bool) -> Fault:
    return Fault(begin, inject, frozenset(causes.split(" ")), repair, **fields)  # type: ignore[arg-type]


_CHANGES = {"changes_reader": True}
_ABORT = {"is_abort": True}
_CLAIMED = {"is_abort": True, "frees_at_once": True}
OF_PEERS = {
    "kill": _fault(moving, kill, "peer_dead", start_anew),
    "stop": _fault(moving, stop, "timeout", go_on),
    "network_cut": _fault(moving, cut, "timeout transfer_failed", mend),
    "restart": _fault(moving, restart, "peer_dead stale_generation"),
    "abort_greet": _fault(greeting, abort, "cancelled", go_on, **_ABORT),
    "abort_claim": _fault(claiming, abort, "cancelled", go_on, **_CLAIMED),
    "abort_move": _fault(moving, abort, "cancelled", **_CLAIMED),
    "abort_check": _fault(checking, abort, "cancelled", go_on, **_CLAIMED),
    "lease_expiry": _fault(moving_on_a_short_lease, nobody_renews, "lease_expired"),
    "host_full": _fault(moving, fill_host, "cache_changing", **_CHANGES),
    "extend_reader": _fault(moving, extend_reader, "cache_changing", **_CHANGES),
    "sleep_reader": _fault(moving, sleep_reader, "cache_changing", **_CHANGES),
    "extend_owner": Fault(moving, change_owner("grow"), frozenset({"", "stale_generation"})),
    "sleep_owner": Fault(moving, change_owner("nap"), frozenset({"", "stale_generation"})),
}
OF_HOST_MEMORY = {
    "abort_move": _fault(loading, abort_load, "cancelled", **_ABORT),
    "host_full": _fault(loading, fill_pool, "", empty_host),
    "extend_reader": _fault(loading, change_under_load("grow"), "transfer_failed", **_CHANGES),
    "sleep_reader": _fault(loading, change_under_load("nap"), "transfer_failed", **_CHANGES),
}
