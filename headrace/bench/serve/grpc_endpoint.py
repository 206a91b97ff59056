"""Headrace's own API. It tells where each request went and how long every part of its way took."""

from __future__ import annotations

import grpc

from headrace.bench.serve.answers import HAND_OFF, TIMINGS, Answer, Question
from headrace.bench.serve.endpoint import Served
from headrace.config import ClientSettings
from headrace.errors import Unavailable
from headrace.rpc.client import authorization, tls_credentials
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc

_HELLO_TIMEOUT_S = 10.0
_REJECTIONS = (grpc.StatusCode.RESOURCE_EXHAUSTED,)


class GrpcEndpoint:
    takes_tokens = True

    def __init__(self, address: str, client: ClientSettings, temperature: float, timeout_s: float) -> None:
        """Raises InvalidRequest for files that can not be read."""
        self._address = address
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._metadata = authorization(client)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        credentials = tls_credentials(client)
        self._channel = (
            grpc.aio.secure_channel(address, credentials, options=options)
            if credentials
            else grpc.aio.insecure_channel(address, options=options)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def served(self) -> Served:
        request = inference_pb2.ListModelsRequest()
        try:
            response = await self._stub.ListModels(
                request, timeout=_HELLO_TIMEOUT_S, metadata=self._metadata, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"no router answers at {self._address}: {error.details()}") from None
        model = response.models[0]
        return Served(model.name, model.max_tokens, model.vocab_size)

    async def ask(self, question: Question, answer: Answer) -> None:
        call = self._stub.Generate(self._request(question), timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                if message.token_ids:
                    answer.receive(len(message.token_ids))
                    answer.token_ids.extend(message.token_ids)
                if message.HasField("usage"):
                    _note_end(message, answer)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            answer.fail(
                "rejected" if code in _REJECTIONS else "timeout" if is_late else "failed",
                f"{code.name}: {error.details()}",
            )

    async def close(self) -> None:
        await self._channel.close()

    def _request(self, question: Question) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(
            temperature=self._temperature, max_tokens=question.max_tokens, ignore_eos=True, seed=0
        )
        request = inference_pb2.GenerateRequest(
            request_id=question.request_id, session_id=question.conversation, sampling=sampling
        )
        request.token_ids.ids.extend(token_id for token_id in question.prompt if isinstance(token_id, int))
        return request


def _note_end(message: inference_pb2.GenerateResponse, answer: Answer) -> None:
    usage, timings, hand_off = message.usage, message.timings, message.hand_off
    answer.prompt_tokens = usage.prompt_tokens
    answer.output_tokens = usage.completion_tokens
    answer.cached_tokens = usage.cached_tokens
    answer.finish_reason = inference_pb2.FinishReason.Name(message.finish_reason).rpartition("_")[2].lower()
    answer.server = {name: getattr(timings, name) for name in TIMINGS}
    answer.server |= {name: getattr(hand_off, name) for name in HAND_OFF}
