"""Traces of requests over all processes, for OpenTelemetry: each phase is a span, made from recorded times when the
phase is over. Nothing is done per token.

    router     Generate ─┬─ admission
                         ├─ decision
                         └─ dispatch            one for each decode worker that was tried
    decode               └─ decode_worker ─┬─ hand_off      one for each prefill worker that was tried
    prefill                                │  └─ prefill_worker ─┬─ queue
                                           │                     └─ prefill
                                           ├─ transfer
                                           ├─ queue, prefill       where the decode worker computes the prompt
                                           └─ decode

From process to process goes a W3C `traceparent`, in our own messages. Without `telemetry.otlp_endpoint` the SDK is not
even imported, and a trace that a client began is handed on as it came.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from headrace.config import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry import trace

Attribute = str | int | float | bool

_EXPORT_TIMEOUT_S = 5.0
_EXPORT_INTERVAL_MS = 1000
_KEY = "traceparent"
NOT_SAMPLED = f"00-{'f' * 32}-{'f' * 16}-00"  # of what nobody is to trace, wherever it goes


class Span:
    """One span that goes on, or nothing where the request is not traced. Times are of `time.monotonic`. `end` once;
    what comes after that is lost.
    """

    __slots__ = ("_offset_ns", "_span", "_tracer", "traceparent")

    def __init__(
        self, traceparent: str = "", tracer: trace.Tracer | None = None, span: trace.Span | None = None
    ) -> None:
        self.traceparent = traceparent  # for whoever works under this span elsewhere; "": there is no trace
        self._tracer = tracer
        self._span = span
        self._offset_ns = 0 if span is None else time.time_ns() - time.monotonic_ns()

    def phase(self, name: str, start_s: float, end_s: float, **attributes: Attribute) -> None:
        """What happened under this span, and is over."""
        if self._span is None:
            return
        child = self._started(name, start_s, attributes)
        child.end(self._nanoseconds(end_s))

    def child(self, name: str, **attributes: Attribute) -> Span:
        """Something under this span that begins now."""
        if self._span is None:
            return self
        return self._own(self._started(name, time.monotonic(), attributes))

    def note(self, **attributes: Attribute) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def fail(self, error: str) -> None:
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))

    def end(self) -> None:
        if self._span is not None:
            self._span.end()

    def _own(self, span: trace.Span) -> Span:
        return Span(_traceparent(span), self._tracer, span)

    def _started(self, name: str, start_s: float, attributes: dict[str, Attribute]) -> trace.Span:
        from opentelemetry import trace

        assert self._tracer is not None
        assert self._span is not None
        return self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._nanoseconds(start_s),
        )

    def _nanoseconds(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset_ns


class Tracing:
    """Of one process. `close` sends what is left; it blocks, for a bounded time."""

    def __init__(
        self, tracer: trace.Tracer | None = None, close: Callable[[], object] = lambda: None
    ) -> None:
        self._tracer = tracer
        self.close = close

    def begin(self, name: str, traceparent: str, start_s: float, **attributes: Attribute) -> Span:
        """This process's part of a request, under the span that `traceparent` names; where it names none, a trace of
        its own. Those that are not sampled are handed on and recorded nowhere.
        """
        if self._tracer is None:
            return Span(traceparent)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({_KEY: traceparent})
        started_ns = time.time_ns() - int((time.monotonic() - start_s) * 1e9)
        span = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, attributes=attributes, start_time=started_ns
        )
        if not span.is_recording():
            return Span(_traceparent(span))
        return Span(_traceparent(span), self._tracer, span)


def start_tracing(settings: TelemetrySettings, service: str, instance: str) -> Tracing:
    """`service` and `instance` say in each span whose it is. Sends in the background, and drops what the collector does
    not take in time.
    """
    if not settings.otlp_endpoint:
        return Tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    names = {
        "service.name": service,
        "service.instance.id": instance,
        "service.version": version("headrace"),
    }
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
        resource=Resource.create(names),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(
        settings.otlp_endpoint,
        insecure=not settings.otlp_endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_INTERVAL_MS))
    return Tracing(provider.get_tracer("headrace"), provider.shutdown)


def _traceparent(span: trace.Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
