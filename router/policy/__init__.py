"""Routing policies: pure functions from a request and a snapshot of the cluster to a plan. One line each below."""

from __future__ import annotations

from importlib import import_module

from headrace.errors import InvalidRequest
from router.policy.views import Policy

POLICIES = {
    "prefix_load": "router.policy.prefix_load",
    "round_robin": "router.policy.round_robin",
}


def load_policy(name: str) -> Policy:
    """The `choose` function of the named policy. Raises InvalidRequest for an unknown name."""
    if name not in POLICIES:
        raise InvalidRequest("router.policy", name, f"known policies: {', '.join(sorted(POLICIES))}")
    return import_module(POLICIES[name]).choose
