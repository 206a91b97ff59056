"""What `headrace bench serve` left in a folder, read again. Every error names the file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.serve.records import RequestRecord
from headrace.bench.serve.summary import SCHEMA
from headrace.bench.serve.sweep import SCHEMA as SWEEP_SCHEMA
from headrace.errors import InvalidRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    name: str  # tells it apart from those beside it
    summary: Json
    records: list[RequestRecord]

    @property
    def complete(self) -> list[RequestRecord]:
        return [record for record in self.records if record.is_ok]


def read_run(path: Path, name: str = "") -> Run:
    """`path`: the folder, or its summary.json. Raises InvalidRequest."""
    folder = path if path.is_dir() else path.parent
    summary = _read_json(folder / "summary.json" if path.is_dir() else path, SCHEMA)
    lines = folder / "requests.jsonl"
    try:
        records = [RequestRecord(**json.loads(line)) for line in lines.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest("requests", str(lines), f"can not be read: {error}") from None
    return Run(name or summary["label"], summary, records)


def read_runs(paths: list[Path]) -> list[Run]:
    """With different names: their labels where these differ, else their folders. Raises InvalidRequest."""
    runs = [read_run(path) for path in paths]
    if len({run.name for run in runs}) == len(runs):
        return runs
    folders = [path if path.is_dir() else path.parent for path in paths]
    return [
        Run(folder.name or str(folder), run.summary, run.records)
        for folder, run in zip(folders, runs, strict=True)
    ]


def read_sweep(folder: Path) -> Json:
    return _read_json(folder / "sweep.json", SWEEP_SCHEMA)


def _read_json(path: Path, schema: str) -> Json:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest("result", str(path), f"can not be read: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != schema:
        raise InvalidRequest("result", str(path), f"must be a result of `headrace bench serve`: {schema}")
    return content
