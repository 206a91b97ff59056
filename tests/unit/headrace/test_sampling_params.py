"""Limits of sampling parameters, from both sides."""

import math
from dataclasses import replace

import pytest

from headrace.errors import InvalidRequest
from headrace.grammar import Grammar, GrammarKind
from headrace.sampling_params import SamplingParams, check_token_ids, validate

VOCAB, LIMIT = 100, 64


def checked(params: SamplingParams | None = None, *, prompt: int = 8, **changes) -> SamplingParams:
    params = replace(params or SamplingParams(max_tokens=1), **changes)
    return validate(params, num_prompt_tokens=prompt, max_model_tokens=LIMIT, vocab_size=VOCAB)


def refused(field: str, **changes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checked(**changes)
    assert caught.value.field == field
    return str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, -1e-9, 1e-9, 1e-5, 100.1, 1e9, 10**400])
def test_pa_01_temperatures_that_are_refused(value):
    refused("temperature", temperature=value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1e-4, 0.7, 1, 100.0])
def test_pa_01_temperatures_that_are_taken(value):
    assert checked(temperature=value).temperature == value


def test_pa_01_temperature_zero_is_greedy_and_the_default_is_one():
    assert checked(temperature=0).greedy
    assert checked(temperature=-0.0).greedy
    assert not checked().greedy
    assert checked().temperature == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -0.5, 1.0001, 1.5])
def test_pa_01_top_p_that_is_refused(value):
    assert "must be over 0 and at most 1" in refused("top_p", top_p=value)


@pytest.mark.parametrize("value", [1e-9, 0.5, 1, 1.0])
def test_pa_01_top_p_that_is_taken(value):
    assert checked(top_p=value).top_p == value


@pytest.mark.parametrize(
    ("value", "kept"), [(0, 0), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (VOCAB + 1, 0), (10**7, 0)]
)
def test_pa_01_top_k_over_the_vocabulary_is_off(value, kept):
    assert checked(top_k=value).top_k == kept


@pytest.mark.parametrize("value", [-2, -(10**9)])
def test_pa_01_negative_top_k_is_refused(value):
    refused("top_k", top_k=value)


def test_pa_01_top_k_of_minus_one_is_off():
    assert checked(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("min_p", [math.nan, math.inf, -0.1, 1.01]),
        ("repetition_penalty", [math.nan, math.inf, 0, -1, 1e9]),
        ("presence_penalty", [math.nan, -math.inf, -2.1, 2.1, 1e9]),
        ("frequency_penalty", [math.nan, math.inf, -2.1, 2.1, 1e9]),
        ("min_tokens", [-1, 2, 10**18]),
        ("logprobs", [-1, 21, 10**6]),
        ("prompt_logprobs", [-1, 21, 10**6]),
        ("n", [0, -1, 65, 1000, 10**6]),
    ],
)
def test_pa_01_pa_04_out_of_range_is_refused_and_named(field, values):
    for value in values:
        refused(field, **{field: value})


def test_pa_01_both_ends_of_each_range_are_taken():
    checked(min_p=0.0, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0)
    checked(min_p=1.0, repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=-2.0)
    checked(min_tokens=1, logprobs=0, prompt_logprobs=20, n=64)


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 100.1, -100.1])
def test_pa_01_bias_out_of_range_is_refused_with_its_token(bias):
    refused("logit_bias[7]", logit_bias=((3, 1.0), (7, bias)))


@pytest.mark.parametrize("token_id", [VOCAB, -1, 2**63])
def test_pa_02_bias_of_a_token_outside_the_vocabulary(token_id):
    assert str(token_id) in refused("logit_bias", logit_bias=((0, 1.0), (token_id, 1.0)))


@pytest.mark.parametrize("field", ["allowed_token_ids", "banned_token_ids"])
def test_pa_02_lists_of_tokens_outside_the_vocabulary(field):
    refused(field, **{field: (0, VOCAB)})
    checked(**{field: (0, VOCAB - 1)})


def test_pa_04_long_lists_are_refused():
    refused("logit_bias", logit_bias=tuple((i % VOCAB, 1.0) for i in range(1025)))
    refused("allowed_token_ids", allowed_token_ids=(1,) * 4097)
    refused("banned_token_ids", banned_token_ids=(1,) * 4097)


