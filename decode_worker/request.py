"""The life of one request on the decode worker that owns it.

    arrived ─┬─▶ hand-off to a prefill worker ─▶ adopted ─▶ decoding ─▶ ended
             │        └ failed: the next one ─ … ─┐
             └─▶ prefilled here ◀─────────────────┘ ─▶ decoding ─▶ ended

Every token is delivered once, whichever attempt produced it: a later one starts from prompt plus what was delivered.
"""

from __future__ import annotations

import asyncio

import structlog

from decode_worker.hand_off import DecodeContext, HandOff, PrefillTask, is_worth_retrying
from decode_worker.session import End, HandOffReport, Session
from headrace.block_hash import extend
from headrace.clock import Deadline
from headrace.engine.sequence import Event, Failed, NewToken, Sequence, Started, finish_reason
from headrace.errors import Code, HeadraceError
from headrace.rpc.convert import logprobs_to_proto, sampling_from_proto
from headrace.rpc.v1 import inference_pb2, kv_pb2, worker_pb2
from headrace.sampling_params import FinishReason

log = structlog.get_logger()


class Request:
    """`run` once, as a task; cancel the task to abort."""

    def __init__(self, context: DecodeContext, start: worker_pb2.StartRequest, session: Session) -> None:
        self._context = context
        self._start = start
        self._session = session
        self._token_ids = [*start.token_ids, *start.delivered_token_ids]
        self._root = context.root_digest(start.cache_salt)
        self._deadline = Deadline.after(start.timeout_s, context.reads.clock)
        self._report = HandOffReport()
        self._num_failed_attempts = 0
        self._finished: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Deliver the answer to the session, and its end whatever happens."""
        end = End(error_code=Code.INTERNAL, error_message="unexpected error, see the worker's log")
        try:
            async with asyncio.timeout(self._start.timeout_s):
                self._sampling = sampling_from_proto(self._start.sampling)
                end = End(finish_reason=await self._answer())
        except TimeoutError:
            end = End(error_code=Code.DEADLINE_EXCEEDED, error_message="the request's deadline passed")
        except asyncio.CancelledError:
            end = End(error_code=Code.CANCELLED, error_message="cancelled")
        except HeadraceError as error:
            end = End(error_code=error.code, error_message=str(error))
        except Exception:  # one request fails, the worker goes on
            log.exception("request failed", request_id=self._start.request_id)
        finally:
            self._report.failed_attempts = self._num_failed_attempts
            self._session.add_end(self._start.request_id, end, self._report)
            self._session.flush()

    async def _answer(self) -> FinishReason:
        if (
            self._start.prefill_workers
            and await self._num_uncached_tokens() >= self._context.reads.kv.min_remote_tokens
        ):
            for ref in self._start.prefill_workers:
                try:
                    return await self._through(ref)
                except _AttemptFailed as failure:
                    self._num_failed_attempts += 1
                    log.warning(
                        "hand-off failed",
                        request_id=self._start.request_id,
                        prefill_worker=ref.worker_id,
                        error=str(failure.cause),
                    )
        return await self._locally()

    async def _through(self, ref: worker_pb2.PeerRef) -> FinishReason:
        """Answer with the prompt computed by `ref`. Raises _AttemptFailed when something else is worth trying."""
        sequence = self._sequence()
        task = PrefillTask(sequence, self._start.cache_salt, self._deadline, list(self._start.sources))
        hand_off = HandOff(self._context, ref, task)

        def on_event(event: Event) -> None:
            if not hand_off.on_engine_event(event):
                self._on_event(event)

        with self._context.engine.subscribed(sequence.id, on_event):
            try:
                await hand_off.run(self._on_first_token)
            except HeadraceError as error:
                if is_worth_retrying(error):
                    raise _AttemptFailed(error) from None
                raise
            self._report = hand_off.report
            return await self._until_finished(sequence)

    async def _locally(self) -> FinishReason:
        sequence = self._sequence()
        if not self._num_failed_attempts:  # what named the sources may be what failed
            hashes = extend(self._root, self._token_ids, self._context.block_size_tokens)
            fetched = await self._context.fetcher.fetch(
                self._start.sources, self._root, hashes, self._deadline
            )
            self._report.blocks_moved, self._report.bytes_moved = fetched.num_blocks, fetched.bytes
            self._report.transfer_s = fetched.seconds
        with self._context.engine.subscribed(sequence.id, self._on_event):
            await self._context.engine.submit(sequence)
            return await self._until_finished(sequence)

    async def _until_finished(self, sequence: Sequence) -> FinishReason:
        try:
            return await self._finished
        finally:
            self._context.engine.post(
                lambda engine: engine.abort(sequence.id)
            )  # nothing, when it has finished

    def _sequence(self) -> Sequence:
        """A new attempt, from all tokens known so far."""
        return Sequence(
            id=f"{self._start.request_id}/{self._num_failed_attempts}",
            token_ids=list(self._token_ids),
            num_prompt_tokens=len(self._start.token_ids),
            sampling=self._sampling,
            root=self._root,
        )

    async def _num_uncached_tokens(self) -> int:
        block_size = self._context.block_size_tokens
        hashes = extend(self._root, self._token_ids, block_size)
        num_blocks = await self._context.engine.call(lambda engine: engine.num_cached_blocks(hashes))
        return len(self._token_ids) - num_blocks * block_size

    def _on_first_token(self, token: kv_pb2.FirstToken) -> bool:
        """The prefill worker's token, outside any step of our engine: sent on at once."""
        reason = self._deliver(token.token_id, token.logprobs if token.HasField("logprobs") else None)
        self._session.flush()
        if reason is not None:
            self._finished.set_result(reason)
        return reason is None

    def _on_event(self, event: Event) -> None:
        match event:
            case NewToken():
                self._deliver(event.token_id, event.logprobs and logprobs_to_proto(event.logprobs))
                if event.finish_reason is not None:
                    self._finished.set_result(event.finish_reason)
            case Started():
                self._report.cached_tokens = event.num_cached_tokens
            case Failed() if not self._finished.done():
                self._finished.set_exception(event.error)
            case _:
                pass

    def _deliver(self, token_id: int, logprobs: inference_pb2.TokenLogprobs | None) -> FinishReason | None:
        self._token_ids.append(token_id)
        self._session.add_token(self._start.request_id, token_id, logprobs)
        num_output = len(self._token_ids) - len(self._start.token_ids)
        return finish_reason(self._sampling, token_id, num_output, self._context.eos_token_ids)


class _AttemptFailed(Exception):  # control flow within this module
    def __init__(self, cause: HeadraceError) -> None:
        self.cause = cause
