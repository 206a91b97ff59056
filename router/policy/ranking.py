"""The terms of `prediction.py` for all workers of a pool at once, by column: to find the few worth a closer look.

Where `prediction.py` takes the link between two workers, an average one stands in here.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from random import Random

import numpy as np

from router.policy.views import ClusterView, Columns, Floats, Pool, RequestView, WorkerView

_SEEN_S = 1e-2  # less than that makes no difference


def with_unseen(cluster: ClusterView, seed: int) -> ClusterView:
    """With a guess, worker by worker, of what other routers sent meanwhile. Each guesses in its own way, so that they
    do not all choose the worker that looks idle: the later the news, the more workers are as good as that one.
    """
    if cluster.unseen_s < _SEEN_S:
        return cluster
    generator = np.random.default_rng(seed)
    prefill, decode = (
        _busier(pool, generator.uniform(0, 2 * cluster.unseen_s, len(pool)))
        for pool in (cluster.prefill, cluster.decode)
    )
    return replace(cluster, prefill=prefill, decode=decode)


def _busier(pool: Pool, more_s: Floats) -> Pool:
    columns = copy(pool.columns)
    columns.queue_s = columns.queue_s + more_s

    def make(number: int) -> WorkerView:
        view = pool[number]
        return replace(view, queue_s=view.queue_s + float(more_s[number]))

    return Pool(columns, make)


def alone_s(request: RequestView, columns: Columns) -> Floats:
    """Prefill of what the worker lacks, nothing fetched."""
    cached = _usable(request, columns)
    return columns.prefill_s(request.num_prompt_tokens - cached, cached)


def first_token(
    request: RequestView, cluster: ClusterView, columns: Columns, holder: WorkerView | None
) -> tuple[Floats, Floats | float]:
    """Seconds of prefill and of fetch."""
    without_s = alone_s(request, columns)
    if holder is None or not cluster.token_bytes:
        return without_s, 0.0
    reach = min(holder.cached_tokens, request.num_prompt_tokens - 1)
    missing = reach - _usable(request, columns)
    link = cluster.transfer(holder.worker_id, "")
    fetch_s = link.latency_s + link.byte_s * cluster.token_bytes * missing
    rest_s = columns.prefill_s(request.num_prompt_tokens - reach, reach)
    fetches = (missing > 0) & (fetch_s + rest_s < without_s)
    return np.where(fetches, rest_s, without_s), np.where(fetches, fetch_s, 0.0)


def step_s(request: RequestView, columns: Columns) -> Floats:
    context = columns.active_tokens + request.num_prompt_tokens
    crowding = np.maximum(1.0, context / np.maximum(1.0, columns.capacity_tokens))
    return crowding * columns.decode_s(columns.active_sequences + 1, context)


def lowest(pool: Pool, scores: Floats, count: int, random: Random) -> list[WorkerView]:
    """The `count` workers with the lowest scores, the lowest first; equal ones in random order."""
    numbers = list(range(len(scores)))
    if len(scores) > count:
        limit = np.partition(scores, count - 1)[count - 1]
        (below,) = (scores < limit).nonzero()
        (equal,) = (scores == limit).nonzero()
        numbers = [*below.tolist(), *random.sample(equal.tolist(), count - len(below))]
    random.shuffle(numbers)
    return [pool[number] for number in sorted(numbers, key=scores.__getitem__)]


def _usable(request: RequestView, columns: Columns) -> Floats:
    """The last token is always computed."""
    return np.minimum(columns.cached_tokens, request.num_prompt_tokens - 1)
