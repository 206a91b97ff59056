"""Traces as plans: when, how long, and what prompts share."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from headrace.bench.serve.content import Vocabulary
from headrace.bench.serve.replay import Replay
from headrace.bench.serve.runner import Runner
from headrace.bench.serve.source import Replayed
from headrace.errors import InvalidRequest
from headrace.traces.reading import read_trace
from tests.support.simulated_llm import SimulatedLlm
from tests.support.virtual_time import LoopClock, run_virtually


def written(tmp_path, rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(path)


def mooncake(at_ms, input_length, hash_ids, output_length=32, **more):
    return {
        "timestamp": at_ms,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
        **more,
    }


def times(plan):
    return [conversation.at_s for conversation in plan.conversations]


def test_times_and_their_scale(tmp_path):
    trace = written(tmp_path, [mooncake(at, 100, [at]) for at in (0, 1500, 4000)])
    assert times(Replay().plan(trace, None, 0)[0]) == [0.0, 1.5, 4.0]
    plan, _ = Replay(time_scale=4.0).plan(trace, None, 0)
    assert times(plan) == [0.0, 0.375, 1.0]

    async def sent():
        llm = SimulatedLlm(lambda _: 0.0)
        runner = Runner(llm, Vocabulary(0, 1000), LoopClock(), "t")
        await runner.run(plan)
        return [at_s - llm.asked[0][0] for at_s, _ in llm.asked]

    assert run_virtually(sent()) == pytest.approx([0.0, 0.375, 1.0])


def test_a_coarse_clock_is_spread_unless_told_otherwise(tmp_path):
    rows = [mooncake(3000 * (number // 10), 100, [number]) for number in range(100)]
    trace = written(tmp_path, rows)
    spread = np.array(times(Replay().plan(trace, None, 0)[0]))
    assert len(set(spread)) == 100
    assert (spread // 3.0 == np.arange(100) // 10).all()
    assert spread.tolist() == times(Replay().plan(trace, None, 0)[0])
    assert spread.tolist() != times(Replay().plan(trace, None, 1)[0])
    as_it_is = times(Replay(dejitter=False).plan(trace, None, 0)[0])
    assert as_it_is == [3.0 * (number // 10) for number in range(100)]


@pytest.mark.parametrize(
    ("scale", "block", "first", "second"), [(1, 512, 1300, 700), (Fraction(1, 16), 32, 82, 44)]
)
def test_equal_blocks_are_equal_tokens_at_any_length_scale(tmp_path, scale, block, first, second):
    """Prompts that share their first block: 1,300 and 700 tokens."""
    trace = written(tmp_path, [mooncake(0, 1300, [7, 8, 9]), mooncake(1, 700, [7, 5], output_length=40)])
    plan, _ = Replay(length_scale=Fraction(scale)).plan(trace, None, 0)
    turns = [conversation.turns[0] for conversation in plan.conversations]
    vocabulary = Vocabulary(0, 1000)
    prompts = [[token for piece in turn.pieces for token in vocabulary.token_ids(piece)] for turn in turns]
    assert [len(prompt) for prompt in prompts] == [first, second]
    assert prompts[0][:block] == prompts[1][:block]
    assert prompts[0][block : block + 10] != prompts[1][block : block + 10]
    assert plan.bounds().by_request == (0, block)
    assert turns[1].output_tokens == -(-40 * scale.numerator // scale.denominator)


def test_tokens_in_no_block_are_shared_with_nobody(tmp_path):
    trace = written(tmp_path, [mooncake(0, 600, [1]), mooncake(1, 600, [1])])
    plan, _ = Replay().plan(trace, None, 0)
    assert plan.bounds().by_request == (0, 512)


def test_sessions_follow_their_own_answers(tmp_path):
    rows = [
        mooncake(0, 600, [1, 2], session_id="a", turn=1),
        mooncake(9000, 700, [1, 3], session_id="a", turn=2, delay_ms=2500),
        mooncake(0, 600, [4, 5], session_id="b", turn=1),
        mooncake(9000, 700, [4, 6], session_id="b", turn=2, delay_ms=900_000),
    ]
    plan, _ = Replay(session_rate=0.5).plan(written(tmp_path, rows), None, 0)
    first, second = plan.conversations
    assert [len(one.turns) for one in (first, second)] == [2, 2]
    assert first.at_s == 0.0
    assert second.at_s > 0.0
    assert first.turns[1].think_s == 2.5
    assert second.turns[1].think_s == 60.0  # nobody is waited for longer
    assert plan.bounds().by_request == (0, 512, 0, 512)


def test_raw_agentic_sessions(tmp_path):
    requests = [
        {"t": 0.0, "in": 128, "out": 5, "hash_ids": [1, 2], "think_time": 0.0},
        {"t": 4.0, "in": 192, "out": 6, "hash_ids": [1, 2, 3], "think_time": 1.5},
    ]
    rows = [{"id": "s", "block_size": 64, "requests": requests}]
    plan, _ = Replay().plan(written(tmp_path, rows), None, 0)
    [talk] = plan.conversations
    assert [turn.input_tokens for turn in talk.turns] == [128, 192]
    assert talk.turns[1].think_s == 1.5
    assert plan.bounds().by_request == (0, 128)


def test_bailian(tmp_path):
    rows = [
        {
            "chat_id": 0,
            "parent_chat_id": -1,
            "timestamp": 10.0,
            "input_length": 32,
            "output_length": 4,
            "hash_ids": [1, 2],
        },
        {
            "chat_id": 1,
            "parent_chat_id": 0,
            "timestamp": 30.0,
            "input_length": 48,
            "output_length": 4,
            "hash_ids": [1, 2, 3],
        },
    ]
    plan, _ = Replay(time_scale=2.0).plan(written(tmp_path, rows), None, 0)
    assert times(plan) == [0.0, 10.0]
    assert plan.bounds().by_request == (0, 32)


def test_a_part_of_a_trace(tmp_path):
    trace = written(tmp_path, [mooncake(1000 * number, 100, [number]) for number in range(20)])
    plan, _ = Replay(start_s=5.0, end_s=9.0).plan(trace, None, 0)
    assert times(plan) == [0.0, 1.0, 2.0, 3.0]
    assert plan.conversations[0].turns[0].pieces[0].content == 5
    assert len(Replay(max_requests=3).plan(trace, None, 0)[0].conversations) == 3


def test_what_is_too_long_for_the_model_is_left_out_and_counted(tmp_path):
    rows = [
        mooncake(0, 100, [1], session_id="a", turn=1),
        mooncake(1, 5000, list(range(2, 12)), session_id="a", turn=2, delay_ms=1),
        mooncake(2, 200, [12], session_id="a", turn=3, delay_ms=1),
        mooncake(0, 9000, list(range(20, 38)), session_id="b", turn=1),
    ]
    plan, left_out = Replay().plan(written(tmp_path, rows), 4096, 0)
    assert (plan.num_requests, left_out) == (1, 3)
    with pytest.raises(InvalidRequest, match="none of 4 requests"):
        Replay().plan(written(tmp_path, rows), 50, 0)


def test_the_source_tells_what_was_replayed(tmp_path):
    trace = written(tmp_path, [mooncake(1000 * number, 100, [number]) for number in range(11)])
    plan, facts = Replayed(trace, Replay(time_scale=2.0), seed=0).plan(5.0, None)
    assert plan.duration_s == 2.0
    assert facts["request_rate"] == pytest.approx(5.5)
    assert facts["workload"]["time_scale"] == 5.0
    assert facts["workload"]["sha256"] == trace.sha256


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(2), Fraction(0), Fraction(1, 1024)])
def test_length_scales_that_break_blocks(tmp_path, scale):
    with pytest.raises(InvalidRequest, match="--length-scale"):
        Replay(length_scale=scale).plan(written(tmp_path, [mooncake(0, 100, [1])]), None, 0)
