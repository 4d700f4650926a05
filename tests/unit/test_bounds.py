"""Every queue has a bound, and what happens there is said (docs/failure-model.md, "Queues")."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import zmq
from kvx_connectors import ipc_listener
from test_handoff_worker import a_pull, worker
from test_handshake import INFO
from test_holds import Table, claim, hold
from test_pulls import Pair

from kvx import handoff, holder, holds, owners, sidechannel
from kvx.engine_side import EngineSide, HandoffSettings, Waiting
from kvx.errors import ConnectorError, Crowded
from kvx.handoff import HandoffWorker
from kvx.handshake import Digests, Hello, Message, Refused, Status, StatusReply, encode
from kvx.holder import Holder
from kvx.sidechannel import Link, Server

__all__ = ["worker"]


def until(holds_: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds_():
        assert time.monotonic() < end
        time.sleep(0.005)


# The engine's own requests


def test_one_hold_too_many_is_refused_and_a_place_is_free_when_one_has_ended(
    worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "MOST_HOLDS", 2)
    for name in ("a", "b"):
        worker.hold(name, [[1]], 16)
    with pytest.raises(Crowded, match="2 requests are held already"):
        worker.hold("c", [[1]], 16)
    worker.drop("a")
    assert worker.wait(20)
    assert worker.poll().released == {"a"}
    worker.hold("c", [[1]], 16)


def test_one_pull_too_many_is_refused_and_a_place_is_free_when_one_has_ended(
    worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "MOST_PULLS", 2)
    for name in ("a", "b"):
        worker.pull(a_pull(9, request_id=name))
    with pytest.raises(Crowded, match="2 pulls are on their way already") as caught:
        worker.pull(a_pull(9, request_id="c"))
    assert caught.value.cause == "crowded"
    worker.cancel("a")
    until(lambda: "a" in worker.poll().failed)
    worker.pull(a_pull(9, request_id="c"))


def test_renewals_are_left_out_when_the_thread_does_not_come_to_them(
    worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "MOST_NOTES", 3)
    monkeypatch.setattr(worker, "_post", worker._notes.append)  # it sleeps on
    for number in range(10):
        worker.keep(Waiting(f"r{number}", "theirs", "e", "127.0.0.1", 9))
    assert len(worker._notes) == 3


# Engines that are read from


def kept_places(pair: Pair) -> list[int]:
    return [port for _, port in pair.puller._owners._owners]


def received_from(pair: Pair, port: int) -> None:
    name = f"r{port}"
    pair.start(request_id=name, port=port)
    pair.welcome()
    pair.claimed()
    pair.finish(pair.transfer)
    assert pair.events().received == {name}


def test_the_engine_that_nobody_has_needed_for_longest_gives_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MOST_OWNERS", 2)
    pair = Pair()
    for port in (1, 2):
        received_from(pair, port)
    pair.start(request_id="again", port=1)
    pair.puller.cancel("again")
    received_from(pair, 3)
    assert kept_places(pair) == [1, 3]
    assert [link.port for link in pair.links if link.is_closed] == [2]
    assert [type(said).__name__ for said in pair.links[1].told] == ["Release"], "it heard that its hold is not needed"


def test_no_engine_in_use_gives_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "MOST_OWNERS", 2)
    pair = Pair()
    pair.start(request_id="pulls", port=1)
    pair.puller.keep(Waiting("waits", "theirs", "e", "10.0.0.1", 2), time.monotonic())
    pair.puller.keep(Waiting("too many", "theirs", "e", "10.0.0.1", 3), time.monotonic())
    pair.start(request_id="crowded", port=4)
    failure = pair.events().failed["crowded"]
    assert failure.cause == "crowded"
    assert "2 engines are being read from already" in failure.text
    assert pair.side.metrics.failures == {"crowded": 1}
    assert kept_places(pair) == [1, 2]
    pair.start(request_id="waits", port=2)
    pair.puller.cancel("waits")
    received_from(pair, 4)
    assert kept_places(pair) == [1, 4]


def test_a_greeting_that_could_not_be_sent_is_sent_for_the_next_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    received_from(pair, 1)
    owner = pair.puller._owners.get("10.0.0.1", 1)
    pair.puller.keep(Waiting("waits", "theirs", "e", "10.0.0.1", 1), time.monotonic())  # so the engine stays known
    pair.puller._owners.disconnect(owner)  # as with a new generation
    full = Crowded("full")

    def ask(message: Message, on_reply: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(pair.link, "ask", ask)
        pair.start(request_id="crowded")
        assert pair.events().failed["crowded"].cause == "crowded"
    received_from(pair, 1)


# What others ask of us


def test_claims_that_wait_and_readers_of_one_hold_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MOST_PARKED", 2)
    monkeypatch.setattr(holds, "MOST_READERS", 1)
    table = Table()
    for number in range(3):
        table.claim(b"x", claim(f"unknown {number}"), 0.0)
    (answer,) = table.answers()
    assert isinstance(answer, Refused)
    assert (answer.cause, "2 claims wait" in answer.reason) == ("crowded", True)
    table.add(hold(), 0.0)
    for reader in ("one", "two"):
        table.claim(b"x", claim(reader=reader), 0.0)
    answer = table.answers()[-1]
    assert isinstance(answer, Refused)
    assert (answer.cause, "is being read by 1 pulls" in answer.reason) == ("crowded", True)


def test_questions_for_digests_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "MOST_WAITING", 2)
    sent: list[Message] = []
    owner = Holder(_side(), lambda receiver, message: sent.append(message), dict)
    held = hold()
    held.digests, held.expires = Future(), time.monotonic() + 60
    owner.add(held)
    asks = [
        Digests(sequence=number, request_id="r", group=0, first_token=0, num_tokens=1, head_start=0, head_count=1)
        for number in range(3)
    ]
    for ask in asks:
        owner.answer(b"x", ask)
    (answer,) = sent
    assert isinstance(answer, Refused)
    assert (answer.sequence, answer.cause) == (2, "crowded")


def test_what_happens_every_turn_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    side = _side()
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                side.internal_error("hand-off thread")
    assert side.metrics.internal_errors == 1000
    assert len(caplog.records) == 10


# Sockets


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of a few messages; the kernel's buffers hold some more."""
    for name, most in {"MOST_WAITING": 2, "MOST_UNSENT": 4}.items():
        monkeypatch.setattr(sidechannel, name, most)


