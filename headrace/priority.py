"""What a level of priority is worth, in the router's queue and in an engine's alike. Lower is more urgent.

A rank is the time of arrival, moved by some seconds per level. So privilege is bounded by the seconds between two
levels, and nothing starves: whoever waits long enough comes before all that arrive later.
"""

from __future__ import annotations

MIN_PRIORITY, MAX_PRIORITY = -4, 4
# One that is less urgent by a level goes first if it has waited this much longer.
SECONDS_PER_PRIORITY = 5.0


def rank_s(arrived_s: float, priority: int) -> float:
    """Seconds on the clock of `arrived_s`; less goes first."""
    return arrived_s + priority * SECONDS_PER_PRIORITY
