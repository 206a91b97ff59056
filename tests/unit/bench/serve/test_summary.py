"""Figures from records that are made by hand, their intervals, and runs side by side."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.bench.serve.comparison import compare, differences
from headrace.bench.serve.content import Piece
from headrace.bench.serve.punctuality import Punctuality
from headrace.bench.serve.records import RequestRecord
from headrace.bench.serve.results import Run
from headrace.bench.serve.slo import Objective
from headrace.bench.serve.statistics import Pooled, resamples
from headrace.bench.serve.summary import Price, summarise
from headrace.bench.serve.sweep import Bounds
from headrace.bench.serve.table import notes_on
from headrace.bench.serve.workload import Conversation, Plan, Turn
from headrace.errors import InvalidRequest

SERVER = {
    **{
        "queue_s": 0.01,
        "worker_queue_s": 0.02,
        "worker_prefill_s": 0.1,
        "transfer_s": 0.004,
        "decode_s": 0.3,
    },
    **{"blocks_moved": 2, "bytes_moved": 1000, "failed_attempts": 0},
}


def record(
    number,
    *,
    ttft_s=0.1,
    gaps_ms=(20.0, 30.0),
    status="ok",
    lateness_s=0.0,
    cached=0,
    prompt=100,
    worker="d-0",
    prefill="p-0",
):
    due_s = float(number)
    first_s = due_s + ttft_s
    return RequestRecord(
        f"r{number}",
        number,
        0,
        due_s,
        due_s + lateness_s,
        due_s + lateness_s,
        end_s=first_s + sum(gaps_ms) / 1000,
        first_token_s=first_s if status == "ok" else None,
        prompt_tokens=prompt,
        output_tokens=len(gaps_ms) + 1,
        wanted_tokens=len(gaps_ms) + 1,
        expected_cached_tokens=cached,
        cached_tokens=cached,
        status=status,
        error="",
        finish_reason="length",
        num_messages=len(gaps_ms) + 1,
        itls_ms=list(gaps_ms),
        server={**SERVER, "decode_worker": worker, "prefill_worker": prefill},
    )


def plan_of(count):
    pieces = (Piece(0, 60), Piece(1, 40))
    return Plan(tuple(Conversation((Turn(pieces, 3),), float(number)) for number in range(count)))


def summary_of(records, *, slo="ttft:150", **options):
    return summarise(plan_of(len(records)), records, Objective.parse("", slo), [0.0], seed=0, **options)


def test_percentiles_are_those_of_the_values():
    ttfts = np.random.default_rng(0).lognormal(-2, 1, 300)
    summary = summary_of([record(number, ttft_s=float(ttft)) for number, ttft in enumerate(ttfts)])
    for percent in (50, 90, 95, 99):
        assert summary[f"p{percent}_ttft_ms"] == pytest.approx(1000 * np.percentile(ttfts, percent))
    assert summary["mean_ttft_ms"] == pytest.approx(1000 * ttfts.mean())
    assert summary["std_ttft_ms"] == pytest.approx(1000 * ttfts.std())
    assert summary["mean_itl_ms"] == pytest.approx(25.0)


def test_goodput_counts_all_that_was_offered():
    records = [
        record(0),
        record(1, ttft_s=0.2),
        record(2, status="rejected"),
        record(3, status="failed"),
        record(4),
    ]
    summary = summary_of(records)
    assert summary["slo"] == {"ttft_ms": 150.0, "attainment": 0.4, "ttft_attainment": 0.4}
    assert summary["request_goodput"] == pytest.approx(2 / summary["duration"])
    assert (summary["completed"], summary["rejected"], summary["failed"]) == (3, 1, 1)
    assert summary["mean_ttft_ms"] == pytest.approx(400 / 3)


def test_cache_phases_and_workers():
    records = [
        record(
            number,
            cached=60 if number else 0,
            worker=f"d-{number % 4 == 0:d}",
            prefill="" if number == 3 else "p-0",
        )
        for number in range(8)
    ]
    summary = summary_of(records)
    cache = summary["cache"]
    assert cache["hit_rate_tokens"] == pytest.approx(7 * 60 / 800)
    assert cache["bound_infinite"] == pytest.approx(7 * 100 / 800)
    assert cache["bound_share"] == pytest.approx(0.6)
    assert cache["working_set_tokens"] == 100
    assert summary["pd"]["prefill_ms"]["mean"] == pytest.approx(100.0)
    assert summary["pd"]["kv_bytes"] == 8000
    assert summary["pd"]["local_prefills"] == 1
    assert summary["routing"]["decode_requests"] == {"d-0": 6, "d-1": 2}
    assert summary["routing"]["decode_max_over_mean"] == pytest.approx(1.5)
    assert summary["routing"]["prefill_max_over_mean"] == pytest.approx(1.0)


def test_cost_of_a_million_tokens():
    summary = summary_of([record(number) for number in range(10)], price=Price(3.6, 2))
    spent = 3.6 * 2 * summary["duration"] / 3600
    assert summary["cost"]["per_million_output_tokens"] == pytest.approx(spent / 30 * 1e6)
    assert summary["cost"]["per_million_tokens"] == pytest.approx(spent / 1030 * 1e6)


def test_prompts_that_the_caches_knew_already_are_pointed_out():
    """More was found than this run alone can explain."""
    knew = summary_of([record(number, cached=100) for number in range(4)])
    assert knew["cache"]["hit_rate_tokens"] > knew["cache"]["bound_infinite"]
    assert any("another --seed" in note for note in notes_on(knew))
    assert notes_on(summary_of([record(number, cached=100 if number else 0) for number in range(4)])) == []


def test_a_run_without_a_single_answer():
    summary = summary_of([record(0, status="failed"), record(1, status="timeout")])
    assert (summary["completed"], summary["timeouts"]) == (0, 1)
    assert "mean_ttft_ms" not in summary
    assert summary["cache"]["hit_rate_tokens"] is None
    assert summary["slo"]["attainment"] == 0.0


def test_lateness_is_judged_by_what_was_measured():
    """10 ms are allowed, or a twentieth of the median TTFT."""
    quick = [record(number, ttft_s=0.1, lateness_s=0.012) for number in range(50)]
    slow = [record(number, ttft_s=1.0, lateness_s=0.012) for number in range(50)]
    assert not Punctuality.of(quick, []).is_valid
    assert Punctuality.of(slow, []).is_valid
    assert not Punctuality.of(slow, [0.06] * 10).is_valid
    assert "12.0 ms" in Punctuality.of(quick, []).reason


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Of the mean of 200 exponential values, in 200 experiments."""
    covered = 0
    for experiment in range(200):
        values = np.random.default_rng([1, experiment]).exponential(1.0, 200)
        pooled = Pooled([[value] for value in values])
        [(low, high), _] = pooled.intervals(resamples(200, experiment), [50])
        covered += low <= 1.0 <= high
    assert 0.86 <= covered / 200 <= 0.98


