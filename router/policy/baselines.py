"""What others do, behind the same interface, to compare with. Ties fall at random, by the request's seed.

They choose the worker that prefills. The decode worker is, but for `random` and `round_robin`, the one whose pool will
be the emptiest: least (active tokens + prompt) / capacity. Without prefill workers they choose the decode worker, which
prefills itself.

Symbols: w a worker, m_w its cached prompt tokens, L the prompt's tokens, B tokens per block, q_w requests there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random

from router.policy.prediction import best_holder, first_token, planned
from router.policy.views import ClusterView, Plan, RequestView, WorkerView

# SGLang, sgl-router `policies/cache_aware.rs`
_MATCH_THRESHOLD = 0.5
_BALANCE_ABSOLUTE = 32
_BALANCE_RELATIVE = 1.1
# Bounded-load consistent hashing (Mirrokni, Thorup, Zadimoghaddam 2018); smg `policies/prefix_hash.rs`
_LOAD_BOUND = 1.25
_RING_POINTS = 32  # per worker
Comparable = float | tuple[float, ...]
# llm-d-inference-scheduler, the precise prefix cache sample
_PREFIX_WEIGHT, _QUEUE_WEIGHT, _KV_WEIGHT = 2.0, 1.0, 1.0


def random(request: RequestView, cluster: ClusterView) -> Plan:
    """Any worker."""
    draw = Random(request.seed)
    prefill = draw.sample(cluster.prefill, len(cluster.prefill))
    return planned(request, cluster, draw.choice(cluster.decode), prefill, "drawn at random")


def round_robin(request: RequestView, cluster: ClusterView) -> Plan:
    """In turn, by the request's seed, which counts up."""
    decode = cluster.decode[request.seed % len(cluster.decode)]
    first = request.seed % len(cluster.prefill) if cluster.prefill else 0
    prefill = [*cluster.prefill[first:], *cluster.prefill[:first]]
    return planned(request, cluster, decode, prefill, f"request number {request.seed}")


def least_work(request: RequestView, cluster: ClusterView) -> Plan:
    """argmin of predicted seconds until w is idle, blind to caches (splitwise-sim `token_jsq`, in time)."""
    return least(request, cluster, lambda worker: worker.queue_s, "least predicted work")


def power_of_two(request: RequestView, cluster: ClusterView) -> Plan:
    """Of two drawn at random the one with the shorter predicted wait (Mitzenmacher 2001; smg `power_of_two.rs`)."""
    pool = cluster.prefill or cluster.decode
    pair = Random(request.seed).sample(pool, min(2, len(pool)))
    drawn = {id(worker) for worker in pair}
    return least(
        request,
        cluster,
        lambda worker: worker.queue_s if id(worker) in drawn else math.inf,
        f"the shorter queue of {' and '.join(worker.worker_id for worker in pair)}",
    )


def bounded_hash(request: RequestView, cluster: ClusterView) -> Plan:
    """The prompt's beginning on a ring of workers; on to the next while q_w + 1 > 1.25 · mean(q), this one in it."""
    pool = cluster.prefill or cluster.decode
    order = ring_order(tuple(worker.worker_id for worker in pool), request.prefix_key)
    bound = _LOAD_BOUND * (sum(worker.num_requests for worker in pool) + 1) / len(pool)
    ranks = {index: rank for rank, index in enumerate(order)}

    def cost(index: int) -> tuple[bool, int]:
        return pool[index].num_requests + 1 > max(1.0, bound), ranks[index]

    ranked = [pool[index] for index in sorted(order, key=cost)]
    return ranked_plan(
        request, cluster, ranked, "the next on the ring that is not loaded above 1.25 of the mean"
    )


