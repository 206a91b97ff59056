"""The public gRPC service. Parses, dispatches, answers; decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, cast

import grpc
import structlog

from headrace.rpc.metadata import CallMetadata, metadata_of
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from headrace.sampling_params import FinishReason
from router.account import hand_off, timings
from router.front_door import FrontDoor, Generation
from router.request_run import Progress, Update
from router.requests import GenerationRequest, ServedModel

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
# Of the prompt, in one message: that is at most 300 KB, and clients take 4 MiB if they are not told otherwise.
_MAX_PROMPT_ENTRIES = 1024


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, door: FrontDoor, model: ServedModel) -> None:
        self._door = door
        self._model = model

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        generation = await accepted(self._door, request, context)
        progress = generation.progress
        async with aclosing(generation.updates()) as updates:
            async for update in updates:
                for response in _responses(generation, update):
                    if progress.explanation is not None:
                        response.plan.CopyFrom(progress.explanation)
                        progress.explanation = None
                    yield response

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ExplainResponse:
        generation = await accepted(self._door, request.request, context)
        return inference_pb2.ExplainResponse(plan=self._door.dispatcher.explain(generation.request))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        await self._door.callers.caller(begin(context).authorization)
        model = inference_pb2.Model(
            name=self._model.name,
            max_tokens=self._model.max_model_tokens,
            vocab_size=self._model.tokenizer.vocab_size,
            fingerprint=self._model.files.fingerprint,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        await self._door.callers.caller(begin(context).authorization)
        return inference_pb2.TokenizeResponse(token_ids=await self._door.parser.tokenize(request))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.DetokenizeResponse:
        await self._door.callers.caller(begin(context).authorization)
        return inference_pb2.DetokenizeResponse(text=await self._door.parser.detokenize(request))


def begin(context: grpc.aio.ServicerContext[Any, Any], request_id: str = "") -> CallMetadata:
    """Of a call whose message names `request_id`: its metadata, with an id in any case.

    The id and the trace context go back with the call's end, whatever that is. Not before: a client's retry policy
    holds only until the first metadata has come.
    """
    metadata = metadata_of(context, request_id)
    context.set_trailing_metadata(metadata.echo())
    if metadata.traceparent:
        structlog.contextvars.bind_contextvars(traceparent=metadata.traceparent)
    return metadata


async def accepted(
    door: FrontDoor, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
) -> Generation:
    """The request of a call, which then has an id. Raises HeadraceError."""
    metadata = begin(context, request.request_id)
    request.request_id = metadata.request_id
    remaining_s = cast("float | None", context.time_remaining())
    return await door.accepted(request, metadata.authorization, remaining_s)


def _responses(generation: Generation, update: Update) -> Iterator[inference_pb2.GenerateResponse]:
    request = generation.request
    if update.prompt_logprobs is not None:
        yield from _of_prompt(request, update.prompt_logprobs)
        return
    response = inference_pb2.GenerateResponse(
        request_id=request.label,
        text=update.text,
        token_ids=update.token_ids,
        logprobs=update.logprobs,
        choice=update.choice,
    )
    if update.finish_reason is not None:
        response.finish_reason = _REASONS[update.finish_reason]
    if isinstance(update.matched_stop, str):
        response.matched_string = update.matched_stop
    elif update.matched_stop is not None:
        response.matched_token_id = update.matched_stop
    if update.end is not None:
        _add_usage(response.usage, request, update.end, generation.progress)
        response.timings.CopyFrom(timings(update.end, generation.progress))
        response.hand_off.CopyFrom(hand_off(update.end, generation.progress))
    yield response


def _of_prompt(
    request: GenerationRequest, news: worker_pb2.PromptLogprobs
) -> Iterator[inference_pb2.GenerateResponse]:
    for start in range(0, len(news.entries), _MAX_PROMPT_ENTRIES):
        entries = news.entries[start : start + _MAX_PROMPT_ENTRIES]
        first = news.first_index + start
        yield inference_pb2.GenerateResponse(
            request_id=request.label,
            prompt_logprobs=entries,
            prompt_token_ids=request.token_ids[first : first + len(entries)],
        )


def _add_usage(
    usage: inference_pb2.Usage, request: GenerationRequest, end: worker_pb2.SequenceEnd, progress: Progress
) -> None:
    usage.prompt_tokens = len(request.token_ids)
    usage.completion_tokens = progress.num_output_tokens
    usage.cached_tokens = request.cached_tokens(end.cached_tokens)
