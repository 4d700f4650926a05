"""The ways by which bytes of others come in, without sockets: what a fuzzer sends through them, and what must hold.

An input's first byte chooses how the rest is sent; see each door's `HOW`. `feed` returns what became of the message, as
a short word, and raises for whatever must not be: an error that is not ours, an answer to a stranger, state that grows.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from fake_connector import BASE, FakeConnector, region
from handoff_world import SimulatedExecutor
from simulated_network import Connection, Network
from test_handshake import INFO
from test_pulls import LAYER

from kvx import engine_side, handshake, ticket  # noqa: F401  engine_side: for who patches it
from kvx.addresses import AllowedHosts
from kvx.digest import DIGEST_NAME, digests
from kvx.engine_side import EngineSide, HandoffSettings, Pull
from kvx.errors import PeerDead, StaleGeneration, TransferError
from kvx.handshake import Claim, Claimed, DigestPage, Hello, Release, Status, StatusReply, Welcome
from kvx.holder import MOST_WAITING, Holder
from kvx.holds import MOST_PARKED, Hold
from kvx.peer import PeerDescriptor
from kvx.pulls import Puller
from kvx.seal import REQUEST_LIMIT_BYTES, ReplySeal, RequestSeal
from kvx.secret import Secret
from kvx.sidechannel import STRANGERS_REPLY, Link, Server
from kvx.ticket import PURPOSE, Ticket, read_ticket, write_ticket

SECRET, OTHER = Secret(b"a secret of tests"), Secret(b"not the secret of it")
VIEWS = {"a": torch.zeros(100, 1, 16, 8)}
# What one message may make Python allocate at its peak. The factor: a small integer or an empty text is one byte of
# msgpack, 8 of a list's and 8 of an array's; the schema counts, and so bounds, texts, tuples and table entries.
FIXED_BYTES, BYTES_A_BYTE = 1 << 20, 24
# A connection that is not used any more goes, as that of a real stranger does.
FRESH_AFTER = 2000


def most_bytes(length: int) -> int:
    return FIXED_BYTES + BYTES_A_BYTE * length


class Door:
    """`name` is also its corpus's folder."""

    name = ""
    secret: Secret | None = None

    def feed(self, data: bytes) -> str:
        raise NotImplementedError

    def require_usable(self) -> None:
        """What an engine says still does what it should."""

    def large(self) -> Iterator[bytes]:
        """Inputs too long for a mutator: over the limit, and bombs just below it."""
        yield from ()


def array(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4) + item * count


def with_field(message: msgspec.Struct, name: str, value: bytes) -> bytes:
    """A message with one field's bytes replaced."""
    raw = msgspec.to_builtins(message)
    raw.pop(name)
    parts = [msgspec.msgpack.encode(item) for pair in raw.items() for item in pair]
    return bytes([0x80 + len(raw) + 1]) + b"".join(parts) + msgspec.msgpack.encode(name) + value


