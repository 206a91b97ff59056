"""The public gRPC service. Parses, dispatches, answers; decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import grpc

from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.sampling_params import FinishReason
from router.front_door import FrontDoor, Generation
from router.request_run import Progress, Update
from router.requests import GenerationRequest, ServedModel

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, door: FrontDoor, model: ServedModel) -> None:
        self._door = door
        self._model = model

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        generation = await self._accepted(request, context)
        progress = generation.progress
        async with aclosing(generation.updates()) as updates:
            async for update in updates:
                response = _response(generation.request, update, progress)
                if progress.explanation is not None:
                    response.plan.CopyFrom(progress.explanation)
                    progress.explanation = None
                yield response

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ExplainResponse:
        generation = await self._accepted(request.request, context)
        return inference_pb2.ExplainResponse(plan=self._door.dispatcher.explain(generation.request))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        await self._door.callers.caller(authorization(context))
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
        await self._door.callers.caller(authorization(context))
        return inference_pb2.TokenizeResponse(token_ids=await self._door.parser.tokenize(request))

    async def _accepted(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Generation:
        remaining_s = cast("float | None", context.time_remaining())
        return await self._door.accepted(request, authorization(context), remaining_s)


def authorization(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The call's `authorization` metadata; "" where there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _response(
    request: GenerationRequest, update: Update, progress: Progress
) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=request.label,
        text=update.text,
        token_ids=update.token_ids,
        logprobs=update.logprobs,
        choice=update.choice,
    )
    if update.finish_reason is not None:
        response.finish_reason = _REASONS[update.finish_reason]
    if update.end is None:
        return response
    end = update.end
    response.usage.prompt_tokens = len(request.token_ids)
    response.usage.completion_tokens = progress.num_output_tokens
    # A worker that went on after another's loss may have found tokens of the answer in its cache, too.
    response.usage.cached_tokens = min(end.cached_tokens, len(request.token_ids))
    response.timings.queue_s = progress.planned_at - progress.arrived_at
    response.timings.prefill_s = progress.first_token_at - progress.planned_at
    response.timings.time_to_first_token_s = progress.first_token_at - progress.arrived_at
    response.timings.total_s = progress.ended_at - progress.arrived_at
    response.hand_off.decode_worker = progress.plan.decode.worker_id if progress.plan else ""
    response.hand_off.prefill_worker = end.prefill_worker
    response.hand_off.blocks_moved = end.blocks_moved
    response.hand_off.bytes_moved = end.bytes_moved
    response.hand_off.transfer_s = end.transfer_s
    response.hand_off.transport = end.transport
    response.hand_off.failed_attempts = end.failed_attempts
    return response
