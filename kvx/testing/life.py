"""Life cycle: new, open, closed, and what each of them allows."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvx.connector import Connector, ConnectorState, Op, TransferState
from kvx.errors import ConnectorError, ConnectorStateError, LayoutError
from kvx.peer import Peer, RegionTable
from kvx.testing.faults import AFTER_CLOSE_S
from kvx.testing.kit import Kit
from kvx.testing.memory import MIB, REGISTERED
from kvx.testing.pair import OURS, Pair, require_processes
from kvx.testing.peer_engine import runs_of

REGISTERED_BYTES = sum(nbytes for _, nbytes in REGISTERED)


class LifeTests(Kit):
    """Every connector passes all of these."""

    @pytest.mark.usefixtures("pair")
    def test_a_constructor_does_no_io_and_starts_no_thread(self) -> None:
        before = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task"), _children()
        made = [self.make_connector() for _ in range(20)]
        assert (os.listdir("/proc/self/fd"), os.listdir("/proc/self/task"), _children()) == before
        for connector in made:
            assert connector.state is ConnectorState.NEW
            assert connector.registered_bytes == 0
            assert connector.poll().finished == ()

    def test_its_class_says_who_it_is(self) -> None:
        connector = self.make_connector()
        assert connector.name
        assert connector.capabilities == type(connector).capabilities
        assert connector.capabilities.operations, "a connector that can neither READ nor WRITE moves nothing"
        assert connector.capabilities.memory, "a connector needs at least one kind of memory"

    def test_nothing_works_before_it_is_open(self, pair: Pair) -> None:
        connector = self.make_connector()
        _require_all_refused(connector, pair.remote, pair.ours.metadata())
        connector.close()
        assert connector.state is ConnectorState.NEW, "there was nothing to close"
        pair.move(self.operations()[0], [(0, 0, 64)])

    def test_open_registers_the_regions_and_nothing_else(self, pair: Pair) -> None:
        pair.ours.close()
        assert pair.ours.registered_bytes == 0
        pair.open()
        assert pair.ours.registered_bytes == REGISTERED_BYTES, "bytes registered that were not given, or too few"

    def test_it_refuses_to_open_twice(self, pair: Pair) -> None:
        with pytest.raises(ConnectorStateError, match="open already"):
            pair.ours.open(pair.memory.regions(), pair.ours.generation + 1)
        pair.move(self.operations()[0], [(0, 0, 64)])
        pair.check()

    def test_it_opens_again_under_a_newer_generation_only(self, pair: Pair) -> None:
        old = pair.remote
        pair.ours.close()
        with pytest.raises(ConnectorStateError, match="not newer"):
            pair.ours.open(pair.memory.regions(), pair.ours.generation)
        assert pair.ours.state is ConnectorState.CLOSED
        pair.open()
        with pytest.raises(ConnectorStateError, match="not connected"):
            pair.ours.submit(self.operations()[0], old, runs_of([(0, 0, 64)]), deadline_s=1.0)
        pair.connect()
        pair.move(self.operations()[0], [(0, 0, 64)])
        pair.check()

    def test_it_refuses_memory_that_it_cannot_move(self, pair: Pair) -> None:
        connector = self.make_connector()
        regions = [
            replace(region, mapping=replace(region.mapping, device="nowhere:0")) for region in pair.memory.regions()
        ]
        with pytest.raises(ConnectorError, match="cannot move nowhere memory"):
            connector.open(regions, 1)
        with pytest.raises(LayoutError):
            connector.open([], 1)
        assert connector.state is ConnectorState.NEW
        connector.close()

    def test_close_is_idempotent_and_ends_everything(self, pair: Pair) -> None:
        metadata, remote = pair.ours.metadata(), pair.remote
        for _ in range(2):
            pair.ours.close()
            assert pair.ours.state is ConnectorState.CLOSED
        assert pair.ours.registered_bytes == 0
        assert not remote.connected
        assert pair.ours.poll().finished == ()
        pair.ours.disconnect(remote)
        _require_all_refused(pair.ours, remote, metadata)

    def test_nothing_is_touched_after_close(self, pair: Pair) -> None:
        for op in self.operations():
            pair.move(op, [(0, 0, MIB)])
        pair.check()
        pair.ours.close()
        pair.refill(OURS, 0, b"\x3c" * (4 * MIB))
        time.sleep(4 * AFTER_CLOSE_S)
        pair.check()

    def test_close_with_transfers_in_flight(self, pair: Pair) -> None:
        """Each is reported exactly once, by the polls after the close, and does not move any more."""
        for op in self.operations():
            pair.fresh()
            pair.move(op, [(0, 0, 64)])
            transfers = [pair.submit(op, [(index * MIB, (5 - index) * MIB, MIB)]) for index in range(6)]
            began = time.monotonic()
            pair.ours.close()
            assert time.monotonic() - began < self.stop_s
            assert all(transfer.state is not TransferState.PENDING for transfer in transfers)
            pair.refill(OURS, 0, b"\x3d" * (6 * MIB))
            pair.wait(*transfers)
            assert pair.ours.poll().finished == ()
            time.sleep(0.1)
            assert pair.memory.read(0, 6 * MIB) == b"\x3d" * (6 * MIB), "bytes arrived after the close"

    def test_a_peer_that_is_disconnected_is_gone(self, pair: Pair) -> None:
        old = pair.remote
        for _ in range(2):
            pair.ours.disconnect(old)
        assert not old.connected
        with pytest.raises(ConnectorStateError, match="not connected"):
            pair.submit(self.operations()[0], [(0, 0, 64)])
        pair.connect()
        pair.move(self.operations()[0], [(0, 0, 64)])
        pair.check()

    def test_the_same_peer_can_be_connected_again(self, pair: Pair) -> None:
        old = pair.remote
        assert pair.connect() is not old
        assert not old.connected or old.name != pair.remote.name
        pair.move(self.operations()[0], [(0, 0, 64)])
        pair.check()

    def test_a_peer_that_opened_again_is_connected_under_its_new_generation(self, pair: Pair) -> None:
        require_processes(self)
        assert pair.remote.generation == 1
        pair.peer.close_connector()
        pair.peer_metadata = pair.peer.open(2)
        assert pair.connect().generation == 2
        for op in self.operations():
            pair.move(op, [(0, MIB, 64)])
        pair.check()
        pair.peer.stop()
        pair.peer = None  # the next test gets one of the first generation

    def test_what_is_not_declared_is_refused(self, pair: Pair) -> None:
        undeclared = [op for op in Op if op not in self.capabilities.operations]
        if not undeclared and self.capabilities.notify:
            pytest.skip("capabilities read, write and notify are declared: there is nothing to refuse")
        for op in undeclared:
            with pytest.raises(ConnectorError, match=f"cannot {op.value}"):
                pair.submit(op, [(0, 0, 64)])
        if not self.capabilities.notify:
            with pytest.raises(ConnectorError, match="cannot notify"):
                pair.submit(self.operations()[0], [(0, 0, 64)], notify=b"hello")
        pair.check()


def _require_all_refused(connector: Connector, remote: Peer, metadata: bytes) -> None:
    other = Peer(name=remote.name, generation=1, regions=RegionTable.of(0, [(0, 64)]))
    with pytest.raises(ConnectorStateError, match="needs an open connector"):
        connector.metadata()
    with pytest.raises(ConnectorStateError, match="needs an open connector"):
        connector.connect(metadata)
    with pytest.raises(ConnectorStateError, match="needs an open connector"):
        connector.submit(Op.READ, other, runs_of([(0, 0, 1)]), deadline_s=1.0)
    assert connector.registered_bytes == 0


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()
