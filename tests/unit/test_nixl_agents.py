"""The NIXL connector's agents, with NIXL played by the test: what a drain ends, what it leaves, and when it fails.

And READs in pieces: what is on its way at any time.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from typing import Any

import pytest
from fake_connector import BASE, region, runs

nixl = pytest.importorskip("kvx_connectors.nixl")

from kvx.connector import ConnectorState, Op, TransferState  # noqa: E402
from kvx.errors import ConnectorError, ConnectorStateError, TransferTimeout  # noqa: E402


class Handle:
    """Of a transfer, as NIXL's: a weak reference sees its end."""


class FakeAgent:
    """Transfers never end by themselves."""

    started: list[str] = []  # noqa: RUF012  reset by the fixture, as the others are
    answers: dict[str, object] = {}  # noqa: RUF012
    asked_for: list[tuple[int, object]] = []  # noqa: RUF012
    alive: Any = None
    fails_to_start = False

    def __init__(self, name: str, config: object) -> None:
        if FakeAgent.fails_to_start:
            raise RuntimeError("no file descriptors left")
        FakeAgent.started.append(name)
        FakeAgent.alive.add(self)
        self.name = name

    def register_memory(self, rows: object, kind: str) -> str:
        return "registered"

    def deregister_memory(self, registered: object) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        pass

    def make_connection(self, name: str) -> None:
        pass

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        return rows

    def initialize_xfer(self, op: str, local: Any, remote: Any, name: str, notify: object) -> object:
        FakeAgent.asked_for.append((int(local[0][0]) - BASE, notify))
        return Handle()

    def transfer(self, handle: object) -> str:
        return self._answer("transfer")

    def check_xfer_state(self, handle: object) -> str:
        return self._answer("check")

    def _answer(self, call: str) -> str:
        answer = FakeAgent.answers.get(call, "PROC")
        if isinstance(answer, Exception):
            raise type(answer)(*answer.args)
        return str(answer)

    def release_xfer_handle(self, handle: object) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(nixl, "nixl_agent", FakeAgent)
    monkeypatch.setattr(nixl, "nixl_agent_config", lambda **options: options)
    monkeypatch.setattr(nixl, "DRAIN_S", 0.0)
    monkeypatch.setattr(FakeAgent, "started", [])
    monkeypatch.setattr(FakeAgent, "answers", {})
    monkeypatch.setattr(FakeAgent, "asked_for", [])
    monkeypatch.setattr(FakeAgent, "alive", weakref.WeakSet())
    monkeypatch.setattr(FakeAgent, "fails_to_start", False)
    made = nixl.NixlConnector("ours")
    made.open([region(0, 1000)], 1)
    return made


def peer_of(connector: Any, name: str) -> Any:
    return connector.connect(metadata_of(name))


def metadata_of(name: str) -> bytes:
    theirs = nixl.NixlConnector(name)
    fails, FakeAgent.fails_to_start = FakeAgent.fails_to_start, False
    theirs.open([region(0, 1000, base=2 * BASE)], 1)
    FakeAgent.fails_to_start = fails
    metadata: bytes = theirs.metadata()
    return metadata


def test_a_drain_ends_the_agent_of_that_peer_alone(connector: Any) -> None:
    stopped, healthy = peer_of(connector, "stopped"), peer_of(connector, "healthy")
    assert FakeAgent.started.count("ours/moving") == 2, "one for each peer"
    late = connector.submit(Op.READ, stopped, runs((0, 0, 10)), deadline_s=-1.0)
    second = connector.submit(Op.READ, stopped, runs((0, 50, 10)), deadline_s=30.0)
    beside = connector.submit(Op.READ, healthy, runs((0, 100, 10)), deadline_s=30.0)
    agent = weakref.ref(stopped.library.agent.library)
    assert set(connector.poll().finished) == {late, second}
    assert agent() is None, "only its end is a proven drain"
    assert isinstance(late.cause, TransferTimeout)
    assert "another transfer with this peer" in str(second.cause)
    assert beside.state is TransferState.PENDING
    with pytest.raises(ConnectorStateError, match="shake hands again"):
        connector.submit(Op.READ, stopped, runs((0, 0, 10)), deadline_s=1.0)
    FakeAgent.answers["check"] = "DONE"
    assert connector.poll().finished == (beside,)
    assert beside.state is TransferState.DONE


