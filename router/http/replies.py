"""Updates as the choices of chunks, for each endpoint. What is not streamed is put together from the same chunks, so
both forms say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from headrace.rpc.v1.inference_pb2 import TokenLogprobs
from headrace.sampling_params import FinishReason
from headrace.tokenizer import IncrementalDetokenizer, Tokenizer
from router.http.tool_calls import FoundCall, ToolCallParser
from router.request_run import Update

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Of all prompts and answers of one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class ScoredPrompt:
    """Log-probabilities of a prompt's tokens: those from the second on, which come before its answers."""

    tokenizer: Tokenizer
    token_ids: Sequence[int]
    entries: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    def json(self) -> list[Json | None]:
        """As vLLM writes them: by token id, nothing for the first token. A rank only of the likeliest."""
        scored = zip(self.token_ids[1:], self.entries, strict=True)
        return [None, *(self._alternatives(token_id, entry) for token_id, entry in scored)]

    def _alternatives(self, token_id: int, entry: TokenLogprobs) -> Json:
        tops = list(entry.top_ids)
        known = {token_id: entry.logprob, **dict(zip(tops, entry.top_logprobs, strict=True))}
        return {
            str(each): {
                "logprob": logprob,
                "rank": tops.index(each) + 1 if each in tops else None,
                "decoded_token": token_text(self.tokenizer, each),
            }
            for each, logprob in known.items()
        }


class Choice(Protocol):
    """One answer on its way."""

    def chunks(self, update: Update) -> list[Json]:
        """Entries for `choices` of as many chunks; none when there is nothing to say yet."""
        ...

    def whole(self) -> Json:
        """All of it as one entry, after the last update."""
        ...


