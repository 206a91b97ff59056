"""How a request's tokens are drawn and when it ends. One validator for every entrance.

Absent fields take their default here and nowhere else: an absent temperature is 1.0, not 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.errors import InvalidRequest
from headrace.grammar import Grammar
from headrace.grammar import check as check_grammar

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4  # below this, division by it overflows fp32 logits: use 0 for greedy
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MAX_BIAS = 100.0  # either sign
MAX_BIASED_TOKENS = 1024
MAX_LISTED_TOKENS = 4096  # in a list of allowed or of banned token ids
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-text token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's limit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling settings. Off: `temperature` 0 (greedy), `top_k` 0, `top_p` 1, `min_p` 0, penalties 0,
    `repetition_penalty` 1, empty lists, None.

    The draw for (seed, choice, position) does not depend on batch, worker or restart. Order of what changes logits:
    penalties, bias, what is not allowed; then temperature, min_p, top_k, top_p.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = (
        1.0  # logits of tokens in prompt or answer are divided by it, negative ones multiplied
    )
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer …
    frequency_penalty: float = 0.0  # … and this as often as they are in it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # neither end-of-text nor stop token ids are drawn before
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # report the drawn token's and so many of the likeliest
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    n: int = 1  # answers to the one prompt
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities: before temperature, penalties, bias and masks, so none is
    infinite. `top`: the likeliest (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def validate(
    params: SamplingParams, *, num_prompt_tokens: int, max_model_tokens: int, vocab_size: int
) -> SamplingParams:
    """Return `params` ready for an engine (`top_k` -1, or at or over the vocabulary, becomes off), or raise
    InvalidRequest.

    Comparisons are written so that NaN fails them.
    """
    _check_distribution(params)
    _check_token_lists(params, vocab_size)  # bounds what is looked at one by one below
    _check_penalties(params)
    _check_range("seed", params.seed, 0, MAX_SEED)
    _check_length(params.max_tokens, num_prompt_tokens, max_model_tokens)
    _check_range("min_tokens", params.min_tokens, 0, params.max_tokens)
    _check_stops(params.stop_strings)
    for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if number is not None:
            _check_range(name, number, 0, MAX_LOGPROBS)
    _check_range("n", params.n, 1, MAX_CHOICES)
    _check_grammar(params)
    return replace(params, top_k=0 if params.top_k < 0 or params.top_k >= vocab_size else params.top_k)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first id outside [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(name, bad, f"token ids lie in 0..{vocab_size - 1}")


def _check_distribution(params: SamplingParams) -> None:
    _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            "temperature", params.temperature, f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"
        )
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest("top_p", params.top_p, "must be over 0 and at most 1")
    _check_range("min_p", params.min_p, 0.0, 1.0)
    if params.top_k < -1:
        raise InvalidRequest("top_k", params.top_k, "must be 0 or -1 (off) or positive")


def _check_penalties(params: SamplingParams) -> None:
    _check_range(
        "repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    )
    _check_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    for token_id, bias in params.logit_bias:
        _check_range(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)


def _check_token_lists(params: SamplingParams, vocab_size: int) -> None:
    lists = {
        "stop_token_ids": (params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        "allowed_token_ids": (params.allowed_token_ids, MAX_LISTED_TOKENS),
        "banned_token_ids": (params.banned_token_ids, MAX_LISTED_TOKENS),
        "logit_bias": (tuple(token_id for token_id, _ in params.logit_bias), MAX_BIASED_TOKENS),
    }
    for name, (token_ids, limit) in lists.items():
        if len(token_ids) > limit:
            raise InvalidRequest(name, len(token_ids), f"at most {limit} ids")
        check_token_ids(name, token_ids, vocab_size)
    if params.allowed_token_ids and not set(params.allowed_token_ids).difference(params.banned_token_ids):
        raise InvalidRequest("allowed_token_ids", "", "banned_token_ids leave none of them")


def _check_grammar(params: SamplingParams) -> None:
    """A grammar ends with the end-of-text token, and only there."""
    if params.grammar is None:
        return
    check_grammar(params.grammar)
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise InvalidRequest(
                name, getattr(params, name), "can not be combined with a grammar, which sets the end"
            )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(name, value, f"must lie in {low}..{high}")


def _check_length(max_tokens: int, num_prompt_tokens: int, max_model_tokens: int) -> None:
    if num_prompt_tokens >= max_model_tokens:
        raise InvalidRequest(
            "prompt",
            f"{num_prompt_tokens} tokens",
            f"the model takes {max_model_tokens} tokens in all, and the answer is to have {max_tokens}",
        )
    if max_tokens < 1:
        raise InvalidRequest("max_tokens", max_tokens, "must be at least 1")
    if max_tokens > max_model_tokens - num_prompt_tokens:
        raise InvalidRequest(
            "max_tokens",
            max_tokens,
            f"the model takes {max_model_tokens} tokens in all and the prompt has {num_prompt_tokens},"
            f" so at most {max_model_tokens - num_prompt_tokens} remain",
        )


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", len(stops), f"at most {MAX_STOP_STRINGS} stop strings")
    for stop in stops:
        size = len(stop.encode("utf-8", "surrogatepass"))
        if not 0 < size <= MAX_STOP_STRING_BYTES:
            raise InvalidRequest("stop", stop, f"a stop string has 1 to {MAX_STOP_STRING_BYTES} bytes")
