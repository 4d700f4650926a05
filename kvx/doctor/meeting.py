"""The real handshake with a peer's side channel: its secret, its clock, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvx.curve import Curve
from kvx.doctor.findings import Finding, error, ok, skipped, warning
from kvx.doctor.network import Peer
from kvx.errors import KVXError, LayoutError, PeerDead
from kvx.handshake import Hello, RefusedMessage, Reply, Welcome, decode_reply, descriptor, encode, exchange
from kvx.peer import PeerDescriptor
from kvx.seal import RequestSeal
from kvx.secret import Secret

ANSWER_S = 5.0
DOCTOR = "kvx doctor"
_ALONE = "every hand-off would fail, and its prompt be computed again"


@dataclass
class Meeting:
    """What came of a handshake. `peer` is None where it failed."""

    findings: list[Finding] = field(default_factory=list)
    peer: PeerDescriptor | None = None


@dataclass
class _Clock:
    """This machine's, set ahead by `ahead_s`."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def meet(peer: Peer, secret: Secret | None, curve: Curve | None, window_s: float) -> Meeting:
    """HELLO, as an engine with this secret would say it."""
    check, seal = f"handshake with {peer}", RequestSeal(secret, window_s)
    asked, nonce = seal.seal(1, encode(Hello(sequence=1, engine_id=DOCTOR)))
    keys = "give all engines the keys of one KVX_CURVE_DIR" if curve is not None else "see its log"
    try:
        answers = exchange(peer.host, peer.port, [asked], curve, ANSWER_S)
    except PeerDead as problem:
        return Meeting([error(check, f"{problem}, instead of an answer to HELLO", _ALONE, keys)])
    except KVXError as problem:
        return Meeting([error(check, str(problem), _ALONE, "correct --peer")])
    if not answers:
        return Meeting([error(check, f"no answer to HELLO within {ANSWER_S:g} s", _ALONE, keys)])
    try:
        body, found = seal.open(answers[0])
        reply = decode_reply(body)
    except RefusedMessage as problem:
        return _refused(peer, problem, answers[0], secret, curve, window_s)
    if secret is not None and found != nonce:
        return Meeting([error(check, "it answered another request than ours", _ALONE, "look who is between the two")])
    return _welcomed(peer, reply, seal, window_s)


def _welcomed(peer: Peer, reply: Reply, seal: RequestSeal, window_s: float) -> Meeting:
    check = f"handshake with {peer}"
    if not isinstance(reply, Welcome):
        reason = getattr(reply, "reason", type(reply).__name__)
        if "not authenticated" in reason:
            return Meeting(
                [
                    error(
                        check, "it has a secret, and this side has none", _ALONE,
                        "export KVX_SECRET_FILE with the peer's secret here (docs/security.md)",
                    )
                ]
            )  # fmt: skip
        return Meeting(
            [error(check, f"it refused: {reason}", _ALONE, "wait until its cache is ready, or use one version of kvx")]
        )
    try:
        found = descriptor(reply)
    except LayoutError as problem:
        return Meeting([error(check, f"it says {problem}", _ALONE, "use one version of kvx on both sides")])
    info = found.info
    text = (
        f"engine {info.engine_id}, model {info.model}, {found.num_blocks} blocks of {_block_sizes(found)} tokens, "
        f"{found.layout}, {info.kv_cache_dtype}, rank {info.tp_rank} of {info.tp_size}, {', '.join(found.connectors)}"
    )
    return Meeting([ok(check, text), _clock(peer, seal, window_s)], found)


def _clock(peer: Peer, seal: RequestSeal, window_s: float) -> Finding:
    """Of a peer that has understood us."""
    check = f"clock of {peer}"
    if seal.their_time_s is None:
        return skipped(check, "without a secret, nothing depends on clocks")
    ahead_s = seal.their_time_s - time.time()
    if abs(ahead_s) <= window_s / 2:
        return ok(check, f"{abs(ahead_s):.1f} s from ours, of the {window_s:g} s that are allowed")
    return _skewed(check, ahead_s, window_s, is_refused=False)


