"""Failures: deadlines, cancelled transfers, peers that die or stand still.

Where a peer dies, its survivor is a second process, too: one that its library brings down is a failed row, and the
other rows go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from kvx.connector import Op, Transfer, TransferState
from kvx.errors import TransferTimeout
from kvx.testing.data import each_op
from kvx.testing.kit import Kit
from kvx.testing.memory import MIB
from kvx.testing.pair import OURS, Pair, require, require_processes
from kvx.testing.peer_engine import Ending, Rows
from kvx.testing.peers import PeerGone, PeerRaised, Processes, ProcessPeer

LARGE: Rows = [(index * MIB, (5 - index) * MIB, MIB) for index in range(6)]
SHORT_S = 0.5
SETTLE_S = 0.5
"""How long the memory is watched after a transfer ended."""


class FailureTests(Kit):
    """A transfer that does not get through ends in time, once, and leaves the memory alone from then on."""

    @each_op
    def test_a_deadline_that_has_passed(self, pair: Pair, op: Op) -> None:
        require(self, op)
        pair.move(op, [(0, 0, 64)])
        transfer = pair.submit(op, LARGE, deadline_s=0.0)
        pair.wait(transfer, timeout_s=self.stop_s)
        if transfer.state is not TransferState.DONE:
            assert transfer.state is TransferState.FAILED
            assert isinstance(transfer.cause, TransferTimeout)
        _require_still(pair, [transfer])
        _require_works(pair, op)

    @each_op
    def test_cancel(self, pair: Pair, op: Op) -> None:
        require(self, op)
        pair.move(op, [(0, 0, 64)])
        transfer = pair.submit(op, LARGE, deadline_s=5.0)
        for _ in range(2):
            pair.ours.cancel(transfer)
        pair.wait(transfer, timeout_s=5.0 + self.stop_s)
        assert transfer.state in (TransferState.DONE, TransferState.CANCELLED), transfer.cause
        pair.ours.cancel(transfer)
        _require_still(pair, [transfer])
        _require_works(pair, op)

    @each_op
    def test_a_peer_disconnected_with_transfers_in_flight(self, pair: Pair, op: Op) -> None:
        require(self, op)
        pair.move(op, [(0, 0, 64)])
        transfers = [pair.submit(op, LARGE[index : index + 1]) for index in range(6)]
        pair.ours.disconnect(pair.remote)
        pair.wait(*transfers)
        assert all(transfer.state is not TransferState.FAILED for transfer in transfers if not transfer.cancelled)
        _require_still(pair, transfers)
        _require_works(pair, op)

    @each_op
    def test_a_peer_that_died(self, processes: Processes, op: Op) -> None:
        require(self, op)
        require_processes(self)
        survivor, victim, third = _connected(self, processes, op)
        victim.kill()
        _require_failed(self, survivor, lambda: survivor.submit(op.value, LARGE, 2.0), 2.0)
        _goes_on(self, survivor, third, op)

    @each_op
    def test_a_peer_that_dies_with_transfers_in_flight(self, processes: Processes, op: Op) -> None:
        require(self, op)
        require_processes(self)
        survivor, victim, third = _connected(self, processes, op)
        victim.pause()
        number = survivor.submit(op.value, LARGE, 3.0)
        victim.kill()
        state, kind, text, reported = survivor.ending(number, 3.0 + self.stop_s)
        assert (state, reported) in {("done", 1), ("failed", 1)}, (state, kind, text, reported)
        _goes_on(self, survivor, third, op)

    @each_op
    def test_a_peer_that_stands_still(self, processes: Processes, op: Op) -> None:
        """A library may reach a stopped process's memory; where it does not, the deadline ends the transfer."""
        require(self, op)
        require_processes(self)
        survivor, stopped, third = _connected(self, processes, op)
        stopped.pause()
        began = time.monotonic()
        number = survivor.submit(op.value, LARGE, SHORT_S)
        state, kind, text, reported = survivor.ending(number, SHORT_S + self.stop_s)
        took = time.monotonic() - began
        assert (state, kind, reported) in {("done", "NoneType", 1), ("failed", "TransferTimeout", 1)}, text
        assert took < SHORT_S + self.stop_s
        assert state == "done" or took >= SHORT_S, "failed before its deadline"
        survivor.poke(0, b"\x66" * (6 * MIB))
        _resume(stopped)
        time.sleep(SETTLE_S)
        assert survivor.peek(0, 6 * MIB) == b"\x66" * (6 * MIB), "bytes arrived after the end of their transfer"
        assert survivor.ending(number, 0.0)[3] == 1
        _goes_on(self, survivor, third, op)

    @each_op
    def test_cancel_while_the_peer_stands_still(self, processes: Processes, op: Op) -> None:
        """A cancelled transfer may still get through; where it does not, its deadline ends it."""
        require(self, op)
        require_processes(self)
        survivor, stopped, third = _connected(self, processes, op)
        stopped.pause()
        number = survivor.submit(op.value, LARGE, SHORT_S)
        survivor.cancel(number)
        state, _, text, reported = survivor.ending(number, SHORT_S + self.stop_s)
        assert (state, reported) in {("done", 1), ("cancelled", 1)}, text
        survivor.poke(0, b"\x66" * (6 * MIB))
        _resume(stopped)
        time.sleep(SETTLE_S)
        assert survivor.peek(0, 6 * MIB) == b"\x66" * (6 * MIB), "bytes arrived after the end of their transfer"
        _goes_on(self, survivor, third, op)

    @each_op
    def test_close_while_the_peer_stands_still(self, processes: Processes, op: Op) -> None:
        require(self, op)
        require_processes(self)
        survivor, stopped, _ = _connected(self, processes, op)
        stopped.pause()
        numbers = [survivor.submit(op.value, [row], 60.0) for row in LARGE]
        assert survivor.close_connector() < self.stop_s
        for number in numbers:
            state, _, text, reported = survivor.ending(number, 1.0)
            assert (state, reported) in {("done", 1), ("failed", 1)}, text
        survivor.poke(0, b"\x66" * (6 * MIB))
        stopped.resume()
        time.sleep(SETTLE_S)
        assert survivor.peek(0, 6 * MIB) == b"\x66" * (6 * MIB), "bytes arrived after the close"
        for peer in (survivor, stopped):
            peer.stop()

    @each_op
    def test_a_peer_that_closed(self, processes: Processes, op: Op) -> None:
        """It is as good as dead, or still readable: what matters is that the transfer ends and harms nobody."""
        require(self, op)
        require_processes(self)
        survivor, closed, third = _connected(self, processes, op)
        closed.close_connector()
        try:
            number = survivor.submit(op.value, [(0, 0, 64)], 2.0)
            assert survivor.ending(number, 2.0 + self.stop_s)[3] == 1
        except PeerRaised as error:
            _require_nothing_started(error)
        _goes_on(self, survivor, third, op)


