"""What metrics, traces and TLS cost a router: the path of `relay.py` with each of them, in turn, round by round.

none       no metrics, no traces, no TLS
metrics    what a router counts and times of each message and answer; a router always does
traces     metrics, and spans of every request, sent to a collector that takes and forgets them
tls        metrics, and mutual TLS to the worker and TLS to the client
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Generator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from headrace.bench.certificates import Authority
from headrace.bench.relay import Doors, Extras, added_latency_s, relay, router_and_worker
from headrace.config import RpcSettings, TelemetrySettings, TlsSettings

STREAMS = 64
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, and by how much they differ from those of "none"."""

    extra: str
    rounds: int
    relayed_tokens_per_s: float
    router_cpu_us_per_token: float
    added_latency_ms_p50: float  # to an answer of one token
    tokens_ratio: float
    cpu_ratio: float
    latency_ratio: float


@dataclass(frozen=True, slots=True)
class _Sample:
    tokens_per_s: float
    cpu_us: float
    latency_ms: float


def measure(rounds: int, requests: int, relayed_tokens: int) -> Generator[str | list[Row]]:
    """The name of each extra before it is measured, and in the end a row for each."""
    with tempfile.TemporaryDirectory() as folder, _collector() as endpoint:
        variants = _variants(Path(folder), endpoint)
        samples: dict[str, list[_Sample]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, extras in variants.items():
                yield name
                with router_and_worker(extras=extras) as doors:
                    samples[name].append(_sample(doors, requests, relayed_tokens))
    yield _rows(samples)


def _sample(doors: Doors, requests: int, relayed_tokens: int) -> _Sample:
    latency_s, _ = added_latency_s(doors, requests)
    relayed = relay(doors, STREAMS, max(2, relayed_tokens // STREAMS))
    return _Sample(relayed.tokens_per_s, relayed.cpu_us_per_token, latency_s * 1e3)


def _rows(samples: Mapping[str, list[_Sample]]) -> list[Row]:
    middle = {
        name: _Sample(
            median(sample.tokens_per_s for sample in some),
            median(sample.cpu_us for sample in some),
            median(sample.latency_ms for sample in some),
        )
        for name, some in samples.items()
    }
    base = middle["none"]
    return [
        Row(
            extra=name,
            rounds=len(samples[name]),
            relayed_tokens_per_s=one.tokens_per_s,
            router_cpu_us_per_token=one.cpu_us,
            added_latency_ms_p50=one.latency_ms,
            tokens_ratio=one.tokens_per_s / base.tokens_per_s,
            cpu_ratio=one.cpu_us / base.cpu_us,
            latency_ratio=one.latency_ms / base.latency_ms,
        )
        for name, one in middle.items()
    ]


def _variants(folder: Path, endpoint: str) -> dict[str, Extras]:
    authority = Authority(folder)
    router, worker = (
        RpcSettings(tls=TlsSettings.model_validate(authority.member(role).tls()))
        for role in ("router", "worker")
    )
    return {
        "none": Extras(with_metrics=False),
        "metrics": Extras(),
        "traces": Extras(telemetry=TelemetrySettings(otlp_endpoint=endpoint, trace_ratio=1.0)),
        "tls": Extras(router=router, worker=worker),
    }


@contextmanager
def _collector() -> Generator[str]:
    """Yields its endpoint. A process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise TimeoutError(f"the collector of traces said nothing for {_START_TIMEOUT_S:g} s")
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _collect(connection: Connection) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Forgetful(), server)
    connection.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


class _Forgetful(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        return trace_service_pb2.ExportTraceServiceResponse()
