"""An OpenTelemetry collector in this process, which keeps the spans that it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(slots=True)
class SentSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "": none
    start_ns: int
    end_ns: int
    error: str | None  # None: its status is not an error
    attributes: dict[str, object]
    parent: SentSpan | None = None

    @property
    def path(self) -> str:
        """Names from the first span that was sent here to this one."""
        return self.name if self.parent is None else f"{self.parent.path}/{self.name}"


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    endpoint: str = ""
    spans: list[SentSpan] = field(default_factory=list)

    async def Export(self, request, context):
        for of_resource in request.resource_spans:
            resource = {entry.key: entry.value.string_value for entry in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                self.spans += [_sent(resource["service.name"], span) for span in of_scope.spans]
        self._link()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, condition: Callable[[list[SentSpan]], bool], timeout_s: float = 20.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self.spans):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"these came: {sorted(span.path for span in self.spans)}") from None

    def _link(self) -> None:
        by_id = {span.span_id: span for span in self.spans}
        for span in self.spans:
            span.parent = by_id.get(span.parent_id)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    server, found = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


def _sent(service: str, span: trace_pb2.Span) -> SentSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return SentSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.message if failed else None,
        {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes},
    )
