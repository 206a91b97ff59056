"""A server of Headrace's gRPC API and of OpenAI's HTTP API that answers as a script says."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from aiohttp import web

from headrace.bench.certificates import Files
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc

VOCAB_SIZE = 4096


class Refusal(Exception):
    """The script's way to refuse a request: as too much (429, RESOURCE_EXHAUSTED)."""


class Breakdown(Exception):
    """An answer that ends in an error (500, INTERNAL), or in the middle."""


@dataclass(frozen=True, slots=True)
class Asked:
    request_id: str
    prompt: list[int] | list[dict[str, str]]
    max_tokens: int
    fields: dict[str, object]


# Yields the token ids of one message after the other.
Script = Callable[[Asked], AsyncIterator[list[int]]]


class FakeLlm(inference_pb2_grpc.InferenceServicer):
    def __init__(self, script: Script, cached_tokens: int = 0) -> None:
        self.script = script
        self.cached_tokens = cached_tokens
        self.asked: list[Asked] = []

    async def ListModels(self, request, context):
        model = inference_pb2.Model(name="fake", max_tokens=1 << 20, vocab_size=VOCAB_SIZE)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Generate(self, request, context):
        fields = {"session_id": request.session_id, "ignore_eos": request.sampling.ignore_eos}
        fields["authorization"] = dict(context.invocation_metadata()).get("authorization")
        asked = Asked(request.request_id, list(request.token_ids.ids), request.sampling.max_tokens, fields)
        self.asked.append(asked)
        num_tokens = 0
        try:
            async for token_ids in self.script(asked):
                num_tokens += len(token_ids)
                yield inference_pb2.GenerateResponse(text="x", token_ids=token_ids)
        except Refusal as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Breakdown as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        usage = inference_pb2.Usage(
            prompt_tokens=len(asked.prompt), completion_tokens=num_tokens, cached_tokens=self.cached_tokens
        )
        yield inference_pb2.GenerateResponse(finish_reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "meta": {"n_vocab": VOCAB_SIZE}}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt") or body["messages"]
        body["authorization"] = request.headers.get("authorization")
        asked = Asked(request.headers["x-request-id"], prompt, body["max_tokens"], body)
        self.asked.append(asked)
        answer = self.script(asked)
        try:
            first = await anext(answer, None)
        except (Refusal, Breakdown) as error:
            return web.json_response({"error": str(error)}, status=429 if isinstance(error, Refusal) else 500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, asked, first, answer)
        return response

    async def _stream(self, response, asked: Asked, first, answer) -> None:
        is_chat = "messages" in asked.fields
        num_tokens, token_ids = 0, first
        try:
            while token_ids is not None:
                num_tokens += len(token_ids)
                choice = {"index": 0, "delta": {"content": "x"}} if is_chat else {"index": 0, "text": "x"}
                if asked.fields.get("return_token_ids"):
                    choice["token_ids"] = token_ids
                await _event(response, {"choices": [choice]})
                token_ids = await anext(answer, None)
        except Breakdown as error:
            await _event(response, {"error": {"message": str(error)}})
            return
        usage = {
            "prompt_tokens": len(asked.prompt),
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        await _event(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


def _context(files: Files) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _event(response: web.StreamResponse, content: object) -> None:
    await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


@asynccontextmanager
async def serving(llm: FakeLlm, files: Files | None = None) -> AsyncIterator[tuple[str, str]]:
    """Its gRPC address and its URL. `files`: with TLS, for clients that have certificates of the same authority."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(llm, server)
    if files is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        ca, key, cert = files.read()
        credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", llm.models),
            web.post("/v1/completions", llm.completions),
            web.post("/v1/chat/completions", llm.completions),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=_context(files) if files else None)
    await site.start()
    try:
        yield f"127.0.0.1:{port}", f"http{'s' if files else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await server.stop(0)
