"""Signed envelopes: each is good for one direction, one time window, one secret, and once."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx import seal
from kvx.seal import RefusedMessage, ReplySeal, RequestSeal
from kvx.secret import Secret

SECRET = Secret(b"a secret of tests")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Pair:
    def __init__(self) -> None:
        self.clock = Clock()
        self.asker = RequestSeal(SECRET, 30.0, self.clock)
        self.owner = ReplySeal(SECRET, 30.0, self.clock)

    def refusal(self, data: bytes) -> str:
        with pytest.raises(RefusedMessage) as raised:
            self.owner.open(data)
        return raised.value.cause

    def reply_refusal(self, data: bytes) -> str:
        with pytest.raises(RefusedMessage, match="does not know our secret") as raised:
            self.asker.open(data)
        return raised.value.cause


def test_a_message_and_its_reply_come_through() -> None:
    pair = Pair()
    data, nonce = pair.asker.seal(1, b"question")
    assert pair.owner.open(data) == (b"question", nonce)
    assert pair.asker.open(pair.owner.seal(1, nonce, b"answer")) == (b"answer", nonce)
    assert pair.asker.seal(2, b"question")[1] != nonce


def test_without_a_secret_nothing_is_wrapped() -> None:
    assert RequestSeal(None).seal(1, b"question") == (b"question", b"")
    assert ReplySeal(None).open(b"question") == (b"question", b"")
    assert ReplySeal(None).seal(1, b"", b"answer") == b"answer"
    assert RequestSeal(None).open(b"answer") == (b"answer", b"")


def test_a_replay_is_refused_whenever_it_comes() -> None:
    pair = Pair()
    messages = [pair.asker.seal(number, b"x")[0] for number in (1, 2, 3)]
    for data in messages:
        pair.owner.open(data)
    assert [pair.refusal(data) for data in messages] == ["replayed"] * 3
    pair.clock.now += 31
    assert [pair.refusal(data) for data in messages] == ["stale"] * 3


def test_a_link_that_was_silent_for_long_goes_on_and_its_old_messages_stay_refused() -> None:
    pair = Pair()
    old, _ = pair.asker.seal(1, b"x")
    pair.owner.open(old)
    pair.clock.now += 1000
    pair.owner._seen.clear()  # as when its place was needed
    pair.owner.open(pair.asker.seal(2, b"x")[0])
    assert pair.refusal(old) == "stale"


def test_stale_early_and_impossible_times_are_refused() -> None:
    pair = Pair()
    data, _ = pair.asker.seal(1, b"x")
    for moved in (31, -31):
        pair.clock.now += moved
        assert pair.refusal(data) == "stale"
        pair.clock.now -= moved
    for time_s in (math.nan, math.inf, -math.inf):
        assert pair.refusal(seal._sealed(SECRET, seal.REQUEST, "s", 1, bytes(16), time_s, b"x")) == "stale"
    pair.clock.now += 29
    pair.owner.open(data)


def test_what_an_earlier_process_may_have_answered_is_refused() -> None:
    pair = Pair()
    data, _ = pair.asker.seal(1, b"x")
    pair.clock.now += 1
    pair.owner = ReplySeal(SECRET, 30.0, pair.clock)
    assert pair.refusal(data) == "stale"


def test_requests_are_no_replies_and_replies_no_requests() -> None:
    pair = Pair()
    data, nonce = pair.asker.seal(1, b"x")
    assert pair.reply_refusal(data) == "forged"
    assert pair.refusal(pair.owner.seal(1, nonce, b"x")) == "forged"


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("sender", "other"), ("sequence", 9), ("nonce", bytes(16)), ("time_s", 1_000_001.0),
     ("body", b"y"), ("signature", bytes(32))],
)  # fmt: skip
def test_every_field_is_signed(field: str, value: object) -> None:
    pair = Pair()
    raw = msgspec.msgpack.decode(pair.asker.seal(1, b"x")[0])
    assert field in raw
    assert pair.refusal(msgspec.msgpack.encode({**raw, field: value})) == "forged"


def test_other_secrets_and_plain_messages_are_refused_by_cause() -> None:
    pair = Pair()
    other = RequestSeal(Secret(b"another secret, too"), 30.0, pair.clock)
    assert pair.refusal(other.seal(1, b"x")[0]) == "forged"
    assert pair.refusal(msgspec.msgpack.encode({"kind": "status", "version": 1, "sequence": 4})) == "unsigned"
    assert pair.refusal(b"\xc1") == "malformed"
    assert pair.refusal(b"\x91" * 100_000 + b"\x90") == "malformed"
    assert pair.refusal(pair.asker.seal(1, b"x" * seal.MESSAGE_LIMIT_BYTES)[0]) == "malformed"
    raw = msgspec.msgpack.decode(pair.asker.seal(2, b"x")[0])
    assert pair.refusal(msgspec.msgpack.encode({**raw, "extra": 1})) == "malformed"
    assert pair.reply_refusal(b"answer") == "malformed"
    assert pair.owner.num_senders == 0, "strangers take no memory"


def test_the_memory_of_senders_is_bounded_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "MOST_SENDERS", 10)
    pair = Pair()
    for _ in range(10):
        pair.owner.open(RequestSeal(SECRET, 30.0, pair.clock).seal(1, b"x")[0])
    assert pair.refusal(pair.asker.seal(1, b"x")[0]) == "crowded"
    assert pair.owner.num_senders == 10
    pair.clock.now += 31
    pair.owner.open(pair.asker.seal(2, b"x")[0])
    assert pair.owner.num_senders == 1


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_any_change_of_any_byte_is_refused(tail: bytes, place: int, value: int) -> None:
    pair = Pair()
    data, nonce = pair.asker.seal(1, b"x" * 20)
    place %= len(data)
    changed = data[:place] + bytes([value]) + data[place + 1 :]
    for wrong in (changed, data[:place], data + tail):
        if wrong != data:
            pair.refusal(wrong)
    assert pair.owner.open(data) == (b"x" * 20, nonce), "and takes nothing from the right one"
