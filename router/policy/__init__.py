"""Routing policies: pure functions from a request and a snapshot of the cluster to a plan. One line each below."""

from __future__ import annotations

from importlib import import_module

from headrace.errors import InvalidRequest
from router.policy.views import Policy

POLICIES = {
    "predicted_time": "router.policy.predicted_time:choose",
    "random": "router.policy.baselines:random",
    "round_robin": "router.policy.baselines:round_robin",
    "least_work": "router.policy.baselines:least_work",
    "power_of_two": "router.policy.baselines:power_of_two",
    "bounded_hash": "router.policy.baselines:bounded_hash",
    "cache_aware": "router.policy.baselines:cache_aware",
    "block_cost": "router.policy.baselines:block_cost",
    "weighted_scorers": "router.policy.baselines:weighted_scorers",
    "local_or_fetch": "router.policy.baselines:local_or_fetch",
}


def load_policy(name: str) -> Policy:
    """The named policy. Raises InvalidRequest for an unknown name."""
    if name not in POLICIES:
        raise InvalidRequest("router.policy", name, f"known policies: {', '.join(sorted(POLICIES))}")
    module, function = POLICIES[name].split(":")
    return getattr(import_module(module), function)
