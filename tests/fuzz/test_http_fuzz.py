"""Random requests to the HTTP door of a whole small fleet: each is answered or refused for what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx2
import pytest

from router.http.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from tests.fuzz.bodies import encoded, mutated
from tests.fuzz.test_grpc_fuzz import NUM_CLIENTS, SEED, TIMEOUT_S, fleet

# 404 is of another model, 413 of a body that is too large: never 5xx, and never a silent end.
DEFINITE = {200, 400, 404, 413}
MAX_BYTES = 4000  # a client that has seen enough of a stream leaves
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def plain(draw: random.Random) -> tuple[str, type, dict[str, Any]]:
    """A path, what its body is made of, and a body that is right."""
    small = {"max_tokens": draw.randint(1, 4), "stream": draw.random() < 0.5}
    messages = [{"role": "user", "content": "hello"}]
    match draw.randrange(8):
        case 0:
            return "/tokenize", TokenizeTextBody, {"prompt": "abc"}
        case 1:
            return "/tokenize", TokenizeChatBody, {"messages": messages}
        case 2:
            return "/detokenize", DetokenizeBody, {"tokens": [5, 6, 7]}
        case 3 | 4:
            prompt = draw.choice(["abc " * 9, [5, 6, 7], ["a", "b"], [[5, 6], [7]]])
            return "/v1/completions", CompletionBody, {"prompt": prompt, **small}
        case 5:
            body = {"messages": messages, "tools": [TOOL], "tool_choice": "required", **small}
            return "/v1/chat/completions", ChatCompletionBody, body
        case 6:
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [1, 2]}}}
            return "/v1/chat/completions", ChatCompletionBody, {
                "messages": messages, "response_format": form, **small,
            }  # fmt: skip
        case _:
            return "/v1/chat/completions", ChatCompletionBody, {"messages": messages, **small}


class Clients:
    def __init__(self, client: httpx2.AsyncClient, num_requests: int) -> None:
        self._client = client
        self._left = iter(range(num_requests))
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._one_client() for _ in range(NUM_CLIENTS)))

    async def _one_client(self) -> None:
        for number in self._left:
            draw = random.Random(SEED + number)
            path, kind, body = plain(draw)
            data = encoded(draw, mutated(draw, body, kind, draw.randint(0, 3)))
            status, problem = await self._ask(path, data)
            self.outcomes[str(status)] += 1
            if problem or status not in DEFINITE:
                self.unexpected.append(f"{number}: {status} {problem[:300]} for {path} {data[:600]!r}")

    async def _ask(self, path: str, data: bytes) -> tuple[int, str]:
        """The status, and what is wrong with the answer."""
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", path, content=data, headers=headers) as response:
            text = b""
            async for piece in response.aiter_raw():
                text += piece
                if len(text) > MAX_BYTES:
                    return response.status_code, ""
        if response.status_code != 200:
            return response.status_code, refusal_problem(text)
        if response.headers["content-type"].startswith("text/event-stream"):
            return 200, "" if text.endswith(b"data: [DONE]\n\n") else f"ends with {text[-300:]!r}"
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text[:300]!r}"))
        return 200, ""


def refusal_problem(text: bytes) -> str:
    """What keeps it from OpenAI's shape."""
    error = json.loads(text).get("error", {})
    if error.keys() == {"message", "type", "param", "code"} and error["message"]:
        return ""
    return f"no error of OpenAI's shape: {text[:300]!r}"


async def canary(client: httpx2.AsyncClient) -> str:
    body = {"prompt": "a canary", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    return response.json()["choices"][0]["text"]


@pytest.mark.timeout(900)
async def test_random_bodies_are_answered_or_refused(settings, num_requests):
    limits = httpx2.Limits(max_connections=NUM_CLIENTS)
    async with (
        fleet(settings) as (router, _),
        httpx2.AsyncClient(base_url=router.http_address, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        expected = await canary(client)
        clients = Clients(client, num_requests)
        await clients.run()
        print(f"seed {SEED}: {dict(clients.outcomes)}")
        assert clients.unexpected == []
        assert clients.outcomes["200"] > num_requests / 10
        assert clients.outcomes["400"] > num_requests / 10
        assert await canary(client) == expected
