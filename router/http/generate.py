"""/v1/completions and /v1/chat/completions: from a body to requests, and from their updates to one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToDict

from headrace.errors import InvalidRequest, RequestCancelled
from headrace.rpc.v1 import inference_pb2
from headrace.tokenizer import Tokenizer
from router.account import hand_off, timings
from router.front_door import FrontDoor, Generation
from router.http.bodies import ChatCompletionBody, CompletionBody, GenerationBody, NamedTool
from router.http.call import Call
from router.http.convert import chat_request, completion_requests
from router.http.replies import (
    CallSource,
    ChatChoice,
    Choice,
    CompletionChoice,
    Json,
    NamedCall,
    NoCalls,
    ParsedCalls,
    ScoredPrompt,
    Usage,
)
from router.http.tool_calls import MARKERS
from router.request_run import Update
from router.requests import ServedModel

_MAX_PROMPT_SCORES = 100_000  # some 10 MB as JSON


class Generator:
    """Both endpoints, as `Endpoint` calls them."""

    def __init__(self, door: FrontDoor, model: ServedModel, max_prompts: int) -> None:
        self._door = door
        self._model = model
        self._max_prompts = max_prompts
        ids = (model.tokenizer.control_id(marker) for marker in MARKERS)
        self._marker_ids = [token_id for token_id in ids if token_id is not None]

    async def complete(self, call: Call) -> None:
        body = await call.parsed(CompletionBody)
        messages = completion_requests(body, call.request_id, self._max_prompts)
        generations = await self._accepted(call, messages)
        _check_scores(generations, body, sum(each.request.sampling.n for each in generations))
        tokenizer = self._model.tokenizer
        scored = [ScoredPrompt(tokenizer, generation.request.token_ids) for generation in generations]
        choices: list[Choice] = [
            CompletionChoice(
                number * generation.request.sampling.n + answer,
                tokenizer,
                before=_prompt_text(tokenizer, messages[number]) if body.echo else "",
                with_logprobs=body.logprobs is not None,
                prompt_ids=generation.request.token_ids if body.return_token_ids else None,
                scored=scored[number] if body.echo else None,
            )
            for number, generation in enumerate(generations)
            for answer in range(generation.request.sampling.n)
        ]
        head = self._head("cmpl", "text_completion", call)
        await _Answer(call, body, generations, choices, scored).send(head, head)

    async def chat(self, call: Call) -> None:
        body = await call.parsed(ChatCompletionBody)
        generations = await self._accepted(call, [chat_request(body, call.request_id, self._marker_ids)])
        _check_scores(generations, body, 1)
        request = generations[0].request
        choices: list[Choice] = [
            ChatChoice(
                answer,
                self._model.tokenizer,
                _call_source(body),
                with_logprobs=bool(body.logprobs),
                with_token_ids=bool(body.return_token_ids),
            )
            for answer in range(request.sampling.n)
        ]
        extra: Json = {"prompt_token_ids": request.token_ids} if body.return_token_ids else {}
        head = self._head("chatcmpl", "chat.completion", call)
        chunk_head = {**head, "object": "chat.completion.chunk"}
        scored = [ScoredPrompt(self._model.tokenizer, request.token_ids)]
        await _Answer(call, body, generations, choices, scored).send({**head, **extra}, chunk_head, extra)

    async def _accepted(
        self, call: Call, messages: Sequence[inference_pb2.GenerateRequest]
    ) -> list[Generation]:
        """All of them, or none: one that is refused is refused before any runs."""
        timeout_s = call.timeout_s
        return [await self._door.accepted(message, call.authorization, timeout_s) for message in messages]

    def _head(self, prefix: str, kind: str, call: Call) -> Json:
        return {
            "id": f"{prefix}-{call.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model.name,
        }


@dataclass(slots=True)
class _Answer:
    """Of one HTTP request: its choices, those of the second prompt behind those of the first."""

    call: Call
    body: GenerationBody
    generations: Sequence[Generation]
    choices: Sequence[Choice]
    scored: Sequence[ScoredPrompt]  # by prompt
    account: Json = field(default_factory=Json)  # where the time went, once that is known and was asked for

    async def send(self, head: Json, chunk_head: Json, first: Json | None = None) -> None:
        """`first` is part of a stream's first chunk. Raises HeadraceError, before the answer or within the stream."""
        usage = Usage(prompt_tokens=sum(len(generation.request.token_ids) for generation in self.generations))
        options = self.body.stream_options
        with_usage = bool(options and options.include_usage)
        continuous = with_usage and bool(options and options.continuous_usage_stats)
        extra = dict(first or {})

        async def on_update(number: int, update: Update) -> None:
            if update.prompt_logprobs is not None:
                self.scored[number].entries.extend(update.prompt_logprobs.entries)
                return
            self._count(usage, self.generations[number], update)
            choice = self.choices[number * self.generations[number].request.sampling.n + update.choice]
            for entry in choice.chunks(update):
                if not self.body.stream:
                    continue
                chunk = {**chunk_head, **extra, "choices": [entry]}
                if with_usage:
                    chunk["usage"] = usage.json() if continuous else None
                extra.clear()
                await self.call.event(chunk)

        await _run(self.generations, on_update)
        if not self.body.stream:
            # Log-probabilities of a long prompt are megabytes: others are served meanwhile.
            is_large = any(scored.entries for scored in self.scored)
            whole = await asyncio.to_thread(self._whole) if is_large else self._whole()
            await self.call.json({**head, **whole, "usage": usage.json(), **self.account})
            return
        if with_usage or self.account:
            last = {"usage": usage.json()} if with_usage else {}
            await self.call.event({**chunk_head, "choices": [], **last, **self.account})
        await self.call.end()

    def _whole(self) -> Json:
        """With log-probabilities of prompts where vLLM has them: for completions in each choice."""
        entries = [choice.whole() for choice in self.choices]
        if self.body.prompt_logprobs is None:
            return {"choices": entries}
        if isinstance(self.body, ChatCompletionBody):
            return {"choices": entries, "prompt_logprobs": self.scored[0].json()}
        per_prompt, of_prompts = len(entries) // len(self.scored), [scored.json() for scored in self.scored]
        for number, entry in enumerate(entries):
            entry["prompt_logprobs"] = of_prompts[number // per_prompt]
        return {"choices": entries}

    def _count(self, usage: Usage, generation: Generation, update: Update) -> None:
        usage.completion_tokens += len(update.token_ids)
        if update.end is None:
            return
        usage.cached_tokens += generation.request.cached_tokens(update.end.cached_tokens)
        if self.body.return_timings:
            of_time, of_kv = (make(update.end, generation.progress) for make in (timings, hand_off))
            self.account = {"timings": _as_json(of_time), "hand_off": _as_json(of_kv)}


async def _run(
    generations: Sequence[Generation], on_update: Callable[[int, Update], Awaitable[None]]
) -> None:
    """All side by side. The first that fails ends the others, and its error is raised. Raises RequestCancelled where
    one was cut off, as its client does not read: the answer is not whole.
    """

    async def one(number: int) -> None:
        async with aclosing(generations[number].updates()) as updates:
            async for update in updates:
                await on_update(number, update)

    if len(generations) == 1:
        await one(0)
        return
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(len(generations))]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if any(task.cancelled() for task in tasks):  # a group takes that for an end like any other
        raise RequestCancelled("the client does not read")


