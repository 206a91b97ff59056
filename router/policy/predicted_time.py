"""The default: the plan whose first token is predicted to come first, among those that keep the ITL target.

    cost(P, D) = TTFT(P) + exposed transfer(P, D) + ITL_TOKENS · ITL(D) + REUSE · prefill(P)
    cost(D)    = TTFT(D) + ITL_TOKENS · ITL(D) + REUSE · prefill(D)           D prefills itself

Where there are prefill workers, a decode worker prefills itself only if that saves a quarter of the cost, and 10 ms.
Among plans within 3 % of the best one: the one that computes least anew (so that caches stay different from one
another), then the one that fetches least, then the one with the lighter workers, then any. If no plan keeps the ITL
target, the one that misses the targets by the smallest factor. A prefix which every worker has makes no difference,
and so attracts nobody.

Prefill and decode workers are scored apart, all of them at once by column (`ranking.py`), and only the best few of each
are looked at one by one and combined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from router.policy import ranking
from router.policy.prediction import best_holder, first_token, of_local, of_pair
from router.policy.views import (
    MAX_ALTERNATES,
    ClusterView,
    Floats,
    Plan,
    Pool,
    Prediction,
    RequestView,
    WorkerView,
)

# A slow decode worker costs more than the first gap: it is felt in as many gaps as this.
ITL_TOKENS = 8
# What this prompt computes, those behind it wait for: it counts this much beside its own time.
REUSE = 1.0
_NEAR = 0.03
_LOCAL_GAIN = 0.25
_LOCAL_GAIN_S = 0.01
_SHORT_LIST = 1 + MAX_ALTERNATES


@dataclass(frozen=True, slots=True)
class _Option:
    prefill: WorkerView | None
    decode: WorkerView
    prediction: Prediction

    @property
    def cost_s(self) -> float:
        """What is minimised."""
        parts = self.prediction
        work_s = parts.ttft_s + parts.exposed_s + REUSE * parts.prefill_s
        return work_s + ITL_TOKENS * parts.itl_s


def choose(request: RequestView, cluster: ClusterView) -> Plan:
    random = Random(request.seed)
    holder = best_holder(cluster)
    prefill = _best_prefill(request, cluster, holder, random)
    steps_s = ranking.step_s(request, cluster.decode.columns)
    options = [
        _Option(worker, decode, of_pair(request, cluster, worker, decode, first))
        for decode in _best_decode(cluster.decode, steps_s, random)
        for worker, first in prefill
    ] + [
        _Option(None, decode, of_local(request, decode, first_token(request, cluster, decode, holder)))
        for decode in _best_local(request, cluster.decode, steps_s, random)
    ]
    kept = [option for option in options if option.prediction.itl_s <= request.targets.itl_s]
    best, reason = _cheapest(request, _worthwhile(kept or _closest(request, options)), random)
    if not kept:
        reason = f"no plan keeps the ITL target; of those that miss the targets least, {reason}"
    return Plan(best.decode, _with_alternates(best, prefill), best.prediction, reason)


def _worthwhile(options: list[_Option]) -> list[_Option]:
    """Without local prefills that gain too little over a hand-off to hold up those who come to decode there."""
    remote_s = min((option.cost_s for option in options if option.prefill), default=math.inf)
    limit_s = min(remote_s * (1 - _LOCAL_GAIN), remote_s - _LOCAL_GAIN_S)
    return [option for option in options if option.prefill or option.cost_s <= limit_s]


def _cheapest(request: RequestView, options: list[_Option], random: Random) -> tuple[_Option, str]:
    lowest = min(option.cost_s for option in options)
    near = [option for option in options if option.cost_s <= lowest * (1 + _NEAR)]
    if len(near) == 1:
        return near[0], f"its predicted cost of {lowest:.4f} s is the lowest of {len(options)} plans"

    def preference(option: _Option) -> tuple[float, float, float, float]:
        prediction = option.prediction
        new_tokens = request.num_prompt_tokens - prediction.cached_tokens - prediction.fetched_tokens
        return new_tokens, prediction.fetched_tokens, prediction.queue_s + prediction.itl_s, random.random()

    reason = (
        f"{len(near)} of {len(options)} plans are within {_NEAR:.0%} of the lowest predicted cost, {lowest:.4f} s:"
        " this one computes least anew, then fetches least, then has the lighter workers"
    )
    return min(near, key=preference), reason


def _closest(request: RequestView, options: list[_Option]) -> list[_Option]:
    """Those that miss the targets least, or nearly so."""
    excess = [_excess(request, option.prediction) for option in options]
    limit = min(excess) * (1 + _NEAR)
    return [option for option, missed in zip(options, excess, strict=True) if missed <= limit]


def _excess(request: RequestView, prediction: Prediction) -> float:
    return max(prediction.itl_s / request.targets.itl_s, prediction.ttft_s / request.targets.ttft_s)


def _best_prefill(
    request: RequestView, cluster: ClusterView, holder: WorkerView | None, random: Random
) -> list[tuple[WorkerView, tuple[float, float, int]]]:
    """The candidates with their `first_token`, best first. Links are looked at for these only."""
    prefill_s, fetch_s = ranking.first_token(request, cluster, cluster.prefill.columns, holder)
    scores = cluster.prefill.columns.queue_s + (1 + REUSE) * prefill_s + fetch_s
    best = [
        (worker, first_token(request, cluster, worker, holder))
        for worker in ranking.lowest(cluster.prefill, scores, _SHORT_LIST, random)
    ]
    return sorted(best, key=lambda entry: entry[0].queue_s + (1 + REUSE) * entry[1][0] + entry[1][1])


def _best_decode(pool: Pool, steps_s: Floats, random: Random) -> list[WorkerView]:
    """Those with the shortest steps, and the one that has most of the prompt: its transfer is the shortest."""
    best = ranking.lowest(pool, steps_s, _SHORT_LIST, random)
    cached = pool.columns.cached_tokens
    most = cached.max()
    if not most:
        return best
    holder = pool[random.choice((cached == most).nonzero()[0].tolist())]
    return best if holder in best else [*best, holder]


def _best_local(request: RequestView, pool: Pool, steps_s: Floats, random: Random) -> list[WorkerView]:
    """Those that would compute the prompt the soonest."""
    scores = pool.columns.queue_s + ranking.alone_s(request, pool.columns) + steps_s
    return ranking.lowest(pool, scores, _SHORT_LIST, random)


def _with_alternates(
    best: _Option, prefill: list[tuple[WorkerView, tuple[float, float, int]]]
) -> tuple[WorkerView, ...]:
    if best.prefill is None:
        return ()
    others = [worker for worker, _ in prefill if worker is not best.prefill]
    return (best.prefill, *others[:MAX_ALTERNATES])
