"""What the router has answered so far, and how long that took. Counted per request, and per message of a stream: never
per token.
"""

from __future__ import annotations

import time
from collections import Counter

from headrace.rpc.v1 import worker_pb2
from headrace.sampling_params import FinishReason
from headrace.telemetry import SECONDS, TOKENS, Distribution
from router.request_run import Progress, Update

OK, CANCELLED = "ok", "cancelled"

# In vLLM's words.
FINISHED_REASONS = ("stop", "length", "abort", "error")
# Where a request's time goes, in order. The transfer lies within the two around it.
PHASES = ("admission", "placement", "queue", "prefill", "transfer", "decode")


class Tally:
    """Requests that were let in and have ended. What was produced counts, whether or not the answer got to its end.
    Outcomes are "ok", "cancelled" (the client left) or the code of an error.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()  # of all choices
        self.finished: Counter[str] = Counter()  # by FINISHED_REASONS
        self.cached_tokens = 0  # of prompts, as workers reported
        self.redispatches = 0
        self.progressed_at = 0.0  # when the last message came from any worker, on `time.monotonic`
        # All but the first two are of requests that ended well.
        self.ttft = Distribution(SECONDS)
        self.inter_token = Distribution(SECONDS)
        self.e2e = Distribution(SECONDS)
        self.per_output_token = Distribution(SECONDS)  # a request's mean
        self.queue = Distribution(SECONDS)  # from arrival until the prompt is computed
        self.prefill = Distribution(SECONDS)
        self.decode = Distribution(SECONDS)
        self.inference = Distribution(SECONDS)
        self.prompt_lengths = Distribution(TOKENS)
        self.output_lengths = Distribution(TOKENS)
        self.phases = {phase: Distribution(SECONDS) for phase in PHASES}

    def begin(self) -> Passing:
        return Passing(self)

    def ended(self, outcome: str, passing: Passing, progress: Progress, prompt_tokens: int) -> None:
        self.requests[outcome] += 1
        self.prompt_tokens[outcome] += prompt_tokens
        self.output_tokens[outcome] += progress.num_output_tokens
        self.finished[passing.finished_reason(outcome)] += 1
        self.redispatches += max(0, progress.num_dispatches - 1)
        if progress.first_token_at:
            self.ttft.add(progress.first_token_at - progress.arrived_at)
        if outcome == OK and passing.end is not None:
            # A worker that went on after another's loss may have found tokens of the answer in its cache, too.
            self.cached_tokens += min(passing.end.cached_tokens, prompt_tokens)
            self.prompt_lengths.add(prompt_tokens)
            self.output_lengths.add(progress.num_output_tokens)
            self._add_times(progress, passing.end)

    def _add_times(self, progress: Progress, end: worker_pb2.SequenceEnd) -> None:
        waited_s = progress.planned_at - progress.arrived_at
        decode_s = progress.ended_at - progress.first_token_at
        self.e2e.add(progress.ended_at - progress.arrived_at)
        self.queue.add(waited_s + end.queue_s)
        self.prefill.add(end.prefill_s)
        self.decode.add(decode_s)
        self.inference.add(progress.ended_at - progress.planned_at - end.queue_s)
        if end.decode_tokens:
            self.per_output_token.add(end.decode_s / end.decode_tokens)
        seconds = (
            progress.admitted_at - progress.arrived_at,
            progress.planned_at - progress.admitted_at,
            end.queue_s,
            end.prefill_s,
            end.transfer_s,
            decode_s,
        )
        for distribution, value in zip(self.phases.values(), seconds, strict=True):
            distribution.add(value)


class Passing:
    """One request's updates, as they pass."""

    def __init__(self, tally: Tally) -> None:
        self.end: worker_pb2.SequenceEnd | None = None
        self._tally = tally
        self._last_at: dict[int, float] = {}  # by choice
        self._reason = FinishReason.STOP

    def note(self, update: Update) -> None:
        """The tokens of one message share the time since the one before."""
        now = self._tally.progressed_at = time.monotonic()
        num_tokens = len(update.token_ids)
        if num_tokens:
            last_at = self._last_at.get(update.choice)
            if last_at is not None:
                self._tally.inter_token.add((now - last_at) / num_tokens, num_tokens)
            self._last_at[update.choice] = now
        if update.finish_reason is FinishReason.LENGTH:
            self._reason = FinishReason.LENGTH
        if update.end is not None:
            self.end = update.end

    def finished_reason(self, outcome: str) -> str:
        if outcome == OK:
            return self._reason.value
        return "abort" if outcome == CANCELLED else "error"
