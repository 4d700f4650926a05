"""Thousands of messages that no kvx would send, at live engines with and without a secret.

No answer with data, no step of the hand-off thread that fails, no growth, and a hand-off that works afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_process import EngineConfig, Remote, StartEngines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_door import SECRET, WITH_SECRET, Stranger, only_refused, requests, stranger_at
from test_handoff import hand_off

from kvx.errors import HandshakeError
from kvx.handshake import Status, decode_request, encode
from kvx.seal import RequestSeal
from kvx.secret import Secret

__all__ = ["stranger_at"]
pytestmark = pytest.mark.transfer

# Messages with and without a secret, each: 2,000 of them in `make check`, 20,000 more in `make test`.
FEW, MANY, BATCH = 1000, 10_000, 20
MOST_GROWTH_BYTES = 48 << 20

PLAIN = [encode(request) for request in requests()]
SEALED = [
    RequestSeal(secret).seal(1, data)[0] for secret in (SECRET, Secret(b"not the secret of it")) for data in PLAIN
]


def mutated(originals: list[bytes]) -> st.SearchStrategy[bytes]:
    """Truncated, extended, with some bytes changed, or two of them joined in the middle."""

    def change(data: bytes, places: list[tuple[int, int]]) -> bytes:
        changed = bytearray(data)
        for place, value in places:
            changed[place % len(changed)] = value
        return bytes(changed)

    original, place, byte = st.sampled_from(originals), st.integers(0, 400), st.integers(0, 255)
    changed = st.builds(change, original, st.lists(st.tuples(place, byte), min_size=1, max_size=8))
    cut = st.builds(lambda data, end: data[: end % len(data)], original, place)
    longer = st.builds(bytes.__add__, original, st.binary(min_size=1, max_size=40))
    joined = st.builds(lambda a, b, at: a[: at % len(a)] + b[at % len(b) :], original, original, place)
    return st.one_of(changed, cut, longer, joined).filter(lambda data: data not in originals)


MESSAGES = st.one_of(st.binary(max_size=200), mutated(PLAIN), mutated(SEALED), st.sampled_from(SEALED[len(PLAIN) :]))


def resident_bytes(engine: Remote) -> int:
    statm = Path(f"/proc/{engine.process.pid}/statm").read_text()
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_request(data: bytes) -> bool:
    try:
        decode_request(data)
    except HandshakeError:
        return False
    return True


@pytest.mark.parametrize("messages", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("environ", [{}, WITH_SECRET], ids=["without a secret", "with a secret"])
def test_nothing_comes_of_messages_that_no_engine_sends(
    start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger], environ: dict[str, str], messages: int
) -> None:
    owner, reader = start_engines(EngineConfig("prefill", environ=environ), EngineConfig("decode", environ=environ))
    owner.hold("held", [[1]], 16, 600.0)
    hand_off(owner, reader, 100, 1)
    stranger, seal, sent = stranger_at(owner), RequestSeal(SECRET if environ else None), [0, 0]
    sizes, batches = [], messages // BATCH

    def is_right(data_of_batch: list[bytes], reply: dict[str, Any]) -> bool:
        if environ:
            return only_refused(reply)
        return reply["kind"] == "refused" or any(is_request(data) for data in data_of_batch)

    # derandomize: the same messages in every run. The engine is the same for all examples, on purpose.
    @settings(
        max_examples=batches, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(MESSAGES, min_size=BATCH, max_size=BATCH))
    def run(batch: list[bytes]) -> None:
        for data in batch:
            stranger.say(data)
        number = 10_000 + sent[0]
        last, _ = seal.seal(number, encode(Status(sequence=number)))
        stranger.say(last)
        while True:
            reply = stranger.hear()
            if reply["kind"] in ("sealed", "statusreply") and reply["sequence"] == number:
                break
            assert is_right(batch, reply), (reply, batch)
        if environ:
            assert only_refused(stranger.ask(last)), "replayed"
        sent[0] += 1
        sent[1] += len(batch)
        if sent[0] in (batches // 4, batches):
            sizes.append(resident_bytes(owner))

    run()
    assert sent[1] >= messages
    assert max(sizes) - min(sizes) < MOST_GROWTH_BYTES
    status = owner.status()
    assert status["side_channel"]["internal_errors"] == 0
    assert status["handoff"]["holds"] == 1
    causes = status["messages_refused"]
    assert causes.keys() == ({"malformed", "unsigned", "forged", "replayed"} if environ else {"malformed"})
    hand_off(owner, reader, 100, 2)


def test_claims_of_nothing_do_not_pile_up(
    start_engines: StartEngines, stranger_at: Callable[[Remote], Stranger]
) -> None:
    """Each asks to be waited for for a day; an engine without a secret must take them from anybody."""
    (owner,) = start_engines(EngineConfig("prefill"))
    stranger = stranger_at(owner)
    claim = {"version": 1, "kind": "claim", "request_id": "r", "reader": "me", "wait_s": 86400.0}
    for sequence in range(4096):
        stranger.say(msgspec.msgpack.encode({**claim, "sequence": sequence}))
    reply = stranger.ask(msgspec.msgpack.encode({**claim, "sequence": 5000}))
    assert (reply["kind"], reply["sequence"]) == ("refused", 5000)
    assert "4096 claims wait" in reply["reason"]
