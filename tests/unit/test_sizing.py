"""Sizing is arithmetic on given numbers: budgets, both margins, overrides, and a ledger that names every byte."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.errors import SizingError
from kvx.sizing import (
    GIB,
    MIB,
    Budget,
    Ledger,
    MarginPolicy,
    Measured,
    Request,
    Row,
    agreed_count,
    capacity_for,
    final_count,
    fixed_count,
    gpu_budget,
    host_budget,
    margin_bytes,
)
from kvx.spec import Segment, SegmentTable

GRANULE = 2 * MIB
STRIDE = 96 * 1024  # bytes of one block in one of the two segments


def table_of(capacity_blocks: int = 64 * 64) -> SegmentTable:
    segments = tuple(Segment(i * STRIDE * capacity_blocks, STRIDE, capacity_blocks) for i in range(2))
    return SegmentTable(segments, capacity_blocks, 2 * STRIDE * capacity_blocks, GRANULE)


ONE = Request(1, 16)


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_a_gpu_without_an_explicit_share_plans_with_what_is_free() -> None:
    budget = gpu_budget(free_bytes=139 * GIB, total_bytes=140 * GIB, utilization=None)
    assert (budget.nbytes, budget.warnings) == (139 * GIB, ())
    assert "free before the engine loaded" in budget.source


def test_an_explicit_share_is_of_the_total() -> None:
    budget = gpu_budget(free_bytes=90 * GIB, total_bytes=100 * GIB, utilization=0.5)
    assert (budget.nbytes, budget.warnings) == (50 * GIB, ())
    assert gpu_budget(free_bytes=93 * GIB, total_bytes=100 * GIB, utilization=0.92).nbytes == 92 * GIB


def test_an_explicit_share_beyond_what_is_free_is_lowered_with_a_warning() -> None:
    budget = gpu_budget(free_bytes=90 * GIB, total_bytes=100 * GIB, utilization=1.0)
    assert budget.nbytes == 90 * GIB
    assert len(budget.warnings) == 1
    assert "lowered" in budget.warnings[0]


def test_without_the_extensible_cache_vllms_default_holds() -> None:
    budget = gpu_budget(free_bytes=100 * GIB, total_bytes=100 * GIB, utilization=None, extensible=False)
    assert budget.nbytes == 92 * GIB
    assert "default" in budget.source


def test_another_process_on_the_device_needs_an_explicit_share() -> None:
    with pytest.raises(SizingError, match="explicit memory utilization"):
        gpu_budget(free_bytes=GIB, total_bytes=2 * GIB, utilization=None, other_processes=1)
    assert gpu_budget(free_bytes=GIB, total_bytes=2 * GIB, utilization=0.4, other_processes=1).warnings == ()


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01])
def test_a_share_that_is_none_is_refused(utilization: float) -> None:
    with pytest.raises(SizingError, match="above 0 and at most 1"):
        gpu_budget(free_bytes=GIB, total_bytes=GIB, utilization=utilization)


def test_a_host_shares_what_is_free_among_its_engines() -> None:
    assert host_budget(free_bytes=9 * GIB, total_bytes=16 * GIB, cache_space_bytes=None).nbytes == 9 * GIB
    shared = host_budget(free_bytes=9 * GIB, total_bytes=16 * GIB, cache_space_bytes=None, engines=3)
    assert (shared.nbytes, "3 engines" in shared.source) == (3 * GIB, True)


def test_an_explicit_cache_space_is_an_upper_limit() -> None:
    assert host_budget(free_bytes=9 * GIB, total_bytes=16 * GIB, cache_space_bytes=4 * GIB).nbytes == 4 * GIB
    lowered = host_budget(free_bytes=3 * GIB, total_bytes=16 * GIB, cache_space_bytes=4 * GIB)
    assert (lowered.nbytes, len(lowered.warnings)) == (3 * GIB, 1)


def test_a_host_budget_needs_sense() -> None:
    with pytest.raises(SizingError, match="at least 1"):
        host_budget(free_bytes=GIB, total_bytes=GIB, cache_space_bytes=None, engines=0)
    with pytest.raises(SizingError, match="more than 0"):
        host_budget(free_bytes=GIB, total_bytes=GIB, cache_space_bytes=0)


# -- margins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "peak", "margin"),
    [
        (100 * GIB, GIB, 2 * GIB),  # 0.02 of the budget
        (10 * GIB, 4 * GIB, 4 * GIB // 5),  # 0.20 of the peak
        (4 * GIB, 100 * MIB, 150 * MIB),  # the floor of 150 MiB
        (GIB, 100 * MIB, GIB // 10),  # never more than 0.10 of the budget
        (4 * GIB, 4 * GIB, 4 * GIB // 10),
    ],
)
def test_the_default_margin(budget: int, peak: int, margin: int) -> None:
    assert margin_bytes(MarginPolicy.DEFAULT, transient_peak_bytes=peak, budget_bytes=budget) == margin


@pytest.mark.parametrize(("peak", "margin"), [(0, GIB), (GIB, 2 * GIB), (4 * GIB, 7 * GIB)])
def test_the_peak_margin_keeps_the_peak_free_in_full(peak: int, margin: int) -> None:
    assert margin_bytes(MarginPolicy.PEAK, transient_peak_bytes=peak, budget_bytes=2 * GIB) == margin


# -- counts ----------------------------------------------------------------------------------------------------------


def test_capacity_is_what_is_surely_left_in_whole_granules() -> None:
    capacity = capacity_for(GIB, [STRIDE, STRIDE], GRANULE)
    assert capacity * STRIDE % GRANULE == 0
    assert capacity >= GIB // (2 * STRIDE) > capacity - 64
    with pytest.raises(SizingError, match="one block takes"):
        capacity_for(2 * STRIDE - 1, [STRIDE, STRIDE], GRANULE)
    with pytest.raises(SizingError, match="left for the cache"):
        capacity_for(-5 * GIB, [STRIDE, STRIDE], GRANULE)


def test_the_count_is_what_the_budget_leaves() -> None:
    budget, table = Budget(GIB, GIB, 2 * GIB, "a test"), table_of(64 * 256)
    measured = Measured({"weights": 200 * MIB, "growth in warm-up": 100 * MIB}, 50 * MIB, 8)
    sizing = final_count(budget, measured, table, ONE)
    margin = GIB // 10
    room = GIB - 300 * MIB - margin
    assert table.committed_bytes(sizing.num_blocks) <= room < table.committed_bytes(sizing.num_blocks + 1)
    assert (sizing.warnings, sizing.explicit) == ((), None)
    held = Measured({**measured.used, "held back": 512 * MIB}, 50 * MIB, 8)
    lowered = final_count(budget, held, table, ONE).num_blocks
    assert abs((sizing.num_blocks - lowered) * table.block_bytes - 512 * MIB) <= 2 * GRANULE


def test_the_count_never_exceeds_the_capacity() -> None:
    sizing = final_count(Budget(64 * GIB, 64 * GIB, 64 * GIB, "a test"), Measured({}, 0, 1), table_of(64), ONE)
    assert sizing.num_blocks == 64
    assert sizing.ledger.rows[-1].consumer == "left over"


@pytest.mark.parametrize("used", [GIB - MIB, 2 * GIB])
def test_what_warm_up_proved_is_kept_with_a_warning(used: int) -> None:
    sizing = final_count(Budget(GIB, GIB, GIB, "a test"), Measured({"weights": used}, 0, 32), table_of(), ONE)
    assert sizing.num_blocks == 32
    assert "warm-up ran with" in sizing.warnings[0]
    assert sizing.ledger.rows[-1] == Row("taken beyond the budget", GIB - used - table_of().committed_bytes(32))


def test_warnings_of_the_budget_are_kept() -> None:
    budget = gpu_budget(free_bytes=2 * GIB, total_bytes=3 * GIB, utilization=1.0)
    assert final_count(budget, Measured({}, 0, 1), table_of(), ONE).warnings == budget.warnings


def test_one_request_must_fit() -> None:
    budget, measured = Budget(GIB, GIB, GIB, "a test"), Measured({}, 0, 4)
    count = final_count(budget, measured, table_of(64 * 256), ONE).num_blocks
    assert final_count(budget, measured, table_of(64 * 256), Request(count, 4096)).num_blocks == count
    with pytest.raises(SizingError, match=rf"{count} blocks, but one request of 4096 tokens needs {count + 1}"):
        final_count(budget, measured, table_of(64 * 256), Request(count + 1, 4096))


def test_explicit_sizes_are_kept_exactly() -> None:
    budget, table = Budget(GIB, GIB, GIB, "a test"), table_of()
    by_blocks = fixed_count(budget, {"weights": MIB}, table, ONE, num_blocks=77)
    assert (by_blocks.num_blocks, by_blocks.explicit) == (77, "an explicit 77 blocks")
    by_bytes = fixed_count(budget, {}, table, ONE, kv_bytes=100 * table.block_bytes + 5)
    assert (by_bytes.num_blocks, by_bytes.warnings) == (100, ())
    larger = fixed_count(budget, {"weights": GIB}, table, ONE, num_blocks=77)
    assert larger.ledger.rows[-1].consumer == "taken beyond the budget"


def test_explicit_sizes_that_cannot_be_are_refused() -> None:
    budget, table = Budget(GIB, GIB, GIB, "a test"), table_of(64)
    for fixed in ({"num_blocks": 0}, {"num_blocks": 65}, {"kv_bytes": table.block_bytes - 1}):
        with pytest.raises(SizingError, match="at least 1 and at most 64"):
            fixed_count(budget, {}, table, ONE, **fixed)
    with pytest.raises(SizingError, match="one of the two"):
        fixed_count(budget, {}, table, ONE)
    with pytest.raises(SizingError, match="one of the two"):
        fixed_count(budget, {}, table, ONE, num_blocks=1, kv_bytes=1)
    with pytest.raises(SizingError, match="one request of 999 tokens needs 9"):
        fixed_count(budget, {}, table, Request(9, 999), num_blocks=8)


def test_ranks_agree_on_the_smallest_count() -> None:
    table = table_of()
    sizing = final_count(Budget(GIB // 2, GIB, GIB, "a test"), Measured({"weights": MIB}, 0, 1), table, ONE)
    assert agreed_count(sizing, sizing.num_blocks, table) is sizing
    agreed = agreed_count(sizing, sizing.num_blocks - 100, table)
    assert agreed.num_blocks == sizing.num_blocks - 100
    given_up = agreed.ledger.rows[-1]
    assert "another rank" in given_up.consumer
    assert given_up.nbytes == table.committed_bytes(sizing.num_blocks) - table.committed_bytes(agreed.num_blocks)
    with pytest.raises(SizingError, match="ranks agreed on"):
        agreed_count(sizing, sizing.num_blocks + 1, table)


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_a_ledger_reads_like_a_table() -> None:
    ledger = Ledger((Row("weights", 3 * MIB), Row("KV cache: 2 blocks", 1024 * MIB)), 1027 * MIB)
    lines = ledger.table().splitlines()
    assert lines[0] == "weights                      3.0 MiB"
    assert re.fullmatch("-+", lines[2])
    assert lines[3].split() == ["total", "1,027.0", "MiB"]
    assert len({len(line) for line in lines}) == 1
    assert ledger.as_dicts()[1] == {"consumer": "KV cache: 2 blocks", "bytes": 1024 * MIB}


sizes = st.integers(0, 8 * GIB)


@given(
    free=sizes,
    taken=sizes,
    outside=st.floats(0, 1),
    used=st.dictionaries(st.sampled_from(["weights", "graphs", "growth in warm-up"]), sizes),
    peak=sizes,
    proven=st.integers(1, 100),
    policy=st.sampled_from(MarginPolicy),
    given_up=st.floats(0, 1),
)
def test_every_byte_is_named_whatever_was_measured(
    free: int,
    taken: int,
    outside: float,
    used: dict[str, int],
    peak: int,
    proven: int,
    policy: MarginPolicy,
    given_up: float,
) -> None:
    table = table_of()
    budget = Budget(int(free * outside), free, free + taken, "a test")
    sizing = final_count(budget, Measured(used, peak, proven), table, ONE, policy)
    rows = {row.consumer: row.nbytes for row in sizing.ledger.rows}
    assert sum(rows.values()) == budget.total_bytes
    assert all(nbytes >= 0 for consumer, nbytes in rows.items() if consumer != "taken beyond the budget")
    assert sizing.num_blocks >= proven
    margin = margin_bytes(policy, transient_peak_bytes=peak, budget_bytes=budget.nbytes)
    assert (rows["margin"] == margin) or sizing.warnings
    agreed = agreed_count(sizing, max(1, int(sizing.num_blocks * given_up)), table)
    assert sum(row.nbytes for row in agreed.ledger.rows) == budget.total_bytes
