"""The application: which path is answered by what. Others mount routes of their own beside these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from headrace.config import HttpSettings
from headrace.errors import Unavailable
from headrace.rpc.v1 import inference_pb2
from headrace.sampling_params import check_token_ids
from router.front_door import FrontDoor
from router.http.bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from router.http.call import Call, Endpoint, answered
from router.http.convert import chat_message
from router.http.generate import Generator
from router.http.replies import token_text
from router.requests import ServedModel


class Pages:
    """Everything that generates nothing."""

    def __init__(
        self,
        door: FrontDoor,
        model: ServedModel,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
    ) -> None:
        self._door = door
        self._model = model
        self._registry = registry
        self._ready = ready
        self._started_at = int(time.time())

    async def models(self, call: Call) -> None:
        await call.json({"object": "list", "data": [self._card()]})

    async def model(self, call: Call) -> None:
        self._door.parser.check_model(call.path_parameters["name"])
        await call.json(self._card())

    async def tokenize(self, call: Call) -> None:
        """Of a prompt, or of a chat."""
        if b'"messages"' in call.body:
            chat = await call.parsed(TokenizeChatBody)
            message = inference_pb2.TokenizeRequest(model=chat.model or "", chat=chat_message(chat))
            with_texts = chat.return_token_strs
        else:
            text = await call.parsed(TokenizeTextBody)
            message = inference_pb2.TokenizeRequest(
                model=text.model or "", text=text.prompt, add_special_tokens=text.add_special_tokens
            )
            with_texts = text.return_token_strs
        token_ids = await self._door.parser.tokenize(message)
        content: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._model.max_model_tokens,
            "tokens": token_ids,
        }
        if with_texts:
            content["token_strs"] = await asyncio.to_thread(self._texts, token_ids)
        await call.json(content)

    async def detokenize(self, call: Call) -> None:
        body = await call.parsed(DetokenizeBody)
        self._door.parser.check_model(body.model or "")
        check_token_ids("tokens", body.tokens, self._model.tokenizer.vocab_size)
        await call.json({"prompt": await asyncio.to_thread(self._text, body.tokens)})

    async def version(self, call: Call) -> None:
        await call.json({"version": version("headrace")})

    async def health(self, call: Call) -> None:
        """The event loop turns: that is all."""
        await call.text(b"")

    async def ready(self, call: Call) -> None:
        if not self._ready():
            raise Unavailable("no worker that serves this model has shown lately that it answers", 1.0)
        await call.text(b"")

    async def metrics(self, call: Call) -> None:
        text = await asyncio.to_thread(generate_latest, self._registry)
        await call.text(text, CONTENT_TYPE_LATEST)

    def _texts(self, token_ids: list[int]) -> list[str]:
        return [token_text(self._model.tokenizer, token_id) for token_id in token_ids]

    def _text(self, token_ids: list[int]) -> str:
        return b"".join(map(self._model.tokenizer.shown_bytes, token_ids)).decode(errors="replace")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "headrace",
            "root": self._model.files.name,
            "parent": None,
            "max_model_len": self._model.max_model_tokens,
        }


class _Open:
    """As `Endpoint`, for anybody: no credential, no body."""

    def __init__(self, work: Callable[[Call], Coroutine[Any, Any, None]]) -> None:
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call = Call(scope, receive, send)
        await answered(call, self._work(call))


def application(
    pages: Pages,
    generator: Generator,
    door: FrontDoor,
    settings: HttpSettings,
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """`more`: further routes, such as a console's."""

    def post(path: str, work: Callable[[Call], Coroutine[Any, Any, None]]) -> Route:
        return Route(path, Endpoint(work, door.callers, settings), methods=["POST"])

    def get(path: str, work: Callable[[Call], Coroutine[Any, Any, None]]) -> Route:
        return Route(path, Endpoint(work, door.callers, settings), methods=["GET"])

    routes: list[BaseRoute] = [
        post("/v1/completions", generator.complete),
        post("/v1/chat/completions", generator.chat),
        get("/v1/models", pages.models),
        get("/v1/models/{name:path}", pages.model),
        post("/tokenize", pages.tokenize),
        post("/detokenize", pages.detokenize),
        Route("/health", _Open(pages.health), methods=["GET"]),
        Route("/ready", _Open(pages.ready), methods=["GET"]),
        Route("/metrics", _Open(pages.metrics), methods=["GET"]),
        Route("/version", _Open(pages.version), methods=["GET"]),
        *more,
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = (
        f"{request.method} {request.url.path}: {'no such path' if status == 404 else 'method not allowed'}"
    )
    content = {"message": message, "type": "not_found_error", "param": None, "code": "NOT_FOUND"}
    headers = getattr(error, "headers", None)
    return JSONResponse({"error": content}, status, headers)
