"""Sampling settings through an engine with a real, small model: what each sequence gets, whatever runs beside it."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.engine.engine import Engine
from headrace.engine.logprobs import logprobs
from headrace.engine.sequence import Failed, NewToken, PromptLogprobs, Sequence, Started
from headrace.errors import InternalError
from headrace.sampling_params import SamplingParams, TokenLogprobs
from tests.support.audit import assert_idle_pool
from tests.support.engines import BLOCK_SIZE, engine_for
from tests.support.hf_reference import reference_model
from tests.support.tiny_llama import VOCAB_SIZE

EOS = 258
PROMPT = [(7 * i) % 250 for i in range(3 * BLOCK_SIZE + 5)]


@pytest.fixture(scope="module")
def engine(tiny_model_files) -> Engine:
    return engine_for(tiny_model_files, ends=True, num_blocks=60, max_step_tokens=40)


@pytest.fixture(scope="module")
def reference_logits(tiny_model_files) -> torch.Tensor:
    """Of every position of the prompt, by transformers."""
    with torch.inference_mode():
        return reference_model(tiny_model_files)(torch.tensor([PROMPT])).logits[0]


class Answers:
    """Runs sequences side by side and keeps what each got."""

    def __init__(self, engine: Engine, **sequences: dict) -> None:
        for name, settings in sequences.items():
            prompt = settings.pop("prompt", PROMPT)
            sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "seed": 1, **settings})
            engine.submit(Sequence(name, list(prompt), len(prompt), sampling, root=b"root"))
        self.events = []
        while engine.has_work:
            self.events += engine.step().events
        assert_idle_pool(engine.audit())

    def new(self, name: str, choice: int = 0) -> list[NewToken]:
        return [
            e for e in self.events if isinstance(e, NewToken) and (e.sequence_id, e.choice) == (name, choice)
        ]

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        return [event.token_id for event in self.new(name, choice)]

    def prompt_logprobs(self, name: str) -> list[TokenLogprobs]:
        parts = [e.entries for e in self.events if isinstance(e, PromptLogprobs) and e.sequence_id == name]
        return [entry for part in parts for entry in part]

    def cached_tokens(self, name: str) -> int:
        [started] = [e for e in self.events if isinstance(e, Started) and e.sequence_id == name]
        return started.num_cached_tokens


MIX = {
    "greedy": {},
    "warm": {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    "penalized": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "biased": {"logit_bias": ((11, 4.0), (12, -100.0))},
    "few": {"temperature": 2.0, "allowed_token_ids": (5, 6, 7), "banned_token_ids": (6,)},
    "late": {"min_tokens": 6, "logit_bias": ((EOS, 100.0),)},
    "told": {"logprobs": 5, "min_p": 0.05, "temperature": 1.0},
}


def test_each_gets_in_a_batch_what_it_gets_alone(engine):
    together = Answers(engine, **{name: dict(settings) for name, settings in MIX.items()})
    for name, settings in MIX.items():
        alone = Answers(engine, **{name: dict(settings)})
        assert together.tokens(name) == alone.tokens(name), name
        assert len(together.tokens(name)) == (7 if name == "late" else 8)
    assert set(together.tokens("few")) <= {5, 7}
    assert together.tokens("late")[-1] == EOS
    assert EOS not in together.tokens("late")[:-1]


def test_sampled_answers_are_the_same_again_and_differ_by_seed(engine):
    first, again, other = (
        Answers(engine, a={"temperature": 1.0, "seed": seed, "max_tokens": 16}).tokens("a")
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_choices_are_what_each_would_be_alone(engine):
    settings = {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.2, "ignore_eos": True}
    together = Answers(engine, a={**settings, "n": 3})
    sampling = SamplingParams(max_tokens=8, **settings)
    for choice in range(3):
        engine.submit(
            Sequence("a", list(PROMPT), len(PROMPT), sampling, b"root", choices=range(choice, choice + 1))
        )
        alone = Answers(engine)
        assert together.tokens("a", choice) == alone.tokens("a", choice)
    assert len({tuple(together.tokens("a", choice)) for choice in range(3)}) == 3


def close(found: TokenLogprobs, expected: TokenLogprobs) -> bool:
    return found.token_id == expected.token_id and math.isclose(found.logprob, expected.logprob, abs_tol=1e-4)


def test_logprobs_are_those_of_the_model_whatever_the_settings(engine, reference_logits):
    settings = {"max_tokens": 1, "logprobs": 5, "temperature": 0.3, "logit_bias": ((17, 100.0),)}
    [event] = Answers(engine, a=settings).new("a")
    assert event.token_id == 17  # the bias decides
    [expected] = logprobs(reference_logits[-1:], [17], [5])
    assert close(event.logprobs, expected)
    assert [i for i, _ in event.logprobs.top] == [i for i, _ in expected.top]


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"logit_bias": tuple((i, -100.0) for i in range(1, VOCAB_SIZE))}]
)
def test_pa_05_logprobs_are_finite_where_nearly_nothing_can_be_drawn(engine, settings):
    for event in Answers(engine, a={"logprobs": 5, "temperature": 1.0, **settings}).new("a"):
        assert math.isfinite(event.logprobs.logprob)
        assert len(event.logprobs.top) == 5
        assert all(math.isfinite(value) for _, value in event.logprobs.top)


@pytest.mark.parametrize("is_cached", [False, True])
def test_prompt_logprobs_are_those_of_the_model_also_past_a_cached_prefix(
    engine, reference_logits, is_cached
):
    engine.reset_cache()
    if is_cached:
        Answers(engine, warm={})
    answers = Answers(engine, a={"prompt_logprobs": 3, "max_tokens": 2}, b={"prompt_logprobs": 0})
    expected = logprobs(reference_logits[:-1], PROMPT[1:], [3] * (len(PROMPT) - 1))
    found = answers.prompt_logprobs("a")
    assert [entry.token_id for entry in found] == PROMPT[1:]
    assert all(map(close, found, expected))
    assert all(len(entry.top) == 3 for entry in found)
    assert all(map(close, answers.prompt_logprobs("b"), expected))
    assert answers.cached_tokens("a") == 0  # all of it was computed, and that is what is reported
    assert answers.tokens("a") == Answers(engine, c={"max_tokens": 2}).tokens("c")


def test_a_prompt_of_one_token_has_no_prompt_logprobs(engine):
    answers = Answers(engine, a={"prompt": [3], "prompt_logprobs": 1})
    assert answers.prompt_logprobs("a") == []
    assert len(answers.tokens("a")) == 8


def test_pa_02_a_bias_on_the_last_token_of_the_vocabulary_decides(engine):
    assert (
        Answers(engine, a={"logit_bias": ((VOCAB_SIZE - 1, 100.0),), "max_tokens": 3}).tokens("a")
        == [259] * 3
    )


def test_logits_that_are_not_finite_fail_their_own_sequence(engine, monkeypatch):
    expected = Answers(engine, b={}).tokens("b")
    forward = engine._runner._forward
    whole = forward.logits

    def logits(rows):
        out = whole(rows)
        if len(rows) == 2:
            out[0, 7] = math.nan
        return out

    monkeypatch.setattr(forward, "logits", logits)
    answers = Answers(engine, a={}, b={})
    [failed] = [event for event in answers.events if isinstance(event, Failed)]
    assert failed.sequence_id == "a"
    assert isinstance(failed.error, InternalError)
    assert answers.tokens("b") == expected
