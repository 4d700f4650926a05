"""What the base class promises for every connector: order of calls, bounds, deadlines, each end once."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from fake_connector import BASE, FakeConnector, region, runs
from hypothesis import given
from hypothesis import strategies as st

from kvx.connector import ConnectorState, Op, TransferState
from kvx.errors import ConnectorError, ConnectorStateError, HandshakeError, LayoutError, TransferError, TransferTimeout
from kvx.peer import Peer, RegionTable
from kvx.plan import Runs


@pytest.fixture
def connector() -> FakeConnector:
    made = FakeConnector()
    made.open([region(0, 100), region(100, 100), region(300, 100)], 1)
    return made


@pytest.fixture
def peer(connector: FakeConnector) -> Peer:
    other = FakeConnector()
    other.open([region(0, 150, base=BASE * 2), region(200, 100, base=BASE * 2)], 7)
    return connector.connect(other.metadata())


def test_calls_in_another_order_are_refused() -> None:
    connector = FakeConnector()
    assert connector.state is ConnectorState.NEW
    for call in (connector.metadata, lambda: connector.connect(b"")):
        with pytest.raises(ConnectorStateError, match="needs an open connector; fake is new"):
            call()
    connector.close()
    connector.open([region(0, 100)], 1)
    with pytest.raises(ConnectorStateError, match="open already"):
        connector.open([region(0, 100)], 2)
    connector.close()
    connector.close()
    with pytest.raises(ConnectorStateError, match="generation 1; 1 is not newer"):
        connector.open([region(0, 100)], 1)
    connector.open([region(0, 100)], 2)
    assert connector.calls == ["open 1", "close", "open 1"]
    assert (connector.generation, connector.registered_bytes) == (2, 100)


def test_a_failed_opening_leaves_it_as_it_was() -> None:
    connector = FakeConnector()
    connector.fails_to_open = True
    with pytest.raises(ConnectorError):
        connector.open([region(0, 100)], 1)
    assert connector.state is ConnectorState.NEW
    with pytest.raises(LayoutError, match="one reservation"):
        connector.open([region(0, 100), region(0, 100, base=BASE * 3)], 1)
    with pytest.raises(ConnectorError, match="cannot move cuda memory, only cpu"):
        connector.open([region(0, 100, device="cuda:0")], 1)
    assert connector.registered_bytes == 0


def test_metadata_is_checked_before_the_library_sees_it(connector: FakeConnector) -> None:
    good = msgspec.msgpack.decode(connector.metadata())
    for field, value in {
        "version": 2, "connector": "other", "regions": [(0, 10), (5, 10)], "base_address": -1, "extra": 1,
        "generation": "1",
    }.items():  # fmt: skip
        with pytest.raises(HandshakeError):
            connector.connect(msgspec.msgpack.encode({**good, field: value}))
    with pytest.raises(HandshakeError):
        connector.connect(msgspec.msgpack.encode({**good, "regions": [(2**63, 2**63)]}))


def test_copies_are_cut_at_region_ends_on_either_side(connector: FakeConnector, peer: Peer) -> None:
    transfer = connector.submit(Op.READ, peer, runs((20, 40, 130)), deadline_s=1)
    assert transfer.num_descriptors == 2
    assert transfer.nbytes == 130
    (copies,) = connector.copies
    order = np.argsort(copies.local)
    assert (copies.local[order] - BASE).tolist() == [40, 100]
    assert (copies.remote[order] - 2 * BASE).tolist() == [20, 80]
    assert copies.length[order].tolist() == [60, 70]


@pytest.mark.parametrize(
    ("row", "side"),
    [
        ((0, 150, 60), "destination"),
        ((0, 200, 10), "destination"),
        ((0, 290, 20), "destination"),
        ((100, 0, 60), "source"),
        ((160, 0, 10), "source"),
        ((-10, 0, 20), "source"),
        ((2**61, 0, 20), "source"),
    ],
)
def test_no_byte_outside_the_regions(
    connector: FakeConnector, peer: Peer, row: tuple[int, int, int], side: str
) -> None:
    with pytest.raises(LayoutError, match=f"of the {side} reservation are not registered"):
        connector.submit(Op.READ, peer, runs((0, 0, 10), row), deadline_s=1)
    assert connector.copies == []


def test_what_it_cannot_do_is_refused(connector: FakeConnector, peer: Peer) -> None:
    with pytest.raises(ConnectorError, match="cannot write"):
        connector.submit(Op.WRITE, peer, runs((0, 0, 10)), deadline_s=1)
    with pytest.raises(ConnectorError, match="cannot notify"):
        connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=1, notify=b"x")
    with pytest.raises(TransferError, match="at least one byte"):
        connector.submit(Op.READ, peer, Runs.empty(), deadline_s=1)


def test_every_end_is_reported_once(connector: FakeConnector, peer: Peer) -> None:
    first, second = (connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=9) for _ in range(2))
    assert connector.poll().finished == ()
    connector.done.add(first)
    assert connector.poll().finished == (first,)
    assert first.state is TransferState.DONE
    connector.cancel(first)
    connector.cancel(second)
    connector.cancel(second)
    assert connector.calls.count("cancel") == 1
    assert connector.poll().finished == (), "not terminal before the library says so"
    connector.done.add(second)
    assert connector.poll().finished == (second,)
    assert second.state is TransferState.CANCELLED
    assert connector.poll().finished == ()


def test_a_deadline_asks_it_to_stop_and_is_the_cause(connector: FakeConnector, peer: Peer) -> None:
    transfer = connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=0.01)
    time.sleep(0.02)
    assert connector.poll().finished == ()
    assert "cancel" in connector.calls
    connector.done.add(transfer)
    assert connector.poll().finished == (transfer,)
    assert transfer.state is TransferState.FAILED
    assert isinstance(transfer.cause, TransferTimeout)
    assert "read of 10 bytes with peer library within 0.01 s" in str(transfer.cause)


def test_closing_ends_transfers_and_peers(connector: FakeConnector, peer: Peer) -> None:
    transfer = connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=9)
    connector.close()
    assert connector.poll().finished == (transfer,)
    assert transfer.state is TransferState.FAILED
    connector.open([region(0, 100)], 2)
    with pytest.raises(ConnectorStateError, match="not connected any more"):
        connector.submit(Op.READ, peer, runs((0, 0, 10)), deadline_s=1)
    connector.disconnect(peer)
    assert "disconnect library" not in connector.calls


def test_region_tables() -> None:
    table = RegionTable.of(BASE, [(100, 50), (0, 50)])
    assert table.registered_bytes == 100
    table.require_inside(np.array([0, 100, 149]), np.array([50, 50, 1]), "local")
    for ranges, offset, length, holds in (
        ([(0, 50)], 0, 50, True),
        ([(0, 50)], 1, 50, False),
        ([(10, 50)], 9, 5, False),
        ([(0, 50), (100, 50)], 100, 50, True),
        ([(0, 50), (100, 50)], 40, 20, False),
        ([(0, 50), (50, 50)], 40, 20, False),  # registered twice, so it must be cut
        ([(0, 64), (64, 64)], 64, 64, True),
        ([(0, 64), (128, 64)], 64, 64, False),  # between two
        ([], 0, 1, False),
    ):
        found = RegionTable.of(BASE, ranges).holds(np.array([0, offset]), np.array([0, length]))
        assert found is (holds and bool(ranges) and ranges[0][0] == 0), (ranges, offset, length)
    assert RegionTable.of(BASE, [(0, 50)]).holds(np.array([], np.int64), np.array([], np.int64))
    for base, ranges in ((2**63 + 4096, [(0, 5)]), (BASE, [(2**62, 5)]), (BASE, [(0, 2**62)])):
        with pytest.raises(LayoutError, match="bytes and more"):
            RegionTable.of(base, ranges)
    for bad in ([(0, 0)], [(-1, 5)], [(0, 10), (9, 5)]):
        with pytest.raises(LayoutError):
            RegionTable.of(BASE, bad)
    with pytest.raises(LayoutError, match="no memory of the local"):
        RegionTable.of(0, []).require_inside(np.array([0]), np.array([1]), "local")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(-2, 40), st.integers(1, 9)), min_size=1, max_size=8),
    st.sampled_from([1, 7, 64, 1 << 21, 1 << 40]),
    st.booleans(),
    st.booleans(),
)
def test_a_region_table_knows_what_it_holds(
    spaces: list[tuple[int, int]], asked: list[tuple[int, int]], unit: int, has_gaps: bool, is_ragged: bool
) -> None:
    """In units of a byte, of no power of two, and so large that its look-up table would be too large."""
    ranges, start = [], 0
    for gap, length in spaces:
        start += gap * has_gaps
        ranges.append((start * unit, length * unit))
        start += length
    if is_ragged:
        ranges.append((start * unit + 1, 1))  # beside every grid
    offsets, lengths = np.array(asked, np.int64).T * unit
    found = RegionTable.of(BASE, ranges)
    assert found.holds(offsets, lengths) == all(
        any(first <= offset and offset + length <= first + nbytes for first, nbytes in ranges)
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    )