class OwnerDoor(Door):
    """Requests. With a secret, the first byte chooses: 0 to 2 sealed as an engine would, 3 as it is, 4 sealed and then
    changed, 5 the last sealed one again, 6 sealed with another secret, 7 sealed an hour ago.
    """

    def __init__(self, secret: Secret | None) -> None:
        self.name, self.secret = "owner" if secret is None else "owner-sealed", secret
        self._begin()

    def _begin(self) -> None:
        self.count = self.checks = 0
        self.network = Network()
        connector = FakeConnector()
        connector.open([region(0, 100 * 512)], 1)
        settings = HandoffSettings(verify="all", lease_s=600.0)
        self.side = EngineSide(settings, INFO, [connector], post=lambda note: note(), secret=self.secret)
        self.side.update([LAYER], VIEWS, 100, 1, "LBHNC")
        self.server = Server(self.network, "127.0.0.1", 5000, ReplySeal(self.secret))  # type: ignore[arg-type]
        self.holder = Holder(self.side, self.server.send, lambda: {"fine": True})
        self.engine = RequestSeal(self.secret)
        self.other = RequestSeal(OTHER)
        self.late = RequestSeal(self.secret, clock=lambda: time.time() - 3600)
        self.sequence, self.last = 0, b""
        self.link = Link(self.network, "127.0.0.1", 5000, "127.0.0.1", RequestSeal(self.secret))  # type: ignore[arg-type]
        self.connection: Connection = self.link.socket.connection  # type: ignore[attr-defined]
        self._hold("r")

    def _hold(self, request_id: str) -> None:
        now = time.monotonic()
        hold = Hold(request_id, ((1, 2),), 20, now + 600, 600.0, now + 600)
        hold.digests = Future()
        hold.digests.set_result([digests(VIEWS, LAYER, [1, 2], 0, 20)])
        self.holder.add(hold)

    def feed(self, data: bytes) -> str:
        if self.count >= FRESH_AFTER:
            self.require_usable()
            self._begin()
        self.count += 1
        how, sent = self._sealed(data)
        before = dict(self.side.metrics.refused_by_cause)
        answers = self._say(sent)
        assert len(self.holder._table._parked) <= MOST_PARKED
        assert len(self.holder._waiting_digests) <= MOST_WAITING
        assert self.side.metrics.internal_errors == 0
        causes = [name for name, count in self.side.metrics.refused_by_cause.items() if count != before.get(name, 0)]
        if self.secret is not None and how > 2:
            self._require_nothing(answers)
            assert causes, "a stranger was heard"
        if causes:
            return causes[0]
        return "answered" if answers else "taken"

    def _sealed(self, data: bytes) -> tuple[int, bytes]:
        how, body = (data[0] % 8 if data else 3), data[1:]
        if self.secret is None:
            return 0, body
        self.sequence += 1
        if how <= 2:
            self.last = self.engine.seal(self.sequence, body)[0]
            return how, self.last
        if how == 4:
            sealed = bytearray(self.engine.seal(self.sequence, body[2:])[0])
            place = int.from_bytes(body[:2]) % len(sealed)
            sealed[place] ^= 1 + sum(body) % 255
            return how, bytes(sealed)
        if how == 5 and self.last:
            return how, self.last
        if how in (6, 7):
            return how, (self.other if how == 6 else self.late).seal(self.sequence, body)[0]
        return 3, body

    def _say(self, data: bytes) -> list[bytes]:
        router = self.network.routers["tcp://127.0.0.1:5000"]
        self.connection.server = router
        router.inbox.append([self.connection.name, data])
        for sender, request in self.server.requests():
            self.holder.answer(sender, request)
        answers = [message.data for message in self.network.in_flight]
        self.network.in_flight.clear()
        return answers

    def _require_nothing(self, answers: list[bytes]) -> None:
        for answer in answers:
            reply = handshake.decode_reply(answer)
            assert isinstance(reply, handshake.Refused)
            assert (reply.reason, reply.cause) == (STRANGERS_REPLY, ""), "a stranger learned something"
        assert self.holder.num_held == 1, "a stranger freed something"

    def require_usable(self) -> None:
        """The connection over which all of it came serves an engine: it greets, claims, and frees."""
        self.checks += 1
        name = f"held for an engine, no. {self.checks}"  # nobody else has claimed it
        self._hold(name)
        words = Ticket(
            request_id=name, engine_id=INFO.engine_id, instances=(self.side.instance,), host="127.0.0.1", port=5000,
            num_tokens=20, expires_s=time.time() + 60,
        )  # fmt: skip
        signed = write_ticket(self.secret, words) if self.secret is not None else ""
        claim = Claim(sequence=0, request_id=name, reader="me", wait_s=1.0, ticket=signed)
        assert isinstance(self._ask(Status(sequence=0)), StatusReply)
        assert isinstance(self._ask(Hello(sequence=0, engine_id="e")), Welcome)
        assert isinstance(self._ask(claim), Claimed)
        held = self.holder.num_held
        self.link.tell(Release(sequence=0, request_id=name, reader="me"))
        self._pass_on()
        assert self.holder.num_held == held - 1

    def _ask(self, message: Any) -> Any:
        replies: list[Any] = []
        self.link.ask(message, replies.append)
        for answer in self._pass_on():
            self.link.socket.inbox.append(answer)  # type: ignore[attr-defined]
        for on_reply, reply in self.link.replies():
            on_reply(reply)
        (found,) = replies
        return found

    def _pass_on(self) -> list[bytes]:
        (message,) = self.network.in_flight
        self.network.in_flight.clear()
        return self._say(message.data)

    def large(self) -> Iterator[bytes]:
        how = b"\x00"
        yield how + b"\x90" * (REQUEST_LIMIT_BYTES + 1)
        yield b"\x03" + b"\x90" * (4 * handshake.MESSAGE_LIMIT_BYTES)
        yield how + with_field(Hello(sequence=1, engine_id=""), "engine_id", array(60_000, b"\x90"))
        yield how + with_field(Status(sequence=1), "version", array(60_000, b"\x80"))
        yield how + b"\x91" * 60_000


