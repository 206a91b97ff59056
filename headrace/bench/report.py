"""What a benchmark found, as JSON: written whole after each row, so that one that is cut short leaves what it has.

{"machine": {...}, "model": {...}, "rows": [{...}, ...], "skipped": [{..., "reason": "..."}, ...]}
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from headrace.engine.native import library
from headrace.errors import InvalidRequest


@dataclass(slots=True)
class Report:
    """Rows and skipped cases of one benchmark, in `path` where there is one."""

    path: Path | None
    model: Mapping[str, Any]
    machine: Mapping[str, Any] = field(default_factory=lambda: machine_facts())
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    skipped: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        self._write()

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        self._write()

    def skip(self, case: Mapping[str, Any], reason: str) -> None:
        self.skipped.append({**case, "reason": reason})
        self._write()

    def _write(self) -> None:
        """Raises InvalidRequest when the file can not be written."""
        if self.path is None:
            return
        content = {
            "machine": self.machine,
            "model": self.model,
            "rows": self.rows,
            "skipped": self.skipped,
        }
        # Moved into its place, so that whoever reads it meanwhile finds it whole.
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            partial.write_text(json.dumps(content, indent=1) + "\n")
            partial.replace(self.path)
        except OSError as error:
            raise InvalidRequest(
                "--json", str(self.path), f"it can not be written: {error.strerror}"
            ) from None


def machine_facts() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "kernels": library.instruction_sets(),
        "headrace": version("headrace"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
