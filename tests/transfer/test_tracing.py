"""Spans of a hand-off as a collector gets them: both engines' in one trace, found by prefill's request id."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from engine_process import EngineConfig, StartEngines
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from test_handoff import hand_off, pull

from kvx.errors import ConnectorError
from kvx.tracing import PROTOCOL_ENVIRONMENT, open_tracer

pytestmark = [pytest.mark.transfer, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """OpenTelemetry's own service, which keeps what it gets."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> Any:
        with self.arrived:
            self.spans += [
                span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
            ]
            self.arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, *names: str) -> list[Any]:
        with self.arrived:
            enough = self.arrived.wait_for(lambda: set(names) <= {span.name for span in self.spans}, 60)
            assert enough, [span.name for span in self.spans]
            return list(self.spans)


@pytest.fixture
def collector() -> Iterator[Collector]:
    found, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield found
    server.stop(None).wait()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_both_engines_spans_are_one_trace(start_engines: StartEngines, collector: Collector) -> None:
    settings = {"otlp_traces_endpoint": collector.endpoint}
    owner, reader = start_engines(*(EngineConfig(name, settings=settings) for name in ("prefill", "decode")))
    hand_off(owner, reader, 40, 1)
    spans = collector.wait_for("kvx.hold", "kvx.handoff", "kvx.claim", "kvx.move")
    (hold,) = (span for span in spans if span.name == "kvx.hold")
    (handoff,) = (span for span in spans if span.name == "kvx.handoff")
    assert hold.trace_id == handoff.trace_id
    assert hold.parent_span_id == handoff.parent_span_id
    assert attributes(hold)["gen_ai.request.id"] == attributes(handoff)["gen_ai.request.id"]
    assert attributes(hold)["kvx.outcome"] == "released"
    assert attributes(handoff)["kvx.outcome"] == "received"
    assert attributes(handoff)["kvx.connector"] == "nixl"
    assert attributes(handoff)["kvx.bytes"] > 0
    steps = [span for span in spans if span.parent_span_id == handoff.span_id]
    assert {"kvx.greet", "kvx.claim", "kvx.plan", "kvx.move"} <= {span.name for span in steps}
    for step in steps:
        assert step.trace_id == handoff.trace_id
        assert handoff.start_time_unix_nano - 10**6 <= step.start_time_unix_nano <= step.end_time_unix_nano
    assert abs(handoff.end_time_unix_nano - time.time_ns()) < 120 * 10**9, "Unix time"


def test_a_failed_hand_off_says_why(start_engines: StartEngines, collector: Collector) -> None:
    settings = {"otlp_traces_endpoint": collector.endpoint, "transfer_deadline_s": 1.0}
    owner, reader = start_engines(*(EngineConfig(name, settings=settings) for name in ("prefill", "decode")))
    pull(reader, owner, "nobody", [[1]], 0, 16)
    spans = collector.wait_for("kvx.handoff")
    (handoff,) = (span for span in spans if span.name == "kvx.handoff")
    assert attributes(handoff)["kvx.outcome"] not in ("", "received")


def test_a_collector_that_is_not_there_delays_nothing(start_engines: StartEngines) -> None:
    settings = {"otlp_traces_endpoint": "http://127.0.0.1:9"}
    owner, reader = start_engines(*(EngineConfig(name, settings=settings) for name in ("prefill", "decode")))
    for seed in range(5):
        hand_off(owner, reader, 40, seed)
    began = time.monotonic()
    owner.stop()
    assert time.monotonic() - began < 30


def test_off_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer("engine", "") is None
    monkeypatch.setenv(PROTOCOL_ENVIRONMENT, "carrier-pigeon")
    with pytest.raises(ConnectorError, match="needs grpc or http/protobuf"):
        open_tracer("engine", "http://127.0.0.1:9")
    monkeypatch.setenv(PROTOCOL_ENVIRONMENT, "http/protobuf")
    tracer = open_tracer("engine", "http://127.0.0.1:9/v1/traces")
    assert tracer is not None
    tracer.close()
    tracer.close()


def test_a_library_that_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConnectorError, match=r"pip install 'kvx\[otel\]'"):
        open_tracer("engine", "http://127.0.0.1:9")
