"""Data: the bytes that were asked for arrive, whole when a transfer is DONE, and no byte beside them changes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvx.connector import Op, TransferState
from kvx.errors import LayoutError, TransferError
from kvx.layout import KVCacheLayout
from kvx.plan import Runs
from kvx.testing.kit import Kit
from kvx.testing.layouts import COMPACT, Cache, Move
from kvx.testing.memory import BORDERS, CONTIGUOUS_BYTES, MIB, TAIL_OFFSET
from kvx.testing.pair import OURS, Pair, require, require_processes
from kvx.testing.peer_engine import Rows, runs_of

each_op = pytest.mark.parametrize("op", list(Op), ids=lambda op: op.value)
LBHNC, LBNHC, BLHNC = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC
_ALWAYS = {(LBNHC, LBNHC), (LBHNC, LBNHC), (LBNHC, BLHNC)}
LAYOUT_PAIRS = [
    pytest.param(
        ours, theirs, marks=[] if (ours, theirs) in _ALWAYS else pytest.mark.matrix, id=f"{ours.name}-{theirs.name}"
    )
    for ours in COMPACT
    for theirs in COMPACT
]
BLOCK_COUNTS = [1, 2, 33, 1000, 10_000]


def blocks(count: int, nbytes: int, order: str) -> Rows:
    """Rows of so many blocks: in order, or both sides in an order of their own; block 0 of the destination is left."""
    places = CONTIGUOUS_BYTES // nbytes
    source, destination = np.arange(count), np.arange(1, count + 1)
    if order == "permuted":
        rng = np.random.default_rng(count)
        source, destination = rng.permutation(places)[:count], rng.permutation(places)[:count]
    return [(a * nbytes, b * nbytes, nbytes) for a, b in zip(source.tolist(), destination.tolist(), strict=True)]


class DataTests(Kit):
    """The whole memory of both sides is compared each time: every byte around a run is a guard."""

    @each_op
    @pytest.mark.parametrize("order", ["in order", "permuted"])
    @pytest.mark.parametrize("count", BLOCK_COUNTS)
    def test_blocks(self, pair: Pair, op: Op, count: int, order: str) -> None:
        require(self, op)
        pair.move(op, blocks(count, 1024, order))
        pair.check()

    @each_op
    @pytest.mark.parametrize("nbytes", [1, 3, 63, 4095, 4097, 65_537])
    def test_odd_lengths_at_odd_places(self, pair: Pair, op: Op, nbytes: int) -> None:
        require(self, op)
        pair.move(op, [(7 + index * 70_001, 1013 + (8 - index) * 69_997, nbytes) for index in range(9)])
        pair.check()

    @each_op
    def test_the_first_and_the_last_byte_of_each_region(self, pair: Pair, op: Op) -> None:
        require(self, op)
        ends = [0, *(at + shift for at in BORDERS for shift in (-1, 0)), CONTIGUOUS_BYTES - 1, TAIL_OFFSET]
        ends.append(TAIL_OFFSET + MIB - 1)
        pair.move(op, [(source, destination, 1) for source, destination in zip(ends, reversed(ends), strict=True)])
        pair.check()

    @each_op
    def test_a_run_across_regions(self, pair: Pair, op: Op) -> None:
        require(self, op)
        pair.move(op, [(MIB + 5, 3, 9 * MIB)])
        pair.check()

    @each_op
    @pytest.mark.parametrize(("ours", "theirs"), LAYOUT_PAIRS)
    def test_layout_pairs(self, pair: Pair, op: Op, ours: KVCacheLayout, theirs: KVCacheLayout) -> None:
        self._move(pair, op, Cache(ours), Cache(theirs), 0, 300)

    @each_op
    @pytest.mark.parametrize(
        ("ours", "theirs"), [((0, 2), (0, 4)), ((2, 2), (0, 4)), ((3, 1), (2, 2)), ((0, 4), (0, 4))], ids=str
    )
    def test_head_splits(self, pair: Pair, op: Op, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        our_side, their_side = (Cache(LBHNC, first_head=first, num_heads=count) for first, count in (ours, theirs))
        self._move(pair, op, our_side, their_side, 16, 200)

    @each_op
    @pytest.mark.parametrize(
        ("ours", "theirs"), [((16, None), (32, None)), ((32, 16), (48, 8)), ((128, 32), (16, None))], ids=str
    )
    def test_block_sizes(
        self, pair: Pair, op: Op, ours: tuple[int, int | None], theirs: tuple[int, int | None]
    ) -> None:
        our_side, their_side = (
            Cache(LBHNC, block_size_tokens=size, kernel_block_size_tokens=kernel) for size, kernel in (ours, theirs)
        )
        self._move(pair, op, our_side, their_side, 37, 201)

    def _move(self, pair: Pair, op: Op, ours: Cache, theirs: Cache, first: int, count: int) -> None:
        require(self, op)
        source, destination = (theirs, ours) if op is Op.READ else (ours, theirs)
        move = Move(source, destination, first, count)
        transfer = pair.submit_runs(op, move.runs())
        pair.wait(transfer)
        assert transfer.state is TransferState.DONE, transfer.cause
        from_side, to_side = pair.sides(op)
        move.apply(pair.expected[from_side], pair.expected[to_side])
        pair.check()

    @each_op
    def test_transfers_in_flight_side_by_side(self, pair: Pair, op: Op) -> None:
        require(self, op)
        parts = [[(index * 7000, MIB + (15 - index) * 8000, 6999)] for index in range(16)]
        transfers = [pair.submit(op, rows) for rows in parts]
        pair.wait(*transfers)
        assert [transfer.state for transfer in transfers] == [TransferState.DONE] * 16
        for rows in parts:
            pair.apply(op, rows)
        pair.check()

    @each_op
    def test_done_means_that_the_bytes_are_there(self, pair: Pair, op: Op) -> None:
        """Looked at in the moment in which the state is seen, and again later: nothing follows."""
        require(self, op)
        source, destination = pair.sides(op)
        for index in range(20):
            data = bytes([index + 1]) * MIB
            pair.refill(source, 0, data)
            transfer = pair.submit(op, [(0, 2 * MIB, MIB)])
            pair.wait(transfer)
            found = pair.memory.read(2 * MIB, MIB) if destination == OURS else pair.peer.peek(2 * MIB, MIB)
            assert found == data, "reported as done before its bytes were there"
        pair.refill(destination, 2 * MIB, b"\xee" * MIB)
        time.sleep(0.2)
        pair.ours.poll()
        pair.check()

    @each_op
    def test_poll_reports_a_transfer_once(self, pair: Pair, op: Op) -> None:
        require(self, op)
        transfer = pair.submit(op, [(0, 0, 4096)])
        pair.wait(transfer)
        for _ in range(20):
            assert pair.ours.poll().finished == (), "reported again"
            time.sleep(0.005)

    @each_op
    def test_bytes_that_are_not_registered_are_refused(self, pair: Pair, op: Op) -> None:
        """On either side, before the library sees anything: between two regions, behind the last, before the first."""
        require(self, op)
        ends = (CONTIGUOUS_BYTES, TAIL_OFFSET + MIB)
        ours = [*(end - 8 for end in ends), CONTIGUOUS_BYTES + MIB, TAIL_OFFSET - 8, 16 * MIB, -16]
        theirs = ours if self.capabilities.reaches_processes else [int(pair.remote.regions.ends[-1]) - 8, -16]
        source, destination = (theirs, ours) if op is Op.READ else (ours, theirs)
        rows = [(outside, 0, 16) for outside in source] + [(0, outside, 16) for outside in destination]
        for row in rows:
            with pytest.raises(LayoutError, match="not registered"):
                pair.submit(op, [(0, 4096, 64), row])
        pair.check()
        pair.move(op, [(0, 0, 64)])
        pair.check()

    @each_op
    def test_an_empty_transfer_is_refused(self, pair: Pair, op: Op) -> None:
        require(self, op)
        with pytest.raises((TransferError, LayoutError)):
            pair.submit(op, [])
        pair.check()

    @each_op
    def test_each_of_two_peers_gets_its_own(self, pair: Pair, op: Op) -> None:
        require(self, op)
        require_processes(self)
        second = self.make_peer(pair.processes, pair.ours)
        try:
            remote = pair.ours.connect(second.open(1))
            second.fill(9)
            first = second.snapshot() if op is Op.READ else None
            transfers = [
                pair.ours.submit(op, peer, _one(index), deadline_s=self.deadline_s)
                for index, peer in enumerate((pair.remote, remote))
            ]
            pair.wait(*transfers)
            assert [transfer.state for transfer in transfers] == [TransferState.DONE] * 2
            pair.apply(op, [(0, 8192, 4096)])
            if first is not None:
                pair.expected[OURS][8192 * 2 : 8192 * 2 + 4096] = first[4096:8192]
            else:
                assert second.peek(8192 * 2, 4096) == pair.memory.read(4096, 4096)
            pair.check()
        finally:
            second.stop()

    @each_op
    def test_a_notification_comes_once_and_after_its_bytes(self, pair: Pair, op: Op) -> None:
        require(self, op)
        if not self.capabilities.notify:
            pytest.skip("capability notify is not declared")
        require_processes(self)
        before = len(pair.peer.notifications(0, 0.0))
        for index in range(5):
            pair.move(op, [(0, 4096, 64)], notify=b"message %d" % index)
            arrived = pair.peer.notifications(before + index + 1, 10.0)[before:]
            assert [message for _, message in arrived] == [b"message %d" % item for item in range(index + 1)]
        assert len({name for name, _ in pair.peer.notifications(0, 0.0)}) == 1
        time.sleep(0.1)
        assert len(pair.peer.notifications(0, 0.0)) == before + 5, "a notification came twice"
        pair.check()


def _one(index: int) -> Runs:
    return runs_of([(index * 4096, 8192 * (index + 1), 4096)])
