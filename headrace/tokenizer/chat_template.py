"""Renders a chat with the model's own Jinja template, in the dialect of Hugging Face transformers. Used by `Tokenizer`.

A template comes with the model file, so it is foreign code: it runs in Jinja's sandbox and can not change what it is
given. Filters, globals and variables are those of `transformers/utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import InvalidRequest, ModelError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


class ChatTemplate:
    """Compiled once. `bos_token` and `eos_token` are the texts that templates write for them."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
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

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The prompt text. Raises InvalidRequest for a chat that the template refuses, such as two users in a row."""
        if not messages:
            raise InvalidRequest("chat", [], "at least one message is needed")
        try:
            return self._template.render(
                messages=[asdict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except SecurityError as error:
            raise ModelError(f"the model's chat template does what is not allowed: {error}") from error
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            roles = [message.role for message in messages]
            raise InvalidRequest("chat", roles, f"the model's chat template refuses it: {error}") from error


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
