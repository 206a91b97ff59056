"""Arrivals, lengths, prompts: what a plan is made of, and that the seed alone decides it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from headrace.bench.serve.arrivals import Arrivals, kind_of
from headrace.bench.serve.content import Piece, SharedPrefixes, Vocabulary
from headrace.bench.serve.lengths import Lengths
from headrace.bench.serve.source import Drawn
from headrace.bench.serve.workload import Shape, at_times
from headrace.errors import InvalidRequest

N = 20_000


def cv(gaps):
    return gaps.std() / gaps.mean()


def shape(**fields):
    lengths = {"input_tokens": Lengths.parse("", "20:60"), "output_tokens": Lengths.parse("", "8")}
    return Shape(**{**lengths, **fields})


@pytest.mark.parametrize(
    ("arrivals", "expected_cv"),
    [
        (Arrivals("poisson", 5.0), 1.0),
        (Arrivals("gamma", 5.0, burstiness=0.25), 2.0),
        (Arrivals("gamma", 5.0, burstiness=4.0), 0.5),
        (Arrivals("constant", 5.0), 0.0),
    ],
)
def test_mean_and_variation_of_gaps(arrivals, expected_cv):
    gaps = np.diff(arrivals.first(N, seed=7))
    assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.05)
    assert cv(gaps) == pytest.approx(expected_cv, rel=0.05, abs=1e-9)


def test_bursts_hold_the_mean_rate():
    times = Arrivals("burst", 5.0, burst_size=20).first(N, seed=0)
    starts, sizes = np.unique(times, return_counts=True)
    assert set(sizes) == {20}
    assert np.diff(starts) == pytest.approx(4.0)


def test_a_duration_takes_all_that_is_due_in_it():
    arrivals = Arrivals("gamma", 50.0, burstiness=0.1)
    times, longer = arrivals.within(20.0, seed=1), arrivals.first(N, seed=1)
    assert times.tolist() == longer[longer < 20.0].tolist()


def test_another_rate_is_the_same_pattern():
    slow, fast = Arrivals("poisson", 1.0).first(50, 3), Arrivals("poisson", 4.0).first(50, 3)
    assert fast * 4 == pytest.approx(slow)
    assert not np.allclose(slow, Arrivals("poisson", 1.0).first(50, 4))


@pytest.mark.parametrize("name", ["rate", "burstiness", "burst_size"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_impossible_arrivals_are_refused(name, value):
    with pytest.raises(InvalidRequest, match=name.replace("_", "-")):
        Arrivals("poisson", **{"rate": 1.0, name: value})


def test_unknown_arrivals_are_refused():
    with pytest.raises(InvalidRequest, match="poisson, gamma, constant, burst, closed"):
        kind_of("pareto")


@pytest.mark.parametrize(
    ("text", "mean", "spread"), [("100", 100, 0), ("50:150", 100, 29.15), ("lognormal:100:0.5", 100, 53.3)]
)
def test_lengths(text, mean, spread):
    lengths = Lengths.parse("--input-tokens", text)
    drawn = np.array(lengths.draw(np.random.default_rng(0), N))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() == pytest.approx(spread, rel=0.05)
    assert str(lengths) == text


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "5:2", "1:2:3", "lognormal:5", "lognormal:5:x", "1.5", "lognormal:nan:1", "99999999"],
)
def test_lengths_that_are_none(text):
    with pytest.raises(InvalidRequest, match="--input-tokens"):
        Lengths.parse("--input-tokens", text)


def test_equal_contents_are_equal_tokens_and_others_are_not():
    vocabulary = Vocabulary(seed=5, size=1000)
    one = vocabulary.token_ids(Piece(7, 64))
    assert one == vocabulary.token_ids(Piece(7, 64))
    assert one[:20] == vocabulary.token_ids(Piece(7, 20))
    others = [
        vocabulary.token_ids(Piece(8, 64)),
        Vocabulary(6, 1000).token_ids(Piece(7, 64)),
        Vocabulary(5, 1000, 1).token_ids(Piece(7, 64)),
    ]
    assert all(one != other for other in others)
    assert min(one) >= 125
    assert max(one) < 875
    assert len(vocabulary.text(Piece(7, 64)).split()) == 64


_PRINT_PLAN = """
from tests.unit.bench.serve.test_plan import shape, Arrivals, at_times, Vocabulary
times = Arrivals("gamma", 3.0, 0.5).first(30, 11)
plan = at_times(shape(prefix_tokens=40, num_documents=9, retrieved=2).conversations(30, 11), times)
tokens = [Vocabulary(11, 500).token_ids(p) for c in plan.conversations for t in c.turns for p in t.pieces]
print(plan.digest(), tokens)
"""


def test_the_same_bytes_in_every_process():
    """Also where Python's own hashes differ."""
    told = [
        subprocess.run(
            [sys.executable, "-c", _PRINT_PLAN],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for number in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0]) > 1000


