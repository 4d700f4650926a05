"""Tickets: an HTTP client can pass them on, and nothing else."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import LeaseExpired, StaleGeneration, TicketRefused
from kvx.secret import Secret
from kvx.ticket import LONGEST_TICKET, PURPOSE, Ticket, read_ticket, write_ticket

SECRET = Secret(b"a secret of tests")
TICKET = Ticket(
    request_id="r", engine_id="prefill", instances=("one", "two"), host="10.0.0.1", port=5600, num_tokens=40,
    expires_s=1000.0,
)  # fmt: skip


def read(text: str, **changed: Any) -> Ticket:
    return read_ticket(SECRET, text, **{"request_id": "r", "engine_id": "prefill", "now_s": 999.0, **changed})


def signed(body: bytes) -> str:
    return base64.urlsafe_b64encode(SECRET.sign(PURPOSE, body) + body).decode()


def test_it_comes_back_as_it_was_and_is_plain_text() -> None:
    text = write_ticket(SECRET, TICKET)
    assert read(text) == TICKET
    assert text.isascii()
    assert len(text) < 300


def test_of_another_request_engine_or_time_it_is_refused() -> None:
    text = write_ticket(SECRET, TICKET)
    for changed in ({"request_id": "s"}, {"engine_id": "other"}):
        with pytest.raises(TicketRefused, match="is for request r of engine prefill, not for"):
            read(text, **changed)
    with pytest.raises(LeaseExpired, match=r"expired 0\.5 s ago"):
        read(text, now_s=1000.5)
    with pytest.raises(LeaseExpired, match="expired"):
        read(write_ticket(SECRET, msgspec.structs.replace(TICKET, expires_s=float("nan"))))
    with pytest.raises(TicketRefused, match="has no ticket; give prefill the same secret"):
        read("")


def test_it_leads_to_one_engine_and_its_ranks() -> None:
    TICKET.require_place("10.0.0.1", 5600)
    TICKET.require_place("10.0.0.1", 5601)
    for host, port in (("10.0.0.2", 5600), ("10.0.0.1", 5599), ("10.0.0.1", 5602)):
        with pytest.raises(TicketRefused, match=r"leads to 10\.0\.0\.1 port 5600, not to"):
            TICKET.require_place(host, port)
    TICKET.require_tokens(40)
    with pytest.raises(TicketRefused, match="is for 40 tokens, 41 were asked for"):
        TICKET.require_tokens(41)
    TICKET.require_instance("two")
    with pytest.raises(StaleGeneration, match="has restarted since"):
        TICKET.require_instance("three")


@pytest.mark.parametrize(
    "text",
    ["x", "!" * 60, "é" * 60, "A" * 100, "A" * (LONGEST_TICKET + 4), signed(b"\xc1"), signed(b""),
     signed(msgspec.msgpack.encode({**msgspec.to_builtins(TICKET), "version": 2})),
     signed(msgspec.msgpack.encode({**msgspec.to_builtins(TICKET), "extra": 1})),
     write_ticket(Secret(b"another secret of tests"), TICKET)],
)  # fmt: skip
def test_what_no_engine_with_our_secret_wrote_is_refused(text: str) -> None:
    with pytest.raises(TicketRefused, match="is not one that an engine with our secret signed"):
        read(text)


def test_one_ticket_has_one_text() -> None:
    """base64 ignores the last bits of some texts."""
    text = write_ticket(SECRET, msgspec.structs.replace(TICKET, request_id="rr"))
    twins = [f"{text[: -text.count('=') - 1]}{letter}{'=' * text.count('=')}" for letter in "BCDEFGHIJKLMNOP"]
    assert text.endswith("=")
    same = [twin for twin in twins if base64.urlsafe_b64decode(twin) == base64.urlsafe_b64decode(text) and twin != text]
    assert same, "the trouble exists"
    for twin in same:
        with pytest.raises(TicketRefused, match="is not one that"):
            read(twin, request_id="rr")


@given(st.integers(0, 1000), st.characters(), st.text(max_size=20))
def test_any_change_is_refused(place: int, character: str, tail: str) -> None:
    text = write_ticket(SECRET, TICKET)
    place %= len(text)
    for wrong in (text[:place] + character + text[place + 1 :], text[:place], text + tail):
        if wrong != text:
            with pytest.raises(TicketRefused):
                read(wrong)
