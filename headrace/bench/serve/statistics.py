"""Percentiles and their uncertainty.

Requests that follow each other share a queue, so they are not independent: intervals come from a circular block
bootstrap (Politis and Romano 1992) over requests in the order in which they were due, in blocks of √n, and span 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Interval = tuple[float, float]

METHOD = "circular block bootstrap over requests, blocks of sqrt(n), 95 %"
_RESAMPLES = 400
_TAILS = (2.5, 97.5)


def resamples(num_requests: int, seed: int) -> Counts:
    """How often each request is in each resample: [resamples, requests]."""
    rng = np.random.default_rng([seed, 4])
    length = max(1, math.isqrt(num_requests))
    num_blocks = -(-num_requests // length)
    starts = rng.integers(0, num_requests, (_RESAMPLES, num_blocks))
    chosen = (starts[:, :, None] + np.arange(length)) % num_requests
    chosen = chosen.reshape(_RESAMPLES, -1)[:, :num_requests]
    return np.stack([np.bincount(row, minlength=num_requests) for row in chosen])


class Pooled:
    """Values, each of which belongs to a request; a request may have any number of them."""

    def __init__(self, groups: Sequence[Sequence[float]]) -> None:
        owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        values = np.array([value for group in groups for value in group], dtype=float)
        order = np.argsort(values, kind="stable")
        self.values: Floats = values[order]
        self._owners: Any = owners[order]

    def mean(self, weights: Counts | None = None) -> float:
        if weights is None:
            return float(self.values.mean())
        return float(np.average(self.values, weights=weights[self._owners]))

    def percentile(self, percent: float, weights: Counts | None = None) -> float:
        """With weights: the value below which so many of the weighted values are."""
        if weights is None:
            return float(np.percentile(self.values, percent))
        total = np.cumsum(weights[self._owners])
        place = int(np.searchsorted(total, percent / 100 * total[-1]))
        return float(self.values[min(place, len(self.values) - 1)])

    def has_values(self, weights: Counts) -> bool:
        return bool(weights[self._owners].any())


def interval(statistic: Callable[[Counts], float], draws: Counts) -> Interval:
    """Of a statistic of weights by request."""
    low, high = np.percentile([statistic(weights) for weights in draws], _TAILS)
    return float(low), float(high)
