"""The playground: one prompt, its text as it comes, and where it went: {"kind": "plan" | "text" | "end", …}."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import InvalidRequest
from headrace.rpc.v1 import inference_pb2, worker_pb2
from router.front_door import Generation
from router.request_run import Progress, Update

Json = dict[str, Any]


class Question(BaseModel):
    """What the page sends. Ranges are `router.requests`' to check, where the number fits the protocol."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Literal["chat", "completion"]
    prompt: str
    system: str = ""  # of a chat
    max_tokens: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    regex: str = ""  # that the whole answer has to match; "": any answer


def question_from_json(body: bytes) -> Question:
    """Raises InvalidRequest naming the field."""
    try:
        return Question.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        value = first["input"] if first["loc"] else f"{len(body)} bytes"
        raise InvalidRequest(field, value, first["msg"]) from None


def request_of(question: Question) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(
        temperature=question.temperature, max_tokens=question.max_tokens, seed=question.seed
    )
    if question.regex:
        sampling.grammar.regex = question.regex
    request = inference_pb2.GenerateRequest(sampling=sampling, explain=True)
    if question.mode == "completion":
        request.text = question.prompt
        return request
    if question.system:
        request.chat.messages.add(role="system", content=question.system)
    request.chat.messages.add(role="user", content=question.prompt)
    return request


async def events(generation: Generation) -> AsyncGenerator[Json]:
    """Raises HeadraceError. Closing it cancels the request."""
    progress = generation.progress
    async with aclosing(generation.updates()) as updates:
        async for update in updates:
            if progress.explanation is not None:
                yield {"kind": "plan", "plan": _as_json(progress.explanation)}
                progress.explanation = None
            yield {
                "kind": "text",
                "text": update.text,
                "tokens": len(update.token_ids),
                "at_s": time.monotonic() - progress.arrived_at,
            }
            if update.end is not None:
                yield _ended(generation, update, update.end)


def _ended(generation: Generation, update: Update, end: worker_pb2.SequenceEnd) -> Json:
    progress = generation.progress
    return {
        "kind": "end",
        "finish_reason": update.finish_reason,
        "request_id": generation.request.label,
        "prompt_tokens": len(generation.request.token_ids),
        "completion_tokens": progress.num_output_tokens,
        "dispatches": progress.num_dispatches,
        "decode_worker": progress.plan.decode.worker_id if progress.plan else "",
        "report": _as_json(end),
        "ttft_s": progress.first_token_at - progress.arrived_at,
        "total_s": progress.ended_at - progress.arrived_at,
        "phases": phases(progress, end),
    }


def phases(progress: Progress, end: worker_pb2.SequenceEnd) -> list[Json]:
    """Consecutive, in seconds from arrival. The worker's own times are known of the last dispatch only, so a request
    that had several has its way to the first token in one piece.
    """
    planned_s = progress.planned_at - progress.arrived_at
    first_s = progress.first_token_at - progress.arrived_at
    bounds = [("admission and routing", planned_s)]
    if progress.num_dispatches == 1 and end.prefill_s:
        queued_s = min(first_s, planned_s + end.queue_s)
        prefilled_s = min(first_s, queued_s + end.prefill_s)
        bounds += [("queue of the worker", queued_s), ("prefill", prefilled_s)]
    bounds += [("first token on its way", first_s), ("decode", progress.ended_at - progress.arrived_at)]
    starts_s = [0.0, *(end_s for _, end_s in bounds)]
    return [
        {"name": name, "start_s": start_s, "end_s": end_s}
        for (name, end_s), start_s in zip(bounds, starts_s, strict=False)
    ]


def _as_json(message: inference_pb2.RoutingPlan | worker_pb2.SequenceEnd) -> Json:
    """Fields by their names in the protocol, zeros included; 64-bit integers are texts, as ever in protobuf's JSON."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
