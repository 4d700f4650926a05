"""kvx's metrics on vLLM's own `/metrics`: a rank's sample on its way through vLLM's statistics to the frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ..exposition import METRICS, SECONDS, Sample, change, joined
from ..metrics import HandoffMetrics


class KvxStats(KVConnectorStats):
    """What changed since the step before, on one rank or joined over several."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvxStats(joined(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        counters = self.data.get("counters", {})
        found = {
            "hand-offs": sum(counters.get("kvx_handoffs_received", {}).values()),
            "failed": sum(counters.get("kvx_handoffs_failed", {}).values()),
            "MiB": round(sum(counters.get("kvx_transfer_bytes", {}).values()) / 2**20, 1),
            "offloaded": sum(counters.get("kvx_offload_stores", {}).values()),
            "reloaded": sum(counters.get("kvx_offload_reloads", {}).values()),
        }
        return {name: value for name, value in found.items() if value}

    def is_empty(self) -> bool:
        return not self.data


class StatsTaker:
    """Remembers what was told last, so that an unchanged step costs a comparison and tells nothing."""

    def __init__(self, cache: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """`cache` gives the gauges of the KV cache; it is asked again only when something else has changed."""
        self._cache = cache
        self._seen: tuple[Any, ...] = ()
        self._told = Sample()
        self._num_observed = 0

    def take(
        self,
        metrics: HandoffMetrics,
        holds: int,
        held_blocks: Callable[[], int],
        generation: int,
        offload: Mapping[str, int],
    ) -> KvxStats | None:
        """The changes since the last call; None when there are none.

        `held_blocks` is called only when something has changed: no block comes to be held, or free, without a hold that
        begins or is counted as ended.
        """
        counters = _counters(metrics, offload)
        seen = (counters, holds, generation)
        if seen == self._seen:
            return None
        self._seen = seen
        gauges = {
            "kvx_holds": {"": float(holds)},
            "kvx_held_blocks": {"": float(held_blocks())},
            "kvx_generation": {"": float(generation)},
            **{name: dict(values) for name, values in self._cache().items()},
        }
        now = Sample(counters, gauges, self._observed(metrics))
        data = change(self._told, now)
        self._told = now
        return KvxStats(data) if data else None

    def _observed(self, metrics: HandoffMetrics) -> dict[str, dict[str, list[float]]]:
        """Durations of the hand-offs that ended since the last call, as far as they are still kept."""
        new = min(metrics.received - self._num_observed, len(metrics.durations_s), len(metrics.spans_s))
        self._num_observed = metrics.received
        if new <= 0:
            return {}
        phases: dict[str, list[float]] = {}
        for spans in list(metrics.spans_s)[-new:]:
            for phase, duration_s in spans.items():
                phases.setdefault(phase, []).append(duration_s)
        return {
            "kvx_handoff_seconds": {"": list(metrics.durations_s)[-new:]},
            "kvx_handoff_phase_seconds": phases,
        }


def _counters(metrics: HandoffMetrics, offload: Mapping[str, int]) -> dict[str, dict[str, float]]:
    plain = {
        "kvx_transfer_bytes": metrics.bytes,
        "kvx_transfer_blocks": metrics.blocks,
        "kvx_transfer_descriptors": metrics.descriptors,
        "kvx_handoffs_unneeded": metrics.released_only,
        "kvx_holds_released": metrics.released,
        "kvx_holds_expired": metrics.expired,
        "kvx_leases_renewed": metrics.renewed,
        "kvx_internal_errors": metrics.internal_errors,
        "kvx_digests_checked": metrics.digests_checked + offload.get("digests_checked", 0),
        "kvx_digests_mismatched": metrics.digests_mismatched + offload.get("digests_mismatched", 0),
        **{f"kvx_offload_{name}": offload.get(name, 0) for name in _OFFLOAD},
    }
    return {
        **{name: {"": float(value)} for name, value in plain.items()},
        # Copied before they are walked: the hand-off thread adds to them.
        "kvx_handoffs_received": {name: float(count) for name, count in dict(metrics.by_connector).items()},
        "kvx_handoffs_failed": {cause: float(count) for cause, count in dict(metrics.failures).items()},
        "kvx_side_channel_refused": {cause: float(count) for cause, count in dict(metrics.refused_by_cause).items()},
    }


_OFFLOAD = ("stores", "hits", "reloads", "evictions", "refused", "failed")


class KvxPromMetrics(KVConnectorPromMetrics):
    """The metrics in one frontend. vLLM gives the classes to make them of, and the labels of each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        made = {"counter": self._counter, "gauge": self._gauge, "histogram": self._histogram}
        self._metrics = {
            metric.name: made[metric.kind](
                metric.name, metric.help, [*labelnames, *([metric.label] if metric.label else [])]
            )
            for metric in METRICS
        }
        for metric in METRICS:
            if metric.label:
                continue
            for engine in per_engine_labelvalues:
                self._of(metric.name, engine, "")  # so that it is there, at zero, before anything happens

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, values in transfer_stats_data.get("counters", {}).items():
            for label, value in values.items():
                self._of(name, engine_idx, label).inc(value)
        for name, values in transfer_stats_data.get("gauges", {}).items():
            for label, value in values.items():
                self._of(name, engine_idx, label).set(value)
        for name, by_label in transfer_stats_data.get("observed", {}).items():
            for label, seen in by_label.items():
                for value in seen:
                    self._of(name, engine_idx, label).observe(value)

    def _of(self, name: str, engine: int, label: str) -> Any:
        labels = [str(value) for value in self.per_engine_labelvalues[engine]]
        return self._metrics[name].labels(*labels, *([label] if label else []))

    def _counter(self, name: str, text: str, labels: list[str]) -> Any:
        return self._counter_cls(name=name, documentation=text, labelnames=labels)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Any:
        return self._gauge_cls(name=name, documentation=text, labelnames=labels, multiprocess_mode="mostrecent")

    def _histogram(self, name: str, text: str, labels: list[str]) -> Any:
        return self._histogram_cls(name=name, documentation=text, labelnames=labels, buckets=SECONDS)


def _forget_earlier() -> None:
    """vLLM takes its own metrics of an earlier engine of this process back before it makes them again; so must we."""
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, Counter | Gauge | Histogram) and str(getattr(collector, "_name", "")).startswith(
            "kvx_"
        ):
            REGISTRY.unregister(collector)