def test_intervals_are_wider_where_neighbours_are_alike():
    """A queue: its values come in runs, so there are fewer independent ones than values."""
    rng = np.random.default_rng(0)
    runs = np.repeat(rng.exponential(1.0, 40), 10)
    mixed = rng.permutation(runs)
    widths = [
        np.ptp(Pooled([[value] for value in some]).intervals(resamples(400, 0), [])[0])
        for some in (runs, mixed)
    ]
    assert widths[0] > 1.8 * widths[1]


def test_resamples_are_equal_for_equal_seeds():
    assert (resamples(50, 3) == resamples(50, 3)).all()
    assert (resamples(50, 3) != resamples(50, 4)).any()
    assert set(resamples(50, 3).sum(axis=1)) == {50}


def run_of(name, ttft_s, **more):
    rng = np.random.default_rng(0)
    records = [record(number, ttft_s=ttft_s * float(rng.uniform(0.9, 1.1))) for number in range(100)]
    facts = {"schedule_sha256": "a", "model_id": "m", "backend": "grpc", "seed": 0, "label": name}
    return Run(name, {**facts, **summary_of(records), **more}, records)


def test_runs_side_by_side():
    lines = {line.name: line for line in compare([run_of("a", 0.1), run_of("b", 0.2), run_of("c", 0.1)])}
    ttft = lines["TTFT p50 ms"].cells
    assert [cell.ratio for cell in ttft] == pytest.approx([1.0, 2.0, 1.0])
    assert [(cell.is_clear, cell.is_better) for cell in ttft] == [
        (False, False),
        (True, False),
        (False, False),
    ]
    good = lines["good answers of those offered"].cells
    assert good[1].ratio == 0.0
    assert good[1].is_clear
    assert "cost of a million output tokens" not in lines


def test_runs_that_can_not_be_compared_say_so():
    assert differences([run_of("a", 0.1), run_of("b", 0.2)]) == []
    told = differences([run_of("a", 0.1), run_of("b", 0.2, seed=1, schedule_sha256="b", model_id="n")])
    assert told == [
        "they differ in their schedules",
        "they differ in their models",
        "they differ in their seeds",
    ]


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "ttft:x", "latency:5", "ttft:nan"])
def test_objectives_that_are_none(text):
    with pytest.raises(InvalidRequest, match="--slo"):
        Objective.parse("--slo", text)


@pytest.mark.parametrize(
    ("text", "attainment"),
    [("1", 0.9), ("2:1", 0.9), ("0:1", 0.9), ("a:b", 0.9), ("1:2:3", 0.9), ("1:2", 0.0), ("1:2", 1.5)],
)
def test_sweeps_that_are_none(text, attainment):
    with pytest.raises(InvalidRequest, match=r"--sweep|--attainment"):
        Bounds.parse("--sweep", text, attainment)
