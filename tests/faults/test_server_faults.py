"""The same on real vLLM servers: the answers are those of a stock server, or vLLM's error."""

from __future__ import annotations

import time
from typing import Any

import pytest
from network import until
from offloading_server import OffloadingServer
from server_faults import HandOff, ServerFault, fault_of
from servers_world import ANSWER_S, DEADLINE_S, DRAIN_S, FEW_TOKENS, Question, ServersWorld, tokens_of
from table import ON_SERVERS, Cell

pytestmark = [pytest.mark.faults, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

OTHERS = 2
PAIRS = [cell for cell in ON_SERVERS if cell.connector != "cpu_offload"]
ALONE = [cell for cell in ON_SERVERS if cell.connector == "cpu_offload"]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell)) for cell in PAIRS])
def test_cell(cell: Cell, servers: ServersWorld) -> None:
    fault = fault_of(cell.connector, cell.fault)
    owner, reader = servers.with_policy(cell.policy)
    servers.recover(owner, reader)
    servers.require_blocks_back()
    others = [servers.ask(FEW_TOKENS) for _ in range(OTHERS)]
    right = [servers.right(ask) for ask in others]
    failures = reader.status()["transfer"]["failures"]
    handed = fault.begin(servers, owner, reader)
    fault.inject(servers, handed)
    asked = [Question(reader.url, ask) for ask in others]
    answer = None if fault.is_abort else handed.question.answer()
    took_s = time.monotonic() - handed.question.started
    for question, tokens in zip(asked, right, strict=True):
        status, found = question.answer()
        assert (status, tokens_of(found)) == (200, tokens)
    fault.repair(servers, handed)
    if answer is not None:
        assert took_s < DEADLINE_S + ANSWER_S
        require_right(servers, fault, handed, *answer)
    require_cause(fault, handed, failures)
    recovery_s = servers.recover(owner, reader)
    servers.require_blocks_back()
    servers.require_no_internal_errors()
    print(f"{cell}: answer after {took_s:.1f} s, handed off again {recovery_s:.1f} s after the end of the fault")


def require_right(
    servers: ServersWorld, fault: ServerFault, handed: HandOff, status: int, found: dict[str, Any]
) -> None:
    if handed.reader.policy == "fail":
        assert status == 500, found
        return
    assert status == 200, found
    assert tokens_of(found) == servers.right(handed.ask)
    told = found["kv_transfer_params"]["kvx_failure"]
    assert told["cause"] in fault.causes, told


def require_cause(fault: ServerFault, handed: HandOff, before: dict[str, int]) -> None:
    """One hand-off has failed, and for its reason. That of a client who has gone ends a little later than it."""
    until(lambda: handed.reader.status()["transfer"]["failures"] != before, DEADLINE_S + DRAIN_S)
    after = handed.reader.status()["transfer"]["failures"]
    new = {cause: count - before.get(cause, 0) for cause, count in after.items() if count > before.get(cause, 0)}
    assert sum(new.values()) == 1, new
    assert set(new) <= fault.causes, new


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell)) for cell in ALONE])
def test_a_client_hangs_up_while_its_blocks_come_back(cell: Cell, servers: OffloadingServer) -> None:
    """Until one has met its load, whose memory must not be used again before it ends."""
    first, second, last = servers.fill_beyond_the_cache()
    servers.hang_up_in_a_load(first, last)
    for ask in (first, second, last):
        status, found = Question(servers.url, ask).answer()
        assert (status, tokens_of(found)) == (200, servers.right(ask))
    servers.require_all_back()
