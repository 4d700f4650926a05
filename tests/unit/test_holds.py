"""The owner's state machine, without sockets or clocks: who may read what, until when."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from kvx import holds
from kvx.digest import GroupDigests
from kvx.errors import HandshakeError
from kvx.handshake import Claim, Claimed, Digests, Message, Refused, Renew, Renewed
from kvx.holds import KEPT_ENDINGS, Hold, HoldTable, stale_covered


class Table(HoldTable):
    """Keeps what it sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Message]] = []
        super().__init__("instance", grace_s=5.0, send=lambda receiver, message: self.sent.append((receiver, message)))

    def answers(self) -> list[Message]:
        sent, self.sent = self.sent, []
        return [message for _, message in sent]


def hold(request_id: str = "r", expires: float = 10.0, blocks: tuple[int, ...] = (4, 2)) -> Hold:
    return Hold(request_id, (blocks,), 20, expires)


def claim(request_id: str = "r", reader: str = "reader", wait_s: float = 3.0, sequence: int = 7) -> Claim:
    return Claim(sequence=sequence, request_id=request_id, reader=reader, wait_s=wait_s)


def test_a_claim_gets_the_owners_own_blocks_and_how_long_they_stay() -> None:
    table = Table()
    table.generation = 3
    table.add(hold(), 0.0)
    table.claim(b"x", claim(), 4.0)
    assert table.sent == [
        (
            b"x",
            Claimed(
                sequence=7, request_id="r", instance="instance", generation=3, blocks=[[4, 2]], num_tokens=20,
                left_s=11.0,
            ),
        )
    ]  # fmt: skip
    assert table.is_being_read


def test_unclaimed_holds_end_with_the_lease_and_claimed_ones_after_the_grace() -> None:
    table = Table()
    table.add(hold("unclaimed"), 0.0)
    table.add(hold("claimed"), 0.0)
    table.claim(b"x", claim("claimed"), 9.9)
    assert table.expire(9.99) == []
    assert table.next_time() == 10.0
    assert table.expire(10.0) == ["unclaimed"]
    assert table.next_time() == 15.0
    assert table.expire(15.0) == ["claimed"]
    assert table.next_time() is None
    assert table.expire(100.0) == [], "each once"
    table.answers()
    table.claim(b"x", claim("claimed"), 16.0)
    (answer,) = table.answers()
    assert isinstance(answer, Refused)
    assert "lease ran out" in answer.reason


def test_a_renewal_is_a_lease_from_now_and_ends_at_the_latest() -> None:
    table = Table()
    for name in ("unclaimed", "claimed"):
        table.add(Hold(name, ((4, 2),), 20, expires=10.0, lease_s=10.0, latest=25.0), 0.0)
    table.claim(b"x", claim("claimed"), 0.0)
    table.answers()

    def left_s(name: str, now: float) -> float:
        assert table.renew(b"x", Renew(sequence=1, request_id=name), now)
        (answer,) = table.answers()
        assert isinstance(answer, Renewed)
        return answer.left_s

    assert (left_s("unclaimed", 6.0), left_s("claimed", 6.0)) == (10.0, 15.0)
    assert (left_s("unclaimed", 15.9), left_s("claimed", 15.9)) == (pytest.approx(9.1), pytest.approx(14.1))
    assert left_s("unclaimed", 20.0) == 5.0, "no more than the longest time"
    assert table.expire(25.0) == ["unclaimed"]
    assert table.expire(29.9) == []
    assert table.expire(30.0) == ["claimed"]


def test_what_is_not_held_or_is_about_to_go_is_not_renewed() -> None:
    table = Table()
    table.add(hold("ended"), 0.0)
    table.drop("ended")
    table.add(hold("read"), 0.0)
    table.claim(b"x", claim("read"), 0.0)
    table.suspend()
    table.answers()
    for name, cause in (("unknown", ""), ("ended", ""), ("read", "stale_generation")):
        assert not table.renew(b"x", Renew(sequence=1, request_id=name), 1.0)
        (answer,) = table.answers()
        assert isinstance(answer, Refused)
        assert answer.cause == cause
    assert table.next_time() == 15.0


