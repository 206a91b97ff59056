"""Ends what a local cluster left running when its keeper died without cleaning up. A process of its own.

It reads lines `pid start_time` from its standard input. When that ends, so has the keeper: whatever of these still
lives is killed, and the cluster's folder is removed. After a clean stop there is nothing to do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import suppress

import psutil

_GRACE_S = 3.0  # most end by themselves when what they belong to is gone


class Reaper:
    """The keeper's side."""

    def __init__(self, folder: str) -> None:
        self._not_ours = set(psutil.Process().children(recursive=True))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, folder], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch_children(self) -> None:
        """Everything that this process has started since this reaper was made, directly or not."""
        assert self._process.stdin is not None
        for child in set(psutil.Process().children(recursive=True)) - self._not_ours:
            with suppress(psutil.NoSuchProcess):
                print(child.pid, child.create_time(), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """After a clean stop, or as good as that was."""
        self._process.communicate()


def main(folder: str) -> None:
    watched = [line.split() for line in sys.stdin]
    deadline = time.monotonic() + _GRACE_S
    while (alive := [p for pid, started in watched if (p := _find(int(pid), float(started)))]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _find(pid: int, started: float) -> psutil.Process | None:
    """The process, if it still is the same one, and not this one."""
    try:
        process = psutil.Process(pid)
        same = process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same and pid != psutil.Process().pid else None


if __name__ == "__main__":
    main(sys.argv[1])
