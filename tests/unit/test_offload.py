"""The host pool: what it finds, what it evicts, and a machine that compares it with a simple model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvx.errors import ConnectorStateError, LayoutError
from kvx.offload import HostPool, Ticket, Use


def pool_of(num_blocks: int, eviction: Any = "lru") -> HostPool:
    pool = HostPool(eviction)
    pool.offer(num_blocks)
    return pool


def stored(pool: HostPool, *keys: str) -> tuple[int, ...]:
    ticket = pool.store(keys)
    assert ticket is not None
    pool.finish(ticket, ok=True)
    return ticket.host_blocks


def loaded(pool: HostPool, *keys: str) -> None:
    pool.finish(pool.load(keys), ok=True)


def test_a_block_is_found_only_when_its_store_has_ended_well() -> None:
    pool = pool_of(4)
    first, second = pool.store(["a", "b"]), pool.store(["c"])
    assert first is not None
    assert second is not None
    assert pool.lookup(["a", "b", "c"]) == 0
    pool.finish(first, ok=True)
    assert pool.lookup(["a", "b", "c"]) == 2
    pool.finish(second, ok=False)
    assert pool.lookup(["a", "b", "c"]) == 2
    assert pool.num_used == 2
    assert (pool.counters.stores, pool.num_in_use) == (2, 0)


def test_lookup_counts_a_complete_prefix_only() -> None:
    pool = pool_of(4)
    stored(pool, "a", "c")
    assert pool.lookup(["a", "b", "c"]) == 1
    assert pool.lookup(["b", "c"]) == 0
    with pytest.raises(ConnectorStateError, match="look them up first"):
        pool.load(["a", "b"])


def test_the_least_recently_used_goes_first() -> None:
    pool = pool_of(3)
    stored(pool, "a", "b", "c")
    loaded(pool, "a")
    pool.renew(["b"])
    blocks = stored(pool, "d")
    assert pool.lookup(["c"]) == 0
    assert pool.lookup(["a"]) == pool.lookup(["b"]) == pool.lookup(["d"]) == 1
    assert set(blocks) < set(range(3))
    assert (pool.counters.evictions, pool.counters.hits, pool.counters.reloads) == (1, 1, 1)


def test_of_one_prefix_the_last_block_goes_first() -> None:
    pool = pool_of(3)
    stored(pool, "a", "b", "c")
    pool.renew(["a", "b", "c"])
    stored(pool, "d")
    assert pool.lookup(["a", "b", "c"]) == 2


def test_a_block_in_use_is_never_evicted() -> None:
    pool = pool_of(2)
    stored(pool, "a", "b")
    ticket = pool.load(["a", "b"])
    assert pool.store(["c"]) is None
    assert pool.counters.refused == 1
    pool.finish(ticket, ok=False)
    assert (pool.counters.hits, pool.counters.reloads) == (2, 0)
    stored(pool, "c")
    assert pool.lookup(["c"]) == 1


def test_all_blocks_that_find_no_room_are_counted() -> None:
    pool = pool_of(2)
    ticket = pool.store(["a", "b", "c", "d", "a", "e"])
    assert ticket is not None
    assert ticket.keys == ("a", "b")
    assert pool.counters.refused == 3


def test_what_is_pinned_and_never_copied_is_no_hit() -> None:
    pool = pool_of(1)
    stored(pool, "a")
    ticket = pool.load(["a"])
    assert pool.is_current(ticket)
    pool.finish(ticket, ok=None)
    assert (pool.counters.hits, pool.counters.reloads) == (0, 0)
    ticket = pool.load(["a"])
    pool.reset()
    assert not pool.is_current(ticket)


def test_a_store_takes_what_there_is_room_for_in_order() -> None:
    pool = pool_of(2)
    ticket = pool.store(["a", "b", "c"])
    assert ticket is not None
    assert ticket.keys == ("a", "b")
    assert pool.store(["a", "b"]) is None, "both are on their way"


def test_a_ticket_is_finished_once() -> None:
    pool = pool_of(1)
    ticket = pool.store(["a"])
    assert ticket is not None
    pool.finish(ticket, ok=True)
    with pytest.raises(ConnectorStateError, match="finished already"):
        pool.finish(ticket, ok=True)


def test_a_reset_forgets_all_and_spares_the_blocks_that_are_in_use() -> None:
    pool = pool_of(3)
    stored(pool, "a")
    load, store = pool.load(["a"]), pool.store(["b"])
    assert store is not None
    pool.reset()
    assert (pool.num_blocks, pool.lookup(["a"])) == (0, 0)
    pool.offer(3)
    again = pool.store(["a", "x"])
    assert again is not None
    assert set(again.host_blocks).isdisjoint({*load.host_blocks, *store.host_blocks})
    pool.finish(store, ok=True)
    assert pool.lookup(["b"]) == 0, "stored for a pool that is gone"
    pool.finish(load, ok=True)
    pool.check_integrity()
    assert pool.num_used == 1


def test_a_pool_does_not_shrink_under_its_blocks() -> None:
    pool = pool_of(3)
    pool.offer(3)
    with pytest.raises(LayoutError, match="reset the pool"):
        pool.offer(2)


def test_arc_keeps_what_was_loaded_again_through_a_scan() -> None:
    """The same calls, and LRU loses it."""
    left = {}
    for eviction in ("lru", "arc"):
        pool = pool_of(4, eviction)
        stored(pool, "a", "b")
        loaded(pool, "a", "b")
        for number in range(8):
            stored(pool, f"scanned {number}")
        left[eviction] = pool.lookup(["a", "b"])
    assert left == {"lru": 0, "arc": 2}


def test_arc_gives_the_first_list_room_when_its_blocks_return() -> None:
    pool = pool_of(4, "arc")
    stored(pool, "a", "b")
    loaded(pool, "a", "b")
    for key in ("c", "d", "e", "c", "f"):  # c is evicted, remembered, and comes back
        stored(pool, key)
    assert pool.lookup(["b"]) == 0, "the second list gave its oldest"
    assert all(pool.lookup([key]) for key in ("a", "c", "e", "f"))


KEYS = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)


class PoolMachine(RuleBasedStateMachine):
    """Against sets: what is stored, what is in use, which host block holds what."""

    tickets = Bundle("tickets")
    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(self.eviction)  # type: ignore[arg-type]
        self.budget = 0
        self.present: dict[int, int] = {}  # stored, by host block
        self.in_use: dict[int, Ticket] = {}
        self.valid: set[int] = set()  # stores begun since the last reset

    @rule(more=st.integers(0, 4))
    def offer(self, more: int) -> None:
        self.budget += more
        self.pool.offer(self.budget)

    @rule(target=tickets, keys=KEYS)
    def store(self, keys: list[int]) -> Any:
        before = set(self.present)
        pinned = self.pinned()
        ticket = self.pool.store(keys)
        if ticket is None:
            self.note_evictions(before, pinned)
            return multiple()
        assert not set(ticket.keys) & set(self.present)
        assert not set(ticket.host_blocks) & pinned
        self.note_evictions(before, pinned)
        assert not set(ticket.host_blocks) & set(self.present.values())
        self.in_use[ticket.number] = ticket
        self.valid.add(ticket.number)
        return ticket

    @rule(target=tickets, keys=KEYS)
    def load(self, keys: list[int]) -> Any:
        found = self.pool.lookup(keys)
        assert found == next((i for i, key in enumerate(keys) if key not in self.present), len(keys))
        if not found:
            return multiple()
        ticket = self.pool.load(keys[:found])
        assert ticket.host_blocks == tuple(self.present[key] for key in keys[:found])
        self.in_use[ticket.number] = ticket
        return ticket

    @rule(ticket=consumes(tickets), ok=st.sampled_from([True, False, None]))
    def finish(self, ticket: Ticket, ok: bool | None) -> None:
        self.pool.finish(ticket, ok=ok)
        del self.in_use[ticket.number]
        if ticket.use is Use.STORE and ok and ticket.number in self.valid:
            self.present.update(zip(ticket.keys, ticket.host_blocks, strict=True))
        with pytest.raises(ConnectorStateError):
            self.pool.finish(ticket, ok=ok)

    @rule(keys=KEYS)
    def renew(self, keys: list[int]) -> None:
        self.pool.renew(keys)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.budget = 0
        self.present.clear()
        self.valid.clear()

    @invariant()
    def holds(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used <= self.pool.num_blocks == self.budget
        assert self.pool.num_in_use == len(self.in_use)

    def pinned(self) -> set[int]:
        return {block for ticket in self.in_use.values() for block in ticket.host_blocks}

    def note_evictions(self, before: set[int], pinned: set[int]) -> None:
        for key in before:
            if not self.pool.lookup([key]):
                assert self.present.pop(key) not in pinned, "a pinned block was evicted"


class ArcMachine(PoolMachine):
    eviction = "arc"


for machine in (PoolMachine, ArcMachine):
    machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )
TestLru = PoolMachine.TestCase
TestArc = ArcMachine.TestCase
