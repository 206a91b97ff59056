"""What the JSON of a client means: one GenerateRequest for each prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.rpc.v1 import inference_pb2
from router.http.bodies import (
    ChatBody,
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    Message,
    NamedTool,
    StructuredOutputs,
    Tool,
    is_given,
)

_COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat's answer has none
# Same name and form here and in proto.SamplingParams.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs"),
)
# Would change the answer if they were taken; ignoring them would be worse than refusing.
_REFUSED = (
    *("suffix", "functions", "function_call", "use_beam_search", "bad_words", "audio"),
    *(
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
        "chat_template",
        "documents",
        "logits_processors",
    ),
    *("return_tokens_as_token_ids", "kv_transfer_params", "prompt_embeds"),
    # Other servers' names for what an answer has to look like.
    *("structural_tag", "guided_whitespace_pattern", "regex", "ebnf", "grammar", "json_schema"),
)
_REFUSED_IN_CHATS = ("echo", "add_special_tokens")


def completion_requests(
    body: CompletionBody, request_id: str, max_prompts: int
) -> list[inference_pb2.GenerateRequest]:
    """Raises InvalidRequest."""
    prompts = _prompts(body.prompt)
    if not 1 <= len(prompts) <= max_prompts:
        raise InvalidRequest("prompt", f"{len(prompts)} prompts", f"a list has 1 to {max_prompts}")
    if body.echo and body.logprobs is not None and body.stream:
        raise InvalidRequest("echo", "true", "not together with logprobs in a stream")
    if body.return_timings and len(prompts) > 1:
        raise InvalidRequest("return_timings", "true", "not with several prompts")
    message = _base(body)
    if body.logprobs is not None:
        message.sampling.logprobs = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            message.sampling.prompt_logprobs = body.logprobs
    if body.max_tokens is None:
        message.sampling.max_tokens = _COMPLETION_TOKENS
    if body.add_special_tokens is not None:
        message.add_special_tokens = body.add_special_tokens
    requests: list[inference_pb2.GenerateRequest] = []
    for number, prompt in enumerate(prompts):
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(message)
        request.request_id = request_id if len(prompts) == 1 else f"{request_id}-{number}"
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def chat_request(
    body: ChatCompletionBody, request_id: str, marker_ids: Sequence[int]
) -> inference_pb2.GenerateRequest:
    """`marker_ids`: control tokens that begin tool calls. Raises InvalidRequest."""
    _refuse(body.model_extra, _REFUSED_IN_CHATS)
    message = _base(body)
    message.request_id = request_id
    message.chat.CopyFrom(chat_message(body, with_tools=body.tool_choice != "none"))
    sampling = message.sampling
    if body.max_completion_tokens is not None:
        sampling.max_tokens = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "needs logprobs to be true")
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    if body.tools and body.tool_choice != "none":
        sampling.shown_token_ids.extend(marker_ids)
    schema = _forced_calls(body)
    if schema is not None:
        if sampling.HasField("grammar"):
            raise InvalidRequest("tool_choice", body.tool_choice, "not together with another grammar")
        sampling.grammar.json_schema = json.dumps(schema)
    return message


def chat_message(body: ChatBody, *, with_tools: bool = True) -> inference_pb2.Chat:
    chat = inference_pb2.Chat(
        messages=[_chat_message(position, message) for position, message in enumerate(body.messages)],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    if body.tools and with_tools:
        chat.tools_json = json.dumps([tool.model_dump(exclude_unset=True) for tool in body.tools])
    if body.chat_template_kwargs:
        chat.template_variables_json = json.dumps(body.chat_template_kwargs)
    return chat


def _base(body: GenerationBody) -> inference_pb2.GenerateRequest:
    _refuse(body.model_extra, _REFUSED)
    if (body.model_extra or {}).get("skip_special_tokens") is False:
        raise InvalidRequest("skip_special_tokens", "false", "is not supported")
    best_of, n = (body.model_extra or {}).get("best_of"), 1 if body.n is None else body.n
    if best_of not in (None, n):
        raise InvalidRequest("best_of", best_of, f"must equal n, which is {n}")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", body.prompt_logprobs, "not in a stream")
    message = inference_pb2.GenerateRequest(
        model=body.model or "",
        session_id=body.session_id or body.prompt_cache_key or "",
        priority=body.priority,
        service_class=body.service_class or "",
        cache_salt=body.cache_salt or "",
    )
    sampling = message.sampling
    for name in _SAME:
        if (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    sampling.stop_token_ids.extend(body.stop_token_ids or ())
    sampling.allowed_token_ids.extend(body.allowed_token_ids or ())
    for key, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[_token_id(key)] = bias
    _set_grammar(body, sampling)
    return message


def _refuse(extra: Mapping[str, Any] | None, names: Iterable[str], where: str = "") -> None:
    for name in names:
        if is_given(value := (extra or {}).get(name)):
            raise InvalidRequest(where + name, value, "is not supported")


def _token_id(key: str) -> int:
    try:
        token_id = int(key)
    except ValueError:
        token_id = -(2**63) - 1
    if not -(2**63) <= token_id < 2**63:
        raise InvalidRequest("logit_bias", key, "keys are token ids")
    return token_id


def _set_grammar(body: GenerationBody, sampling: inference_pb2.SamplingParams) -> None:
    """From whichever of the three places asks for one. Raises InvalidRequest for two."""
    outputs, answer = body.structured_outputs or StructuredOutputs(), body.response_format
    _refuse(outputs.model_extra, outputs.model_extra or (), "structured_outputs.")
    asked: list[tuple[str, str, Any]] = [
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "lark", body.guided_grammar),
        ("structured_outputs.json", "json_schema", outputs.json_),
        ("structured_outputs.regex", "regex", outputs.regex),
        ("structured_outputs.choice", "choice", outputs.choice),
        ("structured_outputs.grammar", "lark", outputs.grammar),
        ("structured_outputs.json_object", "json_object", outputs.json_object or None),
    ]
    if answer and answer.type == "json_object":
        asked.append(("response_format", "json_object", True))
    if answer and answer.type == "json_schema":
        schema = answer.json_schema.schema_ if answer.json_schema else None
        if schema is None:
            raise InvalidRequest("response_format.json_schema.schema", None, "a json_schema has a schema")
        asked.append(("response_format", "json_schema", schema))
    found = [(name, kind, value) for name, kind, value in asked if value is not None]
    if len(found) > 1:
        names = [name for name, _, _ in found]
        raise InvalidRequest("structured_outputs", names, "only one of these can be asked for")
    for _, kind, value in found:
        if kind == "choice":
            sampling.grammar.choice.SetInParent()  # an empty list is a choice, too, and refused
            sampling.grammar.choice.texts.extend(value)
        elif kind == "json_schema" and not isinstance(value, str):
            sampling.grammar.json_schema = json.dumps(value)
        else:
            setattr(sampling.grammar, kind, value)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """A list of texts and lists of token ids. An empty list is an empty prompt."""
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return [prompt] if is_one else list(prompt)


def _chat_message(position: int, message: Message) -> inference_pb2.ChatMessage:
    content = message.content
    for name in ("audio", "function_call"):
        if is_given((message.model_extra or {}).get(name)):
            raise InvalidRequest(f"messages[{position}].{name}", "", "is not supported")
    return inference_pb2.ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content="\n".join(part.text for part in content) if isinstance(content, list) else content or "",
        tool_calls=[
            inference_pb2.ToolCall(
                id=call.id or "", name=call.function.name, arguments_json=call.function.arguments or ""
            )
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _forced_calls(body: ChatCompletionBody) -> dict[str, Any] | None:
    """The schema of what the model must write: a named function's arguments, or a list of calls of any of them."""
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        for tool in tools:
            if tool.function.name == choice.function.name:
                return dict(tool.function.parameters or {"type": "object"})
        raise InvalidRequest("tool_choice", choice.function.name, "must name one of tools")
    if not tools:
        raise InvalidRequest("tool_choice", choice, "needs tools")
    definitions: dict[str, Any] = {}
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool, definitions) for tool in tools]},
    }
    if body.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """`definitions` gets the tool's own: references point to the root of the whole schema."""
    parameters: dict[str, Any] = dict(tool.function.parameters or {"type": "object"})
    for name, definition in parameters.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise InvalidRequest("tools", name, "two tools define this name differently in their $defs")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
