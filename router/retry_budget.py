"""How often requests may be dispatched again, over all of them: a fleet that is dying is not hammered as well."""

from __future__ import annotations

from headrace.clock import Clock, SystemClock

_REFILL_S = 10.0


class RetryBudget:
    """A token bucket. Full, it lets every request in flight be dispatched again once, as after the loss of the worker
    that had them all; it refills from empty in 10 s.
    """

    def __init__(self, capacity: int, clock: Clock | None = None) -> None:
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._left = float(capacity)
        self._counted_at = self._clock.now()

    def take(self) -> bool:
        """Whether one more is allowed."""
        now = self._clock.now()
        refill = (now - self._counted_at) * self._capacity / _REFILL_S
        self._left, self._counted_at = min(self._capacity, self._left + refill), now
        if self._left < 1:
            return False
        self._left -= 1
        return True
