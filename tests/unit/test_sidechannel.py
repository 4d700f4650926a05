"""The side channel's sockets, against what cannot be connected to."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from fake_connector import FakeConnector
from test_handoff_worker import a_pull, make_worker
from test_handshake import INFO

from kvx.engine_side import EngineSide, HandoffSettings
from kvx.errors import HandshakeError, PeerDead
from kvx.handoff import Failure
from kvx.handshake import Message, Refused, Status, encode, exchange
from kvx.holder import Holder
from kvx.seal import RefusedMessage
from kvx.sidechannel import MOST_AT_ONCE, Link, Server


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", -1), ("127.0.0.1", 0), ("::1", 65536)])
def test_a_link_to_nowhere_is_a_handshake_error_and_leaves_no_socket(host: str, port: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(HandshakeError):
        Link(context, host, port, host)
    gc.collect()
    context.term()  # would wait for ever for a socket that is still open


def test_a_link_says_why_it_is_lost_and_that_nobody_listens_is_one_reason() -> None:
    """What waits in it for an engine that ended must not reach the next one at its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "127.0.0.1", 0)
    try:
        link = Link(context, "127.0.0.1", server.port, "127.0.0.1")
        link.tell(Status(sequence=0))
        assert server.socket.poll(20_000)
        assert link.why_lost() == ""
        server.close()
        assert link.monitor.poll(20_000)
        assert link.why_lost() == f"engine 127.0.0.1:{server.port} closed its side channel; is it still running?"
        with socket.socket() as bound:  # and does not listen
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            late = Link(context, "127.0.0.1", port, "127.0.0.1")
            assert late.monitor.poll(20_000)
            assert late.why_lost() == f"engine 127.0.0.1:{port} cannot be connected to; is it still running?"
        link.close()
        late.close()
    finally:
        context.destroy(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Refusing:
    """In the place of an owner with CURVE keys: it greets, so that who has none goes before it has said anything."""

    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(20)
        self.port: int = self.listening.getsockname()[1]

    def refuse(self, channel: zmq.Socket[bytes]) -> None:
        """Nothing can be sent through it when this returns. What its monitor tells is not read."""
        connection, _ = self.listening.accept()
        with connection:
            connection.sendall(self.greeting)
            end = time.monotonic() + 20
            while channel.poll(0, zmq.POLLOUT):
                assert time.monotonic() < end, "not refused within 20 s"
                time.sleep(0.001)


@pytest.fixture
def owner() -> Iterator[Refusing]:
    made = Refusing()
    yield made
    made.listening.close()


def test_a_link_that_is_refused_before_it_says_anything_is_lost_and_not_crowded(
    context: zmq.Context[zmq.Socket[bytes]], owner: Refusing
) -> None:
    link = Link(context, "127.0.0.1", owner.port, "127.0.0.1")
    owner.refuse(link.socket)
    why = f"engine 127.0.0.1:{owner.port} has other CURVE keys, or none; give all engines one KVX_CURVE_DIR"
    link.tell(Status(sequence=0))
    link.ask(Status(sequence=0), lambda reply: None)
    assert link.monitor.poll(0), "who waits for it is woken"
    assert link.why_lost() == why
    link.tell(Status(sequence=0))
    assert link.why_lost() == why, "for who asks next, too"
    link.close()


def test_a_pull_whose_link_is_refused_before_its_first_word_says_why(
    owner: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(FakeConnector())
    open_link = worker._open_link

    def open_late(host: str, port: int, address: str) -> Link:
        link = open_link(host, port, address)
        owner.refuse(link.socket)
        return link

    monkeypatch.setattr(worker._puller._owners, "_open_link", open_late)
    place = f"127.0.0.1:{owner.port}"
    worker.pull(a_pull(owner.port))
    try:
        assert worker.wait(10)
    finally:
        worker.close()
    assert worker.poll().failed == {
        "r": Failure(
            "peer_dead", f"e at {place}",
            f"engine {place} has other CURVE keys, or none; give all engines one KVX_CURVE_DIR",
        )
    }  # fmt: skip


def test_a_question_that_is_refused_before_it_is_asked_does_not_wait_for_ever(
    owner: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[zmq.Socket[bytes]] = []

    class Context(zmq.Context[zmq.Socket[bytes]]):
        def socket(self, *kind: int) -> zmq.Socket[bytes]:  # type: ignore[override]
            made.append(super().socket(*kind))
            return made[-1]

    class Late(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            owner.refuse(made[0])
            return super().__iter__()

    monkeypatch.setattr(zmq, "Context", Context)
    told: list[str] = []

    def ask() -> None:
        try:
            exchange("127.0.0.1", owner.port, Late([encode(Status(sequence=1))]), None, 5.0)
        except PeerDead as error:
            told.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    assert told == [f"the side channel of 127.0.0.1:{owner.port} closed the connection"]


def test_a_flood_of_requests_is_read_in_parts() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, dealer = Server(context, "127.0.0.1", 0), context.socket(zmq.DEALER)
    try:
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        count = MOST_AT_ONCE + 100
        for sequence in range(count):
            dealer.send(encode(Status(sequence=sequence)))
        read = 0
        while read < count:
            assert server.socket.poll(20_000), "what is left is still announced"
            part = len(list(server.requests()))
            assert part <= MOST_AT_ONCE
            read += part
    finally:
        server.close()
        context.destroy(linger=0)


def test_refused_messages_are_counted_each_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []
    side = EngineSide(HandoffSettings(), INFO, [], post=lambda note: None)
    holder = Holder(side, lambda receiver, message: sent.append(message), dict)
    with caplog.at_level(logging.WARNING):
        for sequence in range(100):
            holder.answer(b"x", RefusedMessage("not one\nfake line", sequence, "unsigned"))
    assert side.metrics.as_status(0)["messages_refused"] == {"unsigned": 100}
    assert [message.sequence for message in sent if isinstance(message, Refused)] == list(range(100))
    assert len(caplog.records) == 7, "the 1st, 2nd, 4th ... 64th"
    assert all("\n" not in record.getMessage() for record in caplog.records)
