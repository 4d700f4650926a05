"""The side channel's messages: msgpack, versioned, size-limited, decoded strictly into these types and no others.

Reader and owner: the reader asks HELLO once, and answers with DECLINED where the two do not fit; then for each hand-off
CLAIM, DIGESTS (when verifying) and RELEASE; RENEW as long as a request waits or is being read. FETCH is for
`kvx doctor` alone.
Block ids come from the owner's claim reply, never from what passed through an HTTP client. Where engines share a
secret, each message travels in a signed envelope (`kvx.seal`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import zmq

from kvx.addresses import endpoint_of
from kvx.curve import Curve, read_curve
from kvx.errors import Crowded, HandshakeError, KVXError, LeaseExpired, PeerDead, StaleGeneration, TicketRefused
from kvx.geometry import GroupGeometry
from kvx.peer import EngineInfo, PeerDescriptor, VerifyMode
from kvx.ranks import MOST_RANKS
from kvx.seal import MESSAGE_LIMIT_BYTES as MESSAGE_LIMIT_BYTES
from kvx.seal import PROTOCOL_VERSION, REQUEST_LIMIT_BYTES, RequestSeal, require_size
from kvx.seal import RefusedMessage as RefusedMessage
from kvx.secret import read_secret
from kvx.ticket import LONGEST_TICKET

DIGEST_PAGE_BYTES = 1 << 20
# Counts that a reply may have; without them, 8 MiB of empty lists become half a GiB of Python objects.
MOST_GROUPS = 1024
MOST_BLOCKS = 1 << 20
MOST_LAYERS = 1 << 16
MOST_FIELDS = 32
MOST_CONNECTORS = 64
# Of a status, which has no schema: only the command line asks for one.
STATUS_LIMIT_BYTES = 1 << 20

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
BlockId = Annotated[int, msgspec.Meta(ge=-1, lt=2**62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
# As GroupGeometry.to_wire gives it, and from_wire checks it.
WireGroup = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=64)],
        Text
        | int
        | Annotated[list[Text | int], msgspec.Meta(max_length=MOST_LAYERS)]
        | Annotated[dict[Text, int], msgspec.Meta(max_length=MOST_FIELDS)]
        | None,
    ],
    msgspec.Meta(max_length=MOST_FIELDS),
]


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """Common to all: the protocol version, and the request's number, which its reply repeats."""

    version: int = PROTOCOL_VERSION
    sequence: Count


class Hello(Message):
    engine_id: Text


class Welcome(Message):
    """A PeerDescriptor; layer groups as GroupGeometry.to_wire gives them."""

    info: EngineInfo
    instance: Text
    generation: Count
    layout: Text
    groups: Annotated[list[WireGroup], msgspec.Meta(max_length=MOST_GROUPS)]
    num_blocks: Count
    verify: VerifyMode
    digest: Text
    connectors: Annotated[dict[Text, bytes], msgspec.Meta(max_length=MOST_CONNECTORS)]


class Declined(Message):
    """The reader does not fit what the owner said of itself, and why: for the owner's log. Has no reply."""

    engine_id: Text
    reason: Text


class Claim(Message):
    """Ask for a held request. One not held yet is waited for, `wait_s` at most.

    `reader` names the pull, not only its engine: several pulls may claim one hold, and each releases its own claim.
    `share`: what the pulls of an engine's ranks for one request have in common; so many `claims` come of them, and the
    hold waits for all. `ticket` as the owner's engine signed it; empty without a secret.
    """

    request_id: Text
    reader: Text
    wait_s: Seconds
    ticket: Annotated[str, msgspec.Meta(max_length=LONGEST_TICKET)] = ""
    share: Text = ""
    claims: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] = 1


