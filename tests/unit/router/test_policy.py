"""Policies are pure functions: snapshot in, plan out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from router.costs import DecodeCost, PrefillCost, TransferCost, WorkerCosts
from router.policy import POLICIES, load_policy
from router.policy.views import (
    MAX_ALTERNATES,
    MAX_SOURCES,
    ClusterView,
    Pool,
    RequestView,
    Targets,
    WorkerView,
    sources,
)

# 1 ms per token, a step of 10 ms and 1 ms per sequence
COSTS = WorkerCosts(PrefillCost(0.0, 1e-3, 0.0), DecodeCost(10e-3, 1e-3, 0.0))


def worker(name: str, **changes) -> WorkerView:
    base = WorkerView(
        worker_id=name,
        incarnation=f"{name}.1",
        address=f"{name}:1",
        cached_tokens=0,
        block_size_tokens=16,
        capacity_tokens=100_000,
        costs=COSTS,
    )
    return replace(base, **changes)


def workers(prefix: str, count: int, **changes) -> list[WorkerView]:
    return [worker(f"{prefix}{number}", **changes) for number in range(count)]


def cluster(prefill=(), decode=None, **changes) -> ClusterView:
    prefill, decode = tuple(prefill), tuple(decode or [worker("d0")])
    holders = tuple(w for w in (*prefill, *decode) if w.cached_tokens)
    return ClusterView(Pool.of(prefill), Pool.of(decode), **{"holders": holders, **changes})


def chosen(name, view, num_tokens=100, seeds=range(40), **request):
    """Ids of the workers that prefill, over many seeds."""
    plans = [load_policy(name)(RequestView(num_tokens, seed, **request), view) for seed in seeds]
    return {(plan.prefill[0] if plan.prefill else plan.decode).worker_id for plan in plans}


# --- what holds for every policy -------------------------------------------------------------------------------------

LOADED = st.builds(
    dict,
    cached_tokens=st.integers(0, 20).map(lambda blocks: 16 * blocks),
    queue_s=st.floats(0, 5),
    pending_prefill_tokens=st.integers(0, 5000),
    num_requests=st.integers(0, 200),
    active_sequences=st.integers(0, 100),
    active_tokens=st.integers(0, 200_000),
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    prefill=st.lists(LOADED, max_size=8),
    decode=st.lists(LOADED, min_size=1, max_size=8),
    num_tokens=st.integers(1, 400),
    seed=st.integers(0, 1 << 40),
)
def test_policies_are_pure_and_keep_to_the_candidates(name, prefill, decode, num_tokens, seed):
    view = cluster(
        [worker(f"p{number}", **load) for number, load in enumerate(prefill)],
        [worker(f"d{number}", **load) for number, load in enumerate(decode)],
        token_bytes=1000.0,
    )
    request = RequestView(num_tokens, seed, prefix_key=seed % 7, targets=Targets(1.0, 0.05))
    plan = load_policy(name)(request, view)
    assert plan == load_policy(name)(request, view)
    assert plan.decode in view.decode
    assert set(plan.prefill) <= set(view.prefill)
    assert len(plan.prefill) == len(set(plan.prefill))
    assert len(plan.prefill) in (0, min(len(view.prefill), 1 + MAX_ALTERNATES))
    assert plan.reason
    assert plan.prediction.ttft_s >= plan.prediction.queue_s >= 0
    assert plan.prediction.itl_s > 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_prefill_workers_the_decode_worker_prefills(name):
    plan = load_policy(name)(RequestView(100, seed=3), cluster())
    assert plan.prefill == ()
    assert plan.decode.worker_id == "d0"
    assert plan.prediction.prefill_s == pytest.approx(0.1)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"bounded_hash"}))
def test_equal_workers_share_the_requests(name):
    view = cluster(workers("p", 4, cached_tokens=64), workers("d", 4))
    assert chosen(name, view, seeds=range(100)) == {"p0", "p1", "p2", "p3"}
    plans = [load_policy(name)(RequestView(100, seed), view) for seed in range(100)]
    assert {plan.decode.worker_id for plan in plans} == {"d0", "d1", "d2", "d3"}


def test_an_unknown_policy_is_named_with_the_known_ones():
    with pytest.raises(
        InvalidRequest, match=r"router\.policy.*'fastest'.*predicted_time, random, round_robin"
    ):
        load_policy("fastest")


def test_sources_hold_more_than_the_worker_that_prefills():
    holders = [worker("a", cached_tokens=64), worker("p0", cached_tokens=32), worker("b", cached_tokens=16)]
    more = [worker(f"m{number}", cached_tokens=80 + number) for number in range(3)]
    view = ClusterView(Pool.of([holders[1]]), Pool.of([worker("d0")]), tuple(holders + more))
    plan = load_policy("least_work")(RequestView(100, seed=1), view)
    assert [w.worker_id for w in sources(plan, view)] == ["m2", "m1"][:MAX_SOURCES]
    assert not sources(plan, replace(view, holders=tuple(holders[1:])))


# --- predicted_time --------------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_wins_among_idle_workers():
    view = cluster([worker("p0"), worker("p1", cached_tokens=64), worker("p2", cached_tokens=32)])
    plan = load_policy("predicted_time")(RequestView(100, seed=1), view)
    assert [w.worker_id for w in plan.prefill] == ["p1", "p2", "p0"]
    assert plan.predicted_cached_tokens == 64
    assert plan.prediction.ttft_s == pytest.approx(0.036)


def test_a_queue_outweighs_a_cached_prefix():
    view = cluster([worker("p0", cached_tokens=64, queue_s=0.5), worker("p1")])
    assert chosen("predicted_time", view) == {"p1"}


def test_among_near_equals_the_cache_decides_then_the_load():
    almost = [worker("p0"), worker("p1", queue_s=0.0972, cached_tokens=64), worker("p2", queue_s=0.0005)]
    assert chosen("predicted_time", cluster(almost, holders=())) == {"p1"}
    assert chosen("predicted_time", cluster([almost[0], almost[2]])) == {"p0"}


def test_what_others_may_have_sent_spreads_the_choice_as_far_as_it_goes():
    """One is idle, two have 0.1 s of work, one has 5 s."""
    pool = [worker("p0"), *(worker(f"p{n}", queue_s=0.1) for n in (1, 2)), worker("p3", queue_s=5.0)]
    busy = [worker("d0", queue_s=50.0)]
    assert chosen("predicted_time", cluster(pool, busy)) == {"p0"}
    assert chosen("predicted_time", cluster(pool, busy, unseen_s=0.005)) == {"p0"}, "as good as nothing"
    assert chosen("predicted_time", cluster(pool, busy, unseen_s=0.5)) == {"p0", "p1", "p2"}


def test_a_prefix_that_saves_more_than_others_can_have_sent_still_decides():
    for cached, expected in ((2_000, {"p0"}), (64, {"p0", "p1"})):
        pool = [worker("p0", cached_tokens=cached), worker("p1")]
        view = cluster(pool, [worker("d0", queue_s=50.0)], unseen_s=0.4, holders=())
        assert chosen("predicted_time", view, num_tokens=2_100) == expected


def test_the_guess_repeats_with_the_seed():
    view = cluster(workers("p", 8), [worker("d0", queue_s=50.0)], unseen_s=1.0)
    first, second = ([*chosen("predicted_time", view, seeds=[seed])] for seed in (3, 3))
    assert first == second
    assert len(chosen("predicted_time", view)) > 4


def test_the_itl_target_rules_a_decode_worker_out():
    busy = worker("d0", cached_tokens=96, active_sequences=60)  # steps of 71 ms
    view = cluster(workers("p", 2), [busy, worker("d1", active_sequences=35)], token_bytes=1e5)
    plans = [
        load_policy("predicted_time")(RequestView(100, seed, targets=Targets(1, 0.05)), view)
        for seed in range(10)
    ]
    assert {plan.decode.worker_id for plan in plans} == {"d1"}


def test_when_no_plan_keeps_the_targets_the_smallest_miss_is_taken():
    view = cluster(workers("p", 1), [worker("d0", active_sequences=90), worker("d1", active_sequences=60)])
    plan = load_policy("predicted_time")(RequestView(100, 1, targets=Targets(1, 0.05)), view)
    assert plan.decode.worker_id == "d1"
    assert "target" in plan.reason


def test_a_decode_worker_that_holds_the_prompt_prefills_what_is_left_itself():
    view = cluster(workers("p", 2), [worker("d0"), worker("d1", cached_tokens=960)], holders=())
    plan = load_policy("predicted_time")(RequestView(1000, 1), view)
    assert (plan.decode.worker_id, plan.prefill) == ("d1", ())


def test_a_long_prompt_is_not_prefilled_among_sequences_that_would_wait_for_it():
    decode = worker("d0", active_sequences=5, cached_tokens=160)
    view = cluster([worker("p0")], [decode], holders=())
    plan = load_policy("predicted_time")(RequestView(1000, 1, targets=Targets(10, 0.1)), view)
    assert plan.prefill[0].worker_id == "p0"


def test_a_prefix_is_fetched_where_that_beats_computing_it():
    holder = worker("p0", cached_tokens=960, queue_s=2.0)
    fast = cluster([holder, worker("p1")], token_bytes=1e5, transfer=lambda *_: TransferCost(1e-3, 1e-9))
    plan = load_policy("predicted_time")(RequestView(1000, 1), fast)
    assert plan.prefill[0].worker_id == "p1"
    assert plan.prediction.fetched_tokens == 960
    assert plan.prediction.fetch_s == pytest.approx(0.097)
    slow = replace(fast, transfer=lambda *_: TransferCost(1e-3, 1e-7))
    plan = load_policy("predicted_time")(RequestView(1000, 1), slow)
    assert plan.prediction.fetched_tokens == 0
    assert plan.prediction.prefill_s == pytest.approx(1.0)


def test_a_pair_with_a_fast_link_is_preferred():
    view = cluster(
        workers("p", 2),
        token_bytes=1e6,
        transfer=lambda owner, _: TransferCost(1e-3, 1e-10 if owner == "p1" else 1e-9),
    )
    assert chosen("predicted_time", view) == {"p1"}


@pytest.mark.parametrize("count", [65, 1024])
def test_of_a_large_fleet_the_holder_is_still_found(count):
    fleet = workers("p", count)
    fleet[17] = worker("p17", cached_tokens=64)
    assert chosen("predicted_time", cluster(fleet, workers("d", count)), seeds=range(5)) == {"p17"}


# --- baselines -------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns():
    view = cluster(workers("p", 2), workers("d", 2))
    plans = [load_policy("round_robin")(RequestView(100, seed), view) for seed in range(4)]
    assert [plan.decode.worker_id for plan in plans] == ["d0", "d1", "d0", "d1"]
    assert [plan.prefill[0].worker_id for plan in plans] == ["p0", "p1", "p0", "p1"]


FEW = {"num_requests": 3}
HOT = {"cached_tokens": 64}

TABLE = [
    ("least_work", [{"queue_s": 1.0, **HOT}, {"queue_s": 0.5}, {"queue_s": 0.6}], {"p1"}),
    ("power_of_two", [{"queue_s": 9.0}, {"queue_s": 1.0}, {"queue_s": 2.0}], {"p1", "p2"}),  # never the worst
    ("cache_aware", [{**HOT, "num_requests": 30}, {}], {"p0"}),  # within the balance
    ("cache_aware", [{**HOT, "num_requests": 33}, {}], {"p1"}),  # above it
    ("cache_aware", [{"cached_tokens": 48, **FEW}, {}], {"p1"}),  # less than half
    ("block_cost", [{"pending_prefill_tokens": 60, **HOT}, {}], {"p0"}),
    ("block_cost", [{"pending_prefill_tokens": 80, **HOT}, {}], {"p1"}),
    ("block_cost", [{"active_tokens": 80, **HOT}, {}], {"p1"}),
    ("weighted_scorers", [{**HOT, "num_requests": 4}, {}], {"p0"}),  # 2 · .64 against 1
    ("weighted_scorers", [{"cached_tokens": 48, "num_requests": 4}, {}], {"p1"}),  # 2 · .48 against 1
    ("weighted_scorers", [{"active_tokens": 50_000}, {}], {"p1"}),
    ("local_or_fetch", [{"queue_s": 0.06, **HOT}, {}], {"p0"}),
    ("local_or_fetch", [{"queue_s": 0.07, **HOT}, {}], {"p1"}),
]


@pytest.mark.parametrize(("name", "loads", "expected"), TABLE)
def test_baselines_choose_by_their_formulas(name, loads, expected):
    view = cluster([worker(f"p{number}", **load) for number, load in enumerate(loads)])
    assert chosen(name, replace(view, holders=()) if name == "local_or_fetch" else view) == expected


def test_local_or_fetch_takes_a_copy_in_place_of_a_queue():
    view = cluster(
        [worker("p0", cached_tokens=64, queue_s=0.05), worker("p1")],
        token_bytes=1e5,
        transfer=lambda *_: TransferCost(1e-3, 1e-9),
    )
    assert chosen("local_or_fetch", view) == {"p1"}


def test_bounded_hash_stays_with_the_prefix_until_the_load_is_above_the_bound():
    view = cluster(workers("p", 4, num_requests=10))
    owners = {key: chosen("bounded_hash", view, prefix_key=key) for key in range(64)}
    assert all(len(owner) == 1 for owner in owners.values())
    assert set().union(*owners.values()) == {"p0", "p1", "p2", "p3"}
    [owner] = owners[0]
    loaded = [replace(w, num_requests=14 if w.worker_id == owner else 10) for w in view.prefill]
    assert chosen("bounded_hash", cluster(loaded), prefix_key=0) != {owner}
    # Who leaves takes only its own share along.
    fewer = cluster([w for w in view.prefill if w.worker_id != owner])
    kept = {key: ids for key, ids in owners.items() if ids != {owner}}
    assert {key: chosen("bounded_hash", fewer, prefix_key=key) for key in kept} == kept


def test_the_emptiest_pool_decodes():
    view = cluster(
        workers("p", 1),
        [
            worker("d0", active_tokens=300, capacity_tokens=1000),
            worker("d1", active_tokens=400, capacity_tokens=4000),
        ],
    )
    for name in sorted(set(POLICIES) - {"predicted_time", "random", "round_robin"}):
        assert load_policy(name)(RequestView(10, seed=1), view).decode.worker_id == "d1", name
