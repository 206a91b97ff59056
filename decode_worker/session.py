"""One router's session: the deltas of all its requests and their choices, one frame per engine step.

A router that reads slowly gets fewer, fuller frames: what is pending merges per choice, so memory is bounded by the
answers' own lengths.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from decode_worker.pace import Times
from headrace.rpc.v1 import inference_pb2, worker_pb2
from headrace.sampling_params import FinishReason


@dataclass(slots=True)
class HandOffReport:
    """How the KV of a request came here."""

    cached_tokens: int = 0
    prefill_worker: str = ""  # empty: prefilled here
    blocks_moved: int = 0
    bytes_moved: int = 0
    transfer_s: float = 0.0
    failed_attempts: int = 0


@dataclass(slots=True)
class End:
    """No error: all choices came to their ends."""

    error_code: str = ""
    error_message: str = ""
    error_field: str = ""  # of an INVALID_ARGUMENT


@dataclass(slots=True)
class _Delta:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(slots=True)
class _News:
    """Of one request."""

    choices: dict[int, _Delta] = field(default_factory=dict)
    prompt_logprobs: worker_pb2.PromptLogprobs | None = None
    end: worker_pb2.SequenceEnd | None = None

    def of(self, choice: int) -> _Delta:
        return self.choices.setdefault(choice, _Delta())

    def messages(self, request_id: str) -> list[worker_pb2.SequenceDelta]:
        """At least one; what is of the prompt is in the first, the end in the last."""
        deltas = [
            worker_pb2.SequenceDelta(
                request_id=request_id,
                token_ids=delta.token_ids,
                logprobs=delta.logprobs,
                choice=choice,
                finish_reason=delta.finish_reason,
            )
            for choice, delta in self.choices.items()
        ] or [worker_pb2.SequenceDelta(request_id=request_id)]
        if self.prompt_logprobs is not None:
            deltas[0].prompt_logprobs.CopyFrom(self.prompt_logprobs)
        if self.end is not None:
            deltas[-1].end.CopyFrom(self.end)
        return deltas


class Session:
    """Used on the event loop only. `flush` after each engine step makes what was added visible as one frame."""

    def __init__(self, incarnation: str, transport: str) -> None:
        self._incarnation = incarnation
        self._transport = transport
        self._pending: dict[str, _News] = {}
        self._links: dict[str, worker_pb2.Link] = {}  # by worker id
        self._ready = asyncio.Event()

    def add_token(
        self, request_id: str, choice: int, token_id: int, logprobs: inference_pb2.TokenLogprobs | None
    ) -> None:
        delta = self._news(request_id).of(choice)
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)

    def add_prompt_logprobs(
        self, request_id: str, first_index: int, entries: Iterable[inference_pb2.TokenLogprobs]
    ) -> None:
        """They follow those that were added before."""
        news = self._news(request_id)
        if news.prompt_logprobs is None:
            news.prompt_logprobs = worker_pb2.PromptLogprobs(first_index=first_index)
        news.prompt_logprobs.entries.extend(entries)

    def add_choice_end(self, request_id: str, choice: int, reason: FinishReason) -> None:
        self._news(request_id).of(choice).finish_reason = reason

    def add_end(self, request_id: str, end: End, report: HandOffReport, times: Times) -> None:
        self._news(request_id).end = worker_pb2.SequenceEnd(
            error_code=end.error_code,
            error_message=end.error_message,
            error_field=end.error_field,
            cached_tokens=report.cached_tokens,
            prefill_worker=report.prefill_worker,
            blocks_moved=report.blocks_moved,
            bytes_moved=report.bytes_moved,
            transfer_s=report.transfer_s,
            transport=self._transport,
            failed_attempts=report.failed_attempts,
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            prefill_tokens=times.prefill_tokens,
            context_tokens=times.context_tokens,
            decode_s=times.decode_s,
            decode_tokens=times.decode_tokens,
            mean_batch=times.mean_batch,
            mean_batch_context_tokens=times.mean_batch_context_tokens,
        )

    def add_link(self, link: worker_pb2.Link) -> None:
        """Told at once: there may be no step for a long time."""
        self._links[link.worker_id] = link
        self._ready.set()

    def flush(self) -> None:
        if self._pending:
            self._ready.set()

    async def frames(self) -> AsyncIterator[worker_pb2.StepFrame]:
        """The first frame says who is there; then one each time something is ready, as fast as the router reads."""
        yield worker_pb2.StepFrame(incarnation=self._incarnation)
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, {}
            links, self._links = self._links, {}
            yield worker_pb2.StepFrame(
                incarnation=self._incarnation,
                deltas=[
                    message for request_id, news in pending.items() for message in news.messages(request_id)
                ],
                links=links.values(),
            )

    def _news(self, request_id: str) -> _News:
        return self._pending.setdefault(request_id, _News())
