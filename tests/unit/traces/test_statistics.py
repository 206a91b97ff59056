"""Figures of the traces in `tests/data`, as they are published or were computed by others, and small ones by hand."""

import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.traces.reading import read_trace
from headrace.traces.reuse_distance import previous_accesses, reuse_distances
from headrace.traces.statistics import lru_hit_tokens, sharing_of, statistics_of
from headrace.traces.trace import Trace, TraceRequest

DATA = Path(__file__).parents[2] / "data" / "traces"
CONVERSATION = DATA / "mooncake_conversation.jsonl.gz"
AGENTIC = DATA / "agentic_coding_512.jsonl.gz"


@cache
def conversation() -> Trace:
    return read_trace(CONVERSATION)


@cache
def agentic_whole() -> Trace:
    return read_trace(AGENTIC)


@cache
def agentic() -> Trace:
    """Its sessions without the sub-agents, as the published figures count them."""
    trace = agentic_whole()
    rows = [json.loads(line) for line in gzip.decompress(AGENTIC.read_bytes()).splitlines()]
    helpers = {row["session_id"] for row in rows if "parent_session" in row}
    kept = tuple(request for request in trace.requests if request.session not in helpers)
    return Trace(trace.name, trace.format, trace.sha256, trace.block_tokens, kept, relative=True)


def test_conversation_lengths_and_arrivals():
    figures = statistics_of(conversation(), capacities=())
    assert figures.sha256 == "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
    assert figures.requests == 12_031
    lengths = figures.input_tokens
    assert [round(x) for x in (lengths.mean, lengths.p10, lengths.p50, lengths.p90, lengths.max)] == [
        12_035, 964, 6_909, 27_367, 126_195,
    ]  # fmt: skip
    outputs = figures.output_tokens
    assert [round(x) for x in (outputs.mean, outputs.p10, outputs.p50, outputs.p90, outputs.max)] == [
        343, 24, 350, 597, 2_000,
    ]  # fmt: skip
    arrivals = figures.arrivals
    assert arrivals is not None
    assert (round(arrivals.duration_s), round(arrivals.rate, 2), arrivals.distinct_times) == (
        3_537,
        3.40,
        1_180,
    )
    _, ten, sixty = arrivals.windows
    assert (round(ten.cv, 2), round(ten.peak_over_mean, 1)) == (0.25, 2.0)
    assert (round(sixty.cv, 2), round(sixty.peak_over_mean, 1)) == (0.12, 1.2)


def test_conversation_sharing():
    """The Dynamo documentation counts 105,710 repeats of 288,500 references as well, 36.64 %."""
    sharing = sharing_of(conversation())
    assert (sharing.accesses, sharing.distinct, sharing.repeats) == (288_500, 182_790, 105_710)
    assert sharing.hit_blocks == pytest.approx(0.3664, abs=5e-5)
    assert sharing.hit_tokens == pytest.approx(0.3736, abs=5e-5)
    assert (round(sharing.hit_full_blocks, 3), round(sharing.hit_full_tokens, 3)) == (0.382, 0.373)
    assert (round(sharing.used_once, 3), round(sharing.half_reused, 3)) == (0.758, 0.425)
    assert round(sharing.mostly_reused, 3) == 0.159
    assert {top: round(share, 3) for top, share in sharing.hits_on_top.items()} == {
        1: 0.114, 100: 0.138, 1_000: 0.255, 10_000: 0.595,
    }  # fmt: skip
    assert {part: round(share, 3) for part, share in sharing.accesses_to_top.items()} == {
        0.001: 0.056, 0.01: 0.122, 0.1: 0.339,
    }  # fmt: skip
    distance, age_s = sharing.reuse_distance, sharing.reuse_s
    assert distance is not None and age_s is not None
    assert (distance.p10, distance.p50, distance.p90, distance.p99) == (48, 8_356, 31_588, 85_267)
    assert [round(x) for x in (age_s.p25, age_s.p50, age_s.p75, age_s.p90, age_s.p99)] == [
        54, 114, 267, 519, 1_578,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("capacity", "percent"),
    [(500, 4.3), (1_000, 4.5), (2_000, 5.5), (5_000, 11.4), (10_000, 21.6), (20_000, 29.3), (50_000, 36.2)],
)
def test_conversation_through_one_cache(capacity, percent):
    assert 100 * lru_hit_tokens(conversation(), capacity) == pytest.approx(percent, abs=0.051)


