"""Plain data to protobuf messages and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headrace.errors import InvalidRequest
from headrace.grammar import Grammar, GrammarKind
from headrace.rpc.v1 import inference_pb2, worker_pb2
from headrace.sampling_params import SamplingParams, TokenLogprobs

# Fields that have one name and one form in SamplingParams and in both messages.
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "min_tokens", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")


def sampling_to_proto(sampling: SamplingParams) -> worker_pb2.EngineSampling:
    """Stop strings stay behind: they are the router's."""
    message = worker_pb2.EngineSampling(
        max_tokens=sampling.max_tokens,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
    )
    for name in NUMBERS:
        setattr(message, name, getattr(sampling, name))
    for name in LISTS:
        getattr(message, name).extend(getattr(sampling, name))
    return message


def sampling_from_proto(message: worker_pb2.EngineSampling) -> SamplingParams:
    """Raises InvalidRequest for a grammar that is empty."""
    same: dict[str, Any] = {name: getattr(message, name) for name in NUMBERS}
    same |= {name: tuple(getattr(message, name)) for name in LISTS}
    return SamplingParams(
        max_tokens=message.max_tokens,
        logit_bias=tuple(message.logit_bias.items()),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        **same,
    )


def grammar_to_proto(grammar: Grammar) -> inference_pb2.Grammar:
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return inference_pb2.Grammar(json_object=True)
    if grammar.kind is GrammarKind.CHOICE:
        return inference_pb2.Grammar(choice=inference_pb2.Choices(texts=json.loads(grammar.text)))
    message = inference_pb2.Grammar()
    setattr(message, grammar.kind.value, grammar.text)
    return message


def grammar_from_proto(message: inference_pb2.Grammar) -> Grammar:
    """Raises InvalidRequest when no kind is set."""
    kind = message.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequest("grammar", kind, f"one of {', '.join(GrammarKind)} must be set")
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, "")
    text = json.dumps(list(message.choice.texts)) if kind == "choice" else getattr(message, kind)
    return Grammar(GrammarKind(kind), text)


def prompt_logprobs_to_proto(first_index: int, entries: Iterable[TokenLogprobs]) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(first_index=first_index, entries=map(logprobs_to_proto, entries))


def logprobs_to_proto(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )
