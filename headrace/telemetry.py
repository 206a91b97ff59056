"""Logs, one structured line per event, and metrics for Prometheus. Both configured once per process."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.utils import floatToGoString

from headrace.errors import Unavailable
from headrace.tracing import Tracing

# Bounds of histograms: from a token of a fast engine to a long queue.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Distribution:
    """A histogram for busy threads: `add` is one bisection, with a weight, and locks nothing. One thread adds; a scrape
    on another may miss what is being added.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """As HistogramMetricFamily takes them: cumulative, by upper bound."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


# What a worker does for a request, each observed where it is done.
WORKER_PHASES = ("queue", "prefill", "transfer", "decode")


@dataclass(frozen=True, slots=True)
class WorkerTelemetry:
    """Where the roles of one worker tell how long requests took. Used on its event loop."""

    tracing: Tracing = field(default_factory=Tracing)
    phases: dict[str, Distribution] = field(
        default_factory=lambda: {phase: Distribution(SECONDS) for phase in WORKER_PHASES}
    )
    inter_token: Distribution = field(
        default_factory=lambda: Distribution(SECONDS)
    )  # a request's mean, per token


def configure_logging(level: str, process: str, file: Path | None = None) -> None:
    """To `file`, else to standard error: readable on a terminal, JSON lines elsewhere. Each line names the process."""
    target = sys.stderr if file is None else file.open("a", buffering=1)
    renderer = structlog.dev.ConsoleRenderer() if target.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            lambda _logger, _method, event: {**event, "process": process},
            structlog.contextvars.merge_contextvars,  # of the request that is being served
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=True,
    )


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Answer GET /metrics on a thread. Returns the port and what ends it. Raises Unavailable when the port is taken."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(f"can not serve metrics on {host}:{port}: {error}; is the port taken?") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
