"""Trace files, plain or compressed by gzip, in the formats that are published. What is read is told from the content.

mooncake  a JSON object a line: timestamp (ms), input_length, output_length, hash_ids of 512 tokens; of sessions also
          session_id and delay_ms, with times from the start of the session
bailian   the same with timestamp in s, hash_ids of 16 tokens, chat_id and parent_chat_id
agentic   a session a line: requests of t (s), in, out, hash_ids by content, think_time (s); an entry with requests of
          its own is a sub-agent, which runs beside its parent
azure     CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no blocks

Every error is an InvalidRequest that names line and field.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import InvalidRequest
from headrace.traces.trace import Trace, TraceRequest

_MOONCAKE_TOKENS, _BAILIAN_TOKENS, _AGENTIC_TOKENS = 512, 16, 64
_MAX_FILE_BYTES = 4 << 30  # uncompressed
_MAX_TOKENS = 1 << 31
_MAX_S = 1e9
_GZIP = b"\x1f\x8b"
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read_trace(path: Path, on_line: Callable[[int], None] | None = None) -> Trace:
    """In the file's order. `on_line` is called with the number of each line that was read, counted from 1."""
    data = _content(path)
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(str(path), f"byte {error.start}", "it must be text in UTF-8") from None
    lines = _Lines(path, text.splitlines(), on_line)
    name = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    kind, block_tokens, requests = _parsed(lines)
    if not requests:
        raise InvalidRequest(str(path), "no requests", "a trace has at least one")
    return Trace(name, kind, sha256, block_tokens, tuple(requests), relative=_is_relative(kind, requests))


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest("trace", str(path), f"it can not be read: {reason}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest("trace", str(path), f"it has more than {_MAX_FILE_BYTES} bytes")
    return data


class _Lines:
    """Lines with their numbers; errors name them."""

    def __init__(self, path: Path, lines: list[str], on_line: Callable[[int], None] | None) -> None:
        self._path = path
        self._lines = lines
        self._on_line = on_line
        self.number = 0

    @property
    def first(self) -> str:
        return next((line.strip() for line in self._lines if line.strip()), "")

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            self.number = number
            if line.strip():
                yield line
            if self._on_line:
                self._on_line(number)

    def objects(self) -> Iterator[dict[str, Any]]:
        for line in self:
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                raise self.error("", line, "it must be a JSON object") from None
            if not isinstance(row, dict):
                raise self.error("", line, "it must be a JSON object")
            yield row

    def error(self, field: str, value: object, requirement: str) -> InvalidRequest:
        where = f"{self._path}, line {self.number}" + (f", {field}" if field else "")
        return InvalidRequest(where, value, requirement)

    def count(self, row: Mapping[str, Any], field: str, low: int) -> int:
        value = self._given(row, field)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_TOKENS:
            raise self.error(field, value, f"it must be a whole number from {low} to {_MAX_TOKENS}")
        return value

    def seconds(self, row: Mapping[str, Any], field: str, unit_s: float) -> float:
        value = self._given(row, field)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value * unit_s <= _MAX_S
        ):
            raise self.error(field, value, f"it must be a number from 0 to {_MAX_S / unit_s:g}")
        return value * unit_s

    def blocks(self, row: Mapping[str, Any], num_tokens: int, block_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt's blocks; () where there are none."""
        ids = row.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise self.error("hash_ids", ids, "it must be a list of whole numbers from 0 on")
        most = math.ceil(num_tokens / block_tokens)
        if len(ids) > most:
            limit = f"a prompt of {num_tokens} tokens has at most {most} blocks of {block_tokens}"
            raise self.error("hash_ids", f"{len(ids)} ids", limit)
        return tuple(ids)

    def _given(self, row: Mapping[str, Any], field: str) -> Any:
        if field not in row:
            raise self.error(field, None, f"it is missing; fields here: {', '.join(map(str, row))}")
        return row[field]


def _parsed(lines: _Lines) -> tuple[str, int, list[TraceRequest]]:
    """Format, tokens per block, requests."""
    if lines.first.replace(" ", "") == _AZURE_HEADER:
        return "azure", 0, list(_azure(lines))
    first = next(lines.objects(), {})
    if "requests" in first:
        block_tokens = lines.count(first, "block_size", 1) if "block_size" in first else _AGENTIC_TOKENS
        return "agentic", block_tokens, list(_agentic(lines, block_tokens))
    if "chat_id" in first:
        return "bailian", _BAILIAN_TOKENS, list(_bailian(lines))
    return "mooncake", _MOONCAKE_TOKENS, list(_mooncake(lines))


def _is_relative(kind: str, requests: list[TraceRequest]) -> bool:
    return kind == "agentic" or any(request.think_s is not None for request in requests)


def _mooncake(lines: _Lines) -> Iterator[TraceRequest]:
    for row in lines.objects():
        num_input = lines.count(row, "input_length", 1)
        turn = row.get("turn", 1)
        yield TraceRequest(
            at_s=lines.seconds(row, "timestamp", 1e-3),
            num_input=num_input,
            num_output=lines.count(row, "output_length", 0),
            blocks=lines.blocks(row, num_input, _MOONCAKE_TOKENS),
            session=str(row.get("session_id", "")),
            think_s=lines.seconds(row, "delay_ms", 1e-3) if "delay_ms" in row and turn != 1 else None,
        )


def _bailian(lines: _Lines) -> Iterator[TraceRequest]:
    """A chat goes on from its parent: both are of one session, named by its first chat."""
    roots: dict[object, object] = {}
    for row in lines.objects():
        num_input = lines.count(row, "input_length", 1)
        chat, parent = lines.count(row, "chat_id", 0), row.get("parent_chat_id", -1)
        roots[chat] = roots.get(parent, chat)
        yield TraceRequest(
            at_s=lines.seconds(row, "timestamp", 1.0),
            num_input=num_input,
            num_output=lines.count(row, "output_length", 0),
            blocks=lines.blocks(row, num_input, _BAILIAN_TOKENS),
            session=str(roots[chat]),
        )


def _azure(lines: _Lines) -> Iterator[TraceRequest]:
    start: datetime | None = None
    rows = iter(lines)
    next(rows)
    for line in rows:
        [values] = csv.reader([line])
        row = dict(zip(_AZURE_HEADER.split(","), values, strict=False))
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            counts = {field: int(row[field]) for field in ("ContextTokens", "GeneratedTokens")}
        except (KeyError, ValueError):
            raise lines.error(_AZURE_HEADER, line, "it must be a time and two whole numbers") from None
        start = start or at
        yield TraceRequest(
            at_s=max(0.0, (at - start).total_seconds()),
            num_input=lines.count(counts, "ContextTokens", 1),
            num_output=lines.count(counts, "GeneratedTokens", 0),
        )


def _agentic(lines: _Lines, block_tokens: int) -> Iterator[TraceRequest]:
    chains = _Chains()
    for row in lines.objects():
        session = str(row.get("id", f"line {lines.number}"))
        yield from _session(lines, chains, row, session, block_tokens)


def _session(
    lines: _Lines,
    chains: _Chains,
    row: Mapping[str, Any],
    session: str,
    block_tokens: int,
    start_s: float = 0.0,
) -> Iterator[TraceRequest]:
    entries = row.get("requests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise lines.error("requests", entries, "it must be a list of objects")
    is_first = True
    for number, entry in enumerate(entries):
        at_s = start_s + lines.seconds(entry, "t", 1.0)
        if "requests" in entry:
            yield from _session(lines, chains, entry, f"{session}/{number}", block_tokens, at_s)
            continue
        num_input = lines.count(entry, "in", 1)
        yield TraceRequest(
            at_s=at_s,
            num_input=num_input,
            num_output=lines.count(entry, "out", 0),
            blocks=chains.numbers(session.split("/")[0], lines.blocks(entry, num_input, block_tokens)),
            session=session,
            think_s=None if is_first else lines.seconds(entry, "think_time", 1.0),
        )
        is_first = False


class _Chains:
    """From ids of content, good within a session, to ids of content and all before it, good everywhere."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def numbers(self, session: str, content_ids: tuple[int, ...]) -> tuple[int, ...]:
        parent: object = session
        chained: list[int] = []
        for content in content_ids:
            parent = self._numbers.setdefault((parent, content), len(self._numbers))
            chained.append(parent)
        return tuple(chained)
