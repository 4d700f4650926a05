"""Signed envelopes around the side channel's messages, where engines share a secret; nothing at all where they do not.

A signature covers the protocol's version, the direction, the sender, sequence, nonce, time and body. So a message is
good for one direction and one sender, within the time window, and once:

- A request is refused when its sender's sequence is not above the last one. TCP keeps a link's messages in order, so
  this refuses every replay and needs memory by sender, not by message. Of a sender that was silent for longer than the
  window, nothing needs to be remembered: its old messages are stale.
- A reply repeats the nonce of its request, which the asker chose at random, so it answers that request alone.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import Annotated

import msgspec

from kvx.errors import HandshakeError
from kvx.secret import Secret

PROTOCOL_VERSION = 1
# A claim reply of a million blocks and a page of digests fit.
MESSAGE_LIMIT_BYTES = 8 << 20
# Requests come from strangers, too; the longest, a sealed claim with its names and its ticket, has half of it.
REQUEST_LIMIT_BYTES = 64 << 10
DEFAULT_WINDOW_S = 30.0
NONCE_BYTES, SIGNATURE_BYTES = 16, 32
# Links that spoke within the time window. More are refused, which only those who know the secret can bring about.
MOST_SENDERS = 4096
REQUEST, REPLY = b"kvx request", b"kvx reply"


class RefusedMessage(HandshakeError):
    """A message that is not taken; `sequence` is its number where that could be read, `cause` what it is counted as.

    `reply`: what the sender is told instead of the error's text.
    """

    def __init__(self, message: str, sequence: int = 0, cause: str = "malformed") -> None:
        super().__init__(message)
        self.sequence = sequence
        self.cause = cause
        self.reply: str | None = None


class Envelope(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sealed"):
    """`time_s`: the sender's clock, since 1970. `body`: a message of `kvx.handshake`."""

    version: int = PROTOCOL_VERSION
    sender: Annotated[str, msgspec.Meta(max_length=64)]
    sequence: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    time_s: float
    body: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class _Unsealed(msgspec.Struct):
    """What any other message says of itself."""

    kind: str
    version: int = 0
    sequence: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)
_UNSEALED_DECODER = msgspec.msgpack.Decoder(_Unsealed)
Clock = Callable[[], float]


class RequestSeal:
    """The asker's end of one link."""

    def __init__(self, secret: Secret | None, window_s: float = DEFAULT_WINDOW_S, clock: Clock = time.time) -> None:
        self._secret, self._window_s, self._clock = secret, window_s, clock
        self._sender = uuid.uuid4().hex
        self.their_time_s: float | None = None
        """The other end's clock when it signed the last reply, whether or not that was stale."""

    def seal(self, sequence: int, body: bytes) -> tuple[bytes, bytes]:
        """(what to send, the nonce that the reply must have); the nonce is empty without a secret."""
        if self._secret is None:
            return body, b""
        nonce = os.urandom(NONCE_BYTES)
        return _sealed(self._secret, REQUEST, self._sender, sequence, nonce, self._clock(), body), nonce

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        """(body, nonce) of a reply. RefusedMessage when it is not signed with our secret, or stale."""
        if self._secret is None:
            return data, b""
        try:
            envelope = _opened(self._secret, REPLY, data, MESSAGE_LIMIT_BYTES)
            self.their_time_s = envelope.time_s
            _require_fresh(envelope, self._clock(), self._window_s)
        except RefusedMessage as error:
            raise RefusedMessage(
                f"it refuses us or does not know our secret ({error}); give both engines the same KVX_SECRET_FILE or "
                f"KVX_SECRET, and clocks that agree within {self._window_s:g} s",
                error.sequence,
                error.cause,
            ) from error
        return envelope.body, envelope.nonce


