"""What becomes of one prompt, told to logs, traces and metrics as it happens."""

from __future__ import annotations

import time

import structlog

from headrace.errors import HeadraceError
from headrace.rpc.v1 import kv_pb2
from headrace.telemetry import WorkerTelemetry

log = structlog.get_logger()


class PromptTiming:
    """Made when the prompt arrives, in the task that serves it; `close` at its end."""

    def __init__(self, telemetry: WorkerTelemetry, request: kv_pb2.PrefillRequest) -> None:
        structlog.contextvars.bind_contextvars(
            request_id=request.label or request.request_id, id=request.request_id, lease=request.lease_id
        )
        self._num_tokens = len(request.token_ids)
        self._cached_tokens = 0
        self._telemetry = telemetry
        self._since_s = self._arrived_s = time.monotonic()
        self._phase = "queue"  # the one that goes on; "": the first token is there
        self._outcome = "cancelled"
        self._span = telemetry.tracing.begin(
            "prefill_worker",
            request.traceparent,
            self._since_s,
            id=request.request_id,
            lease=request.lease_id,
        )

    def note(self, event: kv_pb2.PrefillEvent) -> None:
        """Before it is sent."""
        kind = event.WhichOneof("event")
        if kind == "started" and self._phase == "queue":
            self._cached_tokens = event.started.cached_tokens
            self._end_phase("prefill")
        elif kind == "first_token" and self._phase:
            self._end_phase("")
            self._outcome = "ok"

    def failed(self, error: HeadraceError) -> None:
        self._outcome = error.code
        self._span.fail(str(error))

    def close(self) -> None:
        self._span.note(
            outcome=self._outcome, prompt_tokens=self._num_tokens, cached_tokens=self._cached_tokens
        )
        self._span.end()
        log.info(
            "prompt ended",
            outcome=self._outcome,
            prompt_tokens=self._num_tokens,
            cached_tokens=self._cached_tokens,
            seconds=round(time.monotonic() - self._arrived_s, 4),
        )

    def _end_phase(self, following: str) -> None:
        now = time.monotonic()
        self._telemetry.phases[self._phase].add(now - self._since_s)
        self._span.phase(self._phase, self._since_s, now)
        self._phase, self._since_s = following, now
