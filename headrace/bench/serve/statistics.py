"""Percentiles and their uncertainty.

Requests that follow each other share a queue, so they are not independent: intervals come from a circular block
bootstrap (Politis and Romano 1992) over requests in the order in which they were due, in blocks of √n, and span 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def intervals(self, draws: Counts, percents: Sequence[float]) -> list[Interval]:
        """Of the mean and of each percentile."""
        resampled = [self._resampled(weights, percents) for weights in draws]
        lows, highs = np.percentile([row for row in resampled if row is not None], _TAILS, axis=0)
        return list(zip(lows.tolist(), highs.tolist(), strict=True))

    def _resampled(self, weights: Counts, percents: Sequence[float]) -> list[float] | None:
        """Mean and percentiles (below which so much of the weight is) of weighted values. None: none has weight."""
        weights = weights[self._owners]
        total = np.cumsum(weights)
        if not total[-1]:
            return None
        places = np.searchsorted(total, np.array(percents) / 100 * total[-1])
        found = self.values[np.minimum(places, len(self.values) - 1)]
        return [float(weights @ self.values / total[-1]), *found.tolist()]


def share_interval(is_so: Floats, draws: Counts) -> Interval:
    """Of the share of requests with 1 in place of 0."""
    low, high = np.percentile(draws @ is_so / len(is_so), _TAILS)
    return float(low), float(high)
