"""What an answer has to look like: a request's grammar as plain data, checked as far as that needs no compiler.

Made at every entrance, carried to the engine as text, compiled there (`headrace.engine.structured`). Torch-free.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from headrace.errors import InvalidRequest

# Lark outside strings, regular expressions and comments, by llguidance's own lexer (parser/src/lark/lexer.rs).
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # text: the schema, an object or a boolean
    JSON_OBJECT = "json_object"  # any JSON object; text: empty
    REGEX = "regex"  # matches the whole answer; text: the expression, in the syntax of Rust's regex
    CHOICE = "choice"  # one of several strings; text: a JSON list of them
    LARK = "lark"  # text: a grammar in llguidance's dialect of Lark


# What a compiler needs for an expression, or for terminals made of terminals, grows with the cube of their length.
MAX_GRAMMAR_BYTES = {
    GrammarKind.JSON_SCHEMA: 64 * 1024,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: 16 * 1024,
    GrammarKind.CHOICE: 64 * 1024,
    GrammarKind.LARK: 16 * 1024,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    text: str


def check(grammar: Grammar) -> Grammar:
    """The grammar, or InvalidRequest. What passes can still be refused by the compiler."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        _refuse(grammar, "must be valid Unicode text")
    if (grammar.kind is GrammarKind.JSON_OBJECT) != (not grammar.text):
        _refuse(grammar, "json_object has no text, every other kind has one")
    limit = MAX_GRAMMAR_BYTES[grammar.kind]
    if size > limit:
        raise InvalidRequest("grammar", f"{size} bytes", f"{grammar.kind}: at most {limit} bytes")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            if schema(grammar) is False:
                _refuse(grammar, "nothing matches this schema")
        case GrammarKind.CHOICE:
            choices(grammar)
        case GrammarKind.LARK if "<" in _LARK_TEXT.sub("", grammar.text):
            # By id it could allow what ends an answer in its middle, or ids that no token has.
            _refuse(grammar, 'tokens by id or name (<...>) are not supported; write their text as "..."')
        case _:
            pass
    return grammar


def schema(grammar: Grammar) -> dict[str, Any] | bool:
    """The JSON schema of a grammar of that kind. Raises InvalidRequest if it is none."""
    found = _parsed(grammar)
    if not isinstance(found, dict | bool):
        _refuse(grammar, "a JSON schema is an object or a boolean")
    return found


def choices(grammar: Grammar) -> list[str]:
    """The strings of a grammar that is a choice. Raises InvalidRequest if these are none."""
    found = _parsed(grammar)
    if not (isinstance(found, list) and found and all(isinstance(text, str) and text for text in found)):
        _refuse(grammar, "must be a JSON list of at least one string, none of them empty")
    try:
        "".join(found).encode()
    except UnicodeEncodeError:  # an escape can write half a surrogate pair
        _refuse(grammar, "its strings must be valid Unicode text")
    return found


def _parsed(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        _refuse(grammar, "is nested too deeply")
    except ValueError as error:
        _refuse(grammar, f"must be valid JSON: {error}")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _refuse(grammar: Grammar, requirement: str) -> NoReturn:
    raise InvalidRequest("grammar", grammar.text, f"{grammar.kind}: {requirement}")
