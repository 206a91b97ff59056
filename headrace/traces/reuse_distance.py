"""Reuse distance: how many different blocks were used since a block was last used. A cache of more blocks than that,
which evicts the least recently used, still has it.

Between an access i and the one before it of the same block, prev(i), an access j is the first to its block there if
prev(j) <= prev(i). All j up to prev(i) fulfil that, too, so the distance is

    #{j < i : prev(j) <= prev(i)} - (prev(i) + 1)

which is counted by merging: for each i the smaller ones in the left half next to its own, at every width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.int64]


def previous_accesses(ids: _Array) -> _Array:
    """[n] to [n]: the position of the access to the same block before, -1 for none."""
    order = np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    previous = np.full(len(ids), -1, np.int64)
    previous[order[1:][again]] = order[:-1][again]
    return previous


def reuse_distances(previous: _Array) -> _Array:
    """Of each access that has one before it, in order."""
    distances = _num_smaller_before(previous) - (previous + 1)
    return distances[previous >= 0]


def _num_smaller_before(values: _Array) -> _Array:
    """[n]: how many earlier values are not greater. Values are under n."""
    n = len(values)
    size = 1 << max(0, n - 1).bit_length()
    padded = np.full(size, n, np.int64)
    padded[:n] = values
    counts = np.zeros(size, np.int64)
    width = 1
    while width < size:
        pairs = padded.reshape(-1, 2, width)
        # Rows are kept apart by an offset, so that one search serves them all.
        rows = np.arange(len(pairs))[:, None]
        left = np.sort(pairs[:, 0], axis=1) + rows * (n + 2)
        right = pairs[:, 1] + rows * (n + 2)
        found = np.searchsorted(left.ravel(), right.ravel(), side="right").reshape(right.shape)
        counts.reshape(-1, 2, width)[:, 1] += found - rows * width
        width *= 2
    return counts[:n]
