"""vLLM's messages to ours, and answers to vLLM's. What a request asks for and is not done here is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.errors import InvalidRequest
from headrace.rpc.v1 import inference_pb2
from headrace.rpc.vllm import vllm_engine_pb2
from headrace.tokenizer import Tokenizer
from router.request_run import Update
from router.requests import GenerationRequest

_ABORTED = "abort"
_INT32_MAX = 2**31 - 1
_ANY_VALUE = "any value"  # the one that was sent may have megabytes
_NO_MEDIA = "there are no multimodal models here"
_OWN_HAND_OFFS = "hand-offs between workers are made here, not by the caller"
_UNSUPPORTED = {
    "mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "kv_transfer_params": _OWN_HAND_OFFS,
    "kv_transfer_params_json": _OWN_HAND_OFFS,
    "structural_tag": "not supported: json_schema, regex, grammar, json_object and choice are",
    "truncate_prompt_tokens": "prompts are not cut",
}
_SAME = ("min_p", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")
_OFF_AT_ZERO = ("top_p", "repetition_penalty")
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_LISTS = ("stop", "stop_token_ids")


def to_request(
    message: vllm_engine_pb2.GenerateRequest, tokenizer: Tokenizer
) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for what is not done here. Values are checked where those of all requests are."""
    params = message.sampling_params
    for part in (message, params):
        _refuse_unsupported(part)
    if message.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank", message.data_parallel_rank, "there is rank 0 only")
    request = inference_pb2.GenerateRequest(request_id=message.request_id, sampling=_to_sampling(params))
    match message.WhichOneof("input"):
        case "tokenized":
            request.token_ids.ids.extend(message.tokenized.input_ids)
        case "text":
            request.text = message.text
        case _:
            raise InvalidRequest("input", None, "one of tokenized and text must be set")
    if not params.skip_special_tokens:
        _check_stops(params.stop, tokenizer)
    return request


def _refuse_unsupported(message: Message) -> None:
    for descriptor, _ in message.ListFields():
        if descriptor.name in _UNSUPPORTED:
            raise InvalidRequest(descriptor.name, _ANY_VALUE, _UNSUPPORTED[descriptor.name])
    for unknown in UnknownFieldSet(message):
        name = f"{message.DESCRIPTOR.name} field {unknown.field_number}"
        raise InvalidRequest(name, _ANY_VALUE, "it is not known here, and might change the answer")


def _to_sampling(params: vllm_engine_pb2.SamplingParams) -> inference_pb2.SamplingParams:
    sampling = inference_pb2.SamplingParams(
        top_k=min(params.top_k, _INT32_MAX),  # over the vocabulary either way
        n=min(params.n or 1, _INT32_MAX),
        logit_bias=dict(params.logit_bias),
    )
    given = [
        *_SAME,
        *(name for name in _OFF_AT_ZERO if getattr(params, name)),
        *(name for name in _OPTIONAL if params.HasField(name)),
    ]
    for name in given:
        setattr(sampling, name, getattr(params, name))
    for name in _LISTS:
        getattr(sampling, name).extend(getattr(params, name))
    if params.HasField("seed"):
        sampling.seed = params.seed % 2**64
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        sampling.grammar.CopyFrom(_to_grammar(params, constraint))
    return sampling


def _to_grammar(params: vllm_engine_pb2.SamplingParams, constraint: str) -> inference_pb2.Grammar:
    match constraint:
        case "choice":
            return inference_pb2.Grammar(choice=inference_pb2.Choices(texts=params.choice.choices))
        case "grammar":
            if "::=" in params.grammar:
                raise InvalidRequest("grammar", params.grammar, "must be in Lark's notation, not in EBNF")
            return inference_pb2.Grammar(lark=params.grammar)
        case _:
            grammar = inference_pb2.Grammar()
            setattr(grammar, constraint, getattr(params, constraint))
            return grammar


