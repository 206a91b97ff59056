"""From a public request to token ids and validated sampling. Every limit is checked here, before anything is queued."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.config import ServiceClassSettings
from headrace.errors import InvalidRequest, NotFound
from headrace.model_config import ModelFiles
from headrace.priority import MAX_PRIORITY, MIN_PRIORITY
from headrace.rpc.convert import LISTS, NUMBERS, grammar_from_proto
from headrace.rpc.v1 import inference_pb2
from headrace.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams, check_token_ids, validate
from headrace.tokenizer import ChatMessage, ChatOptions, IncrementalDetokenizer, Tokenizer, ToolCall
from router.callers import Caller

_ROLES = ("system", "user", "assistant", "tool")
_Json = TypeVar("_Json", list[Any], dict[str, Any])
_MAX_LABEL_BYTES = 256
_TOKENIZE_INLINE_BYTES = 16 << 10  # larger texts are tokenized off the event loop


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this deployment."""

    name: str
    files: ModelFiles
    tokenizer: Tokenizer
    max_model_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that can be sent to a worker as it is."""

    id: str  # ours: unique in the deployment
    label: str  # the caller's
    token_ids: list[int]
    sampling: SamplingParams
    open_ended: bool  # the caller set no max_tokens: up to whatever limit is met first
    cache_salt: str
    timeout_s: float
    explain: bool = False  # the first response says where the request was sent, and why
    tenant: str = ""  # "": the default one
    priority: int = 0  # MIN_PRIORITY..MAX_PRIORITY; lower is more urgent
    ttft_target_s: float | None = None  # of its service class; None: it has none
    itl_target_s: float | None = None
    shown_token_ids: frozenset[int] = frozenset()  # control tokens whose name is part of the text
    session_id: str = ""  # of a conversation

    def cached_tokens(self, reported: int) -> int:
        """Of the prompt. A worker that went on after another's loss may have found tokens of the answer, too."""
        return min(reported, len(self.token_ids))


