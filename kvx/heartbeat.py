"""Renews leases from the reader's side: of requests that wait for their turn, and of pulls on their way.

A renewal goes out at a third of what is left; it ends when the owner refuses, or gives no more (`max_hold_s`). An owner
that does not answer is not asked again: what it promised last is what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvx.engine_side import EngineSide, Waiting
from kvx.errors import Crowded
from kvx.handshake import Renew, Renewed, Reply
from kvx.owners import Owners
from kvx.pull_state import ActivePull, Beat, Owner

# When the hold of a request that waits for its turn is first renewed, since most pulls begin at once; sooner where a
# third of our own lease is shorter.
FIRST_RENEWAL_S = 1.0
# However short a lease is, its owner is not asked more often; nor is it looked more often whether it has an address.
SHORTEST_BEAT_S = 0.05
# A renewal that brings less than this share of what is left was the last one.
LEAST_GAIN = 0.1


class Heartbeat:
    """All renewals of one engine rank. `open_owner` gives an owner a link. Times are monotonic."""

    def __init__(self, side: EngineSide, owners: Owners, open_owner: Callable[[Owner], None]) -> None:
        self._side, self._owners, self._open_owner = side, owners, open_owner
        self._beats: set[Beat] = set()
        self._waiting: dict[str, list[Beat]] = {}  # by our request, one for each rank of the owner

    def keep(self, waiting: Waiting, now: float) -> None:
        """Renew the hold of a request until its pull has `begun`. Crowded: as `Owners.get`."""
        self.begun(waiting.request_id)
        due = now + min(FIRST_RENEWAL_S, self._side.settings.lease_s / 3)
        beats = self._waiting[waiting.request_id] = []
        for rank in waiting.ranks:
            beats.append(Beat(self._owners.get(waiting.host, waiting.port + rank), waiting.remote_request_id, due))
            self._add(beats[-1])

    def begun(self, request_id: str) -> None:
        """The request waits no longer."""
        for beat in self._waiting.pop(request_id, []):
            self._stop(beat)

    def follow(self, pull: ActivePull, left_s: float) -> None:
        """Renew what the pull has claimed, until `leave`."""
        due = pull.claim_sent + max(SHORTEST_BEAT_S, left_s / 3)
        pull.beat = Beat(pull.owner, pull.spec.remote_request_id, due, pull.kept_until, partial(self._kept, pull))
        self._add(pull.beat)

    def leave(self, pull: ActivePull) -> None:
        """Idempotent."""
        beat, pull.beat = pull.beat, None
        if beat is not None:
            self._stop(beat)

    def lose(self, owner: Owner) -> None:
        """There is nobody to be asked any more."""
        self._beats -= owner.beats
        owner.beats.clear()

    def close(self) -> None:
        for beat in list(self._beats):
            self._discard(beat)
        self._waiting.clear()

    def tick(self, now: float) -> None:
        for beat in [beat for beat in self._beats if beat.due is not None and now >= beat.due]:
            if beat not in self._beats or not self._owners.is_kept(beat.owner):
                self._discard(beat)
            elif beat.owner.opened is None:
                beat.due = now + SHORTEST_BEAT_S
                self._open_owner(beat.owner)
            else:
                beat.due = None
                self._ask(beat, now)

    def next_time(self) -> float | None:
        return min((beat.due for beat in self._beats if beat.due is not None), default=None)

    def _ask(self, beat: Beat, now: float) -> None:
        try:
            beat.owner.link.ask(Renew(sequence=0, request_id=beat.request_id), partial(self._on_reply, beat, now))
        except Crowded:  # its link is full: it has stopped reading
            self._stop(beat)

    def _on_reply(self, beat: Beat, asked: float, reply: Reply) -> None:
        if beat not in self._beats:
            return
        if not isinstance(reply, Renewed):
            self._stop(beat)
            return
        kept_until = asked + reply.left_s
        gained, beat.kept_until = kept_until - beat.kept_until, max(beat.kept_until, kept_until)
        if beat.on_kept is not None:
            beat.on_kept(beat.kept_until)
        if gained > reply.left_s * LEAST_GAIN:
            beat.due = asked + max(SHORTEST_BEAT_S, reply.left_s / 3)

    def _kept(self, pull: ActivePull, until: float) -> None:
        """What is in flight may go on for as long, within its own deadline."""
        pull.kept_until = until
        for transfer in pull.transfers:
            submitted = transfer.deadline - transfer.deadline_s
            transfer.deadline = min(submitted + self._side.settings.transfer_deadline_s, until)
            transfer.deadline_s = transfer.deadline - submitted

    def _stop(self, beat: Beat) -> None:
        """An owner that was only asked to renew is forgotten with its last beat."""
        self._discard(beat)
        if beat.owner.descriptor is None and beat.owner.is_idle:
            self._owners.remove(beat.owner)

    def _add(self, beat: Beat) -> None:
        self._beats.add(beat)
        beat.owner.beats.add(beat)

    def _discard(self, beat: Beat) -> None:
        self._beats.discard(beat)
        beat.owner.beats.discard(beat)
