"""Renders a chat with the model's own Jinja template, in the dialect of Hugging Face transformers. Used by `Tokenizer`.

A template comes with the model file, so it is foreign code: it runs in Jinja's sandbox and can not change what it is
given. Filters, globals and variables are those of `transformers/utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import meta
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import InvalidRequest, ModelError


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of a tool's message: the call that it answers
    name: str = ""

    def variables(self) -> dict[str, Any]:
        """As templates take it: they test whether a key is there."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        for key in ("tool_call_id", "name"):
            if getattr(self, key):
                found[key] = getattr(self, key)
        return found


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a template is given beside the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the text ends with the last message, which is left open
    tools: Sequence[Any] = ()  # as the template wants them, which is OpenAI's form
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of this template only


class ChatTemplate:
    """Compiled once. `bos_token` and `eos_token` are the texts that templates write for them."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
            self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template can not be compiled: {error}") from error
        self._variables: dict[str, Any] = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            # Templates test `tools is none`, which a variable that is not there would fail.
            "tools": None,
            "documents": None,
        }

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        """The prompt text. Raises InvalidRequest for a chat that the template refuses, such as two users in a row."""
        if not messages:
            raise InvalidRequest("chat", [], "at least one message is needed")
        if options.tools and not self._takes_tools:
            raise InvalidRequest(
                "tools", f"{len(options.tools)} tools", "the model's chat template takes none"
            )
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidRequest("add_generation_prompt", "true", "not together with continue_final_message")
        variables = {
            **options.variables,
            **self._variables,
            "messages": [message.variables() for message in messages],
            "add_generation_prompt": options.add_generation_prompt,
        }
        if options.tools:
            variables["tools"] = options.tools
        try:
            text = self._template.render(variables)
        except SecurityError as error:
            raise ModelError(f"the model's chat template does what is not allowed: {error}") from error
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            roles = [message.role for message in messages]
            raise InvalidRequest("chat", roles, f"the model's chat template refuses it: {error}") from error
        return _left_open(text, messages[-1].content) if options.continue_final_message else text


def _left_open(text: str, final_message: str) -> str:
    """The text up to the end of the final message, as in transformers: what the template trims is trimmed."""
    start = text.rfind(final_message.strip())
    if start < 0:
        raise InvalidRequest(
            "continue_final_message",
            "true",
            "the model's chat template does not show the last message as it is",
        )
    untrimmed = final_message.lstrip()
    whole = text[start : start + len(untrimmed)] == untrimmed
    return text[: start + len(untrimmed if whole else final_message.strip())]


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - called by templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; a prompt must hold them as they are.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