class Claimed(Message):
    """`blocks`: per layer group, by position, -1 where there is none. `left_s`: how long they are surely kept."""

    request_id: Text
    instance: Text
    generation: Count
    blocks: Annotated[
        list[Annotated[list[BlockId], msgspec.Meta(max_length=MOST_BLOCKS)]], msgspec.Meta(max_length=MOST_GROUPS)
    ]
    num_tokens: Count
    left_s: Seconds


class Digests(Message):
    """Ask for digests of tokens [first_token, first_token + num_tokens), heads [head_start, + head_count)."""

    request_id: Text
    group: Count
    first_token: Count
    num_tokens: Count
    head_start: Count
    head_count: Count


class DigestPage(Message):
    """`digests`: [head, token, 16] bytes."""

    request_id: Text
    digests: bytes


class Release(Message):
    """The pull `reader` is done with a hold, one way or the other. Has no reply."""

    request_id: Text
    reader: Text


class Renew(Message):
    """Keep a held request for one more lease, from a reader that waits for its turn or is reading."""

    request_id: Text


class Renewed(Message):
    """`left_s`: how long it is surely kept; no longer than before when it has been held for its longest time."""

    request_id: Text
    left_s: Seconds


class Fetch(Message):
    """Ask for a pull of a request that the asker holds, and for a hold of what has arrived, under the same id.

    Only the other half of `kvx doctor` does that. An engine in service refuses.
    """

    engine_id: Text
    host: Text
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    request_id: Text
    num_tokens: Count
    ticket: Annotated[str, msgspec.Meta(max_length=LONGEST_TICKET)] = ""


class Fetched(Message):
    """The pull has ended. `failure`: why it failed; empty where all has arrived and is held, for whom the rest is."""

    request_id: Text
    failure: Text = ""
    host: Text = ""
    port: Count = 0
    ticket: Annotated[str, msgspec.Meta(max_length=LONGEST_TICKET)] = ""


class Status(Message):
    pass


class StatusReply(Message):
    status: dict[str, Any]


class Refused(Message):
    """`cause`: a word of `REFUSALS` where one fits."""

    reason: str
    cause: Text = ""


Request = Hello | Declined | Claim | Renew | Digests | Release | Fetch | Status
Reply = Welcome | Claimed | Renewed | DigestPage | Fetched | StatusReply | Refused
T = TypeVar("T")
# What a refusal is to the reader, by its `cause`; any other is a HandshakeError.
REFUSALS: dict[str, type[KVXError]] = {
    kind.cause: kind for kind in (Crowded, LeaseExpired, StaleGeneration, TicketRefused)
}


class _Header(msgspec.Struct):
    """What every version of the protocol has."""

    version: int
    sequence: int = 0
    kind: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(_Header)
_REQUEST_DECODER: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY_DECODER: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode_request(data: bytes) -> Request:
    """RefusedMessage when it is too long, of another protocol version, or not exactly one of the requests."""
    sequence = _check_envelope(data, REQUEST_LIMIT_BYTES)
    try:
        return _REQUEST_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedMessage(f"not a side channel request: {error}", sequence) from error


def decode_reply(data: bytes) -> Reply:
    """The same for replies."""
    sequence = _check_envelope(data, MESSAGE_LIMIT_BYTES)
    try:
        return _REPLY_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedMessage(f"not a side channel reply: {error}", sequence) from error


