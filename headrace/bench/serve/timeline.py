"""How a run went from second to second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.serve.records import RequestRecord

_MAX_WINDOWS = 300


def timeline(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Windows of `dt_s`, at most 300. Rates a second; `in_flight` at the end of each, from due to over."""
    if not records:
        return {"dt_s": 1.0, "in_flight": [], "due_per_s": [], "tokens_per_s": [], "saturated": False}
    end_s = max(record.end_s for record in records)
    dt_s = max(0.1, end_s / _MAX_WINDOWS)
    edges = np.arange(0.0, end_s + dt_s, dt_s)
    due = np.array([record.scheduled_s for record in records])
    over = np.array([record.end_s for record in records])
    tokens = np.concatenate([_token_times(record) for record in records])
    in_flight = np.searchsorted(np.sort(due), edges[1:], "right") - np.searchsorted(
        np.sort(over), edges[1:], "right"
    )
    return {
        "dt_s": dt_s,
        "in_flight": in_flight.tolist(),
        "due_per_s": (np.histogram(due, edges)[0] / dt_s).tolist(),
        "tokens_per_s": (np.histogram(tokens, edges)[0] / dt_s).tolist(),
        "saturated": _is_saturated(due, over),
    }


def _is_saturated(due: npt.NDArray[np.float64], over: npt.NDArray[np.float64]) -> bool:
    """Whether the number in flight grew all the while requests came: its values then depend on the run's length only.

    Grows: in the last third of the arrivals it is on average more than double that of the first third, and 3 more.
    """
    thirds = np.linspace(due.min(), due.max(), 301)
    in_flight = np.searchsorted(np.sort(due), thirds, "right") - np.searchsorted(
        np.sort(over), thirds, "right"
    )
    first, last = in_flight[:100].mean(), in_flight[-100:].mean()
    middle = in_flight[100:-100].mean()
    return bool(last > 2 * first and last > first + 3 and first < middle < last)


def _token_times(record: RequestRecord) -> npt.NDArray[np.float64]:
    if record.first_token_s is None:
        return np.empty(0)
    return record.first_token_s + np.concatenate([[0.0], np.cumsum(record.itls_ms) / 1000])