def _skewed(check: str, ahead_s: float, window_s: float, *, is_refused: bool) -> Finding:
    text = f"{_duration(ahead_s)} {'ahead of' if ahead_s > 0 else 'behind'} ours; auth_window_s is {window_s:g}"
    fix = "set both clocks by NTP or chrony (timedatectl status); the secret is the right one"
    if is_refused and abs(ahead_s) <= window_s:
        why = "it refuses what was signed before it started, by its clock; or its own auth_window_s is smaller"
        return error(check, text, why, fix)
    if is_refused:
        return error(check, text, "messages signed outside the window are refused, like a stranger's", fix)
    return warning(check, text, "a little more, and all messages are refused like a stranger's", fix)


def _refused(
    peer: Peer, problem: RefusedMessage, answer: bytes, secret: Secret | None, curve: Curve | None, window_s: float
) -> Meeting:
    """The answer was not signed as ours would be: no secret over there, another one, another clock, or no kvx."""
    check = f"handshake with {peer}"
    if problem.cause == "stale":
        ahead_s = _their_lead(peer, secret, curve, window_s)
        if ahead_s is not None:
            return Meeting([_skewed(f"clock of {peer}", ahead_s, window_s, is_refused=True)])
    if secret is None or problem.cause != "unsigned":
        return Meeting([error(check, str(problem), _ALONE, "use one version of kvx on both sides")])
    try:
        unsigned = decode_reply(answer)
    except RefusedMessage as unreadable:
        return Meeting([error(check, str(unreadable), _ALONE, "use one version of kvx on both sides")])
    fix = "the same KVX_SECRET_FILE on both sides (compare sha256sum of the two files), then restart that engine"
    if "not authenticated" not in getattr(unsigned, "reason", ""):
        return Meeting([error(check, "it has no secret, and this side has one", _ALONE, fix)])
    ahead_s = _their_lead(peer, secret, curve, window_s)
    if ahead_s is not None:
        return Meeting([_skewed(f"clock of {peer}", ahead_s, window_s, is_refused=True)])
    return Meeting([error(check, "it has another secret than this side", _ALONE, fix)])


def _their_lead(peer: Peer, secret: Secret | None, curve: Curve | None, window_s: float) -> float | None:
    """By how much the clock of a peer that refuses us is ahead of ours; None where that is not why it refuses.

    It tells strangers nothing, so we ask again as from other times: with the right secret, one of them is its own.
    """
    clock = _Clock()
    seal = RequestSeal(secret, window_s, clock)
    messages = []
    for sequence, clock.ahead_s in enumerate(_leads(window_s), 1):
        messages.append(seal.seal(sequence, encode(Hello(sequence=sequence, engine_id=DOCTOR)))[0])
    for answer in exchange(peer.host, peer.port, messages, curve, ANSWER_S):
        try:
            seal.open(answer)
        except RefusedMessage:
            pass  # unsigned, or signed and stale: then it has told its time all the same
        if seal.their_time_s is not None:
            return seal.their_time_s - time.time()
    return None


def _leads(window_s: float) -> Iterator[float]:
    """Up to an hour without gaps (where the window is 30 s), time zones up to a day, and whole days up to a week.

    A side channel takes nothing from before its start: so the steps are as wide as half of what it else takes.
    """
    for number in range(1, 135):
        yield from (number * 0.9 * window_s, -number * 0.9 * window_s)
    for number in (*range(1, 49), *range(96, 337, 48)):
        yield from (number * 1800 + window_s / 2, -number * 1800 + window_s / 2)


def _block_sizes(peer: PeerDescriptor) -> str:
    return ", ".join(str(size) for size in sorted({group.block_size_tokens for group in peer.groups}))


def _duration(seconds: float) -> str:
    seconds = abs(seconds)
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
