"""The JSON that clients send: OpenAI's fields and vLLM's. Types only; ranges are `router.requests`' to check, where the
number fits the protocol. An absent field and null are the same. Fields that are not named here are ignored, as in vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class _Body(BaseModel):
    # Strict: "0.5" is no number and 1 is no truth value.
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Body):
    schema_: JsonValue = Field(default=None, alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    json_: JsonValue = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(_Body):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int32 | None = None
    min_p: Number | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: TokenIds | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonValue = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    priority: Int32 | None = None
    service_class: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None  # OpenAI's name for much the same
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None


class CompletionBody(GenerationBody):
    prompt: Annotated[
        str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)],
        Field(union_mode="left_to_right"),
    ]
    logprobs: Int32 | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class FunctionCall(_Body):
    name: str
    arguments: str | None = None


class CalledTool(_Body):
    id: str | None = None
    function: FunctionCall


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Function(_Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class Tool(_Body):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(_Body):
    """A chat, as far as it makes a prompt."""

    model: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


class ChatCompletionBody(ChatBody, GenerationBody):
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeTextBody(_Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody):
    return_token_strs: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: TokenIds


def is_given(value: Any) -> bool:
    """Whether a field that is not supported asks for anything."""
    return value not in (None, False, "", [], {})