def _check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Answers are searched for stop strings without their control tokens."""
    for stop in stops:
        token_ids = tokenizer.encode(stop, add_special=False)
        if not all(map(tokenizer.token_bytes, token_ids)):
            raise InvalidRequest("stop", stop, "holds a control token, which only stop_token_ids can name")


@dataclass(slots=True)
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = _ABORTED
    matched_stop: int | str | None = None


class Answers:
    """Of one request, as they come: `chunks` of each update, and at the end `completes`."""

    def __init__(self, request: GenerationRequest, *, streams: bool) -> None:
        self._request = request
        self._streams = streams
        self._answers = [_Answer() for _ in range(request.sampling.n)]
        self._of_prompt: list[inference_pb2.TokenLogprobs] = []
        self._cached_tokens = 0

    def chunks(self, update: Update) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """At most one, and none where the caller wants whole answers only."""
        answer = self._answers[update.choice]
        if update.prompt_logprobs is not None:
            self._of_prompt.extend(update.prompt_logprobs.entries)
        is_first = not answer.token_ids
        answer.token_ids += update.token_ids
        if update.finish_reason is not None:
            answer.finish_reason, answer.matched_stop = update.finish_reason.value, update.matched_stop
        if update.end is not None:
            self._cached_tokens = self._request.cached_tokens(update.end.cached_tokens)
        if not self._streams:
            answer.logprobs += update.logprobs
        elif update.token_ids:
            yield vllm_engine_pb2.GenerateResponse(chunk=self._chunk(update, is_first=is_first))

    def completes(self) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """One for each answer. Those that have not ended were aborted."""
        for index, answer in enumerate(self._answers):
            whole = not self._streams  # else the chunks have brought the log-probabilities
            complete = vllm_engine_pb2.GenerateComplete(
                output_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                prompt_tokens=len(self._request.token_ids),
                completion_tokens=len(answer.token_ids),
                cached_tokens=self._cached_tokens,
                output_logprobs=self._output_logprobs(answer.token_ids, answer.logprobs) if whole else None,
                input_logprobs=self._input_logprobs() if whole else None,
                index=index,
            )
            if isinstance(answer.matched_stop, str):
                complete.matched_stop_str = answer.matched_stop
            elif answer.matched_stop is not None:
                complete.matched_token_id = answer.matched_stop
            yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _chunk(self, update: Update, *, is_first: bool) -> vllm_engine_pb2.GenerateStreamChunk:
        return vllm_engine_pb2.GenerateStreamChunk(
            token_ids=update.token_ids,
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=len(update.token_ids),
            output_logprobs=self._output_logprobs(update.token_ids, update.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=update.choice,
        )

    def _output_logprobs(
        self, token_ids: Sequence[int], entries: Sequence[inference_pb2.TokenLogprobs]
    ) -> vllm_engine_pb2.OutputLogProbs | None:
        if not entries:
            return None
        return vllm_engine_pb2.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in entries],
            token_ids=token_ids,
            top_logprobs=_tops(entries) if self._request.sampling.logprobs else (),
        )

    def _input_logprobs(self) -> vllm_engine_pb2.InputLogProbs | None:
        sampling, entries = self._request.sampling, self._of_prompt
        if sampling.prompt_logprobs is None:
            return None
        values = [vllm_engine_pb2.InputTokenLogProb(value=entry.logprob) for entry in entries]
        none = inference_pb2.TokenLogprobs()
        return vllm_engine_pb2.InputLogProbs(
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb(), *values],
            token_ids=self._request.token_ids[: 1 + len(entries)],
            top_logprobs=_tops([none, *entries]) if sampling.prompt_logprobs else (),
        )


def _tops(entries: Sequence[inference_pb2.TokenLogprobs]) -> list[vllm_engine_pb2.TopLogProbs]:
    return [
        vllm_engine_pb2.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids) for entry in entries
    ]
