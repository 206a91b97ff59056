"""Logs: one line per event, structured. Configured once per process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import structlog


def configure_logging(level: str, process: str, file: Path | None = None) -> None:
    """To `file`, else to standard error: readable on a terminal, JSON lines elsewhere. Each line names the process."""
    target = sys.stderr if file is None else file.open("a", buffering=1)
    renderer = structlog.dev.ConsoleRenderer() if target.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            lambda _logger, _method, event: {**event, "process": process},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=True,
    )