class ReplySeal:
    """The answering end, for all links."""

    def __init__(self, secret: Secret | None, window_s: float = DEFAULT_WINDOW_S, clock: Clock = time.time) -> None:
        self._secret, self._window_s, self._clock = secret, window_s, clock
        self._sender = uuid.uuid4().hex
        self._started = clock()  # what came before us may have been answered by a process that ended
        self._seen: dict[str, tuple[int, float]] = {}  # sender -> its last sequence, its latest time

    @property
    def is_strict(self) -> bool:
        """Whether a refusal must tell nothing: there is a secret, so the asker may be a stranger."""
        return self._secret is not None

    @property
    def num_senders(self) -> int:
        return len(self._seen)

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        """(body, nonce) of a request. RefusedMessage: unsigned, forged, stale, replayed, or from too many senders."""
        if self._secret is None:
            return data, b""
        envelope = _opened(self._secret, REQUEST, data, REQUEST_LIMIT_BYTES)
        now = self._clock()
        _require_fresh(envelope, now, self._window_s)
        if envelope.time_s < self._started:
            raise RefusedMessage("a message is older than this side channel", envelope.sequence, "stale")
        self._require_new(envelope, now)
        return envelope.body, envelope.nonce

    def seal(self, sequence: int, nonce: bytes, body: bytes) -> bytes:
        """A reply to the request that had this nonce; without one, as a stranger gets it."""
        if self._secret is None or not nonce:
            return body
        return _sealed(self._secret, REPLY, self._sender, sequence, nonce, self._clock(), body)

    def _require_new(self, envelope: Envelope, now: float) -> None:
        last, latest = self._seen.get(envelope.sender, (-1, 0.0))
        if envelope.sequence <= last:
            raise RefusedMessage("a message came before", envelope.sequence, "replayed")
        if last < 0 and len(self._seen) >= MOST_SENDERS:
            self._seen = {name: seen for name, seen in self._seen.items() if seen[1] >= now - self._window_s}
            if len(self._seen) >= MOST_SENDERS:
                raise RefusedMessage(f"{MOST_SENDERS} links speak already", envelope.sequence, "crowded")
        self._seen[envelope.sender] = envelope.sequence, max(latest, envelope.time_s)


def _sealed(
    secret: Secret, direction: bytes, sender: str, sequence: int, nonce: bytes, time_s: float, body: bytes
) -> bytes:
    signature = secret.sign(direction, _signed_part(PROTOCOL_VERSION, sender, sequence, nonce, time_s, body))
    return _ENCODER.encode(
        Envelope(sender=sender, sequence=sequence, nonce=nonce, time_s=time_s, body=body, signature=signature)
    )


def require_size(data: bytes, limit: int) -> None:
    """RefusedMessage: longer than that."""
    if len(data) > limit:
        raise RefusedMessage(f"a side channel message has {len(data)} bytes, the limit is {limit}")


def _opened(secret: Secret, direction: bytes, data: bytes, limit: int) -> Envelope:
    require_size(data, limit)
    try:
        envelope = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unsealed(data) from error
    part = _signed_part(
        envelope.version, envelope.sender, envelope.sequence, envelope.nonce, envelope.time_s, envelope.body
    )
    if not secret.is_signed(direction, part, envelope.signature):
        raise RefusedMessage("a message has a wrong signature", envelope.sequence, "forged")
    if envelope.version != PROTOCOL_VERSION:
        raise RefusedMessage(f"side channel protocol {envelope.version} found", envelope.sequence)
    return envelope


def _unsealed(data: bytes) -> RefusedMessage:
    try:
        found = _UNSEALED_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return RefusedMessage("not a side channel message")
    sequence = found.sequence if 0 <= found.sequence < 2**62 else 0
    if found.kind == "sealed":
        return RefusedMessage("a signed message is malformed", sequence)
    return RefusedMessage("a message is not signed", sequence, "unsigned")


def _signed_part(version: int, sender: str, sequence: int, nonce: bytes, time_s: float, body: bytes) -> bytes:
    """One text for one message: msgpack says where each field ends."""
    return _ENCODER.encode((version, sender, sequence, nonce, time_s, body))


def _require_fresh(envelope: Envelope, now: float, window_s: float) -> None:
    if not abs(now - envelope.time_s) <= window_s:  # also what is not a number
        raise RefusedMessage(f"a message is {now - envelope.time_s:.0f} s old", envelope.sequence, "stale")
