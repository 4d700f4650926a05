"""What kvx counts, for Prometheus: the metrics, one sample of them, and what changed between two samples. Pure.

Counters travel as differences and gauges as they are, so that samples of several ranks can be joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histograms' buckets."""


@dataclass(frozen=True)
class Metric:
    """One metric. `label` distinguishes what it counts; `is_same_on_all_ranks`: joined by the largest, not by the sum.

    Prometheus' client adds `_total` to the names of counters.
    """

    name: str
    kind: Kind
    help: str
    label: str = ""
    is_same_on_all_ranks: bool = False


METRICS: tuple[Metric, ...] = (
    Metric("kvx_transfer_bytes", "counter", "Bytes that hand-offs have moved into this engine."),
    Metric("kvx_transfer_blocks", "counter", "Blocks that hand-offs have moved into this engine."),
    Metric("kvx_transfer_descriptors", "counter", "Contiguous copies that hand-offs into this engine took."),
    Metric("kvx_handoffs_received", "counter", "Hand-offs into this engine that are complete.", "connector"),
    Metric("kvx_handoffs_failed", "counter", "Hand-offs into this engine that failed.", "cause"),
    Metric(
        "kvx_handoffs_unneeded",
        "counter",
        "Hand-offs with nothing to move: given up before, or decode had all.",
    ),
    Metric("kvx_holds_released", "counter", "Requests whose blocks were kept for a reader that has read them."),
    Metric("kvx_holds_expired", "counter", "Requests whose lease ended before anybody had read their blocks."),
    Metric("kvx_leases_renewed", "counter", "Renewals of leases that this engine granted."),
    Metric("kvx_side_channel_refused", "counter", "Messages of the side channel that were not taken.", "cause"),
    Metric("kvx_internal_errors", "counter", "Errors of kvx itself that a hand-off thread survived."),
    Metric("kvx_digests_checked", "counter", "Digests that were compared."),
    Metric("kvx_digests_mismatched", "counter", "Digests that differed."),
    Metric("kvx_offload_stores", "counter", "Blocks that went to host memory."),
    Metric("kvx_offload_hits", "counter", "Blocks that were found in host memory."),
    Metric("kvx_offload_reloads", "counter", "Blocks that came back from host memory."),
    Metric("kvx_offload_evictions", "counter", "Blocks that gave their place in host memory to others."),
    Metric("kvx_offload_refused", "counter", "Blocks that host memory had no room for."),
    Metric("kvx_offload_failed", "counter", "Copies to or from host memory that failed."),
    Metric("kvx_handoff_seconds", "histogram", "From asking the owner to having everything."),
    Metric("kvx_handoff_phase_seconds", "histogram", "One step of a hand-off.", "phase"),
    Metric("kvx_holds", "gauge", "Requests whose blocks are kept for a reader now.", is_same_on_all_ranks=True),
    Metric("kvx_held_blocks", "gauge", "Blocks that are kept for readers now.", is_same_on_all_ranks=True),
    Metric("kvx_cache_bytes", "gauge", "Bytes of the KV cache, over all ranks.", "state"),
    Metric("kvx_cache_blocks", "gauge", "Blocks of the KV cache.", "state", is_same_on_all_ranks=True),
    Metric("kvx_generation", "gauge", "How often the cache's regions have changed.", is_same_on_all_ranks=True),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

Values = dict[str, float]
"""Label value -> number; "" where the metric has no label."""


@dataclass(frozen=True)
class Sample:
    """Counters since the start, gauges now, and what histograms observed since the sample before."""

    counters: Mapping[str, Values] = field(default_factory=dict)
    gauges: Mapping[str, Values] = field(default_factory=dict)
    observed: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


def change(before: Sample, now: Sample) -> dict[str, Any]:
    """What a frontend must be told, in plain values; empty when nothing has changed."""
    counters = {
        name: grown for name, values in now.counters.items() if (grown := _grown(before.counters.get(name, {}), values))
    }
    gauges = {name: dict(values) for name, values in now.gauges.items() if values != before.gauges.get(name)}
    observed = {
        name: {label: list(seen) for label, seen in by_label.items() if seen} for name, by_label in now.observed.items()
    }
    parts = {"counters": counters, "gauges": gauges, "observed": {name: by for name, by in observed.items() if by}}
    return parts if any(parts.values()) else {}


def _grown(before: Values, now: Values) -> Values:
    return {label: value - before.get(label, 0) for label, value in now.items() if value != before.get(label, 0)}


def joined(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Two ranks' changes as one."""
    result: dict[str, Any] = {"counters": {}, "gauges": {}, "observed": {}}
    for one in (ours, theirs):
        for name, values in one.get("counters", {}).items():
            _add(result["counters"].setdefault(name, {}), values)
        for name, values in one.get("gauges", {}).items():
            merged = result["gauges"].setdefault(name, {})
            if BY_NAME[name].is_same_on_all_ranks:
                merged.update({label: max(value, merged.get(label, value)) for label, value in values.items()})
            else:
                _add(merged, values)
        for name, by_label in one.get("observed", {}).items():
            for label, seen in by_label.items():
                result["observed"].setdefault(name, {}).setdefault(label, []).extend(seen)
    return result


def _add(total: Values, more: Values) -> None:
    for label, value in more.items():
        total[label] = total.get(label, 0) + value
