"""The pool of host blocks that cache blocks leave for and come back from: pure, keyed by the engine's block hashes.

One host block holds what the engine's cache has of one hash. A hash is there (`lookup`) once its store has ended well;
its host block goes to another hash (an eviction) only while no load and no store holds it. Every pin is a `Ticket`,
which `finish` takes back, once, whatever became of the copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Literal

from kvx.errors import ConnectorStateError, LayoutError
from kvx.eviction import ORDERS, Order

Eviction = Literal["lru", "arc"]


class Use(StrEnum):
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True)
class Ticket:
    """Host blocks that are in use: those of `keys`, in order. Hand it to `finish` when the copy has ended."""

    number: int
    use: Use
    keys: tuple[Hashable, ...]
    host_blocks: tuple[int, ...]


@dataclass
class OffloadCounters:
    """Blocks since the start. `hits` were found and copied, `reloads` are those of them that arrived in the cache.

    `refused`: not stored, because every host block was in use.
    """

    stores: int = 0
    reloads: int = 0
    evictions: int = 0
    hits: int = 0
    refused: int = 0

    def as_status(self) -> dict[str, int]:
        """Plain values for msgpack and JSON."""
        return asdict(self)


@dataclass(eq=False)
class _Entry:
    host_block: int
    is_stored: bool = False
    is_forgotten: bool = False  # by a reset, while in use
    pins: int = 0


class HostPool:
    """Blocks by hash. One thread calls. `offer` says how many host blocks there are; none at first."""

    def __init__(self, eviction: Eviction = "lru") -> None:
        self.counters = OffloadCounters()
        self._order: Order = ORDERS[eviction]()
        self._entries: dict[Hashable, _Entry] = {}
        self._free: list[int] = []
        self._num_offered = 0
        self._tickets: dict[int, tuple[Ticket, list[_Entry]]] = {}
        self._last_number = 0

    @property
    def num_blocks(self) -> int:
        """Host blocks that may be used."""
        return self._num_offered

    @property
    def num_used(self) -> int:
        """Host blocks that hold a hash, or are in use by a copy."""
        return self._num_offered - len(self._free)

    @property
    def num_in_use(self) -> int:
        """Tickets that have not been finished."""
        return len(self._tickets)

    def offer(self, num_blocks: int) -> None:
        """Host blocks [0, num_blocks) exist. LayoutError when that is fewer than before: reset first."""
        if num_blocks < self._num_offered:
            raise LayoutError(
                f"{num_blocks} host blocks offered, {self._num_offered} were there; reset the pool before it shrinks"
            )
        if num_blocks == self._num_offered:
            return
        busy = {entry.host_block for _, entries in self._tickets.values() for entry in entries}
        self._free[:0] = [block for block in range(num_blocks - 1, self._num_offered - 1, -1) if block not in busy]
        self._num_offered = num_blocks
        self._order.resize(num_blocks)

    def lookup(self, keys: Iterable[Hashable]) -> int:
        """How many of the first keys could be loaded now, all of them in a row. Changes nothing."""
        found = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.is_stored:
                break
            found += 1
        return found

    def load(self, keys: Sequence[Hashable]) -> Ticket:
        """Pin blocks that `lookup` has found. ConnectorStateError when one of them is not there."""
        if self.lookup(keys) < len(keys):
            raise ConnectorStateError(f"not all of {len(keys)} blocks are in host memory; look them up first")
        entries = [self._entries[key] for key in keys]
        # Backwards, so that of one prefix the last blocks are evicted first.
        for key in reversed(keys):
            self._order.hit(key)
        return self._pin(Use.LOAD, keys, entries)

    def store(self, keys: Iterable[Hashable]) -> Ticket | None:
        """Host blocks for those keys that the pool does not have, up to the first that finds no room.

        None when there is nothing to store.
        """
        taken: dict[Hashable, _Entry] = {}
        missing = [key for key in dict.fromkeys(keys) if key not in self._entries]
        for index, key in enumerate(missing):
            block = self._room_for(key, taken)
            if block is None:
                self.counters.refused += len(missing) - index
                break
            taken[key] = self._entries[key] = _Entry(block)
            self._order.insert(key)
        return self._pin(Use.STORE, tuple(taken), list(taken.values())) if taken else None

    def is_current(self, ticket: Ticket) -> bool:
        """Whether its blocks are what they were: no reset has come since."""
        return not any(entry.is_forgotten for entry in self._tickets[ticket.number][1])

    def finish(self, ticket: Ticket, *, ok: bool | None) -> None:
        """Undo the pins of a ticket: its copy has ended, well or not, or (None) there was none.

        ConnectorStateError the second time.
        """
        if self._tickets.get(ticket.number, (None,))[0] is not ticket:
            raise ConnectorStateError(f"{ticket.use} {ticket.number} has been finished already; each ends once")
        _, entries = self._tickets.pop(ticket.number)
        for key, entry in zip(ticket.keys, entries, strict=True):
            entry.pins -= 1
            if ticket.use is Use.STORE and not entry.is_forgotten:
                entry.is_stored = bool(ok)
                if not ok:
                    self._order.remove(key)
                    del self._entries[key]
                    self._give_back(entry)
            elif entry.is_forgotten and entry.pins == 0:
                self._give_back(entry)
        done = len(ticket.keys) if ok else 0
        if ticket.use is Use.STORE:
            self.counters.stores += done
        elif ok is not None:
            self.counters.hits += len(ticket.keys)
            self.counters.reloads += done

    def renew(self, keys: Sequence[Hashable]) -> None:
        """A request has these blocks, a prefix in order: they stay longer than others, the first ones longest."""
        for key in reversed(keys):
            if key in self._entries:
                self._order.renew(key)

    def reset(self) -> None:
        """Forget everything, and have no host blocks until some are offered. What is in use ends by its ticket."""
        self._num_offered = 0
        self._free.clear()
        for key, entry in self._entries.items():
            self._order.remove(key)
            entry.is_forgotten = True
        self._entries.clear()
        self._order.resize(0)

    def check_integrity(self) -> None:
        """Asserts what must hold between two calls, whatever happened before."""
        held = [entry.host_block for entry in self._entries.values()]
        forgotten = {e.host_block for _, entries in self._tickets.values() for e in entries if e.is_forgotten}
        inside = {block for block in forgotten if block < self._num_offered}
        assert len(set(held)) == len(held), "two hashes share a host block"
        assert not set(held) & forgotten, "a host block has a new hash while a copy from before uses it"
        assert sorted([*held, *inside, *self._free]) == list(range(self._num_offered)), "a host block is lost"
        pins: dict[_Entry, int] = {}
        for _, entries in self._tickets.values():
            for entry in entries:
                pins[entry] = pins.get(entry, 0) + 1
        assert all(entry.pins == pins.get(entry, 0) for entry in (*self._entries.values(), *pins)), "a pin is lost"
        assert set(self._order.keys()) == set(self._entries), "the order of eviction knows other hashes"

    def _pin(self, use: Use, keys: Sequence[Hashable], entries: list[_Entry]) -> Ticket:
        self._last_number += 1
        ticket = Ticket(self._last_number, use, tuple(keys), tuple(entry.host_block for entry in entries))
        self._tickets[ticket.number] = ticket, entries
        for entry in entries:
            entry.pins += 1
        return ticket

    def _room_for(self, key: Hashable, taken: dict[Hashable, _Entry]) -> int | None:
        """A host block that nobody uses; None when there is none."""
        self._order.expect(key)
        if self._free:
            return self._free.pop()
        victim = self._order.evict(lambda other: not self._entries[other].pins and other not in taken)
        if victim is None:
            return None
        self.counters.evictions += 1
        return self._entries.pop(victim).host_block

    def _give_back(self, entry: _Entry) -> None:
        if entry.host_block < self._num_offered:
            self._free.append(entry.host_block)
