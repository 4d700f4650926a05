"""`handoff_world` with engines of several ranks: each rank a real `HandoffWorker` with its own memory, port, clock and
library, and one scheduler over them, which counts their reports as vLLM's aggregator does.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from handoff_world import BLOCK_BYTES, BLOCKS, LONGEST_S, SECRET, Engine, Held, Pulled, Read, Scheduler, World
from test_pulls import LAYER

from kvx.handshake import Claim
from kvx.ranks import Share, heads_of_rank, shares
from kvx.ticket import Ticket, write_ticket


@dataclass(eq=False)
class Rank(Engine):
    """One of several, whose blocks are its engine's. Stricter than vLLM, where a rank's blocks wait for the others':
    what it has let go has other content at once.
    """

    of: RankedEngine = field(kw_only=True)
    number: int = field(kw_only=True)
    # By request that it holds, the requests over there of which a rank has claimed it.
    shares_seen: dict[str, set[str]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    def start(self) -> None:
        super().start()
        self.free, self.owner_of = self.of.free, self.of.owner_of
        self.shares_seen, self.dropped = {}, set()
        table = self.worker._holder._table
        really_claim = table.claim

        def claim(sender: bytes, claim: Claim, now: float) -> None:
            really_claim(sender, claim, now)
            hold = table.holds.get(claim.request_id)
            if hold is not None and claim.reader in hold.readers and claim.share:
                self.shares_seen.setdefault(claim.request_id, set()).add(claim.share.partition("/")[2])

        table.claim = claim  # type: ignore[method-assign]

    def die(self) -> None:
        super().die()
        self.of.lose_what_came()
        for held in self.holds.values():
            self.of.hold_ended(self, held)
        for pulled in self.pulls.values():
            self.of.pull_ended(self, pulled, False)
        self.holds, self.pulls = {}, {}

    def ranks_of(self, owner: Any) -> tuple[int, tuple[Share, ...]]:
        """As the bridge does."""
        if len(owner.ranks) == len(self.of.ranks):
            return owner.port + self.number, ()
        return owner.port, tuple(shares([self.of.total_heads], self.number, len(self.of.ranks), len(owner.ranks)))

    def asks(self, owner: Rank) -> bool:
        """Whether it reads from this one, or tells it that it may let go."""
        port, found = self.ranks_of(owner.of)
        return owner.port in [port + share.owner_rank for share in found] if found else owner.port == port

    def is_at(self, name: str, owner: Rank) -> bool:
        """Whether its pull may still have to do with this rank of the owner."""
        joint = self.worker._puller._joints.get(name)
        return name in self.pulls and (joint is None or any(pull.owner.place[1] == owner.port for pull in joint.pulls))

    def drop(self, name: str) -> None:
        super().drop(name)
        self.dropped.add(name)

    def _memory_goes(self) -> None:
        super()._memory_goes()
        if not self.keeps_content:
            self.of.lose_what_came()

    def _hold_ended(self, held: Held, released: bool) -> None:
        if released and held.name not in self.dropped:
            self._require_all_were_here(held.name)
        self.overwrite(held.blocks)
        self.of.hold_ended(self, held)

    def _require_all_were_here(self, name: str) -> None:
        """Where one rank of a reader has claimed, those that come too are waited for, as long as the lease."""
        for request in self.shares_seen.get(name, ()):
            late = [rank.name for rank in self.world.decode.ranks if rank.asks(self) and rank.is_at(request, self)]
            assert not late, f"{self.name} let go of {name} before {late} had read it"

    def _pull_ended(self, pulled: Pulled, received: bool) -> None:
        self.of.pull_ended(self, pulled, received)


@dataclass(eq=False)
class RankedEngine(Scheduler):
    """The scheduler's view: prefill frees blocks when all ranks that held them have let go; decode uses a request when
    all ranks have received it, and frees its blocks when all have ended. A rank that died says nothing any more.
    """

    world: World
    name: str
    host: str
    clock_offset: float
    size: int
    total_heads: int
    port: int = 5000
    ranks: list[Rank] = field(default_factory=list)
    holds: dict[str, Held] = field(default_factory=dict)
    pulls: dict[str, Pulled] = field(default_factory=dict)
    awaited: dict[str, set[Rank]] = field(default_factory=dict)  # by request, ranks that have not ended it
    failed: set[str] = field(default_factory=set)  # pulls of which a rank has failed, or lost what it had received
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    owner_of: dict[int, str] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        for number in range(self.size):
            heads = heads_of_rank(self.total_heads, number, self.size)
            stride_bytes = BLOCK_BYTES * heads.count
            layer = dataclasses.replace(
                LAYER, heads=heads, block_stride_bytes=stride_bytes, kernel_block_stride_bytes=stride_bytes
            )
            info = {"engine_id": self.name, "tp_rank": number, "tp_size": self.size}
            rank = Rank(
                self.world, f"{self.name}/{number}", self.host, self.clock_offset + 100.0 * number,
                port=self.port + number, info=info, layer=layer, of=self, number=number,
            )  # fmt: skip
            self.ranks.append(rank)
            self.world.engines[rank.name] = rank
            rank.start()

    @property
    def is_alive(self) -> bool:
        return all(rank.is_alive for rank in self.ranks)

    @property
    def is_ready(self) -> bool:
        return all(rank.is_ready for rank in self.ranks)

    @property
    def reads(self) -> list[Read]:
        return [read for rank in self.ranks for read in rank.reads]

    # What it tells its ranks

    def ticket(self, name: str, num_tokens: int) -> str:
        if not self.world.has_secret:
            return ""
        ticket = Ticket(
            request_id=name, engine_id=self.name, instances=tuple(rank.worker.instance for rank in self.ranks),
            host=self.host, port=self.port, num_tokens=num_tokens, expires_s=time.time() + LONGEST_S,
        )  # fmt: skip
        return write_ticket(SECRET, ticket)

    def hold(self, held: Held) -> None:
        self.holds[held.name] = held
        self.awaited[held.name] = set(self.ranks)
        for rank in self.ranks:
            rank.hold(held)

    def pull_from(self, owner: Scheduler, pulled: Pulled) -> None:
        self.pulls[pulled.name] = pulled
        self.awaited[pulled.name] = set(self.ranks)
        for rank in self.ranks:
            rank.pull_from(owner, pulled)

    def wait(self, owner: Scheduler, held: Held) -> None:
        for rank in self.ranks:
            rank.wait(owner, held)

    def drop(self, name: str) -> None:
        for rank in self.ranks:
            rank.drop(name)

    def cancel(self, name: str) -> None:
        for rank in self.ranks:
            rank.cancel(name)

    # What they tell it

    def hold_ended(self, rank: Rank, held: Held) -> None:
        if self._is_the_last(rank, held.name):
            self._let_go(self.holds.pop(held.name).blocks, held.name)

    def pull_ended(self, rank: Rank, pulled: Pulled, received: bool) -> None:
        if not received:
            self.failed.add(pulled.name)
        if not self._is_the_last(rank, pulled.name):
            return
        if pulled.name not in self.failed:
            for each in self.ranks:
                each.use(pulled)
        self.outcomes[pulled.name] = "failed" if pulled.name in self.failed else "received"
        self._let_go(self.pulls.pop(pulled.name).blocks, pulled.name)

    def lose_what_came(self) -> None:
        """A rank's memory is gone, and in it what it had received of requests that are still on their way."""
        self.failed |= self.pulls.keys()

    def overwrite(self, blocks: list[int]) -> None:
        for rank in self.ranks:
            rank.overwrite(blocks)

    def _is_the_last(self, rank: Rank, name: str) -> bool:
        awaited = self.awaited[name]
        assert rank in awaited, f"{rank.name} ended {name} twice"
        awaited.discard(rank)
        if not awaited:
            del self.awaited[name]
        return not awaited


class RankedWorld(World):
    """A prefill engine of `owner_size` ranks and a decode engine of `reader_size`."""

    prefill: RankedEngine
    decode: RankedEngine

    def begin(self, *, owner_size: int, reader_size: int, total_heads: int) -> None:
        self.prefill = RankedEngine(self, "prefill", "127.0.0.1", 0.0, owner_size, total_heads)
        self.decode = RankedEngine(self, "decode", "127.0.0.2", 5000.0, reader_size, total_heads)
        self.prefill.start()
        self.decode.start()
        self.settle()
