"""Where a local cluster says that it runs, so that commands in other terminals find it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunningCluster:
    router: str  # address of the public API
    directory_url: str
    pid: int  # of the process that keeps it
    http: str = ""  # URL of the HTTP API; "": it serves none


def announce(running: RunningCluster, cache_dir: Path, name: str) -> Path:
    """Write it down. The caller removes the file at the end."""
    path = _file(cache_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)  # the directory's URL holds a password
    partial.write_text(json.dumps(asdict(running)))
    return partial.replace(path)


def find_running(cache_dir: Path, name: str) -> RunningCluster | None:
    """The local cluster of this name, if its process lives."""
    try:
        running = RunningCluster(**json.loads(_file(cache_dir, name).read_text()))
        os.kill(running.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return running


def _file(cache_dir: Path, name: str) -> Path:
    return cache_dir.expanduser() / "running" / f"{name}.json"
