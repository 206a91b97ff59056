"""The arithmetic of `headrace plan`, against queues that are played through, and as a command."""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cluster.planner.capacity import (
    Costs,
    Lengths,
    Limits,
    Workload,
    costs_of_rows,
    decode_pool,
    prefill_pool,
)
from headrace.errors import InvalidRequest
from router.costs import DecodeCost, PrefillCost

COSTS = Costs(PrefillCost(5e-3, 5e-5, 1e-9), DecodeCost(8e-3, 2e-5, 3e-8))
WORK = Workload(20.0, Lengths.parse("in", "500:3,4000:1"), Lengths.parse("out", "50,150,400"))
LIMITS = Limits(ttft_s=1.0, itl_s=0.05)


def played_ttfts(work: Workload, num_workers: int, num_requests: int = 40_000) -> list[float]:
    """One queue, first come first served."""
    draw = random.Random(5)
    free_at = [0.0] * num_workers
    now, waits = 0.0, []
    for _ in range(num_requests):
        now += draw.expovariate(work.rate)
        [tokens] = draw.choices(work.inputs.values, work.inputs.weights)
        start = max(now, heapq.heappop(free_at))
        seconds = COSTS.prefill.seconds(tokens, 0)
        heapq.heappush(free_at, start + seconds)
        waits.append(start + seconds - now)
    return sorted(waits)


@pytest.mark.parametrize("rate", [5.0, 20.0, 60.0])
def test_prefill_waits_as_a_queue_that_is_played_through(rate):
    work = replace(WORK, rate=rate)
    pool = prefill_pool(work, COSTS, LIMITS)
    ttfts = played_ttfts(work, pool.workers)
    mean_wait_s = sum(ttfts) / len(ttfts) - pool.prompt_s
    assert pool.wait_s == pytest.approx(mean_wait_s, rel=0.35, abs=2e-3)
    assert ttfts[int(0.95 * len(ttfts))] <= 1.1 * pool.ttft_s <= 1.1 * LIMITS.ttft_s
    assert pool.busy == pytest.approx(rate * pool.prompt_s / pool.workers)


def test_a_decode_pool_is_in_balance():
    """As many tokens as arrive, at the step that its own batch takes; one worker less would break what is named."""
    work = replace(WORK, rate=200.0)
    pool = decode_pool(work, COSTS, replace(LIMITS, kv_tokens=60_000))
    context = work.context_tokens
    assert context == pytest.approx(1375 + (50**2 + 150**2 + 400**2) / 600 / 2)
    assert pool.step_s == pytest.approx(COSTS.decode.seconds(pool.batch, pool.batch * context))
    assert pool.batch * pool.workers / pool.step_s == pytest.approx(200.0 * 200)
    assert pool.bound_by in ("KV memory", "sequences at once", "KV memory, sequences at once")
    free = decode_pool(work, COSTS, replace(LIMITS, max_sequences=10**6))
    assert (free.bound_by, free.step_s <= 0.05) == ("ITL target", True)
    assert free.workers < pool.workers


rates = st.floats(0.1, 300)
lengths = st.lists(st.integers(1, 8000), min_size=1, max_size=4).map(
    lambda values: Lengths(tuple(values), tuple(1 / len(values) for _ in values))
)


@settings(max_examples=100, deadline=None)
@given(rate=rates, more=st.floats(1, 3), inputs=lengths, outputs=lengths, hits=st.floats(0, 0.9))
def test_more_work_never_takes_fewer_workers(rate, more, inputs, outputs, hits):
    work = Workload(rate, inputs, outputs, hits)
    limits = Limits(ttft_s=2.0, itl_s=0.1, kv_tokens=100_000)
    prefill, decode = prefill_pool(work, COSTS, limits), decode_pool(work, COSTS, limits)
    assert prefill.ttft_s <= limits.ttft_s
    assert prefill.busy <= limits.max_prefill_busy + 1e-9
    assert decode.step_s <= limits.itl_s
    assert decode.kv_use <= limits.max_kv_use
    heavier = replace(work, rate=rate * more)
    assert prefill_pool(heavier, COSTS, limits).workers >= prefill.workers
    assert decode_pool(heavier, COSTS, limits).workers >= decode.workers
    assert prefill_pool(replace(work, hit_rate=0.0), COSTS, limits).workers >= prefill.workers