class ReaderDoor(Door):
    """Replies to a pull. The first byte's low bits choose: 0 answers the greeting, 1 the claim, 2 the question.

    With a secret the next bits choose: 0 and 1 sealed as the owner would, 2 as it is, 3 for another request's nonce.
    """

    def __init__(self, secret: Secret | None) -> None:
        self.name, self.secret = "reader" if secret is None else "reader-sealed", secret
        self.connector = FakeConnector()
        self.connector.open([region(0, 100 * 512)], 1)
        theirs = FakeConnector()
        theirs.open([region(0, 100 * 512, base=2 * BASE)], 1)
        self.theirs = PeerDescriptor(
            info=INFO, instance="i", generation=1, layout="LBHNC", groups=(LAYER,), num_blocks=100, verify="all",
            digest=DIGEST_NAME, connectors={"fake": theirs.metadata()},
        )  # fmt: skip
        self.owner = ReplySeal(secret)
        words = Ticket(
            request_id="theirs", engine_id="e", instances=("i",), host="127.0.0.1", port=1, num_tokens=32,
            expires_s=time.time() + 86400,
        )  # fmt: skip
        self.ticket = write_ticket(secret, words) if secret is not None else ""
        claimed = Claimed(sequence=2, request_id="theirs", instance="i", generation=1, blocks=[[3, 5]], num_tokens=32,
                          left_s=30.0)  # fmt: skip
        self.good = [handshake.encode(handshake.welcome(1, self.theirs)), handshake.encode(claimed)]
        self.page = digests(VIEWS, LAYER, [1, 2], 0, 32).values.tobytes()

    def feed(self, data: bytes) -> str:
        self._start()
        try:
            return self._feed(data[1:], data[0] % 4 % 3 if data else 0, data[0] // 4 % 4 if data else 2)
        finally:
            self._stop()

    def _start(self) -> None:
        self.network = Network()
        self.notes: list[Any] = []
        SimulatedExecutor.jobs.clear()
        settings = HandoffSettings(verify="all")
        self.side = EngineSide(settings, INFO, [self.connector], post=self.notes.append, secret=self.secret)
        self.side.allowed = AllowedHosts.loopback()
        self.side.update([LAYER], VIEWS, 100, 1, "LBHNC")
        self.puller = Puller(self.side, self._open_link, lambda link: link.close())
        self.puller.start(
            Pull(
                request_id="r", remote_request_id="theirs", remote_engine_id="e", host="127.0.0.1", port=1,
                blocks=[[7, 8]], first_token=0, num_tokens=32, ticket=self.ticket,
            ),
            time.monotonic(),
        )  # fmt: skip

    def _open_link(self, host: str, port: int, address: str) -> Link:
        return Link(self.network, host, port, address, RequestSeal(self.secret))  # type: ignore[arg-type]

    def _stop(self) -> None:
        """However it went, the pull ends once, and nothing is left."""
        self.puller.close()
        self._finish_transfers()
        assert not self.puller.is_moving
        assert not self.puller.links
        assert not self.connector._pending
        self.side.end_digests()

    def _feed(self, data: bytes, phase: int, how: int) -> str:
        for reply in self.good[:phase]:
            self._reply(reply, 0)
        if phase == 2:
            self._finish_transfers()
        refused = self._reply(data, how)
        self._finish_transfers()
        for job in list(SimulatedExecutor.jobs):
            job.work()
        while self.notes:
            self.notes.pop(0)()
        assert self.side.metrics.internal_errors == 0
        events = self.side.outbox.take()
        if self.secret is not None and how > 1:
            assert refused or not (events.received or events.failed), "a stranger was heard"
        if refused:
            return refused
        if events.received:
            assert phase == 2, "received, and nothing was compared"
            return "received"
        return f"failed: {events.failed['r'].cause}" if events.failed else "waits"

    def _reply(self, body: bytes, how: int) -> str:
        """As a link of the hand-off thread takes it; what it is refused for."""
        if not self.puller.links:
            return ""
        (link,) = self.puller.links
        asked = max(link._waiting, default=0)
        nonce = link._waiting[asked][1] if asked else bytes(16)
        if self.secret is not None and how != 2:
            body = self.owner.seal(asked, nonce if how < 2 else bytes(16), body)
        link.socket.inbox.append(body)  # type: ignore[attr-defined]
        try:
            for on_reply, reply in link.replies():
                on_reply(reply)
        except handshake.RefusedMessage as error:
            self.puller.on_link_lost(link, PeerDead("refused"))
            return error.cause
        return ""

    def _finish_transfers(self) -> None:
        for _ in range(3):
            self.connector.done.update(self.connector._pending)
            for transfer in self.connector.poll().finished:
                self.puller.on_transfer(transfer)
        self.connector.done.clear()
        self.connector.copies.clear()
        self.connector.calls.clear()

    def require_usable(self) -> None:
        page = handshake.encode(DigestPage(sequence=3, request_id="theirs", digests=self.page))
        assert self.feed(b"\x02" + page) == "received", "a pull works"

    def large(self) -> Iterator[bytes]:
        most = handshake.MESSAGE_LIMIT_BYTES - 4096
        welcome = handshake.welcome(1, self.theirs)
        claimed = Claimed(sequence=2, request_id="theirs", instance="i", generation=1, blocks=[], num_tokens=32,
                          left_s=30.0)  # fmt: skip
        status = StatusReply(sequence=1, status={})
        yield b"\x00" + b"\x90" * (handshake.MESSAGE_LIMIT_BYTES + 1)
        yield b"\x00" + with_field(welcome, "groups", array(most, b"\x80"))
        yield b"\x00" + with_field(welcome, "groups", b"\x91\x81\xa1a" + array(most, b"\x01"))
        yield b"\x00" + with_field(welcome, "connectors", b"\x81\xa4fake\xc6" + most.to_bytes(4) + bytes(most))
        yield b"\x00" + with_field(status, "status", b"\x81\xa1a" + array(most, b"\x90"))
        yield b"\x01" + with_field(claimed, "blocks", array(most, b"\x90"))
        yield b"\x01" + with_field(claimed, "blocks", b"\x91" + array(most, b"\x01"))
        yield b"\x01" + with_field(claimed, "blocks", b"\x91" + array(handshake.MOST_BLOCKS, b"\x01"))
        yield b"\x02" + handshake.encode(DigestPage(sequence=3, request_id="theirs", digests=bytes(most)))


class TicketDoor(Door):
    """Tickets from HTTP. The first byte chooses: 0 the text as it is, 1 signed, 2 a right one with one other character,
    3 signed with another secret.
    """

    name, secret = "ticket", SECRET

    def __init__(self) -> None:
        self.right = Ticket(
            request_id="r", engine_id="e", instances=("i",), host="127.0.0.1", port=5000, num_tokens=32, expires_s=2e9
        )
        self.text = write_ticket(SECRET, self.right)

    def feed(self, data: bytes) -> str:
        how, body = (data[0] % 4 if data else 0), data[1:]
        text = body.decode("latin-1")
        if how in (1, 3):
            signer = SECRET if how == 1 else OTHER
            text = base64.urlsafe_b64encode(signer.sign(PURPOSE, body) + body).decode()
        elif how == 2 and len(body) > 1:
            place = int.from_bytes(body[:2]) % len(self.text)
            text = self.text[:place] + body[2:3].decode("latin-1") + self.text[place + 1 :]
        try:
            read = read_ticket(SECRET, text, request_id="r", engine_id="e", now_s=1e9)
            read.require_place("127.0.0.1", 5000)
            read.require_tokens(32)
            read.require_instance("i")
        except (StaleGeneration, TransferError) as error:
            assert text != self.text
            return next((word for word in WORDS if word in str(error)), "refused")
        assert how == 1 or text == self.text, "nobody signed it"
        return "taken"

    def require_usable(self) -> None:
        assert read_ticket(SECRET, self.text, request_id="r", engine_id="e", now_s=1e9) == self.right

    def large(self) -> Iterator[bytes]:
        yield b"\x00" + b"A" * (ticket.LONGEST_TICKET + 4)
        yield b"\x00" + b"A" * (1 << 20)
        yield b"\x01" + with_field(self.right, "instances", array(6000, b"\xa0"))


# Of a ticket's refusals, as they are counted here.
WORDS = ("no ticket", "not one that an engine", "is for request", "expired", "leads to", "tokens", "restarted")
DOORS: dict[str, Any] = {
    "owner": lambda: OwnerDoor(None),
    "owner-sealed": lambda: OwnerDoor(SECRET),
    "reader": lambda: ReaderDoor(None),
    "reader-sealed": lambda: ReaderDoor(SECRET),
    "ticket": TicketDoor,
}
