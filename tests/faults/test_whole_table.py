"""The table itself: it names what exists, and every row of it ran. Its name makes it the last file of the folder."""

from __future__ import annotations

import pytest
from faults import OF_HOST_MEMORY, OF_PEERS
from server_faults import fault_of
from table import ALL, FAULTS, NOT_POSSIBLE, ON_SERVERS, QUICK, RUN, missing

pytestmark = [pytest.mark.faults]


def test_the_table_names_what_exists() -> None:
    assert set(OF_PEERS) == set(FAULTS)
    assert set(OF_HOST_MEMORY) == set(FAULTS) - {fault for name, fault in NOT_POSSIBLE if name == "cpu_offload"}
    assert all(NOT_POSSIBLE.values())
    assert all(fault_of(cell.connector, cell.fault) for cell in ON_SERVERS if cell.connector != "cpu_offload")
    assert not [str(cell) for cell in ON_SERVERS if cell.reason]
    assert len({str(cell) for cell in ALL}) == len(ALL)
    assert len(QUICK & {(cell.connector, cell.fault, cell.policy) for cell in RUN}) == 4


def test_a_cell_that_is_left_out_is_found() -> None:
    outcomes = {str(cell): "passed" for cell in (*RUN, *ON_SERVERS)}
    assert not missing(outcomes)
    first, second = str(RUN[0]), str(ON_SERVERS[-1])
    assert missing({**outcomes, first: "skipped"}) == {first: "skipped"}
    del outcomes[second]
    assert missing(outcomes) == {second: "not run"}
    assert len(ALL) > len(RUN)


def test_every_cell_ran(cell_outcomes: dict[str, str]) -> None:
    """The last one: what was neither run nor listed, or was skipped."""
    assert missing(cell_outcomes) == {}