@dataclass(slots=True)
class CompletionChoice:
    """Of /v1/completions. `before` is text that the answer begins with: an echo of the prompt, whose log-probabilities
    are a part of the answer's, too: `scored`.
    """

    index: int
    tokenizer: Tokenizer
    before: str
    with_logprobs: bool
    prompt_ids: Sequence[int] | None  # None: token ids are not asked for
    scored: ScoredPrompt | None
    _chunks: list[Json] = field(default_factory=list[Json])
    _offset: int = 0
    _counter: IncrementalDetokenizer | None = None

    def chunks(self, update: Update) -> list[Json]:
        is_first = not self._chunks
        text = self.before + update.text if is_first else update.text
        if not (text or update.logprobs or update.finish_reason or (self.prompt_ids and update.token_ids)):
            return []
        chunk: Json = {
            "index": self.index,
            "text": text,
            "logprobs": None,
            "finish_reason": update.finish_reason,
            "stop_reason": update.matched_stop,
        }
        if self.with_logprobs:
            chunk["logprobs"] = self._of_update(update)
        if self.prompt_ids is not None:
            chunk["token_ids"] = update.token_ids
            if is_first:
                chunk["prompt_token_ids"] = list(self.prompt_ids)
        self._chunks.append(chunk)
        return [chunk]

    def whole(self) -> Json:
        last = self._chunks[-1]
        whole = {**self._chunks[0], **{key: last[key] for key in ("finish_reason", "stop_reason")}}
        whole["text"] = "".join(chunk["text"] for chunk in self._chunks)
        if self.with_logprobs:
            parts = [chunk["logprobs"] for chunk in self._chunks]
            if self.scored is not None:
                parts.insert(0, self._of_prompt(self.scored))
            whole["logprobs"] = {key: [entry for part in parts for entry in part[key]] for key in parts[-1]}
        if self.prompt_ids is not None:
            whole["token_ids"] = [token for chunk in self._chunks for token in chunk["token_ids"]]
        return whole

    def _of_update(self, update: Update) -> Json:
        if self._counter is None:
            self._counter = IncrementalDetokenizer(self.tokenizer)
            self._offset = len(self.before)
        found, length = self._logprobs(update.token_ids, update.logprobs, self._counter, self._offset)
        self._offset += length
        return found

    def _of_prompt(self, scored: ScoredPrompt) -> Json:
        entries = [None, *scored.entries]
        return self._logprobs(scored.token_ids, entries, IncrementalDetokenizer(self.tokenizer), 0)[0]

    def _logprobs(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        counter: IncrementalDetokenizer,
        start: int,
    ) -> tuple[Json, int]:
        """And the length of their text, which begins at `start`."""
        lengths = [len(counter.push([token_id])) for token_id in token_ids]
        pairs = list(zip(token_ids, entries, strict=True))
        found: Json = {
            "tokens": [token_text(self.tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [entry and self._top(token_id, entry) for token_id, entry in pairs],
            "text_offset": list(accumulate(lengths[:-1], initial=start))[: len(lengths)],
        }
        return found, sum(lengths)

    def _top(self, token_id: int, entry: TokenLogprobs) -> Json:
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        alternatives = {token_text(self.tokenizer, top): value for top, value in tops}
        return {**alternatives, token_text(self.tokenizer, token_id): entry.logprob}


class CallSource(Protocol):
    """What finds calls of functions in an answer's text."""

    def push(self, text: str) -> tuple[str, list[Json]]: ...

    def finish(self) -> tuple[str, list[Json]]: ...


class NoCalls:
    def push(self, text: str) -> tuple[str, list[Json]]:
        return text, []

    def finish(self) -> tuple[str, list[Json]]:
        return "", []


class ParsedCalls:
    """Calls that the model chose to make, each in one piece. At most `limit` of them are passed on."""

    def __init__(self, names: Sequence[str], limit: int | None) -> None:
        self._parser = ToolCallParser(names)
        self._limit = limit
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[Json]]:
        content, calls = self._parser.push(text)
        return content, self._numbered(calls)

    def finish(self) -> tuple[str, list[Json]]:
        content, calls = self._parser.finish()
        return content, self._numbered(calls)

    def _numbered(self, calls: list[FoundCall]) -> list[Json]:
        left = len(calls) if self._limit is None else max(0, self._limit - self._num_calls)
        numbered: list[Json] = []
        for call in calls[:left]:
            numbered.append(_call(self._num_calls, call))
            self._num_calls += 1
        return numbered


class NamedCall:
    """The one call that the request names: its arguments are the answer, passed on as they come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> tuple[str, list[Json]]:
        if self._has_begun:
            return "", [{"index": 0, "function": {"arguments": text}}] if text else []
        self._has_begun = True
        return "", [_call(0, FoundCall(self._name, text))]

    def finish(self) -> tuple[str, list[Json]]:
        return "", []


@dataclass(slots=True)
class ChatChoice:
    """Of /v1/chat/completions."""

    index: int
    tokenizer: Tokenizer
    calls: CallSource
    with_logprobs: bool
    with_token_ids: bool
    _chunks: list[Json] = field(default_factory=list[Json])

    def chunks(self, update: Update) -> list[Json]:
        content, calls = self.calls.push(update.text)
        if update.finish_reason is not None:
            rest, more_calls = self.calls.finish()
            content, calls = content + rest, calls + more_calls
        delta: Json = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = calls
        chunk: Json = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self.with_logprobs:
            chunk["logprobs"] = {"content": _chat_logprobs(self.tokenizer, update)}
        if self.with_token_ids:
            chunk["token_ids"] = update.token_ids
        new = [] if self._chunks else [self._opening()]
        if (
            delta
            or update.finish_reason
            or ((self.with_logprobs or self.with_token_ids) and update.token_ids)
        ):
            new.append(chunk)
        self._chunks += new
        if update.finish_reason is not None:
            chunk["finish_reason"] = self._reason(update.finish_reason)
            chunk["stop_reason"] = update.matched_stop
        return new

    def whole(self) -> Json:
        content = "".join(chunk["delta"].get("content", "") for chunk in self._chunks)
        calls = _joined([call for chunk in self._chunks for call in chunk["delta"].get("tool_calls", ())])
        message: Json = {"role": "assistant", "content": None if calls and not content.strip() else content}
        if calls:
            message["tool_calls"] = calls
        whole: Json = {
            "index": self.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._chunks[-1]["finish_reason"],
            "stop_reason": self._chunks[-1]["stop_reason"],
        }
        if self.with_logprobs:
            entries = [chunk["logprobs"]["content"] for chunk in self._chunks if chunk["logprobs"]]
            whole["logprobs"] = {"content": [entry for some in entries for entry in some]}
        if self.with_token_ids:
            whole["token_ids"] = [token for chunk in self._chunks for token in chunk.get("token_ids", ())]
        return whole

    def _opening(self) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _reason(self, reason: FinishReason) -> str:
        """OpenAI says "stop" of a call that the request itself has named."""
        chose = not isinstance(self.calls, NamedCall) and any(
            "tool_calls" in chunk["delta"] for chunk in self._chunks
        )
        return "tool_calls" if chose and reason is FinishReason.STOP else reason.value


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a string; one that is no whole character as OpenAI writes it: `bytes:\\xf0\\x9f`."""
    data = tokenizer.shown_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _call(index: int, call: FoundCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": call.id, "type": "function", "function": function}


def _joined(pieces: list[Json]) -> list[Json]:
    """Whole calls of the pieces of a stream, without their index."""
    calls: list[Json] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls


def _chat_logprobs(tokenizer: Tokenizer, update: Update) -> list[Json]:
    return [
        {
            **_logprob(tokenizer, token_id, entry.logprob),
            "top_logprobs": [
                _logprob(tokenizer, top, value)
                for top, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(update.token_ids, update.logprobs, strict=True)
    ]


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    token = token_text(tokenizer, token_id)
    return {"token": token, "logprob": logprob, "bytes": list(tokenizer.shown_bytes(token_id))}
