"""The connector under test, its peer, and what the memory of both must hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvx.connector import Connector, ConnectorState, Op, Transfer, TransferState
from kvx.peer import Peer
from kvx.plan import Runs
from kvx.testing import faults
from kvx.testing.kit import Kit
from kvx.testing.memory import Bytes, KitMemory, pattern
from kvx.testing.own_memory import OwnMemory
from kvx.testing.peer_engine import POLL_INTERVAL_S, Rows, runs_of
from kvx.testing.peers import Processes, ProcessPeer

OURS, THEIRS = 1, 2


def require(kit: Kit, op: Op) -> None:
    """Skip a test that needs an operation which is not declared; that it is refused is a test of its own."""
    if op not in kit.capabilities.operations:
        pytest.skip(f"capability {op.value} is not declared")


def require_processes(kit: Kit) -> None:
    """Skip a test that needs a peer which can die."""
    if not kit.capabilities.reaches_processes:
        pytest.skip("capability reaches_processes is not declared")


def wait(connector: Connector, transfers: Sequence[Transfer], timeout_s: float) -> None:
    """Poll until all are terminal; each must be reported exactly once, with the state that it then has."""
    reported: list[Transfer] = []
    deadline = time.monotonic() + timeout_s
    while True:
        finished = connector.poll().finished
        assert all(transfer.state is not TransferState.PENDING for transfer in finished), "reported while PENDING"
        reported += finished
        missing = [transfer for transfer in transfers if transfer not in reported]
        if not missing:
            break
        assert time.monotonic() < deadline, f"{len(missing)} transfers were not reported within {timeout_s:g} s"
        time.sleep(POLL_INTERVAL_S)
    twice = [transfer for transfer in reported if reported.count(transfer) > 1]
    assert not twice, "poll reported a transfer more than once"


def require_equal(found: Bytes, expected: Bytes, whose: str) -> None:
    """Every byte of a side, guard bytes and bytes that no transfer named included."""
    if not np.array_equal(found, expected):
        wrong = np.flatnonzero(found != expected)
        pytest.fail(
            f"{len(wrong)} bytes of {whose} memory are wrong, from offset {wrong[0]} to {wrong[-1]}: "
            f"{found[wrong[0]]:#x} found, {expected[wrong[0]]:#x} expected"
        )


class Pair:
    """One of each for a whole test class; `fresh` mends what a test left broken."""

    def __init__(self, kit: Kit, processes: Processes, fault: str | None) -> None:
        self.kit = kit
        self.processes = processes
        self.memory = KitMemory(kit.driver())
        self.expected = {OURS: pattern(OURS), THEIRS: pattern(THEIRS)}
        self._fault = fault
        self._generation = 0
        self._connector: Connector | None = None
        self._remote: Peer | None = None
        self.peer: Any = None
        self.peer_metadata = b""

    @property
    def ours(self) -> Connector:
        assert self._connector is not None, "fresh() was not called"
        return self._connector

    @property
    def remote(self) -> Peer:
        assert self._remote is not None, "fresh() was not called"
        return self._remote

    def start(self) -> None:
        self.memory.open()

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
        if self.peer is not None:
            self.peer.stop()
        self.memory.close()

    def fresh(self) -> Pair:
        """Both open and connected, and the memory of both as in the beginning."""
        if self.peer is None or (isinstance(self.peer, ProcessPeer) and not self.peer.is_alive):
            self._start_peer()
        if self.ours.state is not ConnectorState.OPEN:
            self.open()
        if self._remote is None or not self._remote.connected:
            self.connect()
        self.ours.poll()
        self.memory.fill(OURS)
        self.peer.fill(THEIRS)
        self.expected = {OURS: pattern(OURS), THEIRS: pattern(THEIRS)}
        return self

    def _start_peer(self) -> None:
        if self._connector is None:
            self._connector = faults.with_fault(self.kit.make_connector(), self._fault)
        self.peer, self._remote = self.kit.make_peer(self.processes, self.ours), None
        if not isinstance(self.peer, OwnMemory):
            self.peer_metadata = self.peer.open(1)

    def open(self) -> None:
        """Open our connector under a new generation; peers have to be connected again."""
        self._generation += 1
        self.ours.open(self.memory.regions(), self._generation)
        self._remote = None
        if isinstance(self.peer, OwnMemory):  # it came with the opening
            self.peer_metadata = self.peer.open(self._generation)
            self.peer.fill(THEIRS)
            self.expected[THEIRS] = pattern(THEIRS)

    def connect(self) -> Peer:
        self._remote = self.ours.connect(self.peer_metadata)
        return self._remote

    def submit(self, op: Op, rows: Rows, deadline_s: float | None = None, notify: bytes = b"") -> Transfer:
        return self.submit_runs(op, runs_of(rows), deadline_s, notify)

    def submit_runs(self, op: Op, runs: Runs, deadline_s: float | None = None, notify: bytes = b"") -> Transfer:
        wanted = self.kit.deadline_s if deadline_s is None else deadline_s
        return self.ours.submit(op, self.remote, runs, deadline_s=wanted, notify=notify)

    def wait(self, *transfers: Transfer, timeout_s: float | None = None) -> None:
        wait(self.ours, transfers, timeout_s or self.kit.deadline_s + self.kit.stop_s)

    def move(self, op: Op, rows: Rows, notify: bytes = b"") -> None:
        """A transfer that must be done, and whose bytes `check` then expects."""
        transfer = self.submit(op, rows, notify=notify)
        self.wait(transfer)
        assert transfer.state is TransferState.DONE, transfer.cause
        assert transfer.nbytes == sum(length for _, _, length in rows)
        self.apply(op, rows)

    def apply(self, op: Op, rows: Rows) -> None:
        """What a transfer does to the memory, by the meaning of the words."""
        from_side, to_side = self.sides(op)
        before = self.expected[from_side].copy() if from_side == to_side else self.expected[from_side]
        for source, destination, length in rows:
            self.expected[to_side][destination : destination + length] = before[source : source + length]

    def sides(self, op: Op) -> tuple[int, int]:
        """Source and destination side of an operation."""
        return (THEIRS, OURS) if op is Op.READ else (OURS, THEIRS)

    def check(self) -> None:
        require_equal(self.memory.snapshot(), self.expected[OURS], "our")
        if (found := self.peer.snapshot()) is not None:
            require_equal(found, self.expected[THEIRS], "the peer's")

    def refill(self, side: int, offset: int, data: bytes) -> None:
        """Write a range of one side, past the connector."""
        (self.memory.write if side == OURS else self.peer.poke)(offset, data)
        self.expected[side][offset : offset + len(data)] = np.frombuffer(data, np.uint8)
