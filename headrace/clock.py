"""The clock seam: deadlines are counted on a monotonic clock that tests can move by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import InvalidRequest


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


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock, handed down so that no wait outlives what it is for."""

    clock: Clock
    at_s: float

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        """Raises InvalidRequest for what is not a time: with NaN among them, timers no longer fire in order."""
        if not 0 <= seconds < float("inf"):
            raise InvalidRequest("timeout_s", seconds, "must be a finite number of seconds, 0 or more")
        return cls(clock, clock.now() + seconds)

    def remaining_s(self) -> float:
        return max(0.0, self.at_s - self.clock.now())

    def share_s(self, limit_s: float) -> float:
        """How long one attempt may take: its own limit, and half of what is left, so that another way can follow."""
        return min(limit_s, self.remaining_s() / 2)
