"""Policies are pure functions: snapshot in, plan out."""

from dataclasses import replace

import pytest

from headrace.errors import InvalidRequest
from router.policy import POLICIES, load_policy
from router.policy.views import (
    MAX_ALTERNATES,
    MAX_SOURCES,
    ClusterView,
    RequestView,
    WorkerView,
    sources,
)


def worker(name: str, **changes) -> WorkerView:
    base = WorkerView(
        worker_id=name,
        incarnation=f"{name}.1",
        address=f"{name}:1",
        cached_tokens=0,
        pending_prefill_tokens=0,
        active_tokens=0,
        capacity_tokens=1000,
        block_size_tokens=16,
    )
    return replace(base, **changes)


def cluster(prefill=(), decode=None) -> ClusterView:
    return ClusterView(tuple(prefill), tuple(decode or [worker("d0")]))


def test_the_longest_cached_prefix_wins_among_idle_workers():
    view = cluster([worker("p0"), worker("p1", cached_tokens=64), worker("p2", cached_tokens=32)])
    plan = load_policy("prefix_load")(RequestView(100, seed=1), view)
    assert [w.worker_id for w in plan.prefill] == ["p1", "p2", "p0"]
    assert plan.predicted_cached_tokens == 64


def test_a_queue_outweighs_a_cached_prefix():
    view = cluster([worker("p0", cached_tokens=64, pending_prefill_tokens=500), worker("p1")])
    assert load_policy("prefix_load")(RequestView(100, seed=1), view).prefill[0].worker_id == "p1"


def test_a_prefix_that_all_share_attracts_nobody():
    view = cluster([worker(f"p{i}", cached_tokens=64) for i in range(4)])
    chosen = {
        load_policy("prefix_load")(RequestView(100, seed), view).prefill[0].worker_id for seed in range(64)
    }
    assert chosen == {"p0", "p1", "p2", "p3"}


def test_decode_goes_to_the_emptiest_pool():
    view = cluster(
        decode=[worker("d0", active_tokens=300), worker("d1", active_tokens=400, capacity_tokens=4000)]
    )
    assert load_policy("prefix_load")(RequestView(10, seed=1), view).decode.worker_id == "d1"


def test_every_candidate_is_explained():
    view = cluster([worker("p0"), worker("p1")], [worker("d0"), worker("d1")])
    lines = load_policy("prefix_load")(RequestView(100, seed=1), view).explanation
    assert [line.split(":")[0] for line in sorted(lines)] == [
        "decode d0",
        "decode d1",
        "prefill p0",
        "prefill p1",
    ]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_are_pure_and_keep_to_the_candidates(name):
    policy = load_policy(name)
    view = cluster([worker(f"p{i}") for i in range(5)], [worker("d0"), worker("d1")])
    for seed in range(20):
        plan = policy(RequestView(100, seed), view)
        assert plan == policy(RequestView(100, seed), view)
        assert plan.decode in view.decode
        assert set(plan.prefill) <= set(view.prefill)
        assert len(plan.prefill) == len(set(plan.prefill)) == 1 + MAX_ALTERNATES


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_prefill_workers_the_decode_worker_prefills(name):
    plan = load_policy(name)(RequestView(100, seed=3), cluster())
    assert plan.prefill == ()
    assert plan.decode.worker_id == "d0"


def test_round_robin_takes_turns():
    view = cluster([worker("p0"), worker("p1")], [worker("d0"), worker("d1")])
    plans = [load_policy("round_robin")(RequestView(100, seed), view) for seed in range(4)]
    assert [plan.decode.worker_id for plan in plans] == ["d0", "d1", "d0", "d1"]
    assert [plan.prefill[0].worker_id for plan in plans] == ["p0", "p1", "p0", "p1"]


def test_an_unknown_policy_is_named_with_the_known_ones():
    with pytest.raises(InvalidRequest, match=r"router\.policy.*'fastest'.*prefix_load, round_robin"):
        load_policy("fastest")


def test_sources_hold_more_than_the_worker_that_prefills():
    holders = [worker("a", cached_tokens=64), worker("p0", cached_tokens=32), worker("b", cached_tokens=16)]
    more = [worker(f"m{number}", cached_tokens=80 + number) for number in range(3)]
    view = ClusterView((holders[1],), (worker("d0"),), tuple(holders + more))
    plan = load_policy("prefix_load")(RequestView(100, seed=1), view)
    assert [w.worker_id for w in sources(plan, view)] == ["m2", "m1"][:MAX_SOURCES]
    assert not sources(plan, replace(view, holders=tuple(holders[1:])))
