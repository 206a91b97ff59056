"""What has to hold for every policy, and what a policy may know."""

import math
from dataclasses import replace

import pytest

from headrace.errors import InvalidRequest
from headrace.simulate.schemes import Scheme, chosen_schemes
from headrace.simulate.settings import FleetSettings, Sight
from headrace.simulate.simulation import Simulation
from headrace.traces.trace import Trace, TraceRequest
from router.policy import POLICIES, load_policy
from tests.unit.simulate.fleets import hit_tokens, run, shared_prefixes, trace_of, ttft_mean_s

FLEET = FleetSettings(num_prefill=4, num_decode=2, blocks_per_worker=300)
ALL = [scheme.name for scheme in chosen_schemes("all")]


def test_every_policy_of_the_router_can_be_simulated():
    assert set(POLICIES) < set(ALL)


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(
    "settings",
    [
        FLEET,
        replace(FLEET, num_decode=0),
        replace(FLEET, num_routers=3, event_loss=0.3, noise=0.3, decode_prefills=True),
    ],
    ids=["split", "mixed", "three routers, lost events, noise"],
)
def test_every_request_ends_once_and_tokens_add_up(policy, settings):
    trace = shared_prefixes(80, 12, seed=6)
    simulation = run(trace, policy, settings)
    ended = sorted((life.request for life in simulation.lives), key=lambda request: request.at_s)
    assert ended == list(trace.requests)
    for life in simulation.lives:
        assert life.arrived_s <= life.started_s < life.first_token_s <= life.over_s
        assert life.num_cached >= 0 and life.num_fetched >= 0 and life.num_computed >= 1
    computed = sum(worker.num_computed for worker in simulation.workers)
    assert computed + hit_tokens(simulation) == sum(request.num_input for request in trace.requests)
    assert all(not len(worker.batch) and not worker.queue for worker in simulation.workers)
    assert simulation.clock.now() >= max(life.over_s for life in simulation.lives)


@pytest.mark.parametrize("policy", ["predicted_time", "random", "local_or_fetch"])
def test_equal_seeds_repeat_exactly_and_others_do_not(policy):
    trace, settings = (
        shared_prefixes(100, 10, seed=7),
        replace(FLEET, noise=0.2, event_loss=0.1, num_routers=2),
    )

    def times(seed):
        return [(life.first_token_s, life.over_s) for life in run(trace, policy, settings, seed).lives]

    assert times(1) == times(1) != times(2)


class Spy:
    """A policy that notes what it was shown."""

    def __init__(self, policy: str) -> None:
        self._policy = load_policy(policy)
        self.reported: list[int] = []
        self.pending: list[int] = []

    def __call__(self, request, cluster):
        workers = [*cluster.prefill, *cluster.decode]
        self.reported.append(max(worker.reported_tokens for worker in workers))
        self.pending.append(sum(worker.pending_prefill_tokens for worker in workers))
        return self._policy(request, cluster)


def test_a_policy_knows_of_caches_only_what_has_had_time_to_arrive():
    trace = trace_of(*(TraceRequest(float(n), 5_120, 1, tuple(range(10))) for n in range(10)))
    spy = Spy("round_robin")
    settings = replace(FLEET, event_interval_s=0.5, event_delay_s=3.0)
    Simulation(trace, Scheme("spy", spy), settings, 0).run()
    # Computed by 0.3 s, published by 0.5 to 1, known from 3.5 to 4 on.
    assert spy.reported[:4] == [0, 0, 0, 0]
    assert spy.reported[4:] == [5_120] * 6


def test_without_events_nothing_is_reported():
    spy = Spy("round_robin")
    Simulation(
        shared_prefixes(50, 10, seed=8), Scheme("spy", spy), replace(FLEET, sight=Sight.HISTORY), 0
    ).run()
    assert set(spy.reported) == {0}


def test_routers_know_of_one_another_by_what_workers_publish():
    """Eight long prompts at once, and one more when it has been told of them."""
    prompts = [TraceRequest(at_s, 51_200, 1, ()) for at_s in (*[0.0] * 8, 0.5)]
    spy = Spy("least_work")
    settings = replace(FLEET, num_prefill=1, num_routers=2, event_delay_s=0.2)
    Simulation(trace_of(*prompts), Scheme("spy", spy), settings, 5).run()
    assert spy.pending[7] < 7 * 51_200, "those of the other one are not known yet"
    assert spy.pending[8] == pytest.approx(8 * 51_200, rel=0.1), "all are, less what is computed"


def test_lost_events_are_noticed_and_the_view_read_again():
    trace = shared_prefixes(200, 10, seed=9)
    whole = run(trace, "predicted_time_local", FLEET)
    lossy = run(trace, "predicted_time_local", replace(FLEET, event_loss=0.2))
    assert lossy.routers[0].view.num_gaps > 0
    assert hit_tokens(lossy) == pytest.approx(hit_tokens(whole), rel=0.1)
    for router, simulation in ((lossy.routers[0], lossy), (whole.routers[0], whole)):
        for worker in simulation.workers:
            known = router.view.index.blocks(worker.record.worker_id)
            assert len(known) <= FLEET.blocks_per_worker * 1.2


def test_the_view_ends_as_the_caches_are():
    simulation = run(shared_prefixes(300, 10, seed=10), "predicted_time", FLEET)
    index = simulation.routers[0].view.index
    for worker in simulation.workers:
        assert len(index.blocks(worker.record.worker_id)) == len(worker.cache)


def test_sessions_go_on_after_their_answers():
    def turn(session, at_s, think_s):
        return TraceRequest(at_s, 2_000, 50, (), session, think_s)

    turns = (turn("a", 0.0, None), turn("a", 0.1, 5.0), turn("b", 0.2, None), turn("a", 0.3, 7.0))
    lives = run(Trace("made", "mooncake", "", 512, turns), "round_robin", FLEET).lives
    a = [life for life in lives if life.request.session == "a"]
    assert [life.request.at_s for life in a] == [0.0, 0.1, 0.3]
    for before, after, think_s in zip(a, a[1:], (5.0, 7.0), strict=False):
        assert after.arrived_s == pytest.approx(before.over_s + think_s)


def test_bounds_are_bounds():
    trace = shared_prefixes(250, 14, seed=11)
    best = ttft_mean_s(run(trace, "oracle_one_cache", FLEET))
    assert all(
        best < ttft_mean_s(run(trace, policy, FLEET))
        for policy in ("oracle_fetch", "predicted_time", "least_work")
    )


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(
        InvalidRequest, match="policy: 'best' is not allowed; known ones: all, predicted_time"
    ):
        chosen_schemes("random,best")


def test_a_prompt_larger_than_a_cache_is_served():
    simulation = run(trace_of(TraceRequest(0.0, 512 * 400, 5, tuple(range(400)))), "predicted_time", FLEET)
    assert math.isfinite(simulation.lives[0].over_s)
