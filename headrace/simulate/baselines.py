"""More of what others do, behind the router's policy interface; see `router.policy.baselines` for symbols and the rest.

They do not run in a router: they are here to be compared with.
"""

from __future__ import annotations

import math
from random import Random

from router.policy.baselines import least, ranked_plan, ring_order
from router.policy.views import ClusterView, Plan, Policy, RequestView, WorkerView

_GAIN_TOKENS = 1_024
_MAX_QUEUE_S = 1.0
# llm-d-inference-scheduler, filter `prefixcacheaffinity`
_AFFINITY, _SKIP, _PENALTY_S = 0.8, 0.01, 5.0
# smg `policies/least_load.rs`
_BARRIER_S = 0.15


def fewest_requests(request: RequestView, cluster: ClusterView) -> Plan:
    """argmin q_w (splitwise-sim `jsq`)."""
    return least(request, cluster, lambda worker: worker.num_requests, "fewest requests")


def fewest_tokens(request: RequestView, cluster: ClusterView) -> Plan:
    """argmin of pending uncached prompt tokens (splitwise-sim `token_jsq`)."""
    return least(request, cluster, lambda worker: worker.pending_prefill_tokens, "fewest pending tokens")


def least_load(request: RequestView, cluster: ClusterView) -> Plan:
    """argmin of wait + 0.15 s · u / (1 - u), u the share of KV in use (smg `policies/least_load.rs`)."""

    def cost(worker: WorkerView) -> float:
        used = min(0.999, worker.active_tokens / max(1, worker.capacity_tokens))
        return worker.queue_s + _BARRIER_S * used / (1 - used)

    return least(request, cluster, cost, "the shortest wait with a barrier where KV is full")


def prefix_hash(request: RequestView, cluster: ClusterView) -> Plan:
    """The prompt's beginning on a ring of workers, whatever their load."""
    pool = cluster.prefill or cluster.decode
    order = ring_order(tuple(worker.worker_id for worker in pool), request.prefix_key)
    return ranked_plan(request, cluster, [pool[index] for index in order], "the next on the ring")


def longest_prefix(request: RequestView, cluster: ClusterView) -> Plan:
    """argmax m_w, ties by requests. Where all prompts begin alike, all go to one worker."""
    return least(
        request, cluster, lambda worker: (-worker.cached_tokens, worker.num_requests), "longest prefix"
    )


def longest_if_gain(request: RequestView, cluster: ClusterView) -> Plan:
    """argmax m_w where that is 1,024 tokens more than the worst has, else least work."""
    most, fewest = _extremes(cluster)
    if most - fewest < _GAIN_TOKENS:
        return least(request, cluster, lambda worker: worker.queue_s, "no prefix is worth it: least work")
    return least(request, cluster, lambda worker: (-worker.cached_tokens, worker.queue_s), "longest prefix")


def longest_if_idle(request: RequestView, cluster: ClusterView) -> Plan:
    """The same among those with less than a second of work, else least work."""
    pool = cluster.prefill or cluster.decode
    most, fewest = _extremes(cluster)
    holder = min(pool, key=lambda worker: (-worker.cached_tokens, worker.queue_s))
    if most - fewest < _GAIN_TOKENS or holder.queue_s >= _MAX_QUEUE_S:
        return least(request, cluster, lambda worker: worker.queue_s, "no idle holder: least work")
    return least(request, cluster, lambda worker: (-worker.cached_tokens, worker.queue_s), "longest prefix")


def affinity_filter(request: RequestView, cluster: ClusterView) -> Plan:
    """llm-d: of workers with m_w / L >= 0.8 the soonest, unless that is 5 s later than elsewhere; in 1 % any."""
    pool = cluster.prefill or cluster.decode
    holders = [worker for worker in pool if worker.cached_tokens >= _AFFINITY * request.num_prompt_tokens]

    def soonest_s(worker: WorkerView) -> float:
        missing = max(1, request.num_prompt_tokens - worker.cached_tokens)
        cached = request.num_prompt_tokens - missing
        return worker.queue_s + worker.costs.prefill.seconds(missing, cached)

    best_s = min(soonest_s(worker) for worker in pool)
    skips = Random(request.seed ^ 0x5EED).random() < _SKIP
    if skips or not holders or min(map(soonest_s, holders)) > best_s + _PENALTY_S:
        return least(request, cluster, soonest_s, "the soonest of all")
    kept = {id(worker) for worker in holders}
    return least(
        request, cluster, lambda w: soonest_s(w) if id(w) in kept else math.inf, "the soonest holder"
    )


def explore_exploit(request: RequestView, cluster: ClusterView) -> Plan:
    """Preble's E2 without its rebalancing: most cached and more than half of the prompt: the least loaded that has it;
    else argmin of work + prefill of what is missing. Its window of 3 min is the work that is not done yet here.
    """
    pool = cluster.prefill or cluster.decode
    most, _ = _extremes(cluster)
    if most > request.num_prompt_tokens - most:
        holders = {id(worker) for worker in pool if worker.cached_tokens == most}
        return least(
            request,
            cluster,
            lambda w: w.queue_s if id(w) in holders else math.inf,
            "exploit: least loaded holder",
        )

    def cost(worker: WorkerView) -> float:
        missing = max(1, request.num_prompt_tokens - worker.cached_tokens)
        return worker.queue_s + worker.costs.prefill.seconds(missing, request.num_prompt_tokens - missing)

    return least(request, cluster, cost, "explore: least work, this prompt's included")


def _extremes(cluster: ClusterView) -> tuple[float, float]:
    cached = (cluster.prefill or cluster.decode).columns.cached_tokens
    return float(cached.max()), float(cached.min())


MORE: dict[str, Policy] = {
    "fewest_requests": fewest_requests,
    "fewest_tokens": fewest_tokens,
    "least_load": least_load,
    "prefix_hash": prefix_hash,
    "longest_prefix": longest_prefix,
    "longest_if_gain": longest_if_gain,
    "longest_if_idle": longest_if_idle,
    "affinity_filter": affinity_filter,
    "explore_exploit": explore_exploit,
}
