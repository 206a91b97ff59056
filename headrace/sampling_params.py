"""How a request's tokens are drawn and when it ends. One validator for every entrance.

Absent fields take their default here and nowhere else: an absent temperature is 1.0, not 0.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4  # below this, division by it overflows fp32 logits: use 0 for greedy
MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-text token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's limit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling settings. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    The draw for (seed, choice, position) does not depend on batch, worker or restart.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def validate(
    params: SamplingParams, *, num_prompt_tokens: int, max_model_tokens: int, vocab_size: int
) -> SamplingParams:
    """Return `params` ready for an engine (`top_k` at or over the vocabulary becomes off), or raise InvalidRequest.

    Comparisons are written so that NaN fails them.
    """
    _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            "temperature", params.temperature, f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"
        )
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest("top_p", params.top_p, "must be over 0 and at most 1")
    if params.top_k < 0:
        raise InvalidRequest("top_k", params.top_k, "must be 0 (off) or positive")
    _check_range("seed", params.seed, 0, MAX_SEED)
    _check_length(params.max_tokens, num_prompt_tokens, max_model_tokens)
    _check_stops(params.stop_strings)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", len(params.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids"
        )
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    return replace(params, top_k=0 if params.top_k >= vocab_size else params.top_k)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first id outside [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(name, bad, f"token ids lie in 0..{vocab_size - 1}")


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
