"""What is told of two samples, how ranks are joined, and that the dashboard asks for nothing that does not exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from kvx.exposition import BY_NAME, METRICS, Sample, change, joined

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboards" / "kvx.json"
SERVERS = Path(__file__).parents[1] / "vllm"
WAITING = "test_handoff.py::test_the_metrics_of_hand_offs_that_wait_for_their_turn"
UNREAD = "test_failure_policy.py::test_the_metrics_of_a_hold_that_nobody_reads"
DIFFERENT = "test_failure_policy.py::test_the_metrics_of_a_digest_that_differs"
FULL = "test_failure_policy.py::test_the_metrics_of_blocks_that_host_memory_has_no_room_for"
ONE = "test_handoff.py::test_the_metrics_of_one_request"
LEFT = "test_offload.py::metrics_are_the_status"
MOVED_BY = {
    "kvx_transfer_bytes": ONE,
    "kvx_transfer_blocks": ONE,
    "kvx_transfer_descriptors": ONE,
    "kvx_handoffs_received": ONE,
    "kvx_handoffs_failed": DIFFERENT,
    "kvx_handoffs_unneeded": WAITING,
    "kvx_holds_released": ONE,
    "kvx_holds_expired": UNREAD,
    "kvx_leases_renewed": WAITING,
    "kvx_side_channel_refused": UNREAD,
    "kvx_digests_checked": ONE,
    "kvx_digests_mismatched": DIFFERENT,
    "kvx_offload_stores": FULL,
    "kvx_offload_hits": LEFT,
    "kvx_offload_reloads": LEFT,
    "kvx_offload_evictions": FULL,
    "kvx_offload_refused": FULL,
    "kvx_handoff_seconds": ONE,
    "kvx_handoff_phase_seconds": ONE,
    "kvx_holds": UNREAD,
    "kvx_held_blocks": UNREAD,
    "kvx_cache_bytes": ONE,
    "kvx_cache_blocks": ONE,
    "kvx_generation": ONE,
}
"""Metric -> the test that moves it on a real server's /metrics, by an amount that it knows."""
STAYS_ZERO = {
    "kvx_internal_errors": "test_failure_policy.py::nothing_is_left",  # a bug of kvx's own
    "kvx_offload_failed": FULL,  # a copy of memory that the engine itself owns
}
"""No request brings these about, so a real server's must stay at zero; they are moved in test_vllm_metrics.py."""
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_names_are_unique_and_end_as_prometheus_wants_them() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"kvx_[a-z_]+", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert metric.help.endswith(".")


def test_counters_are_told_as_differences_and_gauges_as_they_are() -> None:
    before = Sample({"kvx_transfer_bytes": {"": 10}}, {"kvx_holds": {"": 2}, "kvx_generation": {"": 1}})
    now = Sample(
        {"kvx_transfer_bytes": {"": 15}, "kvx_handoffs_failed": {"timeout": 1}, "kvx_transfer_blocks": {"": 0}},
        {"kvx_holds": {"": 0}, "kvx_generation": {"": 1}},
        {"kvx_handoff_seconds": {"": [0.1]}, "kvx_handoff_phase_seconds": {}},
    )
    assert change(before, now) == {
        "counters": {"kvx_transfer_bytes": {"": 5}, "kvx_handoffs_failed": {"timeout": 1}},
        "gauges": {"kvx_holds": {"": 0}},
        "observed": {"kvx_handoff_seconds": {"": [0.1]}},
    }
    assert change(now, Sample(now.counters, now.gauges)) == {}


def test_ranks_are_joined() -> None:
    one = {
        "counters": {"kvx_transfer_bytes": {"": 5}, "kvx_handoffs_failed": {"timeout": 1}},
        "gauges": {"kvx_cache_bytes": {"committed": 7}, "kvx_generation": {"": 1}},
        "observed": {"kvx_handoff_seconds": {"": [0.1]}},
    }
    other = {
        "counters": {"kvx_transfer_bytes": {"": 6}, "kvx_handoffs_failed": {"refused": 2}},
        "gauges": {"kvx_cache_bytes": {"committed": 8}, "kvx_generation": {"": 2}},
        "observed": {"kvx_handoff_seconds": {"": [0.2]}},
    }
    assert joined(one, other) == {
        "counters": {"kvx_transfer_bytes": {"": 11}, "kvx_handoffs_failed": {"timeout": 1, "refused": 2}},
        "gauges": {"kvx_cache_bytes": {"committed": 15}, "kvx_generation": {"": 2}},
        "observed": {"kvx_handoff_seconds": {"": [0.1, 0.2]}},
    }
    assert joined(one, {}) == one


def queries() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def test_every_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    exist = {metric.name + suffix for metric in METRICS for suffix in SUFFIXES[metric.kind]}
    for query in queries():
        named = set(re.findall(r"kvx_[a-z_]+", query))
        assert named <= exist, query
        assert named or "vllm:" in query


def test_the_dashboard_shows_every_metric() -> None:
    shown = " ".join(queries())
    assert [metric.name for metric in METRICS if metric.name not in shown] == ["kvx_transfer_blocks"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"


def test_every_metric_is_moved_on_a_real_server_or_must_stay_at_zero_there() -> None:
    assert sorted([*MOVED_BY, *STAYS_ZERO]) == sorted(BY_NAME)


@pytest.mark.parametrize(("name", "where"), (MOVED_BY | STAYS_ZERO).items())
def test_the_test_of_a_metric_names_it(name: str, where: str) -> None:
    file, _, function = where.partition("::")
    found = next(
        node
        for node in ast.parse((SERVERS / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    named = {
        text.split("{")[0]
        for node in ast.walk(found)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        for text in ([node.value] if isinstance(node, ast.Constant) else [ast.unparse(node)[2:]])
        if isinstance(text, str)
    }
    assert named & {name + suffix for suffix in SUFFIXES[BY_NAME[name].kind]}
