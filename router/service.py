"""The public gRPC service. Parses, dispatches, answers; decides nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import structlog

from headrace.errors import HeadraceError
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.sampling_params import FinishReason
from router.dispatch import Dispatcher
from router.request_run import Progress, Update
from router.requests import GenerationRequest, RequestParser, ServedModel
from router.tally import Tally

log = structlog.get_logger()

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self, model: ServedModel, parser: RequestParser, dispatcher: Dispatcher, default_timeout_s: float
    ) -> None:
        self._model = model
        self._parser = parser
        self._dispatcher = dispatcher
        self._default_timeout_s = default_timeout_s
        self.tally = Tally()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        progress = Progress()
        parsed = await self._parser.generation(request, self._timeout_s(context))
        outcome = "cancelled"
        try:
            async for update in self._dispatcher.generate(parsed, progress):
                response = _response(parsed, update, progress)
                if progress.explanation is not None:
                    response.plan.CopyFrom(progress.explanation)
                    progress.explanation = None
                yield response
            outcome = "ok"
        except HeadraceError as error:
            outcome = error.code
            raise
        finally:
            self.tally.ended(
                outcome,
                prompt_tokens=len(parsed.token_ids),
                output_tokens=progress.num_output_tokens,
            )
            _log_end(parsed, progress, outcome)

    def _timeout_s(self, context: grpc.aio.ServicerContext[Any, Any]) -> float:
        """What is left of the client's deadline; the default, if it set none."""
        remaining_s = cast("float | None", context.time_remaining())
        return self._default_timeout_s if remaining_s is None else remaining_s

    async def Explain(
        self, request: inference_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ExplainResponse:
        parsed = await self._parser.generation(request.request, self._timeout_s(context))
        return inference_pb2.ExplainResponse(plan=self._dispatcher.explain(parsed))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
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
        return inference_pb2.TokenizeResponse(token_ids=await self._parser.tokenize(request))


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


def _log_end(request: GenerationRequest, progress: Progress, outcome: str) -> None:
    log.info(
        "request ended",
        request_id=request.label,
        outcome=outcome,
        prompt_tokens=len(request.token_ids),
        output_tokens=progress.num_output_tokens,
        dispatches=progress.num_dispatches,
        seconds=round(time.monotonic() - progress.arrived_at, 4),
    )
