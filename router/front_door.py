"""What every entrance does with a request: who asks, what is asked, run it, count it, log its end. The entrances
themselves (gRPC, HTTP) convert messages and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from headrace.errors import HeadraceError, InvalidRequest
from headrace.rpc.v1 import inference_pb2
from headrace.tracing import Tracing
from router.callers import Anyone, Callers
from router.dispatch import Dispatcher
from router.recent import RecentAnswers
from router.request_run import Progress, Update
from router.requests import GenerationRequest, RequestParser
from router.tally import CANCELLED, OK, Tally

log = structlog.get_logger()


class Generation:
    """A request that was let in. Use `updates` once."""

    def __init__(
        self,
        request: GenerationRequest,
        progress: Progress,
        dispatcher: Dispatcher,
        tally: Tally,
        recent: RecentAnswers,
    ) -> None:
        self.request = request
        self.progress = progress
        self._dispatcher = dispatcher
        self._tally = tally
        self._recent = recent

    async def updates(self) -> AsyncGenerator[Update]:
        """Until all choices have ended. Raises HeadraceError. Closing the iterator cancels the request."""
        outcome = CANCELLED
        passing = self._tally.begin()
        try:
            async with aclosing(self._dispatcher.generate(self.request, self.progress)) as updates:
                async for update in updates:
                    passing.note(update)
                    self._recent.num_output_tokens += len(update.token_ids)
                    if update.end is not None:
                        self._recent.ended(self.progress, update.end, len(self.request.token_ids))
                    yield update
            outcome = OK
        except HeadraceError as error:
            outcome = error.code
            self.progress.span.fail(_public(error))
            raise
        finally:
            self._tally.ended(outcome, passing, self.progress, len(self.request.token_ids))
            self._end_span(outcome)
            self._log_end(outcome)

    def _end_span(self, outcome: str) -> None:
        names = {
            "outcome": outcome,
            "gen_ai.usage.input_tokens": len(self.request.token_ids),
            "gen_ai.usage.output_tokens": self.progress.num_output_tokens,
        }
        self.progress.span.note(**names)
        self.progress.span.end()

    def _log_end(self, outcome: str) -> None:
        log.info(
            "request ended",
            request_id=self.request.label,
            id=self.request.id,
            tenant=self.request.tenant,
            outcome=outcome,
            prompt_tokens=len(self.request.token_ids),
            output_tokens=self.progress.num_output_tokens,
            dispatches=self.progress.num_dispatches,
            seconds=round(time.monotonic() - self.progress.arrived_at, 4),
        )


def _public(error: HeadraceError) -> str:
    """Without what the caller wrote: nothing of a prompt goes where traces are kept."""
    return f"{error.field}: {error.requirement}" if isinstance(error, InvalidRequest) else str(error)


class FrontDoor:
    """One per router, shared by its entrances."""

    def __init__(
        self,
        parser: RequestParser,
        dispatcher: Dispatcher,
        default_timeout_s: float,
        callers: Callers | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.parser = parser
        self.dispatcher = dispatcher
        self.tally = Tally()
        self.recent = RecentAnswers()
        self.callers = callers or Anyone()
        self._tracing = tracing or Tracing()
        self._default_timeout_s = default_timeout_s

    async def accepted(
        self, message: inference_pb2.GenerateRequest, authorization: str, timeout_s: float | None
    ) -> Generation:
        """`timeout_s`: what is left of the client's own deadline, None if it set none. The entrance has bound the
        client's trace context, if there is one, for log lines. Raises HeadraceError.
        """
        progress = Progress()
        caller = await self.callers.caller(authorization)
        limit_s = self._default_timeout_s if timeout_s is None else timeout_s
        traceparent = structlog.contextvars.get_contextvars().get("traceparent", "")
        progress.span = self._tracing.begin("Generate", traceparent, progress.arrived_at)
        try:
            request = await self.parser.generation(message, limit_s, caller)
        except HeadraceError as error:
            progress.span.fail(_public(error))
            progress.span.end()
            raise
        progress.span.note(request_id=request.label, id=request.id)
        return Generation(request, progress, self.dispatcher, self.tally, self.recent)
