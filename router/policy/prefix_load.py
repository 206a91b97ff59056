"""Least predicted work, cached prefix counted: for prefill, tokens before the first token; for decode, tokens held.

    prefill cost(P) = pending prefill tokens on P + prompt tokens that P does not have
    decode cost(D)  = (active tokens on D + prompt tokens that D lacks) / capacity of D

Only differences between workers count, so a prefix that all of them share attracts nobody. Ties fall at random.
"""

from __future__ import annotations

from random import Random

from router.policy.views import MAX_ALTERNATES, ClusterView, Plan, RequestView, WorkerView


def choose(request: RequestView, cluster: ClusterView) -> Plan:
    random = Random(request.seed)

    def prefill_cost(worker: WorkerView) -> float:
        return worker.pending_prefill_tokens + request.num_prompt_tokens - worker.cached_tokens

    def decode_cost(worker: WorkerView) -> float:
        missing = request.num_prompt_tokens - worker.cached_tokens
        return (worker.active_tokens + missing) / worker.capacity_tokens

    prefill = sorted(cluster.prefill, key=lambda worker: (prefill_cost(worker), random.random()))
    decode = min(cluster.decode, key=lambda worker: (decode_cost(worker), random.random()))
    explanation = [
        f"prefill {worker.worker_id}: {worker.pending_prefill_tokens} pending + {request.num_prompt_tokens} prompt"
        f" - {worker.cached_tokens} cached = {prefill_cost(worker):.0f} tokens"
        for worker in prefill
    ] + [
        f"decode {worker.worker_id}: ({worker.active_tokens} active + {request.num_prompt_tokens} prompt"
        f" - {worker.cached_tokens} cached) / {worker.capacity_tokens} = {decode_cost(worker):.4f} of its pool"
        for worker in cluster.decode
    ]
    return Plan(decode, tuple(prefill[: 1 + MAX_ALTERNATES]), tuple(explanation))
