"""The records of the reader's side: a pull on its way, and the engine that it reads from. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvx.connector import Connector, Transfer
from kvx.digest_check import DigestCheck
from kvx.engine_side import Pull
from kvx.errors import KVXError
from kvx.peer import Peer, PeerDescriptor
from kvx.plan import Runs
from kvx.ranks import Share
from kvx.sidechannel import Link


@dataclass(eq=False)
class Owner:
    """All that is known about one engine that we read from: its link, its descriptor, its connector's peer.

    `place` is the host and port that it was asked for by; there is no link before the host has an address.
    """

    place: tuple[str, int]
    opened: Link | None = None
    is_looked_up: bool = False
    descriptor: PeerDescriptor | None = None
    connector: Connector | None = None
    peer: Peer | None = None
    is_greeting: bool = False
    pulls: set[ActivePull] = field(default_factory=set)
    beats: set[Beat] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        """Nobody needs it now."""
        return not self.pulls and not self.beats

    @property
    def link(self) -> Link:
        assert self.opened is not None, "nothing is said before the host has an address"
        return self.opened

    @property
    def is_connected(self) -> bool:
        return self.descriptor is not None and self.peer is not None and self.peer.connected


@dataclass(eq=False)
class Beat:
    """One hold that is renewed. `due`: when next, None while an answer is awaited and after the last."""

    owner: Owner
    request_id: str
    due: float | None
    kept_until: float = 0.0
    on_kept: Callable[[float], None] | None = None


class Phase(StrEnum):
    LOOK_UP = "name look-up"
    GREET = "greet"
    CLAIM = "claim"
    MOVE = "move"
    CHECK = "check"


@dataclass(eq=False)
class Joint:
    """The pulls of one request, one from each rank of the owner, that end as one: `pulls` are those on their way.

    `failed`: the first that failed, and why.
    """

    spec: Pull
    started: float
    pulls: set[ActivePull] = field(default_factory=set)
    failed: tuple[Pull, KVXError] | None = None
    is_over: bool = False


@dataclass(eq=False)
class ActivePull:
    """One pull on its way. Times are monotonic; `kept_until` is our own clock's bound on the owner's lease.

    `reader` is this pull's name to the owner: no other pull has it, not even a later one of the same request.
    `claimed_from`: the owner as it was when its block ids came; they mean nothing in a later opening.
    """

    spec: Pull
    joint: Joint
    owner: Owner
    reader: str
    started: float
    deadline: float
    phase: Phase = Phase.GREET
    claim_sent: float = 0.0
    kept_until: float = 0.0
    has_claimed: bool = False
    claimed_from: PeerDescriptor | None = None
    held_tokens: int = 0
    times_greeted: int = 0
    connector: Connector | None = None  # that moves `transfers`
    transfers: list[Transfer] = field(default_factory=list)
    cause: KVXError | None = None
    moved: Runs = field(default_factory=Runs.empty)
    beat: Beat | None = None
    pieces: list[Runs] = field(default_factory=list)
    check: DigestCheck | None = None
    spans_s: dict[str, float] = field(default_factory=dict)
    span_started: float = 0.0

    @property
    def share(self) -> Share | None:
        """None where its one owner has all."""
        return self.spec.shares[0] if self.spec.shares else None

    def span(self, name: str, now: float) -> None:
        """The step `name` ends now, and the next one begins."""
        self.spans_s[name] = now - self.span_started
        self.span_started = now
