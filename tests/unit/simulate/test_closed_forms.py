"""The simulation against what is known without it."""

import bisect
import itertools
from dataclasses import replace
from random import Random
from statistics import fmean, stdev

import pytest

from headrace.simulate.service_times import service_times
from headrace.simulate.settings import FleetSettings
from headrace.traces.statistics import sharing_of
from headrace.traces.trace import TraceRequest
from tests.unit.simulate.fleets import BLOCK, hit_tokens, run, shared_prefixes, trace_of

ONE = FleetSettings(num_prefill=1, num_decode=1)
STUDENT_T = 4.78  # two-sided, 99.9 %, 9 degrees of freedom


def poisson(num_requests, rate, seed, num_input=2_048, num_output=1):
    random = Random(seed)
    at_s = itertools.accumulate(random.expovariate(rate) for _ in range(num_requests))
    return trace_of(*(TraceRequest(each_s, num_input, num_output) for each_s in at_s))


def test_one_worker_without_a_cache_is_an_m_d_1_queue():
    """Mean wait: load / (2 · (1 - load)) services."""
    load = 0.5
    service_s = service_times(ONE.machine)[1].prefill_s(2_048, 0)
    waits = []
    for seed in range(10):
        simulation = run(poisson(800, load / service_s, seed), "round_robin", ONE)
        waits.append(fmean(life.started_s - life.arrived_s for life in simulation.lives) / service_s)
        for life in simulation.lives:
            assert life.first_token_s - life.started_s == pytest.approx(service_s)
    expected = load / (2 * (1 - load))
    half_width = STUDENT_T * stdev(waits) / len(waits) ** 0.5
    assert abs(fmean(waits) - expected) < half_width
    assert half_width < 0.3 * expected, "else the interval says nothing"


def test_random_splitting_over_four_workers_is_four_such_queues():
    settings = FleetSettings(num_prefill=4, num_decode=1)
    service_s = service_times(settings.machine)[1].prefill_s(2_048, 0)
    waits = []
    for seed in range(10):
        simulation = run(poisson(800, 4 * 0.5 / service_s, seed), "random", settings, seed)
        waits.append(fmean(life.started_s - life.arrived_s for life in simulation.lives) / service_s)
    assert abs(fmean(waits) - 0.5) < STUDENT_T * stdev(waits) / len(waits) ** 0.5


def test_an_infinite_cache_hits_what_the_trace_repeats():
    trace = shared_prefixes(600, 5, seed=3)
    simulation = run(trace, "round_robin", replace(ONE, blocks_per_worker=1 << 20))
    prompts = sum(request.num_input for request in trace.requests)
    # The last token of a prompt is computed in any case: at most one of each is not a hit.
    share = sharing_of(trace).hit_full_tokens
    assert share - len(trace.requests) / prompts <= hit_tokens(simulation) / prompts <= share
    assert share > 0.3


