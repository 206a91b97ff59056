"""Renders a chat with the model's own Jinja template, in the dialect of Hugging Face transformers. Called by `Tokenizer`.

A template comes with the model file, so it is foreign code: it runs in Jinja's sandbox and can not change what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
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
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template can not be compiled: {error}") from error
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The prompt text. Raises InvalidRequest for a chat that the template refuses, such as two user turns in a row."""
        if not messages:
            raise InvalidRequest("chat", [], "at least one message is needed")
        try:
            return self._template.render(
                messages=[asdict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except SecurityError as error:
            raise ModelError(f"the model's chat template does what is not allowed: {error}") from error
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            roles = [message.role for message in messages]
            raise InvalidRequest("chat", roles, f"the model's chat template refuses it: {error}") from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:  # noqa: FBT001, FBT002 - called by templates
    # Jinja's own filter escapes <, > and & for HTML; a prompt must hold them as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