@pytest.mark.parametrize("call", ["transfer", "check"])
@pytest.mark.parametrize("answer", ["ERR", RuntimeError("NIXL_ERR_BACKEND")])
def test_a_transfer_that_nixl_gives_up_is_drained_too(connector: Any, call: str, answer: object) -> None:
    peer = peer_of(connector, "theirs")
    agent = weakref.ref(peer.library.agent.library)
    FakeAgent.answers[call] = answer
    transfer = connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=30.0)
    assert connector.poll().finished == (transfer,)
    assert agent() is None
    assert transfer.state is TransferState.FAILED
    assert ("status ERR" if answer == "ERR" else "NIXL_ERR_BACKEND") in str(transfer.cause)
    assert not peer.connected


def test_a_cancelled_transfer_may_end_by_itself_until_its_deadline(connector: Any) -> None:
    """Ending a READ in its middle can end the peer's process, and aborts of requests are common."""
    peer = peer_of(connector, "theirs")
    transfer = connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=1.0)
    connector.cancel(transfer)
    assert connector.poll().finished == ()
    time.sleep(max(0.0, transfer.deadline - time.monotonic()) + 0.01)
    assert connector.poll().finished == (transfer,)
    assert transfer.state is TransferState.CANCELLED


def test_without_a_new_agent_the_handshake_says_why(connector: Any) -> None:
    peer_of(connector, "first")
    FakeAgent.fails_to_start = True
    for _ in range(2):
        with pytest.raises(ConnectorError, match="NIXL could not start an agent and register memory: no file descr"):
            peer_of(connector, "second")
    assert connector.state is ConnectorState.OPEN, "others can still read from us"
    assert connector.metadata()
    assert connector.poll().finished == ()
    FakeAgent.fails_to_start = False
    back = peer_of(connector, "second")
    assert connector.submit(Op.READ, back, runs((0, 0, 10)), deadline_s=9.0).state is TransferState.PENDING
    connector.close()
    assert connector.poll().finished[0].state is TransferState.FAILED
    assert connector.state is ConnectorState.CLOSED


def test_no_agent_outlives_its_use(connector: Any) -> None:
    for name in ("a", "b", "a", "c"):  # one of a known name takes the place of that one
        peer_of(connector, name)
    assert FakeAgent.started.count("ours/moving") == 3, "the first agent of a was taken for its second"
    for name in ("a", "b", "c"):
        connector.disconnect(connector._peers[name])
    gc.collect()
    assert [agent.name for agent in FakeAgent.alive if agent.name.startswith("ours")].count("ours/moving") == 1
    connector.close()
    assert not [agent.name for agent in FakeAgent.alive if agent.name.startswith("ours")]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch, connector: Any) -> Any:
    """The same connector, over plain TCP: a copy of more than 100 bytes is several pieces."""
    monkeypatch.setattr("kvx_connectors.nixl_pieces.PIECE_BYTES", 100)
    monkeypatch.setattr("kvx_connectors.nixl_pieces.SMALL_BYTES", 10)
    connector.close()
    monkeypatch.setattr(os, "environ", {"UCX_TLS": "tcp,self"})
    connector.open([region(0, 1000)], 2)
    return connector


def test_of_all_reads_with_a_peer_one_piece_is_on_its_way(in_pieces: Any) -> None:
    peer, other = peer_of(in_pieces, "theirs"), peer_of(in_pieces, "other")
    long = in_pieces.submit(Op.READ, peer, runs((0, 0, 250)), deadline_s=30.0)
    short = in_pieces.submit(Op.READ, peer, runs((0, 500, 100)), deadline_s=30.0)
    beside = in_pieces.submit(Op.READ, other, runs((0, 800, 100)), deadline_s=30.0)
    assert in_pieces.poll().finished == ()
    assert [start for start, _ in FakeAgent.asked_for] == [0, 800], "one of each peer"
    FakeAgent.answers["check"] = "DONE"
    ended = []
    while long.state is TransferState.PENDING:
        ended += in_pieces.poll().finished
    assert [start for start, _ in FakeAgent.asked_for] == [0, 800, 500, 100, 200], "in turn"
    assert set(ended) == {beside, short, long}
    assert {each.state for each in ended} == {TransferState.DONE}


