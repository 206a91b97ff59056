"""One request on its way through the fleet, and the only owner of what was delivered so far.

    PLACING ─▶ WAITING (for the first token) ─▶ STREAMING ─▶ ENDED
                   │ worker lost                   │ worker lost
                   └───────────▶ RE_DISPATCHING ◀──┘   prompt and tokens so far to another decode worker, then WAITING

Cancelled while placing or re-dispatching: no worker has it. While waiting or streaming: aborted at its worker.

The way of the text, for each choice: token ids ─▶ bytes ─▶ whole characters ─▶ stop strings ─▶ update. It does not
notice a re-dispatch: the next worker's tokens follow those before. The draw depends on seed, choice and position only,
and the request has its seed from the beginning, so the tokens are those that the lost worker would have sent.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import structlog

from headrace.clock import Deadline, SystemClock
from headrace.errors import Code, DeadlineExceeded, HeadraceError, InternalError, Unavailable
from headrace.rpc.v1 import inference_pb2, worker_pb2
from headrace.sampling_params import FinishReason
from headrace.tokenizer import IncrementalDetokenizer, Tokenizer
from headrace.tracing import Span
from router.ledger import Charge
from router.policy.views import Plan
from router.requests import GenerationRequest
from router.sessions import AnswerStream, ChoiceDelta, Delta, WorkerSession

log = structlog.get_logger()

MAX_DISPATCHES = 3  # of one request
_END_TIMEOUT_S = 2.0
_DEADLINE_GRACE_S = 1.0  # the worker ends the request by its deadline; here only when it does not
# A worker that says so is on its way out; nobody here asked it to stop.
_LEAVING = {Code.UNAVAILABLE, Code.CANCELLED}


class Phase(Enum):
    PLACING = auto()
    WAITING = auto()
    STREAMING = auto()
    RE_DISPATCHING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Update:
    """New text and tokens of one choice. Its last one has `finish_reason`; the last of all choices has `end`. The first
    ones may have `prompt_logprobs` alone.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[inference_pb2.TokenLogprobs]  # one for each token, where asked for
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = (
        None  # which of the request's own stop token ids or strings ended the choice
    )
    prompt_logprobs: worker_pb2.PromptLogprobs | None = None
    end: worker_pb2.SequenceEnd | None = None


@dataclass(slots=True)
class Progress:
    """Times of one request on this process's monotonic clock, and what was produced."""

    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    planned_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_output_tokens: int = 0
    num_dispatches: int = 0
    plan: Plan | None = None  # the last one
    explanation: inference_pb2.RoutingPlan | None = None  # of it, where asked for
    span: Span = field(default_factory=Span)


@dataclass(slots=True)
class ChoiceSoFar:
    """One answer: all tokens that were given out, and the text that is not."""

    text: IncrementalDetokenizer
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True)
class Dispatch:
    """The request at one decode worker. `close` takes back whatever is still there or charged."""

    plan: Plan
    session: WorkerSession
    stream: AnswerStream
    charge: Charge
    resources: ExitStack
    span: Span

    def give_up(self) -> None:
        self.session.abort(self.stream.request_id)
        self.stream.give_up(DeadlineExceeded("the request's deadline passed, and its worker is silent"))

    def close(self) -> None:
        if not self.stream.ended:
            self.session.abort(self.stream.request_id)
        self.session.forget(self.stream.request_id)
        self.stream.close()
        self.resources.close()
        self.span.end()


class Fleet(Protocol):
    """What a run needs of the dispatcher."""

    async def place(self, run: RequestRun) -> Dispatch:
        """Start the request, from where it is, at a decode worker that answers. Raises HeadraceError."""
        ...

    def may_retry(self) -> bool: ...

    def report(self, plan: Plan, end: worker_pb2.SequenceEnd) -> None:
        """How a dispatch ended, by its worker's own word."""
        ...


