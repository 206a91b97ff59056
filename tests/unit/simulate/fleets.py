"""Traces and runs for the tests of the simulation."""

from __future__ import annotations

import itertools
from random import Random

from headrace.simulate.schemes import chosen_schemes
from headrace.simulate.settings import FleetSettings
from headrace.simulate.simulation import Simulation
from headrace.traces.trace import Trace, TraceRequest

BLOCK = 512


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("made", "mooncake", "", BLOCK, requests)


def shared_prefixes(num_requests: int, rate: float, seed: int, groups: int = 30) -> Trace:
    """Poisson arrivals. All prompts begin alike, those of a group go on alike, and each ends in its own way; a third
    goes on from an earlier one of its group.
    """
    random, ids = Random(seed), itertools.count(1)
    starts = [(0, *itertools.islice(ids, random.choice((4, 8, 16)))) for _ in range(groups)]
    last = list(starts)
    at_s, requests = 0.0, []
    for _ in range(num_requests):
        at_s += random.expovariate(rate)
        group = min(int(random.expovariate(0.2)), groups - 1)
        start = last[group] if random.random() < 1 / 3 and len(last[group]) < 60 else starts[group]
        blocks = last[group] = (*start, *itertools.islice(ids, random.choice((1, 2, 4, 8))))
        num_input = len(blocks) * BLOCK - random.randrange(BLOCK)
        requests.append(TraceRequest(at_s, num_input, random.randint(1, 200), blocks))
    return trace_of(*requests)


def run(trace: Trace, policy: str, settings: FleetSettings, seed: int = 0) -> Simulation:
    [scheme] = chosen_schemes(policy)
    simulation = Simulation(trace, scheme, settings, seed)
    simulation.run()
    return simulation


def hit_tokens(simulation: Simulation) -> int:
    return sum(life.num_cached + life.num_fetched for life in simulation.lives)


def ttft_mean_s(simulation: Simulation) -> float:
    return sum(life.first_token_s - life.arrived_s for life in simulation.lives) / len(simulation.lives)
