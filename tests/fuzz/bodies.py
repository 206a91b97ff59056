"""Random JSON bodies: valid ones with fields set to values of any kind, at and beyond edges, known and unknown ones."""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic import BaseModel

_LEAVES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        20,
        65,
        10**6,
        2**31,
        2**63,
        2**64,
        10**30,
        0.5,
        -0.0,
        1e-9,
        1e9,
        1e308,
    ),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "a",
        "NaN",
        "\0",
        "é",
        "삼겹살",
        "👩‍👧",
        "\ud800",
        "{}",
        "[",
        "(a+)+$",
        "user",
        "system",
        "tool",
        "json_object",
    ),
    *("text", "function", "auto", "required", "none", "x" * 3000),
)
_MAX_DEPTH = 4
_VERY_DEEP = 3000


def value(draw: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say, and NaN."""
    kind = draw.random()
    if depth >= _MAX_DEPTH or kind < 0.6:
        return draw.choice(_LEAVES)
    if kind < 0.8:
        return [value(draw, depth + 1) for _ in range(draw.choice((0, 1, 2, 300 if depth == 0 else 3)))]
    return {str(draw.choice(_LEAVES)): value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3)))}


def mutated(
    draw: random.Random, body: dict[str, Any], kind: type[BaseModel], num_changes: int
) -> dict[str, Any]:
    """`body` itself, changed in fields that `kind` knows, or in one that nobody does."""
    names = [field.alias or name for name, field in kind.model_fields.items()]
    for _ in range(num_changes):
        name = draw.choice([*names, "unheard_of"])
        if isinstance(body.get(name), dict | list) and body[name] and draw.random() < 0.6:
            _change_inside(draw, body[name])
        elif draw.random() < 0.1:
            body.pop(name, None)
        else:
            body[name] = value(draw)
    return body


def encoded(draw: random.Random, body: dict[str, Any]) -> bytes:
    """As JSON; of each tenth some bytes are others, of each hundredth the nesting is deep."""
    data = json.dumps(body).encode()
    kind = draw.random()
    if kind < 0.01:
        return b'{"prompt": ' + b"[" * _VERY_DEEP + b"]" * _VERY_DEEP + b"}"
    if kind < 0.1:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(draw.randrange(4)) + data[at + draw.randrange(8) :]
    return data


def _change_inside(draw: random.Random, container: dict[str, Any] | list[Any]) -> None:
    keys: list[Any] = list(container) if isinstance(container, dict) else list(range(len(container)))
    key = draw.choice(keys)
    inner = container[key]
    if isinstance(inner, dict | list) and inner and draw.random() < 0.7:
        _change_inside(draw, inner)
    else:
        container[key] = value(draw, 1)
