"""Any order of calls: a Hypothesis state machine over the connector, against two arrays of bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvx.connector import ConnectorState, Op, TransferState
from kvx.errors import ConnectorStateError
from kvx.testing.kit import Kit
from kvx.testing.memory import CONTIGUOUS_BYTES
from kvx.testing.pair import OURS, THEIRS, Pair
from kvx.testing.peer_engine import Rows

GRID_BYTES = 50_000
"""Cells that transfers move whole or in part: no multiple of a page, and some lie across a border of regions."""
CELLS = CONTIGUOUS_BYTES // GRID_BYTES


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """One to eight copies, no two of them into one cell."""
    destinations = draw(st.lists(st.integers(0, CELLS - 1), min_size=1, max_size=8, unique=True))
    return [
        (
            draw(st.integers(0, CELLS - 1)) * GRID_BYTES,
            cell * GRID_BYTES + draw(st.integers(0, 3)),
            draw(st.sampled_from([1, 64, 4096, 4097, GRID_BYTES - 3])),
        )
        for cell in destinations
    ]


def machine_of(pair: Pair) -> type[RuleBasedStateMachine]:
    """The machine over this pair."""
    operations = st.sampled_from(pair.kit.operations())

    class ConnectorMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            pair.fresh()
            self.flying: list[tuple[Any, Op, Rows]] = []
            self.is_checked = True

        @rule(op=operations, rows=rows())
        def submit(self, op: Op, rows: Rows) -> None:
            if pair.ours.state is not ConnectorState.OPEN or not pair.remote.connected:
                with pytest.raises(ConnectorStateError):
                    pair.submit(op, rows)
            elif self._is_apart(op, rows):
                self.flying.append((pair.submit(op, rows), op, rows))

        @rule()
        def wait_for_all(self) -> None:
            pair.wait(*(transfer for transfer, _, _ in self.flying))
            for transfer, op, rows in self.flying:
                self.is_checked = False
                if transfer.state is TransferState.DONE:
                    pair.apply(op, rows)
                else:
                    self._forget(transfer, op, rows)
            self.flying.clear()

        @rule(data=st.data())
        def cancel(self, data: st.DataObject) -> None:
            if self.flying:
                pair.ours.cancel(data.draw(st.sampled_from(self.flying))[0])

        @rule(side=st.sampled_from([OURS, THEIRS]), cell=st.integers(0, CELLS - 1), value=st.integers(0, 255))
        def compute(self, side: int, cell: int, value: int) -> None:
            """An engine writes into its own memory, where no transfer is on its way."""
            if not self.flying:
                pair.refill(side, cell * GRID_BYTES, bytes([value]) * GRID_BYTES)

        @rule()
        def disconnect(self) -> None:
            pair.ours.disconnect(pair.remote)
            self.wait_for_all()

        @rule()
        def connect(self) -> None:
            if pair.ours.state is ConnectorState.OPEN:
                self.wait_for_all()
                pair.connect()

        @rule()
        def close(self) -> None:
            pair.ours.close()
            self.wait_for_all()
            assert pair.ours.registered_bytes == 0

        @rule()
        def open(self) -> None:
            if pair.ours.state is ConnectorState.OPEN:
                with pytest.raises(ConnectorStateError):
                    pair.ours.open(pair.memory.regions(), pair.ours.generation + 1)
            else:
                pair.open()
                pair.connect()

        @invariant()
        def agrees_with_the_model(self) -> None:
            if not self.flying and not self.is_checked:
                pair.check()
                self.is_checked = True

        def teardown(self) -> None:
            self.wait_for_all()
            pair.check()

        def _is_apart(self, op: Op, rows: Rows) -> bool:
            """No cell that one transfer writes is read or written by another one in flight, on either side."""
            cells = [_touched(pair, *item) for item in ((op, rows), *((op, rows) for _, op, rows in self.flying))]
            (reads, writes), *others = cells
            return not reads & writes and all(not (writes & (r | w) or reads & w) for r, w in others)

        def _forget(self, transfer: Any, op: Op, rows: Rows) -> None:
            """How much of a transfer that ended early arrived, nobody knows: write over it."""
            assert transfer.state in (TransferState.CANCELLED, TransferState.FAILED)
            assert transfer.state is TransferState.CANCELLED or not transfer.cancelled
            for _, destination, length in rows:
                pair.refill(pair.sides(op)[1], destination, b"\0" * length)

    return ConnectorMachine


def _touched(pair: Pair, op: Op, rows: Rows) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(side, cell) read, and (side, cell) written."""
    source_side, destination_side = pair.sides(op)
    reads = {(source_side, source // GRID_BYTES) for source, _, _ in rows}
    return reads, {(destination_side, destination // GRID_BYTES) for _, destination, _ in rows}


class MachineTests(Kit):
    """The same examples in every run, and nothing written to disk."""

    @pytest.mark.parametrize("examples", [8, pytest.param(30, marks=pytest.mark.matrix)])
    def test_any_order_of_calls(self, pair: Pair, examples: int) -> None:
        run_state_machine_as_test(
            machine_of(pair),
            settings=settings(
                max_examples=examples,
                stateful_step_count=12,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
