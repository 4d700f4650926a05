"""The owner's half of the hand-off: keeps holds, answers readers. Everything here runs on the hand-off thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvx import inject
from kvx.engine_side import EngineSide
from kvx.errors import Crowded, HandshakeError, KVXError, TicketRefused
from kvx.handshake import (
    REFUSALS,
    Claim,
    Declined,
    Digests,
    Fetch,
    Fetched,
    Hello,
    Message,
    Refused,
    RefusedMessage,
    Release,
    Renew,
    Request,
    StatusReply,
    welcome,
)
from kvx.holds import Hold, HoldTable, stale_covered
from kvx.metrics import is_logged
from kvx.sidechannel import reason_of
from kvx.ticket import read_ticket

logger = logging.getLogger(__name__)

# A connection is set up with the peer's first transfer: after a HELLO we progress the library for it.
SETUP_S = 1.0
# How long our connectors are looked at after a reader has gone. One that gave up has closed connections that UCX, over
# TCP, still has bytes to send on; where it learns of that all at once and later, it ends the process (ADR 7).
PARTING_S = 3.0
# Questions for digests that are being taken; more of them are refused.
MOST_WAITING = 4096
# What a FETCH is given to, with the call that answers it, from any thread.
OnFetch = Callable[[Fetch, Callable[[Fetched], None]], None]


class Holder:
    """All holds of one engine rank. `send` answers a reader; `status` is what a STATUS request gets.

    `on_fetch`: what a FETCH request is given to; without, it is refused.
    """

    def __init__(
        self,
        side: EngineSide,
        send: Callable[[bytes, Message], None],
        status: Callable[[], dict[str, Any]],
        on_fetch: OnFetch | None = None,
    ) -> None:
        self._side, self._send, self._status, self._on_fetch = side, send, status, on_fetch
        self._table = HoldTable(side.instance, side.settings.grace_s, send)
        self._waiting_digests: list[tuple[bytes, Digests]] = []
        self._stale: list[tuple[Hold, float]] = []
        self.setup_until = 0.0
        self.parting_until = 0.0

    @property
    def num_held(self) -> int:
        return self._table.num_held

    @property
    def num_blocks_held(self) -> int:
        return self._table.num_blocks_held

    @property
    def is_empty(self) -> bool:
        return not self._table.holds

    @property
    def is_being_read(self) -> bool:
        return self._table.is_being_read

    def next_time(self) -> float | None:
        """When `expire` has something to do."""
        times = [time for time in (self._table.next_time(), *(until for _, until in self._stale)) if time is not None]
        return min(times, default=None)

    def add(self, hold: Hold) -> None:
        """Keep a request's blocks."""
        for freed in stale_covered(self._table.holds.values(), hold):
            self._reused(freed)
        if self._side.tracer is not None:
            self._side.tracer.hold_began(hold.request_id)
        hold.is_freed = hold.is_awaiting_reuse = self._side.injector.take(inject.Fault.STALE)
        self._table.add(hold, self._side.clock())

    def drop(self, request_id: str) -> None:
        """The engine aborts a hold."""
        if self._table.drop(request_id):
            self._released(request_id)

    def expire(self, now: float) -> None:
        """End what time has ended."""
        for hold, until in [item for item in self._stale if now >= item[1]]:
            self._stale.remove((hold, until))
            if hold.is_awaiting_reuse:  # the engine has not reused a block of it by itself
                self._side.injected_reuse(hold.blocks)
                self._reused(hold)
        was_read, ended = self._table.is_being_read, self._table.expire(now)
        if was_read and ended:
            self.parting_until = now + PARTING_S
        self._expired(ended)

    def suspend(self) -> None:
        """The cache is about to change: holds that nobody reads end now, the others as soon as they are read."""
        self._stale.clear()
        self._expired(self._table.suspend())

    def resume(self, generation: int) -> None:
        self._table.generation, self._table.is_suspended = generation, False

    def on_digests(self, hold: Hold) -> None:
        """The digests of a hold are there, or will never be: readers that wait for some are answered."""
        waiting, self._waiting_digests = self._waiting_digests, []
        for sender, ask in waiting:
            self.answer(sender, ask)
        if hold.is_freed:
            self._released(hold.request_id)
            if self._table.holds.get(hold.request_id) is hold:
                self._stale.append((hold, self._side.clock() + inject.STALE_WAIT_S))

    def answer(self, sender: bytes, request: Request | RefusedMessage) -> None:
        """Every request but RELEASE and DECLINED gets a reply, if only a refusal."""
        if isinstance(request, RefusedMessage):
            self._refuse(sender, request)
            return
        try:
            self._answer(sender, request)
        except KVXError as error:
            if isinstance(error, TicketRefused):
                self._count_refusal(error.cause, error)
            cause = error.cause if error.cause in REFUSALS else ""
            self._send(sender, Refused(sequence=request.sequence, reason=reason_of(error), cause=cause))

    def _refuse(self, sender: bytes, refused: RefusedMessage) -> None:
        self._count_refusal(refused.cause, refused)
        self._send(sender, Refused(sequence=refused.sequence, reason=refused.reply or reason_of(refused)))

    def _count_refusal(self, cause: str, error: KVXError) -> None:
        """What others send must not fill the log."""
        count = self._side.metrics.refuse(cause)
        if is_logged(count):
            logger.warning("refused a side channel message (%s no. %d): %r", cause, count, reason_of(error))

    def _answer(self, sender: bytes, request: Request) -> None:
        now = self._side.clock()
        match request:
            case Hello():
                self.setup_until = now + SETUP_S
                self._send(sender, welcome(request.sequence, self._side.describe()))
            case Declined():
                self._declined(request)
            case Claim():
                self._check_ticket(request)
                self._table.claim(sender, request, now)
            case Renew():
                self._side.metrics.renewed += self._table.renew(sender, request, now)
            case Release():
                self.parting_until = now + PARTING_S
                if self._table.release(request.request_id, request.reader):
                    self._released(request.request_id)
            case Digests():
                self._answer_digests(sender, request)
            case Fetch():
                self._fetch(sender, request)
            case _:
                self._send(sender, StatusReply(sequence=request.sequence, status=self._status()))

    def _declined(self, declined: Declined) -> None:
        """Ours is the side that prefills: who looks at its log learns as much as who looks at the reader's."""
        count = self._side.metrics.refuse("mismatch")
        if is_logged(count):
            heading, *lines = [line.strip() for line in declined.reason.splitlines()] or [""]
            reason = f"{heading} {'; '.join(lines)}".strip()
            logger.warning("engine %r cannot read from this one (no. %d): %r", declined.engine_id, count, reason)

    def _fetch(self, sender: bytes, ask: Fetch) -> None:
        """HandshakeError: this engine is no half of a diagnosis."""
        if self._on_fetch is None:
            raise HandshakeError("this engine is in service and fetches nothing; start `kvx doctor --serve` for that")
        self._on_fetch(ask, lambda fetched: self._side.post(lambda: self._send(sender, fetched)))

    def _check_ticket(self, claim: Claim) -> None:
        """TicketRefused: there is a secret, and no ticket of ours for just this hold.

        StaleGeneration, LeaseExpired: it is of an earlier process of ours, or came too late.
        """
        if self._side.secret is None:
            return
        engine_id = self._side.info.engine_id
        ticket = read_ticket(self._side.secret, claim.ticket, request_id=claim.request_id, engine_id=engine_id)
        ticket.require_instance(self._side.instance)
        hold = self._table.holds.get(claim.request_id)
        if hold is not None and hold.num_tokens != ticket.num_tokens:
            raise TicketRefused(
                f"the ticket of request {claim.request_id} has {ticket.num_tokens} tokens, its hold {hold.num_tokens}"
            )

    def _answer_digests(self, sender: bytes, ask: Digests) -> None:
        hold = self._table.holds.get(ask.request_id)
        is_early = hold is not None and hold.digests is not None and not hold.digests.done()
        if is_early and len(self._waiting_digests) >= MOST_WAITING:
            raise Crowded(f"{MOST_WAITING} questions for digests wait already; those of {ask.request_id} are not ready")
        if is_early:
            self._waiting_digests.append((sender, ask))
            return
        self._send(sender, self._table.digest_page(ask))

    def _released(self, request_id: str) -> None:
        self._side.metrics.released += 1
        self._trace([request_id], "released")
        self._side.outbox.put(released=[request_id])

    def _expired(self, request_ids: list[str]) -> None:
        if request_ids:
            self._side.metrics.expired += len(request_ids)
            self._trace(request_ids, "expired")
            self._side.outbox.put(expired=request_ids)

    def _trace(self, request_ids: Sequence[str], outcome: str) -> None:
        if self._side.tracer is not None:
            for request_id in request_ids:
                self._side.tracer.hold_ended(request_id, outcome)

    def _reused(self, hold: Hold) -> None:
        """A hold that was freed early has other content now: let its reader read that."""
        hold.is_awaiting_reuse = False
        self._table.answer_parked(hold.request_id, self._side.clock())
