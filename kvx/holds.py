"""The owner's side of a hand-off: blocks kept for a reader until it has read them, or until the lease ends.

An unclaimed hold ends with its lease, which its reader renews; a claimed one at most `grace_s` later. Its readers are
told how long they have and discard what they read after that, so a block is never taken for good after the owner let
go of it.

Several pulls may read one hold: the samples of a request with n > 1, or a router's second attempt. It ends with the
last of those that claimed it. One that claims later is refused: the blocks may have other content by then. Where the
ranks of one engine read it, each with a pull of its own (a share), the first claim says how many come, and all of them
are waited for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import takewhile

from kvx.digest import GroupDigests
from kvx.errors import Crowded, HandshakeError, LeaseExpired, StaleGeneration
from kvx.handshake import Claim, Claimed, DigestPage, Digests, Message, Refused, Renew, Renewed

KEPT_ENDINGS = 4096
# More pulls than this at one hold are a mistake; claims come from outside and must not fill the memory.
MOST_READERS = 1024
# The same for claims of requests that are not held yet.
MOST_PARKED = 4096
DigestsFuture = Future[list[GroupDigests]]
Send = Callable[[bytes, Message], None]


class Ending(StrEnum):
    """How a hold ended, as its late readers are told."""

    RELEASED = "was released: its readers are done"
    ABORTED = "was aborted by its owner"
    EXPIRED = "is kept no longer: its lease ran out"
    CHANGED = "is kept no longer: its owner's cache changed"


_CAUSES = {Ending.EXPIRED: LeaseExpired.cause, Ending.CHANGED: StaleGeneration.cause}


@dataclass(eq=False)
class Hold:
    """One request's blocks per layer group, by position. Times are monotonic.

    Renewals move `expires` to a lease from then, and never beyond `latest`.
    """

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int
    expires: float
    lease_s: float = 0.0
    latest: float = 0.0
    digests: DigestsFuture | None = None
    readers: dict[str, str] = field(default_factory=dict)  # pulls that claimed it and are not done, and their share
    awaited: dict[str, int] = field(default_factory=dict)  # by share, how many of its pulls are not done
    # For the injection `stale` only: reported as released already, and not answered before its blocks are reused.
    is_freed: bool = False
    is_awaiting_reuse: bool = False

    @cached_property
    def distinct_blocks(self) -> frozenset[int]:
        """Asked for with every change of the metrics, and block lists may be long."""
        return frozenset(block for group in self.blocks for block in group if block >= 0)

    def rewrites(self, other: Hold) -> bool:
        """Whether it surely has content of its own in a block of `other`, in the same layer group.

        Blocks that both begin with may be a prefix that they share, whose content is the same.
        """
        for ours, theirs in zip(self.blocks, other.blocks, strict=True):
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            if any(block >= 0 and block in theirs for block in ours[shared:]):
                return True
        return False


@dataclass(eq=False)
class _ParkedClaim:
    sender: bytes
    claim: Claim
    until: float


@dataclass
class HoldTable:
    """Pure state: knows no clock, socket or thread. `instance` and `generation` go into claim replies."""

    instance: str
    grace_s: float
    send: Send
    generation: int = 0
    is_suspended: bool = False
    holds: dict[str, Hold] = field(default_factory=dict)
    _parked: list[_ParkedClaim] = field(default_factory=list)
    _endings: OrderedDict[str, Ending] = field(default_factory=OrderedDict)

    @property
    def num_held(self) -> int:
        return sum(not hold.is_freed for hold in list(self.holds.values()))  # also read by other threads

    @property
    def num_blocks_held(self) -> int:
        """Blocks of all holds, each counted once: requests may share a prefix."""
        kept = [hold.distinct_blocks for hold in list(self.holds.values()) if not hold.is_freed]
        return len(frozenset().union(*kept))

    @property
    def is_being_read(self) -> bool:
        return any(hold.readers for hold in self.holds.values())

    def add(self, hold: Hold, now: float) -> None:
        """Keep a request's blocks; a claim that came before them is answered now."""
        self.holds[hold.request_id] = hold
        self._endings.pop(hold.request_id, None)
        self.answer_parked(hold.request_id, now)

    def claim(self, sender: bytes, claim: Claim, now: float) -> None:
        """Answer with the hold's own block ids; park the claim of a request that is not known yet."""
        hold = self.holds.get(claim.request_id)
        is_unknown = hold is None and claim.request_id not in self._endings
        must_wait = is_unknown or (hold is not None and hold.is_awaiting_reuse)
        if must_wait and len(self._parked) >= MOST_PARKED:
            reason = f"request {claim.request_id} is not held here, and {MOST_PARKED} claims wait"
            self._refuse(sender, claim, reason, Crowded.cause)
        elif must_wait:
            self._parked.append(_ParkedClaim(sender, claim, now + claim.wait_s))
        elif hold is None:
            self._refuse_ended(sender, claim)
        elif self.is_suspended and claim.reader not in hold.readers:
            reason = f"request {claim.request_id} cannot be read: its owner's cache is changing"
            self._refuse(sender, claim, reason, StaleGeneration.cause)
        elif max(len(hold.readers), len(hold.awaited)) >= MOST_READERS and claim.reader not in hold.readers:
            reason = f"request {claim.request_id} is being read by {MOST_READERS} pulls already"
            self._refuse(sender, claim, reason, Crowded.cause)
        else:
            share = claim.share if claim.claims > 1 else ""
            if share and claim.reader not in hold.readers:
                hold.awaited.setdefault(share, claim.claims)
            hold.readers[claim.reader] = share
            self.send(sender, self._claimed(hold, claim.sequence, now))

    def renew(self, sender: bytes, ask: Renew, now: float) -> bool:
        """Answer with how long a hold is kept from now on, and True; or refuse it."""
        hold = self.holds.get(ask.request_id)
        if hold is None and ask.request_id in self._endings:
            self._refuse_ended(sender, ask)
        elif hold is None:
            self._refuse(sender, ask, f"request {ask.request_id} is not held here")
        elif self.is_suspended:
            reason = f"request {ask.request_id} is not kept any longer: its owner's cache is changing"
            self._refuse(sender, ask, reason, StaleGeneration.cause)
        else:
            hold.expires = max(hold.expires, min(now + hold.lease_s, hold.latest))
            self.send(sender, Renewed(sequence=ask.sequence, request_id=ask.request_id, left_s=self._left_s(hold, now)))
            return True
        return False

    def answer_parked(self, request_id: str, now: float) -> None:
        """Claims of this request again, in the order they came."""
        ready = [parked for parked in self._parked if parked.claim.request_id == request_id]
        self._parked = [parked for parked in self._parked if parked.claim.request_id != request_id]
        for parked in ready:
            self.claim(parked.sender, parked.claim, now)

    def release(self, request_id: str, reader: str) -> bool:
        """A reader is done or gave up; True when a hold ended by it. A claim still parked is refused."""
        for parked in [item for item in self._parked if item.claim.request_id == request_id]:
            if parked.claim.reader == reader:
                self._parked.remove(parked)
                self._refuse(parked.sender, parked.claim, f"the claim of request {request_id} was withdrawn")
        hold = self.holds.get(request_id)
        if hold is None or reader not in hold.readers:
            return False
        share = hold.readers.pop(reader)
        if share in hold.awaited:
            hold.awaited[share] -= 1
            if not hold.awaited[share]:
                del hold.awaited[share]
        if hold.readers or hold.awaited:
            return False
        self._end(hold, Ending.RELEASED)
        return not hold.is_freed

    def drop(self, request_id: str) -> bool:
        """Local abort; True when the hold ended now. One that is being read ends with its readers or its lease."""
        hold = self.holds.get(request_id)
        if hold is None or hold.readers:
            return False
        self._end(hold, Ending.ABORTED)
        self._refuse_parked(request_id)
        return True

    def expire(self, now: float) -> list[str]:
        """Requests whose hold has ended by time, for good; parked claims past their time are refused."""
        ended = [hold for hold in self.holds.values() if now >= self._ends(hold)]
        for hold in ended:
            self._end(hold, Ending.EXPIRED)
            self._refuse_parked(hold.request_id)
        for parked in [item for item in self._parked if now >= item.until]:
            self._parked.remove(parked)
            self._refuse(parked.sender, parked.claim, f"request {parked.claim.request_id} is not held here")
        return [hold.request_id for hold in ended if not hold.is_freed]

    def suspend(self) -> list[str]:
        """The memory is about to go: requests whose hold has ended, those that nobody reads; no more are claimed.

        The others end with their readers or their lease, as always: what a reader was promised is kept.
        """
        self.is_suspended = True
        ended = [hold for hold in self.holds.values() if not hold.readers]
        for hold in ended:
            self._end(hold, Ending.CHANGED)
            self._refuse_parked(hold.request_id)
        return [hold.request_id for hold in ended if not hold.is_freed]

    def next_time(self) -> float | None:
        """When `expire` has something to do."""
        times = [self._ends(hold) for hold in self.holds.values()] + [parked.until for parked in self._parked]
        return min(times, default=None)

    def digest_page(self, ask: Digests) -> DigestPage:
        """Digests that the hold's owner took. HandshakeError when they are not there (the future is done)."""
        hold = self.holds.get(ask.request_id)
        if hold is None or hold.digests is None or not hold.digests.done():
            raise HandshakeError(f"no digests of request {ask.request_id} are kept here")
        if hold.digests.cancelled() or hold.digests.exception() is not None:
            raise HandshakeError(f"the digests of request {ask.request_id} could not be taken")
        groups = hold.digests.result()
        if ask.group >= len(groups):
            raise HandshakeError(f"request {ask.request_id} has {len(groups)} layer groups, asked for {ask.group}")
        group = groups[ask.group]
        tokens = slice(ask.first_token, ask.first_token + ask.num_tokens)
        heads = slice(ask.head_start, ask.head_start + ask.head_count)
        values = group.values[heads, tokens]
        if values.shape[:2] != (ask.head_count, ask.num_tokens) or not group.present[tokens].all():
            raise HandshakeError(f"request {ask.request_id} has no digests of all of tokens {tokens}, heads {heads}")
        return DigestPage(sequence=ask.sequence, request_id=ask.request_id, digests=values.tobytes())

    def _claimed(self, hold: Hold, sequence: int, now: float) -> Claimed:
        return Claimed(
            sequence=sequence,
            request_id=hold.request_id,
            instance=self.instance,
            generation=self.generation,
            blocks=[list(blocks) for blocks in hold.blocks],
            num_tokens=hold.num_tokens,
            left_s=self._left_s(hold, now),
        )

    def _left_s(self, hold: Hold, now: float) -> float:
        return min(max(0.0, self._ends(hold) - now), 86400.0)

    def _ends(self, hold: Hold) -> float:
        return hold.expires + (self.grace_s if hold.readers else 0.0)

    def _end(self, hold: Hold, ending: Ending) -> None:
        del self.holds[hold.request_id]
        self._endings[hold.request_id] = ending
        while len(self._endings) > KEPT_ENDINGS:
            self._endings.popitem(last=False)

    def _refuse_parked(self, request_id: str) -> None:
        for parked in [item for item in self._parked if item.claim.request_id == request_id]:
            self._parked.remove(parked)
            self._refuse_ended(parked.sender, parked.claim)

    def _refuse(self, sender: bytes, claim: Claim | Renew, reason: str, cause: str = "") -> None:
        self.send(sender, Refused(sequence=claim.sequence, reason=reason, cause=cause))

    def _refuse_ended(self, sender: bytes, claim: Claim | Renew) -> None:
        ending = self._endings[claim.request_id]
        self._refuse(sender, claim, f"request {claim.request_id} {ending.value}", _CAUSES.get(ending, ""))


def stale_covered(holds: Iterable[Hold], new: Hold) -> list[Hold]:
    """Holds that were freed early, and of which `new` rewrites a block."""
    return [hold for hold in holds if hold.is_awaiting_reuse and new.rewrites(hold)]
