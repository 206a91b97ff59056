"""What an answer has to look like. Checked at every entrance; compiled by the engine (`engine/structured.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    text: str


def check(grammar: Grammar) -> None:
    pass