def cache_aware(request: RequestView, cluster: ClusterView) -> Plan:
    """SGLang: argmin q if max q - min q > 32 and max q > 1.1 · min q; else max m_w if m_w / L > 0.5; else argmin q."""
    pool = cluster.prefill or cluster.decode
    loads = [worker.num_requests for worker in pool]
    unbalanced = max(loads) - min(loads) > _BALANCE_ABSOLUTE and max(loads) > _BALANCE_RELATIVE * min(loads)
    longest = max(worker.cached_tokens for worker in pool)
    if unbalanced or longest <= _MATCH_THRESHOLD * request.num_prompt_tokens:
        return least(request, cluster, lambda worker: worker.num_requests, "fewest requests")
    return least(request, cluster, lambda worker: -worker.cached_tokens, "the longest prefix")


def block_cost(request: RequestView, cluster: ClusterView) -> Plan:
    """Dynamo: argmin of (pending prefill tokens of w + L - m_w) / B + blocks in use by decodes of w."""

    def cost(worker: WorkerView) -> float:
        pending = worker.pending_prefill_tokens + request.num_prompt_tokens - worker.cached_tokens
        return (pending + worker.active_tokens) / worker.block_size_tokens

    return least(request, cluster, cost, "fewest blocks to compute and in use")


def weighted_scorers(request: RequestView, cluster: ClusterView) -> Plan:
    """llm-d: argmax 2 · m_w / L + (max q - q_w) / (max q - min q) + (1 - KV use of w)."""
    pool = cluster.prefill or cluster.decode
    most = max(worker.num_requests for worker in pool)
    spread = max(1, most - min(worker.num_requests for worker in pool))

    def cost(worker: WorkerView) -> float:
        prefix = worker.cached_tokens / request.num_prompt_tokens
        queue = (most - worker.num_requests) / spread
        free = 1 - worker.active_tokens / max(1, worker.capacity_tokens)
        return -(_PREFIX_WEIGHT * prefix + _QUEUE_WEIGHT * queue + _KV_WEIGHT * free)

    return least(request, cluster, cost, "the highest sum of scores for prefix, queue and free KV")


def local_or_fetch(request: RequestView, cluster: ClusterView) -> Plan:
    """Mooncake's conductor (FAST'25, algorithm 1): argmin of transfer + queue + prefill, where w fetches from the best
    holder if that beats computing (in place of the paper's hand-set threshold).
    """
    holder = best_holder(cluster)

    def cost(worker: WorkerView) -> float:
        prefill_s, fetch_s, _ = first_token(request, cluster, worker, holder)
        return worker.queue_s + prefill_s + fetch_s

    return least(request, cluster, cost, "the lowest queue + prefill + fetch")


def least(
    request: RequestView, cluster: ClusterView, cost: Callable[[WorkerView], Comparable], reason: str
) -> Plan:
    """argmin of a cost over the pool that prefills, ties at random."""
    draw = Random(request.seed)
    pool = cluster.prefill or cluster.decode
    return ranked_plan(
        request, cluster, sorted(pool, key=lambda worker: (cost(worker), draw.random())), reason
    )


def ranked_plan(
    request: RequestView, cluster: ClusterView, ranked: Sequence[WorkerView], reason: str
) -> Plan:
    """`ranked`: the pool that prefills, best first."""
    if not cluster.prefill:
        return planned(request, cluster, ranked[0], (), reason)
    draw = Random(~request.seed)

    def use(worker: WorkerView) -> tuple[float, float]:
        tokens = worker.active_tokens + request.num_prompt_tokens
        return tokens / max(1, worker.capacity_tokens), draw.random()

    return planned(request, cluster, min(cluster.decode, key=use), ranked, reason)


def ring_order(worker_ids: tuple[str, ...], key: int) -> list[int]:
    """Indices of the workers in the order in which the ring meets them from the key on."""
    points, owners = _ring(worker_ids)
    start = bisect_right(points, _point(str(key)))
    return list(dict.fromkeys(owners[start:] + owners[:start]))


@lru_cache(maxsize=8)
def _ring(worker_ids: tuple[str, ...]) -> tuple[list[int], list[int]]:
    entries = sorted(
        (_point(f"{worker_id}/{number}"), index)
        for index, worker_id in enumerate(worker_ids)
        for number in range(_RING_POINTS)
    )
    return [point for point, _ in entries], [owner for _, owner in entries]


def _point(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
