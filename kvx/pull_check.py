"""CHECK, the last step of a pull when verifying: our digests of what arrived against those that the owner took."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvx.digest import GroupDigests
from kvx.digest_check import DigestCheck
from kvx.engine_side import EngineSide
from kvx.errors import VerificationError
from kvx.handshake import DigestPage, Digests, Reply, expect
from kvx.pull_state import ActivePull, Phase

Step = Callable[[ActivePull], None]


class Checker:
    """`guard` runs a step of a pull that is still on its way; `passed` ends one whose digests agree."""

    def __init__(self, side: EngineSide, guard: Callable[[ActivePull, Step], None], passed: Step) -> None:
        self._side, self._guard, self._passed = side, guard, passed

    def ask(self, pull: ActivePull) -> None:
        """Ask for the owner's digests, which come while the pull reads."""
        spec, theirs = pull.spec, pull.claimed_from
        assert theirs is not None, "what is read has an owner that named its blocks"
        check = pull.check = DigestCheck(
            spec.remote_request_id, spec.blocks, spec.first_token, spec.num_tokens, self._side.groups, theirs.groups,
            pull.held_tokens if self._side.settings.verify == "sample" else None,
            None if pull.share is None else pull.share.heads,
        )  # fmt: skip
        for ask in check.asks:
            pull.owner.link.ask(ask, partial(self._on_page, pull, check, ask))

    def start(self, pull: ActivePull, now: float) -> None:
        """Everything was read: take our own digests."""
        spec, check = pull.spec, pull.check
        assert check is not None, "the owner's were asked for before"
        self._side.injected_flip(spec.blocks, spec.first_token, spec.num_tokens)
        pull.phase, pull.deadline = Phase.CHECK, now + self._side.settings.transfer_deadline_s
        self._side.metrics.digests_expected += check.expected
        future = self._side.take_digests(check.blocks, spec.first_token, spec.num_tokens)
        future.add_done_callback(lambda done: self._side.post(partial(self._on_own_digests, pull, check, done)))

    def _on_page(self, pull: ActivePull, check: DigestCheck, ask: Digests, reply: Reply) -> None:
        def add(pull: ActivePull) -> None:
            check.add_page(ask, expect(reply, DigestPage).digests)
            self._conclude(pull, check)

        self._guard(pull, add)

    def _on_own_digests(self, pull: ActivePull, check: DigestCheck, done: Future[list[GroupDigests]]) -> None:
        def add(pull: ActivePull) -> None:
            check.add_own(done.result())
            self._conclude(pull, check)

        self._guard(pull, add)

    def _conclude(self, pull: ActivePull, check: DigestCheck) -> None:
        if not check.is_complete:
            return
        finding = check.finding()
        pull.span("check", self._side.clock())
        metrics, request = self._side.metrics, pull.spec.remote_request_id
        metrics.digests_checked += finding.checked
        metrics.digests_mismatched += finding.mismatched
        if finding.first is not None:
            group, position = finding.first
            metrics.mismatch(request, group, position)
            if not self._side.injector.uses_what_differs:
                raise VerificationError(
                    f"digests of request {request} differ in layer group {group}, first at position {position}"
                )
        if finding.checked < check.expected:
            raise VerificationError(
                f"only {finding.checked} of {check.expected} digests of request {request} were compared; each token "
                "and head that was read needs one"
            )
        self._passed(pull)
