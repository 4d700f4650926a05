"""OpenTelemetry spans of hand-offs, joined over both engines by prefill's request id. Off unless configured.

The trace's id comes from the request id, which both sides know, so that no header has to travel: prefill's span
`kvx.hold` and decode's `kvx.handoff`, with its steps below it, are one trace in whatever collects them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from kvx.errors import ConnectorError

logger = logging.getLogger(__name__)

PROTOCOL_ENVIRONMENT = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
HELD_MOST = 10_000
"""Holds whose beginning is remembered; of more than that the oldest get no span."""

Attributes = Mapping[str, str | int | float | bool]


class HandoffTracer:
    """Makes spans when something has ended. One thread calls; sending is the library's own thread's work."""

    def __init__(self, engine_id: str, exporter: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "kvx", "service.instance.id": engine_id}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvx")
        self._held_since: dict[str, float] = {}

    def hold_began(self, request_id: str) -> None:
        """Prefill keeps a request's blocks from now on."""
        self._held_since[request_id] = time.monotonic()
        while len(self._held_since) > HELD_MOST:
            del self._held_since[next(iter(self._held_since))]

    def hold_ended(self, request_id: str, outcome: str) -> None:
        """Its blocks are free again; `outcome`: released or expired."""
        began = self._held_since.pop(request_id, None)
        if began is not None:
            self._record("kvx.hold", request_id, began, time.monotonic(), {"kvx.outcome": outcome})

    def handed_off(
        self, owners_request_id: str, began: float, steps_s: Mapping[str, float], attributes: Attributes
    ) -> None:
        """A pull has ended, well or not. `steps_s`: its steps in order, each with how long it took."""
        parent = self._record("kvx.handoff", owners_request_id, began, time.monotonic(), attributes)
        for step, duration_s in steps_s.items():
            self._record(f"kvx.{step}", owners_request_id, began, began + duration_s, {}, parent)
            began += duration_s

    def close(self) -> None:
        """Send what is left. Idempotent."""
        self._provider.shutdown()

    def _record(
        self, name: str, request_id: str, began: float, ended: float, attributes: Attributes, parent: Any = None
    ) -> Any:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(_root_of(request_id) if parent is None else parent)
        span = self._tracer.start_span(
            name,
            context=context,
            start_time=_unix_ns(began),
            attributes={"gen_ai.request.id": request_id, **attributes},
        )
        span.end(_unix_ns(ended))
        return span


def _root_of(request_id: str) -> Any:
    """The span that both sides' spans are children of; nobody records it."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    digest = hashlib.sha256(f"kvx/{request_id}".encode()).digest()
    return NonRecordingSpan(
        SpanContext(
            trace_id=int.from_bytes(digest[:16], "big"),
            span_id=int.from_bytes(digest[16:24], "big"),
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
    )


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def open_tracer(engine_id: str, endpoint: str) -> HandoffTracer | None:
    """A tracer that sends to `endpoint` (as vLLM's --otlp-traces-endpoint), or None where it is empty.

    Sent over gRPC, or over HTTP where OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is http/protobuf; vLLM reads the same.

    Raises:
        ConnectorError: OpenTelemetry is not installed, or the protocol is another one.
    """
    if not endpoint:
        return None
    protocol = os.environ.get(PROTOCOL_ENVIRONMENT, "grpc")
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            return HandoffTracer(engine_id, Grpc(endpoint=endpoint, insecure=not endpoint.startswith("https")))
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return HandoffTracer(engine_id, Http(endpoint=endpoint))
    except ImportError as error:
        raise ConnectorError(
            f"otlp_traces_endpoint is {endpoint!r}, but OpenTelemetry is not installed ({error}); "
            "pip install 'kvx[otel]', or leave the option out"
        ) from error
    raise ConnectorError(f"{PROTOCOL_ENVIRONMENT} is {protocol!r}; it needs grpc or http/protobuf")
