"""What is told of two samples, how ranks are joined, and that the dashboard asks for nothing that does not exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvx.exposition import BY_NAME, METRICS, Sample, change, joined

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboards" / "kvx.json"
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