def expect(reply: Reply, kind: type[T]) -> T:
    """The reply, if it is of that kind; HandshakeError with the owner's reason when it refused."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Refused):
        raise REFUSALS.get(reply.cause, HandshakeError)(f"the owner refused: {reply.reason}")
    raise HandshakeError(f"the owner refused: it sent {type(reply).__name__}")


def _reply_to(nonce: bytes, seal: RequestSeal, data: bytes, where: str) -> Reply:
    try:
        body, found = seal.open(data)
    except RefusedMessage as error:
        raise HandshakeError(f"no answer from the side channel of {where}: {error}") from error
    if found != nonce:
        raise HandshakeError(f"the side channel of {where} answered another request than ours")
    return decode_reply(body)


def _check_envelope(data: bytes, limit: int) -> int:
    require_size(data, limit)
    try:
        header = _HEADER_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedMessage(f"not a side channel message: {error}") from error
    if header.version != PROTOCOL_VERSION:
        raise RefusedMessage(
            f"side channel protocol {header.version} found, {PROTOCOL_VERSION} spoken here; use one version of kvx",
            max(header.sequence, 0),
        )
    if header.kind == "statusreply":
        require_size(data, STATUS_LIMIT_BYTES)
    return header.sequence


def welcome(sequence: int, ours: PeerDescriptor) -> Welcome:
    """Our descriptor as a message."""
    return Welcome(
        sequence=sequence,
        info=ours.info,
        instance=ours.instance,
        generation=ours.generation,
        layout=ours.layout,
        groups=[group.to_wire() for group in ours.groups],
        num_blocks=ours.num_blocks,
        verify=ours.verify,
        digest=ours.digest,
        connectors=dict(ours.connectors),
    )


def descriptor(message: Welcome) -> PeerDescriptor:
    """A peer's descriptor from its message; LayoutError when a layer group is malformed."""
    return PeerDescriptor(
        info=message.info,
        instance=message.instance,
        generation=message.generation,
        layout=message.layout,
        groups=tuple(GroupGeometry.from_wire(group) for group in message.groups),
        num_blocks=message.num_blocks,
        verify=message.verify,
        digest=message.digest,
        connectors=message.connectors,
    )


def request_status(host: str, port: int, timeout_s: float = 5.0) -> dict[str, Any]:
    """An engine's status over its side channel, signed with this process's secret where it has one.

    HandshakeError: no readable answer in time. ConnectorError: the configured secret cannot be used.
    """
    secret = read_secret()
    reply = ask(host, port, Status(sequence=1), RequestSeal(secret), read_curve(secret), timeout_s)
    if not isinstance(reply, StatusReply):
        raise HandshakeError(f"the side channel of {host}:{port} answered a status request with {reply}")
    return reply.status


def ask(host: str, port: int, message: Message, seal: RequestSeal, curve: Curve | None, timeout_s: float) -> Reply:
    """One question to an engine on a link of its own. HandshakeError: no readable answer in time."""
    data, nonce = seal.seal(message.sequence, encode(message))
    answers = exchange(host, port, [data], curve, timeout_s)
    if not answers:
        raise HandshakeError(
            f"no answer from the side channel of {host}:{port} within {timeout_s:g} s; give the side_channel_port of a "
            "running engine, and its secret where it has one"
        )
    return _reply_to(nonce, seal, answers[0], f"{host}:{port}")


def exchange(host: str, port: int, messages: Sequence[bytes], curve: Curve | None, timeout_s: float) -> list[bytes]:
    """What a side channel answers to messages that are sent at once, in its order: as many, or fewer after so long.

    PeerDead: it closed the connection before it answered anything. HandshakeError: no address.
    """
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    answers: list[bytes] = []
    try:
        channel.setsockopt(zmq.LINGER, 0)
        address = endpoint_of(host, port)
        channel.setsockopt(zmq.IPV6, "[" in address)
        channel.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)
        if curve is not None:
            curve.connect(channel)
        monitor = channel.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        channel.connect(address)
        with contextlib.suppress(zmq.Again):  # a connection that was refused meanwhile, which the monitor tells
            for data in messages:
                channel.send(data, zmq.NOBLOCK)
        poller = zmq.Poller()
        for found in (channel, monitor):
            poller.register(found, zmq.POLLIN)
        while len(answers) < len(messages) and (ready := dict(poller.poll(round(timeout_s * 1000)))):
            if channel in ready:
                answers.append(channel.recv())
            elif not answers:
                raise PeerDead(f"the side channel of {host}:{port} closed the connection")
            else:
                break
    finally:
        context.destroy(linger=0)
    return answers