def test_the_first_conversations_do_not_depend_on_how_many_follow():
    some = shape(prefix_tokens=10, num_prefixes=4, turns=Lengths.parse("", "1:3"), think_s=2.0)
    assert some.conversations(50, 9)[:20] == some.conversations(20, 9)
    assert some.conversations(20, 8) != some.conversations(20, 9)


def test_system_prompts_are_shared_by_popularity():
    found = shape(prefix_tokens=100, num_prefixes=3, zipf=1.0).conversations(3000, 0)
    counts = np.bincount([one.turns[0].pieces[0].content for one in found])
    assert counts / counts.sum() == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.03)
    assert all(one.turns[0].pieces[0].num_tokens == 100 for one in found)


def test_documents_stand_in_one_order_unless_shuffled():
    fields = {"num_documents": 10, "document_tokens": 50, "retrieved": 4, "zipf": 0.0}
    in_order = at_times(shape(**fields).conversations(400, 0), range(400))
    shuffled = at_times(shape(**fields, shuffle_documents=True).conversations(400, 0), range(400))
    for one in in_order.conversations:
        contents = [piece.content for piece in one.turns[0].pieces[:-1]]
        assert contents == sorted(set(contents))
        assert len(contents) == 4
    assert in_order.bounds().hit_rate > 1.2 * shuffled.bounds().hit_rate


def test_a_conversation_repeats_what_was_said():
    [talk] = shape(prefix_tokens=10, turns=Lengths.parse("", "3"), think_s=1.0).conversations(1, 0)
    first, second, third = talk.turns
    assert second.pieces[: len(first.pieces)] == first.pieces
    assert second.pieces[len(first.pieces)].answer_to == 0
    assert third.pieces[: len(second.pieces)] == second.pieces
    assert third.pieces[len(second.pieces)].answer_to == 1
    assert first.think_s == 0.0
    assert second.think_s > 0.0
    bounds = at_times([talk], [0.0]).bounds()
    answered = (first.input_tokens + first.output_tokens, second.input_tokens + second.output_tokens)
    assert bounds.by_request == (0, *answered)


def test_what_a_cache_could_find_ends_at_the_first_difference():
    a, b, c = (Piece(number, 10) for number in range(3))
    shared = SharedPrefixes()
    assert [
        shared.cached_tokens(pieces) for pieces in ([a, b], [a, c], [c, b], [a, b, c], [a, Piece(1, 5)])
    ] == [0, 10, 0, 20, 10]


def test_think_times_have_the_mean_that_was_asked_for():
    found = shape(turns=Lengths.parse("", "5"), think_s=3.0).conversations(1000, 0)
    pauses = np.array([turn.think_s for one in found for turn in one.turns[1:]])
    assert pauses.mean() == pytest.approx(3.0, rel=0.05)
    assert cv(pauses) == pytest.approx(1.0, rel=0.05)


def test_what_does_not_fit_the_model_is_refused_before_anything_is_sent():
    drawn = Drawn(shape(prefix_tokens=100), Arrivals("poisson", 1.0), seed=0, count=50)
    assert drawn.plan(None, 200)[0].num_requests == 50
    with pytest.raises(InvalidRequest, match="at most 110 here"):
        drawn.plan(None, 110)
