"""A rank's counters on their way to Prometheus, through vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest

from kvx.metrics import HandoffMetrics

# vLLM takes long to import, and warns of things of its own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LABELS = {0: ["model", "0"], 1: ["model", "1"]}


@pytest.fixture
def prom() -> Any:
    return frontend()


def frontend() -> Any:
    from kvx.vllm.bridge import KvxConnector

    types: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    return KvxConnector.build_prom_metrics(config, types, ["model_name", "engine"], LABELS)


def value(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "model", "engine": str(engine), **labels})


def taker() -> Any:
    from kvx.vllm.bridge_metrics import StatsTaker

    return StatsTaker(lambda: {"kvx_cache_bytes": {"committed": 100.0}, "kvx_cache_blocks": {"final": 9.0}})


def received(metrics: HandoffMetrics, seconds: float) -> None:
    metrics.received += 1
    metrics.bytes += 1000
    metrics.by_connector["nixl"] = metrics.by_connector.get("nixl", 0) + 1
    metrics.durations_s.append(seconds)
    metrics.spans_s.append({"greet": seconds / 4, "move": seconds / 2})


def test_metrics_are_there_at_zero_before_anything_happens(prom: Any) -> None:
    assert value("kvx_transfer_bytes_total") == 0
    assert value("kvx_transfer_bytes_total", engine=1) == 0
    assert value("kvx_handoff_seconds_count") == 0


def test_a_hand_off_moves_each_metric_by_the_right_amount(prom: Any) -> None:
    metrics, stats = HandoffMetrics(), taker()
    first = stats.take(metrics, 0, lambda: 0, 1, {})
    assert first is not None
    prom.observe(first.to_dict(), 1)
    assert stats.take(metrics, 0, lambda: 0, 1, {}) is None, "nothing has changed"
    received(metrics, 0.02)
    received(metrics, 0.04)
    metrics.failure("timeout")
    metrics.refuse("forged")
    metrics.internal_errors += 1
    second = stats.take(metrics, 1, lambda: 3, 1, {"stores": 7, "failed": 1, "digests_checked": 5})
    assert second is not None
    prom.observe(second.to_dict(), 1)
    assert value("kvx_transfer_bytes_total", 1) == 2000
    assert value("kvx_handoffs_received_total", 1, connector="nixl") == 2
    assert value("kvx_handoffs_failed_total", 1, cause="timeout") == 1
    assert value("kvx_side_channel_refused_total", 1, cause="forged") == 1
    assert value("kvx_internal_errors_total", 1) == 1
    assert value("kvx_offload_stores_total", 1) == 7
    assert value("kvx_offload_failed_total", 1) == 1
    assert value("kvx_digests_checked_total", 1) == 5
    assert value("kvx_handoff_seconds_count", 1) == 2
    assert value("kvx_handoff_seconds_sum", 1) == pytest.approx(0.06)
    assert value("kvx_handoff_phase_seconds_sum", 1, phase="move") == pytest.approx(0.03)
    assert (value("kvx_holds", 1), value("kvx_held_blocks", 1)) == (1, 3)
    assert value("kvx_cache_bytes", 1, state="committed") == 100
    assert value("kvx_transfer_bytes_total", 0) == 0, "another engine's"


def test_a_log_line_names_only_what_happened() -> None:
    metrics, stats = HandoffMetrics(), taker()
    received(metrics, 0.02)
    metrics.bytes = 3 << 20
    found = stats.take(metrics, 0, lambda: 0, 1, {})
    assert found is not None
    assert found.reduce() == {"hand-offs": 1, "MiB": 3.0}
    assert not found.is_empty()
    found.reset()
    assert found.is_empty()


def test_ranks_are_joined_by_vllm() -> None:
    from kvx.vllm.bridge import KvxConnector
    from kvx.vllm.bridge_metrics import KvxStats

    one, other = (KvxStats({"counters": {"kvx_transfer_bytes": {"": n}}}) for n in (1, 2))
    assert one.aggregate(other).to_dict()["counters"] == {"kvx_transfer_bytes": {"": 3}}
    assert not one.is_empty()
    again = KvxConnector.build_kv_connector_stats(one.to_dict())
    assert again is not None
    assert again.to_dict() == one.to_dict()


def test_a_second_engine_of_a_process_begins_anew(prom: Any) -> None:
    prom.observe({"counters": {"kvx_transfer_bytes": {"": 5}}}, 0)
    frontend()
    assert value("kvx_transfer_bytes_total") == 0


def test_what_is_exposed_is_prometheus_text(prom: Any) -> None:
    prom.observe({"counters": {"kvx_handoffs_failed": {"timeout": 1}}}, 0)
    text = generate_latest().decode()
    assert "# HELP kvx_handoffs_failed_total Hand-offs into this engine that failed." in text
    assert 'kvx_handoffs_failed_total{cause="timeout",engine="0",model_name="model"} 1.0' in text
