"""The public gRPC API as the command line uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from headrace.config import ClientSettings
from headrace.errors import Code, HeadraceError, PeerError, Unavailable
from headrace.rpc.client import authorization, tls_credentials
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.tokenizer import ChatMessage

_READY_TIMEOUT_S = 10.0
_EXPLAIN_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Answer:
    """One answer as the client saw it. Times are seconds from sending the request."""

    text: str = ""
    num_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)  # one per message that brought tokens
    last: inference_pb2.GenerateResponse | None = None

    @property
    def inter_token_s(self) -> list[float]:
        return [
            after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)
        ]


class Client:
    """A connection to a router. Use as a context manager."""

    def __init__(self, address: str, settings: ClientSettings | None = None) -> None:
        """Raises InvalidRequest for files that can not be read."""
        self.address = address
        settings = settings or ClientSettings()
        credentials = tls_credentials(settings)
        self._channel = (
            grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
        )
        self._metadata = authorization(settings)
        self._stub: Any = inference_pb2_grpc.InferenceStub(
            cast("Any", self._channel)
        )  # its types are those of grpc.aio

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._channel.close()

    def wait_until_reachable(self) -> None:
        """Raises Unavailable."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_READY_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            raise Unavailable(
                f"no router answers at {self.address}; start a cluster with `headrace up`, or say --address HOST:PORT"
            ) from None

    def generate(
        self,
        prompt: str | Sequence[ChatMessage],
        sampling: inference_pb2.SamplingParams,
        answer: Answer,
        timeout_s: float,
    ) -> Iterator[str]:
        """Pieces of text as they come; `answer` fills up meanwhile. Raises HeadraceError."""
        request = _request(prompt, sampling)
        sent_at = time.monotonic()
        try:
            for response in self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata):
                if response.token_ids:
                    answer.token_times_s.append(time.monotonic() - sent_at)
                answer.num_tokens += len(response.token_ids)
                answer.text += response.text
                answer.last = response
                yield response.text
        except grpc.RpcError as error:
            raise _translated(error) from None

    def explain(self, prompt: str | Sequence[ChatMessage]) -> inference_pb2.RoutingPlan:
        """Where the router would send it now, and why. Raises HeadraceError."""
        request = inference_pb2.ExplainRequest(request=_request(prompt, inference_pb2.SamplingParams()))
        try:
            return self._stub.Explain(request, timeout=_EXPLAIN_TIMEOUT_S, metadata=self._metadata).plan
        except grpc.RpcError as error:
            raise _translated(error) from None


def _request(
    prompt: str | Sequence[ChatMessage], sampling: inference_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(sampling=sampling)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.messages.extend(
            inference_pb2.ChatMessage(role=message.role, content=message.content) for message in prompt
        )
    return request


def _translated(error: grpc.RpcError) -> HeadraceError:
    code: grpc.StatusCode = error.code()
    details = error.details() or "no details"
    known = Code.__members__.get(code.name)
    return PeerError(known, details) if known else Unavailable(f"{code.name}: {details}")
