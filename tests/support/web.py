"""The HTTP door over a real server, with a worker driven by hand behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import openai
from prometheus_client import CollectorRegistry

from headrace.config import HttpSettings
from headrace.rpc.v1 import inference_pb2
from router.http.generate import Generator
from router.http.routes import Pages, application
from router.http.server import HttpServer
from tests.unit.router.test_service import END, Front, front


class Web:
    def __init__(self, front: Front, url: str, server: HttpServer) -> None:
        self.front = front
        self.url = url
        self.server = server
        self.worker = front.worker
        self.tokenizer = front.model.tokenizer
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=20)
        self.http = httpx2.AsyncClient(base_url=url, timeout=20)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    async def asked(self):
        """The next request that the worker gets."""
        async with asyncio.timeout(10):
            while not (message := await self.worker.received.get()).HasField("start"):
                pass
        return message.start

    async def answer(self, text: str, *, end=END, reason: str = "stop", logprobs: bool = False):
        """Answer the next request with this text, a token at a time, in every choice. Returns what was asked."""
        asked = await self.asked()
        token_ids = self.tokens(text)
        for position, token_id in enumerate(token_ids):
            for choice in range(asked.sampling.n or 1):
                is_last = position == len(token_ids) - 1
                self.worker.send(
                    asked.request_id,
                    [token_id],
                    choice=choice,
                    finish_reason=reason if is_last else "",
                    logprobs=[logprob(token_id, position)] if logprobs else [],
                )
        self.worker.send(asked.request_id, end=end)
        return asked

    async def post(self, path: str, **body):
        return await self.http.post(path, json=body)

    async def both(self, path: str, text: str, **body) -> tuple[dict, list[dict]]:
        """The worker's text as one answer, and as the chunks of a stream, for the same request."""
        whole, _ = await asyncio.gather(self.post(path, **body), self.answer(text))
        assert whole.status_code == 200, whole.text
        streamed, _ = await asyncio.gather(self.post(path, stream=True, **body), self.answer(text))
        return whole.json(), events(streamed.text)


def logprob(token_id: int, position: int) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprob=-0.5 - position, top_ids=[token_id, 65], top_logprobs=[-0.5 - position, -9.0]
    )


def events(text: str) -> list[dict]:
    """Of a stream that ended well."""
    *found, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def text_of(chunks: list[dict], index: int = 0) -> str:
    """Of one choice of a stream, of either endpoint."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@asynccontextmanager
async def web(files, *, http=None, callers=None, ready=True, **options) -> AsyncIterator[Web]:
    """`http`: settings; the rest as `front` takes it."""
    settings = HttpSettings.model_validate(http or {})
    async with front(files, **options) as behind:
        door = behind.door
        for record in list(behind.view.workers.values()):
            behind.view.admit(replace(record, num_blocks=4096))  # tools make long prompts
        door.callers = callers or door.callers
        pages = Pages(door, behind.model, CollectorRegistry(), lambda: ready)
        app = application(pages, Generator(door, behind.model, settings.max_prompts), door, settings)
        server = HttpServer(app, settings, drain_timeout_s=5.0)
        found = Web(behind, await server.start("127.0.0.1", 0), server)
        try:
            yield found
        finally:
            await found.openai.close()
            await found.http.aclose()
            await server.stop()