def _require_still(pair: Pair, transfers: Sequence[Transfer]) -> None:
    """Nothing arrives any more, and nothing is reported again."""
    pair.refill(OURS, 0, b"\x77" * (6 * MIB))
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        assert not set(pair.ours.poll().finished) & set(transfers), "reported again"
        time.sleep(0.01)
    assert pair.memory.read(0, 6 * MIB) == b"\x77" * (6 * MIB), "bytes arrived after the end of their transfer"


def _require_works(pair: Pair, op: Op) -> None:
    pair.fresh().move(op, [(0, MIB, MIB)])
    pair.check()


def _connected(kit: Kit, processes: Processes, op: Op) -> tuple[ProcessPeer, ProcessPeer, ProcessPeer]:
    """Us, a peer that has moved bytes with us, and one that is open."""
    survivor, victim, third = (processes.start() for _ in range(3))
    for peer in (survivor, third):
        peer.open(1)
    survivor.connect(victim.open(1))
    _require_done(survivor.ending(survivor.submit(op.value, [(0, 0, 64)], kit.deadline_s), kit.deadline_s))
    return survivor, victim, third


def _require_failed(kit: Kit, survivor: ProcessPeer, submit: Any, deadline_s: float) -> None:
    try:
        number = submit()
    except PeerRaised as error:
        _require_nothing_started(error)
        return
    state, kind, text, reported = survivor.ending(number, deadline_s + kit.stop_s)
    assert (state, reported) == ("failed", 1), text
    assert kind in ("TransferError", "TransferTimeout"), text


def _goes_on(kit: Kit, survivor: ProcessPeer, third: ProcessPeer, op: Op) -> None:
    """The survivor still works with others, and ends well."""
    third.poke(0, b"\x55" * MIB)
    survivor.poke(2 * MIB, b"\x56" * MIB)
    source = 0 if op is Op.READ else 2 * MIB
    third.close_connector()
    survivor.connect(third.open(2))
    number = survivor.submit(op.value, [(source, 4 * MIB, MIB)], kit.deadline_s)
    _require_done(survivor.ending(number, kit.deadline_s + kit.stop_s))
    where, value = (survivor, b"\x55") if op is Op.READ else (third, b"\x56")
    assert where.peek(4 * MIB, MIB) == value * MIB
    assert survivor.close_connector() < kit.stop_s
    for peer in (survivor, third):
        peer.stop()


def _resume(stopped: ProcessPeer) -> None:
    """Until it runs again. A library may end it then, finding that we went away; we are to be well all the same."""
    stopped.resume()
    with contextlib.suppress(PeerGone):
        stopped.poke(6 * MIB, b"\x67")


def _require_nothing_started(error: PeerRaised) -> None:
    """A connector may know at once that a peer is gone."""
    assert "TransferError" in error.kinds, error


def _require_done(ending: Ending) -> None:
    state, kind, text, reported = ending
    assert (state, reported) == ("done", 1), f"{state} by {kind}: {text}"