def test_a_cache_as_large_as_the_trace_spares_what_an_infinite_one_does():
    assert lru_hit_tokens(conversation(), 182_790) == pytest.approx(sharing_of(conversation()).hit_tokens)


def test_agentic_sharing():
    trace = agentic().with_starts(60.0, seed=0)
    accesses = [block for request in trace.requests for block in request.blocks]
    assert (len(accesses), len(set(accesses))) == (2_826_076, 129_201)
    assert lru_hit_tokens(trace, 1 << 20) == pytest.approx(0.956, abs=1.5e-3)
    short = trace.up_to(131_072)
    assert lru_hit_tokens(short, 1 << 20) == pytest.approx(0.945, abs=1.5e-3)


def test_agentic_lengths():
    figures = statistics_of(agentic_whole().up_to(131_072), capacities=())
    assert (figures.requests, figures.arrivals) == (6_075, None)
    whole = [request.num_input for request in agentic_whole().requests]
    assert round(np.mean(whole)) == 149_572
    assert np.percentile(whole, (10, 50, 90, 99)).round().tolist() == [50_243, 114_488, 305_748, 703_569]


@pytest.mark.parametrize(
    ("name", "requests", "gap_cv", "windows"),
    [
        ("azure_llm_2023_code", 8_819, 13.2, [(2.27, 26), (1.67, 12.8), (1.04, 4.2)]),
        ("azure_llm_2023_conv", 19_366, 1.09, [(0.50, 2.9), (0.26, 1.8), (0.22, 1.5)]),
    ],
)
def test_azure(name, requests, gap_cv, windows):
    figures = statistics_of(read_trace(DATA / f"{name}.csv.gz"))
    assert (figures.requests, figures.sharing, figures.lru_hit_tokens) == (requests, None, {})
    assert figures.arrivals is not None
    assert figures.arrivals.gap_cv == pytest.approx(gap_cv, abs=0.05)
    for window, (cv, peak) in zip(figures.arrivals.windows, windows, strict=True):
        assert window.cv == pytest.approx(cv, abs=0.006)
        assert window.peak_over_mean == pytest.approx(peak, rel=0.02)


def test_a_trace_of_three_by_hand():
    """Blocks of 512: the second prompt finds two blocks, its last one a part; the third finds one of three."""
    requests = (
        TraceRequest(0.0, 1_100, 1, (0, 1, 2)),
        TraceRequest(1.0, 600, 1, (0, 1)),
        TraceRequest(2.0, 1_536, 1, (0, 3, 2)),
    )
    sharing = sharing_of(Trace("t", "mooncake", "", 512, requests))
    assert (sharing.accesses, sharing.distinct, sharing.hit_blocks) == (8, 4, 3 / 8)
    assert sharing.hit_tokens == pytest.approx((600 + 512) / 3_236)
    assert sharing.hit_full_tokens == pytest.approx((512 + 512) / 3_236)
    assert (sharing.half_reused, sharing.mostly_reused) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert sharing.hits_on_top[1] == pytest.approx(2 / 3)


def test_reuse_distance_is_what_a_stack_shows():
    ids = np.random.default_rng(5).integers(0, 40, 500)
    stack: list[int] = []
    expected = []
    for block in ids.tolist():
        if block in stack:
            place = stack.index(block)
            expected.append(len(stack) - place - 1)
            del stack[place]
        stack.append(block)
    assert reuse_distances(previous_accesses(ids)).tolist() == expected


def test_the_command_prints_and_writes_the_same_figures():
    plain = CliRunner().invoke(app, ["bench", "trace", str(CONVERSATION)], catch_exceptions=False)
    assert plain.exit_code == 0
    for figure in (
        "12,031",
        "288,500, 182,790, 105,710",
        "36.64% of blocks, 37.36% of tokens",
        "8,356",
        "29.3%",
    ):
        assert figure in plain.stdout
    as_json = CliRunner().invoke(app, ["bench", "trace", "--json", str(CONVERSATION)], catch_exceptions=False)
    figures = json.loads(as_json.stdout)
    assert figures["sharing"]["repeats"] == 105_710
    assert figures["lru_hit_tokens"]["5000"] == pytest.approx(0.114, abs=5e-4)
