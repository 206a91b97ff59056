"""The clock seam: deadlines are counted on a monotonic clock that tests can move by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds. Never compared between machines."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Stands still until `advance` is called."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
