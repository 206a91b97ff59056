"""The life of one request on the decode worker that owns it.

    arrived ─┬─▶ hand-off to a prefill worker ─▶ adopted ─▶ decoding ─▶ ended
             │        └ failed: the next one ─ … ─┐
             └─▶ prefilled here ◀─────────────────┘ ─▶ decoding ─▶ ended

Every token of every choice is delivered once, whichever attempt produced it: a later one starts from prompt plus
what was delivered, by this worker or by one before it that died. Choices that have first tokens differ, and so can not
share one more hand-off: when it fails then, each that is not over goes on here by itself, and finds in the prefix cache
what another has computed of the prompt.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace

import structlog

from decode_worker.hand_off import DecodeContext, HandOff, PrefillTask, is_worth_retrying
from decode_worker.pace import Pace
from decode_worker.session import End, HandOffReport, Session
from headrace.block_hash import extend
from headrace.clock import Deadline
from headrace.engine.sequence import Event, Failed, NewToken, PromptLogprobs, Sequence, Started, finish_reason
from headrace.errors import Code, HeadraceError, InvalidRequest, PeerError, TransferFailed
from headrace.rpc.convert import logprobs_to_proto, prompt_logprobs_to_proto, sampling_from_proto
from headrace.rpc.v1 import inference_pb2, kv_pb2, worker_pb2
from headrace.sampling_params import FinishReason

log = structlog.get_logger()


class Request:
    """`run` once, as a task; cancel the task to abort."""

    def __init__(self, context: DecodeContext, start: worker_pb2.StartRequest, session: Session) -> None:
        self._context = context
        self._start = start
        self._session = session
        self._num_choices = start.sampling.n
        self._outputs: defaultdict[int, list[int]] = defaultdict(list)  # delivered, by choice
        self._over: set[int] = set()  # choices
        for delivered in start.delivered:
            self._outputs[delivered.choice] += delivered.token_ids
            if delivered.finished:
                self._over.add(delivered.choice)
        self._num_prompt_logprobs = 0  # delivered by this worker
        self._sequence_ids: list[str] = []  # of the attempt under way
        self._root = context.root_digest(start.cache_salt)
        self._report = HandOffReport()
        num_delivered = sum(len(delivered.token_ids) for delivered in start.delivered)
        self._pace = Pace(context.batch, len(start.token_ids) + num_delivered)
        self._num_failed_attempts = 0
        self._arrived_s = context.batch.clock.now()
        self._adopted_s = 0.0  # when its KV had come from elsewhere
        self._span = context.telemetry.tracing.begin(
            "decode_worker", start.traceparent, self._arrived_s, id=start.request_id
        )
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Deliver the answers to the session, and the request's end whatever happens."""
        structlog.contextvars.bind_contextvars(
            request_id=self._start.label or self._start.request_id, id=self._start.request_id
        )
        end = End(error_code=Code.INTERNAL, error_message="unexpected error, see the worker's log")
        try:
            self._deadline = Deadline.after(self._start.timeout_s, self._context.reads.clock)
            async with asyncio.timeout(self._start.timeout_s):
                self._sampling = sampling_from_proto(self._start.sampling)
                await self._answer()
                end = End()
        except TimeoutError:
            end = End(error_code=Code.DEADLINE_EXCEEDED, error_message="the request's deadline passed")
        except asyncio.CancelledError:
            end = End(error_code=Code.CANCELLED, error_message="cancelled")
        except HeadraceError as error:
            field = error.field if isinstance(error, InvalidRequest | PeerError) else ""
            end = End(error_code=error.code, error_message=str(error), error_field=field)
        except Exception:  # one request fails, the worker goes on
            log.exception("request failed")
        finally:
            self._report.failed_attempts = self._num_failed_attempts
            self._pace.close()
            self._session.add_end(self._start.request_id, end, self._report, self._pace.times)
            self._session.flush()
            self._tell_end(end)

    def abort_choice(self, choice: int) -> None:
        """Stop one choice, without a finish reason; nothing for one that is unknown or over."""
        if choice >= self._num_choices or choice in self._over:
            return
        for sequence_id in self._sequence_ids:
            self._context.engine.post(lambda engine, owner=sequence_id: engine.abort(owner, choice))
        self._end_choice(choice)

    def _tell_end(self, end: End) -> None:
        outcome, now = end.error_code or "ok", self._context.batch.clock.now()
        self._end_span(end, outcome, now)
        if not end.error_code:
            self._add_times()
        log.info(
            "request ended",
            outcome=outcome,
            prefill_worker=self._report.prefill_worker,
            cached_tokens=self._report.cached_tokens,
            output_tokens=sum(map(len, self._outputs.values())),
            failed_attempts=self._num_failed_attempts,
            seconds=round(now - self._arrived_s, 4),
        )

    def _end_span(self, end: End, outcome: str, now_s: float) -> None:
        pace, span = self._pace, self._span
        if not self._report.prefill_worker and pace.started_at_s:
            span.phase("queue", pace.asked_at_s, pace.started_at_s)
            span.phase("prefill", pace.started_at_s, pace.first_token_at_s or now_s)
        if pace.first_token_at_s:
            span.phase("decode", max(self._adopted_s, pace.first_token_at_s), now_s)
        span.note(outcome=outcome, cached_tokens=self._report.cached_tokens)
        if end.error_code and end.error_code != Code.CANCELLED:
            span.fail(end.error_message)
        span.end()

    def _add_times(self) -> None:
        phases, times = self._context.telemetry.phases, self._pace.times
        if self._report.prefill_worker:
            phases["transfer"].add(self._report.transfer_s)
        else:
            phases["queue"].add(times.queue_s)
            phases["prefill"].add(times.prefill_s)
        phases["decode"].add(times.decode_s)
        if times.decode_tokens:
            self._context.telemetry.inter_token.add(times.decode_s / times.decode_tokens, times.decode_tokens)

    async def _answer(self) -> None:
        self._check_delivered()
        if (
            self._start.prefill_workers
            and await self._num_uncached_tokens() >= self._context.reads.kv.min_remote_tokens
        ):
            for ref in self._start.prefill_workers:
                if self._has_split:
                    break
                try:
                    await self._through(ref)
                    return
                except _AttemptFailed as failure:
                    self._num_failed_attempts += 1
                    log.warning(
                        "hand-off failed",
                        prefill_worker=ref.worker_id,
                        error=str(failure.cause),
                    )
        await self._locally()

    def _check_delivered(self) -> None:
        choices = {*self._outputs, *self._over}
        if choices and max(choices) >= self._num_choices:
            raise InvalidRequest("delivered.choice", max(choices), f"must be below n, {self._num_choices}")
        if len(self._over) == self._num_choices:
            raise InvalidRequest("delivered.finished", len(self._over), "some choice must be left to go on")

    async def _through(self, ref: worker_pb2.PeerRef) -> None:
        """Answer with the prompt computed by `ref`. Raises _AttemptFailed when something else is worth trying."""
        [sequence] = self._new_sequences()
        span = self._span.child("hand_off", prefill_worker=ref.worker_id)
        task = PrefillTask(sequence, self._start, span, self._deadline, self._pace, self._on_prompt_logprobs)
        hand_off = HandOff(self._context, ref, task)
        self._report = hand_off.report  # from now on: an abort asks for what was done so far

        def on_event(event: Event) -> None:
            if not hand_off.on_engine_event(event):
                self._on_event(event)

        with self._context.engine.subscribed(sequence.id, on_event):
            try:
                await hand_off.run(self._on_first_token, self._going_on)
                self._adopted_s = self._context.batch.clock.now()
            except HeadraceError as error:
                span.fail(str(error))
                self._report = HandOffReport()
                if is_worth_retrying(error):
                    raise _AttemptFailed(error) from None
                raise
            finally:
                span.end()
            await self._until_finished()

    async def _locally(self) -> None:
        sequences = self._new_sequences()
        if not self._num_failed_attempts:  # what named the sources may be what failed
            await self._fetch_prefix()
        self._pace.asked()
        with ExitStack() as subscriptions:
            for sequence in sequences:
                subscriptions.enter_context(self._context.engine.subscribed(sequence.id, self._on_event))
            await self._until_finished(*sequences)

    async def _fetch_prefix(self) -> None:
        fetched = await self._context.fetcher.fetch(
            self._start.sources, self._root, self._hashes(), self._deadline
        )
        self._report.blocks_moved, self._report.bytes_moved = fetched.num_blocks, fetched.bytes
        self._report.transfer_s = fetched.seconds

    async def _until_finished(self, *to_submit: Sequence) -> None:
        try:
            for sequence in to_submit:
                await self._context.engine.submit(sequence)
            await self._finished
        finally:
            for sequence_id in self._sequence_ids:
                self._context.engine.post(lambda engine, owner=sequence_id: engine.abort(owner))

    @property
    def _has_split(self) -> bool:
        """Whether some of several choices have tokens, so that one sequence can not stand for all."""
        return self._num_choices > 1 and self._has_tokens

    @property
    def _has_tokens(self) -> bool:
        return any(self._outputs.values())

    def _new_sequences(self) -> list[Sequence]:
        """A new attempt, from all tokens known so far: one sequence for all choices, or one for each that goes on."""
        groups = [range(self._num_choices)]
        if self._has_split:
            groups = [range(c, c + 1) for c in groups[0] if c not in self._over]
        sampling = self._sampling
        if self._has_tokens:  # those of the prompt came before them
            sampling = replace(sampling, prompt_logprobs=None)
        sequences = [
            Sequence(
                id=f"{self._start.request_id}/{self._num_failed_attempts}/{choices.start}",
                token_ids=[*self._start.token_ids, *self._outputs[choices.start]],
                num_prompt_tokens=len(self._start.token_ids),
                sampling=sampling,
                root=self._root,
                origin=self._start.router_id,
                priority=self._start.priority,
                choices=choices,
            )
            for choices in groups
        ]
        self._sequence_ids = [sequence.id for sequence in sequences]
        return sequences

    async def _num_uncached_tokens(self) -> int:
        if self._sampling.prompt_logprobs is not None and not self._has_tokens:
            return len(self._common_token_ids)  # for these the whole prompt is computed
        hashes = self._hashes()
        num_blocks = await self._context.engine.call(lambda engine: engine.num_cached_blocks(hashes))
        return len(self._common_token_ids) - num_blocks * self._context.block_size_tokens

    def _hashes(self) -> list[bytes]:
        """Of the full blocks of what the request came with."""
        return extend(self._root, self._common_token_ids, self._context.block_size_tokens)

    @property
    def _common_token_ids(self) -> list[int]:
        """What all choices begin with."""
        if self._num_choices > 1:
            return list(self._start.token_ids)
        return [*self._start.token_ids, *self._outputs[0]]

    def _on_first_token(self, token: kv_pb2.FirstToken) -> None:
        """The prefill worker's token, outside any step of our engine: sent on at once."""
        num_output = len(self._outputs[token.choice]) + 1
        reason = finish_reason(self._sampling, token.token_id, num_output, self._context.eos_token_ids)
        logprobs = token.logprobs if token.HasField("logprobs") else None
        self._deliver(token.choice, token.token_id, logprobs, reason)
        self._session.flush()

    def _on_prompt_logprobs(self, news: worker_pb2.PromptLogprobs) -> None:
        """What an earlier attempt has delivered is left out."""
        num_known = news.first_index - 1 + len(news.entries)
        num_old = self._num_prompt_logprobs - (news.first_index - 1)
        asked = self._sampling.prompt_logprobs is not None
        if not asked or num_old < 0 or num_known >= len(self._start.token_ids):
            raise TransferFailed(
                f"log-probabilities of prompt tokens {news.first_index}..{num_known} do not fit"
            )
        if num_known > self._num_prompt_logprobs:
            self._session.add_prompt_logprobs(
                self._start.request_id, self._num_prompt_logprobs + 1, news.entries[num_old:]
            )
            self._num_prompt_logprobs = num_known

    def _going_on(self) -> dict[int, int]:
        """The last token of each choice that is not over, by choice."""
        return {
            choice: output[-1]
            for choice, output in self._outputs.items()
            if output and choice not in self._over
        }

    def _on_event(self, event: Event) -> None:
        match event:
            case NewToken():
                logprobs = event.logprobs and logprobs_to_proto(event.logprobs)
                self._deliver(event.choice, event.token_id, logprobs, event.finish_reason)
            case PromptLogprobs():
                self._on_prompt_logprobs(prompt_logprobs_to_proto(event.first_index, event.entries))
            case Started() if event.sequence_id == self._sequence_ids[0]:
                self._report.cached_tokens = event.num_cached_tokens
                self._pace.started(event.num_cached_tokens)
            case Failed() if not self._finished.done():
                self._finished.set_exception(event.error)
            case _:
                pass

    def _deliver(
        self,
        choice: int,
        token_id: int,
        logprobs: inference_pb2.TokenLogprobs | None,
        reason: FinishReason | None,
    ) -> None:
        if choice in self._over:
            return  # aborted while the step ran
        self._outputs[choice].append(token_id)
        self._pace.token(choice)
        self._session.add_token(self._start.request_id, choice, token_id, logprobs)
        if reason is not None:
            self._session.add_choice_end(self._start.request_id, choice, reason)
            self._end_choice(choice)

    def _end_choice(self, choice: int) -> None:
        self._over.add(choice)
        self._pace.choice_over(choice)
        if len(self._over) == self._num_choices and not self._finished.done():
            self._finished.set_result(None)


class _AttemptFailed(Exception):  # control flow within this module
    def __init__(self, cause: HeadraceError) -> None:
        self.cause = cause
