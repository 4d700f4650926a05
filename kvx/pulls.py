"""The reader's side of a hand-off: greet, claim, move, check, release.

    LOOK UP  where the host is a name: its address, from a thread that may wait for it
    GREET  shake hands with the owner (once for each instance and generation of it)
    CLAIM  the owner answers with its own block ids and how long it keeps them
    MOVE   the planned runs are read; over when every transfer is terminal
    CHECK  only when verifying: our digests of what arrived against the owner's (`pull_check`), which were asked for
           before MOVE

Where the owner has several ranks, a request has a pull from each that holds something for us, or that must be told to
let go; they end as one. Everything here runs on the hand-off thread. A request ends exactly once, as received or as
failed, and not before no transfer touches its blocks any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from kvx.connector import ConnectorState, Op, Transfer, TransferState
from kvx.engine_side import EngineSide, Pull, Waiting
from kvx.errors import (
    ConnectorStateError,
    Crowded,
    HandshakeError,
    KVXError,
    LeaseExpired,
    PeerMismatch,
    StaleGeneration,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from kvx.handshake import (
    Claim,
    Claimed,
    Hello,
    Reply,
    Welcome,
    expect,
)
from kvx.heartbeat import Heartbeat
from kvx.owners import OpenLink, Owners
from kvx.peer import PeerDescriptor
from kvx.plan import Runs, plan
from kvx.pull_check import Checker
from kvx.pull_state import ActivePull, Joint, Owner, Phase
from kvx.sidechannel import Link
from kvx.ticket import Ticket, read_ticket

# The most that one transfer moves: tens of milliseconds where the library copies inside the call.
MOVE_BYTES = 64 << 20


class Puller:
    """All pulls of one engine rank."""

    def __init__(self, side: EngineSide, open_link: OpenLink, close_link: Callable[[Link], None]) -> None:
        self._side = side
        self._owners = Owners(side, open_link, close_link)
        self._joints: dict[str, Joint] = {}
        self._by_transfer: dict[Transfer, ActivePull] = {}
        self._has_begun = False
        self._heartbeat = Heartbeat(side, self._owners, lambda owner: self._owners.open(owner, self._on_opened))
        self._checker = Checker(side, self._guard, self._end_received)

    @property
    def links(self) -> list[Link]:
        return self._owners.links

    @property
    def _active(self) -> list[ActivePull]:
        return [pull for joint in self._joints.values() for pull in joint.pulls]

    @property
    def is_moving(self) -> bool:
        return bool(self._by_transfer)

    def take_begun(self) -> bool:
        """Whether a pull has begun to read since the last call."""
        has_begun, self._has_begun = self._has_begun, False
        return has_begun

    def start(self, spec: Pull, now: float) -> None:
        """Begin; every outcome, refusals included, goes to the outbox.

        ConnectorStateError for a request that is being pulled already: its outcome is the first one's.
        """
        if spec.request_id in self._joints:
            raise ConnectorStateError(f"request {spec.request_id} is being pulled already")
        joint = Joint(spec, now)
        self._joints[spec.request_id] = joint
        pulls: list[ActivePull] = []
        try:
            for each in [spec.of(share) for share in spec.shares] or [spec]:
                owner = self._owners.get(each.host, each.port)
                deadline = now + self._side.settings.transfer_deadline_s
                pull = ActivePull(each, joint, owner, self._side.new_reader_name(), started=now, deadline=deadline)
                pull.span_started = now
                owner.pulls.add(pull)
                joint.pulls.add(pull)
                pulls.append(pull)
        except Crowded as error:
            self._heartbeat.begun(spec.request_id)
            joint.failed = spec, error
            self._fail_each(pulls, error)
            self._end(joint)
            return
        self._heartbeat.begun(spec.request_id)
        for pull in pulls:
            self._guard(pull, self._begin)

    def keep(self, waiting: Waiting, now: float) -> None:
        """Renew a request's hold until its pull begins; where that cannot be, the pull will say why not."""
        if waiting.request_id in self._joints:
            return
        try:
            for rank in waiting.ranks:
                self._require_ticket(replace(waiting, port=waiting.port + rank))
            self._heartbeat.keep(waiting, now)
        except KVXError:
            return

    def cancel(self, request_id: str) -> None:
        """A request of the engine's: the pull ends as failed, once its blocks are safe."""
        joint = self._joints.get(request_id)
        if joint is not None:
            self._fail_each(joint.pulls, TransferCancelled("cancelled by the engine"))

    def on_transfer(self, transfer: Transfer) -> None:
        """A transfer of ours became terminal."""
        pull = self._by_transfer.pop(transfer, None)
        if pull is None:
            return
        pull.transfers.remove(transfer)
        if transfer.state is not TransferState.DONE and pull.cause is None:
            cause = transfer.cause or TransferError(f"a transfer was {transfer.state.value}")
            self._fail(pull, _lease_ended() if self._side.clock() >= pull.kept_until else cause)
        elif not pull.transfers:
            self._guard(pull, self._moved)

    def on_link_lost(self, link: Link, why: HandshakeError) -> None:
        """The owner's process ended, closed the connection or is not understood: nothing more will come."""
        owner = self._owners.of_link(link)
        if owner is None:
            return
        self._heartbeat.lose(owner)
        self._fail_each(owner.pulls, why)
        self._owners.remove(owner)

    def tick(self, now: float) -> None:
        """Leases, and deadlines of everything but transfers, whose deadlines are the connector's."""
        self._heartbeat.tick(now)
        for pull in self._active:
            if pull.phase is Phase.MOVE and now >= pull.kept_until and pull.cause is None:
                self._fail_each([pull], _lease_ended())
            if now >= pull.deadline and pull.phase is not Phase.MOVE and pull.cause is None:
                where = f"{pull.spec.host}:{pull.spec.port}"
                waited = f"within {self._side.settings.transfer_deadline_s:g} s"
                error = TransferTimeout(f"no answer to {pull.phase.value} from engine {where} {waited}")
                self._fail_each([pull], error)
        self._lend_places()
        self._owners.release_due(now)

    def next_time(self) -> float | None:
        times = [pull.deadline for pull in self._active if pull.phase is not Phase.MOVE]
        renewal = self._heartbeat.next_time()
        times += [] if renewal is None else [renewal]
        return min(times + self._owners.release_times(), default=None)

    def suspend(self) -> None:
        """Fail what is on its way: the cache is about to change. Transfers in flight end as in `close`."""
        self._fail_each(self._active, ConnectorStateError("the cache went to sleep or changed; ask again"))

    def close(self) -> None:
        """Fail what is on its way and let go of the owners.

        A pull whose transfer is in flight ends with that: while `is_moving`, go on polling the connectors.
        """
        self._fail_each(self._active, ConnectorStateError("the hand-off was closed"))
        self._heartbeat.close()
        self._owners.close()

    # LOOK UP, GREET

    def _begin(self, pull: ActivePull) -> None:
        """What an HTTP client could have changed is checked before anything is connected to."""
        ticket = self._require_ticket(pull.spec)
        if ticket is not None:
            ticket.require_tokens(pull.spec.first_token + pull.spec.num_tokens)
        self._greet_or_claim(pull)

    def _require_ticket(self, asked: Pull | Waiting) -> Ticket | None:
        """What the owner signed for this hold and place; None where there is no secret."""
        secret = self._side.secret
        if secret is None:
            return None
        ticket = read_ticket(secret, asked.ticket, request_id=asked.remote_request_id, engine_id=asked.remote_engine_id)
        ticket.require_place(asked.host, asked.port)
        return ticket

    def _on_opened(self, owner: Owner, error: KVXError | None) -> None:
        waiting = [pull for pull in owner.pulls if pull.phase is Phase.LOOK_UP and pull.cause is None]
        if error is not None:
            self._heartbeat.lose(owner)
            self._fail_each(waiting, error)
            if not owner.pulls:
                self._owners.remove(owner)
            return
        for pull in waiting:
            self._guard(pull, self._greet_or_claim)

    def _greet_or_claim(self, pull: ActivePull) -> None:
        owner = pull.owner
        if owner.opened is None:
            pull.phase = Phase.LOOK_UP
            self._owners.open(owner, self._on_opened)
            return
        if owner.is_connected:
            self._claim(pull)
            return
        pull.phase = Phase.GREET
        pull.times_greeted += 1
        if not owner.is_greeting:
            owner.link.ask(Hello(sequence=0, engine_id=self._side.info.engine_id), partial(self._on_welcome, owner))
            owner.is_greeting = True

    def _on_welcome(self, owner: Owner, reply: Reply) -> None:
        owner.is_greeting = False
        waiting = [pull for pull in owner.pulls if pull.phase is Phase.GREET and pull.cause is None]
        try:
            self._owners.connect(owner, expect(reply, Welcome), waiting[0].share if waiting else None)
        except KVXError as error:
            if isinstance(error, PeerMismatch):
                self._owners.decline(owner, error)
            self._fail_each(waiting, error)
            return
        for pull in waiting:
            self._guard(pull, self._claim)

    # CLAIM

    def _claim(self, pull: ActivePull) -> None:
        theirs = pull.owner.descriptor
        assert theirs is not None
        if theirs.info.engine_id != pull.spec.remote_engine_id:
            raise PeerMismatch(
                f"engine at {pull.spec.host}:{pull.spec.port}",
                pull.spec.remote_engine_id,
                theirs.info.engine_id,
                "ask the engine that holds the request",
            )
        self._require_heads(pull, theirs)
        now = self._side.clock()
        pull.span("greet", now)
        pull.phase, pull.claim_sent, pull.has_claimed = Phase.CLAIM, now, True
        claim = Claim(
            sequence=0,
            request_id=pull.spec.remote_request_id,
            reader=pull.reader,
            wait_s=max(0.0, pull.deadline - now),
            ticket=pull.spec.ticket if self._side.secret is not None else "",
        )
        if pull.share is not None:
            claim.share = f"{self._side.info.engine_id}/{pull.spec.request_id}"
            claim.claims = pull.share.claims
        pull.owner.link.ask(claim, lambda reply: self._guard(pull, lambda pull: self._on_claimed(pull, reply)))

    def _require_heads(self, pull: ActivePull, theirs: PeerDescriptor) -> None:
        """PeerMismatch: this rank of the owner holds other heads than its share; the other shares would not fit it."""
        if pull.share is None:
            return
        for our_group, their_group, heads in zip(self._side.groups, theirs.groups, pull.share.heads, strict=True):
            if heads is not None and our_group.heads.common(their_group.heads) != heads:
                raise PeerMismatch(
                    "heads",
                    f"{heads} to be read from rank {pull.share.owner_rank}",
                    str(their_group.heads),
                    "pass kv_transfer_params on as prefill gave them",
                )

    def _on_claimed(self, pull: ActivePull, reply: Reply) -> None:
        if pull.phase is not Phase.CLAIM or pull.cause is not None:
            return
        claimed = expect(reply, Claimed)
        theirs = pull.owner.descriptor if pull.owner.is_connected else None
        if theirs is None or (claimed.instance, claimed.generation) != theirs.opening:
            if pull.times_greeted > 1:
                raise StaleGeneration("the owner's regions change faster than they can be read; ask again")
            self._owners.disconnect(pull.owner)
            self._greet_or_claim(pull)
            return
        now = self._side.clock()
        pull.span("claim", now)
        pull.kept_until, pull.held_tokens = pull.claim_sent + claimed.left_s, claimed.num_tokens
        if pull.spec.num_tokens == 0:
            self._end_released(pull)
            return
        self._heartbeat.follow(pull, claimed.left_s)
        self._move(pull, claimed, theirs)

    # MOVE

    def _move(self, pull: ActivePull, claimed: Claimed, theirs: PeerDescriptor) -> None:
        if claimed.num_tokens < pull.spec.first_token + pull.spec.num_tokens:
            raise TransferError(
                f"request {pull.spec.remote_request_id} is held with {claimed.num_tokens} tokens, "
                f"tokens up to {pull.spec.first_token + pull.spec.num_tokens} were asked for"
            )
        pull.claimed_from, pull.moved = theirs, self._plan(pull, claimed, theirs)
        pull.phase = Phase.MOVE
        pull.span("plan", self._side.clock())
        if self._side.verifies:
            self._checker.ask(pull)
        if not len(pull.moved):
            self._moved(pull)
            return
        pull.pieces, self._has_begun = _in_pieces(pull.moved), True
        self._submit_next(pull)

    def _submit_next(self, pull: ActivePull) -> None:
        """Piece by piece: the library may copy inside the call, and the side channel waits meanwhile."""
        owner, asked = pull.owner, pull.claimed_from
        assert asked is not None, "blocks are read of an owner that named them"
        if owner.descriptor is not None and owner.descriptor.opening != asked.opening:
            raise StaleGeneration("the owner's regions changed before everything was read; ask again")
        if owner.connector is not None and owner.connector.state is not ConnectorState.OPEN:
            raise ConnectorStateError(f"connector {owner.connector.name} is closed while the cache changes; ask again")
        if owner.connector is None or owner.peer is None or not owner.peer.connected:
            place = f"{pull.spec.host}:{pull.spec.port}"
            raise TransferError(f"the connection to engine {place} ended before everything was read; ask again")
        deadline_s = min(self._side.settings.transfer_deadline_s, max(0.0, pull.kept_until - self._side.clock()))
        pull.connector = owner.connector
        transfer = pull.connector.submit(Op.READ, owner.peer, pull.pieces.pop(0), deadline_s=deadline_s)
        pull.transfers.append(transfer)
        self._by_transfer[transfer] = pull
        self._side.metrics.descriptors += transfer.num_descriptors

    def _lend_places(self) -> None:
        """A pull in CHECK reads nothing: for each, the oldest other one of its owner reads a piece more at a time.

        Else pulls that began together would be checked together, and nothing be read meanwhile. So as many pieces are
        on their way as without verifying, and no pull waits for another one's.
        """
        spare = Counter(pull.owner for pull in self._active if pull.phase is Phase.CHECK and pull.cause is None)
        if not spare:
            return
        moving = [pull for pull in self._active if pull.transfers and pull.cause is None]
        for pull in moving:
            spare[pull.owner] -= len(pull.transfers) - 1
        for pull in moving:
            while pull.pieces and pull.cause is None and spare[pull.owner] > 0:
                self._guard(pull, self._submit_next)
                spare[pull.owner] -= 1

    def _plan(self, pull: ActivePull, claimed: Claimed, theirs: PeerDescriptor) -> Runs:
        if len(claimed.blocks) != len(self._side.groups):
            raise PeerMismatch("layer groups of the held blocks", len(self._side.groups), len(claimed.blocks))
        spec = pull.spec
        sources = self._side.injected_swap(claimed.blocks, theirs, spec.blocks, spec.first_token, spec.num_tokens)
        return Runs.concat(
            plan(
                their_group,
                np.array(source, dtype=np.int64),
                our_group,
                np.array(wanted, dtype=np.int64),
                first_token=pull.spec.first_token,
                num_tokens=pull.spec.num_tokens,
                source_num_blocks=theirs.num_blocks,
                destination_num_blocks=self._side.num_blocks,
            )
            for their_group, source, our_group, wanted in zip(
                theirs.groups, sources, self._side.groups, pull.spec.blocks, strict=True
            )
        )

    def _moved(self, pull: ActivePull) -> None:
        """No transfer is in flight."""
        if pull.cause is not None:
            self._end_failed(pull)
            return
        if pull.pieces:
            self._submit_next(pull)
            return
        now = self._side.clock()
        pull.span("move", now)
        if now >= pull.kept_until:
            raise _lease_ended()
        if self._side.verifies:
            self._checker.start(pull, now)
        else:
            self._end_received(pull)

    # The end

    def _guard(self, pull: ActivePull, step: Callable[[ActivePull], None]) -> None:
        """Run a step of a pull that is still on its way; what it raises is that pull's failure and no one else's."""
        if pull not in pull.joint.pulls:
            return
        try:
            step(pull)
        except KVXError as error:
            self._fail(pull, error)
        except Exception as error:  # noqa: BLE001  logged with its trace
            self._side.internal_error(f"pull of request {pull.spec.request_id}")
            self._fail(pull, TransferError(f"internal error: {error!r}"))

    def _fail(self, pull: ActivePull, cause: KVXError) -> None:
        """End as failed, now or when the last transfer is terminal, and its request with it. The first cause counts."""
        joint = pull.joint
        if pull not in joint.pulls:
            return  # it ended with another one of its request
        if pull.cause is None:
            pull.cause = cause
            self._heartbeat.leave(pull)
            for transfer in list(pull.transfers):
                # Not the owner's connector: the owner may be gone, and its transfers still have to drain.
                assert pull.connector is not None, "a transfer was submitted, so something moves it"
                pull.connector.cancel(transfer)
            # A rank of which nothing is read may keep its blocks until their lease ends: nothing is missing here.
            if joint.failed is None and (pull.spec.num_tokens or not joint.spec.num_tokens):
                joint.failed = pull.spec, cause
                self._fail_each(joint.pulls - {pull}, cause)
        if not pull.transfers:
            self._end_failed(pull)

    def _fail_each(self, pulls: Iterable[ActivePull], cause: KVXError) -> None:
        """Trouble with one does not keep the others from ending."""
        for pull in list(pulls):
            try:
                self._fail(pull, cause)
            except Exception:  # noqa: BLE001  the same
                self._side.internal_error(f"pull of request {pull.spec.request_id}")

    def _end_failed(self, pull: ActivePull) -> None:
        self._forget(pull)
        assert pull.cause is not None, "what failed has a cause"
        if pull.spec.num_tokens:
            self._trace(pull, pull.cause.cause)
        self._end(pull.joint)

    def _end(self, joint: Joint) -> None:
        """Tell the engine how its request ended, when the last of its pulls has: no transfer touches its blocks."""
        if joint.pulls or joint.is_over:
            return
        joint.is_over = True
        self._joints.pop(joint.spec.request_id, None)
        metrics = self._side.metrics
        if joint.failed is not None:
            spec, cause = joint.failed
            if joint.spec.num_tokens:
                metrics.failure(cause.cause)
            self._side.fail(spec, cause)
            return
        if joint.spec.num_tokens:
            metrics.received += 1
            metrics.blocks += self._side.count_blocks(joint.spec)
            metrics.durations_s.append(self._side.clock() - joint.started)
        else:
            metrics.released_only += 1
        self._side.receive(joint.spec.request_id)

    def _end_released(self, pull: ActivePull) -> None:
        """It had nothing to move: its claim was only to tell the owner that the blocks are not needed."""
        self._forget(pull)
        self._end(pull.joint)

    def _end_received(self, pull: ActivePull) -> None:
        self._drop(pull)
        metrics = self._side.metrics
        metrics.transfers += 1
        if pull.connector is not None:
            metrics.by_connector[pull.connector.name] = metrics.by_connector.get(pull.connector.name, 0) + 1
        metrics.bytes += pull.moved.total_bytes
        metrics.spans_s.append(pull.spans_s)
        self._trace(pull, "received")
        self._end(pull.joint)
        self._owners.release_soon(pull, self._side.clock())

    def _trace(self, pull: ActivePull, outcome: str) -> None:
        if self._side.tracer is None:
            return
        spec = pull.spec
        attributes: dict[str, str | int] = {
            "kvx.outcome": outcome,
            "kvx.decode_request_id": spec.request_id,
            "kvx.peer": f"{spec.remote_engine_id} at {spec.host}:{spec.port}",
            "kvx.connector": "" if pull.connector is None else pull.connector.name,
            "kvx.tokens": spec.num_tokens,
            "kvx.bytes": pull.moved.total_bytes,
        }
        self._side.tracer.handed_off(spec.remote_request_id, pull.started, pull.spans_s, attributes)

    def _forget(self, pull: ActivePull) -> None:
        self._drop(pull)
        self._owners.release(pull)

    def _drop(self, pull: ActivePull) -> None:
        self._heartbeat.leave(pull)
        pull.joint.pulls.discard(pull)
        pull.owner.pulls.discard(pull)


def _lease_ended() -> LeaseExpired:
    return LeaseExpired("the owner's lease ended before everything was read; what was read may be stale")


def _in_pieces(runs: Runs) -> list[Runs]:
    """The runs in order, cut between runs into pieces of about MOVE_BYTES."""
    sizes = runs.array["length"] * runs.array["count"]
    piece = (np.cumsum(sizes) - sizes) // MOVE_BYTES
    cuts = np.flatnonzero(np.diff(piece)) + 1
    return [Runs(part) for part in np.split(runs.array, cuts)]