def test_what_no_number_of_workers_can_do_is_said():
    with pytest.raises(InvalidRequest, match=r"ttft: 0.1 .* computing the prompt alone takes 0.213 s"):
        prefill_pool(WORK, COSTS, replace(LIMITS, ttft_s=0.1))
    with pytest.raises(InvalidRequest, match="a step of one sequence takes"):
        decode_pool(WORK, COSTS, replace(LIMITS, itl_s=0.001))
    with pytest.raises(InvalidRequest, match="one sequence takes 1529 on average"):
        decode_pool(WORK, COSTS, replace(LIMITS, kv_tokens=1000))


def rows(costs: Costs = COSTS) -> list[dict]:
    """As `headrace bench engine` would measure workers of these costs."""
    variant = {"backend": "cpu", "dtype": "bfloat16", "threads": 2}
    prefill = [
        variant
        | {"phase": "prefill", "batch": 1, "context": n, "tokens_per_s": n / costs.prefill.seconds(n, 0)}
        for n in (128, 512, 2048, 8192)
    ]
    return prefill + [
        variant
        | {
            "phase": "decode",
            "batch": batch,
            "context": context,
            "tokens_per_s": batch / costs.decode.seconds(batch, batch * context),
        }
        for batch in (1, 4, 16, 64)
        for context in (256, 4096)
    ]


def test_costs_are_found_again_in_measurements():
    found = costs_of_rows(rows())
    for n, cached in ((300, 0), (4000, 0), (1000, 3000)):
        assert found.prefill.seconds(n, cached) == pytest.approx(COSTS.prefill.seconds(n, cached), rel=0.05)
    for batch, context in ((1, 500), (32, 1000), (64, 4000)):
        total = batch * context
        assert found.decode.seconds(batch, total) == pytest.approx(
            COSTS.decode.seconds(batch, total), rel=0.05
        )


def command(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_command_shows_pools_and_formula(tmp_path):
    measured = tmp_path / "bench.json"
    measured.write_text(json.dumps({"machine": {}, "model": {}, "rows": rows(), "skipped": []}))
    work = ("--rate", 20, "--input", "500:3,4000:1", "--output", "50,150,400", "--costs", measured)
    shown = command(*work)
    assert shown.exit_code == 0, shown.exception
    assert "rate · E[prompt] / P" in shown.output
    given = command(*work, "--json", "--ttft", 1, "--itl", 0.05, "--kv-tokens", 200_000)
    data = json.loads(given.output)
    costs = costs_of_rows(rows())
    limits = replace(LIMITS, kv_tokens=200_000)
    assert data["prefill"]["workers"] == prefill_pool(WORK, costs, limits).workers
    assert data["decode"]["workers"] == decode_pool(WORK, costs, limits).workers
    assert data["costs"]["decode"]["base_s"] == pytest.approx(8e-3, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--input", "many"), "write TOKENS or TOKENS:WEIGHT"),
        (("--input", "0"), "must be above 0"),
        (("--input", "5:nan"), "must be above 0"),
        (("--prefill-cost", "1,2"), "three numbers"),
        (("--prefill-cost", "-1,2,3"), "must not be negative"),
        (("--prefill-cost", ""), "give a file"),
        (("--costs", "/nowhere.json", "--prefill-cost", "", "--decode-cost", ""), "is not of"),
    ],
)
def test_wrong_input_is_named(arguments, said):
    good = {"--rate": "5", "--input": "100", "--output": "9"}
    good |= {"--prefill-cost": "0.01,1e-5,0", "--decode-cost": "0.01,1e-5,0"}
    changed = good | dict(zip(arguments[::2], arguments[1::2], strict=True))
    result = command(*(part for pair in changed.items() for part in pair))
    assert isinstance(result.exception, InvalidRequest)
    assert said in str(result.exception)
