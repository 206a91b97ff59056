"""Calls of functions that a model writes into its text, found while the text comes. Three notations, told apart by how
they begin:

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {…}}</tool_call>, again for each further call
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {…}}, …], or [TOOL_CALLS]f[ARGS]{…}
    Llama 3        <|python_tag|>{"name": "f", "parameters": {…}}; …, or the bare object as the whole answer

A bare object or list counts only if it names one of the request's tools. What turns out to be no call is text: nothing
is lost, and nothing that can not become a call waits.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
MARKERS = (_HERMES, "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]")  # control tokens in some models
_BEGINNINGS = MARKERS[:3]
_BARE = ('{"', '[{"')  # without white space
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?")
_GLUE = re.compile(r"(?:[\s\[\],;]|\[TOOL_CALLS\]|<\|python_tag\|>|</?tool_call>)*")
_ID_BYTES = 5  # nine characters of it: Mistral's templates take no other length


@dataclass(frozen=True, slots=True)
class FoundCall:
    """`arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: secrets.token_hex(_ID_BYTES)[:9])


class ToolCallParser:
    """One per answer. `push` text as it comes, then `finish`; both return text that is no call, and whole calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._beginning: str | None = (
            None  # of the calls that `_held` belongs to; "" for bare ones; None: text
        )
        self._may_be_bare = True  # nothing but white space so far
        self._found_any = False
        self._object = _ObjectScan()

    def push(self, text: str) -> tuple[str, list[FoundCall]]:
        self._held += text
        content, calls = "", list[FoundCall]()
        while True:
            before = (self._beginning, len(self._held))
            if self._beginning is None:
                content += self._text()
            else:
                content += self._call(calls)
            if before == (self._beginning, len(self._held)):
                return content, calls

    def finish(self) -> tuple[str, list[FoundCall]]:
        """What was held back and never became a call."""
        left, self._held = self._held, ""
        if self._beginning is None:
            return left, []
        if self._found_any and _GLUE.fullmatch(left):
            return "", []
        return (left if self._found_any else self._beginning + left), []

    def _text(self) -> str:
        """Text up to where calls begin, or could."""
        if self._may_be_bare:
            start = "".join(self._held.split())
            if start.startswith(_BARE):
                self._may_be_bare = False
                return self._begin("", 0, 0)
            if start not in _BEGINNINGS and any(each.startswith(start) for each in (*_BEGINNINGS, *_BARE)):
                return ""  # not decided yet
            self._may_be_bare = False
        found = [(at, marker) for marker in _BEGINNINGS if (at := self._held.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            return self._begin(marker, at, at + len(marker))
        end = len(self._held) - max(_overlap(self._held, marker) for marker in _BEGINNINGS)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _begin(self, beginning: str, text_end: int, call_start: int) -> str:
        text, self._held = self._held[:text_end], self._held[call_start:]
        self._beginning, self._object, self._found_any = beginning, _ObjectScan(), False
        return text

    def _call(self, calls: list[FoundCall]) -> str:
        """The next object, once it is whole. Returns text if it was no call."""
        if self._beginning == _HERMES and (at := self._closing()) >= 0:
            end = at + len(_HERMES_END)
            text = "" if self._found_any else _HERMES + self._held[:end]
            self._held, self._beginning = self._held[end:], None
            return text
        span = self._object.find(self._held)
        if span is None:
            return ""
        start, end = span
        call = self._read(self._held[:start], self._held[start:end])
        if call is not None:
            calls.append(call)
            self._found_any = True
            self._held, self._object = self._held[end:], _ObjectScan()
            return ""
        text = ("" if self._found_any else self._beginning or "") + self._held[:end]
        self._held, self._beginning = self._held[end:], None
        return text

    def _closing(self) -> int:
        """Where the end of a Hermes call stands before any object; -1: nowhere."""
        brace = self._held.find("{")
        return self._held.find(_HERMES_END, 0, len(self._held) if brace < 0 else brace)

    def _read(self, before: str, text: str) -> FoundCall | None:
        """A call, from the object's text and what stands before it."""
        try:
            value: dict[str, Any] = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return None
        named = _NAMED.fullmatch(before.removeprefix("[TOOL_CALLS]").strip())
        if self._beginning == "[TOOL_CALLS]" and named:
            return FoundCall(named[1], text)
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or (self._beginning == "" and name not in self._names):
            return None
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return FoundCall(name, as_text)


class _ObjectScan:
    """Where the first JSON object of a text that grows begins and ends. Each character is looked at once."""

    def __init__(self) -> None:
        self._start = -1
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> tuple[int, int] | None:
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"' and self._depth:
                self._in_string = True
            elif character == "{":
                if not self._depth:
                    self._start = self._at - 1
                self._depth += 1
            elif character == "}" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return self._start, self._at
        return None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest tail of `text` that `marker` begins with."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
