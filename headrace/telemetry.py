"""Logs, one structured line per event, and metrics for Prometheus. Both configured once per process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from headrace.errors import Unavailable


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