def test_a_claim_waits_for_its_hold_but_not_for_ever() -> None:
    table = Table()
    table.claim(b"x", claim(), 0.0)
    table.claim(b"y", claim("other"), 0.0)
    assert table.answers() == []
    table.add(hold(), 1.0)
    (answer,) = table.answers()
    assert isinstance(answer, Claimed)
    assert table.next_time() == 3.0
    assert table.expire(3.0) == []
    (answer,) = table.answers()
    assert isinstance(answer, Refused)
    assert "other is not held here" in answer.reason


def test_only_its_reader_releases_a_claimed_hold() -> None:
    table = Table()
    table.add(hold(), 0.0)
    table.claim(b"x", claim(), 0.0)
    assert not table.release("r", "stranger")
    assert table.release("r", "reader")
    assert not table.release("r", "reader")
    assert not table.release("unknown", "reader")
    assert table.num_held == 0


def test_a_reader_that_gives_up_takes_its_parked_claim_along() -> None:
    table = Table()
    table.claim(b"x", claim(), 0.0)
    assert not table.release("r", "reader")
    (answer,) = table.answers()
    assert isinstance(answer, Refused)
    table.add(hold(), 1.0)
    assert table.answers() == []
    assert not table.is_being_read


def test_a_hold_ends_with_the_last_of_its_readers() -> None:
    table = Table()
    table.add(hold(), 0.0)
    for reader in ("engine/1", "engine/2", "engine/1"):  # asking again, after another handshake, counts once
        table.claim(b"x", claim(reader=reader), 0.0)
    assert all(isinstance(answer, Claimed) for answer in table.answers())
    assert not table.release("r", "engine/1"), "the other one still reads"
    assert not table.release("r", "engine/1")
    assert table.is_being_read
    assert table.num_held == 1
    table.claim(b"x", claim(reader="engine/3"), 0.0)
    assert isinstance(table.answers()[0], Claimed)
    assert not table.release("r", "engine/2")
    assert table.release("r", "engine/3")
    table.claim(b"x", claim(reader="engine/4"), 0.0)
    (answer,) = table.answers()
    assert isinstance(answer, Refused)
    assert "was released" in answer.reason, "its blocks may have other content now"


def of_rank(rank: int, share: str = "d/r", claims: int = 2) -> Claim:
    return Claim(sequence=7, request_id="r", reader=f"{share}/{rank}", wait_s=3.0, share=share, claims=claims)


def test_a_hold_that_ranks_share_ends_with_the_last_of_them_also_when_it_claims_late() -> None:
    table = Table()
    table.add(hold(), 0.0)
    table.claim(b"x", of_rank(0), 1.0)
    assert not table.release("r", "d/r/0"), "one more comes"
    assert not table.is_being_read
    table.claim(b"x", of_rank(1), 2.0)
    assert all(isinstance(answer, Claimed) for answer in table.answers())
    assert table.release("r", "d/r/1")


def test_shares_of_several_requests_are_waited_for_apart() -> None:
    table = Table()
    table.add(hold(), 0.0)
    for share in ("one", "other"):
        table.claim(b"x", of_rank(0, share), 1.0)
    table.claim(b"x", of_rank(0, "one"), 1.0)  # the same pull once more: it greeted again
    table.claim(b"x", of_rank(1, "one"), 1.0)
    assert [table.release("r", f"one/{rank}") for rank in (0, 1)] == [False, False]
    assert not table.release("r", "other/0")
    table.claim(b"x", of_rank(1, "other"), 1.0)
    assert table.release("r", "other/1")


def test_ranks_that_never_come_are_waited_for_until_the_lease_ends() -> None:
    table = Table()
    table.add(hold(), 0.0)
    table.claim(b"x", of_rank(0), 1.0)
    assert not table.release("r", "d/r/0")
    assert table.next_time() == 10.0, "without the grace: nobody reads"
    assert table.expire(10.0) == ["r"]
    table.claim(b"x", of_rank(1), 11.0)
    assert isinstance(table.answers()[-1], Refused)


def test_the_owner_may_abort_while_nobody_reads() -> None:
    table = Table()
    table.add(hold(), 0.0)
    table.claim(b"x", of_rank(0), 1.0)
    assert not table.drop("r")
    assert not table.release("r", "d/r/0")
    assert table.drop("r")