def test_lists_that_leave_no_token_are_refused():
    refused("allowed_token_ids", allowed_token_ids=(1, 2), banned_token_ids=(2, 1))
    checked(allowed_token_ids=(1, 2), banned_token_ids=(2,))


def test_settings_that_a_grammar_excludes_are_refused():
    grammar = Grammar(GrammarKind.REGEX, "a+")
    refused("ignore_eos", grammar=grammar, ignore_eos=True)
    refused("min_tokens", grammar=grammar, min_tokens=1)
    checked(grammar=grammar)


@pytest.mark.parametrize("token_ids", [[-1], [VOCAB], [2**63], [0, 1, VOCAB, 2]])
def test_pa_02_ids_outside_the_vocabulary_are_refused_and_named(token_ids):
    with pytest.raises(InvalidRequest) as caught:
        check_token_ids("token_ids", token_ids, VOCAB)
    assert caught.value.field == "token_ids"
    assert caught.value.value in (-1, VOCAB, 2**63)
    assert f"0..{VOCAB - 1}" in str(caught.value)


@pytest.mark.parametrize("token_ids", [[], [0], [VOCAB - 1], [0, VOCAB - 1]])
def test_pa_02_ids_of_the_vocabulary_are_taken(token_ids):
    check_token_ids("token_ids", token_ids, VOCAB)


def test_pa_02_stop_token_ids_are_of_the_vocabulary():
    refused("stop_token_ids", stop_token_ids=(1, VOCAB))
    assert checked(stop_token_ids=(0, VOCAB - 1)).stop_token_ids == (0, VOCAB - 1)


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 10**18, 1e18, -1, 0])
def test_pa_04_max_tokens_out_of_range(value):
    assert str(value) in refused("max_tokens", max_tokens=value)


@pytest.mark.parametrize("value", [-1, 2**64, 10**400])
def test_pa_04_seeds_that_are_refused(value):
    assert f"0..{2**64 - 1}" in refused("seed", seed=value)


@pytest.mark.parametrize("value", [0, 2**63, 2**64 - 1])
def test_pa_04_seeds_that_are_taken(value):
    assert checked(seed=value).seed == value


def test_an_absent_seed_is_drawn_anew_for_each_request():
    assert SamplingParams(max_tokens=1).seed != SamplingParams(max_tokens=1).seed


@pytest.mark.parametrize(
    "stops", [("x",) * 10**5, ("x",) * 17, ("x" * 10**6,), ("é" * 513,), ("",), ("a", "")]
)
def test_pa_04_st_01_stop_strings_that_are_refused(stops):
    assert len(refused("stop", stop_strings=stops)) < 300


@pytest.mark.parametrize("stops", [(), ("x",) * 16, ("x" * 1024,), ("é" * 512,), ("🙂",)])
def test_stop_strings_that_are_taken(stops):
    assert checked(stop_strings=stops).stop_strings == stops


def test_pa_04_the_number_of_stop_token_ids_is_bounded():
    refused("stop_token_ids", stop_token_ids=(1,) * 129)
    checked(stop_token_ids=(1,) * 128)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(LIMIT - 1, 1), (8, LIMIT - 8), (1, LIMIT - 1)])
def test_sc_04_prompt_and_answer_up_to_the_limit_are_taken(prompt, max_tokens):
    assert checked(prompt=prompt, max_tokens=max_tokens).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "numbers"),
    [
        (LIMIT, 1, "prompt", {"64 tokens", "have 1"}),
        (LIMIT + 1, 1, "prompt", {"64 tokens", "65 tokens", "have 1"}),
        (LIMIT + 1, 7, "prompt", {"64 tokens", "65 tokens", "have 7"}),
        (8, LIMIT - 7, "max_tokens", {"64 tokens", "has 8", "57", "at most 56"}),
        (LIMIT - 1, 2, "max_tokens", {"64 tokens", "has 63", "2", "at most 1 remain"}),
        (8, 0, "max_tokens", {"0", "at least 1"}),
    ],
)
def test_sc_04_over_the_limit_all_three_numbers_are_named(prompt, max_tokens, field, numbers):
    message = refused(field, prompt=prompt, max_tokens=max_tokens)
    assert {number for number in numbers if number not in message} == set()
