"""What can be simulated: the router's policies, more of what others do, and bounds that no router can reach.

A scheme is a policy with what it takes to be what its source describes: whether prefill workers fetch blocks from
others for it, and whether it is told the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InvalidRequest
from headrace.simulate import baselines
from router.policy import POLICIES, load_policy
from router.policy.views import Policy


@dataclass(frozen=True, slots=True)
class Scheme:
    name: str
    policy: Policy
    fetches: bool = False  # prefill workers get blocks from others where the plan says so
    knows_all: bool = False  # true caches, queues and times at the moment of the decision
    one_cache: bool = False  # all workers share one without limit


_FETCHING = ("predicted_time", "local_or_fetch")


def _schemes() -> dict[str, Scheme]:
    routers = [Scheme(name, load_policy(name), fetches=name in _FETCHING) for name in POLICIES]
    local = [Scheme(f"{name}_local", load_policy(name)) for name in _FETCHING]
    others = [Scheme(name, policy) for name, policy in baselines.MORE.items()]
    bounds = [
        Scheme("oracle_fetch", load_policy("local_or_fetch"), fetches=True, knows_all=True),
        Scheme("oracle_one_cache", load_policy("least_work"), knows_all=True, one_cache=True),
    ]
    return {scheme.name: scheme for scheme in (*routers, *local, *others, *bounds)}


def chosen_schemes(text: str) -> Sequence[Scheme]:
    """Names with commas between them, or `all`. Raises InvalidRequest for an unknown one."""
    schemes = _schemes()
    if text.strip() == "all":
        return list(schemes.values())
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in schemes:
            raise InvalidRequest("policy", name, f"known ones: all, {', '.join(schemes)}")
    return [schemes[name] for name in names]