def test_who_is_told_is_told_with_the_last_piece(in_pieces: Any) -> None:
    peer = peer_of(in_pieces, "theirs")
    FakeAgent.answers = {"transfer": "DONE"}
    ended = in_pieces.submit(Op.READ, peer, runs((0, 0, 250)), deadline_s=30.0, notify=b"read")
    assert in_pieces.poll().finished == (ended,)
    assert FakeAgent.asked_for == [(0, b""), (100, b""), (200, b"read")]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_read_that_is_stopped_asks_for_no_other_piece(in_pieces: Any, monkeypatch: Any, how: str) -> None:
    """It ends with the one that is on its way, and its peer's agent goes on."""
    monkeypatch.setattr(nixl, "DRAIN_S", 30.0)
    peer = peer_of(in_pieces, "theirs")
    stopped = in_pieces.submit(Op.READ, peer, runs((0, 0, 250)), deadline_s=30.0 if how == "cancel" else -1.0)
    waiting = in_pieces.submit(Op.READ, peer, runs((0, 500, 250)), deadline_s=30.0)
    if how == "cancel":
        in_pieces.cancel(stopped)
    in_pieces.cancel(waiting)
    assert in_pieces.poll().finished == (waiting,), "nothing of it was on its way"
    FakeAgent.answers["check"] = "DONE"
    assert in_pieces.poll().finished == (stopped,)
    assert stopped.state is (TransferState.CANCELLED if how == "cancel" else TransferState.FAILED)
    assert [start for start, _ in FakeAgent.asked_for] == [0]
    assert in_pieces.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=30.0).state is TransferState.PENDING


def test_a_piece_that_does_not_come_is_drained(in_pieces: Any) -> None:
    peer = peer_of(in_pieces, "theirs")
    late = in_pieces.submit(Op.READ, peer, runs((0, 0, 250)), deadline_s=-1.0)
    behind = in_pieces.submit(Op.READ, peer, runs((0, 500, 10)), deadline_s=30.0)
    agent, handle = weakref.ref(peer.library.agent.library), weakref.ref(late.handle.on_way)
    assert set(in_pieces.poll().finished) == {late, behind}
    assert agent() is None
    assert handle() is None
    assert isinstance(late.cause, TransferTimeout)
    assert "another transfer with this peer" in str(behind.cause)
    assert not peer.connected


@pytest.mark.parametrize("answer", ["ERR", RuntimeError("NIXL_ERR_BACKEND")])
def test_a_later_piece_that_nixl_gives_up_ends_the_read(in_pieces: Any, answer: object) -> None:
    peer = peer_of(in_pieces, "theirs")
    transfer = in_pieces.submit(Op.READ, peer, runs((0, 0, 250)), deadline_s=30.0)
    FakeAgent.answers = {"check": "DONE", "transfer": answer}
    assert in_pieces.poll().finished == (transfer,)
    assert transfer.state is TransferState.FAILED
    assert not peer.connected


@pytest.mark.parametrize(("transports", "in_pieces"), [("tcp,self", True), ("tcp,self,cma", False), (None, False)])
def test_messages_are_as_long_as_pieces_where_reads_are_sent(
    monkeypatch: pytest.MonkeyPatch, connector: Any, transports: str | None, in_pieces: bool
) -> None:
    connector.close()
    monkeypatch.setattr(os, "environ", {"UCX_TLS": transports} if transports else {})
    connector.open([region(0, 1000)], 2)
    assert os.environ["UCX_TCP_RX_SEG_SIZE"] == str(nixl.MESSAGE_BYTES), "whatever the peer sends"
    assert os.environ.get("UCX_TCP_TX_SEG_SIZE") == (str(nixl.MESSAGE_BYTES) if in_pieces else None)
    assert os.environ.get("UCX_KEEPALIVE_INTERVAL") == ("inf" if in_pieces else None)
    connector.submit(Op.READ, peer_of(connector, "theirs"), runs((0, 0, 200)), deadline_s=30.0)
    assert isinstance(connector._pending[0].handle, nixl.Pieces) is in_pieces