def lru_hit_tokens(trace, capacity):
    """By positions in a list of last uses: a block is there while fewer than `capacity` others were used since."""
    clock, last, uses, hits = itertools.count(), {}, [], 0
    for request in trace.requests:
        blocks = request.blocks[: request.num_input // BLOCK]
        found = 0
        for block in blocks:
            if block not in last or len(uses) - bisect.bisect_left(uses, last[block]) > capacity:
                break
            found += 1
        hits += min(found * BLOCK, request.num_input - 1)
        for block in reversed(blocks):
            if block in last:
                del uses[bisect.bisect_left(uses, last[block])]
            last[block] = next(clock)
            uses.append(last[block])
    return hits


@pytest.mark.parametrize("capacity", [60, 200, 600])
def test_one_worker_hits_what_a_cache_of_its_size_does(capacity):
    trace = shared_prefixes(600, 5, seed=4)
    simulation = run(trace, "predicted_time_local", replace(ONE, blocks_per_worker=capacity))
    assert hit_tokens(simulation) == lru_hit_tokens(trace, capacity)


def test_a_host_tier_is_as_good_as_a_larger_cache_but_for_the_copies():
    trace = shared_prefixes(300, 5, seed=5)
    small = run(trace, "predicted_time_local", replace(ONE, blocks_per_worker=100))
    tiered = run(
        trace, "predicted_time_local", replace(ONE, blocks_per_worker=100, host_blocks_per_worker=1 << 20)
    )
    large = run(trace, "predicted_time_local", replace(ONE, blocks_per_worker=1 << 20))
    assert hit_tokens(small) < hit_tokens(tiered) == hit_tokens(large)
    assert sum(life.num_host for life in tiered.lives) > 0
    waits = [fmean(life.first_token_s - life.arrived_s for life in s.lives) for s in (large, tiered, small)]
    assert waits[0] < waits[1] < waits[2]


def test_a_sequence_alone_decodes_at_the_speed_of_a_batch_of_one():
    _, times = service_times(ONE.machine)
    simulation = run(trace_of(TraceRequest(0.0, 4_096, 101)), "round_robin", ONE)
    [life] = simulation.lives
    assert life.over_s - life.joined_s == pytest.approx(100 * times.decode_s(1, 4_096))
    link_s = 1e-3 + 4_096 * 327_680 / 320e9
    assert life.joined_s - life.first_token_s == pytest.approx(link_s / 8), "the last of eight chunks"


def test_sequences_that_decode_together_share_steps():
    """Equal ones that come at once: all at the speed of their batch."""
    _, times = service_times(ONE.machine)
    settings = FleetSettings(num_prefill=4, num_decode=1)
    simulation = run(trace_of(*(TraceRequest(0.0, 4_096, 2_001) for _ in range(4))), "round_robin", settings)
    joined_s, over_s = simulation.lives[-1].joined_s, simulation.lives[-1].over_s
    assert over_s - joined_s == pytest.approx(2_000 * times.decode_s(4, 4 * 4_096), rel=0.02)


def test_what_finds_no_room_waits_for_it():
    settings = replace(ONE, blocks_per_worker=10)
    trace = trace_of(TraceRequest(0.0, 4_000, 100), TraceRequest(0.0, 4_000, 100))
    first, second = run(trace, "round_robin", settings).lives
    assert second.joined_s == first.over_s


def test_prompts_and_decodes_of_one_worker_slow_each_other_down():
    mixed = FleetSettings(num_prefill=1, num_decode=0)
    alone = run(trace_of(TraceRequest(0.0, 4_096, 400)), "round_robin", mixed).lives[0]
    trace = trace_of(TraceRequest(0.0, 4_096, 400), TraceRequest(1.0, 16_384, 1))
    prompt, sequence = run(trace, "round_robin", mixed).lives
    assert sequence.over_s - sequence.first_token_s > 1.1 * (alone.over_s - alone.first_token_s)
    _, times = service_times(mixed.machine)
    assert prompt.prefill_s > times.prefill_s(16_384, 0)


def test_fetched_blocks_take_the_time_of_the_link():
    """Two prompts that go on from an earlier one: the worker that has it takes one, the other fetches. Before that, the
    router has learned from hand-offs how fast links are.
    """
    shared = tuple(range(1, 61))
    lessons = (
        TraceRequest(3.0 * n, 60 * BLOCK, 2, tuple(range(1_000 * n, 1_000 * n + 60))) for n in range(1, 20)
    )
    trace = trace_of(
        *lessons,
        TraceRequest(80.0, 60 * BLOCK, 1, shared),
        TraceRequest(90.0, 70 * BLOCK, 1, (*shared, *range(100, 110))),
        TraceRequest(90.001, 70 * BLOCK, 1, (*shared, *range(200, 210))),
    )
    settings = FleetSettings(num_prefill=2, num_decode=1)
    simulation = run(trace, "local_or_fetch", settings)
    [life] = [life for life in simulation.lives if life.num_fetched]
    _, times = service_times(settings.machine)
    link_s = 1e-3 + 60 * BLOCK * 327_680 / 320e9
    assert life.num_fetched == 60 * BLOCK
    took_s = life.first_token_s - life.started_s
    assert took_s == pytest.approx(link_s + times.prefill_s(10 * BLOCK, 60 * BLOCK))
