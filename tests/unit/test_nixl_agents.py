"""The NIXL connector's agents, with NIXL played by the test: what a drain ends, what it leaves, and when it fails."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
from fake_connector import BASE, region, runs

nixl = pytest.importorskip("kvx_connectors.nixl")

from kvx.connector import ConnectorState, Op, TransferState  # noqa: E402
from kvx.errors import ConnectorError, ConnectorStateError, TransferTimeout  # noqa: E402


class FakeAgent:
    """Transfers never end by themselves."""

    started: list[str] = []  # noqa: RUF012  reset by the fixture, as the others are
    answers: dict[str, object] = {}  # noqa: RUF012
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

    def initialize_xfer(self, *arguments: object) -> object:
        return object()

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
