"""OpenAI's HTTP API, as Headrace, vLLM and llama.cpp answer it. Each request has a connection of its own."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from headrace.bench.serve.answers import HAND_OFF, TIMINGS, Answer, Question
from headrace.bench.serve.endpoint import Served
from headrace.config import ClientSettings
from headrace.errors import Unavailable
from headrace.rpc.client import authorization, tls_context

_HELLO_TIMEOUT_S = 10.0
_MAX_LINE_BYTES = 1 << 24  # an event may repeat the prompt's token ids
_REJECTIONS = (429, 503)


class HttpEndpoint:
    """`chat`: /v1/chat/completions with messages; else /v1/completions with token ids."""

    def __init__(
        self,
        url: str,
        client: ClientSettings,
        model: str,
        temperature: float,
        timeout_s: float,
        *,
        chat: bool,
    ) -> None:
        """`model`: empty: the first one that is served. Raises InvalidRequest for files that can not be read."""
        self.takes_tokens = not chat
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._temperature = temperature
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = dict(authorization(client))
        self._tls = tls_context(client)
        self._session: aiohttp.ClientSession | None = None

    async def served(self) -> Served:
        url = f"{self._url}/v1/models"
        timeout = aiohttp.ClientTimeout(total=_HELLO_TIMEOUT_S)
        try:
            async with self._open().get(url, timeout=timeout) as response:
                response.raise_for_status()
                cards: list[dict[str, Any]] = (await response.json())["data"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise Unavailable(f"{url} does not answer as OpenAI's API does: {error!r}") from None
        card = next((card for card in cards if card["id"] == self._model), cards[0] if cards else {})
        self._model = self._model or card.get("id", "")
        meta: dict[str, Any] = card.get("meta") or {}  # llama.cpp's
        return Served(self._model, card.get("max_model_len"), meta.get("n_vocab"))

    async def ask(self, question: Question, answer: Answer) -> None:
        path = "/v1/completions" if self.takes_tokens else "/v1/chat/completions"
        body = json.dumps(self._body(question))
        headers = {"content-type": "application/json", "x-request-id": question.request_id}
        try:
            async with self._open().post(f"{self._url}{path}", data=body, headers=headers) as response:
                if response.status != 200:
                    status = "rejected" if response.status in _REJECTIONS else "failed"
                    answer.fail(status, f"{response.status}: {await response.text()}")
                    return
                await _read(response, answer)
        except TimeoutError:
            answer.fail("timeout", f"no end after {self._timeout.total:g} s")
        except (aiohttp.ClientError, ValueError) as error:
            answer.fail("failed", repr(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # needs the running loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=self._tls),
                timeout=self._timeout,
                headers=self._headers,
                read_bufsize=_MAX_LINE_BYTES,
            )
        return self._session

    def _body(self, question: Question) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": question.max_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_timings": True,  # Headrace's; others ignore it
        }
        if self.takes_tokens:
            body["prompt"] = question.prompt
            if question.needs_token_ids:
                body["return_token_ids"] = True
        else:
            body["messages"] = [
                {"role": message[0], "content": message[1]}
                for message in question.prompt
                if isinstance(message, tuple)
            ]
        return body


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Raises ValueError for what is not JSON."""
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.fail("failed", json.dumps(event["error"]))
            return
        for choice in event.get("choices") or ():
            _note_choice(choice, answer)
        if event.get("usage"):
            _note_usage(event["usage"], answer)
        if "hand_off" in event:
            _note_way(event, answer)
    answer.fail("failed", "the stream ended without [DONE]")


def _note_choice(choice: dict[str, Any], answer: Answer) -> None:
    delta: dict[str, Any] = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    token_ids = choice.get("token_ids") or ()
    if text or token_ids:
        answer.receive(len(token_ids) or 1)
    answer.text += text
    answer.token_ids.extend(token_ids)
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _note_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.prompt_tokens = usage.get("prompt_tokens")
    answer.output_tokens = usage.get("completion_tokens")
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _note_way(event: dict[str, Any], answer: Answer) -> None:
    """What is left out of the JSON is 0 or empty."""
    answer.server = {name: event["timings"].get(name) or 0.0 for name in TIMINGS}
    answer.server |= {name: event["hand_off"].get(name) or 0 for name in HAND_OFF}
