"""Tickets: what the prefill side says of a hold, signed, on its way through HTTP clients and routers.

They see and may change `kv_transfer_params`; with a secret, a hand-off begins only with a ticket that they could not
have made. Its block ids need no signature: they never come from there, but from the owner's reply to a claim.
"""

from __future__ import annotations

import base64
import binascii
import time
from typing import Annotated

import msgspec

from kvx.errors import LeaseExpired, StaleGeneration, TicketRefused
from kvx.secret import Secret

VERSION = 1
LONGEST_TICKET = 8192
SIGNATURE_BYTES = 32
PURPOSE = b"kvx ticket"
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class Ticket(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`port`: the first rank's; the others listen on the ports after it. `instances`: the ranks of the engine's present
    processes. `num_tokens`: how many are held. `expires_s`: since 1970.
    """

    version: int = VERSION
    request_id: Name
    engine_id: Name
    instances: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=1024)]
    host: Name
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    expires_s: float

    def require_place(self, host: str, port: int) -> None:
        """TicketRefused: somebody changed where the hand-off leads to."""
        if host != self.host or not 0 <= port - self.port < len(self.instances):
            raise TicketRefused(
                f"the ticket of request {self.request_id} leads to {self.host} port {self.port}, not to {host:.80} "
                f"port {port}; pass kv_transfer_params on as prefill gave them"
            )

    def require_tokens(self, num_tokens: int) -> None:
        """TicketRefused: more than are held."""
        if num_tokens > self.num_tokens:
            raise TicketRefused(
                f"the ticket of request {self.request_id} is for {self.num_tokens} tokens, {num_tokens} were asked for"
            )

    def require_instance(self, instance: str) -> None:
        """StaleGeneration: an earlier process of the engine wrote it."""
        if instance not in self.instances:
            raise StaleGeneration(f"the ticket of request {self.request_id} is of an engine that has restarted since")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Ticket)


def write_ticket(secret: Secret, ticket: Ticket) -> str:
    """As text that JSON and URLs can carry."""
    body = _ENCODER.encode(ticket)
    return base64.urlsafe_b64encode(secret.sign(PURPOSE, body) + body).decode()


def read_ticket(secret: Secret, text: str, *, request_id: str, engine_id: str, now_s: float | None = None) -> Ticket:
    """The ticket, when it is ours, in time, and for that request of that engine.

    TicketRefused: it is missing, forged, or of another request or engine. LeaseExpired: it came too late.
    """
    if not text:
        raise TicketRefused(
            f"the hand-off of request {request_id} has no ticket; give prefill the same secret, and pass kvx_ticket on"
        )
    ticket = _opened(secret, text)
    if ticket is None:
        raise TicketRefused(f"the ticket of request {request_id} is not one that an engine with our secret signed")
    if (ticket.request_id, ticket.engine_id) != (request_id, engine_id):
        raise TicketRefused(
            f"the ticket is for request {ticket.request_id} of engine {ticket.engine_id}, not for {request_id:.80} of "
            f"{engine_id:.80}; pass kv_transfer_params on as prefill gave them"
        )
    now_s = time.time() if now_s is None else now_s
    if not now_s < ticket.expires_s:
        raise LeaseExpired(f"the ticket of request {request_id} expired {now_s - ticket.expires_s:.1f} s ago")
    return ticket


def _opened(secret: Secret, text: str) -> Ticket | None:
    if len(text) > LONGEST_TICKET:
        return None
    try:
        data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):  # a UnicodeError is a ValueError
        return None
    if base64.urlsafe_b64encode(data).decode() != text:
        return None  # base64 has several texts for some data; one ticket has one
    signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if not secret.is_signed(PURPOSE, body, signature):
        return None
    try:
        ticket = _DECODER.decode(body)
    except msgspec.MsgspecError:
        return None
    return ticket if ticket.version == VERSION else None