def _check_scores(generations: Sequence[Generation], body: GenerationBody, copies: int) -> None:
    """Each is written into the answer as often as there are `copies`. Raises InvalidRequest."""
    num_top = generations[0].request.sampling.prompt_logprobs
    if num_top is None:
        return
    num_scores = max(len(each.request.token_ids) for each in generations) * (num_top + 1) * copies
    if num_scores > _MAX_PROMPT_SCORES:
        field, value = ("echo", True) if body.prompt_logprobs is None else ("prompt_logprobs", num_top)
        limit = f"at most {_MAX_PROMPT_SCORES:,} log-probabilities of prompts, all choices together"
        raise InvalidRequest(field, value, f"{limit}; here it would be {num_scores:,}")


def _as_json(message: inference_pb2.Timings | inference_pb2.HandOff) -> Json:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _call_source(body: ChatCompletionBody) -> CallSource:
    if isinstance(body.tool_choice, NamedTool):
        return NamedCall(body.tool_choice.function.name)
    if not body.tools or body.tool_choice == "none":
        return NoCalls()
    names = [tool.function.name for tool in body.tools]
    return ParsedCalls(names, 1 if body.parallel_tool_calls is False else None)


def _prompt_text(tokenizer: Tokenizer, message: inference_pb2.GenerateRequest) -> str:
    if message.WhichOneof("input") == "text":
        return message.text
    return b"".join(map(tokenizer.token_bytes, message.token_ids.ids)).decode(errors="replace")
