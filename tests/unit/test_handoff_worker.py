"""The hand-off's thread and the calls of the engine, with a connector that the test plays."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import zmq
from fake_connector import FakeConnector, region
from test_handshake import INFO
from test_pulls import LAYER

from kvx import engine_side, handoff
from kvx.errors import ConnectorStateError, DriverUnavailable
from kvx.handoff import CacheFollower, Failure, HandoffSettings, HandoffWorker, Pull
from kvx.handshake import Claim, Claimed, Hello, Message, Refused, Release, Reply, Welcome, decode_reply, encode

DEADLINE_S = 10.0
VIEWS = {"a": torch.zeros(100, 1, 16, 8)}


def make_worker(connector: FakeConnector, **settings: object) -> HandoffWorker:
    worker = HandoffWorker(HandoffSettings(**settings), INFO, [connector])  # type: ignore[arg-type]
    worker.open([LAYER], VIEWS, 100, 1, "LBHNC")
    return worker


@pytest.fixture
def worker() -> Iterator[HandoffWorker]:
    connector = FakeConnector()
    connector.open([region(0, 100 * 512)], 1)
    made = make_worker(connector, transfer_deadline_s=DEADLINE_S)
    yield made
    made.close()


def a_pull(port: int, **fields: object) -> Pull:
    given = {"request_id": "r", "remote_request_id": "theirs", "remote_engine_id": "e", "host": "127.0.0.1",
             "port": port, "blocks": [[7, 8]], "first_token": 0, "num_tokens": 32, **fields}  # fmt: skip
    return Pull(**given)  # type: ignore[arg-type]


def test_leases_end_whatever_happens_to_the_pulls(worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker._puller, "tick", lambda now: 1 / 0)
    worker.hold("h", [[1]], 16, lease_s=0.05)
    assert worker.wait(20)
    assert worker.poll().expired == {"h"}
    assert worker.status()["side_channel"]["internal_errors"] > 0


def test_a_request_is_pulled_again_only_after_its_outcome_was_taken(worker: HandoffWorker) -> None:
    worker.pull(a_pull(worker.port))
    with pytest.raises(ConnectorStateError, match="being pulled already"):
        worker.pull(a_pull(worker.port))
    worker.cancel("r")
    assert worker.wait(20)
    assert worker.poll().failed == {
        "r": Failure("cancelled", f"e at 127.0.0.1:{worker.port}", "cancelled by the engine")
    }
    worker.pull(a_pull(worker.port))


def test_what_was_asked_for_in_the_last_moment_ends_too(worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, may_go, poll = threading.Event(), threading.Event(), worker._puller.tick

    def held(now: float) -> None:
        looking.set()
        assert may_go.wait(20)
        poll(now)

    monkeypatch.setattr(worker._puller, "tick", held)
    worker.cancel("nobody")  # so that a turn begins
    assert looking.wait(20)
    worker.pull(a_pull(worker.port))
    closing = threading.Thread(target=worker.close)
    closing.start()
    while not worker._stopping:
        pass
    may_go.set()
    closing.join(20)
    assert worker.poll().failed["r"].text == "the hand-off was closed"


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", -1), ("a" * 64, 5000), ("127.0.0.1", 0), ("\udc80", 5000)])
def test_a_malformed_address_fails_its_pull_at_once(worker: HandoffWorker, host: str, port: int) -> None:
    began = time.monotonic()
    worker.pull(a_pull(port, host=host))
    assert worker.wait(20)
    assert list(worker.poll().failed) == ["r"]
    assert time.monotonic() - began < 0.9 * DEADLINE_S, "not by its deadline"
    assert worker.status()["side_channel"]["internal_errors"] == 0


class Reader:
    """The other end of the side channel."""

    def __init__(self, port: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, message: Message) -> Reply:
        self.socket.send(encode(message))
        assert self.socket.poll(20_000), "no answer"
        return decode_reply(self.socket.recv())

    def claim(self, request_id: str, name: str = "x") -> Reply:
        return self.ask(Claim(sequence=1, request_id=request_id, reader=name, wait_s=5.0))


@pytest.fixture
def reader(worker: HandoffWorker) -> Iterator[Reader]:
    made = Reader(worker.port)
    yield made
    made.context.destroy(linger=0)


@pytest.mark.parametrize("end", ["release", "lease"])
def test_connectors_are_looked_at_for_a_while_after_a_reader_has_gone(end: str) -> None:
    """A library may have to learn that the reader has closed its connections before it is asked for the next."""
    connector, looks = FakeConnector(), threading.Semaphore(0)
    connector.open([region(0, 100 * 512)], 1)
    worker = make_worker(connector, grace_s=0)
    reader, poll = Reader(worker.port), connector.poll
    try:
        worker.hold("h", [[1]], 16, lease_s=1.5 if end == "lease" else 60.0)
        assert isinstance(reader.claim("h"), Claimed)
        if end == "release":
            reader.socket.send(encode(Release(sequence=2, request_id="h", reader="x")))
        assert worker.wait(10)
        connector.poll = lambda: looks.release() or poll()  # type: ignore[method-assign, func-returns-value]
        assert all(looks.acquire(timeout=20) for _ in range(5))
    finally:
        reader.context.destroy(linger=0)
        worker.close()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Of somebody who accepts connections and says nothing, so that a pull from there does not end by itself."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def suspending_in_background(worker: HandoffWorker) -> threading.Thread:
    """What is asked of the worker afterwards finds it suspending."""
    thread = threading.Thread(target=CacheFollower(worker, lambda: 100).close)
    thread.start()
    end = time.monotonic() + 20
    while not worker._holder._table.is_suspended:
        assert time.monotonic() < end
        time.sleep(0.001)
    return thread


def test_a_changing_cache_ends_holds_and_pulls_and_takes_no_new_ones(
    worker: HandoffWorker, reader: Reader, silent_port: int
) -> None:
    follower = CacheFollower(worker, lambda: 120)
    worker.hold("h", [[1]], 16)
    worker.pull(a_pull(silent_port, request_id="p"))
    began = time.monotonic()
    follower.close()
    assert time.monotonic() - began < 0.9 * DEADLINE_S, "not by the pull's deadline"
    events = worker.poll()
    assert events.expired == {"h"}
    assert "the cache went to sleep or changed" in events.failed["p"].text
    for refused in (lambda: worker.hold("h2", [[1]], 16), lambda: worker.pull(a_pull(silent_port, request_id="p2"))):
        with pytest.raises(ConnectorStateError, match="asleep or changing"):
            refused()
    worker.drop("h"), worker.cancel("p")
    answer = reader.ask(Hello(sequence=1, engine_id="x"))
    assert isinstance(answer, Refused)
    assert "asleep or changing" in answer.reason
    follower.open([], 5)
    answer = reader.claim("h")
    assert isinstance(answer, Refused)
    assert "its owner's cache changed" in answer.reason, "and what is there now is not read in its place"
    worker.hold("new", [[110]], 16)  # a block that was not there before
    answer = reader.claim("new")
    assert isinstance(answer, Claimed)
    assert (answer.generation, answer.blocks) == (5, [[110]])
    assert isinstance(reader.ask(Hello(sequence=1, engine_id="x")), Welcome)


def test_a_reader_that_has_claimed_may_finish_before_the_memory_goes(worker: HandoffWorker, reader: Reader) -> None:
    worker.hold("h", [[1]], 16, lease_s=20.0)
    assert isinstance(reader.claim("h", "first"), Claimed)
    suspending = suspending_in_background(worker)
    suspending.join(0.2)
    assert suspending.is_alive(), "its library is reading our memory"
    answer = reader.claim("h", "second")
    assert isinstance(answer, Refused)
    assert "its owner's cache is changing" in answer.reason
    reader.socket.send(encode(Release(sequence=2, request_id="h", reader="first")))
    suspending.join(20)
    assert not suspending.is_alive()
    assert worker.poll().released == {"h"}


def test_a_reader_that_never_ends_is_waited_for_until_its_lease_ends(reader: Reader, worker: HandoffWorker) -> None:
    worker._holder._table.grace_s = 0.2
    began = time.monotonic()
    worker.hold("h", [[1]], 16, lease_s=1.5)
    assert isinstance(reader.claim("h"), Claimed)
    worker.suspend()
    assert 1.5 <= time.monotonic() - began < 1.5 + DEADLINE_S
    assert worker.poll().expired == {"h"}


def test_no_digest_is_being_taken_when_the_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    going, may_end, taken = threading.Event(), threading.Event(), []

    def slow(*arguments: object, after: object) -> None:
        going.set()
        assert may_end.wait(20)
        taken.append(arguments)

    monkeypatch.setattr(engine_side, "request_digests", slow)
    connector = FakeConnector()
    connector.open([region(0, 100 * 512)], 1)
    worker = make_worker(connector, verify="all")
    worker.hold("running", [[1]], 16)
    worker.hold("queued", [[2]], 16)
    assert going.wait(20)
    suspending = suspending_in_background(worker)
    suspending.join(0.2)
    assert suspending.is_alive(), "a digest reads the memory"
    may_end.set()
    suspending.join(20)
    assert not suspending.is_alive()
    assert len(taken) == 1, "the queued one was never begun"
    assert worker.poll().expired == {"running", "queued"}
    with pytest.raises(ConnectorStateError, match="asleep or changing"):
        worker.hold("h", [[1]], 16)
    worker.close()


def test_an_engine_that_cannot_take_digests_where_its_cache_is_does_not_open() -> None:
    elsewhere = {"a": torch.zeros(100, 1, 16, 8, device="meta")}
    worker = HandoffWorker(HandoffSettings(verify="all"), INFO, [FakeConnector()])
    with pytest.raises(DriverUnavailable, match=r"'meta'.*set verify to off"):
        worker.open([LAYER], elsewhere, 100, 1, "LBHNC")
    worker.close()
    worker = HandoffWorker(HandoffSettings(), INFO, [FakeConnector()])
    worker.open([LAYER], elsewhere, 100, 1, "LBHNC")
    worker.close()


def test_what_follows_the_cache_needs_no_open_hand_off() -> None:
    worker = HandoffWorker(HandoffSettings(), INFO, [FakeConnector()])
    follower = CacheFollower(worker, lambda: 100)
    follower.open([], 1)
    follower.close()
    follower.close()
    worker.open([LAYER], VIEWS, 100, 1, "LBHNC")
    worker.hold("h", [[1]], 16)
    worker.close()
    follower.close()
    follower.open([], 2)


def test_the_thread_looks_soon_again_when_a_pull_begins_to_read(
    worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    enough = threading.Event()

    def wait(seconds: float) -> bool:
        slept.append(seconds)
        if len(slept) == 30:
            enough.set()
            monkeypatch.setattr(type(worker._puller), "is_moving", property(lambda _: False))
        return False

    monkeypatch.setattr(worker, "_is_noted", SimpleNamespace(wait=wait, set=lambda: None))
    monkeypatch.setattr(worker._puller, "take_begun", lambda: len(slept) == 15)
    monkeypatch.setattr(type(worker._puller), "is_moving", property(lambda _: True))
    worker.cancel("nothing")  # which wakes it
    assert enough.wait(20)
    assert slept[0] == slept[15] == handoff.FASTEST_POLL_S
    assert slept[14] == slept[29] == handoff.SLOWEST_POLL_S
    assert sorted(slept[:15]) == slept[:15]


def test_a_note_is_read_at_once_also_while_a_transfer_is_in_flight(
    worker: HandoffWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "FASTEST_POLL_S", 600.0)
    monkeypatch.setattr(handoff, "SLOWEST_POLL_S", 600.0)
    monkeypatch.setattr(worker, "_poll_s", 600.0)
    monkeypatch.setattr(type(worker._puller), "is_moving", property(lambda _: True))
    for _ in range(3):
        read = threading.Event()
        worker._post(read.set)
        assert read.wait(20)
    monkeypatch.undo()
    worker._wake()