def test_shares_that_never_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MOST_READERS", 2)
    table = Table()
    table.add(hold(), 0.0)
    for share in ("a", "b", "c"):
        table.claim(b"x", of_rank(0, share), 1.0)
        table.release("r", f"{share}/0")
    assert [type(answer) for answer in table.answers()] == [Claimed, Claimed, Refused]


def test_readers_that_never_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MOST_READERS", 2)
    table = Table()
    table.add(hold(), 0.0)
    for reader in ("1", "2", "3", "2"):
        table.claim(b"x", claim(reader=reader), 0.0)
    answers = table.answers()
    assert [type(answer) for answer in answers] == [Claimed, Claimed, Refused, Claimed]
    assert table.expire(15.0) == ["r"]


def test_a_release_without_a_claim_ends_nothing() -> None:
    table = Table()
    table.add(hold(), 0.0)
    assert not table.release("r", "stranger")
    assert table.num_held == 1


def test_a_dropped_hold_ends_at_once_unless_it_is_being_read() -> None:
    table = Table()
    table.add(hold("free"), 0.0)
    table.add(hold("read"), 0.0)
    table.claim(b"x", claim("read"), 0.0)
    table.answers()
    assert table.drop("free")
    assert not table.drop("read")
    assert not table.drop("unknown")
    table.claim(b"x", claim("free"), 1.0)
    (answer,) = table.answers()
    assert isinstance(answer, Refused)
    assert "aborted" in answer.reason
    assert table.release("read", "reader")


def test_endings_are_remembered_within_bounds() -> None:
    table = Table()
    for index in range(KEPT_ENDINGS + 10):
        table.add(hold(str(index)), 0.0)
        table.drop(str(index))
    table.claim(b"x", claim("0"), 0.0)
    assert table.answers() == [], "forgotten, so it could still come"
    table.claim(b"x", claim(str(KEPT_ENDINGS)), 0.0)
    assert isinstance(table.answers()[0], Refused)


def test_digest_pages() -> None:
    table, kept = Table(), hold()
    values = np.arange(2 * 20 * 16, dtype=np.uint8).reshape(2, 20, 16)
    present = np.ones(20, dtype=bool)
    present[19] = False
    kept.digests = Future()
    table.add(kept, 0.0)

    def ask(**fields: int) -> Digests:
        asked = {"group": 0, "first_token": 3, "num_tokens": 4, "head_start": 1, "head_count": 1, **fields}
        return Digests(sequence=1, request_id="r", **asked)

    with pytest.raises(HandshakeError, match="no digests"):
        table.digest_page(ask())
    kept.digests.set_result([GroupDigests(0, values, present)])
    assert table.digest_page(ask()).digests == values[1:, 3:7].tobytes()
    for wrong in ({"group": 1}, {"num_tokens": 18}, {"num_tokens": 17}, {"head_start": 2}, {"first_token": 2**61}):
        with pytest.raises(HandshakeError):
            table.digest_page(ask(**wrong))
    failed = hold("failed")
    failed.digests = Future()
    failed.digests.set_exception(ValueError("no"))
    table.add(failed, 0.0)
    with pytest.raises(HandshakeError, match="could not be taken"):
        table.digest_page(Digests(sequence=1, request_id="failed", group=0, first_token=0, num_tokens=1, head_start=0,
                                  head_count=1))  # fmt: skip


def test_a_hold_freed_early_is_answered_after_its_reuse_and_never_released_again() -> None:
    table, freed = Table(), hold("freed")
    freed.is_freed = freed.is_awaiting_reuse = True
    table.add(freed, 0.0)
    table.claim(b"x", claim("freed"), 0.0)
    assert table.answers() == []
    assert table.num_held == 0
    assert stale_covered(table.holds.values(), hold("new", blocks=(9, 8))) == []
    assert stale_covered(table.holds.values(), hold("new", blocks=(-1, 2))) == [freed]
    assert stale_covered(table.holds.values(), hold("same prefix", blocks=(4, 8))) == [], (
        "it may be read, not rewritten"
    )
    assert stale_covered(table.holds.values(), hold("shifted", blocks=(2, 4))) == [freed]
    freed.is_awaiting_reuse = False
    table.answer_parked("freed", 1.0)
    assert isinstance(table.answers()[0], Claimed)
    assert not table.release("freed", "reader")