class RequestParser:
    """Checks and converts public messages for one model."""

    def __init__(
        self,
        model: ServedModel,
        max_prompt_bytes: int,
        classes: Mapping[str, ServiceClassSettings] | None = None,
    ) -> None:
        self._model = model
        self._max_prompt_bytes = max_prompt_bytes
        self._classes = classes or {}

    async def generation(
        self, message: inference_pb2.GenerateRequest, timeout_s: float, caller: Caller | None = None
    ) -> GenerationRequest:
        """Raises InvalidRequest naming the field, or NotFound for another model."""
        caller = caller or Caller()
        self.check_model(message.model)
        for name in ("request_id", "session_id", "cache_salt"):
            label = getattr(message, name)
            if len(label.encode()) > _MAX_LABEL_BYTES:
                raise InvalidRequest(name, label, f"at most {_MAX_LABEL_BYTES} bytes")
        service_class = self._service_class(message.service_class)
        priority = _priority(message, service_class)
        token_ids = await self._prompt(message)
        internal_id = uuid.uuid4().hex
        return GenerationRequest(
            id=internal_id,
            label=message.request_id or internal_id,
            token_ids=token_ids,
            sampling=self._sampling(message.sampling, len(token_ids)),
            open_ended=not message.sampling.HasField("max_tokens"),
            cache_salt=_salt(caller.cache_salt or caller.tenant, message.cache_salt),
            timeout_s=timeout_s,
            tenant=caller.tenant,
            explain=message.explain,
            priority=priority,
            ttft_target_s=service_class and service_class.ttft_target_s,
            itl_target_s=service_class and service_class.itl_target_s,
            shown_token_ids=self._shown(message.sampling),
            session_id=message.session_id,
        )

    async def tokenize(self, message: inference_pb2.TokenizeRequest) -> list[int]:
        self.check_model(message.model)
        match message.WhichOneof("input"):
            case "text":
                return await self._encode_text(message.text, add_special=_adds_special(message))
            case "chat":
                return await self._encode_chat(message.chat)
            case _:
                raise InvalidRequest("input", None, "one of text and chat must be set")

    async def detokenize(self, message: inference_pb2.DetokenizeRequest) -> str:
        self.check_model(message.model)
        token_ids, limit = message.token_ids, self._model.max_model_tokens
        if len(token_ids) > limit:
            raise InvalidRequest("token_ids", f"{len(token_ids)} ids", f"at most {limit} ids")
        check_token_ids("token_ids", token_ids, self._model.tokenizer.vocab_size)
        if len(token_ids) <= _TOKENIZE_INLINE_BYTES:
            return self._text(token_ids)
        return await asyncio.to_thread(self._text, token_ids)

    def _text(self, token_ids: Sequence[int]) -> str:
        text = IncrementalDetokenizer(self._model.tokenizer)
        return text.push(token_ids) + text.finish()

    def check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise NotFound(f"model {name!r} is not served here; this deployment serves {self._model.name!r}")

    def _service_class(self, name: str) -> ServiceClassSettings | None:
        if not name:
            return None
        if name not in self._classes:
            known = ", ".join(sorted(self._classes)) or "none"
            raise InvalidRequest("service_class", name, f"this deployment has: {known}")
        return self._classes[name]

    async def _prompt(self, message: inference_pb2.GenerateRequest) -> list[int]:
        match message.WhichOneof("input"):
            case "text":
                token_ids = await self._encode_text(message.text, add_special=_adds_special(message))
            case "chat":
                token_ids = await self._encode_chat(message.chat)
            case "token_ids":
                token_ids = list(message.token_ids.ids)
                check_token_ids("token_ids", token_ids, self._model.tokenizer.vocab_size)
            case _:
                raise InvalidRequest("input", None, "one of text, chat and token_ids must be set")
        if not token_ids:
            raise InvalidRequest("prompt", 0, "the prompt has no tokens, and needs at least 1")
        return token_ids

    async def _encode_text(self, text: str, *, add_special: bool) -> list[int]:
        size = self._check_size("text", text)
        encode = self._model.tokenizer.encode
        if size <= _TOKENIZE_INLINE_BYTES:
            return encode(text, add_special=add_special)
        return await asyncio.to_thread(lambda: encode(text, add_special=add_special))

    async def _encode_chat(self, chat: inference_pb2.Chat) -> list[int]:
        if not chat.messages:
            raise InvalidRequest("chat.messages", 0, "at least one message")
        if chat.ByteSize() > self._max_prompt_bytes:
            raise InvalidRequest(
                "chat", f"{chat.ByteSize()} bytes", f"at most {self._max_prompt_bytes} bytes"
            )
        messages = [_chat_message(position, entry) for position, entry in enumerate(chat.messages)]
        options = _chat_options(chat)
        encode = self._model.tokenizer.encode_chat
        if chat.ByteSize() <= _TOKENIZE_INLINE_BYTES:
            return encode(messages, options)
        return await asyncio.to_thread(encode, messages, options)

    def _shown(self, message: inference_pb2.SamplingParams) -> frozenset[int]:
        token_ids = message.shown_token_ids
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("shown_token_ids", len(token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids")
        check_token_ids("shown_token_ids", token_ids, self._model.tokenizer.vocab_size)
        return frozenset(token_ids)

    def _check_size(self, field: str, text: str) -> int:
        size = len(text.encode())
        if size > self._max_prompt_bytes:
            raise InvalidRequest(field, f"{size} bytes", f"at most {self._max_prompt_bytes} bytes")
        return size

    def _sampling(self, message: inference_pb2.SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        limit = self._model.max_model_tokens
        names = (*NUMBERS, "logprobs", "prompt_logprobs")
        given: dict[str, Any] = {name: getattr(message, name) for name in names if message.HasField(name)}
        given |= {name: tuple(getattr(message, name)) for name in LISTS}
        params = SamplingParams(
            max_tokens=message.max_tokens
            if message.HasField("max_tokens")
            else max(1, limit - num_prompt_tokens),
            stop_strings=tuple(message.stop),
            logit_bias=tuple(message.logit_bias.items()),
            grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
            **given,
        )
        return validate(
            params,
            num_prompt_tokens=num_prompt_tokens,
            max_model_tokens=limit,
            vocab_size=self._model.tokenizer.vocab_size,
        )


def _salt(of_tenant: str, salt: str) -> str:
    """A caller's own salt divides its tenant's blocks further. It never names another tenant's."""
    return json.dumps([of_tenant, salt]) if salt else of_tenant


def _adds_special(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> bool:
    return message.add_special_tokens if message.HasField("add_special_tokens") else True


def _chat_message(position: int, entry: inference_pb2.ChatMessage) -> ChatMessage:
    where = f"chat.messages[{position}]"
    if entry.role not in _ROLES:
        raise InvalidRequest(f"{where}.role", entry.role, f"one of {', '.join(_ROLES)}")
    calls = tuple(
        ToolCall(call.id, call.name, _parsed(f"{where}.tool_calls", call.arguments_json, dict))
        for call in entry.tool_calls
    )
    return ChatMessage(entry.role, entry.content, calls, entry.tool_call_id, entry.name)


def _chat_options(chat: inference_pb2.Chat) -> ChatOptions:
    continues = chat.continue_final_message
    return ChatOptions(
        add_generation_prompt=chat.add_generation_prompt
        if chat.HasField("add_generation_prompt")
        else not continues,
        continue_final_message=continues,
        tools=_parsed("chat.tools_json", chat.tools_json, list),
        variables=_parsed("chat.template_variables_json", chat.template_variables_json, dict),
    )


def _parsed(field: str, text: str, kind: type[_Json]) -> _Json:
    """JSON of that type; an empty one for an empty text. Raises InvalidRequest."""
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, text, f"must be JSON: {error}") from None
    if not isinstance(value, kind):
        raise InvalidRequest(field, text, f"must be a JSON {'list' if kind is list else 'object'}")
    return value


def _priority(message: inference_pb2.GenerateRequest, service_class: ServiceClassSettings | None) -> int:
    if not message.HasField("priority"):
        return service_class.priority if service_class else 0
    if not MIN_PRIORITY <= message.priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", message.priority, f"must lie in {MIN_PRIORITY}..{MAX_PRIORITY}")
    return message.priority
