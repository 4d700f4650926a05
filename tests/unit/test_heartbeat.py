"""Renewals of the reader's side, with the owner played by the test."""

from __future__ import annotations

import threading
import time

import pytest
from test_pulls import Pair

from kvx import addresses
from kvx.engine_side import Waiting
from kvx.errors import PeerDead
from kvx.handshake import Claim, Refused, Release, Renew, Renewed
from kvx.heartbeat import FIRST_RENEWAL_S

WAITING = Waiting("r", "theirs", "e", "10.0.0.1", 1)


def renewals(pair: Pair) -> int:
    return sum(isinstance(message, Renew) for message, _ in pair.link.asked)


def renewed(pair: Pair, left_s: float) -> None:
    pair.link.answer(Renew, Renewed(sequence=1, request_id="theirs", left_s=left_s))


def test_a_pull_renews_at_a_third_and_may_read_for_as_long() -> None:
    pair = Pair()
    pair.start()
    began = time.monotonic()
    pair.welcome()
    pair.claimed(left_s=3.0)
    due = pair.puller.next_time()
    assert due is not None
    assert began + 1.0 <= due <= time.monotonic() + 1.0
    pair.puller.tick(due - 0.01)
    assert renewals(pair) == 0
    before = pair.transfer.deadline
    pair.puller.tick(due)
    pair.puller.tick(due + 0.1)
    assert renewals(pair) == 1, "one at a time"
    renewed(pair, 3.0)
    assert before < pair.transfer.deadline == pytest.approx(due + 3.0, abs=0.01)
    assert pair.puller.next_time() == pytest.approx(due + 1.0, abs=0.01)
    pair.finish(pair.transfer)
    assert pair.events().received == {"r"}
    pair.puller.tick(time.monotonic() + 3.0)
    assert renewals(pair) == 0, "what has arrived needs no lease"


def test_a_lease_that_is_not_renewed_ends_the_pull_and_its_cause_is_named() -> None:
    pair = Pair()
    pair.start()
    pair.welcome()
    pair.claimed(left_s=0.5)
    transfer = pair.transfer
    pair.puller.tick(time.monotonic() + 0.6)
    assert pair.connector.calls[-1] == "cancel"
    pair.finish(transfer)
    assert pair.events().failed["r"].cause == "lease_expired"


def test_no_more_is_asked_for_when_no_more_is_given_or_when_refused() -> None:
    for answer in (Renewed(sequence=1, request_id="theirs", left_s=2.0), Refused(sequence=1, reason="no")):
        pair = Pair()
        pair.start()
        pair.welcome()
        pair.claimed(left_s=3.0)
        pair.puller.tick(time.monotonic() + 1.0)
        pair.link.answer(Renew, answer)
        pair.puller.tick(time.monotonic() + 2.0)
        assert renewals(pair) == 0
        assert pair.puller.is_moving, "what was promised still holds"


def test_a_waiting_request_is_renewed_until_its_pull_begins() -> None:
    pair = Pair()
    pair.puller.keep(WAITING, time.monotonic())
    pair.puller.tick(time.monotonic())
    assert pair.links == [], "most pulls begin at once"
    pair.puller.tick(time.monotonic() + FIRST_RENEWAL_S)
    asked = time.monotonic() + FIRST_RENEWAL_S + 0.1
    pair.puller.tick(asked)
    renewed(pair, 9.0)
    due = pair.puller.next_time()
    assert due == pytest.approx(asked + 3.0, abs=0.01)
    pair.start()
    pair.puller.tick(due + 0.1)
    assert renewals(pair) == 0
    pair.welcome()
    assert any(isinstance(message, Claim) for message, _ in pair.link.asked), "over the same link"


def test_an_owner_that_was_only_asked_to_renew_is_forgotten() -> None:
    pair = Pair()
    pair.puller.keep(WAITING, time.monotonic())
    pair.puller.tick(time.monotonic() + FIRST_RENEWAL_S)
    pair.puller.tick(time.monotonic() + FIRST_RENEWAL_S + 0.1)
    link = pair.link
    link.answer(Renew, Refused(sequence=1, reason="not held"))
    assert link.is_closed
    assert pair.puller.links == []
    pair.start(num_tokens=0)
    pair.welcome()
    pair.claimed()
    assert [type(message) for message in pair.link.told] == [Release], "its end is still told"


def test_a_name_that_is_being_looked_up_for_a_renewal_serves_the_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(addresses, "look_up", lambda host: "10.0.0.2" if answer.wait(20) else "")
    pair = Pair()
    pair.puller.keep(Waiting("r", "theirs", "e", "name", 1), time.monotonic())
    pair.puller.keep(Waiting("other", "theirs too", "e", "name", 1), time.monotonic())
    pair.puller.tick(time.monotonic() + FIRST_RENEWAL_S)
    pair.start(host="name")
    answer.set()
    pair.notes.get(timeout=20)()
    pair.welcome()
    pair.claimed()
    assert pair.puller.is_moving
    pair.puller.tick(time.monotonic() + FIRST_RENEWAL_S + 0.1)
    assert renewals(pair) == 1, "the other one still waits"


def test_an_owner_that_is_lost_is_not_asked() -> None:
    pair = Pair()
    transfer = pair.moving()
    pair.puller.keep(Waiting("w", "theirs", "e", "10.0.0.1", 1), time.monotonic())
    pair.puller.on_link_lost(pair.link, PeerDead("it ended"))  # type: ignore[arg-type]
    pair.puller.tick(time.monotonic() + 60)
    pair.finish(transfer)
    assert pair.events().failed["r"].cause == "peer_dead"
    assert len(pair.links) == 1


def test_a_pull_that_ends_while_it_greets_leaves_the_renewals_of_others() -> None:
    pair = Pair()
    pair.puller.keep(WAITING, time.monotonic())
    pair.start(request_id="greets")
    pair.puller.cancel("greets")
    assert pair.events().failed.keys() == {"greets"}
    due = pair.puller.next_time()
    assert due is not None
    pair.puller.tick(due)
    assert renewals(pair) == 1
    pair.link.answer(Renew, Refused(sequence=1, reason="no"))
    assert pair.link.is_closed, "forgotten with its last beat"


def test_each_rank_that_holds_the_request_is_asked_for_longer_until_its_pull_begins() -> None:
    pair = Pair()
    pair.puller.keep(Waiting("r", "theirs", "e", "10.0.0.1", 1, ranks=(0, 2)), time.monotonic())
    for delay_s in (0.0, 0.1):
        pair.puller.tick(time.monotonic() + FIRST_RENEWAL_S + delay_s)
    links = pair.links
    assert {link.port for link in links} == {1, 3}
    for link in links:
        link.answer(Renew, Renewed(sequence=1, request_id="theirs", left_s=3.0))
    due = pair.puller.next_time()
    assert due is not None, "both are asked again"
    pair.start(request_id="r")
    pair.puller.tick(due + 1)
    assert not any(isinstance(message, Renew) for link in links for message, _ in link.asked)
