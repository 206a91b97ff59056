"""Baseline: spread evenly by the request's seed, blind to caches and load. The seed counts up, request by request."""

from __future__ import annotations

from router.policy.views import MAX_ALTERNATES, ClusterView, Plan, RequestView


def choose(request: RequestView, cluster: ClusterView) -> Plan:
    decode = cluster.decode[request.seed % len(cluster.decode)]
    first = request.seed % len(cluster.prefill) if cluster.prefill else 0
    prefill = (cluster.prefill[first:] + cluster.prefill[:first])[: 1 + MAX_ALTERNATES]
    return Plan(decode, prefill, (f"request number {request.seed}",))