class RequestRun:
    """`advance` until `phase` is ENDED, then `close`, or `close` earlier to cancel."""

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, fleet: Fleet, progress: Progress
    ) -> None:
        self.request = request
        self.phase = Phase.PLACING
        self.deadline = Deadline.after(request.timeout_s, SystemClock())
        self.choices = [
            ChoiceSoFar(
                IncrementalDetokenizer(tokenizer, request.sampling.stop_strings, request.shown_token_ids)
            )
            for _ in range(request.sampling.n)
        ]
        self.progress = progress
        self.num_prompt_logprobs = 0  # given out
        self.failed_at: set[str] = set()  # incarnations of decode workers
        self._fleet = fleet
        self._dispatch: Dispatch | None = None

    @property
    def token_ids(self) -> list[int]:
        """What a worker that goes on has to compute before the next token, of all choices."""
        if len(self.choices) > 1:
            return self.request.token_ids
        return [*self.request.token_ids, *self.choices[0].token_ids]

    @property
    def has_tokens(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    async def advance(self) -> list[Update]:
        """Wait for what comes next. Raises HeadraceError when the request is over without success."""
        if self._dispatch is None:
            self._dispatch = await self._fleet.place(self)
            self._note_dispatch(self._dispatch)
        dispatch = self._dispatch
        try:
            delta = await dispatch.stream.next()
        except HeadraceError as error:
            self._on_failure(dispatch, error)
            return []
        return await self._on_delta(dispatch, delta)

    def close(self) -> None:
        """Whatever the phase: leave nothing behind at a worker or in the ledger."""
        self.phase = Phase.ENDED
        if self._dispatch is not None:
            self._dispatch.close()
            self._dispatch = None

    def _note_dispatch(self, dispatch: Dispatch) -> None:
        self.phase = Phase.WAITING
        limit_s = self.deadline.remaining_s() + _DEADLINE_GRACE_S
        timer = asyncio.get_running_loop().call_later(limit_s, dispatch.give_up)
        dispatch.resources.callback(timer.cancel)
        self.progress.plan = dispatch.plan
        self.progress.num_dispatches += 1
        self.progress.planned_at = self.progress.planned_at or time.monotonic()

    def _on_failure(self, dispatch: Dispatch, error: HeadraceError) -> None:
        """Go on elsewhere, or raise the error."""
        dispatch.span.fail(str(error))
        if error.code not in _LEAVING:
            raise error
        if self.progress.num_dispatches >= MAX_DISPATCHES:
            raise Unavailable(f"given up after {MAX_DISPATCHES} decode workers; the last one: {error}", 1.0)
        if not self._fleet.may_retry():
            raise Unavailable(f"too many requests have lost their worker; this one's: {error}", 1.0)
        log.warning(
            "request goes on elsewhere",
            request_id=self.request.label,
            id=self.request.id,
            lost=dispatch.plan.decode.worker_id,
            phase=self.phase.name,
            tokens=self.progress.num_output_tokens,
            error=str(error),
        )
        self.phase = Phase.RE_DISPATCHING
        self.failed_at.add(dispatch.plan.decode.incarnation)
        dispatch.close()
        self._dispatch = None

    async def _on_delta(self, dispatch: Dispatch, delta: Delta) -> list[Update]:
        if delta.choices:
            self._note_token(dispatch)
        updates = self._of_prompt(delta.prompt_logprobs) + [
            self._update(dispatch, number, news)
            for number, news in delta.choices.items()
            if not self.choices[number].is_over  # a stop string ended it, and the worker did not know yet
        ]
        left = [number for number, choice in enumerate(self.choices) if not choice.is_over]
        if left:
            for update in updates:
                if update.finish_reason is not None and delta.choices[update.choice].finish_reason is None:
                    dispatch.session.abort(dispatch.stream.request_id, update.choice)
        if not left:
            end = delta.end or await _end_of(dispatch, abort=any(c.text.stopped for c in self.choices))
            self._fleet.report(dispatch.plan, end)
            updates[-1].end = end
            self.progress.ended_at = time.monotonic()
            self.phase = Phase.ENDED
        elif delta.end is not None:
            raise InternalError(f"the worker ended the request, but not its choices {left}")
        return updates

    def _note_token(self, dispatch: Dispatch) -> None:
        if self.phase is Phase.WAITING:
            self.phase = Phase.STREAMING
            dispatch.charge.prefilled()
        self.progress.first_token_at = self.progress.first_token_at or time.monotonic()

    def _of_prompt(self, news: worker_pb2.PromptLogprobs | None) -> list[Update]:
        """Without what an earlier dispatch has brought."""
        if news is None:
            return []
        num_old = self.num_prompt_logprobs + 1 - news.first_index
        if num_old < 0:
            raise InternalError(
                f"log-probabilities of the prompt are missing before token {news.first_index}"
            )
        entries = news.entries[num_old:]
        if not entries:
            return []
        first_index = self.num_prompt_logprobs + 1
        self.num_prompt_logprobs += len(entries)
        fresh = worker_pb2.PromptLogprobs(first_index=first_index, entries=entries)
        return [Update(0, "", [], [], prompt_logprobs=fresh)]

    def _matched_stop(self, choice: ChoiceSoFar) -> int | str | None:
        """None: the model ended the answer by itself."""
        if choice.text.matched_stop is not None:
            return choice.text.matched_stop
        last = choice.token_ids[-1:]
        return last[0] if last and last[0] in self.request.sampling.stop_token_ids else None

    def _update(self, dispatch: Dispatch, number: int, news: ChoiceDelta) -> Update:
        choice = self.choices[number]
        token_ids, piece = _push(choice.text, news.token_ids)
        reason = news.finish_reason
        if choice.text.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            piece += choice.text.finish()
        choice.token_ids += token_ids
        self.progress.num_output_tokens += len(token_ids)
        dispatch.charge.generated(len(token_ids))
        choice.is_over = reason is not None
        matched = self._matched_stop(choice) if reason is FinishReason.STOP else None
        return Update(number, piece, token_ids, news.logprobs[: len(token_ids)], reason, matched)


def _push(text: IncrementalDetokenizer, token_ids: list[int]) -> tuple[list[int], str]:
    """Tokens up to the one that completed a stop string, and the text they released."""
    if not text.can_stop:
        return token_ids, text.push(token_ids)
    pieces: list[str] = []
    for position, token_id in enumerate(token_ids, start=1):
        pieces.append(text.push([token_id]))
        if text.stopped:
            return token_ids[:position], "".join(pieces)
    return token_ids, "".join(pieces)


async def _end_of(dispatch: Dispatch, *, abort: bool) -> worker_pb2.SequenceEnd:
    """The answers are whole, and the worker's report is to follow. `abort`: it does not know that they are."""
    if abort:
        dispatch.session.abort(dispatch.stream.request_id)
    delta = Delta()
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            while delta.end is None:
                delta = await dispatch.stream.take()
    except (TimeoutError, HeadraceError):
        return worker_pb2.SequenceEnd()  # the answers are whole without it
    return delta.end
