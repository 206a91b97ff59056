"""A run in one row: flat, without anything that the machine it ran on decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.directory.records import Role
from headrace.simulate.simulation import Simulation
from headrace.simulate.workers import Life

_SATURATED = 0.9  # of the time busy


@dataclass(frozen=True, slots=True)
class Row:
    """Times in seconds; shares between 0 and 1."""

    trace: str
    policy: str
    seed: int
    rate_scale: float
    workers: int  # that prefill
    decode_workers: int  # 0: the workers decode as well
    blocks_per_worker: int
    requests: int
    prompt_tokens: int
    hit_rate_tokens: float  # of the prompts: cached where they are computed, or fetched
    fetched_share: float  # of the prompts' tokens
    host_share: float
    computed_tokens: int
    output_tokens: int
    moved_bytes: int  # by hand-offs
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    wait_mean_s: float  # until computing starts
    itl_mean_s: float
    itl_p99_s: float  # of requests' means
    predicted_over_actual: float  # of TTFT, the mean of the predictions over that of the times
    busy: float  # of the workers that prefill, on average
    busy_max_over_mean: float
    duration_s: float  # until the last one is over
    saturated: bool


def row_of(simulation: Simulation, policy: str, seed: int, rate_scale: float) -> Row:
    lives = simulation.lives
    settings = simulation.settings
    ttfts = [life.first_token_s - life.arrived_s for life in lives]
    p50, p90, p95, p99 = np.percentile(ttfts, (50, 90, 95, 99)).tolist()
    itls = _itls(lives) or [0.0]
    prompts = sum(life.request.num_input for life in lives)
    duration_s = simulation.clock.now()
    busy = [worker.busy_s for worker in simulation.workers if worker.record.role != Role.DECODE]
    mean_busy = float(np.mean(busy))
    last_arrival_s = max(life.arrived_s for life in lives)
    return Row(
        trace=simulation.trace.name,
        policy=policy,
        seed=seed,
        rate_scale=rate_scale,
        workers=settings.num_prefill,
        decode_workers=settings.num_decode,
        blocks_per_worker=settings.blocks_per_worker,
        requests=len(lives),
        prompt_tokens=prompts,
        hit_rate_tokens=sum(life.num_cached + life.num_fetched for life in lives) / prompts,
        fetched_share=sum(life.num_fetched for life in lives) / prompts,
        host_share=sum(life.num_host for life in lives) / prompts,
        computed_tokens=sum(life.num_computed for life in lives),
        output_tokens=sum(life.request.num_output for life in lives),
        moved_bytes=sum(life.num_moved for life in lives),
        ttft_mean_s=float(np.mean(ttfts)),
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p95_s=p95,
        ttft_p99_s=p99,
        wait_mean_s=float(np.mean([life.started_s - life.arrived_s for life in lives])),
        itl_mean_s=float(np.mean(itls)),
        itl_p99_s=float(np.percentile(itls, 99)),
        predicted_over_actual=float(np.mean([life.predicted_ttft_s for life in lives]) / np.mean(ttfts)),
        busy=mean_busy / duration_s,
        busy_max_over_mean=max(busy) / mean_busy,
        duration_s=duration_s,
        saturated=mean_busy / max(last_arrival_s, 1e-9) >= _SATURATED,
    )


def _itls(lives: Sequence[Life]) -> list[float]:
    """Of each request with two tokens or more: the mean gap."""
    return [(life.over_s - life.first_token_s) / life.num_decoded for life in lives if life.num_decoded]
