"""The fits find the true costs from noisy reports, and stay sensible without them."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.clock import VirtualClock
from headrace.directory.records import Role
from headrace.rpc.v1 import worker_pb2
from router.costs import (
    DecodeCost,
    FleetCosts,
    PrefillCost,
    RecursiveFit,
    TransferCost,
    WorkerCosts,
    prior_costs,
)
from tests.unit.router.queue_simulation import LINK, TRUE, Simulation, _record, shared_prefixes

SLOW = WorkerCosts(PrefillCost(20e-3, 1e-3, 2e-8), DecodeCost(40e-3, 1e-3, 1e-7))


def report(costs: WorkerCosts, random: Random, **changes) -> worker_pb2.SequenceEnd:
    tokens, context = int(10 ** random.uniform(1, 4)), random.choice((0, 0, 500, 20_000))
    batch, batch_context = random.uniform(1, 60), random.uniform(100, 400_000)
    num_bytes = int(10 ** random.uniform(4, 9))
    noise = lambda: random.lognormvariate(0, 0.1)  # noqa: E731
    fields = {
        "prefill_tokens": tokens,
        "context_tokens": context,
        "prefill_s": costs.prefill.seconds(tokens, context) * noise(),
        "decode_tokens": 50,
        "decode_s": 50 * costs.decode.seconds(batch, batch_context) * noise(),
        "mean_batch": batch,
        "mean_batch_context_tokens": batch_context,
        "prefill_worker": "p0",
        "bytes_moved": num_bytes,
        "transfer_s": LINK.seconds(num_bytes) * noise(),
    }
    return worker_pb2.SequenceEnd(**fields | changes)


def worker_record(name, kind="a", rate=0.0):
    base = _record(name, Role.BOTH)
    return replace(base, kind=kind, load=replace(base.load, prefill_tokens_per_s=rate))


def assert_close(costs: WorkerCosts, true: WorkerCosts, tolerance=0.07):
    for tokens, context in ((100, 0), (1000, 0), (8000, 0), (1000, 20_000)):
        expected = true.prefill.seconds(tokens, context)
        assert costs.prefill.seconds(tokens, context) == pytest.approx(expected, rel=tolerance)
    for batch, context in ((1, 1000), (32, 50_000), (60, 400_000)):
        assert costs.decode.seconds(batch, context) == pytest.approx(
            true.decode.seconds(batch, context), rel=tolerance
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("true", [TRUE, SLOW])
def test_the_fits_converge_to_the_true_costs_from_noisy_reports(seed, true):
    random, fleet, p0 = Random(seed), FleetCosts(), worker_record("p0")
    d0 = worker_record("d0")
    for _ in range(400):
        fleet.observe(p0, d0, report(true, random))
    assert_close(fleet.of(p0), true)
    link = fleet.transfer("p0", "d0")
    for num_bytes in (1e5, 1e7, 1e9):
        assert link.seconds(num_bytes) == pytest.approx(LINK.seconds(num_bytes), rel=0.25)


def test_kinds_are_told_apart_and_follow_when_they_change():
    random, fleet = Random(1), FleetCosts()
    fast, slow = worker_record("p0", "fast"), worker_record("p1", "slow")
    for _ in range(300):
        fleet.observe(fast, fast, report(TRUE, random))
        fleet.observe(slow, slow, report(SLOW, random))
    assert_close(fleet.of(fast), TRUE)
    assert_close(fleet.of(slow), SLOW, tolerance=0.15)
    for _ in range(1200):
        fleet.observe(slow, slow, report(TRUE, random))
    assert_close(fleet.of(slow), TRUE)


def test_a_new_kind_is_predicted_by_its_published_rate_else_as_the_fleet():
    random, fleet = Random(1), FleetCosts()
    assert fleet.of(worker_record("p0", "a")) == prior_costs(0)
    for _ in range(300):
        fleet.observe(worker_record("p0", "a"), worker_record("p0", "a"), report(TRUE, random))
    assert fleet.of(worker_record("p1", "b", rate=500.0)) == prior_costs(500.0)
    assert_close(fleet.of(worker_record("p2", "c")), TRUE)


def test_a_slow_link_is_known_by_its_ends():
    random, fleet = Random(1), FleetCosts()
    p0, p1, d0 = (worker_record(name) for name in ("p0", "p1", "d0"))
    for _ in range(100):
        fleet.observe(p0, d0, report(TRUE, random))
        end = report(TRUE, random)
        end.transfer_s *= 5
        fleet.observe(p1, d0, end)
    ratio = fleet.transfer("p1", "d0").seconds(1e8) / fleet.transfer("p0", "d0").seconds(1e8)
    assert 3 < ratio < 8


def test_alike_observations_are_fitted_near_the_prior():
    fit = RecursiveFit((1e-3, 1e-4, 1e-9))
    for _ in range(500):
        fit.observe((1.0, 100.0, 5000.0), 0.1)
    base, token, _ = fit.coefficients
    assert base + 100 * token == pytest.approx(0.1, rel=0.03)
    assert 1e-3 <= base < 0.05


def test_one_absurd_report_moves_little():
    random, fleet, p0 = Random(1), FleetCosts(), worker_record("p0")
    for _ in range(200):
        fleet.observe(p0, p0, report(TRUE, random))
    end = report(TRUE, random)
    end.prefill_s *= 1000
    fleet.observe(p0, p0, end)
    assert fleet.of(p0).prefill.seconds(1000, 0) < 2 * TRUE.prefill.seconds(1000, 0)


def test_reports_without_figures_teach_nothing():
    fleet, p0 = FleetCosts(), worker_record("p0")
    fleet.observe(p0, p0, worker_pb2.SequenceEnd())
    fleet.observe(None, None, worker_pb2.SequenceEnd(prefill_tokens=10, prefill_s=float("nan")))
    assert fleet.of(p0) == prior_costs(0)
    assert fleet.transfer("a", "b").seconds(0) == 0


@given(
    st.lists(
        st.tuples(st.floats(1, 1e5), st.floats(0, 1e5), st.floats(1e-6, 1e3)),
        max_size=60,
    )
)
def test_costs_are_never_negative_whatever_is_reported(observations):
    fit = RecursiveFit((1e-3, 1e-4, 1e-9))
    for tokens, context, seconds in observations:
        fit.observe((1.0, tokens, tokens * (context + tokens / 2)), seconds)
    assert min(fit.coefficients) >= 0
    assert PrefillCost(*fit.coefficients).seconds(100, 0) >= 0


def test_a_fleet_at_work_learns_its_costs():
    result = Simulation("predicted_time").run(shared_prefixes(3, num_requests=1000, rate=40))
    costs = result.costs.of(_record("p0", Role.PREFILL))
    for tokens, context in ((100, 1000), (500, 0), (2000, 0)):
        expected = TRUE.prefill.seconds(tokens, context)
        assert costs.prefill.seconds(tokens, context) == pytest.approx(expected, rel=0.1)
    assert isinstance(result.costs.transfer("p0", "d0"), TransferCost)


def test_what_a_request_takes_grows_with_prompt_and_answer_and_answers_are_as_long_as_they_were():
    fleet = FleetCosts()
    costs = prior_costs(0)
    short = fleet.request_s(1000, 1)
    assert short == pytest.approx(costs.prefill.seconds(1000, 0) + costs.decode.sequence_s, rel=0.02)
    assert fleet.request_s(2000, 1) > 1.9 * short
    assert fleet.request_s(1000, 1, num_choices=3) > short
    before = fleet.request_s(1000, 10_000)
    for _ in range(300):
        fleet.observe(None, None, worker_pb2.SequenceEnd(decode_tokens=1000, decode_s=101.0, mean_batch=1))
    assert fleet.request_s(1000, 10_000) > before
    assert fleet.least_prefill_s(1000) < fleet.request_s(1000, 1) / 5


def test_a_link_that_is_measured_after_a_long_silence_is_believed():
    """Nobody uses a slow link, so the only news of it are its reader's own measurements."""
    random, clock = Random(1), VirtualClock()
    fleet = FleetCosts(clock)
    p0, d0 = worker_record("p0"), worker_record("d0")
    for _ in range(50):
        fleet.observe(p0, d0, report(TRUE, random))
    usual_s = fleet.transfer("p0", "d0").seconds(1e7)
    for _ in range(10):
        end = report(TRUE, random)
        end.transfer_s *= 100
        fleet.observe(p0, d0, end)
    assert fleet.transfer("p0", "d0").seconds(1e7) > 5 * usual_s
    for _ in range(5):
        clock.advance(10.0)
        fleet.observe_link(
            "d0", worker_pb2.Link(worker_id="p0", bytes=1 << 20, seconds=LINK.seconds(1 << 20))
        )
    assert fleet.transfer("p0", "d0").seconds(1e7) < 2 * usual_s


def test_one_report_among_many_moves_a_pair_a_little():
    random, fleet = Random(1), FleetCosts(VirtualClock())
    p0, d0 = worker_record("p0"), worker_record("d0")
    for _ in range(50):
        fleet.observe(p0, d0, report(TRUE, random))
    usual_s = fleet.transfer("p0", "d0").seconds(1e7)
    fleet.observe_link(
        "d0", worker_pb2.Link(worker_id="p0", bytes=1 << 20, seconds=3 * LINK.seconds(1 << 20))
    )
    assert usual_s < fleet.transfer("p0", "d0").seconds(1e7) < 2 * usual_s