@pytest.mark.usefixtures("small")
def test_who_sends_and_is_not_read_waits(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server, stranger = Server(context, "127.0.0.1", 0), context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.SNDHWM, 1)
    stranger.setsockopt(zmq.SNDTIMEO, 500)
    stranger.connect(f"tcp://127.0.0.1:{server.port}")
    data = b"\0" * (1 << 20)
    with pytest.raises(zmq.Again):  # and not all of it in our memory
        for _ in range(64):
            stranger.send(data)
    stranger.close(linger=0)
    server.close()


@pytest.mark.usefixtures("small")
def test_replies_that_nobody_reads_are_lost_and_counted(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server, reader = Server(context, "127.0.0.1", 0), context.socket(zmq.DEALER)
    reader.setsockopt(zmq.RCVHWM, 1)
    reader.connect(f"tcp://127.0.0.1:{server.port}")
    reader.send(encode(Hello(sequence=1, engine_id="x")))
    assert server.socket.poll(20_000)
    ((receiver, _),) = server.requests()
    large = StatusReply(sequence=1, status={"text": "x" * (1 << 20)})
    assert not all(server.send(receiver, large) for _ in range(64))
    reader.close(linger=0)
    until(lambda: not list(server.requests()) and server.send(receiver, large))  # nobody is there to lose anything
    server.close()


def test_a_lost_reply_is_one_of_the_messages_refused(worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker._server, "send", lambda receiver, message: False)
    worker._reply(b"\0x", Refused(sequence=1, reason="no"))
    assert worker.status()["messages_refused"] == {"unread": 1}


@pytest.mark.usefixtures("small")
def test_an_owner_that_does_not_read_gets_no_more(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    listening = context.socket(zmq.ROUTER)
    listening.setsockopt(zmq.RCVHWM, 1)
    port = listening.bind_to_random_port("tcp://127.0.0.1")
    link = Link(context, "127.0.0.1", port, "127.0.0.1")
    with pytest.raises(Crowded, match="takes no more messages"):
        for _ in range(64):
            link.tell(StatusReply(sequence=1, status={"text": "x" * (1 << 20)}))
            time.sleep(0.005)  # what has not left us at once is what the bound is for
    link.close()
    listening.close(linger=0)


def test_of_replies_that_never_come_the_oldest_is_forgotten(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidechannel, "MOST_ASKED", 3)
    server = Server(context, "127.0.0.1", 0)
    link = Link(context, "127.0.0.1", server.port, "127.0.0.1")
    heard: list[str] = []
    asked = []
    for name in "abcde":
        link.ask(Status(sequence=0), lambda reply, name=name: heard.append(name))  # type: ignore[misc]
        assert server.socket.poll(20_000)
        asked += list(server.requests())
    for receiver, request in asked:
        assert isinstance(request, Status)
        server.send(receiver, StatusReply(sequence=request.sequence, status={}))

    def hear() -> bool:
        for on_reply, reply in link.replies():
            on_reply(reply)
        return "e" in heard

    until(hear)
    assert heard == ["c", "d", "e"]
    link.close()
    server.close()


# The connector `ipc`


def test_one_process_too_many_gets_no_memory_and_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ipc_listener, "MOST_CONNECTIONS", 2)
    name = uuid.uuid4().hex
    listener = ipc_listener.Listener(name, lambda: [os.open("/dev/null", os.O_RDONLY)])
    listener.start()
    try:
        kept = [ipc_listener.ask(name, 1) for _ in range(2)]
        for _ in range(9):
            with pytest.raises(ConnectorError):
                ipc_listener.ask(name, 1)
        assert len([record for record in caplog.records if "2 processes have our memory" in record.getMessage()]) == 4
        for connection, fds in kept:
            connection.close()
            for fd in fds:
                os.close(fd)
        until(lambda: not listener._watched)
        connection, (fd,) = ipc_listener.ask(name, 1)
        os.close(fd)
        connection.close()
    finally:
        listener.stop()


def _side() -> EngineSide:
    return EngineSide(HandoffSettings(), INFO, [], post=lambda note: None)
