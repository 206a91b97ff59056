"""What is sent when, and what the clients are said to have seen: in virtual time, so to the digit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.bench.serve.arrivals import Arrivals
from headrace.bench.serve.content import Piece, Vocabulary
from headrace.bench.serve.lengths import Lengths
from headrace.bench.serve.measure import Measurer
from headrace.bench.serve.runner import Runner
from headrace.bench.serve.slo import Objective
from headrace.bench.serve.source import Drawn
from headrace.bench.serve.summary import summarise
from headrace.bench.serve.sweep import Bounds, highest_rate, sweep_json
from headrace.bench.serve.workload import Conversation, Plan, Shape, Turn, at_times
from tests.support.simulated_llm import SimulatedLlm
from tests.support.virtual_time import LoopClock, run_virtually

SLO = Objective.parse("--slo", "ttft:150")
FIXED = Shape(Lengths.parse("", "10"), Lengths.parse("", "5"))


def constant(count, rate, shape=FIXED):
    return at_times(shape.conversations(count, 0), Arrivals("constant", rate).first(count, 0))


def ran(plan, *, max_in_flight=None, **server):
    """Runner and server when all is over."""

    async def run():
        llm = SimulatedLlm(**server)
        runner = Runner(llm, Vocabulary(0, 1000), LoopClock(), "t", max_in_flight)
        await runner.run(plan)
        return runner, llm

    return run_virtually(run())


def summary_of(plan, runner, objective=SLO):
    return summarise(plan, runner.records, objective, runner.stalls_s, seed=0)


def test_each_request_is_sent_when_it_is_due_whatever_the_server_does():
    plan = at_times(FIXED.conversations(40, 0), Arrivals("poisson", 20.0).first(40, 3))
    runner, llm = ran(plan, service_s=lambda _: 0.5)
    start_s = llm.asked[0][0] - plan.conversations[0].at_s
    assert [at_s - start_s for at_s, _ in llm.asked] == pytest.approx(
        [one.at_s for one in plan.conversations]
    )
    assert max(record.lateness_ms for record in runner.records) == pytest.approx(0.0, abs=1e-6)
    assert [question.request_id for _, question in llm.asked] == [f"t-{number}-0" for number in range(40)]


def test_latency_counts_all_that_a_stall_delays():
    """Coordinated omission: ten requests a second, served in 50 ms each, and a second in which nothing is served."""
    plan = constant(100, 10.0)
    runner, _ = ran(plan, service_s=lambda _: 0.05, stall=(5.0, 6.0))
    open_loop = summary_of(plan, runner)
    # The first one due in it waits for its end; each that follows is due 100 ms later and served 50 ms later.
    delayed = sorted((record.ttft_ms for record in runner.records if record.ttft_ms > 51), reverse=True)
    assert delayed == pytest.approx([1000 - 50 * number for number in range(19)])
    assert open_loop["p95_ttft_ms"] > 700
    assert open_loop["slo"]["attainment"] == pytest.approx(1 - 17 / 100)
    # A client that waits for each answer before it asks again notices the stall once.
    closed = Plan(plan.conversations, concurrency=1)
    waiting, _ = ran(closed, service_s=lambda _: 0.05, stall=(2.0, 3.0))
    assert sum(record.ttft_ms > 51 for record in waiting.records) == 1
    assert summary_of(closed, waiting)["p95_ttft_ms"] == pytest.approx(50.0)


def test_waiting_in_the_client_is_latency_too():
    plan = constant(20, 1000.0)
    runner, llm = ran(plan, service_s=lambda _: 0.1, max_in_flight=1)
    assert llm.most_at_once == 1
    records = sorted(runner.records, key=lambda record: record.scheduled_s)
    assert records[-1].ttft_ms == pytest.approx(20 * 100 - 19, abs=1.5)
    assert records[-1].ttft_from_sent_ms == pytest.approx(100.0)
    assert records[-1].lateness_ms == pytest.approx(0.0, abs=1e-6)  # the limit was asked for
    summary = summary_of(plan, runner)
    assert summary["client"]["valid"]
    assert summary["client"]["ttft_from_sent_ms"]["p50"] == pytest.approx(100.0)


def test_ttft_itl_and_end_to_end():
    plan = constant(8, 1.0)
    runner, _ = ran(plan, service_s=lambda _: 0.2, gap_s=0.03)
    summary = summary_of(plan, runner)
    expected = {"ttft": 200, "itl": 30, "tpot": 30, "tbt10": 30, "e2el": 320}
    for name, value in expected.items():
        for kind in ("mean", "median", "p99"):
            assert summary[f"{kind}_{name}_ms"] == pytest.approx(value)
    assert summary["duration"] == pytest.approx(7.32)
    assert summary["output_throughput"] == pytest.approx(40 / 7.32)
    assert summary["total_input_tokens"] == 80


def test_a_closed_loop_keeps_its_number_of_conversations():
    plan = Plan(tuple(FIXED.conversations(12, 0)), concurrency=3)
    runner, llm = ran(plan, service_s=lambda _: 0.0, gap_s=0.1)
    assert llm.most_at_once == 3
    assert len(runner.records) == 12
    assert max(record.end_s for record in runner.records) == pytest.approx(4 * 0.4)


def test_turns_follow_the_answer_and_the_pause_and_repeat_the_real_answer():
    asked = (Piece(1, 4), Piece(2, 3))
    second = (*asked, Piece(3, 5, answer_to=0), Piece(4, 2))
    talk = Conversation((Turn(asked, 5), Turn(second, 2, think_s=7.0)), at_s=1.0)
    runner, llm = ran(Plan((talk,)), service_s=lambda _: 0.5, gap_s=0.25)
    (first_s, first), (second_s, question) = llm.asked
    assert second_s - first_s == pytest.approx(0.5 + 4 * 0.25 + 7.0)
    assert question.prompt == [*first.prompt, 0, 1, 2, 3, 4, *Vocabulary(0, 1000).token_ids(Piece(4, 2))]
    assert first.conversation == question.conversation
    assert (first.needs_token_ids, question.needs_token_ids) == (True, False)
    assert [record.ttft_ms for record in runner.records] == pytest.approx([500.0, 500.0])
    assert [record.expected_cached_tokens for record in runner.records] == [0, 12]


def test_what_follows_a_failure_is_not_sent_and_counts_as_offered():
    class Failing(SimulatedLlm):
        async def ask(self, question, answer):
            await super().ask(question, answer)
            if question.request_id == "t-0-0":
                answer.fail("rejected", "no room")

    turns = tuple(Turn((Piece(number, 4),), 2) for number in range(4))
    plan = Plan((Conversation(turns), Conversation(turns[:1])))

    async def run():
        runner = Runner(Failing(lambda _: 0.1), Vocabulary(0, 1000), LoopClock(), "t")
        await runner.run(plan)
        return runner

    summary = summary_of(plan, run_virtually(run()), Objective({}))
    counts = {name: summary[name] for name in ("num_prompts", "completed", "rejected", "not_sent")}
    assert counts == {"num_prompts": 5, "completed": 1, "rejected": 1, "not_sent": 3}
    assert summary["slo"]["attainment"] == 0.2
    assert summary["errors"] == {"no room": 1}


def test_a_client_that_lags_quotes_no_tails():
    """Something holds its event loop up for 50 ms, again and again."""
    plan = constant(100, 20.0)

    async def run():
        loop = asyncio.get_running_loop()
        runner = Runner(SimulatedLlm(lambda _: 0.01), Vocabulary(0, 1000), LoopClock(), "t")

        async def hold_up():
            while True:
                await asyncio.sleep(0.11)
                loop.advance(0.05)

        busy = asyncio.create_task(hold_up())
        await runner.run(plan)
        busy.cancel()
        return runner

    summary = summary_of(plan, run_virtually(run()))
    assert not summary["client"]["valid"]
    assert "no tails are quoted" in summary["client"]["reason"]
    assert summary["median_ttft_ms"] is not None
    assert {
        summary[f"p{percent}_{name}_ms"] for percent in (90, 95, 99) for name in ("ttft", "itl", "e2el")
    } == {None}
    assert "p99_ttft_ms" not in summary["intervals"]
    assert summary["client"]["ttft_from_sent_ms"]["p99"] is None


def test_piling_up_is_noticed():
    overloaded, steady = constant(200, 20.0), constant(200, 5.0)
    for plan, expected in ((overloaded, True), (steady, False)):
        runner, _ = ran(plan, service_s=lambda _: 0.1)
        assert summary_of(plan, runner)["timeline"]["saturated"] is expected


def test_the_timeline_adds_up():
    plan = constant(50, 10.0)
    runner, _ = ran(plan, service_s=lambda _: 0.05, gap_s=0.1)
    timeline = summary_of(plan, runner)["timeline"]
    assert sum(timeline["tokens_per_s"]) * timeline["dt_s"] == pytest.approx(250)
    assert sum(timeline["due_per_s"]) * timeline["dt_s"] == pytest.approx(50)
    assert timeline["in_flight"][-1] == 0
    assert np.median(timeline["in_flight"]) == pytest.approx(4.5, abs=0.6)  # 10 a second for 0.45 s each


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1.0, 40.0, 10.0), (20.0, 40.0, None), (1.0, 4.0, 4.0)]
)
def test_the_sweep_finds_the_knee(low, high, expected):
    """Constant arrivals at a server of 100 ms each: nobody waits up to 10 a second, beyond it ever longer."""
    source = Drawn(FIXED, Arrivals("constant", 1.0), seed=0, count=400)
    bounds = Bounds(low, high, attainment=0.95)

    async def run():
        llm = SimulatedLlm(lambda _: 0.1)
        measurer = Measurer(llm, LoopClock(), SLO, 1000, seed=0)
        prompts: list[object] = []

        async def measure_at(rate):
            plan, facts = source.plan(rate, None)
            summary = await measurer.measure(plan, {**facts, "label": "x"}, None, phase=len(prompts) + 1)
            prompts.append(llm.asked[-1][1].prompt)
            return summary

        seen: list[int] = []
        probes = await highest_rate(bounds, measure_at, lambda probes: seen.append(len(probes)))
        assert seen == list(range(1, len(probes) + 1))
        return probes, prompts

    probes, prompts = run_virtually(run())
    content = sweep_json(bounds, probes)
    highest = content["highest_rate"]
    if expected is None:
        assert highest is None
    else:
        assert highest <= expected + 0.01
        assert highest * bounds.resolution >= expected
    rates = [run["rate"] for run in content["runs"]]
    assert rates == sorted(rates)
    assert all(run["is_met"] == (run["rate"] <= 10.01) for run in content["runs"])
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)  # no run warms the next one's caches
