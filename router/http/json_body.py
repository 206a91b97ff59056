"""From the bytes of a body to a model of it, for large bodies off the event loop.

Parsing holds the interpreter's lock, so that other threads, and the event loop, stand still meanwhile. A long text
costs next to nothing; what costs is the number of values (seconds for 32 MiB of empty lists). So these are bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sized
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from headrace.errors import InvalidRequest

log = structlog.get_logger()

Body = TypeVar("Body", bound=BaseModel)

_INLINE_BYTES = 16 << 10
# What a body of any size may hold. With these, no body stops the loop for more than a fraction of a second.
_MAX_STRINGS = 1 << 17
_MAX_LISTS_AND_OBJECTS = 1 << 16
_MAX_VALUES = 1 << 20
_MAX_SHOWN = 80
_MAX_NAMES_LOGGED = 20
# Parts of pydantic's location that name a branch of a union, not a field.
_BRANCH = re.compile(r"\W|^[A-Z]|^(str|int|float|bool|list|dict)$")


async def parsed(model: type[Body], body: bytes) -> Body:
    """Raises InvalidRequest naming the field."""
    if len(body) <= _INLINE_BYTES:
        return _validated(model, body)
    return await asyncio.to_thread(_validated, model, body)


def _validated(model: type[Body], body: bytes) -> Body:
    if len(body) > _INLINE_BYTES:
        _check_counts(body)
    try:
        found = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise InvalidRequest("body", f"{len(body)} bytes", first["msg"]) from None
        value = None if first["type"] == "missing" else _short(first["input"])
        raise InvalidRequest(_location(first["loc"]), value, first["msg"]) from None
    if found.model_extra:
        log.debug("fields ignored", fields=sorted(found.model_extra)[:_MAX_NAMES_LOGGED])
    return found


def _check_counts(body: bytes) -> None:
    """By searching bytes alone, which is fast."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count("strings", plain.count(b'"') // 2, _MAX_STRINGS)
    outside = b'"'.join(plain.split(b'"')[::2])
    _check_count("lists and objects", outside.count(b"[") + outside.count(b"{"), _MAX_LISTS_AND_OBJECTS)
    _check_count("values", outside.count(b","), _MAX_VALUES)


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest("body", f"{count} {what}", f"at most {limit}")


def _short(value: Any) -> Any:
    """What a message can show without a copy of it all."""
    if isinstance(value, Sized) and len(value) > _MAX_SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    return value


def _location(parts: tuple[int | str, ...]) -> str:
    """`messages[0].content`"""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _BRANCH.search(part):
            text += f".{part}" if text else part
    return text or "body"
