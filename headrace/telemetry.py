"""Logs: one line per event, structured, to standard error. Configured once per process."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: str, process: str) -> None:
    """Human-readable on a terminal, JSON lines elsewhere. Every line names the process."""
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            lambda _logger, _method, event: {**event, "process": process},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
