"""Random protobuf messages, by their descriptors: a valid one with fields replaced by values at and beyond edges."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

_INTEGERS = {
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_INT64: (-(2**63), 2**63 - 1),
    Field.TYPE_UINT64: (0, 2**64 - 1),
}
_NUMBERS = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-9, 1e9, 1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "\0",
    "é",
    "삼겹살",
    "👩‍👧",
    "{}",
    "[",
    "\\",
    "(a+)+$",
    "$ref",
    "system",
    "user",
    "﻿",
    "x" * 300,
)
_MANY = 300  # entries of a list that is long
_SEVERAL = 20  # messages in one: some are large


def mutated(draw: random.Random, message: Message, num_changes: int) -> Message:
    """`message` itself, changed if it has fields."""
    for _ in range(num_changes if message.DESCRIPTOR.fields else 0):
        owner, field = _some_field(draw, message)
        _change(draw, owner, field)
    return message


def mangled(draw: random.Random, data: bytes) -> bytes:
    """Bytes of a message with some of them replaced, left out or repeated: mostly no message any more."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(4):
            case 0:
                del changed[at : at + draw.randint(1, 8)]
            case 1:
                changed[at:at] = draw.randbytes(draw.randint(1, 8))
            case 2:
                changed[at : at + 1] = draw.randbytes(1)
            case _:
                changed[at:at] = changed[at : at + 32]
    return bytes(changed)


def _some_field(draw: random.Random, message: Message) -> tuple[Message, Field]:
    """Of the message, or of one that it holds."""
    field = draw.choice(message.DESCRIPTOR.fields)
    if _is_single_message(field) and field.message_type.fields and draw.random() < 0.8:
        return _some_field(draw, getattr(message, field.name))
    return message, field


def _change(draw: random.Random, owner: Message, field: Field) -> None:
    if draw.random() < 0.1:
        owner.ClearField(field.name)
    elif _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        getattr(owner, field.name)[_scalar(draw, key)] = _scalar(draw, value)
    elif field.is_repeated:
        _extend(draw, getattr(owner, field.name), field)
    elif _is_single_message(field):
        getattr(owner, field.name).SetInParent()
    else:
        setattr(owner, field.name, _scalar(draw, field))


def _extend(draw: random.Random, entries: Any, field: Field) -> None:
    count = draw.choice((1, 1, 2, 5, _MANY))
    if field.message_type is None:
        entries.extend(_scalar(draw, field) for _ in range(count))
        return
    for _ in range(min(count, _SEVERAL)):
        mutated(draw, entries.add(), 2)


def _scalar(draw: random.Random, field: Field) -> Any:
    if field.type in _INTEGERS:
        lowest, highest = _INTEGERS[field.type]
        edges = (0, 1, 2, -1, 20, 21, 64, 65, 10**6, 2**31 - 1, lowest, highest)
        return draw.choice([edge for edge in edges if lowest <= edge <= highest])
    if field.type in (Field.TYPE_DOUBLE, Field.TYPE_FLOAT):
        return draw.choice(_NUMBERS)
    if field.type == Field.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type == Field.TYPE_ENUM:
        return draw.choice([value.number for value in field.enum_type.values])
    text = draw.choice(_TEXTS) * draw.choice((1, 1, 1, 2, 1000))
    return text.encode() if field.type == Field.TYPE_BYTES else text


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_single_message(field: Field) -> bool:
    return field.message_type is not None and not field.is_repeated
